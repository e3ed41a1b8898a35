"""The metrics of a run: JSON lines for programs, TensorBoard for looking."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import tensorboardX

from experiments.files import write_atomically

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsLog:
    """Appends metrics to a file of JSON lines, and to TensorBoard events in the same directory.

    A run that was killed has written lines beyond the checkpoint it goes on from, and perhaps half
    a line. Opening removes both, so no value stands in the file twice. (A step may have two lines,
    one of the training and one of its validation.) TensorBoard's earlier events stay on disk, but
    are told to be ignored from the step on.

    Args:
      path: The file, one object with `step` a line; its directory must exist.
      resume_step: The step from which the run goes on; 0 for a new run.
    """

    def __init__(self, path: Path, *, resume_step: int):
        self._path = Path(path)
        self._drop_after(resume_step)
        self._file = self._path.open("a", encoding="utf-8")
        # TensorBoard then ignores what an earlier process wrote from this step on.
        folder = str(self._path.parent)
        self._writer = tensorboardX.SummaryWriter(folder, purge_step=resume_step + 1)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, **scalars: SupportsFloat | None) -> None:
        """Write the values of one step; None is left out.

        Args:
          step: Number of training steps done.
          **scalars: Numbers: Python, NumPy, or JAX of shape ().
        """
        values = {name: _number(value) for name, value in scalars.items() if value is not None}
        row = {"step": int(step)} | {name: _encode(value) for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._writer.add_scalar(name, value, int(step))

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._writer.close()

    def _drop_after(self, resume_step: int) -> None:
        if not self._path.exists():
            return
        before = self._path.read_bytes()
        kept = b"".join(
            line + b"\n"
            for line in before.split(b"\n")
            if (row := _parse(line)) is not None and row["step"] <= resume_step
        )
        if kept != before:
            write_atomically(self._path, kept)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, in order; a last line that is being written is left out.

    Raises:
      ValueError: A line before the last is damaged.
    """
    lines = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise ValueError(f"{path}, line {number} is damaged")
    return rows


def _number(value: SupportsFloat) -> float | int:
    if isinstance(value, int | float):
        return value
    array = np.asarray(value)
    if array.shape != ():
        raise TypeError(f"a metric is one number, got an array of shape {array.shape}")
    return array.item() if array.dtype.kind in "biuf" else float(value)


def _encode(value: float | int) -> float | int | str:
    # JSON has no NaN, and a loss that became NaN is the very thing one looks for in this file.
    if math.isfinite(value):
        return value
    return next(k for k, v in _NOT_FINITE.items() if v == value or (v != v and value != value))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}
