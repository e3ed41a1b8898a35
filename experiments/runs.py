"""One run: trained from its newest checkpoint, evaluated and reported."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from experiments.assembly import Plan, assemble, of_last
from experiments.config import Folders, ParallelMode, by_name
from experiments.errors import DivergedError
from experiments.processes import agree, check_shared, on_first
from experiments.protocols import config_to_dict
from experiments.reporting.run import describe_run, read_report, write_report
from experiments.restored import evaluate_run, evaluation_of, restore_run
from experiments.training.loop import train
from experiments.training.run_directory import check_run_directory, claim_run_directory
from experiments.version import code_version


def train_run(
    plan: Plan,
    directory: Path,
    folders: Folders,
    *,
    mode: ParallelMode = "pmap",
    mesh_shape: str = "",
    stuck_after: float = 0,
) -> float:
    """Trains a run to its end, from its newest checkpoint if there is one.

    The plan and the machine determine every bit of the result. With several processes, all of them
    call this with the same arguments, see the directory, and read their shards of every batch.

    Args:
      plan, folders, mode, mesh_shape: As in `assemble`.
      directory, stuck_after: As in `experiments.training.loop.train`.

    Returns:
      Seconds spent on the run, over all calls that trained it.

    Raises:
      ConfigError: The configuration does not fit the data or the mode; nothing is written.
      ConfigMismatchError: The directory belongs to a run of another configuration.
      DivergedError, Interrupted: See `experiments.training.loop.train`.
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
    """Trains one run to its end, evaluates it and writes its report.

    The report of a finished run is read instead. A run that diverges is finished, too: its report
    has no metrics, and states under `diverged` what happened. With several processes, all of them
    call this and see the directory.

    Raises:
      ConfigError: Another process of the run has another configuration, mode or version.
      ConfigMismatchError: The directory belongs to a run of another configuration.
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
    if check_run_directory(directory, values):
        path = directory / "report.json"
        if path.exists() and (report := read_report(path)) is not None:
            return report
    try:
        seconds = train_run(
            plan, directory, folders, mode=mode, mesh_shape=mesh_shape, stuck_after=stuck_after
        )
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
    # As a finished run is read: `read_episodes` has the accuracies of single episodes.
    report.pop("episodes", None)
    return report


def _with_last(report: dict[str, Any], directory: Path, folders: Folders) -> dict[str, Any]:
    """The report of the best checkpoint, with the results of the last one under `last`.

    The metrics of the last checkpoint follow those of the best, with names of their own.
    """
    run = restore_run(directory, "latest")
    last = report if run.step == report["step"] else evaluation_of(run, folders)(None, {})[1]
    metrics = [metric | {"name": of_last(metric["name"])} for metric in last["metrics"]]
    with_last = report | {"metrics": [*report["metrics"], *metrics], "last": dict(last)}
    if (episodes := with_last["last"].pop("episodes", None)) is not None:
        with_last["episodes"] = report["episodes"] | {of_last(k): v for k, v in episodes.items()}
    return with_last
