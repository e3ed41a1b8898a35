"""From the losses, their sizes and dtypes to a table of time and memory."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil

import jaxloss
from experiments.benchmark.cases import FLOORS, Problem
from experiments.benchmark.measure import (
    COMPILED,
    EAGER,
    FLOOR,
    OURS,
    TORCH,
    Run,
    digits,
    jax_program,
    jax_run,
    measure,
    torch_run,
)
from experiments.core.errors import ConfigError
from experiments.reporting.markdown import table

QUIET = 0.1  # The most cores that other programs may use.
_MOST_LOGITS = 10**8  # Of a composition or optax, which keep them.
_PACKAGES = "jax", "jaxlib", "optax", "numpy", "scipy", "torch", "pytorch-metric-learning"
_PML = "PML"
_JAX = OURS, "composition", "optax"
_FORMS = (*TORCH, _PML, "composition", "optax", FLOOR)  # Beside `jaxloss`, as columns.


class Row(NamedTuple):
    """A loss at a size and in a dtype."""

    problem: Problem
    forms: dict[str, dict[str, Any]]  # For each form what `measure` returns.
    memory: dict[str, float]  # Bytes beside arguments and results, by form; and of `gradients`.


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
    # JAX would take most of the memory of a GPU, and leave little to PyTorch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    cores = usable_cores()
    others = cores_of_others(cores) if jax.default_backend() == "cpu" else 0.0
    busy = f"{others:.1f} of {len(cores)} cores"
    if others > QUIET and not allow_load:
        hint = "stop them, or measure with --allow-load"
        raise ConfigError(f"other programs use {busy}, which would change the times; {hint}")
    torch = _torch()
    if torch is not None:
        torch.set_num_threads(len(cores))
        warnings.filterwarnings("ignore", module="torch.*")
        # A graph break is part of the form, where a size depends on the data.
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    found = [f"{name} {version(name)}" for name in _PACKAGES if find_spec(name.replace("-", "_"))]
    heading = [
        f"Command: `{command}`. How to read the table: experiments/BENCHMARKS.md.",
        "",
        f"{_processor()}, cores: {len(cores)}, device {jax.devices()[0].device_kind}; load "
        f"{os.getloadavg()[0]:.2f} at the start. Python {platform.python_version()}, "
        f"jaxloss {jaxloss.__version__}, {', '.join(found)}.",
        "",
    ]
    if others > QUIET:
        warning = f"**Other programs used {busy} at the start: the times are "
        heading = [f"{warning}those of a busy machine.**", "", *heading]
    rows: list[Row] = []
    started, text = time.perf_counter(), ""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    for problem in problems:
        if time.perf_counter() - started > seconds:
            break
        rows.append(measure_problem(problem, torch))
        ours = rows[-1].forms[OURS]
        shown = ours.get("failure") or f"{ours['median_ms']:.3g} ms"
        print(f"{', '.join(problem.cells())}: {shown}", flush=True)
        end = f"{len(rows)} of {len(problems)} rows, load {os.getloadavg()[0]:.2f} at the end."
        text = "\n".join([*heading, end, "", *time_table(rows), ""])
        if output is not None:
            output.write_text(text, encoding="utf-8")
    return text


def measure_problem(problem: Problem, torch: Any) -> Row:
    """One loss at one size, of PyTorch's forms if that is given."""
    case, size, dtype, group = problem
    arrays, differentiable = case.make_arrays(size, dtype), case.differentiable
    left_out = case.small_only if group != "paper" else ()
    if size.n * size.C > _MOST_LOGITS:
        left_out = *left_out, "composition", "optax"
    memory: dict[str, float] = {"gradients": sum(arrays[i].nbytes for i in differentiable)}

    def of_jax(name: str, form: Callable[..., Any]) -> Run:
        program = jax_program(form, arrays, differentiable if name != FLOOR else ())
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

    in_jax = {OURS: case.loss, "composition": case.composition, "optax": case.optax}
    forms = {name: (of_jax, form) for name, form in (in_jax | {FLOOR: FLOORS[case.floor]}).items()}
    if torch is not None and group != "own":
        from experiments.benchmark.torch_forms import FORMS, package_forms

        torch.compiler.reset()  # It compiles a function eight times at most.
        forms |= dict.fromkeys(TORCH, (of_torch, FORMS.get(case.name)))
        if dtype == "float32" and find_spec("pytorch_metric_learning"):
            forms[_PML] = of_torch, package_forms().get(case.name)
    found = measure(
        {
            name: partial(prepare, name, form)
            for name, (prepare, form) in forms.items()
            if form and name not in left_out
        },
        # Forms in bfloat16 round at other places; tests compare them in float32.
        case.tolerance if dtype == "float32" else float("inf"),
    )
    gc.collect()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Row(problem, found, memory)


def _torch() -> Any:
    """PyTorch, if it is installed and has JAX's device."""
    if not find_spec("torch"):
        return None
    import torch

    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    if on_gpu:  # The rest is for JAX.
        torch.cuda.set_per_process_memory_fraction(0.55)
    return torch if on_gpu or jax.default_backend() == "cpu" else None


def time_table(rows: Sequence[Row]) -> list[str]:
    """A Markdown table: the time of `jaxloss`, and the ratios of the other forms."""
    cells: list[dict[str, str | None]] = []
    for problem, forms, memory in rows:
        ratios = {name: form["ratio"] for name, form in forms.items() if "ratio" in form}
        best = max((ratios[name] for name in (*TORCH, _PML) if name in ratios), default=None)
        ours = forms[OURS]
        name, size, dtype = problem.cells()
        row: dict[str, str | None] = {"loss": name, "size": size, "dtype": dtype}
        row["jaxloss (ms)"] = ours.get("failure") or (
            f"{digits(ours['median_ms'])} ± {digits(ours['spread_ms'])}"
        )
        row["best"] = None if best is None else f"**{_ratio(best)}**"
        for name in _FORMS:
            row[name] = forms.get(name, {}).get("failure") or _ratio(ratios.get(name))
        for name in (*_JAX, EAGER, COMPILED, "gradients"):
            row[f"{name} (MB)"] = digits(1e-6 * memory[name]) if name in memory else None
        cells.append(row)
    columns = [name for name in cells[0] if any(row[name] for row in cells)]
    return table(columns, [[row[name] for name in columns] for row in cells])


def _ratio(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.{2 if ratio < 10 else 0}f}"


def usable_cores() -> list[int]:
    """The cores that this process may use: XLA takes all of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def cores_of_others(cores: Sequence[int]) -> float:
    """How many of these cores other programs use, watched for two seconds."""
    busy = psutil.cpu_percent(2.0, percpu=True)
    return sum(busy[core] for core in cores) / 100


def _processor() -> str:
    """The model, which `platform.processor` does not give on Linux."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return model[1] if model else platform.processor()
