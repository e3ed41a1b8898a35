"""Several runs: what is finished is kept, and one that diverges does not stop the others."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config import FewShotConfig, Folders, TrainConfig
from experiments.errors import DivergedError
from experiments.evaluation.run import describe_run, evaluate_run
from experiments.protocols import protocol_of, run_to_dict
from experiments.reporting.report import write_run_report
from experiments.training.checkpoints import check_run_directory, claim_run_directory
from experiments.training.loop import ParallelMode, train
from experiments.training.preflight import check_options, check_run
from experiments.training.processes import on_first

logger = logging.getLogger(__name__)


class Cell(NamedTuple):
    """One run of several."""

    name: str
    """What it is, in a line."""
    config: TrainConfig
    directory: Path
    place: tuple[str, ...] = ()
    """In a sweep: the label of its value on every axis."""


def run_cells(
    cells: Sequence[Cell], folders: Folders, *, command: str, parallel_mode: ParallelMode = "pmap"
) -> list[str]:
    """Trains and evaluates what is missing, and prints which one it is at.

    Args:
      cells: the runs.
      folders: where data lies.
      command: what was typed to get them, for the reports.
      parallel_mode: as in `train`.

    Returns:
      A line for every run that diverged.

    Raises:
      ConfigError: before hours of training: one of them cannot be trained and evaluated.
      ConfigMismatchError: before any training: a directory holds a run of another configuration.
    """
    for cell in cells:
        check_options(cell.config)
    on_first(lambda: [check_run_directory(c.directory, run_to_dict(c.config)) for c in cells])
    for cell in cells:
        check_run(cell.config, folders)
    diverged = []
    for number, cell in enumerate(cells, start=1):
        print(f"[{number}/{len(cells)}] {cell.name}", flush=True)
        report = run_cell(
            cell.config, cell.directory, folders, command=command, parallel_mode=parallel_mode
        )
        if "diverged" in report:
            diverged.append(f"{cell.directory}: {report['diverged']}")
            print(report["diverged"], flush=True)
    return diverged


def run_cell(
    config: TrainConfig,
    directory: Path,
    folders: Folders,
    *,
    command: str,
    parallel_mode: ParallelMode = "pmap",
) -> dict[str, Any]:
    """Trains one run to its end, evaluates it and writes its report.

    What is finished already is not done again: the report of a finished run is read. A run that
    diverges is finished too: its report has no results, and tells under `diverged` what happened.

    Args:
      config: the run.
      directory: its directory.
      folders: where data lies.
      command: what was typed to get it, for the report.
      parallel_mode: as in `train`.

    Raises:
      ConfigMismatchError: the directory holds a run of another configuration.
    """
    path = directory / "report.json"

    def finished() -> dict[str, Any] | None:
        there = path.exists() and claim_run_directory(directory, run_to_dict(config))
        return read_report(path, config) if there else None

    report = on_first(finished)
    if report is not None:
        return report
    try:
        trained = train(config, directory, folders, parallel_mode=parallel_mode)
        report = evaluate_run(directory, folders) | {"seconds": trained.seconds}
    except DivergedError as error:
        report = describe_run(config) | {
            "split": protocol_of(config).splits[-1],
            "step": error.step,
            "results": [],
            "metrics": {},
            "diverged": str(error),
        }
    report["command"] = command
    on_first(lambda: write_run_report(directory, report))
    return report


def read_report(path: Path, config: TrainConfig) -> dict[str, Any] | None:
    """The report of a finished run; None, and a warning, where it is damaged."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        expected = describe_run(config)
        told = {key: report[key] for key in ("loss", "sampling", "seed")}
        if told != {key: expected[key] for key in told}:
            raise ValueError(f"it is the report of another run: {told}")
        if isinstance(config, FewShotConfig):
            for result in report["results"]:
                _ = [result[key] for key in ("shots", "accuracy", "interval", "episodes", "hash")]
        elif not isinstance(report["metrics"], dict):
            raise TypeError(f"its metrics are {report['metrics']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s: %s)", path, type(error).__name__, error)
        return None
    return report
