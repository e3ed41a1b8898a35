"""The hardest few-shot episodes of an evaluation."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.contracts import EpisodeClassifier
from experiments.evaluation.hard_episodes import HardEpisode, hardest_episodes
from experiments.look.page import Picture
from experiments.look.tiles import CLASS_COLORS, draw_tile, short, tile_axes
from experiments.look.view import Side, View
from experiments.reporting.run import read_episodes, read_report
from experiments.reporting.style import INK, SMALL, new_figure
from experiments.restored import describe_run

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
    features, names = side.outputs.features, side.images.class_names
    episodes = classifier.episodes(side.outputs.labels)
    accuracies = _stored_accuracies(view, classifier)
    if accuracies is None:
        accuracies = classifier.accuracies(features, episodes)
    predict = partial(classifier.predictions, features, episodes)
    hardest = hardest_episodes(accuracies, episodes, predict, count=_EPISODES)
    title = f"The hardest {classifier.shots}-shot episodes"
    caption = (
        f"The hardest of {len(accuracies):,} episodes of {side.split} classes by "
        f"{classifier.name}; mean accuracy {100 * accuracies.mean():.1f} %. A row is a class: "
        "support images, then queries, the wrong ones first, with frame and number of the class "
        "that they were taken for; +3: three more wrong ones."
    )
    columns = min(2, len(hardest))
    lines = -(-len(hardest) // columns)
    ways, queries = hardest[0].query.shape
    width = _NAME + classifier.shots + _GAP + min(_QUERIES, queries) + _MORE
    size = (_INCH * width * columns + 0.3, (_INCH * ways + 0.35) * lines + 0.2)
    figure, listed = new_figure(*size, title=title, caption=caption), []
    for number, episode in enumerate(hardest):
        classes = [names[side.outputs.labels[row]] for row in episode.support[:, 0]]
        axes, right = figure.add_subplot(lines, columns, number + 1), 100 * episode.accuracy
        tile_axes(
            axes, width, ways, f"Episode {episode.number}: {right:.0f} % of the queries right"
        )
        for way, name in enumerate(classes):
            _draw_class(axes, side, episode, way, name)
        listed.append(
            {
                "number": episode.number,
                "accuracy": episode.accuracy,
                "classes": classes,
                "support": episode.support.tolist(),
                "query": episode.query.tolist(),
                "predictions": episode.predictions.tolist(),
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


def _draw_class(axes: Axes, side: Side, episode: HardEpisode, way: int, name: str) -> None:
    y, colors = way + 0.5, [CLASS_COLORS[w % len(CLASS_COLORS)] for w in range(len(episode.query))]
    bold: Any = {"weight": "bold", "va": "center"}
    middle: Any = {"va": "center", "c": INK}
    axes.text(0.4, y, f"{way + 1}", size=SMALL, ha="right", c=colors[way], **bold)
    axes.text(_NAME - 0.1, y, short(name, 14), size=7, ha="right", **middle)
    for place, image in enumerate(side.read(episode.support[way])):
        draw_tile(axes, image, _NAME + place + 0.5, y, frame=colors[way])
    start = _NAME + episode.support.shape[1] + _GAP
    wrong = episode.predictions[way] != way
    order = np.argsort(~wrong, kind="stable")[:_QUERIES]
    if hidden := int(wrong.sum() - wrong[order].sum()):
        axes.text(start + len(order) + 0.1, y, f"+{hidden}", size=SMALL, ha="left", **middle)
    images = side.read(episode.query[way][order])
    for place, (query, image) in enumerate(zip(order, images, strict=True)):
        predicted, x = int(episode.predictions[way, query]), start + place + 0.5
        frame = colors[predicted] if wrong[query] else None
        draw_tile(axes, image, x, y, frame=frame)
        if frame:
            box = {"facecolor": frame, "edgecolor": "none", "pad": 0.8}
            style: Any = {"size": 6, "ha": "center", "c": "white", "bbox": box, "zorder": 6}
            axes.text(x + 0.36, y - 0.34, f"{predicted + 1}", **style, **bold)
