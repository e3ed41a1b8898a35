"""How long losses take on a TPU by the estimate of its compiler, which needs no TPU.

The value and the gradients of a loss are compiled for one chip, and the estimated cycles of each
operation are added up, times the trips of its loop. A loop whose trips depend on the numbers counts
once, and the report says how much that is. The compiler unrolls Cholesky factors and triangular
solves into blocks of 128 rows, so that all their products count; but the factor and the inverse of
a block of the diagonal have no estimate, nor have scatters, some gathers, sorts and kernels of
Pallas. The report names what has none. Copies between memories run beside all these.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from experiments.benchmark.cases import FLOORS, Problem
from experiments.benchmark.measure import failure, jax_program
from experiments.benchmark.topologies import tpu_devices
from experiments.reporting.markdown import table


class Operation(NamedTuple):
    """An operation of a compiled program that runs by itself."""

    of: str  # The JAX functions that it comes from.
    cycles: int
    trips: int
    is_product: bool = False
    in_open_loop: bool = False  # Its trips depend on the numbers, and one is counted.
    unknown: str = ""  # What it is, if the compiler has no estimate; it has 0 cycles then.

    @property
    def total(self) -> int:
        """Cycles of all trips."""
        return self.cycles * self.trips


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][\w\-]*)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_LIMIT = re.compile(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")
_CALLED = re.compile(r"\b(body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_INDEXED = "scatter", "gather", "sort"
_FREE = "AllocateBuffer", "ConcatBitcast"  # Custom calls that take no time.


def operations(program: str) -> list[Operation]:
    """The operations of the text of a program compiled for a TPU, those in loops too.

    Of the branches of a conditional, the shortest counts: the other one is for rare numbers. In a
    loop whose trips depend on the numbers, such as the one that splits a matrix for its singular
    vectors, the longest counts: that is the work.
    """
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in program.splitlines():
        if found := _COMPUTATION.match(line):
            lines = bodies.setdefault(found[1], [])
            entry = found[1] if line.startswith("ENTRY") else entry
        elif line.startswith(" "):
            lines.append(line)

    def holds(name: str | None, kinds: Iterable[str]) -> str:
        for line in bodies.get(name or "", ()):
            for kind in kinds:
                if f" {kind}(" in line:
                    return kind
            for how, inner in _CALLED.findall(line):
                if how == "calls" and (kind := holds(inner, kinds)):
                    return kind
        return ""

    def trips_of(condition: str) -> int | None:
        text = "\n".join(bodies[condition])
        limit = _LIMIT.search(text)  # Of `lax.scan`: it counts from 0 to a constant.
        found = dict(_CONSTANT.findall(text)).get(limit[1]) if limit else None
        return int(found) if found else None

    def walk(name: str, trips: int, in_open: bool) -> Iterator[Operation]:
        for line in bodies.get(name, ()):
            found = _OPERATION.match(line)
            if not found:
                continue
            kind = found[1]
            called = dict(_CALLED.findall(line))
            inner = called.get("calls")
            source = _SOURCE.search(line)
            operation = Operation(source[1] if source else "", 0, trips, False, in_open)
            if kind == "while":
                count = trips_of(called["condition"])
                yield from walk(called["body"], trips * (count or 1), in_open or count is None)
            elif kind == "conditional":
                (branches,) = _BRANCHES.findall(line)
                names = (name.strip(" %") for name in branches.split(","))
                each = [list(walk(name, trips, in_open)) for name in names]
                yield from (max if in_open else min)(each, key=total)
            elif kind == "call":
                yield from walk(called["to_apply"], trips, in_open)
            elif cycles := _CYCLES.search(line):
                products = "convolution", "dot"
                is_product = kind in products or bool(holds(inner, products))
                yield operation._replace(cycles=int(cycles[1]), is_product=is_product)
            elif kind in ("fusion", "custom-call", *_INDEXED):
                target = _TARGET.search(line)
                unknown = target[1] if target else holds(inner, _INDEXED) or kind
                if unknown not in _FREE:
                    yield operation._replace(unknown=unknown)

    return list(walk(entry, 1, False))


def total(operations: Iterable[Operation]) -> int:
    """Cycles."""
    return sum(it.total for it in operations)


def compiled_operations(problem: Problem, device: Any, *, bare: bool = False) -> list[Operation]:
    """Those of the value and the gradients of a loss, or those of its floor."""
    case, size, dtype, _ = problem
    place = jax.sharding.SingleDeviceSharding(device)
    arrays = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
        for array in jax.eval_shape(lambda: case.make_arrays(size, dtype))
    ]
    form, of = (FLOORS[case.floor], ()) if bare else (case.loss, case.differentiable)
    # The losses choose products and the sizes of tiles for the default device.
    with jax.default_device(device):
        return operations(jax_program(form, arrays, of).as_text() or "")


def is_medium(problem: Problem) -> bool:
    """Whether it is among those that are compiled: it may have no rows, but classes."""
    return problem.size.n == 0 or 4_096 <= problem.size.n <= 8_192


def largest(operations: Iterable[Operation]) -> str:
    """The two functions of JAX that take most, and their million cycles."""
    counts: Counter[str] = Counter()
    for it in operations:
        counts[it.of.rpartition("/")[2] or "copies"] += it.total
    return ", ".join(f"{name} {cycles / 1e6:.2f}" for name, cycles in counts.most_common(2))


def unknown(operations: Iterable[Operation]) -> str:
    """How often which operations run that the compiler has no estimate for."""
    counts: Counter[str] = Counter()
    for it in operations:
        counts[it.unknown] += it.trips if it.unknown else 0
    return ", ".join(f"{count} {name}" for name, count in counts.most_common() if count)


def cycles_report(problems: Iterable[Problem], topology: str) -> str:
    """A Markdown table of the problems of a medium size, on one chip of a TPU topology."""
    jax.config.update("jax_platforms", "cpu")
    device = tpu_devices(topology)[0]
    rows = []
    for problem in problems:
        if not is_medium(problem):
            continue
        print(", ".join(problem.cells()), file=sys.stderr, flush=True)
        try:
            found = compiled_operations(problem, device)
            bare = compiled_operations(problem, device, bare=True)
        except Exception as error:  # Of the compiler, such as too little memory.
            rows.append([*problem.cells(), failure(error), *6 * [None]])
            continue
        sums = total(found), total(it for it in found if it.is_product), total(bare)
        once = total(it for it in found if it.in_open_loop)
        million = [f"{cycles / 1e6:.2f}" for cycles in sums]
        ratio = f"{sums[0] / sums[2]:.1f}" if sums[2] else None
        of_loops = f"{once / 1e6:.2f}" if any(it.in_open_loop for it in found) else None
        rest = largest(it for it in found if not (it.is_product or it.unknown))
        rows.append([*problem.cells(), *million, ratio, rest, of_loops, unknown(found) or None])
    headings = ["loss", "size", "dtype", "jaxloss", "in products", "floor", "ratio"]
    headings += ["the rest", "open loops", "no estimate"]
    note = (
        "Million cycles. Open loops run as often as the numbers need, and count once. Of the sides "
        "of a branch, the shortest counts, in an open loop the longest. What has no estimate is "
        "not in the numbers."
    )
    return "\n".join([*table(headings, rows), "", note])
