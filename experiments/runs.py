"""One run: trained from its newest checkpoint, restored from one, evaluated and reported."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from experiments.assembly import Plan, assemble, build_learner, of_last, plan_run
from experiments.config import (
    Folders,
    ParallelMode,
    TrainConfig,
    check_config,
    evaluation_sections,
    option_types,
    set_options,
)
from experiments.contracts import Objective, Outputs
from experiments.data.augment import describe_augmentation
from experiments.data.selection import part_of
from experiments.datasets import lookup
from experiments.errors import ConfigError, DivergedError
from experiments.presets import find_preset
from experiments.processes import agree, check_shared, is_first, on_first
from experiments.protocols import build_protocol, config_from_dict, config_to_dict
from experiments.reporting.run import (
    code_version,
    describe_run,
    read_report,
    report_text,
    write_report,
)
from experiments.storage import storage_path
from experiments.training import loop
from experiments.training.checkpoints import Checkpoints, checkpoints_folder, run_folder
from experiments.training.run_directory import check_run_directory, claim_run_directory, read_meta
from experiments.training.step import TrainState, build_outputs


def train_run(
    plan: Plan,
    directory: Path,
    folders: Folders,
    *,
    mode: ParallelMode = "pmap",
    stuck_after: float = 0,
) -> float:
    """Trains a run to its end, from its newest checkpoint; returns the seconds of all calls.

    The plan and the machine determine every bit of the result. With several processes, all of them
    call this with the same arguments, see the directory, and read their shards of every batch.
    Arguments and errors are those of `assemble`, `claim_run_directory` and `loop.train`.
    """
    config = plan.config
    parts = assemble(plan, folders, mode=mode)
    values = config_to_dict(config)
    fixed = config.fixed_steps()
    if is_first():
        print(f"augmentation: {describe_augmentation(config.data)}", flush=True)
    on_first(lambda: claim_run_directory(directory, values, fixed_steps=fixed))
    return loop.train(
        parts,
        directory,
        steps=config.steps,
        validate_every=config.validate_every,
        log_every=config.log_every,
        name=plan.protocol.description["label"],
        meta={
            "config": values,
            "class_counts": parts.class_counts.tolist(),
            "classes": parts.classes,
            "classifier": parts.classifier,
            "origins": parts.origins,
            "steps_per_epoch": parts.steps_per_epoch,
            "code": code_version(),
        },
        stuck_after=stuck_after,
    )


def train(
    preset: str | TrainConfig,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    directory: str | Path,
    folders: Folders = Folders(),
    command: str = "",
    **how: Any,
) -> dict[str, Any]:
    """Trains a preset, evaluates it and writes its report, as the command `train` does.

    Called again with the same arguments, it continues a run that was stopped, and returns the
    report of a finished one. Raises a `ConfigError` for an unknown or impossible option, a
    `ConfigMismatchError` where the directory belongs to another run, and `Interrupted` at Ctrl-C,
    when the state is saved.

    Args:
      preset: The name of a preset, or a configuration.
      options: Values that replace those of the preset, by the names of the command line, such as
        `{"loss.name": "direct:sce+nca", "model.widths": (16, 32, 64, 64), "steps": 500}`.
      directory: Run directory, which `load_run` reads.
      folders: Where the data is.
      command: What the report names as its origin. Default: this call.
      how: `mode` and `stuck_after`, as `complete_run` takes them.

    Returns:
      The report, as `evaluate` gives it. If the run diverged, it has no metrics, and states under
      `diverged` what happened.
    """
    if not isinstance(preset, str | TrainConfig) or not isinstance(directory, str | os.PathLike):
        raise ConfigError("preset must be a name or a TrainConfig, and directory a path")
    start = find_preset(preset).config if isinstance(preset, str) else preset
    path = storage_path(str(directory), "directory")
    call = f"experiments.train({start.preset!r}, {dict(options)}, directory={str(path)!r})"
    plan = plan_run(set_options(start, options))
    return complete_run(plan, path, folders, command=command or call, **how)


def complete_run(
    plan: Plan,
    directory: Path,
    folders: Folders,
    *,
    command: str,
    mode: ParallelMode = "pmap",
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
        **flatten_dict(values, sep="."),
        "parallel": mode,
        "local devices": f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}",
        **{f"version of {name}": metadata.version(name) for name in packages},
        **{f"jaxloss {key}": value for key, value in code_version().items()},
    }
    agree("options or versions", common)
    check_shared(directory)
    # Before any data is loaded; `train_run` checks again, and claims the directory.
    there = check_run_directory(directory, values, fixed_steps=config.fixed_steps())
    if there == values:  # Not one of fewer steps.
        path = directory / "report.json"
        if path.exists() and (report := read_report(path, partial(report_text, protocol))):
            return report
    try:
        seconds = train_run(plan, directory, folders, mode=mode, stuck_after=stuck_after)
        report = evaluate(load_run(directory), folders=folders) | {"seconds": seconds}
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
    run = load_run(directory, "latest")
    last = report if run.step == report["step"] else evaluate(run, folders=folders)
    metrics = [metric | {"name": of_last(metric["name"])} for metric in last["metrics"]]
    with_last = report | {"metrics": [*report["metrics"], *metrics], "last": dict(last)}
    if (episodes := with_last["last"].pop("episodes", None)) is not None:
        with_last["episodes"] = report["episodes"] | {of_last(k): v for k, v in episodes.items()}
    return with_last


@dataclass(frozen=True, eq=False)
class RestoredRun:
    """A checkpoint with all that is needed to use it."""

    directory: Path
    """Run directory."""
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
    """Sentences for the report, on checkpoints that `load_run` found damaged, on initial weights,
    and on another version that trained the run."""

    @cached_property
    def outputs(self) -> Callable[..., Outputs]:
        """`outputs(split, folders, most)`, as `features_of`; computed once and then kept."""
        load, data = self.plan.protocol.load, self.plan.config.data
        outputs_of = build_outputs(self.graphdef, self.objective, data, self.class_counts)

        @cache
        def outputs(split: str, folders: Folders, most: int | None = None) -> Outputs:
            images = load(folders, split)
            found = outputs_of(self.state, part_of(images, most) if most else images)
            found.features.flags.writeable = False  # Later evaluations use them, too.
            return found

        return outputs


def load_run(folder: str | Path, checkpoint: str | int = "best") -> RestoredRun:
    """A checkpoint of a run, with the configuration that the checkpoint stores.

    With several processes, all of them call this.

    Args:
      folder: A run directory, which may be that of an unfinished run, or its folder of checkpoints.
      checkpoint: `best` by validation (the latest of equal ones, or where there was none),
        `latest`, or the number of a step. Where the best or the latest is damaged, the next one is
        taken, and a note says so.
    """
    path, which = storage_path(str(folder)), str(checkpoint)
    if not (which.isascii() and which.isdecimal() and len(which) < 16) and which not in (
        "best",
        "latest",
    ):
        shown = repr(which[:40])
        raise ConfigError(f"checkpoint must be best, latest or the number of a step, got {shown}")
    with Checkpoints(checkpoints_folder(path), read_only=True) as checkpoints:

        def read(step: int) -> RestoredRun:
            meta = read_meta(checkpoints, step)
            plan = plan_run(config_from_dict(meta["config"]), check=False)
            class_counts = np.array(meta["class_counts"], np.int64)
            graphdef, objective, _, shapes = build_learner(
                plan, class_counts, meta["steps_per_epoch"], abstract=True
            )
            state = checkpoints.restore(shapes, step).state
            code, notes = meta["code"], list(meta.get("origins", ()))
            if code != code_version():
                notes += [f"Trained with jaxloss {code['version']}, commit {code['commit']}."]
            value = checkpoints.validation(step)
            parts = graphdef, objective, state, step, class_counts, value, notes
            return RestoredRun(run_folder(path), plan, *parts)

        if which.isdecimal():
            return read(int(which))
        run, damaged = checkpoints.read_intact(read, best=which == "best")
    used = f"the checkpoint of step {run.step} is used instead."
    return replace(run, notes=[*(f"{error}; {used}" for error in damaged), *run.notes])


def config_of_run(path: Path) -> TrainConfig:
    """The configuration in the newest intact checkpoint of a run; errors as in `load_run`."""
    with Checkpoints(checkpoints_folder(path), read_only=True) as checkpoints:
        meta, _ = checkpoints.read_intact(lambda step: read_meta(checkpoints, step))
    return config_from_dict(meta["config"])


def features_of(
    run: RestoredRun,
    split: str | None = None,
    *,
    folders: Folders = Folders(),
    most: int | None = None,
) -> Outputs:
    """What a run computes for the images of a split, as NumPy arrays.

    Images are cropped and normalised as in training, and not augmented. With several processes, all
    of them call this. Raises a `DivergedError` where a feature is not finite.

    Args:
      split: One of the run's protocol, such as `base`, `validation` and `novel`, or `train`,
        `validation` and `test`. Default: the one for evaluation.
      folders: Where the data is.
      most: Of more images, a random part, always the same. Default: all images.
    """
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"most must be a whole number from 1, or None for all images, got {most}")
    return run.outputs(split_of(run.plan, split), folders, most)


def evaluate(
    run: RestoredRun,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    split: str | None = None,
    folders: Folders = Folders(),
) -> dict[str, Any]:
    """Evaluates a run by its protocol, as the command `evaluate` does; writes nothing.

    Features are computed once for each split, and kept with the run.

    Args:
      options: Values of evaluation options that replace those of the run, such as
        `{"evaluation.ways": 10}`.
      split: Default: the one for evaluation.
      folders: Where the data is.

    Returns:
      The report as JSON types: that of `describe_run`, and `num_features`, `split`, `step`,
      `validation`, `notes` and the results of the protocol, `metrics` among them.
    """
    plan = run.plan
    config = with_evaluation(plan.config, options)
    # The run's own protocol loads the images and names the validation.
    protocol, split = build_protocol(config), split_of(plan, split)
    results = protocol.evaluate(split, lambda name: run.outputs(name, folders))
    validation = plan.protocol.validation_metric.measured(run.validation)
    return {
        **describe_run(config, protocol),
        "num_features": plan.num_features,
        "split": split,
        "step": run.step,
        "validation": None if run.validation is None else validation,
        **results,
        "notes": [*data_notes(run.plan.config.data.name), *run.notes, *results.get("notes", ())],
    }


def data_notes(name: str) -> list[str]:
    """What is odd in a data set, as notes of a report."""
    return [f"Data: {line}." for line in lookup(name).remarks]


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
    if unknown := sorted({name.replace("-", "_") for name in overrides} - {*known}):
        raise ConfigError(
            f"the evaluation of protocol {config.protocol} has no {', '.join(unknown)}; "
            f"it has {', '.join(known) or 'no options'}"
        )
    config = set_options(config, overrides)
    check_config(config)
    return config
