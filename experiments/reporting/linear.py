"""The report of a linear evaluation: numbers, and accuracy against the weight as a figure."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.files import write_atomically, write_picture
from experiments.reporting.colors import BLUE, INK, VERMILLION

_VALIDATION, _TEST, _CHOSEN = BLUE, VERMILLION, INK
_COLUMNS = 108


def linear_report(report: dict[str, Any]) -> str:
    """The report that `evaluate_run_linear` returns as Markdown."""
    result = report["result"]
    numbers = {
        "error": 1 - result["accuracy"],
        "accuracy": result["accuracy"],
        "class-mean accuracy": result["class_mean_accuracy"],
        "validation accuracy": result["validation_accuracy"],
    }
    lines = [
        f"Linear evaluation on {report['data']} ({report['classes']} classes; "
        f"{result['train_samples']} training, {result['validation_samples']} validation and "
        f"{result['test_samples']} test images) of the features of {_run(report)}, "
        f"d = {report['num_features']}.",
        "",
        f"| λ | {' | '.join(numbers)} |",
        f"|---|{'---|' * len(numbers)}",
        f"| {result['penalty']:.3g} | "
        f"{' | '.join(f'{100 * value:.2f} %' for value in numbers.values())} |",
        "",
        f"λ is the best of {len(result['penalties'])} by validation accuracy; the classifier is "
        "then trained on training and validation images. Best test accuracy of all λ, trained "
        f"without the validation images: {100 * result['best_test_accuracy']:.2f} % (chosen on "
        "the test images, so not a result).",
    ]
    if report["stored_size"] != report["image_size"]:
        stored, seen = ("×".join(map(str, report[k])) for k in ("stored_size", "image_size"))
        lines.append(f"Images were brought from {stored} to {seen} pixels.")
    if report["seen_in_training"]:
        told = report["seen_in_training"]
        lines.append(f"The backbone was trained on {told}: this is no transfer.")
    missed = result["unconverged"] + (not result["converged"])
    if missed:
        lines.append(f"{missed} solves ended before they met the tolerance.")
    return "\n".join(lines)


def linear_figure(report: dict[str, Any], path: Path, *, command: str) -> None:
    """Draw the accuracy on validation and test images against the weight of regularisation.

    Args:
      report: Of `evaluate_run_linear`.
      path: The PNG file to write.
      command: What was typed to get it; stands below the picture.
    """
    result = report["result"]
    caption = [
        *textwrap.wrap(
            f"Features of {_run(report)}. Curves: classifiers trained on the "
            f"{result['train_samples']} training images. Star: the weight of the best validation "
            "accuracy, trained on training and validation images.",
            _COLUMNS,
        ),
        *textwrap.wrap(f"Command: {command}", _COLUMNS, break_on_hyphens=False),
    ]
    below = 0.75 + 0.165 * len(caption)
    width, height = 7.2, 3.6 + below + 0.5
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.75 / width, below / height, (width - 0.95) / width, 3.6 / height))
    for name, color, marker in (("validation", _VALIDATION, "o"), ("test", _TEST, "s")):
        axes.plot(
            *(result["penalties"], [100 * value for value in result[name]]),
            color=color,
            marker=marker,
            markersize=3.5,
            linewidth=1.3,
            label=f"{name} ({result[f'{name}_samples']} images)",
        )
    axes.axvline(result["penalty"], color=_CHOSEN, linestyle=":", linewidth=1.1)
    axes.plot(
        *([result["penalty"]], [100 * result["accuracy"]]),
        linestyle="",
        marker="*",
        markersize=13,
        color=_TEST,
        markeredgecolor=_CHOSEN,
        label=f"chosen λ = {result['penalty']:.2g}: test {100 * result['accuracy']:.1f} %",
    )
    axes.set_xscale("log")
    axes.set_xlabel("Weight λ of the L2 regularisation")
    axes.set_ylabel("Accuracy (%)")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="best", frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(
        f"Linear evaluation on {report['data']} ({report['classes']} classes)",
        size=12,
        weight="bold",
        loc="left",
    )
    figure.text(
        *(0.15 / width, 0.12 / height, "\n".join(caption).replace("$", r"\$")),
        size=8,
        color=_CHOSEN,
        va="bottom",
        linespacing=1.3,
    )
    write_picture(path, figure)


def write_linear_report(
    directory: Path, report: dict[str, Any], name: str, *, command: str
) -> list[Path]:
    """Writes NAME.md, .json and .png into the run directory and returns their paths."""
    markdown, data, figure = (directory / f"{name}.{kind}" for kind in ("md", "json", "png"))
    told = report | {"command": command}
    linear_figure(report, figure, command=command)
    text = f"{linear_report(report)}\n\n![accuracy against λ]({figure.name})\n\n`{command}`\n"
    return [
        write_atomically(markdown, text),
        write_atomically(data, json.dumps(told, indent=2, ensure_ascii=False) + "\n"),
        figure,
    ]


def _run(report: dict[str, Any]) -> str:
    run = report["run"]
    return (
        f"{run['label']} trained on {run['data']}, {run['sampling']} batches, seed {run['seed']}, "
        f"step {report['step']}"
    )
