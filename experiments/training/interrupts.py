"""Requests to stop a run: SIGTERM, Ctrl-C, and preemption of any of several processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


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
def stop_requests() -> Iterator[Callable[[int], int | None]]:
    """Catches SIGTERM and Ctrl-C while the context lasts.

    A second Ctrl-C interrupts at once. With several processes, all of them stop after the same
    step, whichever receives the signal: JAX distributes a SIGTERM, and Ctrl-C becomes one.

    Yields:
      A function of the step that returns the signal received so far, or None. Every process
      calls it once per step.
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

    def stop_request(step: int) -> int | None:
        if several:
            reached = multihost_utils.reached_preemption_sync_point(step)
            return signal.SIGTERM if reached else None
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
