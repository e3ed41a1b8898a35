"""The time of several forms of one computation, in one process and on the same arrays."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import Array

Run: TypeAlias = Callable[..., Any]
"""Computes something as many times as its argument, by default once, and waits for the last."""

OURS, FLOOR = "jaxloss", "floor"
EAGER, COMPILED = "PyTorch eager", "torch.compile"
TORCH = {EAGER: False, COMPILED: True}
"""Forms in PyTorch, and whether they are compiled."""
TURNS = 100  # Of every form.
_FEWEST_TURNS, _MOST_CALLS = 3, 50
_TURN = 0.005  # Seconds.
_SECONDS = {"cpu": 8.0}  # Of all turns of all forms, after the third turn.
_SECONDS_ELSEWHERE = 1.2
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


def disagreement(results: Any, expected: Any) -> float:
    """Of value and gradients, the largest difference relative to the largest number of each."""
    differences = []
    for result, reference in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        if not isinstance(result, jax.Array | np.ndarray):  # A tensor.
            result = result.detach().float().cpu().numpy()
        result, reference = np.asarray(result, np.float64), np.asarray(reference, np.float64)
        scale = max(np.max(np.abs(reference)), np.finfo(np.float32).tiny)
        differences.append(np.max(np.abs(result - reference)) / scale)
    return float(np.max(differences))


def measure(
    prepared: Mapping[str, Callable[[], Run]], tolerance: float = TOLERANCE
) -> dict[str, dict[str, Any]]:
    """Times the forms that agree with `jaxloss` in turns, A B C A B C ..., about 5 ms each.

    For each form it returns the median, the interquartile range and the fastest of its calls in
    milliseconds, and `ratio`: the time of jaxloss over that of the form, of the fastest calls; NaN
    where jaxloss has none.
    Threads that wait for one another, as OpenMP's do in PyTorch, lose far more than XLA's when
    another process takes a core for a while; the medians of a busy machine would flatter JAX. For a
    form that cannot be prepared or run, or differs by more than `tolerance`, only `failure`. The
    floor has no value.
    """
    runs: dict[str, Run] = {}
    rows: dict[str, dict[str, Any]] = {name: {} for name in prepared}

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # Of a compiler, or of the memory, of any library.
            runs.pop(name, None)
            rows[name] = {"failure": failure(error)}
            return None

    expected = None
    for name, prepare in sorted(prepared.items(), key=lambda item: item[0] != OURS):
        if not (run := attempt(name, prepare)) or (result := attempt(name, run)) is None:
            continue
        runs[name] = run
        if name == OURS:
            expected = result
        elif name != FLOOR and expected is not None:
            difference = disagreement(result, expected)
            if not difference <= tolerance:
                del runs[name]
                rows[name] = {"failure": f"differs by {difference:.1g}"}
        result = None  # Before the next form needs the memory.
    expected = None
    samples = take_turns(runs, attempt)
    fastest = min(samples.get(OURS) or [np.nan])
    for name in runs:
        low, median, high = 1e3 * np.percentile(samples[name], [25, 50, 75])
        rows[name] = {
            "median_ms": float(median),
            "spread_ms": float(high - low),
            "fastest_ms": 1e3 * min(samples[name]),
            "ratio": fastest / min(samples[name]),
        }
    return rows


def take_turns(
    runs: Mapping[str, Run], attempt: Callable[[str, Callable[[], Any]], Any]
) -> dict[str, list[float]]:
    """Seconds of the calls of every form, all of which have run once.

    On an accelerator, the calls of a turn are one sample, and are waited for once: a call is
    started while the one before runs, as in a training step. `attempt` takes a form that fails out
    of the runs.
    """
    together = jax.default_backend() != "cpu"
    seconds = _SECONDS.get(jax.default_backend(), _SECONDS_ELSEWHERE)
    first = {name: attempt(name, partial(_timed, run)) for name, run in list(runs.items())}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    for turn in range(TURNS):
        if turn >= _FEWEST_TURNS and time.perf_counter() - started > seconds:
            break
        for name, run in list(runs.items()):
            fastest = min([first[name], *samples[name]])
            if fastest < 10 * _TURN:
                # Fetches what the form before has driven out of the caches, untimed.
                attempt(name, run)
            calls = min(max(1, round(_TURN / fastest)), _MOST_CALLS)
            for each in [calls] if together else [1] * calls:
                if name in runs and (sample := attempt(name, partial(_timed, run, each))):
                    samples[name].append(sample)
    return samples


def _timed(run: Run, calls: int = 1) -> float:
    """Seconds of a call; those of several are waited for once."""
    started = time.perf_counter()
    run(calls) if calls > 1 else run()
    return (time.perf_counter() - started) / calls


def failure(error: Exception) -> str:
    """What a table says of a form that fails."""
    text = f"{type(error).__name__}: {error}"
    if "out of memory" in text.lower() or "RESOURCE_EXHAUSTED" in text:
        return "out of memory"
    return text.partition("\n")[0][:60]


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
