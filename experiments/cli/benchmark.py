"""The command `benchmark`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from experiments.core.errors import ConfigError


@dataclass(frozen=True)
class Benchmark:
    """Measure time and memory of every loss against PyTorch, optax and matrix products.

    All forms of a loss run in one process on the same arrays, in turns, after a check that their
    values and gradients agree. Needs the extra `benchmark`, and a C++ compiler for torch.compile.
    All sizes together take twenty to forty minutes on one CPU core. On a GPU or a TPU, measure
    large batches: `--size accelerator --minutes 5`.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ()
    """Such as `softmax nca direct_sum`; default: all."""
    size: Literal["paper", "large", "own", "accelerator", "all"] = "paper"
    """The size of each loss's paper, ten times larger, further sizes of single losses, the three,
    or large batches and many classes, in float32 and bfloat16, for an accelerator."""
    dtype: Literal["", "float32", "bfloat16", "mixed"] = ""
    """Measure only the rows of this dtype."""
    minutes: float = float("inf")
    """Start no row after so many minutes."""
    out: Path = Path("runs", "benchmark")
    """Folder for benchmark.md."""
    allow_load: bool = False
    """Measure although other programs use the machine; the report then starts with a warning."""
    cycles: str = ""
    """A TPU topology such as v5e:2x2: measure nothing, but print for losses of `--size accelerator`
    how long one chip takes by the estimate of its compiler. Needs the extra `tpu`, but no TPU."""
    operations: int = 0
    """With --cycles, list so many of the longest operations of each loss."""

    def run(self, command: Sequence[str]) -> int:
        """Measures, prints the table, writes it."""
        from experiments.benchmark.cases import problems_of
        from experiments.benchmark.cycles import cycles_report
        from experiments.benchmark.run import run_benchmark

        if self.cycles:
            problems = problems_of(self.names, "accelerator", self.dtype or "bfloat16")
            print(cycles_report(problems, self.cycles, self.operations))
            return 0
        for package in ("torch", "pytorch_metric_learning"):
            if find_spec(package) is None and self.size != "accelerator":
                raise ConfigError(f'no {package}; run pip install -e ".[benchmark]"')
        problems, path = problems_of(self.names, self.size, self.dtype), self.out / "benchmark.md"
        text = run_benchmark(
            problems,
            command=shlex.join(command),
            seconds=60 * self.minutes,
            output=path,
            allow_load=self.allow_load,
        )
        print(f"\n{text}\nwrote {path}")
        return 0
