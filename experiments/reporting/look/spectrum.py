"""The spectrum of a classifier, the variance in its span, and the overlap of a spectral sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reporting.style import (
    GREY,
    INK,
    LARGE,
    MEDIUM,
    VERMILLION,
    new_figure,
    series_mark,
    style_axes,
)

_WIDTHS = (5, 2)
"""Of the lines of two splits, which may be on top of each other."""


def spectrum_figure(
    singular_values: np.ndarray,
    cumulative: Sequence[tuple[str, str, np.ndarray]],
    *,
    dim: int,
    title: str,
    caption: str,
) -> Figure:
    """Draws the singular values of a classifier, and the variance of features along them.

    Args:
      singular_values: Floats [r], from the largest.
      cumulative: Name and colour of every split, and floats [r]: the share of the variance of its
        features within the first left singular vectors.
      dim: Features d.
      title, caption: Of the figure.
    """
    rank = len(singular_values)
    legend = []
    for (name, color, shares), width in zip(cumulative, _WIDTHS[-len(cumulative) :], strict=True):
        inside = 100 * shares[-1]
        label = f"{name}: {inside:.1f} % inside, {100 - inside:.1f} % outside"
        legend.append(Line2D([], [], color=color, linewidth=width, label=label))
    label = f"{rank} random directions of {dim}: {100 * rank / dim:.1f} % inside"
    legend.append(Line2D([], [], color=GREY, linestyle="--", label=label))
    figure = new_figure(9.6, 3.7, title=title, caption=caption, legend=legend)
    left, right = figure.subplots(1, 2)
    places = np.arange(1, rank + 1)

    style_axes(left)
    left.plot(places, singular_values, ".-", color=INK, markersize=5, linewidth=1)
    left.set_ylim(0, 1.05 * singular_values[0])
    left.set_xlabel("number j of the singular value")
    left.set_ylabel(r"singular value $\lambda_j$ of W")
    left.set_title(f"Rank {rank} of {dim} dimensions", size=LARGE)

    style_axes(right)
    for line, (_, _, shares) in zip(legend, cumulative, strict=False):
        style = {"color": line.get_color(), "linewidth": line.get_linewidth()}
        right.plot([0, *places], [0, *(100 * shares)], **style)
    right.plot([0, rank], [0, 100 * rank / dim], color=GREY, linestyle="--")
    right.set_xlim(0, 1.04 * rank)
    right.set_ylim(0, 103)
    right.set_xlabel("number of left singular vectors of W, from the first")
    right.set_ylabel("variance of the features within them (%)")
    right.set_title("Variance inside the span of W", size=LARGE)
    return figure


def overlap_figure(
    relative: np.ndarray,
    powers: Sequence[float],
    overlaps: Mapping[float, float],
    *,
    used: float | None,
    title: str,
    caption: str,
) -> Figure:
    """Draws λ̃ (1 − λ̃^p) with a classifier's own spectrum, and the overlap against p.

    Args:
      relative: Floats [r], the singular values divided by the largest.
      powers: The exponents p of the curves.
      overlaps: The spectral norm of the overlap divided by the largest singular value, for
        exponents p.
      used: The p of the run, where it has one.
      title, caption: Of the figure.
    """
    figure = new_figure(9.6, 4.0, title=title, caption=caption)
    left, right = figure.subplots(1, 2)
    style_axes(left)
    along = np.linspace(0, 1, 401)
    for number, power in enumerate(powers):
        mark = series_mark(number)
        left.plot(along, along * (1 - along**power), color=mark.color, linewidth=1.3)
        left.plot(
            relative,
            relative * (1 - relative**power),
            mark.marker,
            color=mark.color,
            markersize=3.5,
            alpha=0.7,
            linestyle="None",
            label=f"p = {power:g}",
        )
    left.set_xlim(0, 1.02)
    left.set_ylim(bottom=0)
    left.set_xlabel(r"relative singular value $\tilde\lambda = \lambda / \lambda_{\max}$")
    left.set_ylabel(r"overlap $\tilde\lambda\,(1 - \tilde\lambda^p)$")
    left.set_title("Singular values of W on the curves of Fig. A", size=LARGE)
    left.legend(loc="upper left", frameon=False, fontsize=MEDIUM, markerscale=1.5)

    style_axes(right)
    exponents = np.array(sorted(overlaps))
    values = np.array([overlaps[power] for power in exponents])
    bound = exponents * (1 + exponents) ** -(1 + 1 / exponents)
    right.plot(exponents, bound, color="#cccccc", linewidth=6, label="largest for any spectrum")
    right.plot(exponents, values, "o-", color=INK, markersize=4, label="W of this run")
    if used is not None:
        right.axvline(used, color=VERMILLION, linestyle=":", label=f"p = {used:g} of this run")
    right.set_xlim(left=0)
    right.set_ylim(bottom=0)
    right.set_xlabel("exponent p")
    right.set_ylabel(r"spectral norm of the overlap / $\lambda_{\max}$")
    right.set_title("Overlap with the spectral complement", size=LARGE)
    right.legend(loc="lower right", frameon=False, fontsize=MEDIUM)
    return figure
