"""The training loop: batches in, checkpoints and metrics out."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from tqdm import tqdm

from experiments.core.config import TrainConfig
from experiments.core.errors import DivergedError
from experiments.core.processes import Interrupted, is_first, stop_requests, watchdog
from experiments.training.checkpoints import CHECKPOINTS_FOLDER, CheckpointError, Checkpoints
from experiments.training.parallel import DataParallel
from experiments.training.run_directory import MetricsLog, claim_run_directory
from experiments.training.step import Batch, TrainState

T = TypeVar("T")

# Largest number of steps between two checkpoints, where validations are further apart.
_CHECKPOINT_STEPS = 1000
# Largest number of dispatched steps: with many more, several CPU devices deadlock.
_MAX_IN_FLIGHT = 8


class Parts(NamedTuple):
    """What the loop runs, ready to use."""

    initial: TrainState  # At step 0.
    parallel: DataParallel  # The step, spread over devices.
    read: Callable[[int], Batch]  # This process's rows of the batch of a step, counted from 0.
    ahead: bool  # Whether reading takes so long that the next batches are read during a step.
    images_per_step: int  # Of all processes.
    steps_per_epoch: int
    after_epoch: Callable[[Any], tuple[Any, Mapping[str, Any]]] | None  # As in `Objective`.
    validate: Callable[[TrainState], tuple[float, Mapping[str, float]]] | None
    """The value that ranks checkpoints, and numbers for the metrics log. All processes call it.
    None without validation images."""
    meta: dict[str, Any]
    """JSON types that every checkpoint stores; `config`, the configuration, among them."""


def train(
    parts: Parts, directory: Path, config: TrainConfig, *, name: str, stuck_after: float = 0
) -> float:
    """Trains to the end, from the newest checkpoint; returns the seconds of all calls.

    With several processes, all of them call this with the same arguments, and see the directory,
    which receives metrics.jsonl, TensorBoard events and checkpoints/. Progress shows `name`. A
    process without a step for `stuck_after` minutes ends (0: never). Raises the errors of
    `claim_run_directory`, a `DivergedError` where loss, gradient or features are not finite, and
    `Interrupted` at SIGTERM or Ctrl-C, when the state is saved.
    """
    parallel, steps, begun = parts.parallel, config.steps, time.monotonic()
    log_every, validate_every = config.log_every, config.validate_every
    after_epoch = parts.after_epoch and jax.jit(parts.after_epoch)
    metrics_log = None
    progress: Any = None
    with stop_requests() as stop_request, watchdog(stuck_after) as step_done, ExitStack() as stack:
        if is_first():
            values, fixed = parts.meta["config"], config.fixed_steps()
            stack.enter_context(claim_run_directory(directory, values, fixed_steps=fixed))
        checkpoints = stack.enter_context(Checkpoints(directory / CHECKPOINTS_FOLDER))
        state, seconds = _resume(checkpoints, directory, parts.initial)
        # Work of a killed call after its last checkpoint is repeated, and counts once.
        first, begun = int(state.step), begun - seconds
        if is_first():
            metrics_log = stack.enter_context(MetricsLog(directory, resume_step=first))

        def log(step: int, **scalars: Any) -> None:
            if metrics_log is not None:
                metrics_log.log(step, **scalars)

        def stop(step: int, stop_signal: int | None) -> None:
            if stop_signal is not None:
                raise Interrupted(
                    f"stopped at step {step} of {steps}, which is saved in {directory}; "
                    f"run the same command to {'continue' if step < steps else 'evaluate it'}",
                    stop_signal,
                )

        if first == steps:
            stop(first, stop_request())
            return seconds
        if is_first():
            print(f"{name}: compiling …", flush=True)
        replicated = parallel.replicate(state)
        in_flight, since, counted = deque(), time.monotonic(), first
        # `step` is the number of steps done; `read` counts from 0.
        batches = read_batches(parts.read, first, steps, ahead=parts.ahead)
        for step, batch in enumerate(batches, first + 1):
            replicated, metrics = parallel.step(replicated, parallel.split(batch))
            in_flight.append(metrics)
            if step == first + 1:  # Rates and the time left are those without compilation.
                jax.block_until_ready(metrics)
                since, counted = time.monotonic(), step
                progress = stack.enter_context(_progress(name, step, steps))
            if len(in_flight) > _MAX_IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            step_done()  # Dispatched: a step that hangs is noticed when none can follow it.
            if after_epoch is not None and step % parts.steps_per_epoch == 0:
                updated, numbers = after_epoch(parallel.single(replicated.objective_state))
                replicated = replicated._replace(objective_state=parallel.replicate(updated))
                log(step, **numbers)

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
                    log(step, **scalars, images_per_second=rate)
                    progress.set_postfix(loss=scalars["loss"], refresh=False)
                    progress.update(step - progress.n)
                # The loss first: it is more informative than the norm of a gradient.
                for key in ("loss", *scalars):
                    if not math.isfinite(scalars[key]):
                        raise DivergedError(step, f"{key} is {scalars[key]}")
            if saves:
                state, validation = parallel.single(replicated), None
                if validates and parts.validate is not None:
                    validation, diagnostics = parts.validate(state)
                    log(step, validation=validation, **diagnostics)
                if metrics_log is not None:  # First: a run that resumes needs the earlier lines.
                    metrics_log.store()
                seconds = time.monotonic() - begun
                meta = parts.meta | {"seconds": seconds}
                checkpoints.save(step, state, meta=meta, validation=validation)
                since, counted = time.monotonic(), step
            stop(step, stop_signal)
        stop(steps, stop_request())  # One that came during the last validation or save.
        return seconds


def _resume(checkpoints: Checkpoints, directory: Path, initial: TrainState) -> tuple[Any, float]:
    """The state of the newest intact checkpoint, or the first one, and the seconds spent on it."""
    if checkpoints.steps():
        found, _ = checkpoints.read_intact()
        return found.fill(initial), found.meta["seconds"]
    folder = directory / CHECKPOINTS_FOLDER
    if damaged := sorted(path.name for path in folder.glob("damaged-*")):
        raise CheckpointError(
            f"{folder} holds damaged checkpoints only ({', '.join(damaged)}); remove this folder "
            "to train from the start"
        )
    return initial, 0.0


def _progress(name: str, done: int, steps: int) -> tqdm:
    """The progress display: a bar, which a file receives twice a minute."""
    often = sys.stdout is not None and sys.stdout.isatty()
    return tqdm(
        total=steps,
        initial=done,
        desc=name,
        unit="step",
        file=sys.stdout,
        mininterval=0.1 if often else 30,
        miniters=None if often else 0,
        disable=not is_first(),
    )


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
