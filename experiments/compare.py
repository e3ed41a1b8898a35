"""A grid of losses, samplings and seeds: each cell is a run directory, all of them one table."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.config import FewShotConfig, Folders, TrainConfig
from experiments.errors import DivergedError, ExperimentError
from experiments.evaluation.run import describe_run, evaluate_run
from experiments.loss_names import parse_loss
from experiments.protocols import protocol_of, run_from_dict, run_to_dict
from experiments.reporting.report import write_run_report
from experiments.training.checkpoints import claim_run_directory, read_config
from experiments.training.loop import ParallelMode, train
from experiments.training.preflight import check_run
from experiments.training.processes import on_first

logger = logging.getLogger(__name__)


def cell_directory(root: Path, config: FewShotConfig) -> Path:
    """The run directory of a cell, for example ROOT/direct-sce+nca/32x4/seed-0."""
    name = config.loss.name.replace(":", "-")
    return root / name / config.sampling.strategy / f"seed-{config.seed}"


def grid(
    config: FewShotConfig, losses: Sequence[str], samplings: Sequence[str], seeds: Sequence[int]
) -> list[FewShotConfig]:
    """One configuration for every cell; all methods under a seed and sampling stand together."""
    return [
        dataclasses.replace(
            config,
            loss=dataclasses.replace(config.loss, name=loss),
            sampling=dataclasses.replace(config.sampling, strategy=sampling),
            seed=seed,
        )
        for seed in dict.fromkeys(seeds)
        for sampling in dict.fromkeys(samplings)
        for loss in dict.fromkeys(losses)
    ]


def check_grid(cells: Sequence[FewShotConfig], folders: Folders) -> None:
    """Raises, before hours of training, unless every cell can be trained and evaluated.

    Raises:
      ConfigError: one cannot; the message tells why.
    """
    for cell in cells:
        check_run(cell, folders)


def finished_cells(root: Path, config: FewShotConfig) -> list[dict[str, Any]]:
    """The reports of all finished cells under `root` that differ from `config` in nothing but
    loss, sampling and seed, in the order of the paper's tables. One that cannot be read is left
    out with a warning."""
    reports = []
    for path in sorted(root.glob("*/*/seed-*/report.json")):
        try:
            cell = run_from_dict(read_config(path.parent))
        except ExperimentError as error:
            logger.warning("%s is left out of the table: %s", path.parent, error)
            continue
        if not isinstance(cell, FewShotConfig):
            continue
        same = dataclasses.replace(
            cell,
            loss=dataclasses.replace(cell.loss, name=config.loss.name),
            sampling=dataclasses.replace(cell.sampling, strategy=config.sampling.strategy),
            seed=config.seed,
        )
        if same == config and (report := _read_report(path, cell)):
            reports.append(report)
    return sorted(reports, key=lambda report: (parse_loss(report["loss"]).order, report["seed"]))


def _read_report(path: Path, config: TrainConfig) -> dict[str, Any] | None:
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
        return _read_report(path, config) if there else None

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
