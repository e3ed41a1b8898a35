"""One run: trained from its newest checkpoint, restored from one, evaluated and reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.assembly import Plan, assemble, build_learner, of_last, plan_run
from experiments.config import (
    Folders,
    ParallelMode,
    TrainConfig,
    by_name,
    check_config,
    evaluation_sections,
    option_types,
    replace_option,
)
from experiments.contracts import Objective, Outputs, Protocol
from experiments.errors import ConfigError, DivergedError
from experiments.processes import agree, check_shared, on_first
from experiments.protocols import build_protocol, config_from_dict, config_to_dict
from experiments.reporting.run import code_version, describe_run, read_report, write_report
from experiments.training.checkpoints import CHECKPOINTS_FOLDER, Checkpoints, checkpoints_folder
from experiments.training.loop import train
from experiments.training.run_directory import check_run_directory, claim_run_directory
from experiments.training.step import TrainState, build_outputs


def train_run(
    plan: Plan,
    directory: Path,
    folders: Folders,
    *,
    mode: ParallelMode = "pmap",
    mesh_shape: str = "",
    stuck_after: float = 0,
) -> float:
    """Trains a run to its end, from its newest checkpoint; returns the seconds of all calls.

    The plan and the machine determine every bit of the result. With several processes, all of them
    call this with the same arguments, see the directory, and read their shards of every batch.
    Arguments and errors are those of `assemble`, `claim_run_directory` and `loop.train`.
    """
    config = plan.config
    parts = assemble(plan, folders, mode=mode, mesh_shape=mesh_shape)
    values = config_to_dict(config)
    on_first(lambda: claim_run_directory(directory, values))
    return train(
        parts,
        directory,
        steps=config.steps,
        validate_every=config.validate_every,
        log_every=config.log_every,
        name=plan.protocol.description["label"],
        meta={
            "config": values,
            "class_counts": parts.class_counts.tolist(),
            "steps_per_epoch": parts.steps_per_epoch,
            "code": code_version(),
        },
        stuck_after=stuck_after,
    )


def complete_run(
    plan: Plan,
    directory: Path,
    folders: Folders,
    *,
    command: str,
    mode: ParallelMode = "pmap",
    mesh_shape: str = "",
    stuck_after: float = 0,
) -> dict[str, Any]:
    """Trains one run to its end, evaluates it, writes its report, and returns it.

    The report of a finished run is read instead. A run that diverges is finished, too: its report
    has no metrics, and states under `diverged` what happened. With several processes, all of them
    call this and see the directory; a `ConfigError` if they differ in options, mode, devices or
    version.
    """
    config, protocol = plan.config, plan.protocol
    values = config_to_dict(config)
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    common = {
        **by_name(values),
        "parallel": mode,
        "mesh": mesh_shape,
        "local devices": f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}",
        **{f"version of {name}": metadata.version(name) for name in packages},
        **{f"jaxloss {key}": value for key, value in code_version().items()},
    }
    agree("options or versions", common)
    check_shared(directory)
    # Before any data is loaded; `train_run` checks again, and claims the directory.
    if check_run_directory(directory, values):
        path = directory / "report.json"
        if path.exists() and (report := read_report(path)) is not None:
            return report
    try:
        seconds = train_run(
            plan, directory, folders, mode=mode, mesh_shape=mesh_shape, stuck_after=stuck_after
        )
        # From here on, the protocol of the checkpoint: without the metrics that `_with_last` adds.
        protocol, report = evaluate_run(directory, folders)
        report |= {"seconds": seconds}
        if config.report_last:
            report = _with_last(report, directory, folders)
    except DivergedError as error:
        report = describe_run(config, protocol) | {
            "split": protocol.splits[-1],
            "step": error.step,
            "metrics": [],
            "validation": None,
            "diverged": str(error),
        }
    report["command"] = command
    on_first(partial(write_report, directory, protocol, report))
    # A finished run that is read has none: `read_episodes` has the accuracies of single episodes.
    report.pop("episodes", None)
    return report


def _with_last(report: dict[str, Any], directory: Path, folders: Folders) -> dict[str, Any]:
    """The report of the best checkpoint, with the results of the last one under `last`.

    The metrics of the last checkpoint follow those of the best, with names of their own. If the
    best is the last, it is not evaluated again, and its metrics have both names.
    """
    run = restore_run(directory, "latest")
    if run.step == report["step"]:
        last = report
    else:
        _, last = evaluation_of(run, folders)(None, {})
    metrics = [metric | {"name": of_last(metric["name"])} for metric in last["metrics"]]
    with_last = report | {"metrics": [*report["metrics"], *metrics], "last": dict(last)}
    if (episodes := with_last["last"].pop("episodes", None)) is not None:
        with_last["episodes"] = report["episodes"] | {of_last(k): v for k, v in episodes.items()}
    return with_last


class RestoredRun(NamedTuple):
    """A checkpoint with all that is needed to use it."""

    plan: Plan
    graphdef: nnx.GraphDef
    """The backbone without its arrays."""
    objective: Objective
    state: TrainState
    step: int
    class_counts: np.ndarray
    """int64 [C], training images of every class."""
    validation: float | None
    """What the best checkpoint is chosen by."""
    notes: list[str]
    """Sentences for the report: the checkpoints that `restore_run` found damaged, and another
    version that trained the run."""


def restore_run(path: Path, which: str = "best") -> RestoredRun:
    """A checkpoint of a run, with the configuration that the checkpoint stores.

    The path is a run directory, or its folder of checkpoints. `which` is `best` by validation (the
    latest where there was none), `latest`, or the number of a step. Where the best or the latest is
    damaged, the next one is taken, and a note says so. With several processes, all of them call
    this.
    """
    if not which.isdecimal() and which not in ("best", "latest"):
        raise ConfigError(f"checkpoint must be best, latest or the number of a step, got {which!r}")
    with Checkpoints(checkpoints_folder(path), read_only=True) as checkpoints:

        def read(step: int) -> RestoredRun:
            meta = checkpoints.meta(step)
            plan = plan_run(config_from_dict(meta["config"]), check=False)
            class_counts = np.array(meta["class_counts"], np.int64)
            graphdef, objective, _, shapes = build_learner(
                plan, class_counts, meta["steps_per_epoch"], abstract=True
            )
            state = checkpoints.restore(shapes, step).state
            code, notes = meta["code"], []
            if code != code_version():
                notes = [f"Trained with jaxloss {code['version']}, commit {code['commit']}."]
            value = checkpoints.validation(step)
            return RestoredRun(plan, graphdef, objective, state, step, class_counts, value, notes)

        if which.isdecimal():
            return read(int(which))
        run, damaged = checkpoints.read_intact(read, best=which == "best")
    used = f"the checkpoint of step {run.step} is used instead."
    return run._replace(notes=[*(f"{error}; {used}" for error in damaged), *run.notes])


def config_of_run(path: Path) -> TrainConfig:
    """The configuration in the newest intact checkpoint of a run; errors as in `restore_run`."""
    with Checkpoints(checkpoints_folder(path), read_only=True) as checkpoints:
        meta, _ = checkpoints.read_intact(checkpoints.meta)
    return config_from_dict(meta["config"])


def evaluate_run(
    path: Path,
    folders: Folders,
    *,
    split: str | None = None,
    which: str = "best",
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Protocol, dict[str, Any]]:
    """Evaluates a checkpoint of `restore_run` by its protocol, as the function of `evaluation_of`.

    Returns the protocol, and the report as JSON types: that of `describe_run`, and `num_features`,
    `split`, `step`, `validation`, `notes` and the results of the protocol.
    """
    return evaluation_of(restore_run(path, which), folders)(split, overrides or {})


def evaluation_of(
    run: RestoredRun, folders: Folders
) -> Callable[[str | None, Mapping[str, Any]], tuple[Protocol, dict[str, Any]]]:
    """Evaluates a checkpoint, any number of times; the features of a split are computed once.

    The function takes a split (None: the protocol's split for evaluation), and values that replace
    those of the run, by option, such as `evaluation.episodes`. The run's protocol loads the images
    and names the validation; one that is built again with these values evaluates and reports.
    """
    outputs_of = build_outputs(run.graphdef, run.objective, run.plan.config.data, run.class_counts)

    @cache
    def outputs_of_split(split: str) -> Outputs:
        return outputs_of(run.state, run.plan.protocol.load(folders, split))

    def evaluate(
        split: str | None, overrides: Mapping[str, Any]
    ) -> tuple[Protocol, dict[str, Any]]:
        config = with_evaluation(run.plan.config, overrides)
        protocol = build_protocol(config)
        split = split_of(run.plan, split)
        validation = run.plan.protocol.validation_metric.measured(run.validation)
        results = protocol.evaluate(split, outputs_of_split)
        return protocol, {
            **describe_run(config, protocol),
            "num_features": run.plan.num_features,
            "split": split,
            "step": run.step,
            "validation": None if run.validation is None else validation,
            **results,
            "notes": [*run.notes, *results.get("notes", ())],
        }

    return evaluate


def split_of(plan: Plan, split: str | None) -> str:
    """A split of a protocol, by default the one for evaluation; raises a `ConfigError`."""
    splits = plan.protocol.splits
    split = split or splits[-1]
    if split not in splits:
        raise ConfigError(
            f"protocol {plan.config.protocol} has no split {split!r}; it has {', '.join(splits)}"
        )
    return split


def with_evaluation(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """A configuration with other values of evaluation options; a `ConfigError` for any other."""
    sections = evaluation_sections(config)
    known = [
        f"{name}.{option}" for name, section in sections.items() for option in option_types(section)
    ]
    if unknown := sorted(overrides.keys() - {*known}):
        raise ConfigError(
            f"the evaluation of protocol {config.protocol} has no {', '.join(unknown)}; "
            f"it has {', '.join(known) or 'no options'}"
        )
    for option, value in overrides.items():
        config = replace_option(config, option, value)
    check_config(config)
    return config


def run_folder(path: Path) -> Path:
    """The directory of the run that a path names: the run directory, or its checkpoints folder."""
    inside = path.resolve().name == CHECKPOINTS_FOLDER and checkpoints_folder(path) == path
    return path.resolve().parent if inside else path
