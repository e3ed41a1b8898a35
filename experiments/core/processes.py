"""Several processes that train one run, by `jax.distributed`. All of them see its directory.

JAX notices a process that has ended, and ends the others. Whoever started them, such as a scheduler
or a loop in a shell, starts them again, and they continue from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.core.errors import ConfigError, reason_of

T = TypeVar("T")

# A process that JAX has not heard of for so long counts as dead, and the others end.
_HEARTBEAT_SECONDS = 15

_AGAIN = "Run the same command in all processes to continue from the last checkpoint."

_steps = itertools.count()
"""Numbers the steps of all runs of this process. All processes count alike: JAX lets them stop at
the first number that none has reached, and a number that is never called would be missed."""


class Interrupted(Exception):
    """The run was stopped by a signal and has saved its state; the message says how to continue."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


def run_together(action: Callable[[], int]) -> int:
    """Joins the processes of a run, and returns the exit status of `action`.

    Where `action` raises, the error is printed and this process ends at once, and JAX ends the
    others: at their next exchange of numbers, or when this process's heartbeats are missing.
    """
    initialize()
    try:
        return action()
    except KeyboardInterrupt:
        status, message = 128 + signal.SIGINT, f"stopped. {_AGAIN}"
    except Exception as error:
        status, message = 2, f"error: {reason_of(error)}"
        if not reason_of(error):  # Such as another process that has ended.
            traceback.print_exception(error)
            status, message = 1, _AGAIN
    print(message, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # Of a full disk.
        sys.stdout.flush()
    if is_first():
        time.sleep(2)  # Its end ends the others: those with an error of their own print it first.
    os._exit(status)  # JAX's shutdown would wait for the others.


def initialize() -> None:
    """Joins the processes of a run, as the environment or a cluster that JAX knows describes them.

    Call it before anything uses a device.
    """
    count, rank = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
    address = os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    # By default, all networks of the machine could connect.
    bind = address if address.startswith(("127.", "localhost:", "[::1]:")) else None
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # JAX waits outside of Python.
    try:
        jax.distributed.initialize(
            num_processes=None if count is None else int(count),
            process_id=None if rank is None else int(rank),
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError, IndexError) as error:  # The last for a missing port.
        raise ConfigError(
            f"the processes cannot be joined ({error}); --distributed needs a cluster that JAX "
            "knows, or JAX_COORDINATOR_ADDRESS (HOST:PORT, a free port), JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID in the environment"
        ) from error
    finally:
        signal.signal(signal.SIGINT, handler)


def is_first() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def on_first(action: Callable[[], T]) -> T | None:
    """Runs `action` in the first process, whose result is returned there; the others wait for it.

    Every process must call this.
    """
    result = action() if is_first() else None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("on_first")
    return result


def all_true(value: bool) -> bool:
    """Whether a value is true in all processes. Every process must call this."""
    return bool(np.all(multihost_utils.process_allgather(np.array(value))))


def agree(what: str, values: Mapping[str, Any]) -> None:
    """Checks that all processes have the same values, JSON types by name; `what` names them.

    Every process must call this. If one of them has other values, all raise a `ConfigError`.
    """
    digest = np.uint32(zlib.crc32(json.dumps(values, sort_keys=True).encode()))
    try:
        multihost_utils.assert_equal(digest)
    except AssertionError:
        lines = "\n".join(f"  {name}: {value}" for name, value in sorted(values.items()))
        raise ConfigError(
            f"the processes differ in {what}; start the same command in every process. "
            f"Process {jax.process_index()} has:\n{lines}"
        ) from None


def check_shared(directory: Path) -> None:
    """Checks that all processes see one directory, and makes it. Every process must call this."""
    if jax.process_count() == 1:
        return
    mark = directory / f".shared-{from_first(np.array(time.time_ns() % 2**31, np.int32))}"
    on_first(lambda: (directory.mkdir(parents=True, exist_ok=True), mark.write_text("")))
    all_seen = all_true(mark.exists())
    on_first(mark.unlink)
    if not all_seen:
        raise ConfigError(f"{directory} must be one directory that all processes see")


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """The rows [n, d] of all processes, n of each, in order. Every process must call this."""
    return np.asarray(multihost_utils.process_allgather(rows, tiled=True))


def from_first(array: np.ndarray) -> np.ndarray:
    """The array of the first process; all have one of its shape. Every process must call this."""
    return np.asarray(multihost_utils.broadcast_one_to_all(array))


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], int | None]]:
    """Catches SIGTERM and Ctrl-C, the second of which interrupts at once.

    Yields a function that every process calls once per step: the signal received so far, or None.
    Several processes stop after the same step, whichever receives the signal: JAX distributes a
    SIGTERM, and Ctrl-C becomes one.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}
    several = jax.process_count() > 1

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, previous[signal.SIGINT])
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")
            if several:
                os.kill(os.getpid(), signal.SIGTERM)

    def stop_request() -> int | None:
        if several:
            stops = multihost_utils.reached_preemption_sync_point(next(_steps))
            return signal.SIGTERM if stops else None
        return received[0] if received else None

    if threading.current_thread() is threading.main_thread():
        # With several processes, a handler of SIGTERM would replace JAX's.
        for number in (signal.SIGINT,) if several else (signal.SIGTERM, signal.SIGINT):
            # Shells let background jobs ignore Ctrl-C.
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN:
                previous[number] = handler
                signal.signal(number, stop)
    try:
        yield stop_request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def watchdog(minutes: float) -> Iterator[Callable[[], None]]:
    """Ends a process that is stuck, with status 1 and the stacks of all its threads on stderr.

    `minutes` are the longest time to the first step, or between two steps; 0: no limit. Yields a
    function to be called after every step.
    """

    def step_done() -> None:
        if minutes > 0:
            faulthandler.dump_traceback_later(60 * minutes, exit=True, file=sys.__stderr__ or 2)

    step_done()
    try:
        yield step_done
    finally:
        faulthandler.cancel_dump_traceback_later()
