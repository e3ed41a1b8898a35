"""The training loop: batches in, checkpoints and metrics out."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from experiments.core.errors import DivergedError
from experiments.core.processes import Interrupted, stop_requests, watchdog
from experiments.training.parallel import DataParallel
from experiments.training.run_directory import Recorder, Validation
from experiments.training.step import Batch, TrainState

T = TypeVar("T")

_CHECKPOINT_STEPS = 1000
"""Largest number of steps between two checkpoints, where validations are further apart."""

_MAX_IN_FLIGHT = 8
"""Largest number of dispatched steps: with many more, several CPU devices deadlock."""


class Parts(NamedTuple):
    """What the loop runs, ready to use."""

    initial: TrainState
    """The state at step 0."""
    parallel: DataParallel
    """The step, spread over devices."""
    read: Callable[[int], Batch]
    """This process's rows of the batch of a step, counted from 0."""
    ahead: bool
    """Whether reading takes so long that the next batches are read during a step."""
    images_per_step: int
    """Images of all processes."""
    steps_per_epoch: int
    after_epoch: Callable[[Any], tuple[Any, Mapping[str, Any]]] | None
    """See `Objective.after_epoch`."""
    validate: Callable[[TrainState], Validation] | None
    """None without validation images."""
    class_counts: np.ndarray
    """int64 [C], training images of every class."""
    classes: str
    """A hash of the names of the training classes."""
    classifier: bool
    """Whether a classifier of them is trained."""
    origins: list[str]
    """Sentences on the runs or the file that the initial weights are from."""


def train(
    parts: Parts,
    directory: Path,
    *,
    steps: int,
    validate_every: int,
    log_every: int,
    name: str,
    meta: Mapping[str, Any],
    stuck_after: float = 0,
) -> float:
    """Trains to the end, from the newest checkpoint; returns the seconds of all calls.

    With several processes, all of them call this with the same arguments, and see the directory,
    which receives metrics.jsonl, TensorBoard events and checkpoints/. A process without a step for
    `stuck_after` minutes ends (0: never). Name and meta are as in `Recorder`. Raises a
    `DivergedError` where loss, gradient or features are not finite, and `Interrupted` at SIGTERM or
    Ctrl-C, when the state is saved.
    """
    parallel = parts.parallel
    after_epoch = parts.after_epoch and jax.jit(parts.after_epoch)
    with (
        Recorder(directory, steps=steps, name=name, meta=meta) as recorder,
        stop_requests() as stop_request,
        watchdog(stuck_after) as step_done,
    ):
        state = recorder.resume(parts.initial)
        first = int(state.step)

        def stop(step: int, stop_signal: int | None) -> None:
            if stop_signal is not None:
                raise Interrupted(
                    f"stopped at step {step} of {steps}, which is saved in {directory}; "
                    f"run the same command to {'continue' if step < steps else 'evaluate it'}",
                    stop_signal,
                )

        if first == steps:
            stop(first, stop_request())
            return recorder.seconds_before
        replicated = parallel.replicate(state)
        in_flight, since, counted = deque(), time.monotonic(), first
        # `step` is the number of steps done; `read` counts from 0.
        for step, batch in enumerate(
            read_batches(parts.read, first, steps, ahead=parts.ahead), first + 1
        ):
            replicated, metrics = parallel.step(replicated, parallel.split(batch))
            in_flight.append(metrics)
            if step == first + 1:  # Rates and the time left are those without compilation.
                jax.block_until_ready(metrics)
                since, counted = time.monotonic(), step
                recorder.compiled(step)
            if len(in_flight) > _MAX_IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            step_done()  # Dispatched: a step that hangs is noticed when none can follow it.
            if after_epoch is not None and step % parts.steps_per_epoch == 0:
                updated, numbers = after_epoch(parallel.single(replicated.objective_state))
                replicated = replicated._replace(objective_state=parallel.replicate(updated))
                recorder.log(step, **numbers)

            last = step == steps
            logs, validates = last or step % log_every == 0, last or step % validate_every == 0
            # Read once per step: a signal that arrives later is handled after the next step.
            stop_signal = stop_request()
            saves = validates or step % _CHECKPOINT_STEPS == 0 or stop_signal is not None
            if logs or saves:
                scalars = {key: float(value) for key, value in parallel.single(metrics).items()}
                if logs:
                    now = time.monotonic()
                    images = parts.images_per_step * (step - counted)
                    rate = images / (now - since) if images else None
                    since, counted = now, step
                    recorder.log(step, **scalars, images_per_second=rate)
                    recorder.show_progress(step, scalars["loss"], rate)
                _check_finite(step, scalars)
            if saves:
                validate = parts.validate if validates else None
                recorder.save(step, parallel.single(replicated), validate)
                since, counted = time.monotonic(), step
            if stop_signal is not None:
                recorder.checkpoints.wait()
                stop(step, stop_signal)
        recorder.checkpoints.wait()
        stop(steps, stop_request())  # One that came during the last validation or save.
        return recorder.seconds


def read_batches(read: Callable[[int], T], first: int, last: int, *, ahead: bool) -> Iterator[T]:
    """Iterates over the batches of the steps `first`, ..., `last - 1`.

    With `ahead`, up to two of them are read in advance, in a Grain thread; an exception of `read`
    is raised when its batch is requested.
    """
    if not ahead:
        return map(read, range(first, last))
    import grain  # Takes a second, and images in memory do not need it.

    steps = grain.MapDataset.range(first, last).map(read)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(steps.to_iter_dataset(options))


def _check_finite(step: int, scalars: dict[str, float]) -> None:
    # The loss first: it is more informative than the norm of a gradient.
    for name, value in sorted(scalars.items(), key=lambda item: item[0] != "loss"):
        if not math.isfinite(value):
            raise DivergedError(step, f"{name} is {value}")
