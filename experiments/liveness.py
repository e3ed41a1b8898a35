"""How several processes end together, each with a sentence, and what notices a stuck one.

A process that ends by an error tells the others, which end as well. A process that is killed tells
nobody: the next collective of the others fails, or JAX misses its heartbeats and aborts them. Where
JAX does not succeed in that, a thread of this module ends the process, and where Python's threads
stand still, the operating system does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import jax

from experiments import processes

AGAIN = 75
"""Exit status (EX_TEMPFAIL) where nothing needs to be mended: the same command continues."""

_FOLDER = "end"
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 2.0
"""For an error that all processes have: each shall end by its own."""
_SILENT_SECONDS = 10.0 + processes.HEARTBEAT_SECONDS
"""How long the first process, which hosts the messages, may not answer: JAX aborts us before."""
_FROZEN_SECONDS = 30
"""Without a sign of life of Python's threads for so long, the operating system ends the process.

JAX aborts a process in a thread of its own, which waits for Python's lock to print why: whatever
holds that lock for ever would keep the process for ever. The time of a pause counts.
"""
_FAREWELL_SECONDS = 5.0
"""How long the first process, which hosts the messages, stays for the others to read its last."""

_NOTICE_SECONDS = 15.0
"""Until then, it is normal that other processes have not started."""

_WAITING = "waiting for the other processes of the run to start"
_CONTINUE = "Run the same command in all processes to continue from the last checkpoint."
_BROKEN = (
    "error: the connection to another process of the run broke, so that process or its machine has "
    f"ended. {_CONTINUE}"
)
_NOT_JOINED = (
    "error: the processes of the run did not join: the first one cannot be reached at "
    "JAX_COORDINATOR_ADDRESS, or not all JAX_NUM_PROCESSES of them were started."
)


class Outcome(NamedTuple):
    """How a process ends."""

    status: int
    """Its exit status."""
    sentence: str = ""
    """What it prints at the end. Where it is empty, all processes end so by themselves."""
    stuck: bool = False
    """Whether the stacks of all threads of all processes show why."""


_ending = threading.Event()
"""Set as soon as this process ends."""
_reason = threading.Lock()
"""Held by the thread that prints why: a second reason would confuse."""
_status = [AGAIN]
"""The exit status, even if JAX aborts the process at its very end."""


def run_together(action: Callable[[], Outcome]) -> Outcome:
    """Joins the processes of a run, and runs `action` in such a way that all of them end together.

    Where it does not end well in one process, all end within half a minute, each with a sentence.
    This then does not return, but ends the process with the status.

    Raises:
      ConfigError: See `processes.initialize`.
    """
    waiting = threading.Timer(_NOTICE_SECONDS, print, [_WAITING], {"file": sys.stderr})
    waiting.start()
    try:
        with _abort_with(_NOT_JOINED):
            processes.initialize()
    finally:
        waiting.cancel()
    with _abort_with(_BROKEN):
        try:
            processes.divide_cpus()
            alone = jax.process_count() == 1  # Starts the devices: each process awaits the others.
        except jax.errors.JaxRuntimeError:
            print(_BROKEN, file=sys.stderr, flush=True)
            os._exit(AGAIN)
    if alone:
        return action()
    with _abort_with(_BROKEN), _killed_if_frozen():
        try:
            outcome = _outcome(action)
            if outcome.sentence:
                end(outcome)
        except KeyboardInterrupt:  # Of somebody who has no patience with the end.
            os._exit(128 + signal.SIGINT)
        jax.distributed.shutdown()
    return outcome


def _outcome(action: Callable[[], Outcome]) -> Outcome:
    """How this process ends. Without a sentence, all others have ended in the same way."""
    silent = [0.0]
    watches = [
        threading.Thread(target=watch, args=(silent,), daemon=True)
        for watch in (_watch_others, _watch_silence)
    ]
    for watch in watches:
        watch.start()
    try:
        outcome = action()
        if outcome.sentence:
            return outcome
        _wait_for_others(outcome)
    except KeyboardInterrupt:
        return Outcome(128 + signal.SIGINT, "stopped while waiting for other processes")
    except Exception as error:
        return _unexpected(error)
    _ending.set()
    for watch in watches:
        watch.join()
    return outcome


def end(outcome: Outcome, *, tell: bool = True) -> NoReturn:
    """Prints the sentence, tells the other processes, and ends this one."""
    _reason.acquire()  # Never released: a second thread waits here for the end.
    _status[0] = outcome.status
    _ending.set()
    print(outcome.sentence, file=sys.stderr, flush=True)
    if sys.stdout is not None:  # In the first process: the others print nothing.
        sys.stdout.flush()
    if tell and jax.distributed.is_initialized() and jax.process_count() > 1:
        farewell = threading.Thread(target=_farewell, args=(outcome,), daemon=True)
        farewell.start()  # The first process may not answer any more.
        farewell.join(2 * _FAREWELL_SECONDS)
    os._exit(outcome.status)  # Shutting JAX down would wait for the others.


@contextmanager
def watchdog(minutes: float) -> Iterator[Callable[[], None]]:
    """Ends a run that is stuck, with the stacks of all threads on stderr.

    With several processes, all of them print their stacks.

    Args:
      minutes: The longest time from the start to the first step, or between two steps; 0: no limit.
        Time in which the process was paused does not count.

    Yields:
      A function to be called after every step.
    """
    waited = [0.0]

    def step_done() -> None:
        waited[0] = 0.0

    if minutes <= 0:
        yield step_done
        return
    left = threading.Event()

    def watch() -> None:
        limit = 60 * minutes
        interval = min(limit / 4, 5.0)
        while not left.wait(interval):
            # Not by the clock: a process that was paused has not been stuck.
            waited[0] += interval
            if waited[0] > limit:
                _print_stacks()
                of_all = jax.process_count() > 1
                end(
                    Outcome(
                        AGAIN,
                        f"error: no step for {minutes:g} minutes (--stuck-after); the stacks above "
                        "show what the run waits for. "
                        + (_CONTINUE if of_all else "Run the same command to continue."),
                        stuck=True,
                    )
                )

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield step_done
    finally:
        left.set()


def _farewell(outcome: Outcome) -> None:
    """Tells the others. The first process stays until they have read it."""
    with suppress(jax.errors.JaxRuntimeError):  # The first process, and with it the messages.
        _tell(outcome)
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while processes.is_first() and time.monotonic() < deadline:
            if len(_ends()) == jax.process_count():
                break
            time.sleep(_POLL_SECONDS / 5)


def _tell(outcome: Outcome) -> None:
    message = json.dumps(outcome._asdict()).encode()
    processes.send(f"{_FOLDER}/{jax.process_index()}", message)


def _ends() -> dict[int, Outcome]:
    """How the processes that have ended did, by their rank."""
    messages = processes.received(_FOLDER)
    ends = {}
    for rank, message in messages.items():  # Of another version, perhaps.
        fields = json.loads(message)
        ends[int(rank)] = Outcome(**{name: fields[name] for name in Outcome._fields})
    return ends


def _watch_others(silent: list[float]) -> None:
    """Ends this process after another one has ended by an error. `silent`: see `_watch_silence`."""
    while not _ending.wait(_POLL_SECONDS):
        try:
            failed = {rank: other for rank, other in _ends().items() if other.sentence}
        except jax.errors.JaxRuntimeError:
            continue  # As a rule, the first process has ended, and JAX aborts this one.
        except Exception as error:
            end(Outcome(1, f"error: {type(error).__name__}: {error}"))
        silent[0] = 0.0
        if failed:
            if not _ending.wait(_GRACE_SECONDS):
                rank, other = min(failed.items())
                if other.stuck:
                    _print_stacks()
                end(Outcome(other.status, f"process {rank} has ended: {other.sentence}"))
            return  # The main thread ends it.


def _watch_silence(silent: list[float]) -> None:
    """Ends this process where the first one does not answer and JAX does not abort it, either.

    Args:
      silent: The seconds since the first process has answered, in one entry.
    """
    while not _ending.wait(_POLL_SECONDS):
        signal.setitimer(signal.ITIMER_REAL, _FROZEN_SECONDS)
        silent[0] += _POLL_SECONDS  # Not by the clock: this process may have been paused.
        if silent[0] > _SILENT_SECONDS:
            end(Outcome(AGAIN, _BROKEN), tell=False)


@contextmanager
def _killed_if_frozen() -> Iterator[None]:
    """Lets SIGALRM print the stacks and end the process, unless `_watch_silence` puts it off.

    Neither needs Python's lock. The first process of a container ignores a signal without a
    handler, so the handler is C's `_exit`, with the signal's number as the status.
    """
    number = signal.SIGALRM
    previous = _set_handler(number, ctypes.CDLL(None)._exit)
    faulthandler.register(number, file=sys.__stderr__ or 2, chain=True)
    signal.setitimer(signal.ITIMER_REAL, _FROZEN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.unregister(number)
        _set_handler(number, previous)


def _set_handler(number: int, handler: Any) -> int | None:
    """Sets a C function as a handler; returns the address of the previous one."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype = ctypes.c_void_p
    set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
    return set_handler(number, ctypes.cast(handler, ctypes.c_void_p))


def _print_stacks() -> None:
    print("\nstacks of all threads, the newest call first:", file=sys.stderr)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2)


def _wait_for_others(outcome: Outcome) -> None:
    """Waits until all processes have ended so. `_watch_others` handles those that do not."""
    _tell(outcome)
    while len(_ends()) < jax.process_count():
        time.sleep(_POLL_SECONDS / 5)
    _status[0] = outcome.status


def _unexpected(error: Exception) -> Outcome:
    """How to end by an unexpected error, which may come from the end of another process."""
    if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
        time.sleep(_POLL_SECONDS + _GRACE_SECONDS + 1)  # `_watch_others` may know more.
        if any(sign in str(error) for sign in ("Gloo", "UNAVAILABLE", "onnection")):
            return Outcome(AGAIN, _BROKEN)
    traceback.print_exception(error)
    return Outcome(1, f"error: {type(error).__name__}: {error}")


@contextmanager
def _abort_with(sentence: str) -> Iterator[None]:
    """Prints a sentence where JAX aborts the process, as it does when another one is gone.

    Python's own handlers of signals do not run then: the thread that aborts is not Python's.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def last_words(number: int) -> None:
        if not _ending.is_set():
            os.write(2, f"\n{sentence}\n".encode())
        os._exit(_status[0])

    previous = _set_handler(signal.SIGABRT, last_words)
    try:
        yield
    finally:
        _set_handler(signal.SIGABRT, previous)
