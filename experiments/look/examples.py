"""Images side by side: nearest neighbours, and the hardest few-shot episodes."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from experiments.evaluation.feature_space import nearest_neighbours, neighbour_precision
from experiments.evaluation.few_shot import accuracies_of, configured_episodes
from experiments.look.page import Picture
from experiments.look.tiles import CLASS_COLORS, Tile, draw_rows, short
from experiments.look.view import View, some_rows
from experiments.reporting.style import INK, VERMILLION

NEIGHBOURS = 8
"""Neighbours of a query."""
QUERIES = 14
"""Queries, each of another class."""
_EPISODES = 4
_SHOWN = 10
"""Queries of a class that are drawn, the wrong ones first."""
_NAMES = {"room": 2.6, "line": 0.3}
"""Room for names and notes, in tiles."""


def neighbours(view: View) -> Picture | None:
    """The nearest neighbours of some images; None with fewer than three images."""
    side, chosen = view.shown, some_rows(len(view.shown.images.labels))
    if len(chosen) < 3:
        return None
    features, membership = side.outputs.features[chosen], side.membership[chosen]
    # Of another class each, as far as possible.
    order = np.random.default_rng([0, 20]).permutation(np.flatnonzero(membership.any(1)))
    _, first = np.unique(membership[order].argmax(1), return_index=True)
    queries = order[np.sort(first)[:QUERIES]]
    found = nearest_neighbours(features, queries, NEIGHBOURS).indices
    shared = np.asarray((membership[queries, None] & membership[found]).any(2))
    precision = neighbour_precision(features, membership, NEIGHBOURS)
    below = "labels in common, of all of both" if side.is_multi_label else "a wrong class"

    def text(labels: np.ndarray, characters: int) -> str:
        names = ", ".join(side.images.class_names[c] for c in np.flatnonzero(labels))
        return short(names, characters)

    rows = []
    for query, nearest, same in zip(queries, found, shared, strict=True):
        own, images = membership[query], side.read(chosen[[query, *nearest]])
        name = textwrap.fill(text(own, 40), 14, max_lines=3, placeholder=" …")
        tiles = [Tile(images[0], INK), Tile()]
        for image, row, right in zip(images[1:], nearest, same, strict=True):
            other = membership[row]
            note = "" if right else text(other, 11)
            if side.is_multi_label:
                note = f"{int((own & other).sum())} of {int((own | other).sum())}"
            tiles.append(Tile(image, None if right else VERMILLION, note))
        rows.append((name, tiles))
    half = -(-len(rows) // 2)
    picture = Picture(
        "neighbours",
        f"Nearest neighbours of some {side.split} images",
        f"A query, then the images of the largest cosine to it, of {len(chosen):,} {side.split} "
        f"images. A frame: no label in common; below: {below}. Of the {found.shape[1]} nearest "
        f"neighbours of all images, {100 * precision:.1f} % share a label.",
        (13.0, 0.68 * half + 0.3),
    )
    heading = "query, then neighbours from the nearest"
    for place, part in enumerate((rows[:half], rows[half:])):
        if part:
            axes = picture.figure.add_subplot(1, 2, place + 1)
            draw_rows(axes, part, "" if place else heading, **_NAMES)
    picture.numbers = {
        "queries": chosen[queries].tolist(),
        "neighbours": chosen[found].tolist(),
        "wrong": (~shared).tolist(),
        "precision": precision,
    }
    return picture


def hard_episodes(view: View) -> Picture | None:
    """The episodes with the lowest accuracy; None where the evaluation has no episodes."""
    side, classifier = view.shown, view.run.plan.protocol.episode_classifier
    if classifier is None:
        return None
    features, labels, names = *side.outputs[:2], side.images.class_names
    config: Any = vars(view.run.plan.config)["evaluation"]
    episodes = configured_episodes(config, labels, shots=classifier.shots)
    predictions = classifier.predict(features, episodes)
    accuracies = accuracies_of(predictions)
    hardest = np.argsort(accuracies, kind="stable")[:_EPISODES].tolist()
    picture = Picture(
        "episodes",
        f"The hardest {classifier.shots}-shot episodes",
        f"The hardest of {len(accuracies):,} episodes of {side.split} classes by "
        f"{classifier.name}; mean accuracy {100 * accuracies.mean():.1f} %. A row is a class: "
        "support images, then queries, the wrong ones first, with frame and number of the class "
        "that they were taken for; +3: three more wrong ones.",
        (13.0, (0.55 * config.ways + 0.35) * -(-len(hardest) // 2)),
        numbers={"mean_accuracy": float(accuracies.mean()), "episodes": []},
    )
    for place, number in enumerate(hardest):
        drawn = episodes.support[number], episodes.query[number], predictions[number]
        classes = [names[labels[row]] for row in drawn[0][:, 0]]
        rows = []
        for way, (name, support, queries, predicted) in enumerate(
            zip(classes, *drawn, strict=True)
        ):
            wrong = predicted != way
            order = np.argsort(~wrong, kind="stable")[:_SHOWN]
            tiles = [Tile(image, _color(way)) for image in side.read(support)]
            tiles.append(Tile())
            for query, image in zip(order, side.read(queries[order]), strict=True):
                of = int(predicted[query])
                tiles.append(Tile(image, _color(of), f"{of + 1}") if wrong[query] else Tile(image))
            if hidden := int(wrong.sum() - wrong[order].sum()):
                tiles.append(Tile(note=f"+{hidden}"))
            rows.append((f"{short(name, 14)}  {way + 1}", tiles))
        axes, accuracy = picture.figure.add_subplot(2, 2, place + 1), float(accuracies[number])
        heading = f"Episode {number}: {100 * accuracy:.0f} % of the queries right"
        draw_rows(axes, rows, heading, **_NAMES)
        found = zip(("support", "query", "predictions"), drawn, strict=True)
        picture.numbers["episodes"].append(
            {
                "number": number,
                "accuracy": accuracy,
                "classes": classes,
                **{key: value.tolist() for key, value in found},
            }
        )
    return picture


def _color(way: int) -> str:
    return CLASS_COLORS[way % len(CLASS_COLORS)]
