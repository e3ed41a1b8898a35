"""The report of a linear evaluation: numbers, and accuracy against the penalty as a figure."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.reporting.markdown import format_value, table
from experiments.reporting.run import origin_lines
from experiments.reporting.style import INK, MEDIUM, new_figure, series_mark, style_axes
from experiments.storage import write_atomically, write_json, write_picture

_ACCURACIES = ("accuracy", "best_test_accuracy")
"""With the λ that was chosen on validation images, and on test images."""


def linear_report(report: dict[str, Any]) -> str:
    """The report of `evaluate_run_linear` as Markdown."""
    result, percent = report["result"], partial(format_value, unit="%", digits=2)
    columns = {
        "λ chosen on": ("validation", "test, as in the paper"),
        "λ": [f"{result[key]:.3g}" for key in ("penalty", "best_test_penalty")],
        "error (%)": [percent(1 - result[key]) for key in _ACCURACIES],
        "accuracy (%)": [percent(result[key]) for key in _ACCURACIES],
        "class-mean accuracy (%)": (percent(result["class_mean_accuracy"]), None),
        "validation accuracy (%)": (percent(result["validation_accuracy"]), None),
    }
    lines = [
        f"{_title(report)} ({report['classes']} classes; "
        f"{result['train_samples']} training, {result['validation_samples']} validation and "
        f"{result['test_samples']} test images) of the features of {_run(report)}, "
        f"d = {report['num_features']}.",
        "",
        *table([*columns], zip(*columns.values(), strict=True)),
        "",
        f"λ is the best of {len(result['penalties'])}. Compare the row of λ chosen on the test "
        "images with published tables only. Trained on training and validation images.",
    ]
    if report["stored_size"] != report["image_size"]:
        stored, seen = ("×".join(map(str, report[k])) for k in ("stored_size", "image_size"))
        if len(report["stored_size"]) == 1:
            stored = f"a shorter side of {stored}"
        lines.append(f"Images were resized from {stored} to {seen} pixels.")
    if data := report["seen_in_training"]:
        lines.append(f"The backbone was trained on {data}: this is no transfer.")
    if missed := result["unconverged"] + (not result["converged"]):
        lines.append(f"{missed} solves ended before they met the tolerance.")
    return "\n".join([*lines, "", *origin_lines(report)])


def linear_figure(report: dict[str, Any], *, command: str) -> Figure:
    """Draws the accuracy on validation and test images against the penalty."""
    result = report["result"]
    figure = new_figure(
        7.2,
        4.4,
        title=f"{_title(report)} ({report['classes']} classes)",
        caption=f"Features of {_run(report)}. Curves: trained on {result['train_samples']} "
        "images. Star and circle: trained on these and the validation images.",
        command=command,
    )
    axes = figure.add_subplot()
    style_axes(axes)
    for number, name in enumerate(("validation", "test")):
        values = [100 * value for value in result[name]]
        label = f"{name} ({result[f'{name}_samples']} images)"
        axes.plot(result["penalties"], values, label=label, **series_mark(number).style(line=True))
    axes.axvline(result["penalty"], color=INK, linestyle=":", linewidth=1.1)
    chosen, best = (format_value(result[key], "%") for key in _ACCURACIES)
    star: Any = {"marker": "*", "markersize": 13, "color": series_mark(1).color}
    circle: Any = {"marker": "o", "markersize": 9, "markerfacecolor": "none"}
    star["label"] = f"chosen λ = {result['penalty']:.2g}: test {chosen} %"
    circle["label"] = f"λ chosen on test, as in the paper: {best} %"
    penalties = (result["penalty"], result["best_test_penalty"])
    for penalty, key, style in zip(penalties, _ACCURACIES, (star, circle), strict=True):
        axes.plot(penalty, 100 * result[key], linestyle="None", markeredgecolor=INK, **style)
    axes.set_xscale("log")
    axes.set_xlabel("Penalty λ (weight of the L2 regularisation)")
    axes.set_ylabel("Accuracy (%)")
    axes.legend(loc="best", frameon=False, fontsize=MEDIUM)
    return figure


def write_linear_report(
    directory: Path, report: dict[str, Any], name: str, *, command: str
) -> list[Path]:
    """Writes NAME.md, .json and .png into the run directory; returns their paths."""
    markdown, data, picture = (directory / f"{name}.{kind}" for kind in ("md", "json", "png"))
    text = f"{linear_report(report)}\n\n![accuracy against λ]({picture.name})\n\n`{command}`\n"
    return [
        write_atomically(markdown, text),
        write_json(data, report | {"command": command}),
        write_picture(picture, linear_figure(report, command=command)),
    ]


def classes_of(data: str, split: str) -> str:
    """The classes of a split of a data set, as a phrase."""
    return data if split == "all" else f"the {split} classes of {data}"


def _title(report: dict[str, Any]) -> str:
    return f"Linear evaluation on {classes_of(report['data'], report['split'])}"


def _run(report: dict[str, Any]) -> str:
    run = "{label} trained on {data}, {sampling} batches, seed {seed}".format(**report["run"])
    return f"{run}, step {report['step']}"
