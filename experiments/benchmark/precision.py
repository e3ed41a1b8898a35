"""What JAX's own switch for the precision of products costs and gives, without a TPU.

The time is the estimate of a TPU's compiler. The errors are those of a TPU's programs, run on a CPU
that takes the passes of a TPU's matrix unit: bfloat16 parts of a float32 factor, and the products
of parts that are large enough.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import mlir

from experiments.benchmark.cases import Case, Problem
from experiments.benchmark.cycles import compiled_operations, is_medium, total
from experiments.benchmark.measure import failure, jax_program
from experiments.benchmark.topologies import tpu_devices
from experiments.reporting.markdown import table

SETTINGS = "", "high", "bfloat16"  # Of `jax.default_matmul_precision`; "" is its default.
_PARTS = {lax.Precision.DEFAULT: 1, lax.Precision.HIGH: 2, lax.Precision.HIGHEST: 3}
_MOST_ROWS = 512  # That errors are measured with.


def has_products(case: Case) -> bool:
    """Whether the switch can change anything."""
    return not case.value_only and case.floor not in ("pass", "exponential")


def setting(switch: str) -> Any:
    """A context in which JAX's switch is set, or left as it is for ""."""
    return jax.default_matmul_precision(switch) if switch else nullcontext()


def _parts(array: Array, number: int) -> list[Array]:
    """Arrays of bfloat16 numbers whose sum is a float32 array, the large one first."""
    if array.dtype != jnp.float32:
        return [array.astype(jnp.float32)]
    found = []
    for _ in range(number):
        found.append(lax.reduce_precision(array, 8, 7))
        array = array - found[-1]
    return found


def _product(a: Array, b: Array, dimensions: Any) -> Array:
    """`lax.dot_general` of a CPU by another operation, whose lowering stays as it is."""
    ((of_a, of_b), batch) = dimensions
    assert batch == ((), ()), "no loss has products in a batch"
    free = [[k for k in range(x.ndim) if k not in of] for x, of in ((a, of_a), (b, of_b))]
    x, y = (
        x.transpose(*own, *of).reshape(-1, math.prod(x.shape[k] for k in of))
        for x, own, of in ((a, free[0], of_a), (b, free[1], of_b))
    )
    found = lax.conv_general_dilated(x, y, (), "VALID", precision="highest")
    return found.reshape(*(x.shape[k] for x, own in zip((a, b), free, strict=True) for k in own))


def _as_a_tpu(a: Array, b: Array, *, dimension_numbers: Any, precision: Any, **options: Any) -> Any:
    """`lax.dot_general` as a TPU computes it: one, three or six passes for two float32 arrays."""
    dtype = options["preferred_element_type"] or jnp.result_type(a, b)
    if not {a.dtype, b.dtype} <= {np.dtype("float32"), jnp.dtype(jnp.bfloat16)}:
        return _product(a.astype(dtype), b.astype(dtype), dimension_numbers)
    of_a, of_b = precision or (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
    parts = _parts(a, _PARTS[of_a]), _parts(b, _PARTS[of_b])
    most = max(map(len, parts))
    products = [
        _product(x, y, dimension_numbers)
        for i, x in enumerate(parts[0])
        for j, y in enumerate(parts[1])
        if i + j < most
    ]
    return reduce(jnp.add, reversed(products)).astype(dtype)


@contextmanager
def tpu_on_a_cpu() -> Iterator[None]:
    """Programs of a TPU are traced. From now on, the process multiplies as a TPU does."""
    rule = mlir.lower_fun(_as_a_tpu, multiple_results=False)
    mlir.register_lowering(dot_general_p, rule, platform="cpu")
    with mock.patch.object(jax, "default_backend", return_value="tpu"):
        yield


def errors(problem: Problem, switches: Sequence[str]) -> list[tuple[float, float]]:
    """For each setting those of the value and of the gradients, relative to their largest number.

    They are those to float64, for the arrays of the paper's size, with 512 rows at most.
    """
    case = problem.case
    size = case.paper._replace(n=min(case.paper.n, _MOST_ROWS))
    arrays = case.make_arrays(size, problem.dtype)

    def results(arrays: Sequence[Array]) -> list[np.ndarray]:
        found = jax_program(case.loss, arrays, case.differentiable)(*arrays)
        return [np.asarray(array, np.float64) for array in jax.tree.leaves(found)]

    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) if a.dtype.kind != "i" else a for a in arrays]
        expected = results(wide)
    rows = []
    with tpu_on_a_cpu():
        for switch in switches:
            with setting(switch):
                found = zip(results(arrays), expected, strict=True)
            value, *gradients = (np.abs(a - b).max() / np.abs(b).max() for a, b in found)
            rows.append((float(value), float(max(gradients))))
    return rows


def precision_report(problems: Iterable[Problem], topology: str) -> str:
    """A Markdown table of the losses of a medium size that have products, on one chip of a TPU."""
    jax.config.update("jax_platforms", "cpu")
    device = tpu_devices(topology)[0]
    rows = []
    for problem in problems:
        if not is_medium(problem) or not has_products(problem.case):
            continue
        print(", ".join(problem.cells()), file=sys.stderr, flush=True)
        cells: list[str | None] = [*problem.cells()]
        try:
            for switch in SETTINGS:
                with setting(switch):
                    found = compiled_operations(problem, device)
                cells.append(f"{total(found) / 1e6:.2f}")
            cells += [f"{value:.0e}, {rest:.0e}" for value, rest in errors(problem, SETTINGS)]
        except Exception as error:  # Of the compiler, such as too little memory.
            cells.append(failure(error))
        rows.append([*cells, *[None] * (3 + 2 * len(SETTINGS) - len(cells))])
    named = [switch or "default" for switch in SETTINGS]
    headings = [*named, *(f"errors: {name}" for name in named)]
    return "\n".join(table(["loss", "size", "dtype", *headings], rows))
