"""How long losses take on a TPU by the estimate of its compiler, which needs no TPU.

The value and the gradients of a loss are compiled for one chip, and the estimated cycles of each
operation are added up, times the trips of its loop. Kernels of Pallas, scatters and sorts have no
estimate.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from experiments.benchmark.cases import FLOORS, Problem
from experiments.benchmark.measure import jax_program
from experiments.benchmark.topologies import tpu_devices
from experiments.reporting.markdown import table


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

    def holds_product(name: str | None) -> bool:
        return any(
            " convolution(" in line
            or " dot(" in line
            or any(holds_product(inner) for kind, inner in _CALLED.findall(line) if kind == "calls")
            for line in bodies.get(name or "", ())
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
                is_product = kind in ("convolution", "dot") or holds_product(called.get("calls"))
                of = source[1] if source else ""
                yield Operation(of, shape, int(cycles[1]), trips, is_product)

    return list(walk(entry, 1))


def total(operations: Iterable[Operation]) -> int:
    """Cycles."""
    return sum(it.total for it in operations)


def compiled_operations(problem: Problem, device: Any) -> list[list[Operation]]:
    """Those of the value and the gradients of a loss, and those of its bare products."""
    case, size, dtype, _ = problem
    place = jax.sharding.SingleDeviceSharding(device)
    arrays = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
        for array in jax.eval_shape(lambda: case.make_arrays(size, dtype))
    ]
    forms = (case.loss, case.differentiable), (FLOORS[case.floor], None)
    # The losses choose products and the sizes of tiles for the default device.
    with jax.default_device(device):
        return [operations(jax_program(f, arrays, of).as_text() or "") for f, of in forms]


def cycles_report(problems: Iterable[Problem], topology: str, longest: int = 0) -> str:
    """A Markdown table of the problems of a medium size, on one chip of a TPU topology.

    Below it are for each problem so many of the `longest` operations.
    """
    jax.config.update("jax_platforms", "cpu")
    device = tpu_devices(topology)[0]
    rows, listed = [], []
    for problem in problems:
        if not 4_096 <= problem.size.n <= 8_192:
            continue
        print(", ".join(problem.cells()), file=sys.stderr, flush=True)
        found, bare = compiled_operations(problem, device)
        sums = total(found), total(it for it in found if it.is_product), total(bare)
        million = [f"{cycles / 1e6:.2f}" for cycles in sums]
        rows.append([*problem.cells(), *million, f"{sums[0] / sums[2]:.1f}"])
        listed += ["", f"{problem.case.name}:", ""] if longest else []
        for it in sorted(found, key=lambda it: -it.total)[:longest]:
            times = f"{it.total / 1e6:.3f} = {it.trips} × {it.cycles:,}"
            listed.append(f"- {times}: {it.shape} {it.of}")
    headings = ["loss", "size", "dtype", "jaxloss", "in products", "bare products", "ratio"]
    return "\n".join([*table(headings, rows), *listed])
