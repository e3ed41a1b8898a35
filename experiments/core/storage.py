"""Files of runs and data: folders of this machine, or `gs://BUCKET/PATH` by way of epath."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
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

_LONGEST = 200
"""Bytes of a part of a path; file systems have room for 255."""

_DEEPEST = 50
"""Levels of lists and objects in JSON that is read."""
_LARGEST = 2**26
"""Bytes of JSON that is read."""

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def storage_path(text: str, argument: str = "") -> Path:
    """The path of a local file or folder, or `gs://BUCKET/PATH` on Google Cloud Storage.

    The latter is an `epath.Path`, with the methods of a `pathlib.Path`: do not convert it to one.
    `~` is the home directory. A local path with `~` or `..` becomes absolute, without links: it
    means the same before and after folders of it are made. Raises a `ConfigError`, which names the
    `argument` that has the text.
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
        return _local_path(text, argument)
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
    # It logs the traceback of an error that it raises.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # The listings that gcsfs keeps would miss files that other processes write.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return cast(Path, epath.Path(text))


def _local_path(text: str, argument: str) -> Path:
    """The path of a local file or folder; arguments and errors as in `storage_path`."""
    if not text or "\0" in text:
        raise ConfigError(f"{argument or 'a path'} is empty or has a NUL character; choose a path")
    path, name = Path(text), f"{argument} {text[:100]}{'…' * (len(text) > 100)}".lstrip()
    try:
        if text.startswith("~") or ".." in path.parts:
            path = path.expanduser().resolve()
        path.exists()
    except (OSError, RuntimeError) as error:  # No such home, too long, or links in a circle.
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name} cannot be used: {reason}") from None
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{name} is a link to what does not exist; remove it, or name the target")
    return path


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


def load_json(path: Path, *, most: int = _LARGEST, object_hook: Any = None) -> Any:
    """The value in a JSON file; an `OSError`, or a `ValueError` where it is none.

    The file has at most so many bytes, and nothing in it is nested deeply: what reads it may call
    itself. `object_hook` is that of `json.loads`.
    """
    with regular(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    with contextlib.suppress(RecursionError):
        level = [value := json.loads(content, object_hook=object_hook)]
        for _ in range(_DEEPEST):
            level = [part for part in level if isinstance(part, list | dict)]
            inside = (part.values() if isinstance(part, dict) else part for part in level)
            if not (level := [*itertools.chain.from_iterable(inside)]):
                if re.search(rb"\\u[dD][89a-fA-F]", content):  # Half a character has no UTF-8.
                    json.dumps(value, ensure_ascii=False).encode()
                return value
    raise ValueError("lists or objects are nested too deeply")


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
        words = {list: "a list", dict: "an object"}
        wanted = words.get(type(kind)) or (kind.__name__ if isinstance(kind, type) else kind)
        raise ValueError(f"{name} is {str(value)[:40]!r}, and not {wanted}")
    if isinstance(kind, list):
        for number, element in enumerate(value):
            check_json(element, kind[0], f"{name}[{number}]")
    elif isinstance(kind, dict):
        for key, of_key in kind.items():
            if key.rstrip("?") in value:
                check_json(value[key.rstrip("?")], of_key, f"{name}.{key.rstrip('?')}")
            elif not key.endswith("?"):
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
