"""From names of losses and sizes to the tables of everything that was measured."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import pandas as pd

from experiments.benchmark.cases import CASES, Case, Size, SizeName, chosen
from experiments.benchmark.measure import (
    TORCH,
    cores_of_others,
    digits,
    jax_program,
    jax_run,
    measure,
    table,
    torch_forms,
    torch_run,
    usable_cores,
    versions,
)
from experiments.errors import ConfigError

try:
    import torch

    from experiments.benchmark.package_forms import PACKAGE
    from experiments.benchmark.torch_forms import FORMS
except ImportError as error:
    raise ConfigError(f'{error}; the benchmark needs pip install -e ".[benchmark]"') from error

QUIET = 0.1  # The most cores that other programs may use.
_MOST_LOGITS = 10**8  # Of a composition, which keeps them.
_PACKAGES = "jax", "jaxlib", "optax", "numpy", "scipy", "torch", "pytorch-metric-learning"
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
    names: Sequence[str], size: SizeName | Literal["all"], *, command: str, allow_load: bool = False
) -> str:
    """Measures the losses at a size, one after the other; returns the report, in Markdown.

    Names are those of cases; all of them if there is none. With `allow_load`, other programs may
    run, and the report says so; else that is a `ConfigError`.
    """
    cases = chosen(names, CASES)
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
    for name in _TABLES if size == "all" else (size,):
        rows = []
        for case, shape in ((of, shape) for of in cases for shape in of.sizes(name)):
            row = measure_case(case, name, shape)
            rows.append(row)
            print(f"{row.loss}, {row.size}: {row.forms['jaxloss']['median_ms']:.3g} ms", flush=True)
        if rows:
            tables += ["", f"### {_TABLES[name]}", "", *time_table(rows)]
    lines = []
    if others > QUIET:
        busy = f"**Other programs used {others:.1f} of {cores} cores at the start: the times are "
        lines = [f"{busy}those of a busy machine.**", ""]
    lines += [
        f"Command: `{command}`. How to read the tables: experiments/BENCHMARKS.md.",
        "",
        f"{_processor()}, cores: {cores}, device {jax.devices()[0].device_kind}; load {start:.2f} "
        f"at the start, {os.getloadavg()[0]:.2f} at the end. {versions(*_PACKAGES)}.",
        "",
    ]
    meaning = [(case.name, case.source, case.floor.text) for case in cases]
    lines += table(["loss", "size of the paper", "floor"], meaning)
    return "\n".join([*lines, *tables]) + "\n"


def measure_case(case: Case, size: SizeName, shape: Size) -> Row:
    """One loss at one size."""
    arrays, differentiable = case.make_arrays(shape), case.differentiable
    losses = {"jaxloss": case.loss, "composition": case.composition, "optax": case.optax}
    left_out = case.small_only if size != "paper" else ()
    if shape.n * shape.C > _MOST_LOGITS:
        left_out = *left_out, "composition", "optax"
    programs = {
        name: jax_program(loss, arrays, differentiable)
        for name, loss in losses.items()
        if loss and name not in left_out
    }
    runs = {name: jax_run(program, arrays) for name, program in programs.items()}
    torch.compiler.reset()
    in_torch = torch_forms(FORMS[case.name])
    if case.name in PACKAGE and "PML" not in left_out:
        in_torch["PML"] = PACKAGE[case.name]
    for name, form in in_torch.items() if size != "own" else ():
        runs[name] = torch_run(form, arrays, differentiable)
    runs["floor"] = jax_run(jax_program(case.floor.run, arrays, None), arrays)
    temporary = {name: it.memory_analysis().temp_size_in_bytes for name, it in programs.items()}
    gradients = sum(arrays[position].nbytes for position in differentiable)
    sizes = {**dict.fromkeys(losses), **temporary, "gradients": gradients}
    memory = {f"{name} (MB)": digits(number and 1e-6 * number) for name, number in sizes.items()}
    size_text = " × ".join(f"{number:,}" for number in shape if number)
    return Row(case.name, size_text, measure(runs, case.tolerance), memory)


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
            {
                "loss": loss,
                "size": size,
                "jaxloss (ms)": ours,
                "best": best and f"**{_ratio(best)}**",
            }
            | {name: _ratio(forms[name]) if name in forms else None for name in _FORMS}
            | memory
        )
    frame = pd.DataFrame(cells, dtype=object).dropna(axis="columns", how="all")
    return table(list(frame), frame.to_numpy().tolist())


def _ratio(form: dict[str, Any]) -> str:
    return form.get("failure") or f"{form['ratio']:.{2 if form['ratio'] < 10 else 0}f}"
