"""Objects on Google Cloud Storage: paths whose operations survive an outage, and leases.

One PUT replaces an object or leaves it. There are no folders: a folder is a prefix that objects
share, and it cannot be renamed in one operation. Nothing can be appended to an object.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import json
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from typing import Any, NamedTuple, Self, TypeVar

import psutil
from etils.epath.gpath import PosixGPath

from experiments.errors import ConfigError, HeldError, StorageError, UnreachableError

try:
    import fsspec.config
    import gcsfs  # noqa: F401  (Orbax and TFDS reach the store by it.)
    import requests
    from google.api_core import exceptions
    from google.auth import exceptions as login
    from google.cloud import storage
except ImportError as error:
    raise ConfigError(f'gs:// needs the extra gcs ({error}): pip install -e ".[gcs]"') from error

T = TypeVar("T")
logger = logging.getLogger(__name__)

_PATIENCE = 120.0
"""Seconds for which an operation is repeated while the store does not answer."""
_ONCE: dict[str, Any] = {"timeout": (10, 60), "retry": None}
"""Of one request: seconds to connect, and between two bytes of an answer; `retried` repeats it."""
_LEASE = 60.0
"""Seconds without a sign of life after which others may take a lease over."""
_HEARTBEAT = 10.0
"""Seconds between two signs of life."""
_SKEW = 600.0
"""Seconds by which the clocks of two machines may differ."""

# The listings that gcsfs keeps would miss objects that others write.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)


class ObjectPath(PosixGPath):
    """A path `gs://BUCKET/KEY` with the methods of `pathlib.Path` that the experiments use.

    Every operation is repeated for two minutes while the store does not answer.

    Raises (by all operations):
      FileNotFoundError: There is no such object or folder.
      StorageError: The store does not answer, there is no such bucket, or access is denied.
    """

    @property
    def _bucket_name(self) -> str:
        return self.parts[2]

    @property
    def _key(self) -> str:
        return "/".join(self.parts[3:])

    @property
    def _prefix(self) -> str:
        return f"{self._key}/" if self._key else ""

    def _bucket(self) -> storage.Bucket:
        return _client().bucket(self._bucket_name)

    def _blob(self) -> storage.Blob:
        return self._bucket().blob(self._key)

    def exists(self) -> bool:
        """Whether there is such an object or folder."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether there is such an object."""
        return bool(self._key) and retried(self, lambda: self._blob().exists(**_ONCE))

    def is_dir(self) -> bool:
        """Whether there is an object in this folder."""
        return bool(self._names(limit=1)[0])

    def iterdir(self) -> Iterator[Self]:
        """The objects and folders in this folder."""
        objects, folders = self._names(delimiter="/")
        if not objects and not folders and self._key:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        # An object with the name of the folder is what some programs make a folder by.
        yield from (self / name for name in (*objects, *folders) if name)

    def glob(self, pattern: str) -> Iterator[Self]:
        """The objects and folders that match, a part of the pattern at each depth; no `**`."""
        first, _, rest = pattern.partition("/")
        try:
            inside = list(self.iterdir())
        except FileNotFoundError:
            return
        for path in inside:
            if fnmatch.fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else [path]

    def rglob(self, pattern: str) -> Iterator[Self]:
        """The objects at any depth of which the last part of the name matches."""
        for name in self._names()[0]:
            if fnmatch.fnmatchcase(name.rpartition("/")[2], pattern):
                yield self / name

    def _names(self, *, delimiter: str | None = None, limit: int | None = None) -> Any:
        """The names of the objects in this folder, and of the folders with a `delimiter`."""

        def read() -> tuple[list[str], list[str]]:
            pages: Any = _client().list_blobs(
                self._bucket_name,
                prefix=self._prefix,
                delimiter=delimiter,
                max_results=limit,
                fields="items(name),prefixes,nextPageToken",
                **_ONCE,
            )
            objects = [blob.name.removeprefix(self._prefix) for blob in pages]
            folders = [name.removeprefix(self._prefix).rstrip("/") for name in pages.prefixes]
            return objects, sorted(folders)

        try:
            return retried(self, read)
        except FileNotFoundError:
            raise StorageError(f"{self}: there is no bucket {self._bucket_name}") from None

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Makes nothing, as there are no folders; FileExistsError as usual."""
        if not exist_ok and self.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes this object."""
        with contextlib.suppress(*[FileNotFoundError] * missing_ok):
            retried(self, lambda: self._blob().delete(**_ONCE))

    def rmtree(self, missing_ok: bool = False) -> None:
        """Removes all objects in this folder."""
        names = self._names()[0]
        if not names and not missing_ok:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        _each(lambda name: (self / name).unlink(missing_ok=True), names)

    def copy_folder(self, target: ObjectPath) -> None:
        """Copies all objects in this folder to another one of the same bucket."""

        def copy(name: str) -> None:
            source, to = self / name, target / name
            bucket = self._bucket()
            retried(
                source,
                lambda: bucket.copy_blob(source._blob(), bucket, to._key, **_ONCE),
            )

        _each(copy, self._names()[0])

    def read_bytes(self) -> bytes:
        """The content of this object."""
        return retried(self, lambda: self._blob().download_as_bytes(**_ONCE))

    def write_bytes(self, data: bytes) -> int:
        """Replaces this object: readers see the old content or the new."""
        self.put(data)
        return len(data)

    def put(self, data: bytes, *, generation: int | None = None) -> int | None:
        """Replaces this object, and returns its new generation.

        Args:
          data: The content.
          generation: Replace this generation only; 0: only where there is no object. Returns None
            where there is another one.
        """

        def upload() -> int:
            blob = self._blob()
            blob.upload_from_string(
                bytes(data),
                content_type="application/octet-stream",
                if_generation_match=generation,
                **_ONCE,
            )
            return int(blob.generation or 0)

        try:
            return retried(self, upload)
        except exceptions.PreconditionFailed:
            return None
        except FileNotFoundError:
            raise StorageError(f"{self}: there is no bucket {self._bucket_name}") from None

    def open(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, mode: str = "r", *, encoding: str | None = None, **_: Any
    ) -> Any:
        """The content as a file, or one that replaces the object once it is closed."""
        match mode:
            case "rb":
                return io.BytesIO(self.read_bytes())
            case "r" | "rt":
                return io.StringIO(self.read_bytes().decode(encoding or "utf-8"))
            case "wb":
                return _BytesUpload(self)
            case "w" | "wt":
                return _TextUpload(self)
        raise ValueError(f"{self}: objects cannot be opened with mode {mode!r}")

    def resolve(self, strict: bool = False) -> Self:
        """This path: it is absolute."""
        return self

    def expanduser(self) -> Self:
        """This path."""
        return self


class _Upload:
    """Of a file in memory: one that becomes an object once it is closed, but not by an error."""

    def __init__(self, path: ObjectPath):
        super().__init__()
        self._path: ObjectPath | None = path

    def __exit__(self: Any, kind: Any, *_: Any) -> None:
        if kind is not None:
            self._path = None
        self.close()

    def close(self: Any) -> None:
        path, self._path = self._path, None
        if path is not None:
            content = self.getvalue()
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        super().close()  # pyright: ignore[reportAttributeAccessIssue]


class _BytesUpload(_Upload, io.BytesIO):
    pass


class _TextUpload(_Upload, io.StringIO):
    pass


def retried(path: ObjectPath, action: Callable[[], T]) -> T:
    """The result of an operation, which is repeated while the store does not answer."""
    start, delay = time.monotonic(), 0.5
    while True:
        try:
            return action()
        except exceptions.NotFound as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        except exceptions.PreconditionFailed:
            raise
        except (
            requests.RequestException,
            exceptions.ServerError,
            exceptions.TooManyRequests,
            exceptions.RetryError,
            login.TransportError,
            ConnectionError,
        ) as error:
            if time.monotonic() - start > _PATIENCE:
                raise UnreachableError(
                    f"{path}: the store has not answered for {_PATIENCE:.0f} seconds ({error}); "
                    "once it does, run the same command again"
                ) from error
            logger.warning("%s: the store does not answer (%s); trying again", path, error)
            time.sleep(delay * random.uniform(0.5, 1))
            delay = min(2 * delay, 8.0)
        except (login.GoogleAuthError, exceptions.ClientError) as error:
            raise _refusal(path, error) from error


def _refusal(path: object, error: Exception) -> StorageError:
    return StorageError(
        f"{path}: the store refuses ({error}); log in with "
        "`gcloud auth application-default login`, or ask for access to the bucket"
    )


@cache
def _client() -> storage.Client:
    try:
        return storage.Client()
    except login.GoogleAuthError as error:
        raise _refusal("gs://", error) from error


def _each(action: Callable[[str], None], names: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(action, names))


# --- Leases --------------------------------------------------------------------------------------


class _Found(NamedTuple):
    generation: int
    owner: str
    token: str
    seconds: float
    updated: datetime | None
    process: list[Any] | None
    """See `_this_process`."""


class Lease:
    """A lock that ends by itself: an object that its owner renews.

    The object names the owner, and the seconds after which it has expired unless it is written
    anew; a thread does that every ten seconds. It is made and renewed only in the generation that
    its owner knows, so of several processes one alone gets it. Where the owner was killed, the next
    process waits until the lease has expired (a minute), and takes it over; on the same machine it
    sees that the owner is gone, and need not wait. An owner that was stopped for longer finds out
    by `held`.
    """

    def __init__(self, path: ObjectPath):
        self._path = path
        self._token = uuid.uuid4().hex
        self._lost = False
        self._generation = 0
        self._renewed = 0.0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def acquire(self, *, wait: bool) -> None:
        """Takes the lease once it is free or has expired.

        Args:
          wait: Wait for an owner that is alive, too.

        Raises:
          HeldError: Another process renews it, and `wait` is False.
        """
        first, since, generation = None, 0.0, 0
        while not self._put(generation):
            found = self._look()
            if found is None:
                generation = 0
                continue
            if found.token == self._token:  # Written, but the answer was lost.
                self._generation = found.generation
                break
            if first is None or found.generation != first:
                if first is not None and not wait:
                    raise HeldError(found.owner)
                if first is None:
                    logger.warning("%s: waiting for a sign of life of %s", self._path, found.owner)
                first, since = found.generation, time.monotonic()
            age = 0.0
            if found.updated is not None:
                age = (datetime.now(UTC) - found.updated).total_seconds()
            expired = time.monotonic() - since > found.seconds or age > found.seconds + _SKEW
            if expired or _has_ended(found.process):
                logger.warning("%s: taken over from %s, which has gone", self._path, found.owner)
                generation = found.generation
            else:
                time.sleep(min(1.0, found.seconds / 4))
                generation = -1
        self._thread.start()

    def release(self) -> None:
        """Ends the lease."""
        self._end.set()
        self._thread.join()
        if self._lost:
            return
        # It expires where this fails.
        with contextlib.suppress(Exception):
            self._path._blob().delete(if_generation_match=self._generation, **_ONCE)

    def held(self) -> bool:
        """Whether this process still has the lease; renews it where that is overdue."""
        if time.monotonic() - self._renewed > _LEASE:
            self._renew()
        return not self._lost

    def _keep(self) -> None:
        while not self._lost and not self._end.wait(_HEARTBEAT):
            # The store may come back, and `held` finds out about the rest.
            with contextlib.suppress(StorageError):
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if self._lost or self._put(self._generation):
                return
            found = self._look()
            if found is None:
                self._lost = not self._put(0)
            elif found.token == self._token:
                self._generation = found.generation
                self._renewed = time.monotonic()
            else:
                self._lost = True

    def _put(self, generation: int) -> bool:
        """Writes the object in place of a generation; whether that was the one there."""
        if generation < 0:
            return False
        start = time.monotonic()
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        content = {
            "owner": owner,
            "token": self._token,
            "seconds": _LEASE,
            "time": time.time(),
            "process": _this_process(),
        }
        new = self._path.put(json.dumps(content).encode(), generation=generation)
        if new is None:
            return False
        self._generation, self._renewed = new, start
        return True

    def _look(self) -> _Found | None:
        def read() -> _Found | None:
            blob = self._path._bucket().get_blob(self._path._key, **_ONCE)
            if blob is None:
                return None
            content = json.loads(
                blob.download_as_bytes(if_generation_match=blob.generation, **_ONCE)
            )
            return _Found(
                int(blob.generation or 0),
                content["owner"],
                content["token"],
                content["seconds"],
                blob.updated,
                content["process"],
            )

        while True:
            try:
                return retried(self._path, read)
            except (FileNotFoundError, exceptions.PreconditionFailed):
                continue  # It was replaced between the two requests.


@cache
def _this_process() -> list[Any] | None:
    """The machine since its last start, the process and its start; None where this is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
    return [machine, os.getpid(), psutil.Process().create_time()]


def _has_ended(process: list[Any] | None) -> bool:
    """Whether a process ran on this machine and has ended; False where this is unknown."""
    here = _this_process()
    if process is None or here is None or process[0] != here[0]:
        return False
    try:
        found = psutil.Process(process[1])
        return found.create_time() != process[2] or found.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
