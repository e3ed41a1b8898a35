"""The metrics of a run: JSON lines for programs, TensorBoard for looking."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import SupportsFloat

import tensorboardX

from experiments.files import write_atomically
from experiments.storage import appendable


class MetricsLog:
    """Appends metrics to a file of JSON lines, and to TensorBoard events in the same directory.

    Opening removes lines after `resume_step` and a torn last line, as a killed run leaves them.
    A step may have two lines, one of training and one of validation. TensorBoard's earlier events
    stay on disk, but it ignores those after `resume_step`. On an object store, both files appear by
    `store` and at the end, after a call of `check`, which raises where they must not.
    """

    def __init__(self, path: Path, *, resume_step: int, check: Callable[[], None] = lambda: None):
        self._stack = ExitStack()
        folder, self.store = self._stack.enter_context(appendable(path.parent, path.name, check))
        path = folder / path.name
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _is_at_most(line, resume_step)]
            write_atomically(path, b"".join(kept))
        self._file = path.open("a", encoding="utf-8")
        self._writer = tensorboardX.SummaryWriter(str(folder), purge_step=resume_step + 1)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            self._file.close()
            self._writer.close()

    def log(self, step: int, **scalars: SupportsFloat | None) -> None:
        """Writes the numbers of a step, which are on disk at once; None is left out."""
        values = {name: float(value) for name, value in scalars.items() if value is not None}
        # JSON has no NaN and no Infinity: those are strings.
        row = {k: v if math.isfinite(v) else json.dumps(v) for k, v in values.items()}
        self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


def _is_at_most(line: bytes, step: int) -> bool:
    """Whether a line is whole and of no later step."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError):
        return False
