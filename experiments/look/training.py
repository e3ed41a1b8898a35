"""The course of training: the assignment of prototypes, and the metrics log."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from experiments.look.view import View
from experiments.reporting.look.page import Picture
from experiments.reporting.look.training import assignment_figure, curves_figure, log_series

_NOT_DRAWN = ("images_per_second", "reassigned", "alignment")
"""In the metrics log: not about the features, or in another picture."""


def assignment(view: View) -> Picture | None:
    """How the assignment of prototypes moved; None where it does not."""
    state = view.run.state.objective_state
    if not isinstance(state, Mapping) or "reassigned" not in state:
        return None
    reassigned = np.asarray(state["reassigned"])
    done = reassigned >= 0
    if not done.any():
        return None
    alignment = np.asarray(state["alignment"], np.float64)[done]
    classes = len(view.run.class_counts)
    title = "Movement of the assignment"
    caption = (
        "Bars: how many classes received another prototype after an epoch (the dotted line is all "
        "of them). Line: the cosine between class means and their prototypes, averaged over the "
        "classes. The assignment has settled where bars vanish while the line still rises."
    )
    figure = assignment_figure(
        reassigned[done], alignment, classes=classes, title=title, caption=caption
    )
    numbers = {"reassigned": reassigned[done].tolist(), "alignment": alignment.tolist()}
    return Picture("assignment", title, caption, figure, numbers)


def curves(view: View) -> Picture | None:
    """The metrics log against the step; None without a log."""
    path = view.folder / "metrics.jsonl"
    if not path.exists():
        return None
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    series = log_series(rows, without=_NOT_DRAWN)
    if not series:
        return None
    title = "Training"
    caption = (
        "The numbers of the metrics log against the training step; those of training are of single "
        f"batches, with augmentation. The dotted line is the checkpoint shown here, step "
        f"{view.run.step}."
    )
    figure = curves_figure(
        series, view.protocol.validation, checkpoint=view.run.step, title=title, caption=caption
    )
    last = {name: float(values[-1]) for name, (_, values) in series.items()}
    numbers = {name: value if np.isfinite(value) else None for name, value in last.items()}
    return Picture("training", title, caption, figure, {"last": numbers})
