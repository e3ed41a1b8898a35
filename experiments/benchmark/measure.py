"""Time and memory of several forms of one computation, in one process and on the same arrays."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import Array

import jaxloss

Run: TypeAlias = Callable[..., Any]
"""Computes something as many times as its argument, by default once, and waits for the last."""

TURNS = 100  # Of every form.
_FEWEST_TURNS, _MOST_CALLS = 3, 50
_TURN = 0.005  # Seconds.
EAGER, COMPILED = "PyTorch eager", "torch.compile"
TORCH = {EAGER: False, COMPILED: True}
"""Forms in PyTorch, and whether they are compiled."""
_SECONDS = 8.0  # Of all turns of all forms, after the third turn.
TOLERANCE = 1e-3  # Largest disagreement of forms that are timed, unless a case has another.


def usable_cores() -> list[int]:
    """The cores that this process may use: XLA takes all of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def cores_of_others() -> float:
    """How many of the usable cores other programs use, watched for two seconds."""
    import psutil  # Not on a machine with an accelerator.

    busy = psutil.cpu_percent(2.0, percpu=True)
    return sum(busy[core] for core in usable_cores()) / 100


def jax_program(
    function: Callable[..., Any], arrays: Sequence[Any], differentiable: tuple[int, ...] | None
) -> Any:
    """Value and gradients, compiled for such arrays, or for `jax.ShapeDtypeStruct`s."""
    if differentiable is not None:
        function = jax.value_and_grad(function, argnums=differentiable)
    return jax.jit(function).lower(*arrays).compile()


def jax_run(compiled: Callable[..., Any], arrays: Sequence[Any]) -> Run:
    """Runs a program of JAX."""

    def run(calls: int = 1) -> Any:
        for _ in range(calls - 1):
            compiled(*arrays)
        return jax.block_until_ready(compiled(*arrays))

    return run


def torch_forms(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A function of PyTorch by the names of `TORCH`; it compiles at its first call."""
    import torch

    return {
        name: torch.compile(function, dynamic=False) if compiled else function
        for name, compiled in TORCH.items()
    }


def torch_run(
    function: Callable[..., Any],
    arrays: Sequence[Array],
    differentiable: tuple[int, ...],
    *,
    autocast: bool = False,
) -> Run:
    """Runs a function of PyTorch and its gradients, on the memory of JAX's arrays.

    With `autocast`, in bfloat16 where PyTorch takes it to be exact enough.
    """
    import torch

    tensors = [torch.from_dlpack(jax.block_until_ready(array)) for array in arrays]
    tensors = [tensor if tensor.is_floating_point() else tensor.long() for tensor in tensors]
    device = tensors[0].device.type
    leaves = [tensors[position].requires_grad_() for position in differentiable]

    def run(calls: int = 1) -> Any:
        results: Any = None
        for _ in range(calls):
            with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
                value = function(*tensors)
            results = value, *torch.autograd.grad(value, leaves)
        if device == "cuda":
            torch.cuda.synchronize()
        return results

    return run


def disagreement(results: Any, expected: Any) -> list[float]:
    """Of the value and each gradient, the largest difference relative to the largest number."""
    differences = []
    for result, reference in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        if not isinstance(result, jax.Array | np.ndarray):  # A tensor.
            result = result.detach().float().cpu().numpy()
        result, reference = np.asarray(result, np.float64), np.asarray(reference, np.float64)
        scale = max(np.max(np.abs(reference)), np.finfo(np.float32).tiny)
        differences.append(float(np.max(np.abs(result - reference)) / scale))
    return differences


def failure(error: Exception) -> str:
    """What a table says of a form that fails."""
    text = f"{type(error).__name__}: {error}"
    if "out of memory" in text.lower() or "RESOURCE_EXHAUSTED" in text:
        return "out of memory"
    return text.partition("\n")[0][:60]


def measure(runs: Mapping[str, Run], tolerance: float = TOLERANCE) -> dict[str, dict[str, Any]]:
    """Times the forms that agree with `jaxloss` in turns, A B C A B C ..., about 5 ms each.

    For each form it returns the median, the interquartile range and the fastest of its calls in
    milliseconds, and `ratio`: the time of jaxloss over that of the form, of the fastest calls.
    Threads that wait for one another, as OpenMP's do in PyTorch, lose far more than XLA's when
    another process takes a core for a while; the medians of a busy machine would flatter JAX. For a
    form that fails, or differs by more than `tolerance`, only `failure`. The floor has no value.
    """
    rows: dict[str, dict[str, Any]] = {name: {} for name in runs}
    expected = runs["jaxloss"]()
    for name in [name for name in runs if name not in ("jaxloss", "floor")]:
        try:
            difference = np.max(disagreement(runs[name](), expected))
        except Exception as error:  # Of any kind, where there is no compiler.
            rows[name] = {"failure": failure(error)}
        else:
            if not difference <= tolerance:
                rows[name] = {"failure": f"differs by {difference:.1g}"}
    samples = take_turns({name: runs[name] for name, row in rows.items() if not row}, TURNS)
    for name, times in samples.items():
        low, median, high = 1e3 * np.percentile(times, [25, 50, 75])
        rows[name] = {
            "median_ms": float(median),
            "spread_ms": float(high - low),
            "fastest_ms": 1e3 * min(times),
            "ratio": min(samples["jaxloss"]) / min(times),
        }
    return rows


def take_turns(
    runs: Mapping[str, Run],
    turns: int,
    *,
    seconds: float = _SECONDS,
    together: bool = False,
) -> dict[str, list[float]]:
    """Seconds of the calls of every form.

    With `together`, the calls of a turn are one sample, and are waited for once: a call on a GPU is
    started while the one before runs, as in a training step.
    """
    samples = {name: [_timed(run)] for name, run in runs.items()}
    started = time.perf_counter()
    for turn in range(turns):
        if turn >= _FEWEST_TURNS and time.perf_counter() - started > seconds:
            break
        for name, run in runs.items():
            fastest = min(samples[name])
            if fastest < 10 * _TURN:
                run()  # Fetches what the form before has driven out of the caches, untimed.
            calls = min(max(1, round(_TURN / fastest)), _MOST_CALLS)
            if together:
                samples[name].append(_timed(run, calls))
            else:
                samples[name] += [_timed(run) for _ in range(calls)]
    return samples


def _timed(run: Run, calls: int = 1) -> float:
    """Seconds of a call; those of several are waited for once."""
    started = time.perf_counter()
    run(calls) if calls > 1 else run()
    return (time.perf_counter() - started) / calls


def digits(number: float | None) -> str | None:
    """Three digits, without an exponent."""
    if number is None:
        return None
    places = 0 if number >= 100 else 1 if number >= 10 else 2 if number >= 1 else 3
    return f"{number:,.{places}f}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str | None]]) -> list[str]:
    """In Markdown; `reporting.markdown` needs a package that a GPU's machine may not have."""
    marks = [":--", *[":-:"] * (len(headings) - 1)]
    cells = [[(cell or "–").replace("|", r"\|") for cell in row] for row in (headings, *rows)]
    return [f"| {' | '.join(row)} |" for row in (cells[0], marks, *cells[1:])]


def versions(*packages: str) -> str:
    """Of Python, of jaxloss, and of those packages that are installed."""
    found = [f"{name} {version(name)}" for name in packages if find_spec(name.replace("-", "_"))]
    own = f"Python {platform.python_version()}, jaxloss {jaxloss.__version__}"
    return ", ".join([own, *found])
