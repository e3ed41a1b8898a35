"""Classes: nearest neighbours, similarity, and how well each one is recognised."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D

from experiments.evaluation.classification import class_accuracies, predict_classes
from experiments.evaluation.feature_space import (
    class_means,
    class_order,
    class_similarity,
    most_similar_pairs,
    nearest_mean_predictions,
    nearest_neighbours,
    neighbour_precision,
    unit_features,
)
from experiments.evaluation.multilabel import average_precisions
from experiments.look.page import Picture
from experiments.look.tiles import STRIP, WRONG, draw_strip, draw_tile, short, tile_axes
from experiments.look.view import Side, View, some_rows
from experiments.reporting.style import GREEN, INK, LARGE, MEDIUM, SMALL, new_figure, style_axes

NEIGHBOURS = 8
"""Neighbours of a query."""
QUERIES = 14
"""Queries, each of another class."""

# Of the neighbours, in tiles: the name of a query, the gap after it, a line of text below a tile;
# and inches of a tile.
_NAME, _GAP, _LINE, _INCH = 2.2, 0.35, 0.32, 0.5
_PAIRS = 5
_NAMED = 60
"""Names are written beside a matrix of at most so many classes."""
_WORST = 10
_LONG_TAIL = 10
"""Ratio of the largest to the smallest class from which training images are drawn, too."""
_WINDOW = 15
"""Classes of a moving mean along a long tail."""


def neighbours(view: View) -> Picture | None:
    """The nearest neighbours of some images; None with fewer than three images."""
    side, chosen = view.shown, some_rows(len(view.shown.images.labels))
    if len(chosen) < 3:
        return None
    features, membership = side.outputs.features[chosen], side.membership[chosen]
    # Of another class each, as far as possible.
    order = view.rng(20).permutation(np.flatnonzero(membership.any(1)))
    _, first = np.unique(membership[order].argmax(1), return_index=True)
    queries = order[np.sort(first)[:QUERIES]]
    found = nearest_neighbours(features, queries, NEIGHBOURS).indices
    shared = np.asarray((membership[queries, None] & membership[found]).any(2))
    precision = neighbour_precision(features, membership, NEIGHBOURS)
    below = "labels in common, of all of both" if side.is_multi_label else "a wrong class"
    title = f"Nearest neighbours of some {side.split} images"
    caption = (
        f"A query, then the images of the largest cosine to it, of {len(chosen):,} {side.split} "
        f"images. A frame: no label in common; below: {below}. Of the {found.shape[1]} nearest "
        f"neighbours of all images, {100 * precision:.1f} % share a label."
    )

    def text(labels: np.ndarray) -> str:
        return ", ".join(side.images.class_names[c] for c in np.flatnonzero(labels))

    columns = min(2, len(queries))
    lines = -(-len(queries) // columns)
    width, pitch = _NAME + 1 + _GAP + found.shape[1], 1 + _LINE
    size = (_INCH * width * columns + 0.3, _INCH * pitch * lines + 0.3)
    figure = new_figure(*size, title=title, caption=caption)
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for panel, heading in zip(
        panels, ["query, then neighbours from the nearest", ""], strict=False
    ):
        tile_axes(panel, width, pitch * lines, heading)
    for number, (query, nearest, same) in enumerate(zip(queries, found, shared, strict=True)):
        axes, y = panels[number // lines], pitch * (number % lines) + 0.5
        own, images = membership[query], side.read(chosen[[query, *nearest]])
        name = textwrap.fill(short(text(own), 40), 14, max_lines=3, placeholder=" …")
        axes.text(_NAME - 0.1, y, name, size=SMALL, ha="right", va="center")
        draw_tile(axes, images[0], _NAME + 0.5, y, frame=INK)
        for place, (image, row, right) in enumerate(zip(images[1:], nearest, same, strict=True)):
            x, other = _NAME + 1.5 + _GAP + place, membership[row]
            draw_tile(axes, image, x, y, frame=None if right else WRONG)
            below = "" if right else short(text(other), 11)
            if side.is_multi_label:
                below = f"{int((own & other).sum())} of {int((own | other).sum())}"
            style: Any = {"size": 6, "ha": "center", "va": "center", "c": INK if right else WRONG}
            axes.text(x, y + 0.5 + _LINE / 2, below, **style)
    numbers = {
        "queries": chosen[queries].tolist(),
        "neighbours": chosen[found].tolist(),
        "wrong": (~shared).tolist(),
        "precision": precision,
    }
    return Picture("neighbours", title, caption, figure, numbers)


def similarity(view: View) -> Picture | None:
    """The cosines between class means; None with fewer than three classes."""
    matrices, numbers, pairs = [], {}, []
    sides = view.sides if view.holds_classes_out else [view.shown]
    for side in sides:
        membership = side.membership
        present = np.flatnonzero(membership.any(0))
        if len(present) < 3:
            return None
        cosines = class_similarity(side.outputs.features, membership[:, present])
        order = class_order(cosines)
        names = [side.images.class_names[c] for c in present]
        matrices.append((cosines[np.ix_(order, order)], [names[c] for c in order]))
        pairs = [
            (present[[a, b]], names[a], names[b], float(cosines[a, b]))
            for a, b in most_similar_pairs(cosines, 20)
        ]
        numbers[side.split] = {
            "classes": matrices[-1][1],
            "mean_cosine": float(cosines[~np.eye(len(cosines), dtype=bool)].mean()),
            "most_similar": [pair[1:] for pair in pairs],
        }
    side, noun = view.shown, view.shown.noun
    title = f"Similarity of the {noun}"
    caption = (
        f"Cosine between the mean features of two {noun}. Bright blocks: {noun} that the features "
        f"hardly tell apart. Below: the most similar pairs of {side.split} {noun}."
    )
    inches = 5.4 if len(sides) > 1 else 7.4
    size = (inches * len(sides) + 0.9, inches + STRIP + 0.2)
    figure = new_figure(*size, title=title, caption=caption)
    grid = GridSpec(2, len(sides), figure=figure, height_ratios=[inches, STRIP])
    off_diagonal = [cosines[~np.eye(len(cosines), dtype=bool)] for cosines, _ in matrices]
    values, panels = np.concatenate(off_diagonal), []
    colors = Normalize(values.min(), values.max())
    for number, (of, (cosines, names)) in enumerate(zip(sides, matrices, strict=True)):
        axes = figure.add_subplot(grid[0, number])
        axes.imshow(cosines, cmap="cividis", norm=colors)
        axes.set_title(f"{len(names)} {of.noun} of the {of.split} images", size=LARGE)
        axes.tick_params(length=0)
        ticks = [short(name, 14) for name in names] if len(names) <= _NAMED else []
        font = min(MEDIUM, 72 * 0.75 * inches / len(names))
        axes.set_yticks(range(len(ticks)), ticks, fontsize=font)
        axes.set_xticks(range(len(ticks)), ticks, fontsize=font, rotation=90)
        if not ticks:
            axes.set_ylabel(f"{len(names)} {noun}", fontsize=MEDIUM)
        panels.append(axes)
    bar = figure.colorbar(ScalarMappable(colors, "cividis"), ax=panels, shrink=0.7, pad=0.02)
    bar.set_label("cosine between class means", fontsize=MEDIUM)
    bar.ax.tick_params(labelsize=MEDIUM)
    typical = _typical_images(side)
    shown = [([typical[a], typical[b]], names, f"{s:.2f}") for (a, b), *names, s in pairs[:_PAIRS]]
    draw_strip(figure, grid[1, :], f"most similar pairs of {noun}", shown)
    rows = [(a, b, f"{cosine:.3f}") for _, a, b, cosine in pairs]
    table = [("class", "most similar class", "cosine"), *rows]
    return Picture("similarity", title, caption, figure, numbers, table)


def _typical_images(side: Side) -> dict[int, np.ndarray]:
    """For every class an image: the nearest to its mean; one with few labels, where it can be."""
    membership, units = side.membership, unit_features(side.outputs.features)
    means, labels = class_means(units, membership), membership.sum(1)
    typical = {}
    # Class by class: the cosines of all images to all classes may not fit into memory.
    for c in np.flatnonzero(membership.any(0)).tolist():
        rows = np.flatnonzero(membership[:, c])
        rows = rows[labels[rows] == labels[rows].min()]
        typical[c] = rows[(units[rows] @ means[c]).argmax()]
    images = side.read(list(typical.values()))
    return dict(zip(typical, images, strict=True))


def by_class(view: View) -> Picture:
    """How well each class is recognised: a bar for each, and the classes with the lowest values."""
    side, counts, sides = view.shown, view.run.class_counts, [view.shown]
    name, measure, title = "accuracy", "accuracy (%)", "Accuracy by class"
    long_tailed = False
    if side.is_multi_label:
        scores, targets = side.outputs.logits(), np.asarray(side.outputs.labels)
        precisions = average_precisions(scores.T, targets.T)
        values = [(precisions, float(np.nanmean(precisions)))]
        name, measure = "precision", "average precision (%)"
        title = "Average precision by label"
    elif view.holds_classes_out:
        sides, values = view.sides, [_nearest_mean_accuracies(of) for of in view.sides]
        # The mean leaves out the image itself.
        measure = "nearest to the mean of their class (%)"
        title = "Accuracy by class, by the nearest class mean"
    else:
        predictions = predict_classes(side.outputs.logits())
        accuracies = class_accuracies(predictions, side.outputs.labels, len(counts))
        values = [(accuracies, float((predictions == side.outputs.labels).mean()))]
        long_tailed = counts.max() >= _LONG_TAIL * counts.min()
    noun, class_names = side.noun, side.images.class_names
    caption = (
        f"A bar for each of the {noun}; the dashed line is the mean (of accuracies, over all "
        f"images). Below: the {side.split} {noun} with the lowest values, each by a typical image."
    )
    legend = [
        Line2D([], [], color=INK, linewidth=2, label=f"mean of {_WINDOW} {noun} side by side"),
        Line2D([], [], color=GREEN, linewidth=2, label="training images (right axis)"),
    ]
    legend, height, numbers = legend if long_tailed else [], 3.0, {}
    figure = new_figure(9.6, height + STRIP, title=title, caption=caption, legend=legend)
    grid = GridSpec(2, len(sides), figure=figure, height_ratios=[height, STRIP])
    for number, (of, (of_classes, mean)) in enumerate(zip(sides, values, strict=True)):
        by = -counts if long_tailed else -np.nan_to_num(of_classes, nan=-1)
        order = np.argsort(by, kind="stable")
        order = order[~np.isnan(of_classes[order])]
        axes = figure.add_subplot(grid[0, number])
        axes.set_title(f"{of.split} images", size=LARGE)
        draw_bars(axes, of_classes[order], mean, view.color(of))
        xlabel = f"{len(order)} {noun}, from the highest value"
        if long_tailed:
            xlabel = f"{len(order)} {noun}, from the most training images"
            draw_tail(axes, of_classes[order], counts[order])
        axes.set_xlabel(xlabel, fontsize=MEDIUM)
        if number == 0:
            axes.set_ylabel(measure, fontsize=MEDIUM)
        names = [of.images.class_names[c] for c in order]
        by_name = dict(zip(names, of_classes[order].tolist(), strict=True))
        numbers[of.split] = {"mean": mean, "classes": by_name}
    of_classes, typical = values[-1][0], _typical_images(side)
    # Of equal values, the class with the most training images is the most surprising.
    lowest = np.lexsort((-counts if long_tailed else np.zeros(len(of_classes)), of_classes))
    lowest = lowest[~np.isnan(of_classes[lowest])].tolist()
    worst = [([typical[c]], [class_names[c]], f"{100 * of_classes[c]:.0f} %") for c in lowest]
    draw_strip(figure, grid[1, :], f"{noun} with the lowest values", worst[:_WORST])
    columns = {
        f"class ({side.split} images)": [class_names[c] for c in lowest],
        measure: [f"{100 * of_classes[c]:.1f}" for c in lowest],
        **({"training images": counts[lowest].tolist()} if long_tailed else {}),
    }
    table = [[*columns], *zip(*columns.values(), strict=True)]
    return Picture(name, title, caption, figure, numbers, table)


def _nearest_mean_accuracies(side: Side) -> tuple[np.ndarray, float]:
    labels = np.asarray(side.outputs.labels)
    right = nearest_mean_predictions(side.outputs.features, labels) == labels
    counts = np.bincount(labels)
    accuracies = np.bincount(labels, right) / np.maximum(counts, 1)
    return np.where(counts > 0, accuracies, np.nan), float(right.mean())


def draw_bars(axes: Axes, values: np.ndarray, mean: float, color: str) -> None:
    """Draws a bar for every class, and a line at their mean: all from 0 to 1."""
    style_axes(axes, grid="y")
    places = np.arange(1, len(values) + 1)
    axes.bar(places, 100 * values, width=0.9, color=color, linewidth=0)
    axes.axhline(100 * mean, color=INK, linewidth=1.1, linestyle="--", zorder=3)
    axes.annotate(
        f"mean {100 * mean:.1f} %",
        (1, 100 * mean),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(-2, 4),
        ha="right",
        size=MEDIUM,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5},
        zorder=5,
    )
    axes.set_xlim(0.3, len(places) + 0.7)
    axes.set_ylim(0, 103)


def draw_tail(axes: Axes, values: np.ndarray, counts: np.ndarray) -> None:
    """Draws a moving mean of the bars, and the training images of every class."""
    middle = np.convolve(100 * values, np.full(_WINDOW, 1 / _WINDOW), "valid")
    start = 1 + (_WINDOW - 1) / 2
    axes.plot(start + np.arange(len(middle)), middle, color=INK, linewidth=2, zorder=4)
    twin = axes.twinx()
    twin.plot(np.arange(1, len(counts) + 1), counts, color=GREEN, linewidth=2)
    twin.set_yscale("log")
    low, high = counts.min(), counts.max()
    ticks = [k * 10**e for e in range(7) for k in (1, 2, 5) if low <= k * 10**e <= high]
    twin.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    twin.set_yticks([], minor=True)
    twin.set_ylim(0.9 * low, 1.1 * high)
    twin.set_ylabel("training images", fontsize=MEDIUM)
    twin.tick_params(labelsize=MEDIUM)
    twin.spines["top"].set_visible(False)
