"""Atomic writes, locks, and the user's cache."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.storage import is_remote, lease

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cache_folder(name: str) -> Path:
    """`jaxloss/NAME` in the user's cache: XDG_CACHE_HOME, or ~/.cache where that is unset or empty.

    The folder need not exist yet.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaxloss", name)


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Writes a file so that readers, and a kill at any moment, leave the old content or the new.

    Args:
      path: The file; replaced if it exists.
      content: Bytes, or text to be written as UTF-8.

    Returns:
      `path`.
    """
    content = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        path.write_bytes(content)
        return path
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def write_json(path: Path, value: Any) -> Path:
    """Writes JSON types, indented and atomically; returns `path`."""
    return write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_picture(path: Path, figure: Figure) -> Path:
    """Writes a figure as PNG on white, atomically; returns `path`."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", facecolor="white", bbox_inches="tight", pad_inches=0.15)
    return write_atomically(path, picture.getvalue())


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool) -> Iterator[Callable[[], bool]]:
    """Holds the lock file `path` while the context lasts; the end of the process frees it, too.

    On an object store, it is a lease: it ends a minute after the process does.

    Args:
      path: The lock file; created if it does not exist.
      wait: Wait for another process that holds it, or raise.

    Yields:
      Whether it is held: False where the system has no such locks, or where another process has
      taken over a lease because this one was stopped for longer than it lasts.

    Raises:
      BlockingIOError: Another process holds it, and `wait` is False.
    """
    if is_remote(path):
        with lease(path, wait=wait) as still_held:
            yield still_held
        return
    with contextlib.ExitStack() as stack:
        held = False
        if fcntl is not None:
            try:
                file = stack.enter_context(open(path, "w"))
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                raise
            except OSError:  # A file system without locks.
                pass
        yield lambda: held
