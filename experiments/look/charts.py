"""Charts of the classifier, of its confidence, and of the metrics log."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

import jaxloss
from experiments.evaluation.classification import (
    calibration,
    predict_classes,
    softmax_confidences,
)
from experiments.evaluation.subspace import span_shares
from experiments.look.page import Picture
from experiments.look.view import View
from experiments.protocols.few_shot import FewShotConfig
from experiments.protocols.integration import terms
from experiments.reporting.markdown import scaled, with_unit
from experiments.reporting.style import (
    BLUE,
    GREY,
    INK,
    VERMILLION,
    series_mark,
    style_axes,
)

_BINS = 15
_POWERS = (0.1, 0.2, 0.3, 0.5, 1.0)
"""Exponents of the curves of Fig. A."""
_OVERLAPS = (0.05, *(k / 10 for k in range(1, 11)))
_FIRST = ("loss", "validation")
"""Names of the metrics log that come first."""


def _kernel(view: View) -> np.ndarray | None:
    """The weights [d, C] of a trained linear classifier; None where the run has none.

    Those of weights that are all zero span nothing, and count as none.
    """
    head, config = view.run.state.params["classifier"], view.run.plan.config
    if "kernel" not in head:
        return None
    if isinstance(config, FewShotConfig) and terms(config.loss.name).classification is None:
        return None
    kernel = np.asarray(head["kernel"], np.float64)
    return kernel if kernel.any() else None


def spectrum(view: View) -> Picture | None:
    """The classifier's singular values, and the features' variance in its span."""
    kernel = _kernel(view)
    if kernel is None:
        return None
    shares = [span_shares(side.outputs.features, kernel) for side in view.sides]
    values, dim = shares[0].singular_values, len(kernel)
    rank = len(values)
    legend = []
    # The lines of two splits may be on top of each other.
    for side, share, width in zip(view.sides, shares, (5, 2)[-len(shares) :], strict=True):
        inside = 100 * share.inside
        label = f"{side.split} images: {inside:.1f} % inside, {100 - inside:.1f} % outside"
        legend.append(Line2D([], [], color=side.color, linewidth=width, label=label))
    label = f"{rank} random directions of {dim}: {100 * rank / dim:.1f} % inside"
    legend.append(Line2D([], [], color=GREY, linestyle="--", label=label))
    picture = Picture(
        "spectrum",
        "The classifier's subspace",
        "Left: the singular values of the classifier W. Right: the variance of the features in "
        "their directions; what a curve lacks to 100 % is outside of the span of W.",
        (9.6, 3.7),
        legend,
    )
    left, right = picture.figure.subplots(1, 2)
    places = np.arange(rank + 1)
    left.plot(places[1:], values, ".-", color=INK, markersize=5, linewidth=1)
    left.set(xlabel="number j of the singular value", ylabel=r"singular value $\lambda_j$ of W")
    left.set(title=f"Rank {rank} of {dim} dimensions", ylim=(0, 1.05 * values[0]))
    curves = [100 * np.concatenate([[0], share.cumulative]) for share in shares]
    for line, curve in zip(legend, [*curves, 100 * places / dim], strict=True):
        style = {"color": line.get_color(), "linewidth": line.get_linewidth()}
        right.plot(places, curve, line.get_linestyle(), **style)
    right.set(
        xlabel="number of left singular vectors of W, from the first",
        ylabel="variance of the features within them (%)",
        title="Variance inside the span of W",
        xlim=(0, 1.04 * rank),
        ylim=(0, 103),
    )
    _style(left, right)
    picture.numbers = {
        "singular_values": values.tolist(),
        "inside": {s.split: share.inside for s, share in zip(view.sides, shares, strict=True)},
        "rank": rank,
    }
    return picture


def overlap(view: View) -> Picture | None:
    """Figure A of seed 000, with the classifier's own spectrum; of few-shot transfer alone."""
    kernel, config = _kernel(view), view.run.plan.config
    if kernel is None or not isinstance(config, FewShotConfig):
        return None
    weights = jnp.asarray(kernel, jnp.float32)
    values = span_shares(view.shown.outputs.features, kernel).singular_values
    relative, exponents = values / values[0], np.array(_OVERLAPS)
    overlaps = [float(jaxloss.spectral_overlap(weights, p)) / float(values[0]) for p in _OVERLAPS]
    picture = Picture(
        "overlap",
        "Overlap of a spectral sum",
        "Left: the overlap λ̃(1 − λ̃ᵖ) of the classifier and the metric loss along a direction "
        "(Kobayashi, BMVC 2024, Fig. A), with a mark for each singular value of W. Right: its "
        "maximum over the singular values.",
        (9.6, 4.0),
    )
    left, right = picture.figure.subplots(1, 2)
    along = np.linspace(0, 1, 401)
    for number, p in enumerate(_POWERS):
        mark = series_mark(number)
        left.plot(along, along * (1 - along**p), color=mark.color, linewidth=1.3)
        style = {"color": mark.color, "markersize": 3.5, "alpha": 0.7, "label": f"p = {p:g}"}
        left.plot(relative, relative * (1 - relative**p), mark.marker, ls="None", **style)
    left.set(
        xlabel=r"relative singular value $\tilde\lambda = \lambda / \lambda_{\max}$",
        ylabel=r"overlap $\tilde\lambda\,(1 - \tilde\lambda^p)$",
        title="Singular values of W on the curves of Fig. A",
        xlim=(0, 1.02),
    )
    bound = exponents * (1 + exponents) ** -(1 + 1 / exponents)
    right.plot(exponents, bound, color="#cccccc", linewidth=6, label="largest for any spectrum")
    right.plot(exponents, overlaps, "o-", color=INK, markersize=4, label="W of this run")
    if terms(config.loss.name).integration == "spectral":
        used = config.loss.power
        right.axvline(used, color=VERMILLION, linestyle=":", label=f"p = {used:g} of this run")
    right.set(
        xlabel="exponent p",
        ylabel=r"spectral norm of the overlap / $\lambda_{\max}$",
        title="Overlap with the spectral complement",
    )
    right.set_xlim(left=0)
    for axes, place, scale in ((left, "upper left", 1.5), (right, "lower right", 1.0)):
        axes.set_ylim(bottom=0)
        axes.legend(loc=place, markerscale=scale)
    _style(left, right)
    picture.numbers = {
        "relative_singular_values": relative.tolist(),
        "overlaps": {f"{p:g}": value for p, value in zip(_OVERLAPS, overlaps, strict=True)},
    }
    return picture


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
    middles, used = (np.arange(_BINS) + 0.5) * 100 / _BINS, result.counts > 0
    accuracies, width = 100 * result.accuracies[used], 92 / _BINS
    upper.bar(middles[used], accuracies, width=width, color=BLUE, label="accuracy of a bin")
    upper.plot([0, 100], [0, 100], color=INK, linestyle="--", label="confidence = accuracy")
    points = upper.plot(100 * result.confidences[used], accuracies, "D", color=VERMILLION)
    upper.set(title=f"Expected calibration error {100 * result.error:.1f} %")
    upper.set(xlim=(0, 100), ylim=(0, 103), ylabel="accuracy (%)")
    points[0].set(label="mean confidence of a bin", markersize=4, markeredgecolor="white")
    # Above the bars of low confidence if these are low, else below.
    low = accuracies[middles[used] < 55].max(initial=0) < 70
    upper.legend(loc="upper left" if low else "lower right", frameon=True, edgecolor="none")
    lower.bar(middles, 100 * result.counts / result.counts.sum(), width=width, color="#999999")
    lower.set(xlabel="confidence: largest probability of the softmax (%)", ylabel="images (%)")
    _style(upper, lower)
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
    log = log.drop(columns="images_per_second", errors="ignore")
    panels: dict[str, list[str]] = {}
    for name in sorted(log, key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n)):
        panels.setdefault(str(name).rpartition("_")[2], []).append(str(name))
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows, last = -(-len(panels) // columns), {}
    picture = Picture(
        "training",
        "Training",
        "The metrics log; losses are of single batches, with augmentation. Dotted: the checkpoint "
        f"of step {view.run.step}.",
        (3.4 * columns, 2.7 * rows),
    )
    for number, (word, names) in enumerate(panels.items()):
        axes = picture.figure.add_subplot(rows, columns, number + 1)
        for place, name in enumerate(names):
            # A number that is not finite is text in the log.
            values = log[name].dropna().astype(float).replace([np.inf, -np.inf], np.nan)
            last[name] = None if np.isnan(values.iloc[-1]) else float(values.iloc[-1])
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
        _style(axes)
        axes.set_title(word if len(names) > 1 else names[0].replace("_", " "))
        if names == ["validation"]:
            axes.set_title(with_unit(f"validation: {metric.name}", metric.unit))
        if len(names) > 1:
            low, high = axes.get_ylim()
            axes.set_ylim(low, high + 0.17 * len(names) * (high - low))  # Room for the legend.
            axes.legend(loc="upper right")
    picture.numbers = {"last": last}
    return picture


def _style(*panels: Axes) -> None:
    for axes in panels:
        style_axes(axes)
