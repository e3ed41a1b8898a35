"""The training loop: data in, checkpoints and metrics out."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from experiments.config import Folders, TrainConfig
from experiments.data.augment import seen_shape
from experiments.data.pipeline import RecordImages, batches
from experiments.data.sampling import batch_size_of, draw_batch, index_classes, shard
from experiments.errors import ConfigError, DivergedError
from experiments.evaluation.outputs import build_outputs
from experiments.files import exclusive
from experiments.protocols import Protocol, protocol_of, run_to_dict
from experiments.reporting.metrics import MetricsLog
from experiments.reporting.progress import Progress, progress
from experiments.training import parallel
from experiments.training.checkpoints import CHECKPOINTS_FOLDER, Checkpoints, claim_run_directory
from experiments.training.preflight import check_run
from experiments.training.processes import is_first, on_first
from experiments.training.state import Setup, TrainState, initial_setup
from experiments.training.step import Batch, build_step

ParallelMode = Literal["pmap", "jit"]


_CHECKPOINT_STEPS = 1000
"""A checkpoint is written so often at least, where validations are further apart."""

_AHEAD = 8
"""Steps that wait for the device, at most: of many, several devices of a CPU never finish."""


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM, Ctrl-C) and has saved its state."""

    def __init__(self, told: str, signal_number: int):
        super().__init__(told)
        self.signal_number = signal_number


class Trained(NamedTuple):
    """A finished run."""

    directory: Path
    steps: int
    seconds: float
    """Time spent on the run, over all the calls that trained it. What a killed call did after its
    last checkpoint does not count: it was done again."""


def train(
    config: TrainConfig,
    directory: Path,
    folders: Folders,
    *,
    parallel_mode: ParallelMode = "pmap",
) -> Trained:
    """Trains a run to its end, from its newest checkpoint where there is one.

    Several processes (`jax.process_count() > 1`) all call this with the same arguments and share
    the directory. Each reads its shard of every batch; the first writes the run's files.

    Args:
      config: the run; together with the machine it determines every bit of the result.
      directory: the run directory; gets config.json, metrics.jsonl, TensorBoard events and
        checkpoints/.
      folders: where data lies.
      parallel_mode: data parallelism by `jax.pmap`, or by a jit over sharded global arrays; the
        numbers are the same.

    Raises:
      ConfigError: the configuration does not fit the data or the devices; nothing is written.
      ConfigMismatchError: the directory holds a run of another configuration.
      DivergedError: the loss, its gradient or the features are no longer finite.
      Interrupted: SIGTERM came, or Ctrl-C; the state is saved.
    """
    started = time.monotonic()
    protocol = protocol_of(config)
    counts = check_run(config, folders)
    strategy = config.sampling.strategy
    batch_size = batch_size_of(strategy, config.sampling.batch_size)
    axis_name = parallel.axis_name(parallel_mode)

    seen = protocol.load(config, folders, protocol.splits[0])
    image_shape = seen_shape(seen.images.shape[1:], config.data)
    of_training = counts[protocol.splits[0]]
    setup = initial_setup(
        config,
        protocol.objective,
        image_shape=image_shape,
        counts=of_training,
        axis_name=axis_name,
        with_weights=True,
    )
    step = build_step(
        setup.graphdef,
        setup.objective,
        setup.optimizer,
        config.data,
        key=jax.random.fold_in(jax.random.key(config.seed), 2),
        axis_name=axis_name,
    )
    run = parallel.data_parallel(parallel_mode, step)
    index = index_classes(seen.labels) if seen.labels.ndim == 1 else len(seen.labels)
    epoch = len(seen.labels) // batch_size

    def read(number: int) -> Batch:
        rows = shard(
            draw_batch(index, strategy, batch_size, seed=config.seed, step=number),
            jax.process_index(),
            jax.process_count(),
        )
        return Batch(seen.images[rows], seen.labels[rows])

    after_epoch = setup.objective.after_epoch and jax.jit(setup.objective.after_epoch)
    validate = _validation(config, protocol, folders, setup, counts)

    on_first(lambda: claim_run_directory(directory, run_to_dict(config)))
    meta = {
        "config": run_to_dict(config),
        "counts": of_training.tolist(),
        "image_shape": list(image_shape),
    }
    with (
        _alone(directory),
        Checkpoints(directory / CHECKPOINTS_FOLDER) as checkpoints,
        _stop_requests(checkpoints) as asked_to_stop,
    ):
        state, before = setup.state, 0.0
        if checkpoints.latest_step() is not None:
            restored = checkpoints.restore(state)
            state, before = restored.state, restored.meta.get("seconds", 0.0)
        first = int(state.step)
        replicated = run.replicate(state)
        with _reports(config, directory, first, epoch) as (log, bar):
            clock, images, waiting = time.monotonic(), 0, deque()
            ahead = isinstance(seen.images, RecordImages)
            for number, batch in enumerate(batches(read, first, config.steps, ahead=ahead), first):
                replicated, metrics = run.step(replicated, run.split(batch))
                done, images = number + 1, images + batch_size
                waiting.append(metrics)
                if len(waiting) > _AHEAD:
                    jax.block_until_ready(waiting.popleft())
                if after_epoch is not None and done % epoch == 0:
                    memory, told = after_epoch(run.single(replicated.memory))
                    replicated = replicated._replace(memory=run.replicate(memory))
                    log.log(done, **told)

                last = done == config.steps
                logged = done % config.log_every == 0 or last
                validated = done % config.validate_every == 0 or last
                # Asked once a step: a signal that comes later is met by the next one.
                stopped = asked_to_stop(done)
                saved = validated or stopped is not None or done % _CHECKPOINT_STEPS == 0
                if logged or saved:
                    scalars = {name: float(x) for name, x in run.single(metrics).items()}
                    if logged:
                        now = time.monotonic()
                        rate, clock, images = images / (now - clock), now, 0
                        log.log(done, **scalars, images_per_second=rate)
                        bar.update(done, scalars["loss"], rate)
                    _check_finite(done, scalars)
                if saved:
                    state = run.single(replicated)
                    accuracy = on_first(partial(validate, state)) if validated else None
                    if accuracy is not None:
                        log.log(done, validation_accuracy=accuracy)
                    # The sampler's position is the step: batches are functions of seed and step.
                    seconds = before + time.monotonic() - started
                    checkpoints.save(
                        done, state, meta=meta | {"seconds": seconds}, accuracy=accuracy
                    )
                    clock, images = time.monotonic(), 0
                if stopped is not None:
                    checkpoints.wait()
                    raise Interrupted(
                        f"stopped at step {done} of {config.steps}, which is saved in {directory}; "
                        "the same command goes on from there",
                        stopped,
                    )
    trained = time.monotonic() - started if first < config.steps else 0.0
    return Trained(directory, config.steps, before + trained)


class _Silent:
    """The metrics and the progress of the processes that report nothing."""

    def log(self, step: int, **scalars: object) -> None:
        """Writes nothing."""

    def update(self, step: int, loss: float | None, images_per_second: float | None) -> None:
        """Shows nothing."""


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keeps a second command out of the run's directory while this one trains in it."""
    with ExitStack() as stack:

        def lock() -> None:
            try:
                stack.enter_context(exclusive(directory / ".lock", wait=False))
            except BlockingIOError:
                raise ConfigError(
                    f"another process is training in {directory}; wait for it, or stop it first"
                ) from None

        on_first(lock)
        yield


@contextmanager
def _reports(
    config: TrainConfig, directory: Path, first: int, epoch: int
) -> Iterator[tuple[MetricsLog | _Silent, Progress]]:
    """The metrics file and the progress; the first of several processes alone has them."""
    if not is_first():
        yield _Silent(), _Silent()
        return
    if config.optimizer.decay_steps and epoch:
        print(_in_epochs(config, epoch))
    with (
        MetricsLog(directory / "metrics.jsonl", resume_step=first) as log,
        progress(config.steps, first, config.loss.name) as bar,
    ):
        yield log, bar


def _in_epochs(config: TrainConfig, epoch: int) -> str:
    """The schedule as papers tell it: steps that fit a data set do not fit a subset of it."""
    drops = ", ".join(f"{step / epoch:.4g}" for step in config.optimizer.decay_steps)
    return (
        f"An epoch is {epoch:,} steps: the run has {config.steps / epoch:.4g} epochs, and its "
        f"learning rate is divided by ten after {drops}."
    )


def _check_finite(step: int, scalars: dict[str, float]) -> None:
    # The loss first: it tells more than the norm of a gradient.
    for name, value in sorted(scalars.items(), key=lambda item: item[0] != "loss"):
        if not math.isfinite(value):
            raise DivergedError(step, f"{name} is {value}")


def _validation(
    config: TrainConfig,
    protocol: Protocol,
    folders: Folders,
    setup: Setup,
    counts: Mapping[str, np.ndarray],
) -> Callable[[TrainState], float | None]:
    """What the best checkpoint is chosen by; None where there are no images for validation."""
    trained_on, held_out, _ = protocol.splits
    if held_out not in counts:
        return lambda state: None
    images = protocol.load(config, folders, held_out)
    outputs = build_outputs(setup, config.data, counts[trained_on])
    return lambda state: protocol.validate(config, outputs(state, images))


@contextmanager
def _stop_requests(checkpoints: Checkpoints) -> Iterator[Callable[[int], int | None]]:
    """The signal that asks to stop after a step, of a function that every process calls each step.

    SIGTERM and Ctrl-C ask for it while the context lasts (in the main thread of a process); a
    second Ctrl-C interrupts at once. JAX itself tells several processes of a SIGTERM to any.
    """
    if jax.process_count() > 1:
        yield lambda step: signal.SIGTERM if checkpoints.asked_to_stop(step) else None
        return
    received: list[int] = []
    previous: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, previous[signal.SIGINT])
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            # A shell has the jobs in its background ignore Ctrl-C.
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN:
                previous[number] = handler
                signal.signal(number, stop)
    try:
        yield lambda step: received[0] if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
