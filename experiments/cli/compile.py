"""The command `compile`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.cli.options import AnyPreset
from experiments.core.config import ParallelMode
from experiments.core.errors import ConfigError

_MOST_CLASSES = 10**7


@dataclass(frozen=True)
class Compile:
    """Compile a preset's training step for a TPU pod, and print what a chip needs.

    No TPU and no data are needed, but the extra `tpu` (pip install -e ".[tpu]"). If a step does not
    fit into the memory of a chip, the exit status is 1.
    """

    config: AnyPreset
    """The preset, and options that differ from it."""
    topology: str = "v5e:2x2"
    """Kind and arrangement of the chips, such as v5e:16x16 for 256 of them."""
    parallel: ParallelMode = "pmap"
    """Data parallelism: jax.pmap, or jax.jit with sharded arrays."""
    classes: int = 0
    """Number of classes to assume; 0: that of the data set."""

    def run(self, command: Sequence[str]) -> int:
        """Prints the report."""
        import jax

        jax.config.update("jax_platforms", "cpu")
        from experiments.benchmark.compilation import compilation_lines, compile_step
        from experiments.benchmark.topologies import tpu_devices

        if not 0 <= self.classes <= _MOST_CLASSES:
            raise ConfigError(f"--classes must be at least 0 and at most {_MOST_CLASSES}")
        devices = tpu_devices(self.topology)
        heading = f"# {self.config.preset} on {self.topology}, by {self.parallel}"
        try:
            step = compile_step(self.config, devices, mode=self.parallel, classes=self.classes)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{heading}\n\nThe step does not fit. Compiler message:\n\n{error}")
            return 1
        print("\n".join([heading, "", *compilation_lines(step)]))
        return 1 if step.fits is False else 0
