"""Options that several verbs share."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from experiments.config import Folders, ParallelMode, TrainConfig
from experiments.presets import PRESETS
from experiments.presets.preset import Preset
from experiments.storage import storage_path

if TYPE_CHECKING:
    from experiments.reporting.results import Axis


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


def paths() -> tyro.constructors.ConstructorRegistry:
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
    """How the batch is spread over all devices: by jax.pmap, or by jax.jit with sharded arrays.
    Both compute the same; pmap is the faster one on CPUs, and --mesh needs jit."""
    mesh: Annotated[str, tyro.conf.arg(metavar="BATCHxCLASSES")] = ""
    """With --parallel jit, for icons-instances alone: 2x4 spreads the classes of the classifier
    over 4 devices, which no device then holds whole, in 2 rows that share the batch. By default,
    every device holds all classes. The run directory must be on a disk that all processes see."""
    distributed: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Train with several processes. Start the same command in each, under a scheduler that JAX
    knows (Slurm, Open MPI, Kubernetes, cloud TPU) or with JAX_COORDINATOR_ADDRESS (HOST:PORT),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment. Without --mesh, the first process alone
    uses the run directory."""
    stuck_after: float = 30.0
    """Minutes without a training step, validation and compilation included, after which a process
    prints the stacks of its threads and ends with status 75; 0: never."""
    folders: DataFolders = field(default_factory=Folders)

    def of_a_run(self) -> dict[str, Any]:
        """As `complete_run` takes them."""
        return {
            "folders": self.folders,
            "mode": self.parallel,
            "mesh_shape": self.mesh,
            "stuck_after": self.stuck_after,
        }


HowToRun = Annotated[Execution, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Comparison:
    """How the runs of a grid are compared."""

    baseline: str = ""
    """OPTION=VALUE of one axis, such as loss.name=softmax: adds tables of the differences to it,
    pair by pair, with 95 % confidence intervals."""
    pairs_over: str = ""
    """Option whose values are repetitions, such as data.subset_seed: means and intervals are over
    its values, after averaging the seeds of each."""
    choose: tuple[str, ...] = ()
    """Options, each with an --over of its own, of which validation chooses the value for every
    combination of the others."""


Comparing = Annotated[Comparison, tyro.conf.arg(name="")]


def run_and_print(
    config: TrainConfig,
    axes: Sequence[Axis],
    seeds: Sequence[int],
    directory: Path,
    execution: Execution,
    comparison: Comparison,
    command: Sequence[str],
    **report: Any,
) -> int:
    """Runs the missing part of a grid and prints its table; returns the exit status.

    `command` is what was typed; `report` is what else `run_grid` takes for the report.
    """
    from experiments.grid import parse_comparison, run_grid
    from experiments.runs import complete_run

    typed = shlex.join(command)
    paths, diverged = run_grid(
        config,
        axes,
        seeds,
        directory,
        execution.folders,
        partial(complete_run, command=typed, **execution.of_a_run()),
        comparison=parse_comparison(axes, config, **vars(comparison)),
        command=typed,
        **report,
    )
    for path in paths[:1]:
        print("\n" + path.read_text(encoding="utf-8"))
    print("wrote", ", ".join(str(path) for path in paths))
    if diverged:
        message = f"{len(diverged)} runs diverged (delete the folder of one to train it again):"
        print(message, *diverged, sep="\n  ")
    return 3 if diverged else 0
