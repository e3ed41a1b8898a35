"""Pictures of images: in place on a map, beside their neighbours, in the hardest episodes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from experiments.evaluation.feature_space import (
    class_order,
    class_similarity,
    nearest_neighbours,
    neighbour_precision,
    principal_axes,
    unit_features,
)
from experiments.evaluation.few_shot import accuracies_of, configured_episodes
from experiments.evaluation.subspace import variance_shares
from experiments.look.page import CLASS_COLORS, Picture, Tile, draw_rows, draw_tile, short
from experiments.look.view import Side, View, some_rows
from experiments.reporting.style import INK, VERMILLION, Mark, legend_handle

TILES = 300
"""Largest number of images that are drawn in a map."""
_TILE = 0.34
"""Inches of the side of a tile."""
_OVERLAP = 0.9
"""Tiles are at least this many sides apart, along one axis."""
NEIGHBOURS = 8
"""Neighbours of a query."""
QUERIES = 14
"""Queries, each of another class."""
_EPISODES = 4
_SHOWN = 10
"""Queries of a class that are drawn, the wrong ones first."""


class Cloud(NamedTuple):
    """The images of one colour."""

    side: Side
    color: str
    points: np.ndarray
    """float64 [n, 2], those that get a tile first."""
    rows: np.ndarray
    """int64 [n], the images of the side."""


def overview(view: View) -> Picture:
    """All features on their two principal axes."""
    units = [unit_features(side.outputs.features) for side in view.sides]
    together = np.concatenate(units)
    directions = principal_axes(together)
    clouds = []
    for number, (side, features) in enumerate(zip(view.sides, units, strict=True)):
        rows = np.random.default_rng([0, number]).permutation(some_rows(len(features)))
        clouds.append(Cloud(side, side.color, features[rows] @ directions, rows))
    picture = Picture(
        "map",
        "Map of the features",
        "Features of length one on their two principal axes; a dot is an image, and some images "
        "are drawn in place.",
        (9.1, 9.0),
        [_square(f"{side.split} images", side.color) for side in view.sides],
    )
    axes = picture.figure.add_subplot()
    picture.numbers = draw_map(axes, clouds, 8.6, TILES, variance_shares(together, directions))
    return picture


def class_map(view: View) -> Picture | None:
    """A few classes of every split, on the axes along which their means differ most."""
    same = None if view.holds_classes_out else _few_classes(view.shown)
    chosen = [_few_classes(side) if same is None else same for side in view.sides]
    members = [of.membership[:, classes] for of, classes in zip(view.sides, chosen, strict=True)]
    # Images that belong to one of the classes, and to no other of them.
    members = [own & (own.sum(1, keepdims=True) == 1) for own in members]
    if min(own.any(0).sum() for own in members) < 3:
        return None
    noun, panels = view.shown.noun, len(view.sides)
    size = 6.4 if panels == 1 else 5.6
    picture = Picture(
        "class-map",
        f"Map of a few {noun}",
        f"Images with one of a few {noun}, on the two axes along which the means of these differ "
        "most.",
        (size * panels + 0.5, size + 1.0),
    )
    for number, (side, classes, own) in enumerate(zip(view.sides, chosen, members, strict=True)):
        units, names = unit_features(side.outputs.features), side.names_of(classes)
        rng = partial(np.random.default_rng, [0, 10 + number])
        rows = [rng().permutation(np.flatnonzero(of_class)) for of_class in own.T]
        directions = principal_axes(np.stack([units[of].mean(0) for of in rows if len(of)]))
        clouds = [
            Cloud(side, color, units[of] @ directions, of)
            for color, of in zip(CLASS_COLORS, rows, strict=False)
        ]
        axes = picture.figure.add_subplot(1, panels, number + 1)
        axes.set_title(f"{len(classes)} {side.noun} of the {side.split} images")
        shares = variance_shares(units[np.concatenate(rows)], directions)
        shown = draw_map(axes, clouds, size, TILES // panels, shares)
        picture.numbers[side.split] = {"classes": names} | shown
        squares = [_square(short(n, 14), c.color) for n, c in zip(names, clouds, strict=True)]
        style: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.06), "ncols": 4}
        axes.legend(handles=squares, handletextpad=0.1, columnspacing=1.0, **style)
    return picture


def _few_classes(side: Side) -> np.ndarray:
    """Classes of the larger half, spread over the order of the similarity matrix."""
    membership = side.membership
    counts = membership.sum(0)
    present = np.flatnonzero(counts)
    order = present[class_order(class_similarity(side.outputs.features, membership[:, present]))]
    order = order[counts[order] >= np.median(counts[order])]
    places = np.linspace(0, len(order) - 1, min(len(CLASS_COLORS), len(order)))
    return order[places.round().astype(int)]


def _square(label: str, color: str):
    return legend_handle(label, Mark(color, "s"), line=False)


def draw_map(
    axes: Axes, clouds: Sequence[Cloud], size: float, tiles: int, shares: np.ndarray
) -> dict[str, Any]:
    """Draws every point as a dot, and images in place; returns the numbers.

    The panel has so many inches and at most so many tiles, which clouds get turn by turn. Points
    whose tile would hide an earlier one have none. Shares are those of the variance along the axes.
    """
    everything = np.concatenate([cloud.points for cloud in clouds])
    low, high = everything.min(0), everything.max(0)
    middle, half = (low + high) / 2, 0.54 * max(*(high - low), 1e-12)
    limits = np.stack([middle - half, middle + half], axis=1)
    axes.set(xlim=limits[0], ylim=limits[1], aspect="equal", xticks=[], yticks=[])
    first, second = (f"axis ({100 * share:.1f} % of the variance)" for share in shares[:2])
    axes.set(xlabel=f"first {first}", ylabel=f"second {second}")
    axes.spines[:].set_color("#cccccc")
    side = 2 * half * _TILE / size
    turns = sorted((turn, n) for n, cloud in enumerate(clouds) for turn in range(len(cloud.rows)))
    placed: list[list[int]] = [[] for _ in clouds]
    taken = np.empty((0, 2))
    for turn, number in turns:
        point = clouds[number].points[turn]
        if (np.abs(taken - point).max(1) >= _OVERLAP * side).all():
            taken = np.concatenate([taken, point[None]])
            placed[number].append(turn)
        if len(taken) == tiles:
            break
    for cloud, own in zip(clouds, placed, strict=True):
        axes.scatter(*cloud.points.T, s=4, color=cloud.color, alpha=0.25, linewidths=0, zorder=1)
        images = cloud.side.read(cloud.rows[own]) if own else ()
        for image, (x, y) in zip(images, cloud.points[own].tolist(), strict=True):
            # Grey images take the colour themselves; others have a frame.
            is_grey = image.shape[-1] == 1
            tile = Tile(image, ink=cloud.color) if is_grey else Tile(image, cloud.color)
            draw_tile(axes, tile, x, y, side)
    return {"variance_shares": shares.tolist(), "images_drawn": len(taken)}


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
            note = f"{(own & other).sum()} of {(own | other).sum()}"
            if not side.is_multi_label:
                note = "" if right else short(side.label_names(other), 11)
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
        classes, rows = side.names_of(labels[support[:, 0]]), []
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
        shown = {name: np.asarray(values).tolist() for name, values in drawn.items()}
        found = {"number": number, "accuracy": accuracy, "classes": classes} | shown
        picture.numbers["episodes"].append(found)
    return picture
