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

    A second Ctrl-C interrupts at once. With several processes, JAX distributes a SIGTERM that any
    of them receives, and all of them stop after the same step.

    Yields:
      A function of the step that returns the signal received so far, or None. Every process
      calls it once per step.
    """
    if jax.process_count() > 1:
        reached = multihost_utils.reached_preemption_sync_point
        yield lambda step: signal.SIGTERM if reached(step) else None
        return
    received: list[int] = []
    previous: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, previous[signal.SIGINT])
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            # Shells let background jobs ignore Ctrl-C.
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN:
                previous[number] = handler
                signal.signal(number, stop)
    try:
        yield lambda step: received[0] if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
