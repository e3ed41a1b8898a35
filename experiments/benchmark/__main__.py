"""Large batches and many classes on an accelerator: time, memory and errors.

Needs jax, optax and jaxtyping, and for PyTorch's columns torch. `python -m experiments benchmark`
times all losses on a CPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# JAX would take most of the memory of a GPU, and leave little to PyTorch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes them."""
    from experiments.benchmark.accelerator import parse, run_accelerator

    parser = argparse.ArgumentParser("python -m experiments.benchmark", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=5, help="after which no group of six rows is started"
    )
    parser.add_argument("--output", type=Path, help="file for the tables, written at every row")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divides batches and classes: 64 for a CPU"
    )
    options, problems = parse(parser, arguments)
    for number, problem in enumerate(problems):
        n, _, C = problem.size
        size = problem.size._replace(n=max(n // options.shrink, 16), C=max(C // options.shrink, 4))
        problems[number] = problem._replace(size=size)
    arguments = sys.argv[1:] if arguments is None else arguments
    run_accelerator(
        problems,
        command=shlex.join(["python", "-m", "experiments.benchmark", *arguments]),
        seconds=60 * options.minutes,
        output=options.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
