"""Downloaded files: the errors that name them, and zip and tar files, unpacked inside a folder."""

from __future__ import annotations

import contextlib
import functools
import gzip
import os
import reprlib
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from experiments.core.errors import ExperimentError, full_disk
from experiments.core.terminal import one_line

_Rest = ParamSpec("_Rest")
_Found = TypeVar("_Found")


class MissingArchiveError(ExperimentError, FileNotFoundError):
    """Files of a data set are missing. The message lists the files and folders."""


class DamagedArchiveError(ExperimentError, ValueError):
    """A file is unreadable, or its content is not as expected. The message names it."""


class UnsafeArchiveError(ExperimentError, ValueError):
    """A file would run code or write outside its folder. The message names it."""


_short = reprlib.Repr()
_short.maxstring = 80
brief = _short.repr
"""A value of a file in a message: the start of its `repr`."""


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
    except Exception as error:
        if full_disk(error):  # Of what is unpacked.
            raise
        of_system = isinstance(error, OSError) and error.strerror
        words = str(error).replace(f" {str(source)!r}", "")[:300]
        why = of_system or f"{type(error).__name__}: {words}"
        if words.startswith("cannot identify image"):
            why = f"{words}; convert it to JPEG or PNG"
        raise DamagedArchiveError(f"{source} is not a readable {kind}: {why}") from error


def names_file(
    read: Callable[Concatenate[Path, _Rest], _Found],
) -> Callable[Concatenate[Path, _Rest], _Found]:
    """Of a reader whose first argument is a file: all of its errors become `reading`'s."""

    @functools.wraps(read)
    def read_file(path: Path, *args: _Rest.args, **kwargs: _Rest.kwargs) -> _Found:
        with reading(readable(path), "file"):
            return read(path, *args, **kwargs)

    return read_file


def extract(archive: Path, target: Path, keep: Callable[[str], bool] | None = None) -> Path:
    """Extracts a zip or tar file into a folder unless that exists, and returns the folder.

    `keep` selects members by name. `zipfile` keeps them inside the folder; an `UnsafeArchiveError`
    names a member of a tar file that leads out of it.
    """
    if target.exists():
        return target
    target.mkdir(parents=True)
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as members:
                names = [name for name in members.namelist() if keep is None or keep(name)]
                members.extractall(target, names)
        else:
            with tarfile.open(archive) as members:
                chosen = (member for member in members if keep is None or keep(member.name))
                members.extractall(target, chosen, filter="data")
                # The checksum of a compressed file is verified when its end is read.
                while members.fileobj is not None and members.fileobj.read(1 << 20):
                    pass
    except tarfile.FilterError as error:
        raise UnsafeArchiveError(f"{archive}: {error}") from error
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise  # Of the disk, not of the archive.
        raise DamagedArchiveError(
            f"{archive} is damaged, encrypted, or not a zip or tar file: {error}"
        ) from error
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
        with open(self.archive, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise DamagedArchiveError(f"{self.archive} is truncated within {self.name}")
        return content


def tar_members(archive: Path) -> list[TarMember]:
    """Lists the files in an uncompressed tar file and in the tar files it contains, in order."""
    found = []
    with reading(archive, "plain tar file"), tarfile.open(archive, "r:") as outer:
        for member in filter(tarfile.TarInfo.isfile, outer):
            name, start = member.name, member.offset_data
            if not name.endswith(".tar"):
                found.append(TarMember(archive, name, start, member.size))
                continue
            with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
                found += [
                    TarMember(archive, f"{name}/{each.name}", start + each.offset_data, each.size)
                    for each in filter(tarfile.TarInfo.isfile, inner)
                ]
    return found
