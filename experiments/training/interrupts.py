"""Requests to stop a run: SIGTERM, Ctrl-C, and preemption of any of several processes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from experiments import processes

_calls = itertools.count()
"""Numbers the steps of all runs of this process. All processes count alike: JAX lets them stop at
the first number that none has reached, and a number that is never called would be missed."""
_CTRL_C = "ctrl-c"


class Interrupted(Exception):
    """The run was stopped by a signal and has saved its state.

    Args:
      message: What happened and how to continue.
      signal_number: The signal.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


@contextmanager
def stop_requests() -> Iterator[Callable[[], int | None]]:
    """Catches SIGTERM and Ctrl-C while the context lasts.

    A second Ctrl-C interrupts at once. With several processes, all of them stop after the same
    step, whichever receives the signal: JAX distributes a SIGTERM, and Ctrl-C becomes one.

    Yields:
      A function that returns the signal received so far, or None. Every process calls it once per
      step.
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
                processes.send(f"{_CTRL_C}/{jax.process_index()}", b"")
                os.kill(os.getpid(), signal.SIGTERM)

    def stop_request() -> int | None:
        if not several:
            return received[0] if received else None
        if not multihost_utils.reached_preemption_sync_point(next(_calls)):
            return None
        return signal.SIGINT if processes.received(_CTRL_C) else signal.SIGTERM

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
