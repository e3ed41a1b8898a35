"""Where runs and data are kept: folders of this machine, or `gs://BUCKET/PATH`.

Paths on an object store have the methods of `pathlib.Path`. What the two kinds do differently is
here: when a folder is complete, how it is removed, locks, and files that are appended to.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from experiments.errors import ConfigError

if TYPE_CHECKING:
    from experiments.object_store import ObjectPath

_UNFINISHED = "*.orbax-checkpoint-tmp*"
_TRASH = ".trash"
_COMMITTED = "commit_success.txt"
"""The last object that Orbax writes: it marks a folder of an object store as complete."""


def storage_path(text: str, argument: str = "") -> Path:
    """The path of a local file or folder, or `gs://BUCKET/PATH` on Google Cloud Storage.

    The latter has the same methods, and is no `pathlib.Path`: do not convert it to one.

    Args:
      text: What was typed.
      argument: What it was typed for, for messages.

    Raises:
      ConfigError: Another scheme, no name of a bucket, or the extra `gcs` is not installed.
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", text)
    name = f"{argument} {text}".lstrip()
    if match is None:
        if text.startswith("gs:/"):  # What `pathlib.Path` makes of a URL.
            raise ConfigError(f"{name} lacks a slash; write gs://{text[3:].lstrip('/')}")
        return Path(text)
    scheme, rest = match.groups()
    if scheme != "gs":
        raise ConfigError(
            f"{name}: {scheme}:// is not supported, as Orbax cannot write checkpoints there; use "
            "gs://BUCKET/PATH (Google Cloud Storage) or a local folder"
        )
    if not re.fullmatch("[a-z0-9][a-z0-9_.-]+[a-z0-9]", rest.partition("/")[0]):
        raise ConfigError(
            f"{name} does not start with the name of a bucket, of three characters or more; "
            "write gs://BUCKET/PATH"
        )
    from experiments.object_store import ObjectPath

    return cast(Path, ObjectPath(text))


def is_remote(path: Path) -> bool:
    """Whether a path is on an object store."""
    return str(path).startswith("gs://")


def _object(path: Path) -> ObjectPath:
    return cast("ObjectPath", path)


def check_local(path: Path | None, argument: str) -> None:
    """Raises a `ConfigError` that names the argument if a path is on an object store."""
    if path is not None and is_remote(path):
        raise ConfigError(f"{argument} must be a local path, got {path}; copy it to this machine")


# --- Folders that Orbax writes -------------------------------------------------------------------


def complete_folders(directory: Path) -> list[str]:
    """The names of the folders in a directory, without those that were not written to their end.

    A local folder has its name once it is complete. One on an object store holds a marker.
    """
    if is_remote(directory):
        marks = directory.rglob(_COMMITTED)
        return [mark.parent.name for mark in marks if mark.parent.parent == directory]
    return [path.name for path in directory.iterdir() if path.is_dir()]


def remove_incomplete(directory: Path) -> None:
    """Removes the checkpoints that a killed process left half written or half removed."""
    if is_remote(directory):
        depth, complete = len(directory.parts), complete_folders(directory)
        for name in {path.parts[depth] for path in directory.rglob("*")}.difference(complete):
            if name.isdecimal():
                _object(directory / name).rmtree(missing_ok=True)
        return
    for left in [*directory.glob(_UNFINISHED), directory / _TRASH]:
        shutil.rmtree(left, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Removes a complete folder. After a kill it is whole, or not among `complete_folders`."""
    if is_remote(path):
        (path / _COMMITTED).unlink(missing_ok=True)
        _object(path).rmtree(missing_ok=True)
        return
    # Renaming is one operation. Removing takes many, and a kill may come in between.
    trash = path.parent / _TRASH
    trash.mkdir(exist_ok=True)
    os.rename(path, trash / path.name)
    shutil.rmtree(trash, ignore_errors=True)


def rename_folder(path: Path, target: Path) -> None:
    """Renames a complete folder. On an object store, a kill may leave it under both names."""
    if is_remote(path):
        _object(path).copy_folder(_object(target))
        remove_folder(path)
        return
    os.rename(path, target)


# --- Files that grow -----------------------------------------------------------------------------


@contextlib.contextmanager
def appendable(
    directory: Path, name: str, check: Callable[[], None]
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A local folder in which files of a directory can be appended to.

    For a local directory it is this directory. For one on an object store, where nothing can be
    appended, it is a temporary one; its files are stored whole by each call of the function, and in
    the end.

    Args:
      directory: Where the files are kept.
      name: A file that may be there.
      check: Called before files are stored; raises where they must not be.

    Yields:
      The local folder, and the function that stores its files.
    """
    if not is_remote(directory):
        yield directory, lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="jaxloss-") as folder:
        local, stored = Path(folder), {}
        with contextlib.suppress(FileNotFoundError):
            (local / name).write_bytes((directory / name).read_bytes())

        def store() -> None:
            check()
            for file in sorted(local.iterdir()):
                content = file.read_bytes()
                if stored.get(file.name) != content:
                    (directory / file.name).write_bytes(content)
                    stored[file.name] = content

        try:
            yield local, store
        finally:
            store()


# --- Locks ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def lease(path: Path, *, wait: bool) -> Iterator[Callable[[], bool]]:
    """Holds an object as a lock while the context lasts; see `object_store.Lease`.

    Yields:
      Whether it is still held.

    Raises:
      BlockingIOError: Another process holds it, and `wait` is False.
    """
    from experiments.object_store import Lease

    held = Lease(_object(path))
    held.acquire(wait=wait)
    try:
        yield held.held
    finally:
        held.release()
