"""How long losses take on a TPU by the estimate of its compiler, which needs no TPU.

Needs `pip install "jax[tpu]"`. The value and the gradients of a loss are compiled for one chip, and
the cycles that the compiler estimates for each operation are added up, times the trips of its loop.
It estimates none for kernels of Pallas. The Markdown table goes to the standard output.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import jax

from experiments.benchmark.cases import Dtype, Problem, problems_of
from experiments.benchmark.measure import jax_program, table
from experiments.benchmark.topologies import tpu_devices
from experiments.core.errors import ConfigError


class Operation(NamedTuple):
    """An operation of a compiled program that runs by itself."""

    of: str  # The JAX functions that it comes from.
    shape: str
    cycles: int
    trips: int
    is_product: bool

    @property
    def total(self) -> int:
        """Cycles of all trips."""
        return self.cycles * self.trips


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r" s32\[\]\S* constant\((\d+)\)")
_CALLED = re.compile(r"\b(body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SOURCE = re.compile(r'op_name="([^"]*)"')


def operations(program: str) -> list[Operation]:
    """The operations of the text of a program compiled for a TPU, those in loops too.

    Of the branches of a conditional, the shortest counts: the other one is for rare numbers.
    """
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in program.splitlines():
        if found := _COMPUTATION.match(line):
            lines = bodies.setdefault(found[1], [])
            entry = found[1] if line.startswith("ENTRY") else entry
        elif line.startswith(" "):
            lines.append(line)

    def holds_product(name: str) -> bool:
        return any(
            " convolution(" in line
            or " dot(" in line
            or any(holds_product(inner) for kind, inner in _CALLED.findall(line) if kind == "calls")
            for line in bodies.get(name, ())
        )

    def walk(name: str, trips: int) -> Iterator[Operation]:
        for line in bodies.get(name, ()):
            found = _OPERATION.match(line)
            if not found:
                continue
            shape, kind = found.groups()
            called = dict(_CALLED.findall(line))
            if kind == "while":  # Of `lax.scan`: it counts from 0 to the only number.
                (count,) = _TRIPS.findall("\n".join(bodies[called["condition"]]))
                yield from walk(called["body"], trips * int(count))
            elif kind == "conditional":
                (branches,) = _BRANCHES.findall(line)
                each = [list(walk(name.strip(" %"), trips)) for name in branches.split(",")]
                yield from min(each, key=total)
            elif kind == "call":
                yield from walk(called["to_apply"], trips)
            elif cycles := _CYCLES.search(line):
                source = _SOURCE.search(line)
                is_product = kind in ("convolution", "dot") or (
                    "calls" in called and holds_product(called["calls"])
                )
                of = source[1] if source else ""
                yield Operation(of, shape, int(cycles[1]), trips, is_product)

    return list(walk(entry, 1))


def compiled_text(problem: Problem, device: Any, *, bare: bool = False) -> str:
    """The program of value and gradients, or of the bare products, for a device of a topology."""
    case, size, dtype, _ = problem
    place = jax.sharding.SingleDeviceSharding(device)
    arrays = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
        for array in jax.eval_shape(lambda: case.make_arrays(size, dtype))
    ]
    form = (case.floor.run, None) if bare else (case.loss, case.differentiable)
    # The losses choose products and the sizes of tiles for the default device.
    with jax.default_device(device):
        return jax_program(form[0], arrays, form[1]).as_text() or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the losses one by one, prints a table."""
    parser = argparse.ArgumentParser("python -m experiments.benchmark.cycles", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of losses; default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=get_args(Dtype), help="its rows")
    parser.add_argument("--topology", default="v5e:2x2", help="of which one chip is used")
    parser.add_argument(
        "--operations", type=int, default=0, help="so many of the longest are listed below"
    )
    options = parser.parse_args(arguments)
    try:
        problems = problems_of(options.names, "accelerator", options.dtype)
        device = tpu_devices(options.topology)[0]
    except ConfigError as error:
        parser.error(str(error))
    rows, listed = [], []
    for problem in problems:
        if not 4_096 <= problem.size.n <= 8_192:
            continue
        print(problem.case.name, file=sys.stderr, flush=True)
        found = operations(compiled_text(problem, device))
        bare = operations(compiled_text(problem, device, bare=True))
        sums = total(found), total(it for it in found if it.is_product), total(bare)
        million = [f"{cycles / 1e6:.2f}" for cycles in sums]
        rows.append([*problem.cells(), *million, f"{sums[0] / sums[2]:.1f}"])
        listed += ["", f"{problem.case.name}:", ""]
        for it in sorted(found, key=lambda it: -it.total)[: options.operations]:
            times = f"{it.total / 1e6:.3f} = {it.trips} × {it.cycles:,}"
            listed.append(f"- {times}: {it.shape} {it.of}")

    headings = ["loss", "size", "dtype", "jaxloss", "in products", "bare products", "ratio"]
    print(*table(headings, rows), *(listed if options.operations else ()), sep="\n")
    return 0


def total(operations: Iterable[Operation]) -> int:
    """Cycles."""
    return sum(it.total for it in operations)


if __name__ == "__main__":
    sys.exit(main())
