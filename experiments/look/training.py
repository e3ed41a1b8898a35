"""The course of training: the assignment of prototypes, and the metrics log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from experiments.look.page import Picture
from experiments.look.view import View
from experiments.reporting.markdown import scaled, with_unit
from experiments.reporting.style import (
    BLUE,
    INK,
    LARGE,
    MEDIUM,
    ORANGE,
    new_figure,
    series_mark,
    style_axes,
)

_NOT_DRAWN = ("images_per_second", "reassigned", "alignment")
"""In the metrics log: not about the features, or in another picture."""
_FIRST = ("loss", "validation")
"""Names of the metrics log that come first."""
_SHORT = 13
"""Characters of names of which two fit side by side in the legend of a panel."""


def assignment(view: View) -> Picture | None:
    """How the assignment of prototypes moved; None where it does not."""
    state = view.run.state.objective_state
    if not isinstance(state, Mapping) or "reassigned" not in state:
        return None
    reassigned = np.asarray(state["reassigned"])
    done = reassigned >= 0
    if not done.any():
        return None
    reassigned = reassigned[done]
    alignment = np.asarray(state["alignment"], np.float64)[done]
    classes, epochs = len(view.run.class_counts), np.arange(1, len(reassigned) + 1)
    title = "Movement of the assignment"
    caption = (
        "Bars: classes that received another prototype after an epoch (dotted: all classes). Line: "
        "the mean cosine between class means and their prototypes."
    )
    figure = new_figure(7.2, 3.6, title=title, caption=caption)
    axes = figure.add_subplot()
    axes.bar(epochs, reassigned, width=0.85, color=BLUE, linewidth=0)
    axes.axhline(classes, color=INK, linewidth=0.9, linestyle=":")
    axes.set_ylim(0, 1.08 * classes)
    axes.set_xlim(0.3, len(epochs) + 0.7)
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"classes with a new prototype, of {classes} (bars)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style_axes(axes)
    twin = axes.twinx()
    twin.plot(epochs, alignment, "o-", color=ORANGE, markersize=4, linewidth=2)
    twin.set_ylim(min(0, float(alignment.min())), 1)
    twin.set_ylabel("cosine of class means and prototypes (line)", fontsize=MEDIUM)
    twin.tick_params(labelsize=MEDIUM)
    twin.spines["top"].set_visible(False)
    numbers = {"reassigned": reassigned.tolist(), "alignment": alignment.tolist()}
    return Picture("assignment", title, caption, figure, numbers)


def curves(view: View) -> Picture | None:
    """The metrics log against the step; None without a log.

    Numbers whose names end with the same word share a panel: so do several losses.
    """
    path = view.folder / "metrics.jsonl"
    if not path.exists():
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    log: Any = pd.DataFrame([json.loads(line) for line in lines]).set_index("step")
    log = log.drop(columns=[*_NOT_DRAWN], errors="ignore")
    panels: dict[str, list[str]] = {}
    for name in sorted(log, key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n)):
        panels.setdefault(str(name).rpartition("_")[2], []).append(str(name))
    if not panels:
        return None
    title = "Training"
    caption = (
        "The metrics log; losses are of single batches, with augmentation. Dotted: the checkpoint "
        f"of step {view.run.step}."
    )
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows, numbers, metric = -(-len(panels) // columns), {}, view.protocol.validation
    figure = new_figure(3.4 * columns, 2.7 * rows, title=title, caption=caption)
    for number, (word, names) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for place, name in enumerate(names):
            # A number that is not finite is text in the log.
            values = log[name].dropna().astype(float).replace([np.inf, -np.inf], np.nan)
            numbers[name] = None if np.isnan(values.iloc[-1]) else float(values.iloc[-1])
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
        axes.set_xlim(0, 1.03 * float(log.index.max()))
        axes.set_xlabel("step")
        style_axes(axes)
        heading = word if len(names) > 1 else names[0].replace("_", " ")
        if names == ["validation"]:
            heading = with_unit(f"validation: {metric.name}", metric.unit)
        axes.set_title(heading, size=LARGE)
        if len(names) > 1:
            columns_inside = 2 if max(map(len, names)) <= _SHORT else 1
            low, high = axes.get_ylim()
            room = 0.17 * -(-len(names) // columns_inside)  # For the legend.
            axes.set_ylim(low, high + room * (high - low))
            axes.legend(loc="upper right", ncols=columns_inside, frameon=False, fontsize=MEDIUM)
    return Picture("training", title, caption, figure, {"last": numbers})
