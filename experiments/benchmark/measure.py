"""Time and memory of several forms of one loss, in one process and on the same arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

_WATCHED_SECONDS = 2.0
_TURN = 0.005
_FEWEST_TURNS = 3
_MOST_CALLS = 50


class Form(NamedTuple):
    """A way to compute a loss, ready to run: compiled, with its arrays in place."""

    run: Callable[[], Any]
    """Computes the value and the gradients once, and waits for them."""
    results: list[np.ndarray]
    """Value and gradients; empty for a floor, which has others."""
    temporary_bytes: int | None
    """Most memory that one run holds beside its arguments, its value and its gradients."""


def num_cores() -> int:
    """The cores that this process may use: XLA takes all of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cores_of_others() -> float | None:
    """The cores that other programs use, of those that this process may use.

    They are watched for two seconds. None where `/proc/stat` does not exist.
    """
    started = time.perf_counter(), time.process_time()
    before = _busy_seconds()
    time.sleep(_WATCHED_SECONDS)
    after = _busy_seconds()
    elapsed, own = time.perf_counter() - started[0], time.process_time() - started[1]
    if before is None or after is None:
        return None
    return max(0.0, (after - before - own) / elapsed)


def _busy_seconds() -> float | None:
    """Seconds in which the cores that this process may use have not been idle."""
    try:
        lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
        if name in cores:
            user, nice, system, _idle, _waiting, *interrupts_and_steal = map(int, fields[:8])
            ticks += user + nice + system + sum(interrupts_and_steal)
    return ticks / os.sysconf("SC_CLK_TCK")


def jax_form(
    function: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    differentiable: tuple[int, ...] | None,
) -> Form:
    """Value and gradients by JAX, compiled; `differentiable=None` runs the function alone."""
    placed = [jax.device_put(array) for array in arrays]
    if differentiable is not None:
        function = jax.value_and_grad(function, argnums=differentiable)
    compiled = jax.jit(function).lower(*placed).compile()
    memory = compiled.memory_analysis()

    def run() -> Any:
        return jax.block_until_ready(compiled(*placed))

    leaves = jax.tree.leaves(run())
    results = [] if differentiable is None else [np.asarray(leaf) for leaf in leaves]
    return Form(run, results, None if memory is None else memory.temp_size_in_bytes)


def torch_form(
    function: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    differentiable: tuple[int, ...],
    *,
    compiled: bool = False,
) -> Form:
    """Value and gradients by PyTorch: eager, or by `torch.compile` for exactly these shapes."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.tensor(array, device=device) for array in arrays]
    # PyTorch's losses take int64 classes.
    tensors = [tensor if tensor.is_floating_point() else tensor.long() for tensor in tensors]
    leaves = [tensors[position].requires_grad_() for position in differentiable]
    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, dynamic=False)

    def run() -> Any:
        value = function(*tensors)
        gradients = torch.autograd.grad(value, leaves)
        if device == "cuda":
            torch.cuda.synchronize()
        return value, *gradients

    run()  # Compiles.
    results = [result.detach().cpu().numpy() for result in run()]
    return Form(run, results, _torch_temporary_bytes(run))


def _torch_temporary_bytes(run: Callable[[], Any]) -> int:
    """The peak of what a run allocates, without what it returns, from the profiler's events."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as profiler:
        outcome = run()
    kept = {tensor.untyped_storage().data_ptr() for tensor in outcome}
    recorded: Any = profiler.profiler
    events = []
    pending: list[Any] = list(recorded.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    events.sort()
    # An address is used again and again: a result is what was allocated there last.
    last = {pointer: k for k, (_, pointer, size) in enumerate(events) if size > 0}
    returned = {last[pointer] for pointer in kept & last.keys()}
    live: dict[int, int] = {}
    peak = 0
    for k, (_, pointer, size) in enumerate(events):
        if size < 0:
            live.pop(pointer, None)
        elif k not in returned:
            live[pointer] = size
            peak = max(peak, sum(live.values()))
    return peak


def disagreement(results: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference of values and gradients, relative to the largest number of each."""

    def relative(result: np.ndarray, reference: np.ndarray) -> float:
        scale = max(np.max(np.abs(reference)), np.finfo(np.float32).tiny)
        return np.max(np.abs(result.astype(np.float64) - reference)) / scale

    pairs = zip(results, expected, strict=True)
    return float(np.max([relative(result, reference) for result, reference in pairs]))


def interleave(
    runs: Mapping[str, Callable[[], Any]], *, repeats: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Times the forms in turns, A B C A B C ..., each turn as many calls as take about 5 ms.

    Args:
      runs: Forms, ready to run; `jaxloss` is one of them.
      repeats: Number of turns.
      seconds: No further turn begins after this time, but there are at least three, or `repeats`.

    Returns:
      For each form the median, the interquartile range and the fastest of its calls in
      milliseconds, their number, and `ratio`: the time of jaxloss over that of the form. Ratios
      take the fastest calls. Threads that wait for one another, as OpenMP's do in PyTorch, lose
      far more than XLA's when another process takes a core for a while; the medians of a busy
      machine would flatter JAX.
    """
    samples = {name: [_timed(run)] for name, run in runs.items()}
    started = time.perf_counter()
    for turn in range(repeats):
        if turn >= _FEWEST_TURNS and time.perf_counter() - started > seconds:
            break
        for name, run in runs.items():
            fastest = min(samples[name])
            if fastest < 10 * _TURN:
                run()  # Fetches what the form before has driven out of the caches, untimed.
            calls = min(max(1, round(_TURN / fastest)), _MOST_CALLS)
            samples[name] += [_timed(run) for _ in range(calls)]
    rows = {}
    for name, times in samples.items():
        low, median, high = 1e3 * np.percentile(times, [25, 50, 75])
        rows[name] = {
            "median_ms": float(median),
            "spread_ms": float(high - low),
            "fastest_ms": 1e3 * min(times),
            "calls": len(times),
            "ratio": min(samples["jaxloss"]) / min(times),
        }
    return rows


def _timed(run: Callable[[], Any]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
