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
from experiments.reporting.grid import Axis, Comparison, GridRun, make_grid
from experiments.reporting.grid_report import grid_table, write_grid
from experiments.reporting.markdown import format_value
from experiments.reporting.run import METRIC, code_version, describe_run, read_report
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
    short, split = short_name(data.name), data.class_split
    name = f"linear-{short}" + ("" if split == "all" else f"-{split}")
    title = f"Linear evaluation on {short if split == 'all' else f'the {split} classes of {short}'}"
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
        of_grid = {"seed": seed, "validation": None, "command": command}
        if report is None or not {"step": run.step, **code_version()}.items() <= stored.items():
            print("features, then classifiers …", flush=True)
            report = evaluate_run_linear(run, folders, data)
            own = [GridRun((label,), report | of_grid)]
            grid = make_grid([Axis("loss", (label,))], own)
            text = grid_table(grid, own, title=title, notes=linear_notes(report) + trained_on(own))
            written = [
                write_atomically(run.directory / f"{stem}.md", text),
                write_json(file, report | {"command": command}),
            ]
        evaluated.append(GridRun((label,), report | of_grid))
    if len(evaluated) == 1:
        return written
    return write_grid(
        directory or Path("runs", component(name)),
        [Axis("loss", labels)],
        evaluated,
        title=title,
        command=command,
        notes=trained_on(evaluated),
        comparison=Comparison(("loss", baseline) if baseline else None),
    )


def trained_on(evaluated: Sequence[GridRun]) -> list[str]:
    """What test images the backbones may have been trained on, as sentences."""
    seen = sorted({run.report["seen_in_training"] for run in evaluated} - {""})
    return [f"Backbones were trained on {data}: this is not a transfer." for data in seen]


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


def linear_notes(report: dict[str, Any]) -> list[str]:
    """How the numbers of `evaluate_run_linear` came about, and what limits them, as sentences."""
    result, run, percent = (
        report["result"],
        report["run"],
        partial(format_value, unit="%", digits=2),
    )
    samples = (f"{result[f'{part}_samples']} {part}" for part in ("train", "validation", "test"))
    notes = [
        f"{report['classes']} classes; {', '.join(samples)} images.",
        f"Features: {run['label']} trained on {run['data']}, {run['sampling']} batches, seed "
        f"{run['seed']}, step {report['step']}, d = {report['num_features']}.",
        f"λ = {result['penalty']:.3g}, the best of {len(result['penalties'])} on validation images "
        f"({percent(result['validation_accuracy'])} %), gives {percent(result['accuracy'])} % on "
        f"test images. λ = {result['best_test_penalty']:.3g}, chosen on test images as in the "
        f"paper, gives {percent(result['best_test_accuracy'])} %: compare it with published tables "
        "only. Both classifiers are trained on training and validation images.",
    ]
    if report["stored_size"] != report["image_size"]:
        stored, seen = ("×".join(map(str, report[k])) for k in ("stored_size", "image_size"))
        notes.append(f"Images were resized from {stored} to {seen} pixels.")
    if missed := result["unconverged"] + (not result["converged"]):
        notes.append(f"{missed} solves ended before they met the tolerance.")
    return notes
