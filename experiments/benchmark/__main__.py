"""Large batches and many classes on an accelerator: time and memory.

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
from typing import get_args

# JAX would take most of the memory of a GPU, and leave little to PyTorch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes it."""
    from experiments.benchmark.cases import Dtype, Group, problems_of
    from experiments.benchmark.run import run_benchmark
    from experiments.core.errors import ConfigError

    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m experiments.benchmark", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of losses; default: all")
    parser.add_argument("--size", default="accelerator", choices=get_args(Group))
    parser.add_argument("--dtype", choices=get_args(Dtype), help="only its rows")
    parser.add_argument("--minutes", type=float, default=5, help="after which no row is started")
    parser.add_argument("--output", type=Path, help="file for the table, written at every row")
    parser.add_argument("--allow-load", action="store_true", help="measure on a busy CPU")
    options = parser.parse_args(arguments)
    try:
        text = run_benchmark(
            problems_of(options.names, options.size, options.dtype),
            command=shlex.join(["python", "-m", "experiments.benchmark", *arguments]),
            seconds=60 * options.minutes,
            output=options.output,
            allow_load=options.allow_load,
        )
    except ConfigError as error:
        parser.error(str(error))
    print(f"\n{text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
