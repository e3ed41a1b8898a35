"""Charts of the classifier, of its confidence, and of the metrics log."""

from __future__ import annotations

import json
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

import jaxloss
from experiments.evaluation.classification import calibration, predict_classes, softmax_confidences
from experiments.evaluation.subspace import span, variance_shares
from experiments.look.page import Picture
from experiments.look.view import View
from experiments.protocols.few_shot import FewShotConfig
from experiments.protocols.integration import terms
from experiments.reporting.markdown import scaled, with_unit
from experiments.reporting.style import BLUE, GREY, INK, VERMILLION, series_mark, style_axes

_BINS = 15
_POWERS = (0.1, 0.2, 0.3, 0.5, 1.0)
"""Exponents of the curves of Fig. A."""


def spectrum(view: View) -> Picture | None:
    """The singular values of a trained linear classifier, and the features' variance in its span.

    Of few-shot transfer, the overlap of a spectral sum, too. None without such a classifier, and
    where its weights [d, C] are all zero.
    """
    head, config = view.run.state.params["classifier"], cast(Any, view.run.plan.config)
    loss = terms(config.loss.name) if isinstance(config, FewShotConfig) else None
    kernel = np.asarray(head.get("kernel", 0), np.float64)
    if (loss and loss.classification is None) or not kernel.any():
        return None
    basis, values = span(kernel)
    dim, rank = basis.shape
    values, places = values[:rank], np.arange(rank + 1)
    lines, inside = [], {}
    # The lines of two splits may be on top of each other.
    for side, width in zip(view.sides, (5, 2)[-len(view.sides) :], strict=True):
        within = np.concatenate([[0], np.cumsum(variance_shares(side.outputs.features, basis))])
        share = inside[side.split] = float(within[-1])
        label = (
            f"{side.split} images: {100 * share:.1f} % inside, {100 - 100 * share:.1f} % outside"
        )
        style = {"color": side.color, "linewidth": width, "label": label}
        lines.append(Line2D(places, 100 * within, **style))
    label = f"{rank} random directions of {dim}: {100 * rank / dim:.1f} % inside"
    lines.append(Line2D(places, 100 * (places / dim), color=GREY, linestyle="--", label=label))
    caption = (
        "First: the singular values of the classifier W. Second: the variance of the features in "
        "their directions; what a curve lacks to 100 % is outside of the span of W."
    )
    if loss:
        caption += (
            " Third: the overlap of the classifier and the metric loss along a direction "
            "(Kobayashi, BMVC 2024, Fig. A), with a mark for each singular value of W."
        )
    panels = 3 if loss else 2
    picture = Picture("spectrum", "The classifier's subspace", caption, (4.4 * panels, 3.7), lines)
    left, right, *third = picture.figure.subplots(1, panels)
    left.plot(places[1:], values, ".-", color=INK, markersize=5, linewidth=1)
    left.set(xlabel="number j of the singular value", ylabel=r"singular value $\lambda_j$ of W")
    left.set(title=f"Rank {rank} of {dim} dimensions", ylim=(0, 1.05 * values[0]))
    for line in lines:
        right.add_line(line)
    right.set(
        xlabel="number of left singular vectors of W, from the first",
        ylabel="variance of the features within them (%)",
        title="Variance inside the span of W",
        xlim=(0, 1.04 * rank),
        ylim=(0, 103),
    )
    picture.numbers = {"singular_values": values.tolist(), "inside": inside, "rank": rank}
    for axes in (left, right, *third):
        style_axes(axes)
    if loss:
        power = config.loss.power if loss.integration == "spectral" else None
        picture.numbers["overlaps"] = _overlaps(third[0], kernel, values, power)
    return picture


def _overlaps(
    axes: Axes, kernel: np.ndarray, values: np.ndarray, power: float | None
) -> dict[str, float]:
    """Draws Figure A of seed 000, with the singular values of the classifier on its curves.

    Returns the largest overlap for every exponent, among them the run's power.
    """
    weights, relative, along = jnp.asarray(kernel), values / values[0], np.linspace(0, 1, 401)
    overlaps = {}
    for number, p in enumerate(sorted({*_POWERS, power or 1.0})):
        overlap = float(jaxloss.spectral_overlap(weights, p)) / float(values[0])
        overlaps[f"{p:g}"] = overlap
        mark, label = series_mark(number), f"p = {p:g}: {overlap:.2f}"
        axes.plot(along, along * (1 - along**p), color=mark.color, linewidth=1.3)
        style = {"color": mark.color, "markersize": 3.5, "alpha": 0.7}
        style["label"] = label + (" (this run)" if p == power else "")
        axes.plot(relative, relative * (1 - relative**p), mark.marker, ls="None", **style)
    axes.set(
        xlabel=r"relative singular value $\tilde\lambda = \lambda / \lambda_{\max}$",
        ylabel=r"overlap $\tilde\lambda\,(1 - \tilde\lambda^p)$",
        title="Overlap of a spectral sum",
        xlim=(0, 1.02),
        ylim=(0, 0.38),  # Room for the legend.
    )
    axes.legend(title="largest overlap of W", loc="upper left", markerscale=1.5, ncols=2)
    return overlaps


def reliability(view: View) -> Picture | None:
    """Accuracy against confidence; None where predictions have no confidence."""
    side, calibrated = view.shown, view.run.plan.protocol.calibrated
    if calibrated is None:
        return None
    correct = predict_classes(side.outputs.logits()) == np.asarray(side.outputs.labels)
    result = calibration(softmax_confidences(calibrated(side.outputs)), correct, bins=_BINS)
    picture = Picture(
        "reliability",
        "Reliability diagram",
        f"Accuracy on the {side.split} images against their confidence, in {_BINS} bins of equal "
        "width. Bars below the dashed line: the model is too confident.",
        (5.6, 5.6),
    )
    upper, lower = picture.figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    style_axes(upper)
    style_axes(lower)
    middles, width = (np.arange(_BINS) + 0.5) * 100 / _BINS, 92 / _BINS
    accuracies, confidences = 100 * result.accuracies, 100 * result.confidences  # NaN: no image.
    upper.bar(middles, accuracies, width=width, color=BLUE, label="accuracy of a bin")
    upper.plot([0, 100], [0, 100], color=INK, linestyle="--", label="confidence = accuracy")
    style = {"color": VERMILLION, "markersize": 4, "markeredgecolor": "white"}
    upper.plot(confidences, accuracies, "D", label="mean confidence of a bin", **style)
    upper.set(title=f"Expected calibration error {100 * result.error:.1f} %")
    upper.set(xlim=(0, 100), ylim=(0, 103), ylabel="accuracy (%)")
    # Above the bars of low confidence if these are low, else below.
    low = (np.nan_to_num(accuracies[middles < 55]) < 70).all()
    upper.legend(loc="upper left" if low else "lower right", frameon=True, edgecolor="none")
    lower.bar(middles, 100 * result.counts / result.counts.sum(), width=width, color="#999999")
    lower.set(xlabel="confidence: largest probability of the softmax (%)", ylabel="images (%)")
    picture.numbers = {
        "calibration_error": result.error,
        "counts": result.counts.tolist(),
        "accuracies": [None if np.isnan(a) else float(a) for a in result.accuracies],
    }
    return picture


def training(view: View) -> Picture | None:
    """The metrics log against the step; None without a log.

    Numbers whose names end with the same word share a panel: so do several losses.
    """
    path, metric = view.folder / "metrics.jsonl", view.run.plan.protocol.validation
    if not path.exists():
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    log: Any = pd.DataFrame([json.loads(line) for line in lines]).set_index("step")
    # A number that is not finite is text in the log.
    log = log.drop(columns="images_per_second", errors="ignore")
    names = sorted(log, key=lambda name: (name != "loss", name != "validation", name))
    panels: dict[str, list[str]] = {}
    for name in names:
        panels.setdefault(name.rpartition("_")[2], []).append(name)
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    picture = Picture(
        "training",
        "Training",
        "The metrics log; losses are of single batches, with augmentation. Dotted: the checkpoint "
        f"of step {view.run.step}.",
        (3.4 * columns, 2.7 * rows),
        numbers={"last": {}},
    )
    for number, (word, names) in enumerate(panels.items()):
        axes = picture.figure.add_subplot(rows, columns, number + 1)
        for place, name in enumerate(names):
            values = log[name].dropna().astype(float).replace([np.inf, -np.inf], np.nan)
            last = float(values.iloc[-1])
            picture.numbers["last"][name] = None if np.isnan(last) else last
            axes.plot(
                values.index,
                scaled(values, metric.unit) if name == "validation" else values,
                "o-" if len(values) <= 30 else "-",
                color=series_mark(place).color,
                markersize=3.5,
                # It may be the same as one of the others, which are drawn on top of it.
                linewidth=4 if name == "loss" and len(names) > 1 else 1.3,
                label=name.replace("_", " "),
            )
        axes.axvline(view.run.step, color=INK, linewidth=0.9, linestyle=":")
        axes.set(xlabel="step", xlim=(0, 1.03 * float(log.index.max())))
        style_axes(axes)
        axes.set_title(word if len(names) > 1 else names[0].replace("_", " "))
        if names == ["validation"]:
            axes.set_title(with_unit(f"validation: {metric.name}", metric.unit))
        if len(names) > 1:
            low, high = axes.get_ylim()
            axes.set_ylim(low, high + 0.17 * len(names) * (high - low))  # Room for the legend.
            axes.legend(loc="upper right")
    return picture
