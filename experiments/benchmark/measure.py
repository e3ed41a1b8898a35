"""The time of several forms of one computation, in one process and on the same arrays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import Array

# Computes something as many times as its argument, by default once, and waits for the last.
Run: TypeAlias = Callable[..., Any]

OURS, FLOOR = "jaxloss", "floor"
EAGER, COMPILED = "PyTorch eager", "torch.compile"
TORCH = {EAGER: False, COMPILED: True}  # Whether a form in PyTorch is compiled.
TURNS = 100  # Of every form.
_FEWEST_TURNS, _MOST_CALLS = 3, 50
_TURN = 0.005  # Seconds.
TOLERANCE = 1e-3  # Largest disagreement of forms that are timed, unless a case has another.


def jax_program(
    function: Callable[..., Any], arrays: Sequence[Any], differentiable: tuple[int, ...]
) -> Any:
    """Value and gradients, compiled for such arrays, or for `jax.ShapeDtypeStruct`s."""
    if differentiable:
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

    For each form it returns the median and the interquartile range of its calls in milliseconds,
    and `ratio`, unless jaxloss failed: the time of jaxloss over that of the form, of the fastest
    calls, which other programs disturb least. For a form that cannot be prepared or run, or differs
    by more than `tolerance`, only `failure`. The floor has no value.
    """
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}

    def attempt(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:  # Of a compiler, or of the memory, of any library.
            runs.pop(name, None)
            failures[name] = failure(error)
            return None

    expected = None
    for name in sorted(prepared, key=lambda name: name != OURS):
        run = attempt(name, prepared[name])
        if run is None or (result := attempt(name, run)) is None:
            continue
        runs[name] = run
        if name == OURS:
            expected = result
        elif name != FLOOR and expected is not None:
            difference = disagreement(result, expected)
            if not difference <= tolerance:
                del runs[name]
                failures[name] = f"differs by {difference:.1g}"
        result = None  # Before the next form needs the memory.
    expected = None
    samples = take_turns(runs, attempt)
    rows: dict[str, dict[str, Any]] = {name: {"failure": text} for name, text in failures.items()}
    for name in runs:
        low, median, high = 1e3 * np.percentile(samples[name], [25, 50, 75])
        rows[name] = {"median_ms": median, "spread_ms": high - low}
        if OURS in runs:
            rows[name]["ratio"] = min(samples[OURS]) / min(samples[name])
    return rows


def take_turns(runs: Mapping[str, Run], attempt: Callable[..., Any]) -> dict[str, list[float]]:
    """Seconds of the calls of every form, all of which have run once.

    On an accelerator, the calls of a turn are one sample, and are waited for once: a call is
    started while the one before runs, as in a training step. `attempt` takes a form that fails out
    of the runs.
    """
    on_cpu = jax.default_backend() == "cpu"
    samples: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    for turn in range(TURNS):
        if turn >= _FEWEST_TURNS and time.perf_counter() - started > (8.0 if on_cpu else 1.2):
            break
        for name, run in list(runs.items()):
            fastest = min(samples[name], default=_TURN)
            if fastest < 10 * _TURN:
                # Fetches what the form before has driven out of the caches, untimed.
                attempt(name, run)
            calls = min(max(1, round(_TURN / fastest)), _MOST_CALLS)
            for together in [1] * calls if on_cpu else [calls]:
                before = time.perf_counter()
                if name in runs and attempt(name, run, together) is not None:
                    samples[name].append((time.perf_counter() - before) / together)
    return samples


def failure(error: Exception) -> str:
    """What a table says of a form that fails."""
    text = f"{type(error).__name__}: {error}"
    if "out of memory" in text.lower() or "RESOURCE_EXHAUSTED" in text:
        return "out of memory"
    return text.partition("\n")[0][:60]


def digits(number: float) -> str:
    """Three digits, without an exponent."""
    places = 0 if number >= 100 else 1 if number >= 10 else 2 if number >= 1 else 3
    return f"{number:,.{places}f}"
