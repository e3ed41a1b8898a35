"""The verb `evaluate`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.cli.options import DataFolders
from experiments.config import Folders

_FROM_RUN = "(default: as in the run)"
_Number = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=_FROM_RUN)]


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a trained run as its protocol does.

    Options that are not given are those of the run. Ways, shots, queries, episodes, seed and
    distances are options of few-shot evaluation.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """Run directory, or its folder of checkpoints."""
    split: Annotated[
        str | None,
        tyro.conf.arg(metavar="SPLIT", help_behavior_hint="(default: novel or test)"),
    ] = None
    """base, validation or novel classes; or, where no classes are held out, train, validation or
    test images."""
    checkpoint: str = "best"
    """`best` by validation, `latest`, or the number of a step."""
    ways: _Number = None
    """Classes of an episode."""
    shots: Annotated[
        tuple[int, ...] | None,
        tyro.conf.arg(metavar="INT [INT ...]", help_behavior_hint=_FROM_RUN),
    ] = None
    """Support images per class; one evaluation for each number."""
    queries: _Number = None
    """Query images per class."""
    episodes: _Number = None
    """Episodes of each evaluation."""
    seed: _Number = None
    """Seed of the list of episodes."""
    distances: Annotated[
        tuple[Literal["euclidean", "cosine"], ...] | None,
        tyro.conf.arg(metavar="{euclidean,cosine} ...", help_behavior_hint=_FROM_RUN),
    ] = None
    """Distances of a query from a prototype (protocol A); one evaluation for each."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Evaluates, prints and writes the report."""
        from experiments.reporting.run import run_report
        from experiments.runs import evaluate_run, report_lines, run_directory, write_report

        overrides = self._overrides()
        protocol, report = evaluate_run(
            self.directory,
            self.folders,
            split=self.split,
            which=self.checkpoint,
            overrides=overrides,
        )
        report["command"] = shlex.join(command)
        print(run_report(report, report_lines(protocol, report)))
        name = _file_name(report["split"], report["step"], overrides)
        paths = write_report(run_directory(self.directory), protocol, report, name)
        print("\nwrote", ", ".join(str(path) for path in paths))
        return 0

    def _overrides(self) -> dict[str, Any]:
        options = {
            "ways": self.ways,
            "shots": self.shots,
            "queries": self.queries,
            "episodes": self.episodes,
            "seed": self.seed,
            "distances": self.distances,
        }
        return {name: value for name, value in options.items() if value is not None}


def _file_name(split: str, step: int, overrides: dict[str, Any]) -> str:
    """A name with the settings, so that evaluations of a run do not overwrite each other."""
    settings = [
        f"{name}{'+'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in overrides.items()
    ]
    return "-".join(["evaluation", split, f"step{step}", *settings])
