"""Options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from experiments.core.config import Folders, ParallelMode, TrainConfig
from experiments.core.errors import ConfigError
from experiments.core.storage import storage_path
from experiments.papers.presets import PRESETS
from experiments.papers.presets.preset import Preset


def preset_choice(presets: Mapping[str, Preset]) -> Any:
    """The type of a preset as a positional word, followed by overrides of its options."""
    choice = tyro.extras.subcommand_type_from_defaults(
        {name: preset.config for name, preset in presets.items()},
        {name: preset.description for name, preset in presets.items()},
    )
    return Annotated[choice, tyro.conf.arg(name="")]


if TYPE_CHECKING:
    AnyPreset = TrainConfig
else:
    AnyPreset = preset_choice(PRESETS)


def storage_paths() -> tyro.constructors.ConstructorRegistry:
    """How tyro reads options that are paths while this context lasts: by `storage_path`."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Path] | None:
        if info.type is not Path:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATH",
            instance_from_str=lambda words: storage_path(words[0]),
            is_instance=lambda value: isinstance(value, os.PathLike),
            str_from_instance=lambda path: [str(path)],
        )

    return registry


DataFolders = Annotated[Folders, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Execution:
    """How runs are trained."""

    parallel: ParallelMode = "pmap"
    """Spread the batch by jax.pmap (faster on CPUs), or by jax.jit with sharded arrays."""
    distributed: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Train with several processes. Start the same command in each, under a scheduler that JAX
    knows (Slurm, Open MPI, Kubernetes, cloud TPU) or with JAX_COORDINATOR_ADDRESS (HOST:PORT),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment."""
    stuck_after: float = 30.0
    """Minutes without a training step, validation and compilation included, after which a process
    prints the stacks of its threads and ends with status 1; 0: never."""
    folders: DataFolders = field(default_factory=Folders)

    def run_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `train` and `complete_run`."""
        if not 0 <= self.stuck_after <= 10**6:
            words = f"must be at least 0 and at most {10**6}, got {self.stuck_after:g}"
            raise ConfigError(f"--stuck-after {words}")
        return {
            "folders": self.folders,
            "mode": self.parallel,
            "stuck_after": self.stuck_after,
        }


HowToRun = Annotated[Execution, tyro.conf.arg(name="")]


def print_written(paths: Sequence[Path]) -> None:
    """Prints the first file, which is Markdown, without its pictures; then the names of all."""
    text = re.sub(r"(?m)^!\[.*\n\n?", "", paths[0].read_text(encoding="utf-8"))
    print(f"\n{text.rstrip()}\n\nwrote {', '.join(map(str, paths))}")
