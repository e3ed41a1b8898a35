"""Large batches and many classes, on a GPU, a TPU or a CPU: time, memory and errors.

It needs jax, optax, jaxtyping and numpy, and times PyTorch where it is installed. Rows are compiled
some at a time, in several threads, and timed when nothing compiles.
"""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxloss
from experiments.benchmark import dense_forms
from experiments.benchmark.cases import CASES, GROUPS, Size
from experiments.benchmark.measure import (
    digits,
    jax_program,
    jax_run,
    take_turns,
    torch_run,
    with_int64,
)

Dtype = Literal["bfloat16", "float32", "mixed"]
"""Of all float arrays; `mixed` is bfloat16 features and float32 weights."""
Features = Literal["random", "clustered"]

BY_NAME = {case.name: case for case in CASES}
TIMED = OURS, BARE, COMPILED, EAGER, DENSE = (
    *("jaxloss", "bare products", "torch.compile", "PyTorch eager", "dense JAX"),
)
TORCH = {COMPILED: True, EAGER: False}  # Forms in PyTorch, and whether they are compiled.
COMPARED = OURS, DENSE, COMPILED, EAGER  # In memory and errors.
_AT_ONCE = 6  # Rows that are compiled before they are timed.
_THREADS = 4  # That compile for XLA, beside the one that compiles for PyTorch.
_TURNS = 20
_SECONDS = 1.2  # Of all turns of a row.
_MOST_SCORES = 2**30  # That the bare products hold at once.


class Problem(NamedTuple):
    """A row: a loss, its size and the dtype of its arrays."""

    name: str  # Of the case.
    size: Size
    dtype: Dtype
    with_errors: bool = False  # Whether they are measured, against float64 on the host.


_PAIRS = "nca", "supervised_contrastive", "info_nce", "sigmoid_contrastive"
_LAYERS = "classifier", "arcface"


def _important(place: int, dtype: Dtype) -> list[Problem]:
    """The losses that most use, at a small, a medium or a large size."""
    n, m, C = [(512, 512, 10_000), (8_192, 4_096, 100_000), (32_768, 1_024, 1_000_000)][place]
    pairs = [Problem(name, Size(n, 512, n // 8), dtype, place == 0) for name in _PAIRS]
    return pairs + [Problem(name, Size(m, 512, C), dtype, place == 0) for name in _LAYERS]


def _others(dtype: Dtype) -> list[Problem]:
    sizes = {
        "multi_similarity": Size(8_192, 512, 1_024),
        "prototypical": Size(8_192, 512, 64),
        "proxy_anchor": Size(4_096, 512, 10_000),
        "proxy_nca": Size(4_096, 512, 10_000),
        "group_softmax": Size(4_096, 512, 1_000),
    }
    return [Problem(name, size, dtype) for name, size in sizes.items()]


PROBLEMS: tuple[Problem, ...] = (  # The most important ones first.
    *(problem for place in (1, 0, 2) for problem in _important(place, "bfloat16")),
    *(problem for place in (1, 0) for problem in _important(place, "float32")),
    *_others("bfloat16"),
    Problem("classifier", Size(4_096, 512, 100_000), "mixed"),
    *_important(2, "float32"),
    *_others("float32"),
)


def add_names(parser: ArgumentParser) -> None:
    """The names of losses as arguments; none is all."""
    names = list(dict.fromkeys(problem.name for problem in PROBLEMS))

    def known(name: str) -> str:
        if name not in names:
            raise ArgumentTypeError(f"unknown loss {name!r}; choose from {', '.join(names)}")
        return name

    text = f"of {', '.join(names)}; default: all"
    parser.add_argument("names", nargs="*", metavar="NAME", type=known, help=text)


@dataclass
class Row:
    """What was measured."""

    problem: Problem
    milliseconds: dict[str, float] = field(default_factory=dict)
    megabytes: dict[str, float] = field(default_factory=dict)
    """The most that a form holds beside its arguments: results and temporary arrays."""
    errors: dict[Features, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """Of the value, and the largest of a gradient, relative to the largest number."""
    failures: dict[str, str] = field(default_factory=dict)
    teraflops: float = 0.0  # A second, of the bare products.
    measured_megabytes: float | None = None
    """Of jaxloss by the device's own count, where it is the largest of the process so far."""


def specs(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the arrays."""
    (n, d, C), dtype = problem.size, problem.dtype
    wide = jnp.float32 if dtype == "mixed" else jnp.dtype(dtype)
    narrow = jnp.bfloat16 if dtype == "mixed" else wide
    of = {"labels": ((n,), jnp.int32), "weights": ((d, C), wide), "bias": ((C,), wide)}
    arrays = BY_NAME[problem.name].arrays  # The others are features.
    return [jax.ShapeDtypeStruct(*of.get(name, ((n, d), narrow))) for name in arrays]


def make_arrays(problem: Problem, features: Features = "random") -> list[Array]:
    """Drawn on the device. Clustered features have a mean of 10 and a spread of 0.1."""
    of_features = (10.0, 0.1) if features == "clustered" else (0.2, 1.0)
    laws = {"weights": (0.0, problem.size.d**-0.5), "bias": (0.0, 0.1)}
    arrays = []
    for number, name in enumerate(BY_NAME[problem.name].arrays):
        like, law = specs(problem)[number], laws.get(name, of_features)
        if name == "labels":
            arrays.append(jax.device_put(_labels(problem.size)))
        else:
            key = jax.random.key(number)
            arrays.append(_normal(key, *law, shape=like.shape, dtype=like.dtype))
    return arrays


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: Array, mean: float, spread: float, *, shape: tuple[int, ...], dtype: Any) -> Array:
    return (mean + spread * jax.random.normal(key, shape)).astype(dtype)


def _labels(size: Size) -> np.ndarray:
    """Classes of equal size, or classes spread over all of them, in no order.

    A class that has a sample has at least four: each sample has a positive.
    """
    classes = min(size.C, size.n // 4)
    labels = np.arange(size.n) % classes * (size.C // classes)
    return np.random.default_rng(0).permutation(labels).astype(np.int32)


def bare_products(problem: Problem) -> tuple[Callable[..., Any], float]:
    """The fewest products of the loss and its gradient, in one pass, and their 10¹² operations.

    The gradient of all pairs of a batch is one product, because the pairs are symmetric.
    """
    arrays = BY_NAME[problem.name].arrays
    pairs = "weights" not in arrays and "view" not in arrays and problem.name != "prototypical"
    groups = GROUPS if problem.name == "group_softmax" else 1

    def run(features: Array, *others: Array) -> Any:
        rows = jnp.concatenate([features] * groups) if groups > 1 else features
        if "view" in arrays:
            columns = others[0].T
        elif "weights" in arrays:
            columns = others[arrays.index("weights") - 1].astype(rows.dtype)
        elif pairs:
            columns = rows.T
        else:
            columns = rows[: problem.size.C].T
        return _products(rows, columns, of_columns=not pairs)

    n, d, C = problem.size
    other = C if "weights" in arrays or problem.name == "prototypical" else n
    return run, (2 if pairs else 3) * 2e-12 * groups * n * d * other


def _products(rows: Array, columns: Array, *, of_columns: bool) -> Any:
    """`rows @ columns`, and what it takes to get the gradients from a matrix of that shape."""
    parts = 1
    while len(rows) * columns.shape[1] > parts * _MOST_SCORES and len(rows) % (2 * parts) == 0:
        parts *= 2

    def step(total: Array, block: Array) -> tuple[Array, Array]:
        scores = _product(block, columns)
        of_block = _product(scores, columns.T)
        return (total + _product(block.T, scores) if of_columns else total), of_block

    if parts == 1:
        scores = _product(rows, columns)
        of_rows = _product(scores, columns.T)
        return (of_rows, _product(rows.T, scores)) if of_columns else of_rows
    start = jnp.zeros_like(columns) if of_columns else jnp.zeros((), rows.dtype)
    return lax.scan(step, start, rows.reshape(parts, -1, rows.shape[1]))


def _product(a: Array, b: Array) -> Array:
    """In the dtype of its factors, and float32 without TF32."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def _torch() -> Any:
    """PyTorch, if it is installed and has JAX's device."""
    if not find_spec("torch"):
        return None
    import torch

    on_gpu = jax.default_backend() == "gpu"
    if jax.default_backend() != "cpu" and not (on_gpu and torch.cuda.is_available()):
        return None
    torch.set_float32_matmul_precision("highest")
    if on_gpu:  # The rest is for JAX.
        torch.cuda.set_per_process_memory_fraction(0.55)
    return torch


def _tensors(torch: Any, arrays: Sequence[Array]) -> list[Any]:
    """The same memory."""
    return with_int64([torch.from_dlpack(jax.block_until_ready(array)) for array in arrays])


def _torch_runs(
    functions: dict[str, Callable[..., Any]], tensors: Sequence[Any], problem: Problem
) -> dict[str, Callable[..., Any]]:
    differentiable, autocast = BY_NAME[problem.name].differentiable, problem.dtype != "float32"
    return {
        name: torch_run(function, tensors, differentiable, autocast=autocast)
        for name, function in functions.items()
    }


def _free(torch: Any) -> None:
    gc.collect()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Prepared(NamedTuple):
    row: Row
    arrays: list[Array]
    tensors: list[Any]
    programs: dict[str, Future[Any]]  # By XLA.
    in_torch: dict[str, Callable[..., Any]]  # Functions of tensors.
    references: dict[Features, Future[Any]]
    clustered: list[Array] | None


def _reference(problem: Problem, arrays: Sequence[Array]) -> Any:
    """Value and gradients in float64 on the host."""
    form = dense_forms.FORMS[problem.name]
    host = jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True):
        wide = [
            jax.device_put(a if k == "labels" else a.astype(np.float64), host)
            for k, a in zip(BY_NAME[problem.name].arrays, map(np.asarray, arrays), strict=True)
        ]
        run = jax.jit(jax.value_and_grad(form, argnums=BY_NAME[problem.name].differentiable))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(run(*wide))]


def _prepare(problem: Problem, pool: ThreadPoolExecutor, torch: Any) -> _Prepared:
    """Starts to compile all forms for XLA, and compiles those of PyTorch."""
    case, row = BY_NAME[problem.name], Row(problem)
    shapes, dense = specs(problem), dense_forms.FORMS.get(problem.name)
    if dense is not None and problem.dtype == "float32":
        dense = dense_forms.in_full_precision(dense)
    programs = {
        OURS: pool.submit(jax_program, case.loss, shapes, case.differentiable),
        BARE: pool.submit(jax_program, bare_products(problem)[0], shapes, None),
    }
    if dense is not None:
        programs[DENSE] = pool.submit(jax_program, dense, shapes, case.differentiable)
    arrays, clustered, references = make_arrays(problem), None, {}
    if problem.with_errors:
        clustered = make_arrays(problem, "clustered")
        for features, drawn in (("random", arrays), ("clustered", clustered)):
            references[features] = pool.submit(_reference, problem, drawn)
    tensors, in_torch = [], {}
    if torch is not None:
        from experiments.benchmark.torch_forms import FORMS

        form = FORMS[problem.name]
        try:
            tensors = _tensors(torch, arrays)
            in_torch = {
                name: torch.compile(form, dynamic=False) if compiled else form
                for name, compiled in TORCH.items()
            }
        except Exception as error:
            row.failures |= dict.fromkeys(TORCH, _reason(error))
        _attempt(row, COMPILED, _torch_runs(in_torch, tensors, problem))
        _free(torch)
    return _Prepared(row, arrays, tensors, programs, in_torch, references, clustered)


def _attempt(row: Row, name: str, runs: dict[str, Callable[..., Any]]) -> Any:
    """Runs the form once. One that fails is removed, and the table shows why."""
    if name not in runs:
        return None
    try:
        return runs[name]()
    except Exception as error:  # A compiler or the memory of any library.
        row.failures[name] = _reason(error)
        del runs[name]
        return None


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if "out of memory" in text.lower() or "RESOURCE_EXHAUSTED" in text:
        return "out of memory"
    return text.partition("\n")[0][:60]


def _measure(prepared: _Prepared, torch: Any) -> None:
    """Times the forms in turns, and takes their memory and errors."""
    row, problem = prepared.row, prepared.row.problem
    runs: dict[str, Callable[..., Any]] = {}
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    programs: dict[str, Any] = {}
    for name, future in prepared.programs.items():  # jaxloss first: its peak is its own.
        try:
            programs[name] = program = future.result()
        except Exception as error:
            row.failures[name] = _reason(error)
            continue
        memory = program.memory_analysis()
        results = memory.output_size_in_bytes + memory.temp_size_in_bytes
        row.megabytes[name] = 1e-6 * results
        if results + memory.argument_size_in_bytes > limit:
            row.failures[name] = "out of memory"
            continue
        runs[name] = jax_run(program, prepared.arrays)
        before = _device_memory()
        _attempt(row, name, runs)
        if name == OURS and before is not None and (after := _device_memory()) is not None:
            (in_use, peak), (_, new_peak) = before, after
            row.measured_megabytes = 1e-6 * (new_peak - in_use) if new_peak > peak else None
    cuda = torch.cuda if torch is not None and torch.cuda.is_available() else None
    for name, run in _torch_runs(prepared.in_torch, prepared.tensors, problem).items():
        if name in row.failures:
            continue
        runs[name] = run
        in_use = 0
        if cuda is not None:
            cuda.reset_peak_memory_stats()
            in_use = cuda.memory_allocated()
        _attempt(row, name, runs)
        if cuda is not None and name in runs:
            row.megabytes[name] = 1e-6 * (cuda.max_memory_allocated() - in_use)
    row.milliseconds = _times(row, runs)
    if BARE in row.milliseconds:
        row.teraflops = 1e3 * bare_products(problem)[1] / row.milliseconds[BARE]
    _measure_errors(prepared, runs, programs, torch)


def _times(row: Row, runs: dict[str, Callable[..., Any]]) -> dict[str, float]:
    """Medians, without the first sample, which is of a single call."""
    try:
        samples = take_turns(runs, _TURNS, seconds=_SECONDS, together=True)
    except Exception as error:
        if len(runs) <= 1:
            row.failures |= dict.fromkeys(runs, _reason(error))
            return {}
        alone = [_times(row, {name: run}) for name, run in runs.items()]
        return {name: number for numbers in alone for name, number in numbers.items()}
    return {name: 1e3 * float(np.median(seconds[1:])) for name, seconds in samples.items()}


def _device_memory() -> tuple[int, int] | None:
    """Bytes in use, and the most of this process so far."""
    stats = jax.devices()[0].memory_stats()
    return stats and (stats["bytes_in_use"], stats["peak_bytes_in_use"])


def _measure_errors(
    prepared: _Prepared, runs: dict[str, Callable[..., Any]], programs: dict[str, Any], torch: Any
) -> None:
    row = prepared.row
    for features, future in prepared.references.items():
        try:
            reference = future.result()
        except Exception as error:  # No CPU beside the accelerator.
            row.failures["reference"] = _reason(error)
            return
        if features == "clustered" and prepared.clustered is not None:
            runs = {k: jax_run(programs[k], prepared.clustered) for k in programs if k in runs}
            if prepared.in_torch:
                tensors = _tensors(torch, prepared.clustered)
                runs |= _torch_runs(prepared.in_torch, tensors, row.problem)
        runs = {name: run for name, run in runs.items() if name not in row.failures}
        for name in (name for name in COMPARED if name in runs):
            if (results := _attempt(row, name, runs)) is not None:
                row.errors.setdefault(features, {})[name] = _errors(results, reference)


def _errors(results: Any, reference: Sequence[np.ndarray]) -> tuple[float, float]:
    errors = []
    for result, expected in zip(jax.tree.leaves(results), reference, strict=True):
        if not isinstance(result, Array):
            result = result.detach().float().cpu().numpy()
        difference = np.max(np.abs(np.asarray(result, np.float64) - expected))
        errors.append(float(difference / np.max(np.abs(expected))))
    return errors[0], max(errors[1:])


def measured_rows(problems: Sequence[Problem], seconds: float) -> Iterator[Row]:
    """The rows, one after the other; starts none after that time."""
    started, torch = time.perf_counter(), _torch()
    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(problems), _AT_ONCE):
            if time.perf_counter() - started > seconds:
                break
            if torch is not None:
                torch.compiler.reset()  # It compiles a function eight times at most.
            some = problems[first : first + _AT_ONCE]
            prepared = []
            for problem in some:
                try:
                    prepared.append(_prepare(problem, pool, torch))
                except Exception as error:
                    yield Row(problem, failures={OURS: _reason(error)})
            for item in prepared:
                for future in (*item.programs.values(), *item.references.values()):
                    future.exception()  # Waits: nothing compiles while forms are timed.
            while prepared:
                item = prepared.pop(0)
                try:
                    _measure(item, torch)
                except Exception as error:
                    item.row.failures.setdefault(OURS, _reason(error))
                yield item.row
                del item
                _free(torch)


def run_accelerator(
    problems: Sequence[Problem], *, command: str, seconds: float, output: Path | None = None
) -> str:
    """Prints each row when it is measured, and writes the tables so far; returns the tables."""
    rows: list[Row] = []
    started = time.perf_counter()
    print("\n".join((*_heading(command), "", *_time_table([]))), flush=True)
    text = ""
    for row in measured_rows(problems, seconds):
        rows.append(row)
        print(_time_table([row])[-1], flush=True)
        text = report(rows, len(problems), command, time.perf_counter() - started)
        if output is not None:
            output.write_text(text, encoding="utf-8")
    print(f"\n{text}", flush=True)
    return text


def report(rows: Sequence[Row], number: int, command: str, seconds: float) -> str:
    """The tables, in Markdown."""
    lines = [*_heading(command), "", f"{len(rows)} of {number} rows, {seconds:.0f} s.", ""]
    lines += ["Times in ms; the last columns are the time of jaxloss divided by another.", ""]
    lines += [*_time_table(rows), "", "Memory beside the arguments, in MB:", ""]
    memory = [
        [*problem_cells(row.problem), *(_digits(row.megabytes.get(form)) for form in COMPARED)]
        for row in rows
    ]
    lines += table_of([*_PROBLEM, *COMPARED], memory)
    ratios = [r.measured_megabytes / r.megabytes[OURS] for r in rows if r.measured_megabytes]
    if ratios:
        raised = "Where jaxloss raised the peak of the process, the device counted"
        of = f"{min(ratios):.2f} to {max(ratios):.2f} times these numbers ({len(ratios)} rows)."
        lines += ["", f"{raised} {of}"]
    lines += ["", "Errors of the value and of the gradient, relative to float64:", ""]
    if reasons := {r.failures["reference"] for r in rows if "reference" in r.failures}:
        lines += [f"No reference: {', '.join(sorted(reasons))}.", ""]
    errors = [
        [*problem_cells(row.problem), features, *(_error(of.get(form)) for form in COMPARED)]
        for row in rows
        for features, of in row.errors.items()
    ]
    lines += table_of([*_PROBLEM, "features", *COMPARED], errors)
    return "\n".join(lines) + "\n"


def _heading(command: str) -> list[str]:
    packages = [name for name in ("jaxlib", "optax", "numpy", "torch") if find_spec(name)]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return [
        f"Command: `{command}`.",
        "",
        f"{jax.devices()[0].device_kind}; Python {platform.python_version()}, "
        f"jaxloss {jaxloss.__version__}, jax {jax.__version__}, {', '.join(versions)}.",
    ]


def problem_cells(problem: Problem) -> list[str]:
    """The name, the size and the dtype, as tables have them."""
    sizes = problem.size[: 3 if "labels" in BY_NAME[problem.name].arrays else 2]
    return [problem.name, " × ".join(f"{number:,}" for number in sizes), problem.dtype]


_PROBLEM = ("loss", "size", "dtype")


def _time_table(rows: Sequence[Row]) -> list[str]:
    last = ["to best PyTorch", "to bare products", "bare products (TFLOP/s)"]
    return table_of([*_PROBLEM, *TIMED, *last], [_time_cells(row) for row in rows])


def _time_cells(row: Row) -> list[str]:
    times = row.milliseconds
    ours = times.get(OURS)
    best = min((times[name] for name in (COMPILED, EAGER) if name in times), default=None)
    ratios = [ours / other if ours and other else None for other in (best, times.get(BARE))]
    return [
        *problem_cells(row.problem),
        *(row.failures.get(name) or _digits(times.get(name)) for name in TIMED),
        *map(_digits, (*ratios, row.teraflops or None)),
    ]


def table_of(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """In Markdown; `reporting.markdown` needs a package that a GPU's machine may not have."""
    marks = [":--", *[":-:"] * (len(headings) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (headings, marks, *rows)]


def _digits(number: float | None) -> str:
    return "–" if number is None else digits(number)


def _error(errors: tuple[float, float] | None) -> str:
    return "–" if errors is None else f"{errors[0]:.0e} / {errors[1]:.0e}"
