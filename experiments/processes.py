"""Several processes that train one run: how they join, and what they send each other.

Small messages go through the key-value store of JAX's coordination service, which the first process
hosts. They need no device, and whoever waits for one can be interrupted. Large ones, such as a
state, go over the devices.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import platform
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.config import differences
from experiments.errors import ConfigError

T = TypeVar("T")

HEARTBEAT_SECONDS = 15
"""A process that JAX has not heard of for so long counts as dead, and the others end."""

_SMALL = 1 << 20
"""Bytes of the largest message that goes through the key-value store."""
_CHUNK = 1 << 26
"""Bytes of one broadcast: bounds the memory that a large state takes on the devices."""

_SETTINGS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_LOOPBACK = ("127.", "localhost:", "[::1]:")

_numbers = itertools.count()
"""Numbers the messages. All processes send and expect them in the same order."""


def initialize() -> None:
    """Joins the processes of a run. Call it before anything uses a device.

    Address, number of processes and rank come from the environment: JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, or what JAX finds under Slurm, Open MPI, Kubernetes and on
    cloud TPUs.

    Raises:
      ConfigError: The environment does not have them, an address has no port, or the other
        processes cannot be reached.
    """
    address, count, rank = (os.environ.get(name) for name in _SETTINGS)
    bind = os.environ.get(_BIND)
    if address and address.startswith(_LOOPBACK):
        bind = bind or address  # By default, all networks of the machine could connect.
    for name, value in (("JAX_COORDINATOR_ADDRESS", address), (_BIND, bind)):
        if value and not re.search(r":\d+$", value):
            raise ConfigError(f"{name} {value} has no port; write {value}:8476")
    try:
        with _interruptible():
            jax.distributed.initialize(
                address,
                None if count is None else int(count),
                None if rank is None else int(rank),
                coordinator_bind_address=bind,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=HEARTBEAT_SECONDS,
            )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the processes cannot be joined ({error}); --distributed needs "
            f"{', '.join(_SETTINGS)} in the environment, or a cluster that JAX knows"
        ) from error


def divide_cpus() -> None:
    """Divides the CPUs of a machine between the processes that may use exactly the same ones.

    Otherwise each of them would compute and decode with as many threads as there are CPUs. The
    threads also become those of a batch job, which do not interrupt each other: where CPUs compute,
    the thread that receives for an all-reduce otherwise takes the CPU from the one that holds its
    lock, and both wait for the next tick of the scheduler.

    Threads inherit both, so this comes before JAX starts its own. Every process must call it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    with suppress(OSError):  # Some sandboxes forbid it.
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    from jax._src.distributed import global_state  # `jax.process_index` would start the devices.

    rank: int = global_state.process_id
    cpus = sorted(os.sched_getaffinity(0))
    send(f"cpus/{rank}", json.dumps([_machine(), cpus]).encode())
    everyone = [receive(f"cpus/{other}") for other in range(global_state.num_processes)]
    sharing = [other for other, message in enumerate(everyone) if message == everyone[rank]]
    own = np.array_split(np.array(cpus), len(sharing))[sharing.index(rank)]
    if len(cpus) >= len(sharing):
        with suppress(OSError):
            os.sched_setaffinity(0, own.tolist())


def _machine() -> str:
    """Names this machine, also where containers have names of their own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process while it waits for the others outside of Python."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def is_first() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def send(key: str, message: bytes) -> None:
    """Stores a message of up to a megabyte for all processes, under a key used once."""
    _store().key_value_set_bytes(key, message)


def receive(key: str) -> bytes:
    """Waits for the message of a key."""
    while True:
        try:
            return _store().blocking_key_value_get_bytes(key, 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def received(folder: str) -> dict[str, bytes]:
    """The messages so far whose keys begin with `folder/`, by the rest of the key."""
    pairs = _store().key_value_dir_get_bytes(f"{folder}/")
    return {key.removeprefix(f"{folder}/"): message for key, message in pairs}


def _store() -> Any:
    # JAX has no public name for it. Orbax takes it from here, too.
    from jax._src.distributed import global_state

    return global_state.client


def on_first(action: Callable[[], T]) -> T:
    """Runs `action` in the first process, and returns its result or raises its error in all.

    Every process must call this. `action` must not wait for what another process does afterwards.

    Args:
      action: Its result is pickled.
    """
    if jax.process_count() == 1:
        return action()
    key = f"first/{next(_numbers)}"
    if is_first():
        result, failure = None, None
        try:
            result = action()
        except BaseException as error:  # Uncaught, it would leave the others waiting forever.
            failure = error
        message = _pickle(result, failure)
        large = len(message) > _SMALL
        send(key, len(message).to_bytes(8, "little") + (b"" if large else message))
        if large:
            _broadcast(message, len(message))
        if failure is not None:
            raise failure
        return result  # pyright: ignore[reportReturnType]
    sent = receive(key)
    size, message = int.from_bytes(sent[:8], "little"), sent[8:]
    result, failure = pickle.loads(message or _broadcast(b"", size))
    if failure is not None:
        raise failure
    return result


def exchange(message: bytes) -> list[bytes]:
    """The messages of all processes, by rank. Every process must call this."""
    folder, ranks = f"exchange/{next(_numbers)}", range(jax.process_count())
    if len(ranks) == 1:
        return [message]
    send(f"{folder}/{jax.process_index()}", message)
    return on_first(lambda: [receive(f"{folder}/{rank}") for rank in ranks])


def agree(what: str, values: Mapping[str, Any]) -> None:
    """Checks that all processes have the same values. Every process must call this.

    Args:
      what: What they are, in a sentence.
      values: JSON types by name.

    Raises:
      ConfigError: Those of a process differ from those of the first one; the message lists the
        differences.
    """
    first, *others = map(json.loads, exchange(json.dumps(values).encode()))
    for rank, other in enumerate(others, start=1):
        if lines := differences(first, other):
            raise ConfigError(
                "\n".join([f"process {rank} differs from process 0 in {what}:", *lines])
                + "\n(left: process 0). Start the same command in every process."
            )


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """The rows of all processes, one after another. Every process must call this.

    Args:
      rows: float32 [n, d], with the same n in every process.
    """
    if jax.process_count() == 1:
        return rows
    return np.asarray(multihost_utils.process_allgather(rows, tiled=True))


def _pickle(result: Any, error: BaseException | None) -> bytes:
    """Both as bytes; what cannot be pickled becomes an error that can."""
    try:
        message = pickle.dumps((result, error))
        pickle.loads(message)
    except Exception as cause:
        reason = error or cause
        message = pickle.dumps((None, RuntimeError(f"{type(reason).__name__}: {reason}")))
    return message


def _broadcast(message: bytes, size: int) -> bytes:
    # As bytes, because JAX would narrow 64-bit numbers.
    chunks = []
    for start in range(0, size, _CHUNK):
        part = np.zeros(min(_CHUNK, size - start), np.uint8)
        if is_first():
            part = np.frombuffer(message[start : start + _CHUNK], np.uint8)
        chunks.append(np.asarray(multihost_utils.broadcast_one_to_all(part)).tobytes())
    return b"".join(chunks)
