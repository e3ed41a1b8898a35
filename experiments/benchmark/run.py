"""From names of losses and sizes to the tables of everything that was measured."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from experiments.benchmark.measure import (
    Row,
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
    from experiments.benchmark.solvers import measure_assignments, measure_spreads
    from experiments.benchmark.torch_forms import FORMS
except ImportError as error:
    raise ConfigError(f'{error}; the benchmark needs pip install -e ".[benchmark]"') from error

SOLVERS: dict[str, Callable[[SizeName], Iterator[Row]]] = {
    "uniform_prototypes": measure_spreads,
    "assign_prototypes": measure_assignments,
}
QUIET = 0.1
"""The most cores that other programs may use."""
TORCH = {"PyTorch eager": False, "torch.compile": True}
"""Forms in PyTorch, and whether they are compiled."""
_MOST_LOGITS = 10**8
"""Of a composition, which keeps them."""
_PACKAGES = (
    *("jaxloss", "jax", "jaxlib", "optax", "numpy", "scipy", "torch"),
    "pytorch-metric-learning",
)
_FORMS = (*TORCH, "PML", "PyTorch", "PyTorch's loop", "scipy", "composition", "optax", "floor")
"""All forms beside `jaxloss`, in the order of the columns."""
_TABLES = {
    "paper": "The size of the paper",
    "large": "Ten times larger",
    "own": "Sizes of single losses",
}


def run_benchmark(
    names: Sequence[str], sizes: Sequence[SizeName], *, command: str, allow_load: bool = False
) -> str:
    """Measures the losses at the sizes, one after the other; returns the report, in Markdown.

    Names are those of cases and keys of `SOLVERS`; all of them if there is none. With `allow_load`,
    other programs may run, and the report says so; else that is a `ConfigError`.
    """
    known = [case.name for case in CASES] + list(SOLVERS)
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
    start = os.getloadavg()[0]

    def measured() -> Iterator[Row]:
        for size in sizes:
            for case in cases:
                for shape in case.sizes(size):
                    yield measure_case(case, size, shape)
        for name in SOLVERS:
            for size in sizes if name in (names or known) else ():
                yield from SOLVERS[name](size)

    rows: list[Row] = []
    for row in measured():
        rows.append(row)
        problem = ", ".join(map(str, row.problem.values()))
        print(f"{problem}: {row.forms['jaxloss']['median_ms']:.3g} ms", flush=True)
    lines = []
    if others > QUIET:
        lines = [
            f"**Other programs used {others:.1f} of {cores} cores at the start: the times are "
            "those of a busy machine.**",
            "",
        ]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    lines += [
        f"Command: `{command}`. How to read the tables: experiments/BENCHMARKS.md.",
        "",
        f"{_processor()}, cores: {cores}, device {jax.devices()[0].device_kind}; load {start:.2f} "
        f"at the start, {os.getloadavg()[0]:.2f} at the end. Python {platform.python_version()}, "
        f"{versions}.",
    ]
    if cases:
        meaning = [(case.name, case.source, case.floor.text) for case in cases]
        lines += ["", *table(["loss", "size of the paper", "floor"], meaning)]
    for heading in dict.fromkeys(row.table for row in rows):
        lines += ["", f"### {heading}", ""]
        lines += time_table([row for row in rows if row.table == heading])
    return "\n".join(lines) + "\n"


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
    forms["floor"] = jax_form(case.floor.run, arrays, None)
    return Row(
        _TABLES[size],
        {"loss": case.name, "size": " × ".join(f"{number:,}" for number in shape if number)},
        measure(forms, tolerance=case.tolerance) | failures,
        memory | {"gradients (MB)": digits(1e-6 * gradients)},
    )


def _processor() -> str:
    """The model, which `platform.processor` does not give on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def time_table(rows: Sequence[Row]) -> list[str]:
    """A Markdown table: the time of `jaxloss`, and the ratios of the other forms."""
    cells = []
    for row in rows:
        ours = row.forms["jaxloss"]
        timed = [row.forms[n] for n in (*TORCH, "PML") if "ratio" in row.forms.get(n, {})]
        best = max(timed, key=lambda form: form["ratio"], default=None)
        cells.append(
            {
                **{name: _number(value) for name, value in row.problem.items()},
                "jaxloss (ms)": f"{digits(ours['median_ms'])} ± {digits(ours['spread_ms'])}",
                "best": best and bold(_ratio(best)),
                **{name: _ratio(row.forms[name]) if name in row.forms else None for name in _FORMS},
                **{name: _number(value) for name, value in row.result.items()},
            }
        )
    frame = pd.DataFrame(cells, dtype=object).dropna(axis="columns", how="all")
    return table(list(frame), frame.to_numpy().tolist())


def _number(value: Any) -> Any:
    """A count or a cosine as tables print it; anything else as it is."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else value


def _ratio(form: dict[str, Any]) -> str:
    return form.get("failure") or f"{form['ratio']:.{2 if form['ratio'] < 10 else 0}f}"
