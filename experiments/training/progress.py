"""How far a run is: a live bar on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import rich.console
import rich.progress

_SECONDS_BETWEEN_LINES = 30.0
_LINES = 10


class Progress(Protocol):
    """What `progress` gives: something to tell how far the run is."""

    def update(self, step: int, loss: float | None, images_per_second: float | None) -> None:
        """Report the number of steps done, the loss there, and the speed."""
        ...


@contextmanager
def progress(total: int, initial: int = 0, description: str = "training") -> Iterator[Progress]:
    """Show the progress of a run while the context lasts.

    On a terminal this is a bar with loss, images per second and time left. Otherwise it is a line
    for every tenth of the run, or every 30 seconds, without control characters.

    Args:
      total: Steps of the whole run.
      initial: Steps done before: of a run that goes on.
      description: What is running.

    Yields:
      An object whose `update(step, loss, images_per_second)` reports the steps done.
    """
    console = rich.console.Console()
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        yield _Lines(total, initial, description)
        return
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[figures]}", markup=False),
        rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    )
    with bar:
        yield _Bar(bar, bar.add_task(description, total=total, completed=initial, figures=""))


class _Bar:
    def __init__(self, bar: rich.progress.Progress, task: rich.progress.TaskID):
        self._bar = bar
        self._task = task

    def update(self, step: int, loss: float | None, images_per_second: float | None) -> None:
        figures = "  ".join(_figures(loss, images_per_second))
        self._bar.update(self._task, completed=step, figures=figures)


class _Lines:
    def __init__(self, total: int, initial: int, description: str):
        self._total = total
        self._initial = initial
        self._description = description
        self._started = self._printed = time.monotonic()
        self._tenth = initial * _LINES // max(total, 1)

    def update(self, step: int, loss: float | None, images_per_second: float | None) -> None:
        now = time.monotonic()
        tenth = step * _LINES // max(self._total, 1)
        if tenth <= self._tenth and now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._tenth, self._printed = tenth, now
        parts = [f"{step}/{self._total} steps ({100 * step // max(self._total, 1)} %)"]
        parts += _figures(loss, images_per_second)
        done, elapsed = step - self._initial, now - self._started
        if step >= self._total:
            parts.append(f"took {_duration(elapsed)}")
        elif done > 0:
            parts.append(f"{_duration(elapsed / done * (self._total - step))} left")
        print(f"{self._description}: " + ", ".join(parts), flush=True)


def _figures(loss: float | None, images_per_second: float | None) -> list[str]:
    parts = [] if loss is None else [f"loss {loss:.4g}"]
    return parts if images_per_second is None else [*parts, f"{images_per_second:,.0f} images/s"]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
