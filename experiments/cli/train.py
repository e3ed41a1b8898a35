"""The command `train`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.cli.options import AnyPreset, Execution, HowToRun
from experiments.core.storage import component
from experiments.reporting.run import report_text


@dataclass(frozen=True)
class Train:
    """Train a preset, evaluate it, and write its report.

    To continue a run that was stopped or killed, run the same command again. More --steps go on in
    the same directory, except with the cosine schedule. --model.weights RUN starts from another
    run's backbone, and from its classifier where that fits.
    """

    config: AnyPreset
    """The preset to start from."""
    directory: Path | None = None
    """Run directory, or gs://BUCKET/PATH (by default runs/PRESET-LOSS-SAMPLING-seedSEED)."""
    execution: HowToRun = field(default_factory=Execution)

    def run(self, command: Sequence[str]) -> int:
        """Trains, evaluates, prints the report."""
        # Here, because `--help` need not wait for Orbax and TensorBoard.
        from experiments.papers import build_protocol
        from experiments.run import train

        config = self.config
        name = f"{config.preset}-{config.loss.name}-{config.sampling.strategy}-seed{config.seed}"
        directory = self.directory or Path("runs", component(name))
        how = self.execution.run_arguments()
        report = train(config, directory=directory, command=shlex.join(command), **how)
        print(report_text(build_protocol(config), report))
        print(f"\nreport: {directory / 'report.md'}")
        return 3 if "diverged" in report else 0
