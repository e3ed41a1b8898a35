"""Charts of the classes, of the classifier and its confidence, and of the metrics log."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from experiments.evaluation import classification
from experiments.evaluation import feature_space as space
from experiments.look.page import Picture, Tile, draw_rows, short, wrapped
from experiments.look.view import Side, View
from experiments.papers.hyperspherical import calibrated_logits
from experiments.reporting.markdown import scaled, with_unit
from experiments.reporting.style import BLUE, COLORS, GREY, INK, VERMILLION
from experiments.training.run_directory import METRICS_FILE, read_metrics

_STRIP = 2.0  # Inches of the height of a row of images below a chart.
_NAMED = 60  # Names are written beside a matrix of at most so many classes.
_WORST = 10
_BARS = 30  # At most so many bars have names.
_LEVEL = 6  # At most so many of them side by side.
_LONG_TAIL = 10  # Ratio of the largest to the smallest class from which a tail is drawn.
_BINS = 15


def _count_along(axes: Axes) -> None:
    """The x axis counts: steps, classes or dimensions."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def similarity(view: View) -> Picture | None:
    """The cosines between class means; None with fewer than three classes."""
    sides, noun = view.sides if view.holds_classes_out else [view.shown], view.shown.noun
    if min(len(side.similar_classes[0]) for side in sides) < 3:
        return None
    inches = 5.4 if len(sides) > 1 else 7.4
    picture = Picture(
        "similarity",
        f"Similarity of the {noun}",
        f"Cosine between the mean features of two {noun}. Brightest: those {noun} that the "
        f"features tell apart least. Below: the most similar pairs of {view.shown.split} {noun}, "
        "with their cosines.",
        ((inches + 0.8) * len(sides), inches + _STRIP),
    )
    rows: list[Any] = [[side.split for side in sides], ["pairs"] * len(sides)]
    panels = picture.figure.subplot_mosaic(rows, height_ratios=[inches, _STRIP])
    tiles = []
    for side in sides:
        (classes, cosines), axes = side.similar_classes, panels[side.split]
        names, pairs = side.names_of(classes), space.most_similar_pairs(cosines, 20)
        itself = np.eye(len(cosines), dtype=bool)  # The ones of the diagonal.
        different = cosines[~itself]
        drawn = axes.imshow(np.where(itself, np.nan, cosines), cmap="cividis")
        ticks = [short(name, 20) for name in names] if len(names) <= _NAMED else []
        font = min(9, 54 * inches / len(names))  # Points; names fill three quarters of the side.
        axes.set_yticks(range(len(ticks)), ticks, fontsize=font)
        axes.set_xticks(range(len(ticks)), ticks, fontsize=font, rotation=90)
        axes.grid(visible=False)
        axes.set_title(f"{len(names)} {noun} of the {side.split} images")
        picture.figure.colorbar(drawn, ax=axes, shrink=0.7, label="cosine between class means")
        picture.numbers[side.split] = {
            "classes": names,
            "mean_cosine": float(different.mean()),
            "most_similar": [(names[a], names[b], cosines[a, b]) for a, b in pairs],
        }
        if side is view.shown:
            for a, b in pairs[: 2 + len(sides)]:
                note = f"\n{cosines[a, b]:.2f}"
                tiles += [*(_typical_tile(side, classes[c], note) for c in (a, b)), Tile()]
    draw_rows(panels["pairs"], [("", tiles)], f"most similar pairs of {noun}")
    return picture


def _typical_tile(side: Side, c: int, note: str = "") -> Tile:
    """A class by the image nearest to its mean; one with few labels, where it can be."""
    rows = np.flatnonzero(side.membership[:, c])
    units, labels = space.unit_features(side.outputs.features[rows]), side.membership[rows].sum(1)
    cosines = np.where(labels == labels.min(), units @ units.mean(0), -np.inf)
    (image,) = side.outputs.images(rows[[cosines.argmax()]])
    return Tile(image, "#cccccc", wrapped(side.outputs.class_names[c], 11, 2) + note)


def by_class(view: View) -> Picture:
    """How well each class is recognised: a bar for each, and the classes with the lowest values."""
    side, held_out, counts = view.shown, view.holds_classes_out, view.run.class_counts
    sides, noun = view.sides if held_out else [side], side.noun
    name, title, measure = "accuracy", "Accuracy by class", "accuracy (%)"
    if side.is_multi_label:
        name, title, measure = "precision", "Average precision by label", "average precision (%)"
    elif held_out:
        title, measure = f"{title}, by the nearest class mean", "nearest to their class mean (%)"
    balanced = held_out or side.is_multi_label or counts.max() < _LONG_TAIL * counts.min()
    first = "the highest value" if balanced else "the most training images"
    picture = Picture(
        name,
        title,
        f"A bar for each of the {noun}; the dashed line is the mean (of accuracies, over all "
        f"images). Below: the {side.split} {noun} with the lowest values, each by a typical image.",
        (9.6, 3.4 + _STRIP),
    )
    rows: list[Any] = [[of.split for of in sides], ["lowest"] * len(sides)]
    panels = picture.figure.subplot_mosaic(rows, height_ratios=[3.4, _STRIP])
    table: Any = None
    for of in sides:
        values, mean = _recognised(of, by_means=held_out)
        table = pd.DataFrame({"value": values, "images": 0 if balanced else counts}).dropna()
        by = "value" if balanced else "images"
        table = table.sort_values(by, ascending=False, kind="stable")
        axes, bars = panels[of.split], np.arange(1, len(table) + 1)
        axes.bar(bars, 100 * table["value"], width=0.9, color=of.color)
        axes.axhline(100 * mean, color=INK, linewidth=1.1, linestyle="--", zorder=3)
        axes.set(xlim=(0.3, len(bars) + 0.7), xlabel=f"{len(bars)} {noun}, from {first}")
        axes.set(ylim=(0, 103), ylabel=measure, title=f"{of.split} images, mean {100 * mean:.1f} %")
        axes.grid(visible=False, axis="x")
        names = of.names_of(table.index)
        if len(bars) * len(sides) <= _LEVEL:
            width = 100 // (len(bars) * len(sides))
            axes.set_xticks(bars, [wrapped(name, width, 5) for name in names])
        elif len(bars) <= _BARS:
            labels = [short(name, 28) for name in names]
            axes.set_xticks(bars, labels, rotation=40, ha="right", rotation_mode="anchor")
        else:
            _count_along(axes)
        by_name = dict(zip(names, table["value"].tolist(), strict=True))
        picture.numbers[of.split] = {"mean": mean, "classes": by_name}
    # Of equal values, the class with the most training images is the most surprising.
    lowest = table.sort_values("value", kind="stable")["value"][:_WORST]
    tiles = [_typical_tile(side, c, f"\n{100 * value:.0f} %") for c, value in lowest.items()]
    draw_rows(panels["lowest"], [("", tiles)], f"{noun} with the lowest values")
    return picture


def _recognised(side: Side, *, by_means: bool) -> tuple[np.ndarray, float]:
    """How well every class is recognised, NaN where it has no image, and the mean."""
    features, labels, logits = side.outputs[:3]
    if side.is_multi_label:
        precisions = classification.average_precisions(logits().T, labels.T)
        return precisions, float(np.nanmean(precisions))
    found = space.nearest_mean_predictions(features, labels) if by_means else logits().argmax(1)
    accuracies = classification.class_accuracies(found, labels, len(side.outputs.class_names))
    return accuracies, float((found == labels).mean())


def spectrum(view: View) -> Picture | None:
    """The singular values of a trained linear classifier, and the features' variance in its span.

    None without such a classifier, and where its weights [d, C] are all zero.
    """
    kernel = np.asarray(view.run.state.params["classifier"].get("kernel", 0), np.float64)
    if view.run.objective.classifier_state is None or not kernel.any():
        return None
    basis, values = space.span(kernel)
    dim, rank = basis.shape
    values, places = values[:rank], np.arange(rank + 1)
    picture = Picture(
        "spectrum",
        "The classifier's subspace",
        "First: the singular values of the classifier W. Second: the variance of the features in "
        "their directions; what a curve lacks to 100 % is outside of the span of W.",
        (9.6, 4.3),
        {"singular_values": values.tolist(), "inside": {}, "rank": rank},
    )
    left, right = picture.figure.subplots(1, 2)
    left.plot(places[1:], values, ".-", color=INK, markersize=5, linewidth=1)
    left.set(xlabel="number of the singular value", ylabel="singular value of W", ylim=(0, None))
    left.set_title(f"Rank {rank} of {dim} dimensions")
    # The lines of two splits may be on top of each other.
    for side, width in zip(view.sides, (5, 2)[-len(view.sides) :], strict=True):
        within = 100 * np.cumsum([0, *space.variance_shares(side.outputs.features, basis)])
        label = f"{side.split} images: {within[-1]:.1f} % inside"
        right.plot(places, within, color=side.color, linewidth=width, label=label)
        picture.numbers["inside"][side.split] = within[-1] / 100
    label = f"{rank} random directions of {dim}: {100 * rank / dim:.1f} % inside"
    right.plot(places, 100 * places / dim, color=GREY, linestyle="--", label=label)
    right.set(
        xlabel="number of left singular vectors of W, from the first",
        ylabel="variance of the features within them (%)",
        title="Variance inside the span of W",
        ylim=(0, 103),
    )
    right.legend()
    for axes in (left, right):
        _count_along(axes)
    return picture


def reliability(view: View) -> Picture | None:
    """Accuracy against confidence; None where predictions have no confidence."""
    side, config = view.shown, cast(Any, view.run.plan.config)
    if view.holds_classes_out or side.is_multi_label:
        return None
    logits = calibrated = side.outputs.logits()
    if "evaluation" in vars(config):
        calibrated = calibrated_logits(config, side.outputs)
    correct = logits.argmax(1) == side.outputs.labels
    confidences = classification.softmax_confidences(calibrated)
    result = classification.calibration(confidences, correct, bins=_BINS)
    picture = Picture(
        "reliability",
        "Reliability diagram",
        f"Accuracy on the {side.split} images against their confidence, in {_BINS} bins of equal "
        "width. Bars below the dashed line: the model is too confident.",
        (5.6, 5.6),
        {
            "calibration_error": result.error,
            "counts": result.counts.tolist(),
            "accuracies": list(map(classification.as_json_number, result.accuracies)),
        },
    )
    upper, lower = picture.figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    middles, width = (np.arange(_BINS) + 0.5) * 100 / _BINS, 92 / _BINS
    accuracies = 100 * result.accuracies  # NaN: no image.
    upper.bar(middles, accuracies, width=width, color=BLUE, label="accuracy of a bin")
    upper.plot([0, 100], [0, 100], "--", color=INK, label="confidence = accuracy")
    style: Any = {"color": VERMILLION, "markersize": 4, "markeredgecolor": "white"}
    upper.plot(100 * result.confidences, accuracies, "D", label="mean confidence of a bin", **style)
    upper.set(title=f"Expected calibration error {100 * result.error:.1f} %")
    upper.set(xlim=(0, 100), ylim=(0, 103), ylabel="accuracy (%)")
    upper.legend()
    lower.bar(middles, 100 * result.counts / result.counts.sum(), width=width, color=GREY)
    lower.set(xlabel="confidence: largest probability of the softmax (%)", ylabel="images (%)")
    return picture


def training(view: View) -> Picture | None:
    """The metrics log against the step; None without a log.

    Numbers whose names end with the same word share a panel: so do several losses.
    """
    path, metric = view.run.directory / METRICS_FILE, view.run.plan.protocol.validation_metric
    if not (path.exists() and (rows := read_metrics(path))):
        return None
    log: Any = pd.DataFrame(rows).set_index("step")
    log = log.drop(columns="images_per_second", errors="ignore")
    panels: dict[str, list[str]] = {}
    for name in sorted(log, key=lambda name: (name != "loss", name != "validation", name)):
        panels.setdefault(name.rpartition("_")[2], []).append(name)
    lines, columns = -(-len(panels) // 3), min(3, len(panels))
    picture = Picture(
        "training",
        "Training",
        "The metrics log; losses are of single batches, with augmentation. Dotted: the checkpoint "
        f"of step {view.run.step}.",
        (3.4 * columns, 2.7 * lines),
        {"last": {}},
    )
    for number, (word, names) in enumerate(panels.items()):
        axes = picture.figure.add_subplot(lines, columns, number + 1)
        for place, name in enumerate(names):
            # A number that is not finite is text in the log.
            values = log[name].dropna().astype(float).replace([np.inf, -np.inf], np.nan)
            picture.numbers["last"][name] = classification.as_json_number(values.iloc[-1])
            values = scaled(values, metric.unit) if name == "validation" else values
            style: Any = {"color": COLORS[place % len(COLORS)], "label": name.replace("_", " ")}
            axes.plot(values, "o-" if len(values) <= 30 else "-", markersize=3.5, **style)
        axes.axvline(view.run.step, color=INK, linewidth=0.9, linestyle=":")
        axes.set(xlabel="step", title=word if len(names) > 1 else names[0].replace("_", " "))
        if names == ["validation"]:
            axes.set_title(with_unit(f"validation: {metric.name}", metric.unit))
        if len(names) > 1:
            axes.legend()
        axes.set_xlim(0, 1.03 * log.index.max())
        low, high = axes.get_ylim()
        if low >= 0 and high - low < max(0.15 * high, 1e-3):  # Not the noise of a constant.
            axes.set_ylim(0, max(high, 1e-3))
        _count_along(axes)
    return picture
