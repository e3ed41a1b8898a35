"""The directory of a run: its configuration, its lock, and the metrics of training.

One configuration owns it, and one command at a time trains in it.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsFloat

from flax.traverse_util import flatten_dict
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.summary import scalar

from experiments.core.config import CONFIG_FILE, differences
from experiments.core.errors import ExperimentError
from experiments.core.storage import (
    check_json,
    exclusive,
    is_remote,
    load_json,
    regular,
    write_atomically,
    write_json,
    writing,
)
from experiments.training.checkpoints import some_lines

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # These numbers are strings there.


class ConfigMismatchError(ExperimentError):
    """A directory of another run, or one whose configuration cannot be read."""


@contextmanager
def claim_run_directory(
    directory: Path, config: Mapping[str, Any], *, fixed_steps: str = ""
) -> Iterator[None]:
    """Makes a directory the home of a run, and keeps other commands from training in it meanwhile.

    Where the run had fewer steps, the report of those is renamed. Arguments are those of
    `check_run_directory`. With several processes, enter this in the first one only.
    """
    directory.mkdir(parents=True, exist_ok=True)
    busy = f"another process is training in {directory}; wait for it, or stop it first"
    with exclusive(directory / ".lock", busy=busy):
        there = check_run_directory(directory, config, fixed_steps=fixed_steps)
        if there is None or there["steps"] != config["steps"]:
            # The JSON first: it marks a run as finished.
            for name in ("report.json", "report.md", "episodes.npz"):
                if there is not None and (path := directory / name).exists():
                    path.rename(directory / f"{path.stem}-{there['steps']}-steps{path.suffix}")
            write_json(directory / CONFIG_FILE, config)
        yield


def check_run_directory(
    directory: Path, config: Mapping[str, Any], *, fixed_steps: str = ""
) -> dict[str, Any] | None:
    """The configuration of the run in a directory, which goes on; None if the directory is new.

    The run there may have fewer steps, unless `fixed_steps` says why it cannot go on with more.
    Raises a `ConfigMismatchError` if its configuration differs otherwise or is damaged, or if the
    directory holds other files.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigMismatchError(f"{directory} is a file; choose another directory")
    # Listed once: another command may be writing.
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    if CONFIG_FILE not in names:
        if others := [name for name in names if not name.startswith(".")]:
            raise ConfigMismatchError(
                f"{directory} is not a run directory: it holds {', '.join(others[:5])} but no "
                f"{CONFIG_FILE}. Choose another directory."
            )
        return None
    there, here = read_config(directory), json.loads(json.dumps(config))
    lines = differences(*(flatten_dict(run, sep=".") for run in (there, here)))
    steps = there.get("steps")
    more = type(steps) is int and steps < here["steps"] and there | {"steps": here["steps"]} == here
    if lines and (fixed_steps or not more):
        why = f" It cannot go on with more steps: {fixed_steps}." if more else ""
        raise ConfigMismatchError(
            f"{directory} holds a run of another configuration:{some_lines(lines, most=100)}"
            f"\n(left: the run there, right: this one).{why} Choose another directory, and "
            f"add --model.weights {directory} to start from its weights; or remove this one."
        )
    return there


def read_config(directory: Path) -> dict[str, Any]:
    """The configuration of the run in a directory, or a `ConfigMismatchError`."""
    path = directory / CONFIG_FILE
    try:
        config = load_json(path)
        check_json(config, {})
    except FileNotFoundError as error:
        raise ConfigMismatchError(
            f"{directory} is not a run directory: it has no {CONFIG_FILE}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigMismatchError(
            f"{path} is damaged ({error}). Repair it, or choose another directory."
        ) from error
    return config


class MetricsLog(ExitStack):
    """Appends metrics to a file of JSON lines, and to TensorBoard events in the same directory.

    Opening removes lines after `resume_step`, and an incomplete last line of a killed run.
    TensorBoard hides earlier events after `resume_step`. An object store gets both files by `store`
    and at the end: nothing can be appended there.
    """

    def __init__(self, directory: Path, *, resume_step: int):
        super().__init__()
        self._directory = self._folder = directory
        if is_remote(directory):
            temporary = tempfile.TemporaryDirectory(prefix="jaxloss-")
            self._folder = Path(self.enter_context(temporary))
        if (directory / METRICS_FILE).exists():
            rows = read_metrics(directory / METRICS_FILE)
            kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= resume_step]
            write_atomically(self._folder / METRICS_FILE, "".join(kept))
        self._file = (self._folder / METRICS_FILE).open("a", encoding="utf-8")
        # Not a `SummaryWriter`: its thread would die of a full disk, and its queue fill up.
        self._events = EventsWriter(str(self._folder / "events"))
        purge = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(step=resume_step + 1, session_log=purge))
        self.callback(self._close)

    def log(self, step: int, **scalars: SupportsFloat | None) -> None:
        """Writes the numbers of a step to both files; None is left out."""
        values = {name: float(value) for name, value in scalars.items() if value is not None}
        # JSON has no NaN and no Infinity: those are strings.
        row = {k: v if math.isfinite(v) else json.dumps(v) for k, v in values.items()}
        with writing(self._folder / METRICS_FILE):
            self._file.write(json.dumps({"step": step, **row}) + "\n")
            self._file.flush()
            for name, value in values.items():
                event = Event(step=step, wall_time=time.time(), summary=scalar(name, value))
                self._events.write_event(event)
            self._events.flush()

    def store(self) -> None:
        """Uploads both files if the directory is on an object store."""
        if self._folder != self._directory:
            for file in self._folder.iterdir():
                (self._directory / file.name).write_bytes(file.read_bytes())

    def _close(self) -> None:
        with writing(self._folder):
            self._file.close()
            self._events.close()
        self.store()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a cut one, as by a kill, is left out with a warning."""
    rows, lines = [], regular(path).read_bytes().splitlines()
    for line in lines:
        with suppress(ValueError, RecursionError):
            check_json(row := json.loads(line), {"step": int})
            for name, value in row.items():
                check_json(value, str if value in _NOT_FINITE else float, name)
            rows.append(row)
    if cut := len(lines) - len(rows):
        logger.warning("%s: %d of %d lines are cut and left out", path, cut, len(lines))
    return rows
