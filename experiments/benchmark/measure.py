"""Time and memory of several forms of one computation, in one process and on the same arrays."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

TURNS = 100  # Of every form.
_FEWEST_TURNS, _MOST_CALLS = 3, 50
_TURN = 0.005  # Seconds.
_SECONDS = 8.0  # Of all turns of all forms, after the third turn.
TOLERANCE = 1e-3  # Largest disagreement of forms that are timed, unless a case has another.


class Form(NamedTuple):
    """A way to compute something, ready to run: compiled, with its arrays in place."""

    run: Callable[[], Any]
    """Computes it once, and waits for it."""
    results: Sequence[Any]
    """What all forms must agree on, such as value and gradients; empty for a floor."""
    temporary_bytes: int = 0
    """Most memory that one run holds beside its arguments and its results."""


def usable_cores() -> list[int]:
    """The cores that this process may use: XLA takes all of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def cores_of_others() -> float:
    """How many of the usable cores other programs use, watched for two seconds."""
    import psutil  # Not on a machine with an accelerator.

    busy = psutil.cpu_percent(2.0, percpu=True)
    return sum(busy[core] for core in usable_cores()) / 100


def jax_form(
    function: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    differentiable: tuple[int, ...] | None,
) -> Form:
    """Value and gradients by JAX, compiled; `differentiable=None` runs the function alone."""
    placed = [jax.device_put(array) for array in arrays]
    compiled = jax_program(function, placed, differentiable)
    memory: Any = compiled.memory_analysis()
    run = jax_run(compiled, placed)
    results = [] if differentiable is None else jax.tree.leaves(run())
    return Form(run, results, memory.temp_size_in_bytes)


def jax_program(
    function: Callable[..., Any], arrays: Sequence[Any], differentiable: tuple[int, ...] | None
) -> Any:
    """Value and gradients, compiled for such arrays, or for `jax.ShapeDtypeStruct`s."""
    if differentiable is not None:
        function = jax.value_and_grad(function, argnums=differentiable)
    return jax.jit(function).lower(*arrays).compile()


def jax_run(compiled: Callable[..., Any], arrays: Sequence[Any]) -> Callable[..., Any]:
    """A function that computes it so many times, and waits for the last."""

    def run(calls: int = 1) -> Any:
        for _ in range(calls - 1):
            compiled(*arrays)
        return jax.block_until_ready(compiled(*arrays))

    return run


def torch_form(
    function: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    differentiable: tuple[int, ...],
    *,
    compiled: bool,
) -> Form:
    """Value and gradients by PyTorch: eager, or by `torch.compile` for exactly these shapes."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = with_int64([torch.tensor(array, device=device) for array in arrays])
    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, dynamic=False)
    run = torch_run(function, tensors, differentiable)
    run()  # Compiles.
    return Form(run, [result.detach().cpu().numpy() for result in run()])


def with_int64(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with classes as PyTorch's losses take them."""
    return [tensor if tensor.is_floating_point() else tensor.long() for tensor in tensors]


def torch_run(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    differentiable: tuple[int, ...],
    *,
    autocast: bool = False,
) -> Callable[..., Any]:
    """A function that computes value and gradients so many times, and waits for the last.

    With `autocast`, in bfloat16 where PyTorch takes it to be exact enough.
    """
    import torch

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


def disagreement(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference of results, relative to the largest number of each."""
    differences = []
    for result, reference in zip(results, expected, strict=True):
        reference = np.asarray(reference, np.float64)
        scale = max(np.max(np.abs(reference)), np.finfo(np.float32).tiny)
        differences.append(np.max(np.abs(result - reference)) / scale)
    return float(np.max(differences))


def measure(
    forms: Mapping[str, Form], *, tolerance: float = TOLERANCE
) -> dict[str, dict[str, Any]]:
    """Times the forms that agree with `jaxloss` in turns, A B C A B C ..., about 5 ms each.

    For each form it returns the median, the interquartile range and the fastest of its calls in
    milliseconds, and `ratio`: the time of jaxloss over that of the form, of the fastest calls.
    Threads that wait for one another, as OpenMP's do in PyTorch, lose far more than XLA's when
    another process takes a core for a while; the medians of a busy machine would flatter JAX. For a
    form that disagrees by more than `tolerance`, only `failure`.
    """
    expected = forms["jaxloss"].results
    rows: dict[str, dict[str, Any]] = {}
    for name, form in forms.items():
        difference = disagreement(form.results, expected) if form.results else 0
        agrees = difference <= tolerance
        rows[name] = {} if agrees else {"failure": f"differs by {difference:.1g}"}
    runs = {name: forms[name].run for name, row in rows.items() if not row}
    samples = take_turns(runs, TURNS)
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
    runs: Mapping[str, Callable[..., Any]],
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


def _timed(run: Callable[..., Any], calls: int = 1) -> float:
    """Seconds of a call; those of several are waited for once."""
    started = time.perf_counter()
    run(calls) if calls > 1 else run()
    return (time.perf_counter() - started) / calls


def digits(number: float) -> str:
    """Three digits, without an exponent."""
    places = 0 if number >= 100 else 1 if number >= 10 else 2 if number >= 1 else 3
    return f"{number:,.{places}f}"
