"""Which code runs."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import jaxloss


@cache
def code_version() -> dict[str, str | None]:
    """The version of the code, and its git commit if it runs from a checkout."""
    git = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    try:
        output = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        output = ""
    return {"version": jaxloss.__version__, "commit": output or None}
