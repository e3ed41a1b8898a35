"""Large batches and many classes, on a GPU, a TPU or a CPU: time, memory and errors.

It needs jax, optax, jaxtyping and numpy, and times PyTorch where it is installed. Rows are compiled
some at a time, in several threads, and timed when nothing compiles.
"""

from __future__ import annotations

import gc
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from jax import Array

from experiments.benchmark import dense_forms
from experiments.benchmark.cases import BY_NAME, Case, Dtype, Size, chosen
from experiments.benchmark.measure import (
    COMPILED,
    EAGER,
    Run,
    digits,
    disagreement,
    failure,
    jax_program,
    jax_run,
    table,
    take_turns,
    torch_forms,
    torch_run,
    versions,
)
from experiments.errors import ConfigError

OURS, BARE, DENSE = "jaxloss", "bare products", "dense JAX"
COMPARED = OURS, DENSE, COMPILED, EAGER  # In memory and errors.
_AT_ONCE = 6  # Rows that are compiled before they are timed.
_THREADS = 4  # That compile for XLA, beside the one that compiles for PyTorch.
_TURNS = 20
_SECONDS = 1.2  # Of all turns of a row.
_SMALL = 512  # Rows of the largest batch whose errors are measured, against float64 on the host.


class Problem(NamedTuple):
    """A row: a loss, its size and the dtype of its arrays."""

    case: Case
    size: Size
    dtype: Dtype

    @property
    def name(self) -> str:
        """That of the case."""
        return self.case.name

    def cells(self) -> list[str]:
        """The name, the size and the dtype, as tables have them."""
        sizes = self.size[: 3 if "labels" in self.case.arrays else 2]
        return [self.name, " × ".join(f"{number:,}" for number in sizes), self.dtype]


_PAIRS: Sequence[str] = "nca", "supervised_contrastive", "info_nce", "sigmoid_contrastive"
_LAYERS: Sequence[str] = "classifier", "arcface"
_OTHERS = {
    "multi_similarity": Size(8_192, 512, 1_024),
    "prototypical": Size(8_192, 512, 64),
    "proxy_anchor": Size(4_096, 512, 10_000),
    "proxy_nca": Size(4_096, 512, 10_000),
    "group_softmax": Size(4_096, 512, 1_000),
}


def _problems(dtype: Dtype, sizes: dict[str, Size]) -> list[Problem]:
    return [Problem(BY_NAME[name], size, dtype) for name, size in sizes.items()]


def _important(place: int, dtype: Dtype) -> list[Problem]:
    """The losses that most use, at a small, a medium or a large size."""
    n, m, C = [(512, 512, 10_000), (8_192, 4_096, 100_000), (32_768, 1_024, 1_000_000)][place]
    sizes = dict.fromkeys(_PAIRS, Size(n, 512, n // 8)) | dict.fromkeys(_LAYERS, Size(m, 512, C))
    return _problems(dtype, sizes)


PROBLEMS: tuple[Problem, ...] = (  # The most important ones first.
    *(problem for place in (1, 0, 2) for problem in _important(place, "bfloat16")),
    *(problem for place in (1, 0) for problem in _important(place, "float32")),
    *_problems("bfloat16", _OTHERS),
    *_problems("mixed", {"classifier": Size(4_096, 512, 100_000)}),
    *_important(2, "float32"),
    *_problems("float32", _OTHERS),
)


def parse(
    parser: ArgumentParser, arguments: Sequence[str] | None, dtype: Dtype | None = None
) -> tuple[Namespace, list[Problem]]:
    """The options, and the rows of the names and the dtype among them, which has a default."""
    names = ", ".join(dict.fromkeys(problem.name for problem in PROBLEMS))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {names}; default: all")
    parser.add_argument("--dtype", default=dtype, choices=get_args(Dtype), help="only its rows")
    options = parser.parse_args(arguments)
    try:
        problems = chosen(options.names, PROBLEMS)
    except ConfigError as error:
        parser.error(str(error))
    return options, [it for it in problems if options.dtype in (None, it.dtype)]


@dataclass
class Row:
    """What was measured."""

    problem: Problem
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Medians, without the first sample, which is of a single call."""
    megabytes: dict[str, float] = field(default_factory=dict)
    """The most that a form holds beside its arguments: results and temporary arrays."""
    errors: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By features and form: of the value and of every gradient, as `disagreement` has them."""
    failures: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """The result of a call for a form; None where it fails, and the table shows why."""
        try:
            return call()
        except Exception as error:  # A compiler or the memory of any library.
            self.failures[name] = failure(error)
            return None


class _Prepared(NamedTuple):
    row: Row
    arrays: dict[str, list[Array]]  # By features: random, and perhaps clustered.
    programs: dict[str, Future[Any]]  # By XLA.
    references: dict[str, Future[Any]]
    in_torch: dict[str, Callable[..., Any]]  # Functions of tensors.


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


def _torch_run(problem: Problem, form: Callable[..., Any], arrays: Sequence[Array]) -> Run:
    autocast = problem.dtype != "float32"
    return torch_run(form, arrays, problem.case.differentiable, autocast=autocast)


def _free(torch: Any) -> None:
    gc.collect()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _reference(problem: Problem, arrays: Sequence[Array]) -> Any:
    """Value and gradients in float64 on the host."""
    host = jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True):
        wide = [
            jax.device_put(a.astype(np.float64) if a.dtype != np.int32 else a, host)
            for a in map(np.asarray, arrays)
        ]
        program = jax_program(dense_forms.FORMS[problem.name], wide, problem.case.differentiable)
        return jax.tree.map(np.asarray, program(*wide))


def _prepare(row: Row, pool: ThreadPoolExecutor, torch: Any) -> _Prepared:
    """Starts to compile all forms for XLA, and compiles those of PyTorch."""
    problem = row.problem
    case, size, dtype = problem
    arrays, dense = {"random": case.make_arrays(size, dtype)}, dense_forms.FORMS.get(case.name)
    forms = {OURS: case.loss, BARE: case.floor.run} | ({DENSE: dense} if dense else {})
    programs = {
        name: pool.submit(
            jax_program, form, arrays["random"], case.differentiable if name != BARE else None
        )
        for name, form in forms.items()
    }
    references = {}
    if dense and size.n <= _SMALL:
        arrays["clustered"] = case.make_arrays(size, dtype, clustered=True)
        references = {of: pool.submit(_reference, problem, some) for of, some in arrays.items()}
    in_torch = {}
    if torch is not None:
        from experiments.benchmark.torch_forms import FORMS

        in_torch = torch_forms(FORMS[case.name])
        if form := in_torch.get(COMPILED):
            row.attempt(COMPILED, lambda: _torch_run(problem, form, arrays["random"])())
        _free(torch)
    return _Prepared(row, arrays, programs, references, in_torch)


def _measure(prepared: _Prepared, torch: Any) -> None:
    """Times the forms in turns, and takes their memory and errors."""
    row, problem, programs = prepared.row, prepared.row.problem, {}
    for name, future in prepared.programs.items():
        if program := row.attempt(name, future.result):
            programs[name], memory = program, program.memory_analysis()
            row.megabytes[name] = 1e-6 * (memory.output_size_in_bytes + memory.temp_size_in_bytes)

    def runs_on(features: str) -> dict[str, Run]:
        arrays = prepared.arrays[features]
        runs = {name: jax_run(program, arrays) for name, program in programs.items()}
        for name, form in prepared.in_torch.items():
            runs[name] = row.attempt(name, partial(_torch_run, problem, form, arrays))
        return {name: run for name, run in runs.items() if name not in row.failures}

    cuda = torch.cuda if torch is not None and torch.cuda.is_available() else None
    for name, run in runs_on("random").items():
        in_use = cuda.memory_allocated() if cuda else 0
        if cuda:
            cuda.reset_peak_memory_stats()
        if row.attempt(name, run) is not None and cuda and name in (COMPILED, EAGER):
            row.megabytes[name] = 1e-6 * (cuda.max_memory_allocated() - in_use)

    def times(runs: dict[str, Run]) -> dict[str, list[float]]:
        return take_turns(runs, _TURNS, seconds=_SECONDS, together=True)

    runs, samples = runs_on("random"), {}
    try:
        samples = times(runs)
    except Exception:  # Each alone: the table shows which one fails, and the times of the others.
        for name, run in runs.items():
            samples |= row.attempt(name, partial(times, {name: run})) or {}
    row.milliseconds = {name: 1e3 * float(np.median(of[1:])) for name, of in samples.items()}
    for features, future in prepared.references.items():
        if (reference := row.attempt("reference", future.result)) is None:
            return  # No CPU beside the accelerator.
        row.errors[features] = {}
        for name, run in runs_on(features).items():
            if name != BARE and (results := row.attempt(name, run)):
                row.errors[features][name] = disagreement(results, reference)


def measured_rows(problems: Sequence[Problem], seconds: float) -> Iterator[Row]:
    """The rows, one after the other; starts none after that time."""
    started, torch = time.perf_counter(), _torch()
    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(problems), _AT_ONCE):
            if time.perf_counter() - started > seconds:
                break
            if torch is not None:
                torch.compiler.reset()  # It compiles a function eight times at most.
            rows = [Row(problem) for problem in problems[first : first + _AT_ONCE]]
            prepared = [row.attempt(OURS, partial(_prepare, row, pool, torch)) for row in rows]
            for item in filter(None, prepared):
                wait((*item.programs.values(), *item.references.values()))
            item = None  # Its arrays go with its row. Nothing compiles while forms are timed.
            for row in rows:
                if item := prepared.pop(0):
                    row.attempt(OURS, partial(_measure, item, torch))
                yield row
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


_PROBLEM = ("loss", "size", "dtype")


def report(rows: Sequence[Row], number: int, command: str, seconds: float) -> str:
    """The tables, in Markdown."""
    lines = [*_heading(command), "", f"{len(rows)} of {number} rows, {seconds:.0f} s.", ""]
    lines += ["Times in ms; the last columns are the time of jaxloss divided by another.", ""]
    lines += [*_time_table(rows), "", "Memory beside the arguments, in MB:", ""]
    lines += table(
        [*_PROBLEM, *COMPARED],
        [[*row.problem.cells(), *map(digits, map(row.megabytes.get, COMPARED))] for row in rows],
    )
    lines += ["", "Errors of the value and of the gradient, relative to float64:", ""]
    if reasons := {r.failures["reference"] for r in rows if "reference" in r.failures}:
        lines += [f"No reference: {', '.join(sorted(reasons))}.", ""]
    errors = [
        [*row.problem.cells(), features, *map(_error, map(of.get, COMPARED))]
        for row in rows
        for features, of in row.errors.items()
    ]
    lines += table([*_PROBLEM, "features", *COMPARED], errors)
    return "\n".join(lines) + "\n"


def _heading(command: str) -> list[str]:
    packages = versions("jax", "jaxlib", "optax", "numpy", "torch")
    return [f"Command: `{command}`.", "", f"{jax.devices()[0].device_kind}; {packages}."]


def _time_table(rows: Sequence[Row]) -> list[str]:
    timed = OURS, BARE, COMPILED, EAGER, DENSE
    last = ["to best PyTorch", "to bare products", "bare products (TFLOP/s)"]
    cells = []
    for row in rows:
        times, operations = row.milliseconds, row.problem.case.floor.operations
        ours, bare = times.get(OURS), times.get(BARE)
        best = min((times[name] for name in (COMPILED, EAGER) if name in times), default=None)
        ratios = [ours / other if ours and other else None for other in (best, bare)]
        speed = 1e-9 * operations(*row.problem.size) / bare if bare and operations else None
        shown = [row.failures.get(name) or digits(times.get(name)) for name in timed]
        cells.append([*row.problem.cells(), *shown, *map(digits, (*ratios, speed))])
    return table([*_PROBLEM, *timed, *last], cells)


def _error(errors: list[float] | None) -> str | None:
    return None if errors is None else f"{errors[0]:.0e} / {max(errors[1:]):.0e}"
