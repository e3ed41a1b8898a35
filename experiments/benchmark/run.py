"""From names of losses and sizes to everything that was measured, as one dictionary."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxloss
from experiments.benchmark.cases import CASES, Case, SizeName
from experiments.benchmark.measure import (
    Form,
    disagreement,
    interleave,
    jax_form,
    num_cores,
    torch_form,
)
from experiments.benchmark.solvers import (
    ASSIGNMENTS,
    SPREADS,
    measure_assignment,
    measure_spread,
)
from experiments.errors import ConfigError

TOLERANCE = 1e-3
SOLVERS = ("uniform_prototypes", "assign_prototypes")
TORCH_FORMS = ("eager", "compile", "metric_learning")
"""The forms in PyTorch that the best is chosen from."""
_SECONDS_A_CASE = 8.0
_BLOCK_BATCH = 16384
_BLOCK_SIZES = (None, 4096, 1024, 256)
_PACKAGES = (
    *("jax", "jaxlib", "optax", "numpy", "scipy", "torch", "pytorch-metric-learning"),
    "scikit-learn",
)

Say = Callable[[str], None]


def select(names: Sequence[str]) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """The cases and the solvers of these names; all of them without any name.

    Raises:
      ConfigError: a name is not known.
    """
    known = [case.name for case in CASES] + list(SOLVERS)
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no loss {name!r} to measure; there are {', '.join(known)}")
    chosen = names or known
    return (
        tuple(case for case in CASES if case.name in chosen),
        tuple(solver for solver in SOLVERS if solver in chosen),
    )


def run_benchmark(
    names: Sequence[str],
    sizes: Sequence[SizeName],
    *,
    repeats: int,
    compiled: bool,
    command: str,
    say: Say = print,
) -> dict[str, Any]:
    """Measures the losses at the sizes, one after the other.

    Args:
      names: what `select` takes.
      sizes: names of sizes.
      repeats: turns of every form.
      compiled: whether PyTorch's forms are measured under `torch.compile`, too.
      command: what was typed to get it.
      say: gets a line after each measurement.

    Returns:
      What `experiments.benchmark.report` writes.
    """
    cases, solvers = select(names)
    notes: list[str] = []
    torch_forms, metric_learning = _torch_packages(notes)
    if torch_forms and not compiled:
        notes.append("torch.compile was left out (--no-compile).")
    report: dict[str, Any] = {
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "repeats": repeats,
        "notes": notes,
        "losses": [],
        "blocks": [],
        "uniform_prototypes": [],
        "assign_prototypes": [],
    }
    work: list[tuple[Case, SizeName]] = [(case, size) for size in sizes for case in cases]
    for number, (case, size) in enumerate(work, start=1):
        row = measure_case(
            case,
            size,
            torch_forms.get(case.name),
            metric_learning.get(case.name),
            repeats=repeats,
            compiled=compiled,
        )
        report["losses"].append(row)
        say(f"[{number}/{len(work)}] {_line(row)}")
    if "large" in sizes and any(case.name == "nca_in_blocks" for case in cases):
        report["blocks"] = block_memory()
        say(f"memory of nca_loss at n = {_BLOCK_BATCH:,} by block_size: compiled")
    solver_sizes = [size for size in sizes if size in SPREADS]
    turns = max(2, repeats // 10)
    for name in solvers:
        for size in solver_sizes:
            if name == "uniform_prototypes":
                rows = [measure_spread(*spread, repeats=turns) for spread in SPREADS[size]]
            else:
                rows = [
                    measure_assignment(*shape, trained=trained, repeats=turns)
                    for shape in ASSIGNMENTS[size]
                    for trained in (True, False)
                ]
            report[name] += rows
            say(f"{name}, {size}: {len(rows)} measured")
    report["machine"]["load_at_end"] = _load()
    return report


def measure_case(
    case: Case,
    size: SizeName,
    torch_loss: Callable[..., Any] | None,
    metric_learning_loss: Callable[..., Any] | None,
    *,
    repeats: int,
    compiled: bool,
) -> dict[str, Any]:
    """One loss at one size: all forms agree with jaxloss's, or are not timed."""
    arrays = case.make_arrays(np.random.default_rng(0), case.size(size))
    forms: dict[str, Form] = {"jaxloss": jax_form(case.loss, arrays, case.differentiable)}
    failures: dict[str, str] = {}
    if torch_loss is not None:
        forms["eager"] = torch_form(torch_loss, arrays, case.differentiable)
        if compiled:
            try:
                forms["compile"] = torch_form(
                    torch_loss, arrays, case.differentiable, compiled=True
                )
            except Exception as error:  # Anything may fail in there; the table tells.
                failures["compile"] = _in_words(error)
    if metric_learning_loss is not None:
        forms["metric_learning"] = torch_form(metric_learning_loss, arrays, case.differentiable)
    for name, rival in case.rivals.items():
        forms[name] = jax_form(rival, arrays, case.differentiable)
    forms["floor"] = jax_form(case.floor, arrays, None)

    expected = forms["jaxloss"].results or []
    for name, form in list(forms.items()):
        if form.results is None:
            continue
        difference = disagreement(form.results, expected)
        if not difference <= TOLERANCE:
            failures[name] = f"differs by {difference:.1g}"
            del forms[name]
    timings = interleave(
        {name: form.run for name, form in forms.items()}, repeats=repeats, seconds=_SECONDS_A_CASE
    )
    shape = case.size(size)
    rows: dict[str, Any] = {name: {"failure": failure} for name, failure in failures.items()}
    for name, timing in timings.items():
        results = forms[name].results
        rows[name] = {
            "median_ms": 1e3 * timing.median,
            "spread_ms": 1e3 * timing.spread,
            "fastest_ms": 1e3 * timing.fastest,
            "calls": len(timing.seconds),
            "ratio": timings["jaxloss"].ratio(timing),
            "temporary_bytes": forms[name].temporary_bytes,
            "disagreement": None if results is None else disagreement(results, expected),
        }
    return {
        "loss": case.name,
        "size": size,
        "shape": {"n": shape.n, "d": shape.d, "C": shape.C},
        "grows": case.grows,
        "source": case.source,
        "products": case.products,
        "gradient_bytes": sum(result.nbytes for result in expected[1:]),
        "forms": rows,
    }


def best_torch(row: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest form in PyTorch of a loss at a size."""
    found = [
        form for name in TORCH_FORMS if (form := row["forms"].get(name)) and "failure" not in form
    ]
    return min(found, key=lambda form: form["fastest_ms"], default=None)


def block_memory() -> list[dict[str, Any]]:
    """Temporary memory of NCA and its gradient at a batch that is compiled but not run."""
    dim = 640
    features = jax.ShapeDtypeStruct((_BLOCK_BATCH, dim), jnp.float32)
    labels = jax.ShapeDtypeStruct((_BLOCK_BATCH,), jnp.int32)
    rows = []
    for block_size in _BLOCK_SIZES:

        def loss(features, labels, block_size=block_size):
            return jaxloss.nca_loss(features, labels, temperature=dim, block_size=block_size)

        memory = jax.jit(jax.value_and_grad(loss)).lower(features, labels).compile()
        analysis = memory.memory_analysis()
        rows.append(
            {
                "n": _BLOCK_BATCH,
                "d": dim,
                "block_size": block_size,
                "temporary_bytes": None if analysis is None else analysis.temp_size_in_bytes,
            }
        )
    return rows


def machine() -> dict[str, Any]:
    """Where it was measured."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": num_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_at_start": _load(),
    }


def versions() -> dict[str, str]:
    """Of the packages that take part; those that are missing are left out."""
    found = {"jaxloss": jaxloss.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _torch_packages(notes: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    # The profiler would write lines of its own.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        import torch
    except ImportError:
        notes.append(
            'PyTorch is not installed (pip install -e ".[benchmark]"): jaxloss is compared with '
            "optax and its floor alone."
        )
        return {}, {}
    from experiments.benchmark.torch_forms import TORCH_FORMS, metric_learning_forms

    torch.set_num_threads(num_cores())
    warnings.filterwarnings("ignore", module="torch.*")
    try:
        return dict(TORCH_FORMS), dict(metric_learning_forms())
    except ImportError as error:
        notes.append(
            f"pytorch-metric-learning's own losses were left out: {error} "
            '(pip install -e ".[benchmark]").'
        )
        return dict(TORCH_FORMS), {}


def _in_words(error: Exception) -> str:
    names = {
        type(e).__name__ for e in (error, error.__cause__, getattr(error, "inner_exception", None))
    }
    if "InvalidCxxCompiler" in names or "InvalidCxxCompiler" in str(error):
        return "no C++ compiler"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:80]


def _line(row: dict[str, Any]) -> str:
    forms = row["forms"]
    shape = ", ".join(f"{name} = {value:,}" for name, value in row["shape"].items() if value)
    parts = [f"{row['loss']}, {row['size']} ({shape}): {forms['jaxloss']['median_ms']:.3g} ms"]
    best = best_torch(row)
    if best:
        parts.append(f"{best['ratio']:.2f} × PyTorch's best")
    parts.append(f"{forms['floor']['ratio']:.1f} × its floor")
    parts += [f"{name}: {form['failure']}" for name, form in forms.items() if "failure" in form]
    return ", ".join(parts)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
