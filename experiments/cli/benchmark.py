"""The command `benchmark`."""

from __future__ import annotations

import os
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
    All sizes together take twenty to forty minutes on one CPU core. For large batches on a GPU or
    a TPU there is `python -m experiments.benchmark`.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ()
    """Such as `softmax nca direct_sum`; default: all."""
    size: Literal["paper", "large", "own", "accelerator", "all"] = "paper"
    """The size of each loss's paper, ten times larger, further sizes of single losses, the three,
    or the rows of `python -m experiments.benchmark`."""
    out: Path = Path("runs", "benchmark")
    """Folder for benchmark.md."""
    allow_load: bool = False
    """Measure although other programs use the machine; the report then starts with a warning."""

    def run(self, command: Sequence[str]) -> int:
        """Measures, prints the table, writes it."""
        # JAX would take the whole memory of a GPU, and leave none to PyTorch.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        from experiments.benchmark.cases import problems_of
        from experiments.benchmark.run import run_benchmark

        for package in ("torch", "pytorch_metric_learning"):
            if find_spec(package) is None:
                raise ConfigError(f'no {package}; run pip install -e ".[benchmark]"')
        problems, path = problems_of(self.names, self.size), self.out / "benchmark.md"
        typed = shlex.join(command)
        text = run_benchmark(problems, command=typed, output=path, allow_load=self.allow_load)
        print(f"\n{text}\nwrote {path}")
        return 0
