"""From names of losses and sizes to the tables of everything that was measured."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from experiments.benchmark.measure import (
    cores_of_others,
    digits,
    jax_form,
    measure,
    torch_form,
    usable_cores,
)
from experiments.errors import ConfigError
from experiments.reporting.markdown import bold, table

try:
    import torch

    from experiments.benchmark.cases import CASES, Case, Size, SizeName
    from experiments.benchmark.package_forms import PACKAGE
    from experiments.benchmark.torch_forms import FORMS
except ImportError as error:
    raise ConfigError(f'{error}; the benchmark needs pip install -e ".[benchmark]"') from error

QUIET = 0.1  # The most cores that other programs may use.
TORCH = {"PyTorch eager": False, "torch.compile": True}
"""Forms in PyTorch, and whether they are compiled."""
_MOST_LOGITS = 10**8  # Of a composition, which keeps them.
_PACKAGES = [
    "jaxloss",
    "jax",
    "jaxlib",
    "optax",
    "numpy",
    "scipy",
    "torch",
    "pytorch-metric-learning",
]
_FORMS = (*TORCH, "PML", "composition", "optax", "floor")
"""All forms beside `jaxloss`, in the order of the columns."""
_TABLES: dict[SizeName, str] = {
    "paper": "The size of the paper",
    "large": "Ten times larger",
    "own": "Sizes of single losses",
}


class Row(NamedTuple):
    """One loss at one size: a row of a table."""

    loss: str
    size: str
    forms: dict[str, dict[str, Any]]
    """For each form what `measure` returns; that of this project is `jaxloss`."""
    memory: dict[str, str | None]  # By heading.


def run_benchmark(
    names: Sequence[str], sizes: Sequence[SizeName], *, command: str, allow_load: bool = False
) -> str:
    """Measures the losses at the sizes, one after the other; returns the report, in Markdown.

    Names are those of cases; all of them if there is none. With `allow_load`, other programs may
    run, and the report says so; else that is a `ConfigError`.
    """
    known = [case.name for case in CASES]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"unknown loss {unknown[0]!r}; choose from {', '.join(known)}")
    cases = [case for case in CASES if case.name in (names or known)]
    others, cores = cores_of_others(), len(usable_cores())
    if others > QUIET and not allow_load:
        raise ConfigError(
            f"other programs use {others:.1f} of {cores} cores, which would change the times; stop "
            "them, or measure with --allow-load"
        )
    torch.set_num_threads(cores)
    warnings.filterwarnings("ignore", module="torch.*")
    # A graph break is part of the form, where a size depends on the data.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    start, tables = os.getloadavg()[0], []
    for size in sizes:
        rows = []
        for case, shape in ((of, shape) for of in cases for shape in of.sizes(size)):
            row = measure_case(case, size, shape)
            rows.append(row)
            print(f"{row.loss}, {row.size}: {row.forms['jaxloss']['median_ms']:.3g} ms", flush=True)
        if rows:
            tables += ["", f"### {_TABLES[size]}", "", *time_table(rows)]
    lines = []
    if others > QUIET:
        busy = f"**Other programs used {others:.1f} of {cores} cores at the start: the times are "
        lines = [f"{busy}those of a busy machine.**", ""]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    lines += [
        f"Command: `{command}`. How to read the tables: experiments/BENCHMARKS.md.",
        "",
        f"{_processor()}, cores: {cores}, device {jax.devices()[0].device_kind}; load {start:.2f} "
        f"at the start, {os.getloadavg()[0]:.2f} at the end. Python {platform.python_version()}, "
        f"{versions}.",
        "",
    ]
    meaning = [(case.name, case.source, case.floor.text) for case in cases]
    lines += table(["loss", "size of the paper", "floor"], meaning)
    return "\n".join([*lines, *tables]) + "\n"


def measure_case(case: Case, size: SizeName, shape: Size) -> Row:
    """One loss at one size."""
    arrays = case.make_arrays(np.random.default_rng(0), shape)
    forms = {"jaxloss": jax_form(case.loss, arrays, case.differentiable)}
    failures: dict[str, dict[str, Any]] = {}
    left_out = case.small_only if size != "paper" else ()
    in_torch = {name: (FORMS[case.name], compiled) for name, compiled in TORCH.items()}
    if case.name in PACKAGE and "PML" not in left_out:
        in_torch["PML"] = PACKAGE[case.name], False
    for name, (form, compiled) in in_torch.items() if size != "own" else ():
        try:
            forms[name] = torch_form(form, arrays, case.differentiable, compiled=compiled)
        except Exception as error:  # Of any kind, where there is no compiler.
            if not compiled:
                raise
            failures[name] = {"failure": str(error).partition("\n")[0][:60]}
    for name, loss in {"composition": case.composition, "optax": case.optax}.items():
        if loss and name not in left_out and shape.n * shape.C <= _MOST_LOGITS:
            forms[name] = jax_form(loss, arrays, case.differentiable)
    memory = {
        f"{name} (MB)": digits(1e-6 * forms[name].temporary_bytes) if name in forms else None
        for name in ("jaxloss", "composition", "optax")
    }
    gradients = sum(array.nbytes for array in forms["jaxloss"].results[1:])
    memory["gradients (MB)"] = digits(1e-6 * gradients)
    forms["floor"] = jax_form(case.floor.run, arrays, None)
    timed = measure(forms, tolerance=case.tolerance) | failures
    return Row(case.name, " × ".join(f"{number:,}" for number in shape if number), timed, memory)


def _processor() -> str:
    """The model, which `platform.processor` does not give on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def time_table(rows: Sequence[Row]) -> list[str]:
    """A Markdown table: the time of `jaxloss`, and the ratios of the other forms."""
    cells = []
    for loss, size, forms, memory in rows:
        timed = [forms[n] for n in (*TORCH, "PML") if "ratio" in forms.get(n, {})]
        best = max(timed, key=lambda form: form["ratio"], default=None)
        ours = f"{digits(forms['jaxloss']['median_ms'])} ± {digits(forms['jaxloss']['spread_ms'])}"
        cells.append(
            {"loss": loss, "size": size, "jaxloss (ms)": ours, "best": best and bold(_ratio(best))}
            | {name: _ratio(forms[name]) if name in forms else None for name in _FORMS}
            | memory
        )
    frame = pd.DataFrame(cells, dtype=object).dropna(axis="columns", how="all")
    return table(list(frame), frame.to_numpy().tolist())


def _ratio(form: dict[str, Any]) -> str:
    return form.get("failure") or f"{form['ratio']:.{2 if form['ratio'] < 10 else 0}f}"
