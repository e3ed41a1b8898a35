"""Several processes that train one run: the first one writes, and broadcasts what others need."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.errors import ConfigError

T = TypeVar("T")

_CHUNK = 1 << 26
"""Bytes of one broadcast: bounds the memory that a large state takes on the devices."""

_SETTINGS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize() -> None:
    """Joins the processes of a run. Call it before anything uses a device.

    Address, number of processes and rank come from the environment: JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, or what JAX finds under Slurm, Open MPI, Kubernetes and on
    cloud TPUs.

    Raises:
      ConfigError: The environment does not have them, or the other processes cannot be reached.
    """
    address, count, rank = (os.environ.get(name) for name in _SETTINGS)
    try:
        jax.distributed.initialize(
            address, None if count is None else int(count), None if rank is None else int(rank)
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the processes cannot be joined ({error}); --distributed needs "
            f"{', '.join(_SETTINGS)} in the environment, or a cluster that JAX knows"
        ) from error


def is_first() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def on_first(action: Callable[[], T]) -> T:
    """Runs `action` in the first process, and returns its result or raises its error in all.

    Every process must call this. `action` must not communicate with the others.

    Args:
      action: Its result is pickled.
    """
    if jax.process_count() == 1:
        return action()
    message, failure = b"", None
    if is_first():
        result = None
        try:
            result = action()
        except BaseException as error:  # Uncaught, it would leave the others waiting forever.
            failure = error
        message = _pickle(result, failure)
    result, error = pickle.loads(_broadcast(message))
    if failure or error:
        raise failure or error
    return result


def _pickle(result: Any, error: BaseException | None) -> bytes:
    """Both as bytes; what cannot be pickled becomes an error that can."""
    try:
        message = pickle.dumps((result, error))
        pickle.loads(message)
    except Exception as cause:
        reason = error or cause
        message = pickle.dumps((None, RuntimeError(f"{type(reason).__name__}: {reason}")))
    return message


def _broadcast(message: bytes) -> bytes:
    # As bytes, because JAX would narrow 64-bit numbers.
    size = _broadcast_bytes(np.frombuffer(len(message).to_bytes(8, "little"), np.uint8), 8)
    left, chunks = int.from_bytes(size.tobytes(), "little"), []
    for start in range(0, left, _CHUNK):
        part = np.frombuffer(message[start : start + _CHUNK], np.uint8)
        chunks.append(_broadcast_bytes(part, min(_CHUNK, left - start)).tobytes())
    return b"".join(chunks)


def _broadcast_bytes(values: np.ndarray, size: int) -> np.ndarray:
    mine = values if is_first() else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(mine))
