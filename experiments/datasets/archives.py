"""Downloaded files: the errors that name them, and zip and tar files, unpacked inside a folder."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import Self

from experiments.core.errors import ExperimentError
from experiments.core.terminal import one_line


class MissingArchiveError(ExperimentError, FileNotFoundError):
    """Files of a data set are missing. The message lists the files and folders."""


class DamagedArchiveError(ExperimentError, ValueError):
    """A file is unreadable, or its content is not as expected. The message names it."""


class UnsafeArchiveError(ExperimentError, ValueError):
    """A file would run code, write outside its folder, or fill the disk. The message names it."""


# --- Messages -----------------------------------------------------------------------------------


def brief(value: object, limit: int = 80) -> str:
    """A value of a file in a message: its start, or its type where it is no text or number.

    The text of a list that contains others may be far longer than its file.
    """
    if isinstance(value, str | bytes):
        return repr(value[:limit]) + " …" * (len(value) > limit)
    small = isinstance(value, int) and abs(value) < 10**20
    return repr(value) if value is None or small or isinstance(value, float) else typed(value)


def typed(value: object) -> str:
    """The type of a value in a message."""
    return f"a value of the type {type(value).__name__}"


def readable(path: Path) -> str:
    """A path in a message, with escapes for what is not UTF-8 or controls a terminal."""
    return one_line(os.fsencode(path).decode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def reading(source: Path | str, kind: str) -> Iterator[None]:
    """Raises a `DamagedArchiveError` that names a file, whatever goes wrong in the context.

    For readers that check little, and raise almost any exception.
    """
    try:
        yield
    except ExperimentError:
        raise
    except MemoryError as error:
        raise DamagedArchiveError(f"{source} is a damaged {kind}, or too large") from error
    except Exception as error:
        why = str(error)[:300]
        raise DamagedArchiveError(
            f"{source} is not a readable {kind}: {type(error).__name__}: {why}"
        ) from error


# --- Zip and tar --------------------------------------------------------------------------------


class _TarInfo(tarfile.TarInfo):
    """Refuses headers that `tarfile` would read into memory whole, at any size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """The header of a member."""
        member = super().frombuf(buf, encoding, errors)
        long = not (member.isfile() or member.isdir()) and member.size > 2**20
        if long or member.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.FilterError(f"{member.name!r} is sparse, or has a very long header")
        return member


def _check_sizes(archive: Path) -> Callable[[int], None]:
    """A function that is called with sizes, and raises once their sum is that of a bomb.

    Photographs hardly shrink, and tables of numbers to a tenth.
    """
    limit = 2**30 + 100 * archive.stat().st_size
    total = 0

    def add(size: int) -> None:
        nonlocal total
        total += size
        if total > limit:
            raise UnsafeArchiveError(
                f"{archive} would be more than {limit:,} bytes unpacked, over 100 times its size; "
                "unpack it by hand if you trust it"
            )

    return add


def extract(archive: Path, target: Path, *, keep: Callable[[str], bool] | None = None) -> Path:
    """Extracts a zip or tar file into a folder, once, and returns the folder; whole or not at all.

    `keep` selects members by name. `zipfile` keeps them inside of the folder; an
    `UnsafeArchiveError` names one of a tar file that leads out of it, or a bomb.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    add = _check_sizes(archive)
    partial = Path(tempfile.mkdtemp(prefix=f"incomplete.{target.name}.", dir=target.parent))
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as members:
                for member in members.infolist():  # No more is read of a member than it states.
                    add(member.file_size)
                names = members.namelist()
                members.extractall(partial, [n for n in names if keep is None or keep(n)])
        else:
            with tarfile.open(archive, tarinfo=_TarInfo) as members:

                def chosen() -> Iterator[tarfile.TarInfo]:
                    for member in members:
                        add(tarfile.BLOCKSIZE + member.size)
                        if keep is None or keep(member.name):
                            yield member

                members.extractall(partial, chosen(), filter="data")
                # The checksum of a compressed file is verified when its end is read.
                while members.fileobj is not None and (rest := members.fileobj.read(1 << 20)):
                    add(len(rest))
        partial.rename(target)
    except tarfile.FilterError as error:
        raise UnsafeArchiveError(f"{archive}: {error}") from error
    except (
        *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, LZMAError, EOFError),
        RuntimeError,  # An encrypted zip file.
    ) as error:
        raise DamagedArchiveError(
            f"{archive} is damaged, encrypted, or not a zip or tar file: {error}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file in an uncompressed tar file, which can be read without extraction."""

    archive: Path
    name: str
    """The name, preceded by that of the inner tar file if there is one."""
    offset: int
    size: int

    def read(self) -> bytes:
        """The content; raises a `DamagedArchiveError` where the tar file is truncated."""
        if self.size > 2**29:
            raise DamagedArchiveError(f"{self.archive}: {self.name} is too large for an image")
        with open(self.archive, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise DamagedArchiveError(f"{self.archive} is truncated within {self.name}")
        return content


def tar_members(archive: Path) -> list[TarMember]:
    """Lists the files in an uncompressed tar file and in the tar files it contains, in order."""
    found = []
    try:
        with tarfile.open(archive, "r:", tarinfo=_TarInfo) as outer:
            for member in filter(_is_plain, outer):
                name, start = member.name, member.offset_data
                if not name.endswith(".tar"):
                    found.append(TarMember(archive, name, start, member.size))
                    continue
                content = outer.extractfile(member)
                with tarfile.open(fileobj=content, mode="r:", tarinfo=_TarInfo) as inner:
                    found += [
                        TarMember(archive, f"{name}/{e.name}", start + e.offset_data, e.size)
                        for e in filter(_is_plain, inner)
                    ]
    except (tarfile.TarError, EOFError) as error:
        raise DamagedArchiveError(f"{archive} is damaged, or no plain tar file: {error}") from error
    return found


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.isfile() and not member.issparse()
