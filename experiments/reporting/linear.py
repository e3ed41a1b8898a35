"""The report of a linear evaluation: numbers, and accuracy against the penalty as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.files import write_atomically, write_json, write_picture
from experiments.reporting.markdown import code, percent, table
from experiments.reporting.run import origin_lines
from experiments.reporting.style import (
    BLUE,
    INK,
    MEDIUM,
    VERMILLION,
    Mark,
    new_figure,
    style_axes,
)

_CURVES = {"validation": Mark(BLUE, "o"), "test": Mark(VERMILLION, "s")}


def linear_report(report: dict[str, Any]) -> str:
    """The report of `evaluate_run_linear` as Markdown."""
    result = report["result"]
    lines = [
        f"Linear evaluation on {report['data']} ({report['classes']} classes; "
        f"{result['train_samples']} training, {result['validation_samples']} validation and "
        f"{result['test_samples']} test images) of the features of {_run(report)}, "
        f"d = {report['num_features']}.",
        "",
        *_numbers(result),
        "",
        f"λ is the best of {len(result['penalties'])} by validation accuracy. The classifier is "
        "then trained on training and validation images. Best test accuracy of all λ, trained "
        f"without the validation images: {100 * result['best_test_accuracy']:.2f} % (chosen on "
        "the test images, so not a result).",
    ]
    if report["stored_size"] != report["image_size"]:
        stored, seen = ("×".join(map(str, report[k])) for k in ("stored_size", "image_size"))
        lines.append(f"Images were resized from {stored} to {seen} pixels.")
    if report["seen_in_training"]:
        lines.append(
            f"The backbone was trained on {report['seen_in_training']}: this is no transfer."
        )
    missed = result["unconverged"] + (not result["converged"])
    if missed:
        lines.append(f"{missed} solves ended before they met the tolerance.")
    return "\n".join([*lines, *origin_lines(report)])


def linear_figure(report: dict[str, Any], *, command: str) -> Figure:
    """Draw the accuracy on validation and test images against the penalty.

    Args:
      report: Of `evaluate_run_linear`.
      command: What was typed to get it; stands below the figure.
    """
    result = report["result"]
    figure = new_figure(
        7.2,
        4.4,
        title=f"Linear evaluation on {report['data']} ({report['classes']} classes)",
        caption=f"Features of {_run(report)}. Curves: classifiers trained on the "
        f"{result['train_samples']} training images. Star: the λ of the best validation "
        "accuracy, trained on training and validation images.",
        command=command,
    )
    axes = figure.add_subplot()
    style_axes(axes)
    _draw_curves(axes, result)
    axes.set_xscale("log")
    axes.set_xlabel("Penalty λ (weight of the L2 regularisation)")
    axes.set_ylabel("Accuracy (%)")
    axes.legend(loc="best", frameon=False, fontsize=MEDIUM)
    return figure


def write_linear_report(
    directory: Path, report: dict[str, Any], name: str, *, command: str
) -> list[Path]:
    """Write NAME.md, .json and .png into the run directory; returns their paths."""
    markdown, data, picture = (directory / f"{name}.{kind}" for kind in ("md", "json", "png"))
    text = f"{linear_report(report)}\n\n![accuracy against λ]({picture.name})\n\n{code(command)}\n"
    return [
        write_atomically(markdown, text),
        write_json(data, report | {"command": command}),
        write_picture(picture, linear_figure(report, command=command)),
    ]


def _numbers(result: dict[str, Any]) -> list[str]:
    """Two digits, as tables of linear evaluation have them."""
    numbers = {
        "error (%)": 1 - result["accuracy"],
        "accuracy (%)": result["accuracy"],
        "class-mean accuracy (%)": result["class_mean_accuracy"],
        "validation accuracy (%)": result["validation_accuracy"],
    }
    values = [f"{100 * value:.2f}" for value in numbers.values()]
    return table(["λ", *numbers], [[f"{result['penalty']:.3g}", *values]])


def _draw_curves(axes: Axes, result: dict[str, Any]) -> None:
    for name, mark in _CURVES.items():
        axes.plot(
            result["penalties"],
            [100 * value for value in result[name]],
            color=mark.color,
            marker=mark.marker,
            markersize=3.5,
            linewidth=1.3,
            label=f"{name} ({result[f'{name}_samples']} images)",
        )
    axes.axvline(result["penalty"], color=INK, linestyle=":", linewidth=1.1)
    axes.plot(
        [result["penalty"]],
        [100 * result["accuracy"]],
        linestyle="None",
        marker="*",
        markersize=13,
        color=_CURVES["test"].color,
        markeredgecolor=INK,
        label=f"chosen λ = {result['penalty']:.2g}: test {percent(result['accuracy'])} %",
    )


def _run(report: dict[str, Any]) -> str:
    run = report["run"]
    return (
        f"{run['label']} trained on {run['data']}, {run['sampling']} batches, seed {run['seed']}, "
        f"step {report['step']}"
    )
