"""The classifier: its subspace, the overlap of a spectral sum, and its confidence."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jaxloss
from experiments.evaluation.classification import (
    calibration,
    predict_classes,
    softmax_confidences,
)
from experiments.evaluation.subspace import span_shares
from experiments.look.view import View
from experiments.reporting.look.page import Picture
from experiments.reporting.look.reliability import reliability_figure
from experiments.reporting.look.spectrum import overlap_figure, spectrum_figure

_BINS = 15
_POWERS = (0.1, 0.2, 0.3, 0.5, 1.0)
"""Exponents of the curves of Fig. A."""
_OVERLAPS = (0.05, *(k / 10 for k in range(1, 11)))


def _kernel(view: View) -> np.ndarray | None:
    """The weights [d, C] of a trained linear classifier; None where the run has none.

    Those of weights that are all zero span nothing, and count as none.
    """
    head = view.run.state.params["classifier"]
    if "kernel" not in head:
        return None
    integration = view.protocol.integration
    if integration is not None and not integration.trains_classifier:
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
    dim = len(kernel)
    title = "The classifier's subspace"
    caption = (
        "Left: the singular values of the classifier W; few large ones mean that the logits use "
        "few directions. Right: how much of the variance of the features these directions hold, "
        "from the largest singular value on; what is missing to 100 % at the end of a curve is "
        "outside of the span of W, where the classifier does not see it."
    )
    if len(values) == dim:
        caption += (
            f" W spans all {dim} dimensions (there are {kernel.shape[1]} classes), so nothing is "
            "outside."
        )
    figure = spectrum_figure(
        values,
        [
            (f"{side.split} images", view.color(side), sides[side.split].cumulative)
            for side in view.sides
        ],
        dim=dim,
        title=title,
        caption=caption,
    )
    numbers = {
        "singular_values": values.tolist(),
        "inside": {name: shares.inside for name, shares in sides.items()},
        "rank": len(values),
    }
    return Picture("spectrum", title, caption, figure, numbers)


def overlap(view: View) -> Picture | None:
    """Figure A of seed 000, with the classifier's own spectrum."""
    kernel, integration = _kernel(view), view.protocol.integration
    if kernel is None or integration is None:
        return None
    weights = jnp.asarray(kernel, jnp.float32)
    values = span_shares(view.shown.outputs.features, kernel).singular_values
    overlaps = {
        power: float(jaxloss.spectral_overlap(weights, power)) / float(values[0])
        for power in _OVERLAPS
    }
    title = "Overlap of a spectral sum"
    caption = (
        "Left: a spectral sum gives the metric loss the weight 1 − λ̃ᵖ along a direction that the "
        "classifier uses with λ̃; the product is the overlap (Kobayashi, BMVC 2024, Fig. A), with "
        "a mark for each singular value of W. Right: its maximum over the singular values. A small "
        "p separates the two losses, but leaves the metric loss less room."
    )
    figure = overlap_figure(
        values / values[0],
        _POWERS,
        overlaps,
        used=integration.power,
        title=title,
        caption=caption,
    )
    numbers = {
        "relative_singular_values": (values / values[0]).tolist(),
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
        "width. Bars below the dashed line: the model is too confident; above it: not confident "
        "enough. Bins with few images, as the lower panel shows, are noisy."
    )
    figure = reliability_figure(
        result.counts,
        result.confidences,
        result.accuracies,
        error=result.error,
        title=title,
        caption=caption,
    )
    used = result.counts > 0
    numbers = {
        "calibration_error": result.error,
        "counts": result.counts.tolist(),
        "accuracies": [
            float(a) if u else None for a, u in zip(result.accuracies, used, strict=True)
        ],
    }
    return Picture("reliability", title, caption, figure, numbers)
