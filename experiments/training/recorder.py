"""What a run writes while it trains: checkpoints, metrics and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import jax

from experiments.processes import exchange, on_first
from experiments.training.checkpoints import CHECKPOINTS_FOLDER, CheckpointError, Checkpoints
from experiments.training.metrics_log import MetricsLog
from experiments.training.progress import Progress, progress
from experiments.training.run_directory import exclusive_run
from experiments.training.sharded_leaves import (
    collect_shards,
    place,
    unfilled,
    without_spread,
    write_shards,
)
from experiments.training.state import TrainState


class Validation(NamedTuple):
    """What a validation found."""

    value: float
    """What the best checkpoint is chosen by."""
    diagnostics: Mapping[str, float]
    """Further numbers for the metrics log."""


class Recorder:
    """The files of a run. With several processes, all call every method and the first one writes.

    Leaves of the state whose classes are spread over devices are written and read by all.

    Args:
      directory: The run directory.
      steps: Steps of the run.
      name: Of the run, for the progress display.
      meta: JSON types, which every checkpoint stores, with the seconds spent on the run.
      num_classes: Classes of the run, without those that fill up devices.
    """

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        name: str,
        meta: Mapping[str, Any],
        num_classes: int = 0,
    ):
        self._directory = directory
        self._num_classes = num_classes
        self._steps = steps
        self._name = name
        self._meta = meta
        self._stack = ExitStack()
        self._checkpoints: Checkpoints | None = None
        self._log: MetricsLog | None = None
        self._progress: Progress | None = None
        self._failure: OSError | None = None
        self.seconds_before = 0.0
        self._started = time.monotonic()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all calls that trained it.

        Work of a killed call after its last checkpoint is repeated, and counts once.
        """
        return self.seconds_before + time.monotonic() - self._started

    def resume(self, initial: TrainState) -> TrainState:
        """The state of the newest intact checkpoint, or `initial` without one.

        Raises:
          ConfigError: Another process trains in the directory.
          CheckpointError: There are checkpoints, but none is intact or fits.
        """

        def restore() -> tuple[list[Any] | None, float]:
            check = self._stack.enter_context(exclusive_run(self._directory))
            folder = self._directory / CHECKPOINTS_FOLDER
            self._checkpoints = self._stack.enter_context(Checkpoints(folder))
            leaves, seconds, first = None, 0.0, 0
            if self._checkpoints.latest_step() is not None:
                restored = self._checkpoints.restore(unfilled(initial, self._num_classes))
                leaves, first = jax.tree.leaves(restored.state), restored.step
                seconds = restored.meta["seconds"]
            elif damaged := sorted(p.name for p in folder.glob("damaged-*")):
                raise CheckpointError(
                    f"{folder} holds damaged checkpoints only ({', '.join(damaged)}); remove this "
                    "folder to train from the start"
                )
            metrics = self._directory / "metrics.jsonl"
            log = MetricsLog(metrics, resume_step=first, check=check)
            self._log = self._stack.enter_context(log)
            self._progress = self._stack.enter_context(progress(self._steps, first, self._name))
            return leaves, seconds

        leaves, self.seconds_before = on_first(restore)
        if leaves is None:
            return initial
        targets, structure = jax.tree.flatten(initial)
        return jax.tree.unflatten(structure, map(place, leaves, targets))

    def log(self, step: int, **scalars: SupportsFloat | None) -> None:
        """Writes numbers to the metrics file and TensorBoard.

        With several processes, an error is raised by the next `save`, in all of them.
        """
        if self._log is None:
            return
        try:
            self._log.log(step, **scalars)
        except OSError as error:
            if jax.process_count() == 1:
                raise
            self._failure = error

    def show_progress(self, step: int, loss: float, images_per_second: float) -> None:
        """Updates the progress display."""
        if self._progress is not None:
            self._progress.update(step, loss, images_per_second)

    def save(
        self, step: int, state: TrainState, validate: Callable[[TrainState], Validation] | None
    ) -> None:
        """Validates, if `validate` is given, and begins to write a checkpoint.

        All processes validate, each its share of the images. An error is raised in all of them.
        """
        found = None if validate is None else validate(state)
        whole, spread = without_spread(state)
        path = self._write_shards(step, spread) if spread else None

        def save() -> None:
            assert self._checkpoints is not None
            assert self._log is not None
            shards = None if path is None else collect_shards(path)
            accuracy = None
            if found is not None:
                accuracy, diagnostics = found
                self.log(step, validation=accuracy, **diagnostics)
            if self._failure is not None:
                raise self._failure
            # Before the checkpoint: a run that resumes from it needs the lines up to its step.
            self._log.store()
            meta = {**self._meta, "seconds": self.seconds}
            self._checkpoints.save(step, whole, meta=meta, accuracy=accuracy, shards=shards)

        on_first(save)

    def _write_shards(self, step: int, spread: Mapping[str, jax.Array]) -> Path:
        """Writes the shards of a step in all processes; returns the path of its checkpoint.

        An error of one process is raised in all of them.
        """

        def prepare() -> Path:
            assert self._checkpoints is not None
            return self._checkpoints.prepare_shards(step)

        path, failure = on_first(prepare), ""
        try:
            write_shards(path, spread, self._num_classes)
        except OSError as error:
            failure = str(error)
        for rank, message in enumerate(exchange(failure.encode())):
            if message:
                raise CheckpointError(f"process {rank} cannot write to {path}: {message.decode()}")
        return path

    def finish(self) -> None:
        """Blocks all processes until the last checkpoint is on disk."""
        on_first(lambda: self._checkpoints and self._checkpoints.wait())
