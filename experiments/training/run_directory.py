"""The directory of a run: its configuration, its lock, and what training writes into it.

One configuration owns it, and one command at a time trains in it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from flax.traverse_util import flatten_dict
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.summary import scalar
from tqdm import tqdm

from experiments.core.config import CONFIG_FILE, differences
from experiments.core.errors import ExperimentError
from experiments.core.processes import is_first
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
from experiments.training.checkpoints import (
    CHECKPOINTS_FOLDER,
    CheckpointError,
    Checkpoints,
    Restored,
    some_lines,
)
from experiments.training.step import TrainState

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_NAME = re.compile(r"[\w@. -]{1,80}", re.ASCII)
"""Names of the numbers in it."""
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""These numbers are strings there."""

WEIGHTS_META: Any = {
    "config": {"data": {"name": str}},
    **{"origins?": [str], "classes?": str, "classifier?": bool},
}
"""What a run that takes its weights from a checkpoint needs of it, as kinds of `check_json`."""

_META: Any = {
    **WEIGHTS_META,
    "class_counts": [int],
    "steps_per_epoch": int,
    "code": {"version": str, "commit": str | None},
    "seconds": float,
}
"""What every checkpoint of a run stores of it, as kinds of `check_json`."""

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_FLUSHES = 120.0
_LINE = (
    "{desc}: {n_fmt}/{total_fmt} steps ({percentage:.0f} %){postfix}, "
    "{elapsed} elapsed, {remaining} left"
)


class ConfigMismatchError(ExperimentError):
    """A directory of another run, or one whose configuration cannot be read."""


def claim_run_directory(
    directory: Path, config: Mapping[str, Any], *, fixed_steps: str = ""
) -> None:
    """Makes a directory the home of a run; arguments and errors as in `check_run_directory`.

    Where the run had fewer steps, the report of those is renamed. The lock of the directory is held
    meanwhile, and not until `Recorder.resume` takes it, when data and network are ready.
    """
    there = check_run_directory(directory, config, fixed_steps=fixed_steps)
    if there is not None and there["steps"] == config["steps"]:
        return
    directory.mkdir(parents=True, exist_ok=True)
    with exclusive_run(directory):
        # Another command may have claimed it since.
        there = check_run_directory(directory, config, fixed_steps=fixed_steps)
        if there is not None and there["steps"] != config["steps"]:
            # The JSON first: it marks a run as finished.
            for name in ("report.json", "report.md", "episodes.npz"):
                if (path := directory / name).exists():
                    path.rename(directory / f"{path.stem}-{there['steps']}-steps{path.suffix}")
        write_json(directory / CONFIG_FILE, config)


def check_run_directory(
    directory: Path, config: Mapping[str, Any], *, fixed_steps: str = ""
) -> dict[str, Any] | None:
    """The configuration of the run in a directory, which goes on; None if the directory is new.

    It may differ in one thing: the run there may have fewer steps, unless `fixed_steps` says why it
    cannot go on with more. Raises a `ConfigMismatchError` if the directory belongs to another
    configuration (the message lists the differences), its configuration is damaged, or it holds
    other files.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigMismatchError(f"{directory} is a file; choose another directory")
    # Listed once: another command may be writing.
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    if CONFIG_FILE in names:
        there, here = read_config(directory), json.loads(json.dumps(config))
        lines = differences(*(flatten_dict(run, sep=".") for run in (there, here)))
        steps = there.get("steps")
        more = len(lines) == 1 and type(steps) is int and 0 < steps < here.get("steps", 0)
        if lines and not (more and not fixed_steps):
            why = f" It cannot go on with more steps: {fixed_steps}." if more else ""
            raise ConfigMismatchError(
                f"{directory} holds a run of another configuration:{some_lines(lines, most=100)}"
                + f"\n(left: the run there, right: this one).{why} Choose another directory, and "
                f"add --model.weights {directory} to start from its weights; or remove this one."
            )
        return there
    if others := [name for name in names if not name.startswith(".")]:
        shown = ", ".join(others[:5]) + (", …" if len(others) > 5 else "")
        raise ConfigMismatchError(
            f"{directory} is not a run directory: it holds {shown} but no {CONFIG_FILE}. "
            "Choose another directory."
        )
    return None


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


def read_meta(checkpoints: Checkpoints, step: int, kind: Any = _META) -> dict[str, Any]:
    """What training has stored with a checkpoint; a `DamagedCheckpointError` if that lacks a part.

    The configuration is not checked: see `config_from_dict`.
    """
    meta = checkpoints.meta(step)
    try:
        check_json(meta, kind, "meta")
        if kind is _META:
            counts = meta["class_counts"]
            if not (counts and 0 <= min(counts) <= max(counts) < 2**40 and sum(counts)):
                raise ValueError("meta.class_counts are not numbers of images")
            if meta["steps_per_epoch"] < 1:
                raise ValueError("meta.steps_per_epoch is below 1")
    except ValueError as error:
        raise checkpoints.damaged(step, str(error)) from None
    return meta


def exclusive_run(directory: Path) -> AbstractContextManager[None]:
    """Keeps other commands from training in a directory: they raise a `ConfigError`.

    With several processes, enter it in the first one only. On an object store, it does nothing.
    """
    busy = f"another process is training in {directory}; wait for it, or stop it first"
    return exclusive(directory / ".lock", busy=busy)


class Validation(NamedTuple):
    """What a validation found."""

    value: float
    """What the best checkpoint is chosen by."""
    diagnostics: Mapping[str, float]
    """Further numbers for the metrics log."""


class Recorder(ExitStack):
    """The files of a run, which `resume` opens. With several processes, all call every method.

    All of them read and write checkpoints; the first one alone writes metrics and progress, which
    shows `name`. Every checkpoint stores `meta`, JSON types, with the seconds spent on the run.
    """

    checkpoints: Checkpoints
    seconds_before = 0.0
    _log: MetricsLog | None = None
    _progress: Progress | None = None

    def __init__(self, directory: Path, *, steps: int, name: str, meta: Mapping[str, Any]):
        super().__init__()
        self._directory, self._steps, self._name, self._meta = directory, steps, name, meta
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all calls that trained it.

        Work of a killed call after its last checkpoint is repeated, and counts once.
        """
        return self.seconds_before + time.monotonic() - self._started

    def resume(self, initial: TrainState) -> TrainState:
        """The state of the newest intact checkpoint, or `initial` without one.

        Takes the lock of the directory, and opens what the other methods write.
        """
        if is_first():
            self.enter_context(exclusive_run(self._directory))
        folder = self._directory / CHECKPOINTS_FOLDER
        checkpoints = self.checkpoints = self.enter_context(Checkpoints(folder))
        state, first = initial, 0
        if checkpoints.steps():

            def read(step: int) -> Restored:
                read_meta(checkpoints, step, {"seconds": float})
                return checkpoints.restore(initial, step)

            restored, _ = checkpoints.read_intact(read)
            state, first = restored.state, restored.step
            self.seconds_before = restored.meta["seconds"]
        elif damaged := sorted(path.name for path in folder.glob("damaged-*")):
            raise CheckpointError(
                f"{folder} holds damaged checkpoints only ({', '.join(damaged)}); remove this "
                "folder to train from the start"
            )
        if is_first():
            self._log = self.enter_context(MetricsLog(self._directory, resume_step=first))
            if first < self._steps:
                print(f"{self._name}: compiling …", flush=True)
        return state

    def log(self, step: int, **scalars: SupportsFloat | None) -> None:
        """Writes numbers to the metrics file and TensorBoard."""
        if self._log is not None:
            self._log.log(step, **scalars)

    def compiled(self, step: int) -> None:
        """Begins the progress display, after the first step of this call."""
        if is_first():
            self._progress = Progress(self._steps, step, self._name)
            self.callback(self._progress.close)

    def show_progress(self, step: int, loss: float, images_per_second: float | None) -> None:
        """Updates the progress display."""
        if self._progress is not None:
            self._progress.update(step, loss, images_per_second)

    def save(
        self, step: int, state: TrainState, validate: Callable[[TrainState], Validation] | None
    ) -> None:
        """Validates, if `validate` is given, and begins to write a checkpoint.

        All processes validate, each its share of the images.
        """
        value = None
        if validate is not None:
            value, diagnostics = validate(state)
            self.log(step, validation=value, **diagnostics)
        if self._log is not None:
            # Before the checkpoint: a run that resumes from it needs the lines up to its step.
            self._log.store()
        self.checkpoints.save(
            step, state, meta={**self._meta, "seconds": self.seconds}, validation=value
        )


class MetricsLog:
    """Appends metrics to a file of JSON lines, and to TensorBoard events in the same directory.

    Opening removes lines after `resume_step`, and an incomplete last line of a killed run.
    A step may have two lines, one of training and one of validation. Events of earlier calls stay
    on disk, and TensorBoard hides those after `resume_step`. An object store gets both files by
    `store` and at the end: nothing can be appended there.
    """

    def __init__(self, directory: Path, *, resume_step: int):
        self._stack, self._directory, self._folder = ExitStack(), directory, directory
        if is_remote(directory):
            temporary = tempfile.TemporaryDirectory(prefix="jaxloss-")
            self._folder = Path(self._stack.enter_context(temporary))
        if (directory / METRICS_FILE).exists():
            rows = read_metrics(directory / METRICS_FILE)
            kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= resume_step]
            write_atomically(self._folder / METRICS_FILE, "".join(kept))
        self._file = (self._folder / METRICS_FILE).open("a", encoding="utf-8")
        # Not a `SummaryWriter`: its thread would die of a full disk, and its queue fill up.
        self._events = EventsWriter(str(self._folder / "events"))
        self._flushed = time.monotonic()
        purge = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(step=resume_step + 1, session_log=purge))

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack, writing(self._folder):
            self.store()
            self._file.close()
            self._events.close()

    def log(self, step: int, **scalars: SupportsFloat | None) -> None:
        """Writes the numbers of a step; None is left out.

        Those of the metrics file are on disk at once, TensorBoard's events every two minutes and by
        `store`.
        """
        values = {name: float(value) for name, value in scalars.items() if value is not None}
        # JSON has no NaN and no Infinity: those are strings.
        row = {k: v if math.isfinite(v) else json.dumps(v) for k, v in values.items()}
        with writing(self._folder / METRICS_FILE):
            self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
            self._file.flush()
            for name, value in values.items():
                event = Event(step=step, wall_time=time.time(), summary=scalar(name, value))
                self._events.write_event(event)
            if time.monotonic() - self._flushed > _SECONDS_BETWEEN_FLUSHES:
                self._events.flush()
                self._flushed = time.monotonic()

    def store(self) -> None:
        """Writes pending events, and uploads both files if the directory is on an object store."""
        with writing(self._folder):
            self._events.flush()
        if self._folder != self._directory:
            for file in self._folder.iterdir():
                (self._directory / file.name).write_bytes(file.read_bytes())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a cut one, as by a kill, is left out with a warning."""
    rows, cut = [], []
    for number, line in enumerate(regular(path).read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            check_json(row, {"step": int})
            for name, value in row.items():
                check_json(value, str if value in _NOT_FINITE else float, name)
            if not (all(map(_NAME.fullmatch, row)) and 0 <= row["step"] < 2**53):
                raise ValueError("the name of a number, or the step")
            rows.append(row)
        except (ValueError, RecursionError):
            cut.append(number)
    if cut:
        more = f" and {len(cut) - 1} more lines are" if cut[1:] else " is"
        logger.warning("%s: line %d%s cut and left out", path, cut[0], more)
    return rows


class Progress:
    """Shows the steps done of `total`; a resumed run has done `initial` of them before.

    On a terminal, this is a bar with loss, images per second and time left. Otherwise it is a line
    for every tenth of the run, or every 30 seconds, without control characters.
    """

    def __init__(self, total: int, initial: int, description: str):
        self._terminal = sys.stdout is not None and sys.stdout.isatty()
        # Of lines, tqdm has the text alone, with the time left by the mean rate.
        lines: Any = {"bar_format": _LINE, "smoothing": 0, "mininterval": math.inf}
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=description,
            unit=" steps",
            file=sys.stdout,
            delay=1e-6,  # Nothing is shown before `update`.
            **({} if self._terminal else lines),
        )
        # The last of these steps is still to be shown: it may be the last of the run.
        self._tenth, self._printed = 10 * max(initial - 1, 0) // total, time.monotonic()
        self.close = self._bar.close

    def update(self, step: int, loss: float, images_per_second: float | None) -> None:
        """Reports the number of steps done, the loss there, and the speed, if it is known."""
        figures = f"loss {loss:.4g}"
        figures += "" if images_per_second is None else f", {images_per_second:,.0f} images/s"
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(step - self._bar.n)
        now, tenth = time.monotonic(), 10 * step // self._bar.total
        passed = tenth > self._tenth or now - self._printed >= _SECONDS_BETWEEN_LINES
        if passed and not self._terminal:
            self._tenth, self._printed = tenth, now
            print(self._bar, flush=True)
