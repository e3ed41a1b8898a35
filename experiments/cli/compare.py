"""The command `compare`: the table of protocol A, as a grid of losses and samplings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.cli.options import (
    Comparing,
    ComparisonOptions,
    Execution,
    HowToRun,
    preset_choice,
    run_and_print,
)
from experiments.presets import PRESETS
from experiments.presets.few_shot import PRESETS as FEW_SHOT
from experiments.protocols import integration
from experiments.protocols.few_shot import FewShotConfig
from experiments.protocols.integration import Name

if TYPE_CHECKING:
    _FewShotPreset = FewShotConfig
else:
    _FewShotPreset = preset_choice({name: PRESETS[name] for name in FEW_SHOT})

_DEFAULT_LOSSES: tuple[Any, ...] = tuple(
    name for name in integration.NAMES if not name.startswith("spectral")
)


@dataclass(frozen=True)
class Compare:
    """Compare losses and samplings of few-shot transfer; write their table and figure.

    Finished runs are kept: the same command continues where it was stopped, and a command with
    other losses, samplings or seeds reuses the runs that it shares. If a run diverges, the others
    continue; the table shows which one it was, and the exit status is 3.
    """

    config: _FewShotPreset
    """The preset to start from."""
    losses: tuple[Name, ...] = _DEFAULT_LOSSES
    """Losses such as sce, sce+nca (sum), direct:sce+nca (direct sum) and spectral:sce+nca."""
    sampling: tuple[str, ...] = ("random",)
    """`random`, or NxK for N classes with K images each."""
    seeds: tuple[int, ...] = (0,)
    """Every combination is trained once for each seed."""
    directory: Path | None = None
    """Folder of the comparison (by default runs/compare-PRESET)."""
    comparison: Comparing = field(default_factory=ComparisonOptions)
    execution: HowToRun = field(default_factory=Execution)

    def run(self, command: Sequence[str]) -> int:
        """Runs the missing part of the comparison, prints its table."""
        from experiments.data.sampling import describe_strategy
        from experiments.errors import ConfigError
        from experiments.grid import check_not_set
        from experiments.reporting.results import Axis

        config = self.config
        check_not_set(
            config,
            PRESETS[config.preset].config,
            {"loss.name": "--losses", "sampling.strategy": "--sampling", "seed": "--seeds"},
        )
        if not (self.losses and self.sampling and self.seeds):
            raise ConfigError("--losses, --sampling and --seeds need at least one value each")
        losses = [name for name in integration.NAMES if name in self.losses]
        sampling = tuple(dict.fromkeys(self.sampling))
        axes = [
            Axis(name, tuple(map(label, values)), tuple({option: value} for value in values))
            for name, option, label, values in (
                ("loss", "loss.name", integration.label, losses),
                ("training batches", "sampling.strategy", describe_strategy, sampling),
            )
        ]
        return run_and_print(
            self,
            axes,
            f"compare-{config.preset}",
            command,
            title=f"Few-shot accuracy on {config.data.name}",
            notes=integration.notation(losses, config.loss),
        )
