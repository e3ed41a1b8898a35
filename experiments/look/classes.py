"""Classes: nearest neighbours, similarity, and how well each one is recognised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

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
from experiments.look.view import Side, View, some_rows
from experiments.reporting.look.classes import (
    Bars,
    Matrix,
    Shown,
    accuracy_figure,
    similarity_figure,
)
from experiments.reporting.look.neighbours import Row, neighbours_figure
from experiments.reporting.look.page import Picture, Table

NEIGHBOURS = 8
"""Neighbours of a query."""
QUERIES = 14
"""Queries, each of another class."""

_PAIRS = 5
_WORST = 10
_LONG_TAIL = 10
"""Ratio of the largest to the smallest class from which training images are drawn, too."""


def neighbours(view: View) -> Picture | None:
    """The nearest neighbours of some images; None with fewer than three images."""
    side, chosen = view.shown, some_rows(len(view.shown.images.labels))
    if len(chosen) < 3:
        return None
    features, membership = side.outputs.features[chosen], side.membership[chosen]
    rng, multi_label = view.rng(20), side.is_multi_label
    # Of another class each, as far as possible.
    order = rng.permutation(np.flatnonzero(membership.any(1)))
    _, first = np.unique(membership[order].argmax(1), return_index=True)
    queries = order[np.sort(first)[:QUERIES]]
    found = nearest_neighbours(features, queries, NEIGHBOURS).indices
    shared = np.asarray((membership[queries, None] & membership[found]).any(2))
    rows = []
    for query, nearest, same in zip(queries, found, shared, strict=True):
        names = [
            _shared_text(membership[query], membership[n])
            if multi_label
            else ("" if right else _label_text(side, membership[n]))
            for n, right in zip(nearest, same, strict=True)
        ]
        images = side.read(chosen[[query, *nearest]])
        rows.append(Row(_label_text(side, membership[query]), images, names, (~same).tolist()))
    precision = neighbour_precision(features, membership, NEIGHBOURS)
    if multi_label:
        reading = (
            "a frame: no label in common with the query; below each, the labels in common, of all "
            "labels of the two images"
        )
        share = "share a label with it"
    else:
        reading = "a frame: another class than that of the query, named below"
        share = "have its class"
    title = f"Nearest neighbours of some {side.split} images"
    those = f"all {side.split} images"
    if len(chosen) < len(side.images.labels):
        those = f"{len(chosen):,} random {side.split} images"
    caption = (
        f"The first image of a row is a query, the others have the largest cosine to it among "
        f"{those} ({reading}). Over all of these images as queries, {100 * precision:.1f} % of "
        f"the {found.shape[1]} nearest neighbours {share}."
    )
    numbers = {
        "queries": chosen[queries].tolist(),
        "neighbours": chosen[found].tolist(),
        "wrong": (~shared).tolist(),
        "precision": precision,
    }
    figure = neighbours_figure(rows, title=title, caption=caption)
    return Picture("neighbours", title, caption, figure, numbers)


def _label_text(side: Side, membership: np.ndarray) -> str:
    return ", ".join(side.images.class_names[c] for c in np.flatnonzero(membership))


def _shared_text(one: np.ndarray, other: np.ndarray) -> str:
    return f"{int((one & other).sum())} of {int((one | other).sum())}"


def similarity(view: View) -> Picture | None:
    """The cosines between class means; None with fewer than three classes."""
    matrices, numbers = [], {}
    sides = view.sides if view.holds_classes_out else [view.shown]
    pairs: list[tuple[str, str, float]] = []
    for side in sides:
        membership = side.membership
        present = np.flatnonzero(membership.any(0))
        if len(present) < 3:
            return None
        cosines = class_similarity(side.outputs.features, membership[:, present])
        order = class_order(cosines)
        names = [side.images.class_names[c] for c in present[order]]
        title = f"{len(present)} {side.noun} of the {side.split} images"
        matrices.append(Matrix(title, names, cosines[np.ix_(order, order)]))
        pairs = [
            (side.images.class_names[present[a]], side.images.class_names[present[b]], s)
            for a, b in most_similar_pairs(cosines, 20)
            for s in [float(cosines[a, b])]
        ]
        off = cosines[~np.eye(len(cosines), dtype=bool)]
        numbers[side.split] = {
            "classes": names,
            "mean_cosine": float(off.mean()),
            "most_similar": pairs,
        }
    side = sides[-1]
    typical = _typical_images(side)
    index = {name: c for c, name in enumerate(side.images.class_names)}
    shown = [
        Shown(np.stack([typical[index[a]], typical[index[b]]]), (a, b), f"{cosine:.2f}")
        for a, b, cosine in pairs[:_PAIRS]
    ]
    noun = side.noun
    title = f"Similarity of the {noun}"
    caption = (
        f"Cosine between the mean features of two {noun}, with similar {noun} side by side; the "
        f"diagonal is 1. Bright blocks are {noun} that the features hardly tell apart. Below: the "
        f"most similar pairs of {side.split} {noun}, each with a typical image and the cosine."
    )
    rows = [[a, b, f"{cosine:.3f}"] for a, b, cosine in pairs]
    table = Table(["class", "most similar class", "cosine"], rows)
    figure = similarity_figure(matrices, shown, title=title, caption=caption, classes=noun)
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


def by_class(view: View) -> Picture | None:
    """How well each class is recognised."""
    if view.shown.is_multi_label:
        return _precision_by_class(view)
    if view.holds_classes_out:
        return _nearest_mean_by_class(view)
    return _accuracy_by_class(view)


def _accuracy_by_class(view: View) -> Picture:
    side, counts = view.shown, view.run.class_counts
    predictions = predict_classes(side.outputs.logits())
    result = class_accuracies(predictions, side.outputs.labels, len(counts))
    overall = float((predictions == side.outputs.labels).mean())
    long_tailed = counts.max() >= _LONG_TAIL * counts.min()
    caption = f"A bar is the accuracy on the {side.split} images of one class; the dashed line is "
    caption += "the accuracy on all images."
    if long_tailed:
        caption += (
            " Classes are sorted by their training images, which the green line shows on the right "
            "axis (logarithmic): the tail is at the right."
        )
    else:
        caption += " Classes are sorted from the best one."
    values = {side.split: (result.accuracies, overall)}
    return _bars_picture(
        view,
        [side],
        values,
        measure="accuracy (%)",
        name="accuracy",
        title="Accuracy by class",
        caption=caption,
        counts=counts if long_tailed else None,
    )


def _nearest_mean_by_class(view: View) -> Picture:
    values = {}
    for side in view.sides:
        labels = np.asarray(side.outputs.labels)
        right = nearest_mean_predictions(side.outputs.features, labels) == labels
        counts = np.bincount(labels)
        accuracies = np.bincount(labels, right) / np.maximum(counts, 1)
        values[side.split] = (np.where(counts > 0, accuracies, np.nan), float(right.mean()))
    return _bars_picture(
        view,
        view.sides,
        values,
        measure="nearest to the mean of their class (%)",
        name="accuracy",
        title="Accuracy by class, by the nearest class mean",
        caption="A bar is the share of the images of one class whose features are nearest (cosine) "
        "to the mean of that class, among all classes of the split; the mean leaves out the image "
        "itself. A dashed line is the share of all images.",
    )


def _precision_by_class(view: View) -> Picture:
    side = view.shown
    scores, targets = side.outputs.logits(), np.asarray(side.outputs.labels)
    precisions = average_precisions(scores.T, targets.T)
    return _bars_picture(
        view,
        [side],
        {side.split: (precisions, float(np.nanmean(precisions)))},
        measure="average precision (%)",
        name="precision",
        title="Average precision by label",
        caption=f"A bar is the average precision of the ranking of all {side.split} images by the "
        "logit of one label; the dashed line is their mean, mAP@class. Labels are sorted from the "
        "best one.",
    )


def _bars_picture(
    view: View,
    sides: Sequence[Side],
    values: Mapping[str, tuple[np.ndarray, float]],
    *,
    measure: str,
    name: str,
    title: str,
    caption: str,
    counts: np.ndarray | None = None,
) -> Picture:
    panels, numbers = [], {}
    for side in sides:
        of_classes, mean = values[side.split]
        by = -np.nan_to_num(of_classes, nan=-1) if counts is None else -counts
        order = np.argsort(by, kind="stable")
        order = order[~np.isnan(of_classes[order])]
        heading = f"{side.split} images"
        drawn_counts = None if counts is None else counts[order]
        panels.append(Bars(heading, of_classes[order], mean, view.color(side), drawn_counts))
        classes = [side.images.class_names[c] for c in order]
        numbers[side.split] = {
            "mean": mean,
            "classes": dict(zip(classes, of_classes[order].tolist(), strict=True)),
        }
    side = sides[-1]
    of_classes = values[side.split][0]
    # Of equal values, the class with the most training images is the most surprising.
    ties = np.zeros(len(of_classes)) if counts is None else -counts
    lowest = np.lexsort((ties, of_classes))
    lowest = lowest[~np.isnan(of_classes[lowest])]
    typical, class_names = _typical_images(side), side.images.class_names
    worst = [
        Shown(typical[c][None], (class_names[c],), f"{100 * of_classes[c]:.0f} %")
        for c in lowest[:_WORST].tolist()
    ]
    rows = [
        [class_names[c], f"{100 * of_classes[c]:.1f}"]
        + ([] if counts is None else [int(counts[c])])
        for c in lowest.tolist()
    ]
    headings = [f"class ({side.split} images)", measure]
    headings += [] if counts is None else ["training images"]
    caption += (
        f" Below: the {side.split} {side.noun} with the lowest values, each by a typical image."
    )
    figure = accuracy_figure(
        panels, worst, title=title, caption=caption, measure=measure, classes=side.noun
    )
    return Picture(name, title, caption, figure, numbers, Table(headings, rows))
