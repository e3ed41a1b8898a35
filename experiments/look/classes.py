"""Classes: how similar they are, and how well each one is recognised."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from experiments.evaluation.classification import class_accuracies, predict_classes
from experiments.evaluation.feature_space import (
    class_means,
    class_order,
    class_similarity,
    most_similar_pairs,
    nearest_mean_predictions,
    unit_features,
)
from experiments.evaluation.multilabel import average_precisions
from experiments.look.page import STRIP, Picture, Tile, draw_rows, short
from experiments.look.view import Side, View
from experiments.reporting.style import GREEN, INK, MEDIUM, style_axes

_PAIRS = 5
_NAMED = 60
"""Names are written beside a matrix of at most so many classes."""
_WORST = 10
_LONG_TAIL = 10
"""Ratio of the largest to the smallest class from which training images are drawn, too."""
_WINDOW = 15
"""Classes of a moving mean along a long tail."""


def similarity(view: View) -> Picture | None:
    """The cosines between class means; None with fewer than three classes."""
    sides = view.sides if view.holds_classes_out else [view.shown]
    side, noun = view.shown, view.shown.noun
    present = [np.flatnonzero(of.membership.any(0)) for of in sides]
    if min(map(len, present)) < 3:
        return None
    matrices = [
        class_similarity(of.outputs.features, of.membership[:, classes])
        for of, classes in zip(sides, present, strict=True)
    ]
    different = [matrix[~np.eye(len(matrix), dtype=bool)] for matrix in matrices]
    colors = Normalize()
    colors.autoscale(np.concatenate(different))  # Without the ones of the diagonals.
    inches = 5.4 if len(sides) > 1 else 7.4
    picture = Picture(
        "similarity",
        f"Similarity of the {noun}",
        f"Cosine between the mean features of two {noun}. Bright blocks: {noun} that the features "
        f"hardly tell apart. Below: the most similar pairs of {side.split} {noun}.",
        (inches * len(sides) + 0.9, inches + STRIP + 0.2),
    )
    grid = picture.figure.add_gridspec(2, len(sides), height_ratios=[inches, STRIP])
    panels, pairs = [], []
    for of, classes, cosines, others in zip(sides, present, matrices, different, strict=True):
        names, order = np.array(of.images.class_names)[classes], class_order(cosines)
        panels.append(picture.figure.add_subplot(grid[0, len(panels)]))
        _draw_matrix(panels[-1], cosines[np.ix_(order, order)], names[order], noun, inches, colors)
        panels[-1].set_title(f"{len(names)} {of.noun} of the {of.split} images")
        pairs = most_similar_pairs(cosines, 20)
        picture.numbers[of.split] = {
            "classes": names[order].tolist(),
            "mean_cosine": float(others.mean()),
            "most_similar": [(str(names[a]), str(names[b]), cosines[a, b]) for a, b in pairs],
        }
    mappable = ScalarMappable(colors, "cividis")
    bar = picture.figure.colorbar(mappable, ax=panels, shrink=0.7, pad=0.02)
    bar.set_label("cosine between class means")
    typical, tiles = _typical_images(side), []
    for a, b in pairs[:_PAIRS]:
        first, second = (typical[present[-1][c]] for c in (a, b))
        tiles += [first, Tile(note=f"{matrices[-1][a, b]:.2f}"), second, Tile()]
    strip = picture.figure.add_subplot(grid[1, :])
    draw_rows(strip, [("", tiles)], f"most similar pairs of {noun}", room=0, line=0.4)
    return picture


def _draw_matrix(
    axes: Axes, matrix: np.ndarray, names: np.ndarray, noun: str, inches: float, colors: Normalize
) -> None:
    """Draws a matrix [C, C], with the names of its classes where there is room for them."""
    axes.imshow(matrix, cmap="cividis", norm=colors)
    axes.tick_params(length=0)
    ticks = [short(name, 14) for name in names] if len(names) <= _NAMED else []
    font = min(MEDIUM, 72 * 0.75 * inches / len(names))
    axes.set_yticks(range(len(ticks)), ticks, fontsize=font)
    axes.set_xticks(range(len(ticks)), ticks, fontsize=font, rotation=90)
    if not ticks:
        axes.set_ylabel(f"{len(names)} {noun}")


def _typical_images(side: Side) -> dict[int, Tile]:
    """For every class an image: the nearest to its mean; one with few labels, where it can be."""
    membership, units = side.membership, unit_features(side.outputs.features)
    means, labels = class_means(units, membership), membership.sum(1)
    typical = {}
    # Class by class: the cosines of all images to all classes may not fit into memory.
    for c in np.flatnonzero(membership.any(0)).tolist():
        rows = np.flatnonzero(membership[:, c])
        rows = rows[labels[rows] == labels[rows].min()]
        typical[c] = rows[(units[rows] @ means[c]).argmax()]
    images = zip(typical, side.read(list(typical.values())), strict=True)
    return {c: Tile(i, "#cccccc", short(side.images.class_names[c], 12)) for c, i in images}


def by_class(view: View) -> Picture:
    """How well each class is recognised: a bar for each, and the classes with the lowest values."""
    side, sides, counts = view.shown, [view.shown], view.run.class_counts
    noun, long_tailed = side.noun, False
    name, title, measure = "accuracy", "Accuracy by class", "accuracy (%)"
    if side.is_multi_label:
        name, title, measure = "precision", "Average precision by label", "average precision (%)"
        precisions = average_precisions(side.outputs.logits().T, side.outputs.labels.T)
        values = [(precisions, float(np.nanmean(precisions)))]
    elif view.holds_classes_out:
        # The mean leaves out the image itself.
        sides, measure = view.sides, "nearest to the mean of their class (%)"
        title = "Accuracy by class, by the nearest class mean"
        outputs = [of.outputs for of in sides]
        nearest = [nearest_mean_predictions(of.features, of.labels) for of in outputs]
        values = list(map(_accuracies, sides, nearest))
    else:
        values = [_accuracies(side, predict_classes(side.outputs.logits()))]
        long_tailed = counts.max() >= _LONG_TAIL * counts.min()
    legend = [
        Line2D([], [], color=INK, linewidth=2, label=f"mean of {_WINDOW} {noun} side by side"),
        Line2D([], [], color=GREEN, linewidth=2, label="training images (right axis)"),
    ]
    picture = Picture(
        name,
        title,
        f"A bar for each of the {noun}; the dashed line is the mean (of accuracies, over all "
        f"images). Below: the {side.split} {noun} with the lowest values, each by a typical image.",
        (9.6, 3.0 + STRIP),
        legend if long_tailed else [],
    )
    grid = picture.figure.add_gridspec(2, len(sides), height_ratios=[3.0, STRIP])
    for number, (of, (of_classes, mean)) in enumerate(zip(sides, values, strict=True)):
        order = np.argsort(-counts if long_tailed else -of_classes, kind="stable")
        order = order[~np.isnan(of_classes[order])]
        axes = picture.figure.add_subplot(grid[0, number])
        style_axes(axes, grid="y")
        bars = np.arange(1, len(order) + 1)
        axes.bar(bars, 100 * of_classes[order], width=0.9, color=of.color, linewidth=0)
        axes.axhline(100 * mean, color=INK, linewidth=1.1, linestyle="--", zorder=3)
        if long_tailed:
            draw_tail(axes, 100 * of_classes[order], counts[order])
        first = "the most training images" if long_tailed else "the highest value"
        axes.set(xlim=(0.3, len(order) + 0.7), xlabel=f"{len(order)} {noun}, from {first}")
        axes.set(ylim=(0, 103), ylabel=measure if number == 0 else "")
        axes.set_title(f"{of.split} images, mean {100 * mean:.1f} %")
        by_name = {of.images.class_names[c]: float(of_classes[c]) for c in order}
        picture.numbers[of.split] = {"mean": mean, "classes": by_name}
    of_classes, typical = values[-1][0], _typical_images(side)
    # Of equal values, the class with the most training images is the most surprising. NaN is last.
    lowest = np.lexsort((-counts if long_tailed else np.zeros(len(of_classes)), of_classes))
    worst = [
        typical[c]._replace(note=f"{typical[c].note}\n{100 * of_classes[c]:.0f} %")
        for c in lowest[: min(_WORST, np.count_nonzero(~np.isnan(of_classes)))]
    ]
    strip = picture.figure.add_subplot(grid[1, :])
    draw_rows(strip, [("", worst)], f"{noun} with the lowest values", room=0, line=0.6)
    return picture


def _accuracies(side: Side, predictions: np.ndarray) -> tuple[np.ndarray, float]:
    """The accuracy of every class, and that of all images."""
    labels = side.outputs.labels
    accuracies = class_accuracies(predictions, labels, len(side.images.class_names))
    return accuracies, float((predictions == labels).mean())


def draw_tail(axes: Axes, values: np.ndarray, counts: np.ndarray) -> None:
    """Draws a moving mean of values in per cent, and the training images of every class."""
    places = np.arange(1, len(counts) + 1)
    moving = pd.Series(values).rolling(_WINDOW, center=True).mean()
    axes.plot(places, moving, color=INK, linewidth=2, zorder=4)
    twin = axes.twinx()
    twin.plot(places, counts, color=GREEN, linewidth=2)
    twin.set(yscale="log", ylabel="training images")
    twin.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    twin.yaxis.set_major_formatter("{x:,.0f}")
    twin.minorticks_off()
    twin.spines["top"].set_visible(False)
