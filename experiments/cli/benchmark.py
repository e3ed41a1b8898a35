"""The verb `benchmark`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from experiments.errors import ConfigError

if TYPE_CHECKING:
    from experiments.benchmark.cases import SizeName

_SIZES: dict[str, tuple[SizeName, ...]] = {
    "paper": ("paper",),
    "large": ("large",),
    "all": ("paper", "large"),
}


@dataclass(frozen=True)
class Benchmark:
    """Time and memory of every loss against PyTorch, other packages and its matrix products.

    All forms of a loss run in one process on the same arrays, in turns, after it was checked that
    their values and gradients agree. Without PyTorch and pytorch-metric-learning (the extra
    `benchmark`) their columns are left out. Two CPU cores take some five minutes at the
    papers' sizes and ten minutes more at the large ones.
    """

    loss: tuple[str, ...] = ()
    """Losses, as `softmax nca direct_sum`, and uniform_prototypes, assign_prototypes (by default
    all of them)."""
    size: Literal["paper", "large", "all"] = "paper"
    """The size of each loss's paper, one ten times larger, or both."""
    out: Path = Path("runs", "benchmark")
    """Folder for benchmark.md, benchmark.json and benchmark.png."""
    repeats: int = 100
    """Turns of each form: a loss gets 8 seconds at most."""
    compile: bool = True
    """Measure PyTorch under torch.compile, too, which needs a C++ compiler."""

    def run(self, command: Sequence[str]) -> int:
        """Measures, prints the tables, writes them."""
        if self.repeats < 1:
            raise ConfigError(f"--repeats must be at least 1, got {self.repeats}")
        # JAX would take the whole memory of a GPU, and leave none to PyTorch.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import rich.console

        from experiments.benchmark.report import markdown, write_benchmark
        from experiments.benchmark.run import run_benchmark

        console = rich.console.Console(highlight=False, soft_wrap=True, markup=False)
        report = run_benchmark(
            self.loss,
            _SIZES[self.size],
            repeats=self.repeats,
            compiled=self.compile,
            command=shlex.join(command),
            say=console.print,
        )
        paths = write_benchmark(self.out, report)
        print("\n" + markdown(report))
        print("wrote", ", ".join(str(path) for path in paths))
        return 0
