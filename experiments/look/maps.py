"""Maps of the features, with the images drawn in place: all of them, and those of a few classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from experiments.evaluation.feature_space import (
    class_order,
    class_similarity,
    principal_axes,
    unit_features,
)
from experiments.look.page import Picture
from experiments.look.tiles import CLASS_COLORS, draw_tile, short
from experiments.look.view import Side, View, some_rows
from experiments.reporting.style import INK, Mark, legend_handle

TILES = 300
"""Largest number of images that are drawn in a map."""
_TILE = 0.34
"""Inches of the side of a tile."""
_OVERLAP = 0.9
"""Tiles are at least this many sides apart, along one axis."""


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
    projection = principal_axes(together)
    clouds = []
    for number, (side, features) in enumerate(zip(view.sides, units, strict=True)):
        rows = np.random.default_rng([0, number]).permutation(some_rows(len(features)))
        clouds.append(Cloud(side, side.color, projection.points(features[rows]), rows))
    picture = Picture(
        "map",
        "Map of the features",
        "Features of length one on their two principal axes; a dot is an image, and some images "
        "are drawn in place.",
        (9.1, 9.0),
        [_square(f"{side.split} images", side.color) for side in view.sides],
    )
    axes = picture.figure.add_subplot()
    picture.numbers = draw_map(axes, clouds, 8.6, TILES, projection.shares(together))
    return picture


def class_map(view: View) -> Picture | None:
    """A few classes of every split, on the axes along which their means differ most."""
    same = None if view.holds_classes_out else _few_classes(view.shown)
    chosen = [_few_classes(side) if same is None else same for side in view.sides]
    members = []
    for side, classes in zip(view.sides, chosen, strict=True):
        # Images that belong to one of the classes, and to no other of them.
        own = side.membership[:, classes]
        own &= own.sum(1, keepdims=True) == 1
        members.append([np.flatnonzero(column) for column in own.T])
        if own.any(0).sum() < 3:
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
        parts = [unit_features(side.outputs.features[rows]) for rows in own]
        projection = principal_axes(np.stack([part.mean(0) for part in parts if len(part)]))
        shares = projection.shares(np.concatenate(parts))
        names = [side.images.class_names[c] for c in classes]
        clouds, squares = [], []
        for name, color, rows, part in zip(names, CLASS_COLORS, own, parts, strict=False):
            order = np.random.default_rng([0, 10 + number]).permutation(len(rows))
            clouds.append(Cloud(side, color, projection.points(part[order]), rows[order]))
            squares.append(_square(short(name, 14), color))
        axes = picture.figure.add_subplot(1, panels, number + 1)
        axes.set_title(f"{len(classes)} {side.noun} of the {side.split} images")
        shown = draw_map(axes, clouds, size, TILES // panels, shares)
        picture.numbers[side.split] = {"classes": names} | shown
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
        if not own:
            continue
        images = cloud.side.read(cloud.rows[own])
        # Grey images take the colour themselves; others have a frame.
        ink, frame = (cloud.color, None) if images.shape[-1] == 1 else (INK, cloud.color)
        for image, (x, y) in zip(images, cloud.points[own].tolist(), strict=True):
            draw_tile(axes, image, x, y, side, color=ink, frame=frame)
    return {"variance_shares": shares.tolist(), "images_drawn": len(taken)}
