"""What a run writes while it trains: checkpoints, metrics and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, SupportsFloat

import jax

from experiments.processes import is_first, on_first
from experiments.training.checkpoints import CHECKPOINTS_FOLDER, Checkpoints
from experiments.training.metrics_log import MetricsLog
from experiments.training.progress import Progress, progress
from experiments.training.run_directory import exclusive_run
from experiments.training.state import TrainState


class Recorder:
    """The files of a run. With several processes, all call every method and the first one writes.

    Args:
      directory: The run directory.
      steps: Steps of the run.
      name: What is trained, for the progress display.
      meta: JSON types that every checkpoint stores.
    """

    def __init__(self, directory: Path, *, steps: int, name: str, meta: Mapping[str, Any]):
        self._directory = Path(directory)
        self._steps = steps
        self._name = name
        self._meta = meta
        self._stack = ExitStack()
        self._checkpoints: Checkpoints | None = None
        self._log: MetricsLog | None = None
        self._progress: Progress | None = None
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
            self._stack.enter_context(exclusive_run(self._directory))
            self._checkpoints = self._stack.enter_context(
                Checkpoints(self._directory / CHECKPOINTS_FOLDER)
            )
            if self._checkpoints.latest_step() is None:
                return None, 0.0
            restored = self._checkpoints.restore(initial)
            return jax.tree.leaves(restored.state), restored.meta["seconds"]

        leaves, self.seconds_before = on_first(restore)
        state = initial
        if leaves is not None:
            state = jax.tree.unflatten(jax.tree.structure(initial), leaves)
        first = int(state.step)
        if is_first():
            path = self._directory / "metrics.jsonl"
            self._log = self._stack.enter_context(MetricsLog(path, resume_step=first))
            self._progress = self._stack.enter_context(progress(self._steps, first, self._name))
        return state

    def log(self, step: int, **scalars: SupportsFloat | None) -> None:
        """Writes numbers to the metrics file and TensorBoard."""
        if self._log is not None:
            self._log.log(step, **scalars)

    def show_progress(self, step: int, loss: float, images_per_second: float) -> None:
        """Updates the progress display."""
        if self._progress is not None:
            self._progress.update(step, loss, images_per_second)

    def save(
        self, step: int, state: TrainState, validate: Callable[[TrainState], float] | None
    ) -> None:
        """Validates and begins to write a checkpoint. An error is raised in all processes.

        Args:
          step: Number of steps done.
          state: Their result.
          validate: Computes what the best checkpoint is chosen by; None without validation.
        """

        def save() -> None:
            assert self._checkpoints is not None
            accuracy = None if validate is None else validate(state)
            if accuracy is not None:
                self.log(step, validation=accuracy)
            meta = {**self._meta, "seconds": self.seconds}
            self._checkpoints.save(step, state, meta=meta, accuracy=accuracy)

        on_first(save)

    def finish(self) -> None:
        """Blocks all processes until the last checkpoint is on disk."""
        on_first(lambda: self._checkpoints and self._checkpoints.wait())
