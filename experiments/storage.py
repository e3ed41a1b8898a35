"""Files of runs and data: folders of this machine, or `gs://BUCKET/PATH` by way of epath."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from errno import EINVAL
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from experiments.errors import ConfigError, ExperimentError, full_disk

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def storage_path(text: str, argument: str = "") -> Path:
    """The path of a local file or folder, or `gs://BUCKET/PATH` on Google Cloud Storage.

    The latter is an `epath.Path`, with the methods of a `pathlib.Path`: do not convert it to one.
    Raises a `ConfigError`, which names the `argument` that has the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = f"{argument} {os.fsencode(text).decode('utf-8', 'backslashreplace')}".lstrip()
        raise ConfigError(
            f"{shown} is not UTF-8, which Orbax and TFDS need; choose another path"
        ) from None
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
    try:
        import fsspec.config
        import gcsfs  # noqa: F401
        from etils import epath
    except ImportError as error:
        raise ConfigError(
            f'{name} needs the extra gcs ({error}): pip install -e ".[gcs]"'
        ) from error
    # The listings that gcsfs keeps would miss files that other processes write.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return cast(Path, epath.Path(text))


def is_remote(path: Path) -> bool:
    """Whether a path is on an object store."""
    return str(path).startswith("gs://")


def check_local(path: Path | None, argument: str) -> None:
    """Raises a `ConfigError` that names the argument if a path is on an object store."""
    if path is not None and is_remote(path):
        raise ConfigError(f"{argument} must be a local path, got {path}; copy it to this machine")


def cache_folder(name: str) -> Path:
    """`jaxloss/NAME` in the user's cache: XDG_CACHE_HOME, or ~/.cache where that is unset or empty.

    The folder need not exist yet.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaxloss", name)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises an `ExperimentError` that names the path, where its disk gets full in the context."""
    try:
        yield
    except ExperimentError:
        raise
    except Exception as error:
        if reason := full_disk(error):
            raise ExperimentError(f"cannot write {path}: {reason}") from error
        raise


def regular(path: Path) -> Path:
    """The path of a file that is to be read; an `OSError` for a pipe, a socket or a device.

    To open a pipe, a process waits until another one writes to it. Folders and absent files have
    the errors of `open`.
    """
    if not is_remote(path) and path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(EINVAL, "not a regular file", str(path))
    return path


def load_json(path: Path, object_pairs_hook: Any = None) -> Any:
    """The value in a JSON file; an `OSError`, or a `ValueError` where it is none.

    `object_pairs_hook` is that of `json.loads`.
    """
    try:
        return json.loads(regular(path).read_bytes(), object_pairs_hook=object_pairs_hook)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Writes bytes, or text as UTF-8; a reader or a kill meets the old content or the new."""
    content = content.encode() if isinstance(content, str) else content
    if is_remote(path):  # An upload is atomic.
        path.write_bytes(content)
        return path
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # It is there if it could not be written.
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
def exclusive(path: Path, *, busy: str = "") -> Iterator[None]:
    """Holds the lock file `path` while the context lasts; the end of the process frees it, too.

    Where another process holds it, this raises a `ConfigError` with the message `busy`, or waits if
    that is empty. On an object store, it does nothing: the scheduler that starts a run starts it
    once.
    """
    if is_remote(path):
        yield
        return
    import filelock  # Here, as most commands take no lock.

    try:
        with filelock.FileLock(path, timeout=0 if busy else -1):
            yield
    except filelock.Timeout:
        raise ConfigError(busy) from None
