"""The hardest few-shot episodes of an evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.contracts import EpisodeClassifier
from experiments.evaluation.few_shot import accuracies_of, configured_episodes
from experiments.look.page import Picture
from experiments.look.tiles import CLASS_COLORS, draw_tile, short, tile_axes
from experiments.look.view import Side, View
from experiments.reporting.run import describe_run, read_episodes, read_report
from experiments.reporting.style import INK, SMALL, new_figure

_EPISODES = 4
_QUERIES = 10
"""Queries of a class that are drawn, the wrong ones first."""
# In tiles: the name of a class, the gap between support and queries, the number of mistakes that
# are not drawn; and inches of a tile.
_NAME, _GAP, _MORE, _INCH = 2.6, 0.6, 1.0, 0.36
_OF_THE_CODE = ("version", "commit")
"""What a report states of the code, not of the run."""


def hard_episodes(view: View) -> Picture | None:
    """The episodes with the lowest accuracy; None where the evaluation has no episodes."""
    side, classifier = view.shown, view.protocol.episode_classifier
    if classifier is None:
        return None
    features, labels, names = *side.outputs[:2], side.images.class_names
    config: Any = vars(view.config)["evaluation"]
    episodes = configured_episodes(config, labels, shots=classifier.shots)
    accuracies = _stored_accuracies(view, classifier)
    if accuracies is None:
        accuracies = accuracies_of(classifier.predict(features, episodes))
    hardest = np.argsort(accuracies, kind="stable")[:_EPISODES]
    predictions = classifier.predict(features, episodes, hardest)
    title = f"The hardest {classifier.shots}-shot episodes"
    caption = (
        f"The hardest of {len(accuracies):,} episodes of {side.split} classes by "
        f"{classifier.name}; mean accuracy {100 * accuracies.mean():.1f} %. A row is a class: "
        "support images, then queries, the wrong ones first, with frame and number of the class "
        "that they were taken for; +3: three more wrong ones."
    )
    columns = min(2, len(hardest))
    lines = -(-len(hardest) // columns)
    _, ways, queries = episodes.query.shape
    width = _NAME + classifier.shots + _GAP + min(_QUERIES, queries) + _MORE
    size = (_INCH * width * columns + 0.3, (_INCH * ways + 0.35) * lines + 0.2)
    figure, listed = new_figure(*size, title=title, caption=caption), []
    for place, (number, predicted) in enumerate(zip(hardest.tolist(), predictions, strict=True)):
        support, query = episodes.support[number], episodes.query[number]
        classes = [names[labels[row]] for row in support[:, 0]]
        axes, right = figure.add_subplot(lines, columns, place + 1), 100 * accuracies[number]
        tile_axes(axes, width, ways, f"Episode {number}: {right:.0f} % of the queries right")
        for way, name in enumerate(classes):
            _draw_class(axes, side, (support[way], query[way], predicted[way]), way, name)
        listed.append(
            {
                "number": number,
                "accuracy": float(accuracies[number]),
                "classes": classes,
                "support": support.tolist(),
                "query": query.tolist(),
                "predictions": predicted.tolist(),
            }
        )
    numbers = {"mean_accuracy": float(accuracies.mean()), "episodes": listed}
    return Picture("episodes", title, caption, figure, numbers)


def _stored_accuracies(view: View, classifier: EpisodeClassifier) -> np.ndarray | None:
    """The accuracies of the run's report: float32 [E].

    None where there is no report, or one of another checkpoint, split or evaluation.
    """
    file = view.folder / "report.json"
    report = read_report(file) if file.exists() else None
    if report is None:
        return None
    shown = {"step": view.run.step, "split": view.shown.split}
    shown |= describe_run(view.config, view.protocol)
    if any(report.get(name) != shown[name] for name in shown if name not in _OF_THE_CODE):
        return None
    return read_episodes(view.folder).get(classifier.metric)


def _draw_class(axes: Axes, side: Side, drawn: tuple[np.ndarray, ...], way: int, name: str) -> None:
    """Draws a class: its support [K], its queries [Q], and their predictions [Q]."""
    support, query_rows, predictions = drawn
    y, colors = way + 0.5, CLASS_COLORS * (1 + max(way, predictions.max()) // len(CLASS_COLORS))
    bold: Any = {"weight": "bold", "va": "center"}
    middle: Any = {"va": "center", "c": INK}
    axes.text(0.4, y, f"{way + 1}", size=SMALL, ha="right", c=colors[way], **bold)
    axes.text(_NAME - 0.1, y, short(name, 14), size=7, ha="right", **middle)
    for place, image in enumerate(side.read(support)):
        draw_tile(axes, image, _NAME + place + 0.5, y, frame=colors[way])
    start = _NAME + len(support) + _GAP
    wrong = predictions != way
    order = np.argsort(~wrong, kind="stable")[:_QUERIES]
    if hidden := int(wrong.sum() - wrong[order].sum()):
        axes.text(start + len(order) + 0.1, y, f"+{hidden}", size=SMALL, ha="left", **middle)
    images = side.read(query_rows[order])
    for place, (query, image) in enumerate(zip(order, images, strict=True)):
        predicted, x = int(predictions[query]), start + place + 0.5
        frame = colors[predicted] if wrong[query] else None
        draw_tile(axes, image, x, y, frame=frame)
        if frame:
            box = {"facecolor": frame, "edgecolor": "none", "pad": 0.8}
            style: Any = {"size": 6, "ha": "center", "c": "white", "bbox": box, "zorder": 6}
            axes.text(x + 0.36, y - 0.34, f"{predicted + 1}", **style, **bold)
