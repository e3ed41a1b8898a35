"""Real processes that train one run together, on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICES = "--xla_force_host_platform_device_count"
QUICK_PYTHON = (sys.executable, str(Path(__file__).with_name("quick_process.py")))


@contextmanager
def start(
    commands: Sequence[Sequence[str]],
    cache: Path,
    *,
    devices: int = 2,
    program: Sequence[str] = QUICK_PYTHON,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of one run, each with so many devices; none of them outlives the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    variables = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}={devices}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(len(commands)),
    }
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # A job in the background: inherited.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    processes = [
        subprocess.Popen(
            [*program, *command],
            cwd=ROOT,
            env={**os.environ, **variables, "JAX_PROCESS_ID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):  # Its children, too. JAX swallows SIGTERM.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def finish(processes: Sequence[subprocess.Popen[str]], status: int) -> list[str]:
    """What each process printed, once all have ended with this exit status."""
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert {process.returncode for process in processes} == {status}, outputs
    return outputs


def logged(directory: Path) -> int:
    """How many steps are in the metrics of a run."""
    log = directory / "metrics.jsonl"
    return log.read_text().count('"loss"') if log.exists() else 0


def wait_for_step(directory: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if logged(directory) >= step:
            return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"step {step} was not reached: {process.communicate()[0]}")
