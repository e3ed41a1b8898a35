"""Maps of the features: all images, and those of a few classes."""

from __future__ import annotations

from functools import partial

import numpy as np

from experiments.evaluation.feature_space import (
    class_order,
    class_similarity,
    principal_axes,
    unit_features,
)
from experiments.look.view import Side, View, some_rows
from experiments.reporting.look.maps import CLASS_COLORS, Cloud, Panel, map_figure
from experiments.reporting.look.page import Picture

_CLASSES = len(CLASS_COLORS)


def overview(view: View) -> Picture:
    """All features on their two principal axes."""
    units = [unit_features(side.outputs.features) for side in view.sides]
    together = np.concatenate(units)
    projection = principal_axes(together)
    shares = projection.shares(together)
    clouds = []
    for number, (side, features) in enumerate(zip(view.sides, units, strict=True)):
        rows = view.rng(number).permutation(some_rows(len(features)))
        points = projection.points(features[rows])
        clouds.append(Cloud(f"{side.split} images", points, partial(_read, side, rows)))
    title = "Map of the features"
    caption = (
        "Features of length one on their two principal axes; a dot is an image, and some have "
        "their image drawn in place. Read it by regions: images that look or mean alike should be "
        "near each other, and a split that fills its own region has other features."
    )
    figure, drawn = map_figure(
        [Panel("", clouds, (float(shares[0]), float(shares[1])))],
        title=title,
        caption=caption,
        colors=[view.color(side) for side in view.sides],
        legends=False,
        size=8.6,
        tiles=view.tiles,
    )
    numbers = {"variance_shares": shares.tolist(), "images_drawn": drawn[0]}
    return Picture("map", title, caption, figure, numbers)


def _read(side: Side, rows: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The images of some points, of which each is a row of the side."""
    return side.read(rows[points])


def class_map(view: View) -> Picture | None:
    """A few classes of every split, on the axes along which their means differ most."""
    panels, numbers = [], {}
    same = None if view.holds_classes_out else _few_classes(view.shown)
    for number, side in enumerate(view.sides):
        classes = _few_classes(side) if same is None else same
        own = _only_members(side, classes)
        if sum(len(rows) > 0 for rows in own) < 3:
            return None
        units = unit_features(side.outputs.features[np.concatenate(own)])
        parts = np.split(units, np.cumsum([len(rows) for rows in own])[:-1])
        projection = principal_axes(np.stack([part.mean(0) for part in parts if len(part)]))
        shares = projection.shares(units)
        clouds = []
        for label, rows, part in zip(classes, own, parts, strict=True):
            order = view.rng(10 + number).permutation(len(rows))
            points = projection.points(part[order])
            name = side.images.class_names[label]
            clouds.append(Cloud(name, points, partial(_read, side, rows[order])))
        title = f"{len(classes)} {side.noun} of the {side.split} images"
        panels.append(Panel(title, clouds, (float(shares[0]), float(shares[1])), "axis"))
        numbers[side.split] = {
            "classes": [side.images.class_names[c] for c in classes],
            "variance_shares": shares.tolist(),
        }
    noun = view.shown.noun
    title = f"Map of a few {noun}"
    caption = (
        f"Images of a few {noun}, spread over the order of the similarity matrix, on the two axes "
        "along which the means of these differ most. Compact groups of one colour that do not mix "
        "are easy to classify."
    )
    if view.shown.is_multi_label:
        caption += f" Only images with exactly one of these {noun} are drawn."
    figure, drawn = map_figure(
        panels,
        title=title,
        caption=caption,
        colors=CLASS_COLORS,
        legends=True,
        size=6.4 if len(panels) == 1 else 5.6,
        tiles=view.tiles,
    )
    for side, count in zip(view.sides, drawn, strict=True):
        numbers[side.split]["images_drawn"] = count
    return Picture("class-map", title, caption, figure, numbers)


def _few_classes(side: Side) -> np.ndarray:
    """Classes of the larger half, spread over the order of the similarity matrix."""
    counts = side.membership.sum(0)
    order = _ordered_classes(side)
    order = order[counts[order] >= np.median(counts[order])]
    places = np.linspace(0, len(order) - 1, min(_CLASSES, len(order))).round().astype(int)
    return order[places]


def _only_members(side: Side, classes: np.ndarray) -> list[np.ndarray]:
    """For each of the classes, the images that belong to it and to no other of them."""
    membership = side.membership[:, classes]
    single = membership.sum(1) == 1
    return [np.flatnonzero(single & column) for column in membership.T]


def _ordered_classes(side: Side) -> np.ndarray:
    """The classes that have an image, in the order of the similarity matrix."""
    membership = side.membership
    present = np.flatnonzero(membership.any(0))
    similarity = class_similarity(side.outputs.features, membership[:, present])
    return present[class_order(similarity)]
