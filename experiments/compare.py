"""A grid of losses, samplings and seeds: each cell is a run directory, all of them one table."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cells import read_report
from experiments.config import FewShotConfig
from experiments.errors import ExperimentError
from experiments.loss_names import parse_loss
from experiments.protocols import run_from_dict
from experiments.training.checkpoints import read_config

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
        if same == config and (report := read_report(path, cell)):
            reports.append(report)
    return sorted(reports, key=lambda report: (parse_loss(report["loss"]).order, report["seed"]))
