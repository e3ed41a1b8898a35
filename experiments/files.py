"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a file so that a reader, or a kill at any moment, meets the old content or the new.

    Args:
      path: The file; replaced if it is there.
      content: Bytes, or text to be written as UTF-8.

    Returns:
      `path`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path
