"""Files of runs and data: folders of this machine, or `gs://BUCKET/PATH` by way of epath."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import sys
import typing
from collections.abc import Iterator
from errno import EINVAL
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from experiments.core.errors import ConfigError, ExperimentError, full_disk

_LONGEST = 200  # Bytes of a part of a path; file systems have room for 255.

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def storage_path(text: str, argument: str = "") -> Path:
    """The path of a local file or folder, or of `gs://BUCKET/PATH` on Google Cloud Storage.

    The latter is an `epath.Path`, with the methods of a `pathlib.Path`, which would make gs:/ of
    gs://; that is read, too. A `ConfigError` for another URL names the `argument` that has it.
    """
    if not text or "\0" in text:
        raise ConfigError(f"{argument} must be a path, got {text!r}".lstrip())
    url = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)", text)
    if url is None:
        try:
            path = Path(text).expanduser()
        except RuntimeError as error:  # Of ~NAME.
            raise ConfigError(f"{argument} {text}: {error}".lstrip()) from error
        # Else, it would mean another folder once those before `..` are made.
        return path.resolve() if ".." in path.parts else path
    if url[1] != "gs":
        needed = "must be gs://BUCKET/PATH or a local folder"
        raise ConfigError(f"{argument} {needed}, got {text}".lstrip())
    try:
        import fsspec.config
        import gcsfs  # noqa: F401
        from etils import epath
    except ImportError as error:
        raise ConfigError(f'{text} needs pip install -e ".[gcs]" ({error})') from error
    # It logs the traceback of an error that it raises.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # The listings that gcsfs keeps would miss files that other processes write.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return cast(Path, epath.Path(f"gs://{url[2]}"))


def component(text: str) -> str:
    """A text as one part of a path: never empty, `.` or `..`, without a separator, and not long.

    Long ones are cut, and end with a hash. Names of files that start with it have room for more.
    """
    name = re.sub(r"[:/\\\x00-\x1f\x7f]", "-", text)
    name = re.sub(r"^\.*$", "-", name)
    if len(name.encode()) > _LONGEST:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        name = f"{name.encode()[: _LONGEST - 17].decode(errors='ignore')}-{digest}"
    return name


def is_remote(path: Path) -> bool:
    """Whether a path is on an object store."""
    return str(path).startswith("gs://")


def check_local(path: Path | None, argument: str) -> None:
    """Raises a `ConfigError` that names the argument if a path is on an object store."""
    if path is not None and is_remote(path):
        raise ConfigError(f"{argument} must be a local path, got {path}; copy it to this machine")


def cache_folder(name: str) -> Path:
    """`jaxloss/NAME` in the user's cache, which need not exist: XDG_CACHE_HOME, or ~/.cache."""
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
    """The path of a file that is to be read; an `OSError` for a pipe, whose reader would wait.

    Folders and absent files have the errors of `open`.
    """
    if not is_remote(path) and path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(EINVAL, "not a regular file", str(path))
    return path


def load_json(path: Path) -> Any:
    """The value in a JSON file, by `json.loads`; an `OSError`, or a `ValueError` if it is none."""
    try:
        return json.loads(regular(path).read_bytes())
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def check_json(value: Any, kind: Any, name: str = "it") -> None:
    """Raises a `ValueError`, which says where, unless a value of JSON is of a kind.

    A kind is a type or several (`str | None`), a `Literal`, a list with the kind of all elements,
    or a dict with the kinds of some keys; those that end with `?` may be absent. Numbers are
    finite, floats may be whole, and booleans are not numbers.
    """
    if isinstance(kind, list | dict):
        fits = isinstance(value, type(kind))
    else:
        kinds, own = typing.get_args(kind) or (kind,), type(value)
        fits = kind is Any or own in kinds or value in kinds or (own is int and float in kinds)
        if own in (int, float):
            fits &= abs(value) <= sys.float_info.max
    if not fits:
        raise ValueError(f"{name} is {str(value)[:40]!r}, and not of {str(kind)[:40]}")
    if isinstance(kind, list):
        for number, element in enumerate(value):
            check_json(element, kind[0], f"{name}[{number}]")
    elif isinstance(kind, dict):
        for key, of_key in kind.items():
            if (key := key.rstrip("?")) in value:
                check_json(value[key], of_key, f"{name}.{key}")
            elif f"{key}?" not in kind:
                raise ValueError(f"{name} has no {key}")


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

    Where another process holds it, raises a `ConfigError` with the message `busy`, or waits if that
    is empty. Does nothing on an object store, where a scheduler starts a run once.
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
