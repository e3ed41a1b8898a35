"""The classifier: its subspace, the overlap of a spectral sum, and its confidence."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
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
from experiments.reporting.style import (
    BLUE,
    GREY,
    INK,
    LARGE,
    MEDIUM,
    VERMILLION,
    new_figure,
    series_mark,
    style_axes,
)

_BINS = 15
_POWERS = (0.1, 0.2, 0.3, 0.5, 1.0)
"""Exponents of the curves of Fig. A."""
_OVERLAPS = (0.05, *(k / 10 for k in range(1, 11)))
_WIDTHS = (5, 2)
"""Of the lines of two splits, which may be on top of each other."""


def _kernel(view: View) -> np.ndarray | None:
    """The weights [d, C] of a trained linear classifier; None where the run has none.

    Those of weights that are all zero span nothing, and count as none.
    """
    head, config = view.run.state.params["classifier"], view.config
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
    sides = {s.split: span_shares(s.outputs.features, kernel) for s in view.sides}
    values = next(iter(sides.values())).singular_values
    dim, rank = len(kernel), len(values)
    title = "The classifier's subspace"
    caption = (
        "Left: the singular values of the classifier W. Right: the variance of the features in "
        "their directions; what a curve lacks to 100 % is outside of the span of W."
    )
    legend = []
    for side, width in zip(view.sides, _WIDTHS[-len(sides) :], strict=True):
        inside = 100 * sides[side.split].cumulative[-1]
        label = f"{side.split} images: {inside:.1f} % inside, {100 - inside:.1f} % outside"
        legend.append(Line2D([], [], color=view.color(side), linewidth=width, label=label))
    label = f"{rank} random directions of {dim}: {100 * rank / dim:.1f} % inside"
    legend.append(Line2D([], [], color=GREY, linestyle="--", label=label))
    figure = new_figure(9.6, 3.7, title=title, caption=caption, legend=legend)
    left, right = figure.subplots(1, 2)
    places = np.arange(1, rank + 1)
    left.plot(places, values, ".-", color=INK, markersize=5, linewidth=1)
    left.set_ylim(0, 1.05 * values[0])
    left.set_xlabel("number j of the singular value")
    left.set_ylabel(r"singular value $\lambda_j$ of W")
    left.set_title(f"Rank {rank} of {dim} dimensions", size=LARGE)
    for line, shares in zip(legend, sides.values(), strict=False):
        style = {"color": line.get_color(), "linewidth": line.get_linewidth()}
        right.plot([0, *places], [0, *(100 * shares.cumulative)], **style)
    right.plot([0, rank], [0, 100 * rank / dim], color=GREY, linestyle="--")
    right.set_xlim(0, 1.04 * rank)
    right.set_ylim(0, 103)
    right.set_xlabel("number of left singular vectors of W, from the first")
    right.set_ylabel("variance of the features within them (%)")
    right.set_title("Variance inside the span of W", size=LARGE)
    for axes in (left, right):
        style_axes(axes)
    inside = {name: shares.inside for name, shares in sides.items()}
    numbers = {"singular_values": values.tolist(), "inside": inside, "rank": rank}
    return Picture("spectrum", title, caption, figure, numbers)


def overlap(view: View) -> Picture | None:
    """Figure A of seed 000, with the classifier's own spectrum; of few-shot transfer alone."""
    kernel, config = _kernel(view), view.config
    if kernel is None or not isinstance(config, FewShotConfig):
        return None
    weights = jnp.asarray(kernel, jnp.float32)
    values = span_shares(view.shown.outputs.features, kernel).singular_values
    relative = values / values[0]
    overlaps = {
        power: float(jaxloss.spectral_overlap(weights, power)) / float(values[0])
        for power in _OVERLAPS
    }
    title = "Overlap of a spectral sum"
    caption = (
        "Left: the overlap λ̃(1 − λ̃ᵖ) of the classifier and the metric loss along a direction "
        "(Kobayashi, BMVC 2024, Fig. A), with a mark for each singular value of W. Right: its "
        "maximum over the singular values."
    )
    figure = new_figure(9.6, 4.0, title=title, caption=caption)
    left, right = figure.subplots(1, 2)
    along = np.linspace(0, 1, 401)
    for number, power in enumerate(_POWERS):
        mark = series_mark(number)
        left.plot(along, along * (1 - along**power), color=mark.color, linewidth=1.3)
        style = {"color": mark.color, "markersize": 3.5, "alpha": 0.7, "label": f"p = {power:g}"}
        left.plot(relative, relative * (1 - relative**power), mark.marker, ls="None", **style)
    left.set_xlim(0, 1.02)
    left.set_xlabel(r"relative singular value $\tilde\lambda = \lambda / \lambda_{\max}$")
    left.set_ylabel(r"overlap $\tilde\lambda\,(1 - \tilde\lambda^p)$")
    left.set_title("Singular values of W on the curves of Fig. A", size=LARGE)
    exponents = np.array(_OVERLAPS)
    bound = exponents * (1 + exponents) ** -(1 + 1 / exponents)
    right.plot(exponents, bound, color="#cccccc", linewidth=6, label="largest for any spectrum")
    style = {"color": INK, "markersize": 4, "label": "W of this run"}
    right.plot(exponents, [*overlaps.values()], "o-", **style)
    if terms(config.loss.name).integration == "spectral":
        used = config.loss.power
        right.axvline(used, color=VERMILLION, linestyle=":", label=f"p = {used:g} of this run")
    right.set_xlim(left=0)
    right.set_xlabel("exponent p")
    right.set_ylabel(r"spectral norm of the overlap / $\lambda_{\max}$")
    right.set_title("Overlap with the spectral complement", size=LARGE)
    for axes, place, scale in ((left, "upper left", 1.5), (right, "lower right", 1.0)):
        axes.set_ylim(bottom=0)
        axes.legend(loc=place, frameon=False, fontsize=MEDIUM, markerscale=scale)
        style_axes(axes)
    numbers = {
        "relative_singular_values": relative.tolist(),
        "overlaps": {f"{power:g}": value for power, value in overlaps.items()},
    }
    return Picture("overlap", title, caption, figure, numbers)


def reliability(view: View) -> Picture | None:
    """Accuracy against confidence; None where predictions have no confidence."""
    side, calibrated = view.shown, view.protocol.calibrated
    if calibrated is None:
        return None
    correct = predict_classes(side.outputs.logits()) == np.asarray(side.outputs.labels)
    confidences = softmax_confidences(calibrated(side.outputs))
    result = calibration(confidences, correct, bins=_BINS)
    title = "Reliability diagram"
    caption = (
        f"Accuracy on the {side.split} images against their confidence, in {_BINS} bins of equal "
        "width. Bars below the dashed line: the model is too confident."
    )
    figure = new_figure(5.6, 5.6, title=title, caption=caption)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    middles, used = (np.arange(_BINS) + 0.5) * 100 / _BINS, result.counts > 0
    accuracies = 100 * result.accuracies[used]
    width = 92 / _BINS
    upper.bar(middles[used], accuracies, width=width, color=BLUE, label="accuracy of a bin")
    upper.plot([0, 100], [0, 100], color=INK, linestyle="--", label="confidence = accuracy")
    upper.plot(
        100 * result.confidences[used],
        accuracies,
        "D",
        color=VERMILLION,
        markersize=4,
        markeredgecolor="white",
        markeredgewidth=0.6,
        label="mean confidence of a bin",
    )
    upper.set_xlim(0, 100)
    upper.set_ylim(0, 103)
    upper.set_ylabel("accuracy (%)")
    upper.set_title(f"Expected calibration error {100 * result.error:.1f} %", size=LARGE)
    # Above the bars of low confidence if these are low, else below.
    low = accuracies[middles[used] < 55].max(initial=0) < 70
    place = "upper left" if low else "lower right"
    upper.legend(loc=place, framealpha=0.9, edgecolor="none", fontsize=MEDIUM)
    lower.bar(middles, 100 * result.counts / result.counts.sum(), width=width, color="#999999")
    lower.set_ylabel("images (%)")
    lower.set_xlabel("confidence: largest probability of the softmax (%)")
    for axes in (upper, lower):
        style_axes(axes)
    numbers = {
        "calibration_error": result.error,
        "counts": result.counts.tolist(),
        "accuracies": [None if np.isnan(a) else float(a) for a in result.accuracies],
    }
    return Picture("reliability", title, caption, figure, numbers)
