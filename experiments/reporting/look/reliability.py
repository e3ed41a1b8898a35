"""The reliability diagram: accuracy against confidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.reporting.style import BLUE, INK, LARGE, MEDIUM, VERMILLION, new_figure, style_axes


def reliability_figure(
    counts: np.ndarray,
    confidences: np.ndarray,
    accuracies: np.ndarray,
    *,
    error: float,
    title: str,
    caption: str,
) -> Figure:
    """Draws the accuracy in every bin of confidence, and the share of the images in it.

    Args:
      counts: Integers [B], the images of each bin; bins have equal width.
      confidences: Floats [B], the mean confidence in each bin; NaN in an empty one.
      accuracies: Floats [B], the accuracy in each bin; NaN in an empty one.
      error: The expected calibration error.
      title, caption: Of the figure.
    """
    figure = new_figure(5.6, 5.6, title=title, caption=caption)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    bins = len(counts)
    middles = (np.arange(bins) + 0.5) * 100 / bins
    used = counts > 0
    style_axes(upper)
    upper.bar(
        middles[used],
        100 * accuracies[used],
        width=92 / bins,
        color=BLUE,
        label="accuracy of a bin",
    )
    upper.plot([0, 100], [0, 100], color=INK, linestyle="--", label="confidence = accuracy")
    upper.plot(
        100 * confidences[used],
        100 * accuracies[used],
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
    upper.set_title(f"Expected calibration error {100 * error:.1f} %", size=LARGE)
    upper.legend(**_legend_place(middles[used], 100 * accuracies[used]))
    style_axes(lower)
    lower.bar(middles, 100 * counts / counts.sum(), width=92 / bins, color="#999999")
    lower.set_ylabel("images (%)")
    lower.set_xlabel("confidence: largest probability of the softmax (%)")
    return figure


def _legend_place(middles: np.ndarray, values: Sequence[float] | np.ndarray) -> dict:
    """Above the bars of low confidence if these are low, else below."""
    low = [value for x, value in zip(middles, values, strict=True) if x < 55]
    place = "upper left" if max(low, default=0) < 70 else "lower right"
    return {
        "loc": place,
        "frameon": True,
        "framealpha": 0.9,
        "edgecolor": "none",
        "fontsize": MEDIUM,
    }
