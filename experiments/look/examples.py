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
    found = nearest_neighbours(features, queries, NEIGHBOURS)
    shared = np.asarray((membership[queries, None] & membership[found]).any(2))
    precision = neighbour_precision(features, membership, NEIGHBOURS)
    below = "labels in common, of all of both" if side.is_multi_label else "a wrong class"
    rows = []
    for query, nearest, same in zip(queries, found, shared, strict=True):
        own, images = membership[query], side.read(chosen[[query, *nearest]])
        tiles = [Tile(images[0], INK), Tile()]
        for image, row, right in zip(images[1:], nearest, same, strict=True):
            other = membership[row]
            note = "" if right else short(side.label_names(other), 11)
            if side.is_multi_label:
                note = f"{(own & other).sum()} of {(own | other).sum()}"
            tiles.append(Tile(image, None if right else VERMILLION, note))
        name = short(side.label_names(own), 40)
        rows.append((textwrap.fill(name, 14, max_lines=3, placeholder=" …"), tiles))
    half = -(-len(rows) // 2)
    picture = Picture(
        "neighbours",
        f"Nearest neighbours of some {side.split} images",
        f"A query, then the images of the largest cosine to it, of {len(chosen):,} {side.split} "
        f"images. A frame: no label in common; below: {below}. Of the {found.shape[1]} nearest "
        f"neighbours of all images, {100 * precision:.1f} % share a label.",
        (13.0, 0.68 * half + 0.3),
    )
    for place, part in enumerate(filter(None, (rows[:half], rows[half:]))):
        axes = picture.figure.add_subplot(1, 2, place + 1)
        draw_rows(axes, part, "" if place else "query, then neighbours from the nearest")
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
    features, labels = side.outputs[:2]
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
    colors = [CLASS_COLORS[way % len(CLASS_COLORS)] for way in range(config.ways)]
    for place, number in enumerate(hardest):
        support, query, predicted = (of[number] for of in (*episodes, predictions))
        classes, rows = [side.images.class_names[labels[row]] for row in support[:, 0]], []
        for way, name in enumerate(classes):
            wrong = predicted[way] != way
            order = np.argsort(~wrong, kind="stable")[:_SHOWN]
            tiles = [Tile(image, colors[way]) for image in side.read(support[way])]
            tiles.append(Tile())
            for q, image in zip(order, side.read(query[way, order]), strict=True):
                of = int(predicted[way, q])
                tiles.append(Tile(image, colors[of], f"{of + 1}") if wrong[q] else Tile(image))
            if hidden := int(wrong.sum() - wrong[order].sum()):
                tiles.append(Tile(note=f"+{hidden}"))
            rows.append((f"{short(name, 14)}  {way + 1}", tiles))
        accuracy = float(accuracies[number])
        heading = f"Episode {number}: {100 * accuracy:.0f} % of the queries right"
        draw_rows(picture.figure.add_subplot(2, 2, place + 1), rows, heading)
        drawn = {"support": support, "query": query, "predictions": predicted}
        shown = {"number": number, "accuracy": accuracy, "classes": classes}
        shown |= {name: np.asarray(values).tolist() for name, values in drawn.items()}
        picture.numbers["episodes"].append(shown)
    return picture
