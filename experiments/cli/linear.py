"""The verb `linear`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from experiments.cli.options import DataFolders
from experiments.config import Folders
from experiments.errors import ConfigError


@dataclass(frozen=True)
class Linear:
    """Evaluate runs by linear classifiers on their frozen features, on any data set (protocol F).

    Softmax classifiers are trained by L-BFGS with 45 L2 penalties; the penalty is chosen on images
    held out of the training images. Writes linear-DATA.md, .json and .png into each run directory;
    of several runs, also a table and a figure, with one row for each loss.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run directories, or their folders of checkpoints."""
    data: str
    """Data set, as `python -m experiments datasets` lists it. One without a test split, or with
    held-out classes, is split within its classes."""
    split: Literal["all", "base", "validation", "novel"] = "all"
    """Classes of a data set that holds classes out: all, or those of one split."""
    checkpoint: str = "best"
    """`best` by validation, `latest`, or the number of a step."""
    holdout: float = 0.2
    """Fraction of each class's training images on which the penalty is chosen."""
    baseline: str = ""
    """With several runs: a loss by its label, such as Two-way; adds a table and a figure of the
    differences to it, pair by pair of the same seed, with 95 % confidence intervals."""
    directory: Path | None = None
    """With several runs: folder of the table (by default runs/linear-DATA)."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Evaluates, prints and writes the reports."""
        from experiments.reporting.linear import linear_report, write_linear_report
        from experiments.restored import restore_run, run_directory
        from experiments.transfer import evaluate_run_linear, evaluate_runs_linear

        if not self.runs:
            raise ConfigError("linear needs a run directory, or several")
        path, *others = self.runs
        text = shlex.join(command)
        if others:
            paths = evaluate_runs_linear(
                self.runs,
                self.folders,
                self.directory or Path("runs", f"linear-{self._data()}"),
                data=self.data,
                split=self.split,
                holdout=self.holdout,
                which=self.checkpoint,
                baseline=self.baseline,
                name_of=self._file_name,
                command=text,
            )
            print("\n" + paths[0].read_text(encoding="utf-8"))
        elif self.baseline or self.directory:
            raise ConfigError("--baseline and --directory are for several runs")
        else:
            run = restore_run(path, self.checkpoint)
            report = evaluate_run_linear(
                run, self.folders, data=self.data, split=self.split, holdout=self.holdout
            )
            print(linear_report(report))
            paths = write_linear_report(
                run_directory(path), report, self._file_name(run.step), command=text
            )
        print("\nwrote", ", ".join(str(path) for path in paths))
        return 0

    def _file_name(self, step: int) -> str:
        """A name with the settings, so that evaluations of a run do not overwrite each other."""
        checkpoint = "" if self.checkpoint == Linear.checkpoint else f"-step{step}"
        holdout = "" if self.holdout == Linear.holdout else f"-holdout{self.holdout}"
        return f"linear-{self._data()}{checkpoint}{holdout}"

    def _data(self) -> str:
        return self.data if self.split == Linear.split else f"{self.data}-{self.split}"
