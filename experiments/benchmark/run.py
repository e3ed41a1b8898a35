"""From names of losses and sizes to everything that was measured, as one dictionary."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxloss
from experiments.benchmark.cases import CASES, Case, OwnSize, Size, SizeName
from experiments.benchmark.measure import (
    Form,
    cores_of_others,
    disagreement,
    interleave,
    jax_form,
    num_cores,
    torch_form,
)
from experiments.benchmark.solvers import SOLVERS as PROTOTYPE_SOLVERS
from experiments.benchmark.steps import measure_steps
from experiments.errors import ConfigError

SOLVERS = PROTOTYPE_SOLVERS | {"steps": measure_steps}
"""What is measured beside losses: at a size, rows with a `problem`, `forms` and a `result`, which
are what is computed, the times, and what else tables show, each by heading."""
QUIET = 0.1
"""The most cores that other programs may use."""
TOLERANCE = 1e-3
"""Largest disagreement of forms that are timed."""
_SECONDS_PER_CASE = 8.0
_PACKAGES = ("jax", "jaxlib", "optax", "numpy", "scipy", "torch", "pytorch-metric-learning")
_INSTALL = 'pip install -e ".[benchmark]"'

TorchLosses = Mapping[str, Mapping[str, Callable[..., Any]]]
"""The names of the forms in PyTorch, and for each the names of the losses that have it."""


def select(names: Sequence[str]) -> tuple[list[Case], list[str]]:
    """The cases and the names of the solvers with these names; all of them if there is no name.

    Raises:
      ConfigError: A name is unknown.
    """
    known = [case.name for case in CASES] + list(SOLVERS)
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown loss {name!r}; choose from {', '.join(known)}")
    chosen = names or known
    cases = [case for case in CASES if case.name in chosen]
    return cases, [name for name in SOLVERS if name in chosen]


def run_benchmark(
    names: Sequence[str],
    sizes: Sequence[SizeName],
    *,
    repeats: int,
    compiled: bool,
    command: str,
    allow_load: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measures the losses at the sizes, one after the other.

    Args:
      names: Losses and solvers, as in `select`.
      sizes: Names of sizes.
      repeats: Turns of every form.
      compiled: Also measure PyTorch's forms under `torch.compile`.
      command: The command line, for the report.
      allow_load: Measure although other programs run, and say so in the report.
      say: Receives a line after each measurement.

    Returns:
      What `experiments.benchmark.report` writes.

    Raises:
      ConfigError: A name is unknown, or other programs run.
    """
    cases, solvers = select(names)
    others = cores_of_others()
    if others is not None and others > QUIET and not allow_load:
        raise ConfigError(
            f"other programs use {others:.1f} of {num_cores()} cores, which would change the "
            "times; stop them, or measure with --allow-load"
        )
    notes: list[str] = []
    torch_losses = _torch_losses(notes, compiled=compiled)
    report: dict[str, Any] = {
        "command": command,
        "machine": _machine() | {"cores_of_others": others},
        "versions": _versions(),
        "repeats": repeats,
        "notes": notes,
        "losses": [],
        **{name: [] for name in SOLVERS},
    }
    work: list[tuple[Case, SizeName, Size]] = [
        (case, name, size) for name in sizes for case in cases for size in case.sizes(name)
    ]
    for number, (case, size_name, size) in enumerate(work, start=1):
        own = next((own for own in case.own_sizes if size_name == "own" and own.size == size), None)
        row = measure_case(case, size_name, size, torch_losses, repeats=repeats, own=own)
        report["losses"].append(row)
        say(f"[{number}/{len(work)}] {_line(row)}")
    for name in solvers:
        for size in sizes:
            if rows := SOLVERS[name](size, repeats=max(2, repeats // 10)):
                report[name] += rows
                say(f"{name}, {size}: {len(rows)} measured")
    report["machine"]["load_at_end"] = _load()
    return report


def measure_case(
    case: Case,
    size_name: SizeName,
    shape: Size,
    torch_losses: TorchLosses,
    *,
    repeats: int,
    own: OwnSize | None = None,
) -> dict[str, Any]:
    """One loss at one size. Forms that disagree with jaxloss's are not timed."""
    if own is not None:
        repeats = min(repeats, own.turns)
        case = dataclasses.replace(
            case,
            floor=own.floor or case.floor,
            optax=case.optax if "optax" in own.forms else None,
            composition=case.composition if "composition" in own.forms else None,
        )
        torch_losses = {form: losses for form, losses in torch_losses.items() if form in own.forms}
    arrays = case.make_arrays(np.random.default_rng(0), shape)
    forms, failures = _forms(case, arrays, torch_losses)
    expected = forms["jaxloss"].results
    differences = {
        name: disagreement(form.results, expected) for name, form in forms.items() if form.results
    }
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            failures[name] = f"differs by {difference:.1g}"
            del forms[name]
    timings = interleave(
        {name: form.run for name, form in forms.items()}, repeats=repeats, seconds=_SECONDS_PER_CASE
    )
    rows: dict[str, Any] = {name: {"failure": failure} for name, failure in failures.items()}
    for name, timing in timings.items():
        rows[name] = {
            **timing,
            "temporary_bytes": forms[name].temporary_bytes,
            "disagreement": differences.get(name),
        }
    return {
        "loss": case.name,
        "size": size_name,
        "shape": shape._asdict(),
        "grows": case.grows,
        "source": case.source,
        "products": case.floor.text,
        "gradient_bytes": sum(result.nbytes for result in expected[1:]),
        "forms": rows,
    }


def _forms(
    case: Case, arrays: Sequence[np.ndarray], torch_losses: TorchLosses
) -> tuple[dict[str, Form], dict[str, str]]:
    """All forms of a loss, and why forms are missing."""
    forms = {"jaxloss": jax_form(case.loss, arrays, case.differentiable)}
    failures: dict[str, str] = {}
    for name, losses in torch_losses.items():
        compiled = name == "compile"
        if case.name not in losses:
            continue
        try:
            loss = losses[case.name]
            forms[name] = torch_form(loss, arrays, case.differentiable, compiled=compiled)
        except Exception as error:
            if not compiled:
                raise
            failures[name] = str(error).partition("\n")[0][:60]
    for name, function in (("composition", case.composition), ("optax", case.optax)):
        if function is not None:
            forms[name] = jax_form(function, arrays, case.differentiable)
    forms["floor"] = jax_form(case.floor.run, arrays, None)
    return forms, failures


def best_torch(row: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest form in PyTorch of a loss at a size."""
    forms = [row["forms"].get(name, {}) for name in ("eager", "compile", "metric_learning")]
    timed = [form for form in forms if "fastest_ms" in form]
    return min(timed, key=lambda form: form["fastest_ms"], default=None)


def _machine() -> dict[str, Any]:
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": num_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_at_start": _load(),
    }


def _processor() -> str:
    """The model, which `platform.processor` does not give on Linux."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _versions() -> dict[str, str]:
    """Versions of the packages that take part, if they are installed."""
    versions = {"jaxloss": jaxloss.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _torch_losses(notes: list[str], *, compiled: bool) -> TorchLosses:
    """The losses of the packages that are installed; adds a note for each that is not."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Keeps the profiler from printing lines.
    try:
        import torch
    except ImportError:
        notes.append(
            f"PyTorch is not installed ({_INSTALL}). jaxloss is compared with optax and the floor."
        )
        return {}
    from experiments.benchmark.torch_forms import TORCH_FORMS, metric_learning_forms

    torch.set_num_threads(num_cores())
    warnings.filterwarnings("ignore", module="torch.*")
    losses: dict[str, Mapping[str, Callable[..., Any]]] = {"eager": TORCH_FORMS}
    if compiled:
        losses["compile"] = TORCH_FORMS
    try:
        losses["metric_learning"] = metric_learning_forms()
    except ImportError as error:
        notes.append(f"The losses of pytorch-metric-learning are left out: {error} ({_INSTALL}).")
    if not compiled:
        notes.append("torch.compile is left out (--no-compile).")
    return losses


def _line(row: dict[str, Any]) -> str:
    """One measurement for the console."""
    forms = row["forms"]
    shape = ", ".join(f"{name} = {value:,}" for name, value in row["shape"].items() if value)
    parts = [f"{row['loss']}, {row['size']} ({shape}): {forms['jaxloss']['median_ms']:.3g} ms"]
    if best := best_torch(row):
        parts.append(f"{best['ratio']:.2f} × PyTorch's best")
    parts.append(f"{forms['floor']['ratio']:.1f} × its floor")
    parts += [f"{name}: {form['failure']}" for name, form in forms.items() if "failure" in form]
    return ", ".join(parts)
