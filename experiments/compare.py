"""A grid of losses, samplings and seeds: each cell is a run directory, all of them one table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.config import Folders, TrainConfig, from_dict, to_dict
from experiments.data.sampling import parse_strategy
from experiments.evaluation.run import evaluate_run
from experiments.reporting.report import write_run_report
from experiments.training.checkpoints import claim_run_directory, read_config
from experiments.training.loop import ParallelMode, train
from experiments.training.objective import parse_loss


def cell_directory(root: Path, config: TrainConfig) -> Path:
    """The run directory of a cell, for example ROOT/direct-sce+nca/32x4/seed-0."""
    name = config.loss.name.replace(":", "-")
    return root / name / config.sampling.strategy / f"seed-{config.seed}"


def grid(
    config: TrainConfig, losses: Sequence[str], samplings: Sequence[str], seeds: Sequence[int]
) -> list[TrainConfig]:
    """One configuration for every cell; all methods under a seed and sampling stand together.

    Raises:
      ValueError: a loss or a sampling is not known.
    """
    for loss in losses:
        parse_loss(loss)
    for sampling in samplings:
        parse_strategy(sampling)
    return [
        dataclasses.replace(
            config,
            loss=dataclasses.replace(config.loss, name=loss),
            sampling=dataclasses.replace(config.sampling, strategy=sampling),
            seed=seed,
        )
        for seed in seeds
        for sampling in samplings
        for loss in losses
    ]


def finished_cells(root: Path, config: TrainConfig) -> list[dict[str, Any]]:
    """The reports of all finished cells under `root` that differ from `config` in nothing but
    loss, sampling and seed, in the order of the paper's tables."""
    reports = []
    for path in sorted(root.glob("*/*/seed-*/report.json")):
        cell = from_dict(TrainConfig, read_config(path.parent))
        same = dataclasses.replace(
            cell,
            loss=dataclasses.replace(cell.loss, name=config.loss.name),
            sampling=dataclasses.replace(cell.sampling, strategy=config.sampling.strategy),
            seed=config.seed,
        )
        if same == config:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
    return sorted(reports, key=lambda report: (_paper_order(report["loss"]), report["seed"]))


def _paper_order(loss: str) -> tuple[int, ...]:
    name = parse_loss(loss)
    families = ("classification", "metric", "sum", "direct", "spectral")
    parts = ("sce", "bce", None), ("nca", "proto", None)
    return (
        families.index(name.family),
        parts[0].index(name.classification),
        parts[1].index(name.metric),
    )


def run_cell(
    config: TrainConfig, directory: Path, folders: Folders, *, parallel_mode: ParallelMode = "pmap"
) -> dict[str, Any]:
    """Trains one run to its end, evaluates it on the novel classes and writes its report.

    What is finished already is not done again: the report of a finished run is read.

    Raises:
      ConfigMismatchError: the directory holds a run of another configuration.
    """
    path = directory / "report.json"
    if path.exists() and claim_run_directory(directory, to_dict(config)):
        return json.loads(path.read_text(encoding="utf-8"))
    trained = train(config, directory, folders, parallel_mode=parallel_mode)
    report = evaluate_run(directory, folders)
    report["seconds"] = trained.seconds
    write_run_report(directory, report)
    return report
