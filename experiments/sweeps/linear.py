"""Protocol F: transfer of a run's frozen features to a data set, by linear classifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.core.config import DataConfig, Folders, check_config
from experiments.core.errors import ConfigError
from experiments.core.protocol import Metric
from experiments.core.storage import component, write_atomically, write_json
from experiments.datasets import lookup, pinned, short_name
from experiments.evaluation.linear import Labelled, evaluate_linear
from experiments.papers import build_protocol, classification
from experiments.papers.classification import SPLITS, ClassificationData
from experiments.reporting.grid import Axis, Comparison, GridRun
from experiments.reporting.grid_report import write_grid
from experiments.reporting.markdown import format_value, plain, table
from experiments.reporting.run import METRIC, code_version, describe_run, origin_lines, read_report
from experiments.run import RestoredRun, config_of_run, data_notes, load_run, seen_in_training
from experiments.training.step import build_features

_METRICS = {
    "accuracy": Metric("accuracy"),
    "class_mean_accuracy": Metric("class mean accuracy"),
    "best_test_accuracy": Metric("accuracy, λ chosen on test images"),
}
"""What a table of runs shows, by the entry of `evaluate_linear`."""

_REPORT = {
    "run": {"version": str, "commit": str | None},
    **{"seen_in_training": str, "step": int, "metrics": [METRIC]},
}
"""What a table of runs needs of a report, as a kind of `check_json`."""


def evaluate_run_linear(
    run: RestoredRun, folders: Folders, data: ClassificationData
) -> dict[str, Any]:
    """The report, as JSON types, of linear classifiers with 45 L2 penalties on frozen features.

    Images are normalised as in training and not augmented. They are resized and cropped where their
    size differs from that of training. A data set without a test split is split within its classes;
    the penalty is chosen on the fraction `holdout` of each class's training images. `stored_size`
    has the shorter side of photographs stored whole, and `result` what `evaluate_linear` returns.
    """
    if not 0 < data.holdout < 1:
        raise ConfigError(f"holdout must be above 0 and below 1, got {data.holdout}")
    config, shape = run.plan.config, run.plan.image_shape
    preparation = _preparation(config.data, data.name, shape)
    check_config(preparation, "data.")
    features_of = build_features(run.graphdef, preparation)
    parts = classification.parts(data, folders)
    images = [parts[split].load() for split in SPLITS]
    result = evaluate_linear(
        *(Labelled(features_of(run.state, part.images), part.labels) for part in images)
    )
    description, stored = describe_run(config, run.plan.protocol), lookup(data.name)
    return {
        "run": description,
        "version": description["version"],
        "commit": description["commit"],
        "data": data.name,
        "step": run.step,
        "num_features": run.plan.num_features,
        "image_size": list(shape[:2]),
        "stored_size": list(stored.image_shape[: 1 if stored.whole else 2]),
        "split": data.class_split,
        "classes": len(images[0].class_names),
        "holdout": data.holdout,
        "seen_in_training": seen_in_training(config, data.name, data.class_split),
        "notes": [*data_notes(data.name), *run.notes],
        "result": result,
        "metrics": [metric.measured(result[name]) for name, metric in _METRICS.items()],
    }


def evaluate_runs_linear(
    paths: Sequence[Path],
    folders: Folders,
    data: ClassificationData,
    *,
    checkpoint: str = "best",
    directory: Path | None = None,
    baseline: str = "",
    command: str,
) -> list[Path]:
    """Evaluates runs as `evaluate_run_linear` does, and writes a report into each directory.

    Of several runs, writes a table, too, into `directory` (by default runs/linear-DATA), and reads
    a report of the same checkpoint that is there. The runs with the label `baseline` are those that
    the others are compared with, by seed. Returns the files of the one run, or those of the table.
    """
    if not paths:
        raise ConfigError("linear needs a run directory, or several")
    if len(paths) == 1 and (baseline or directory):
        raise ConfigError("--baseline and --directory are for several runs")
    # The name has all settings, so that evaluations of a run do not overwrite each other.
    data = dataclasses.replace(data, name=pinned(data.name))
    name = f"linear-{short_name(data.name)}"
    name += "" if data.class_split == "all" else f"-{data.class_split}"
    found: dict[tuple[str, int], Path] = {}
    for path in paths:
        config = config_of_run(path)
        label = build_protocol(config).description["label"]
        if (other := found.setdefault((label, config.seed), path)) is not path:
            raise ConfigError(
                f"{other} and {path} are both of {label} and seed {config.seed}; name one of them"
            )
    labels = tuple(dict.fromkeys(label for label, _ in found))
    if baseline and baseline not in labels:
        raise ConfigError(f"no run has the label {baseline!r}; the runs have {', '.join(labels)}")
    evaluated, written = [], []
    for number, ((label, seed), path) in enumerate(found.items(), start=1):
        print(f"[{number}/{len(found)}] {path}", flush=True)
        run = load_run(path, checkpoint)
        stem = name + ("" if checkpoint == "best" else f"-step{run.step}")
        stem = component(stem + ("" if data.holdout == 0.2 else f"-holdout{data.holdout}"))
        file = run.directory / f"{stem}.json"
        report = read_report(file, kind=_REPORT) if len(found) > 1 and file.exists() else None
        stored = report["run"] | {"step": report["step"]} if report else {}
        if report is None or not {"step": run.step, **code_version()}.items() <= stored.items():
            print("features, then classifiers …", flush=True)
            report = evaluate_run_linear(run, folders, data)
            written = write_linear_report(run.directory, report, stem, command=command)
        common = {"seed": seed, "validation": None, "command": command}
        evaluated.append(GridRun((label,), report | common))
    if len(evaluated) == 1:
        return written
    trained_on = sorted({run.report["seen_in_training"] for run in evaluated} - {""})
    return write_grid(
        directory or Path("runs", component(name)),
        [Axis("loss", labels)],
        evaluated,
        title=f"Linear evaluation on {classes_of(data.name, data.class_split)}",
        command=command,
        notes=[f"Backbones were trained on {seen}: this is not a transfer." for seen in trained_on],
        comparison=Comparison(("loss", baseline) if baseline else None),
    )


def _preparation(trained_with: DataConfig, data: str, seen: tuple[int, int, int]) -> DataConfig:
    """How images of a data set are brought to the size and normalisation of training."""
    height, width, channels = lookup(data).image_shape
    if channels != seen[2]:
        raise ConfigError(
            f"images of {data} have {channels} channels, and the run was trained on {seen[2]}"
        )
    if (height, width) == seen[:2] or trained_with.image_size:
        return trained_with
    return dataclasses.replace(trained_with, image_size=seen[0])


def linear_report(report: dict[str, Any]) -> str:
    """The report of `evaluate_run_linear` as Markdown."""
    result, run, accuracies = report["result"], report["run"], ("accuracy", "best_test_accuracy")
    percent = partial(format_value, unit="%", digits=2)
    columns = {
        "λ chosen on": ("validation", "test, as in the paper"),
        "λ": [f"{result[key]:.3g}" for key in ("penalty", "best_test_penalty")],
        "error (%)": [percent(1 - result[key]) for key in accuracies],
        "accuracy (%)": [percent(result[key]) for key in accuracies],
        "class-mean accuracy (%)": (percent(result["class_mean_accuracy"]), None),
        "validation accuracy (%)": (percent(result["validation_accuracy"]), None),
    }
    samples = (f"{result[f'{part}_samples']} {part}" for part in ("train", "validation", "test"))
    lines = [
        f"Linear evaluation on {plain(classes_of(report['data'], report['split']))} "
        f"({report['classes']} classes; {', '.join(samples)} images) of the features of "
        f"{plain(run['label'])} trained on {plain(run['data'])}, {run['sampling']} batches, seed "
        f"{run['seed']}, step {report['step']}, d = {report['num_features']}.",
        "",
        *table([*columns], zip(*columns.values(), strict=True)),
        "",
        f"λ is the best of {len(result['penalties'])}. Compare the row of λ chosen on the test "
        "images with published tables only. Trained on training and validation images.",
    ]
    if report["stored_size"] != report["image_size"]:
        stored, seen = ("×".join(map(str, report[k])) for k in ("stored_size", "image_size"))
        lines.append(f"Images were resized from {stored} to {seen} pixels.")
    if trained_on := report["seen_in_training"]:
        lines.append(f"The backbone was trained on {plain(trained_on)}: this is not a transfer.")
    if missed := result["unconverged"] + (not result["converged"]):
        lines.append(f"{missed} solves ended before they met the tolerance.")
    return "\n".join([*lines, "", *origin_lines(report)])


def write_linear_report(
    directory: Path, report: dict[str, Any], name: str, *, command: str
) -> list[Path]:
    """Writes NAME.md and NAME.json into the run directory; returns their paths."""
    text = f"{linear_report(report)}\n\n`{command}`\n"
    markdown = write_atomically(directory / f"{name}.md", text)
    return [markdown, write_json(directory / f"{name}.json", report | {"command": command})]


def classes_of(data: str, split: str) -> str:
    """The classes of a split of a data set, as a phrase."""
    name = short_name(data)
    return name if split == "all" else f"the {split} classes of {name}"
