"""Pictures of images: in place on a map, beside their neighbours, in the hardest episodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes

from experiments.data.sampling import episode_classes
from experiments.evaluation import feature_space as space
from experiments.evaluation.few_shot import (
    accuracies_of,
    configured_episodes,
    prototype_predictions,
)
from experiments.look.page import Picture, Tile, draw_image, draw_rows, short, wrapped
from experiments.look.view import Side, View
from experiments.papers.negative_margin import fine_tuned_classifier
from experiments.reporting.style import COLORS, INK, VERMILLION

TILES = 300  # In a map, at most.
_TILE = 0.34  # Inches of the side of a tile in a map.
_OVERLAP = 0.9  # Sides of a tile between two of them, along one axis, at least.
_CLASSES = 8  # In a map of a few, at most.
NEIGHBOURS = 8  # Of a query.
QUERIES = 14  # Each of another class.
_EPISODES = 4
_SHOWN = 10  # Queries of a class in an episode, the wrong ones first.


def overview(view: View) -> Picture:
    """All features on their two principal axes."""
    caption = "Features of length one on their two principal axes; a dot is an image, and some "
    caption += "images are drawn in place."
    picture = Picture("map", "Map of the features", caption, (9.1, 9.3))
    clouds = [(side, f"{side.split} images", side.some_rows) for side in view.sides]
    picture.numbers = draw_map(picture.figure.subplots(), clouds, size=8.6, tiles=TILES)
    return picture


def class_map(view: View) -> Picture | None:
    """A few classes of every split, on the axes along which their means differ most."""
    noun, count = view.shown.noun, len(view.sides)
    panels = []
    for side in view.sides:
        of = side if view.holds_classes_out else view.shown
        # Of the larger half, spread over the order of the similarity matrix.
        order, counts = of.similar_classes[0], of.membership.sum(0)
        order = order[counts[order] >= np.median(counts[order])]
        places = np.linspace(0, len(order) - 1, min(_CLASSES, len(order)))
        classes = order[places.round().astype(int)]
        own = side.membership[:, classes]
        own &= own.sum(1, keepdims=True) == 1  # An image belongs to no other of the classes.
        panels.append((classes, own))
    if min(own.any(0).sum() for _, own in panels) < 3:
        return None
    size = 6.4 if count == 1 else 5.6
    picture = Picture(
        "class-map",
        f"Map of a few {noun}",
        f"Images with one of a few {noun}, on the two axes along which the means of these differ "
        "most.",
        (size * count + 0.5, size + 1.3),
    )
    for number, (side, (classes, own)) in enumerate(zip(view.sides, panels, strict=True)):
        names = side.names_of(classes)
        members = [np.flatnonzero(of) for of in own.T]
        clouds = [(side, short(n, 28), rows) for n, rows in zip(names, members, strict=True)]
        axes = picture.figure.add_subplot(1, count, number + 1)
        axes.set_title(f"{len(names)} {noun} of the {side.split} images")
        shown = draw_map(axes, clouds, size=size, tiles=TILES // count, by_means=True)
        picture.numbers[side.split] = {"classes": names} | shown
    return picture


def draw_map(
    axes: Axes,
    clouds: Sequence[tuple[Side, str, np.ndarray]],
    *,
    size: float,
    tiles: int,
    by_means: bool = False,
) -> dict[str, Any]:
    """Draws every image as a dot on two principal axes, and some in place; returns the numbers.

    A cloud is a side, a name and rows of the side; its dots have one colour. The axes are those of
    the features or, `by_means`, of the means of the clouds. The panel has so many inches and at
    most so many tiles, which clouds get turn by turn, at random. Images whose tile would hide an
    earlier one have none.
    """
    rows = [np.random.default_rng(0).permutation(of) for _, _, of in clouds]
    units = [
        space.unit_features(side.outputs.features[of])
        for (side, _, _), of in zip(clouds, rows, strict=True)
    ]
    together, means = np.concatenate(units), [of.mean(0) for of in units if len(of)]
    directions = space.principal_axes(np.stack(means) if by_means else together)
    shares, points = space.variance_shares(together, directions), [of @ directions for of in units]
    for (_, name, _), color, of in zip(clouds, COLORS, points, strict=False):
        axes.plot([], [], "s", color=color, label=name)
        area, alpha = (9, 0.7) if len(together) < 2000 else (4, 0.25)
        axes.scatter(*of.T, s=area, color=color, alpha=alpha, linewidths=0, zorder=1)
    low, high = (f([f(of, axis=0) for of in points if len(of)], axis=0) for f in (np.min, np.max))
    middle, half = (low + high) / 2, max(0.54 * np.max(high - low), 1e-6)
    limits = np.stack([middle - half, middle + half])
    axes.set(xlim=limits[:, 0], ylim=limits[:, 1], aspect="equal")
    first, second = (f"axis ({100 * share:.1f} % of the variance)" for share in shares[:2])
    axes.set(xlabel=f"first {first}", ylabel=f"second {second}", xticks=[], yticks=[])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.04), ncols=2, handletextpad=0.1)
    side, taken = 2 * half * _TILE / size, np.empty((0, 2))
    for turn, number in sorted((t, n) for n, of in enumerate(rows) for t in range(len(of))):
        point = points[number][turn]
        if len(taken) < tiles and (np.abs(taken - point).max(1) >= _OVERLAP * side).all():
            taken = np.concatenate([taken, point[None]])
            (image,) = clouds[number][0].outputs.images(rows[number][[turn]])
            draw_image(axes, image, point[0], point[1], side, COLORS[number])
    return {"variance_shares": shares.tolist(), "images_drawn": len(taken)}


def neighbours(view: View) -> Picture | None:
    """The nearest neighbours of some images, each of another class as far as possible.

    None with fewer than three images.
    """
    side, chosen = view.shown, view.shown.some_rows
    if len(chosen) < 3:
        return None
    features, membership = side.outputs.features[chosen], side.membership[chosen]
    labelled = np.flatnonzero(membership.any(1))
    every = space.nearest_neighbours(features, labelled, NEIGHBOURS)
    order = np.random.default_rng(0).permutation(labelled)
    _, first = np.unique(membership[order].argmax(1), return_index=True)
    queries = order[np.sort(first)[:QUERIES]]
    found = every[np.searchsorted(labelled, queries)]
    shared = np.asarray((membership[queries, None] & membership[found]).any(2))
    precision = float((membership[labelled, None] & membership[every]).any(2).mean())
    counts = membership.sum(0)
    others = (membership[labelled] * np.maximum(counts - 1, 0)).sum(1).clip(max=every.shape[1])
    ceiling = float(others.mean() / every.shape[1])
    rows = []
    for query, nearest, right in zip(queries, found, shared, strict=True):
        own, others = membership[query], membership[nearest]
        names = [", ".join(side.names_of(np.flatnonzero(of))) for of in (own, *others)]
        notes = np.where(right, "", [wrapped(name, 9, 2) for name in names[1:]])
        image, *images = side.outputs.images(chosen[[query, *nearest]])
        frames = np.where(right, "none", VERMILLION)
        tiles = [Tile(image, INK), Tile(), *map(Tile, images, frames, notes)]
        rows.append((wrapped(names[0], 16, 4), tiles))
    half = -(-len(rows) // 2)
    picture = Picture(
        "neighbours",
        f"Nearest neighbours of some {side.split} images",
        f"A query, then the images of the largest cosine to it, of {len(chosen):,} {side.split} "
        f"images. A frame: no label in common. Of the {found.shape[1]} nearest neighbours of all "
        f"images, {100 * precision:.1f} % share a label, of {100 * ceiling:.1f} % that could.",
        (13.0, 0.9 * half + 0.3),
        {
            "queries": chosen[queries].tolist(),
            "neighbours": chosen[found].tolist(),
            "wrong": (~shared).tolist(),
            "precision": precision,
        },
    )
    heading = "query, then neighbours from the nearest"
    for place, part in enumerate(filter(None, (rows[:half], rows[half:]))):
        draw_rows(picture.figure.add_subplot(1, 2, place + 1), part, heading)
    return picture


def hard_episodes(view: View) -> Picture | None:
    """The episodes with the lowest accuracy; None where the evaluation has no episodes."""
    side, run_config = view.shown, cast(Any, view.run.plan.config)
    config = vars(run_config).get("evaluation")
    if "fine_tuning" in vars(run_config):
        form, predict = fine_tuned_classifier(run_config)
        words = f"a fine-tuned {form} classifier"
    elif hasattr(config, "distances"):
        predict = partial(prototype_predictions, distance=config.distances[0])
        words = f"the nearest prototype ({config.distances[0]})"
    else:
        return None
    (features, labels), shots = side.outputs[:2], min(config.shots)
    episodes, counts = configured_episodes(config, labels, shots=shots), np.bincount(labels)
    large = len(episode_classes(counts, config.ways, shots, config.queries))
    predictions = predict(features, episodes)
    accuracies = accuracies_of(predictions)
    picture = Picture(
        "episodes",
        f"The hardest {shots}-shot episodes",
        f"The hardest of {len(accuracies):,} episodes of {large} of {len(counts)} {side.split} "
        f"classes by {words}; mean accuracy {100 * accuracies.mean():.1f} %. A row is a class: "
        "support images, then queries, the wrong ones first, with the number of the class that "
        "they were taken for.",
        (13.0, (0.55 * config.ways + 0.35) * 2),
        {"mean_accuracy": float(accuracies.mean()), "episodes": []},
    )
    hardest = np.argsort(accuracies, kind="stable")[:_EPISODES].tolist()
    for place, number in enumerate(hardest):
        support, query, predicted = (of[number] for of in (*episodes, predictions))
        classes, rows = side.names_of(labels[support[:, 0]]), []
        for way, name in enumerate(classes):
            order = np.argsort(predicted[way] == way, kind="stable")[:_SHOWN]
            tiles = [*map(partial(Tile, frame=INK), side.outputs.images(support[way])), Tile()]
            images = side.outputs.images(query[way, order])
            for of, image in zip(predicted[way, order], images, strict=True):
                tiles.append(Tile(image) if of == way else Tile(image, VERMILLION, f"{of + 1}"))
            rows.append((f"{wrapped(name, 14, 2)}  {way + 1}", tiles))
        accuracy = float(accuracies[number])
        heading = f"Episode {number}: {100 * accuracy:.0f} % of the queries right"
        draw_rows(picture.figure.add_subplot(2, 2, place + 1), rows, heading)
        found = {"support": support.tolist(), "query": query.tolist()}
        found |= {"predictions": predicted.tolist(), "classes": classes}
        picture.numbers["episodes"].append({"number": number, "accuracy": accuracy, **found})
    return picture
