"""From the losses, their sizes and dtypes to a table of time and memory."""

from __future__ import annotations

import gc
import logging
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxloss
from experiments.benchmark.cases import Problem
from experiments.benchmark.measure import (
    COMPILED,
    EAGER,
    FLOOR,
    OURS,
    TORCH,
    Run,
    cores_of_others,
    digits,
    jax_program,
    jax_run,
    measure,
    table,
    torch_run,
    usable_cores,
)
from experiments.core.errors import ConfigError

QUIET = 0.1  # The most cores that other programs may use.
_MOST_LOGITS = 10**8  # Of a composition or optax, which keep them.
_PACKAGES = "jax", "jaxlib", "optax", "numpy", "scipy", "torch", "pytorch-metric-learning"
_PML = "PML"
_JAX = OURS, "composition", "optax"
_FORMS = (*TORCH, _PML, "composition", "optax", FLOOR)
"""All forms beside `jaxloss`, in the order of the columns."""


class Row(NamedTuple):
    """A loss at a size and in a dtype."""

    problem: Problem
    forms: dict[str, dict[str, Any]]
    """For each form what `measure` returns; that of this project is `jaxloss`."""
    memory: dict[str, float]
    """Bytes beside the arguments, the value and the gradients, by form; those of `gradients`."""


def run_benchmark(
    problems: Sequence[Problem],
    *,
    command: str,
    seconds: float = float("inf"),
    output: Path | None = None,
    allow_load: bool = False,
) -> str:
    """Measures the rows one after the other; returns the report, in Markdown.

    It starts no row after so many seconds, and writes the rows so far to the file `output`. With
    `allow_load`, other programs may run beside it on a CPU, and the report says so; else that is a
    `ConfigError`.
    """
    on_cpu, cores = jax.default_backend() == "cpu", len(usable_cores())
    others = cores_of_others() if on_cpu else 0.0
    if others > QUIET and not allow_load:
        raise ConfigError(
            f"other programs use {others:.1f} of {cores} cores, which would change the times; stop "
            "them, or measure with --allow-load"
        )
    torch = _torch()
    if torch is not None:
        torch.set_num_threads(cores)
        warnings.filterwarnings("ignore", module="torch.*")
        # A graph break is part of the form, where a size depends on the data.
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    heading = []
    if others > QUIET:
        busy = f"**Other programs used {others:.1f} of {cores} cores at the start: the times are "
        heading = [f"{busy}those of a busy machine.**", ""]
    heading += [
        f"Command: `{command}`. How to read the table: experiments/BENCHMARKS.md.",
        "",
        f"{_processor()}, cores: {cores}, device {jax.devices()[0].device_kind}; load "
        f"{os.getloadavg()[0]:.2f} at the start. {_versions()}.",
    ]
    rows: list[Row] = []
    started, text = time.perf_counter(), ""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    for problem in problems:
        if time.perf_counter() - started > seconds:
            break
        row = measure_problem(problem, torch)
        rows.append(row)
        ours = row.forms[OURS]
        shown = ours.get("failure") or f"{ours['median_ms']:.3g} ms"
        print(f"{', '.join(problem.cells())}: {shown}", flush=True)
        text = _report(heading, rows, len(problems))
        if output is not None:
            output.write_text(text, encoding="utf-8")
    return text


def measure_problem(problem: Problem, torch: Any) -> Row:
    """One loss at one size, of PyTorch's forms if that is given."""
    case, size, dtype, group = problem
    arrays, differentiable = case.make_arrays(size, dtype), case.differentiable
    losses = {OURS: case.loss, "composition": case.composition, "optax": case.optax}
    left_out = case.small_only if group != "paper" else ()
    if size.n * size.C > _MOST_LOGITS:
        left_out = *left_out, "composition", "optax"
    memory: dict[str, float] = {"gradients": sum(arrays[i].nbytes for i in differentiable)}

    def of_jax(name: str, form: Callable[..., Any]) -> Run:
        program = jax_program(form, arrays, differentiable if name != FLOOR else None)
        if name != FLOOR:
            memory[name] = program.memory_analysis().temp_size_in_bytes
        return jax_run(program, arrays)

    def of_torch(name: str, form: Callable[..., Any]) -> Run:
        if TORCH.get(name):
            form = torch.compile(form, dynamic=False)
        run = torch_run(form, arrays, differentiable, autocast=dtype != "float32")
        if torch.cuda.is_available():
            run()  # Compiles.
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            memory[name] = torch.cuda.max_memory_allocated() - before - memory["gradients"]
        return run

    prepared: dict[str, Callable[[], Run]] = {
        name: partial(of_jax, name, form)
        for name, form in (losses | {FLOOR: case.floor.run}).items()
        if form and name not in left_out
    }
    if torch is not None and group != "own":
        torch.compiler.reset()  # It compiles a function eight times at most.
        prepared |= {
            name: partial(of_torch, name, form)
            for name, form in _torch_forms(problem).items()
            if name not in left_out
        }
    # Forms in bfloat16 round at other places; tests compare them in float32.
    forms = measure(prepared, case.tolerance if dtype == "float32" else float("inf"))
    gc.collect()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Row(problem, forms, memory)


def _torch() -> Any:
    """PyTorch, if it is installed and has JAX's device."""
    if not find_spec("torch"):
        return None
    import torch

    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    if on_gpu:  # The rest is for JAX.
        torch.cuda.set_per_process_memory_fraction(0.55)
    return torch if on_gpu or jax.default_backend() == "cpu" else None


def _torch_forms(problem: Problem) -> dict[str, Callable[..., Any]]:
    """The loss in PyTorch, and by the class of pytorch-metric-learning, if that is installed."""
    from experiments.benchmark.torch_forms import FORMS

    forms = dict.fromkeys(TORCH, FORMS[problem.case.name])
    if problem.dtype == "float32" and find_spec("pytorch_metric_learning"):
        from experiments.benchmark.package_forms import PACKAGE

        forms |= {_PML: PACKAGE[problem.case.name]} if problem.case.name in PACKAGE else {}
    return forms


def _report(heading: Sequence[str], rows: Sequence[Row], number: int) -> str:
    named = {row.problem.case.name: row.problem.case for row in rows}
    meaning = [(case.name, case.source, case.floor.text) for case in named.values()]
    lines = [*heading, "", *(table(["loss", "size of the paper", "floor"], meaning))]
    lines += ["", f"{len(rows)} of {number} rows, load {os.getloadavg()[0]:.2f} at the end.", ""]
    return "\n".join([*lines, *time_table(rows)]) + "\n"


def time_table(rows: Sequence[Row]) -> list[str]:
    """A Markdown table: the time of `jaxloss`, and the ratios of the other forms."""
    cells: list[dict[str, str | None]] = []
    for problem, forms, memory in rows:
        found = [forms.get(name, {}).get("ratio", math.nan) for name in (*TORCH, _PML)]
        ratios = [ratio for ratio in found if not math.isnan(ratio)]
        ours = forms[OURS]
        times = [digits(ours.get(key)) for key in ("median_ms", "spread_ms")]
        cells.append(
            dict(zip(("loss", "size", "dtype"), problem.cells(), strict=True))
            | {"jaxloss (ms)": ours.get("failure") or " ± ".join(filter(None, times))}
            | {"best": f"**{_ratio({'ratio': max(ratios)})}**" if ratios else None}
            | {name: _ratio(forms[name]) if name in forms else None for name in _FORMS}
            | {f"{n} (MB)": _megabytes(memory, n) for n in (*_JAX, EAGER, COMPILED, "gradients")}
        )
    columns = [name for name in cells[0] if any(row[name] for row in cells)] if cells else []
    return table(columns, [[row[name] for name in columns] for row in cells])


def _ratio(form: dict[str, Any]) -> str | None:
    if "failure" in form or math.isnan(form["ratio"]):
        return form.get("failure")
    return f"{form['ratio']:.{2 if form['ratio'] < 10 else 0}f}"


def _megabytes(memory: dict[str, float], name: str) -> str | None:
    return digits(1e-6 * memory[name]) if name in memory else None


def _versions() -> str:
    found = [f"{name} {version(name)}" for name in _PACKAGES if find_spec(name.replace("-", "_"))]
    own = f"Python {platform.python_version()}, jaxloss {jaxloss.__version__}"
    return ", ".join([own, *found])


def _processor() -> str:
    """The model, which `platform.processor` does not give on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
