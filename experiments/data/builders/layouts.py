"""The forms in which people have a data set, and the places where its files are looked for."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from experiments.data.archives import DamagedArchiveError, MissingArchiveError, extract
from experiments.data.builders.pictures import Pictures, list_images, picture_files


@dataclass(frozen=True)
class Place:
    """Where a layout looks for its files."""

    folders: tuple[Path, ...]
    """Searched in this order."""
    scratch: Path
    """Archives are extracted here; removed when the data set is prepared."""
    own: tuple[str, ...] = ()
    """The names that the data set's own folder may have."""

    def find(self, *names: str) -> Path | None:
        """The first that exists of some alternative files or folders.

        Args:
            *names: Paths relative to the folders. One that begins with the data set's own folder
                stands for all names of that folder.

        Returns:
            The path, or None.
        """
        spelled = itertools.chain.from_iterable(map(self._spellings, names))
        for name, folder in itertools.product(spelled, self.folders):
            if (folder / name).exists():
                return folder / name
        return None

    def _spellings(self, name: str) -> list[str]:
        first, slash, rest = name.partition("/")
        return [f"{own}/{rest}" for own in self.own] if slash and first in self.own else [name]

    def get(self, *names: str) -> Path:
        """The first that exists of some alternative files or folders.

        Args:
            *names: Paths relative to the folders.

        Returns:
            The path.

        Raises:
            MissingArchiveError: None of them exists.
        """
        path = self.find(*names)
        if path is None:
            raise MissingArchiveError(f"no {' or '.join(names)} in {self.folders[-1]}")
        return path

    def extract(self, archive: Path, keep: Callable[[str], bool] | None = None) -> Path:
        """The content of an archive.

        Args:
            archive: A zip or tar.
            keep: Which members are needed; all by default.

        Returns:
            A folder that is there while the data set is prepared.
        """
        return extract(archive, self.scratch / archive.name, keep=keep)

    def folder(
        self, name: str, archives: Sequence[str], keep: Callable[[str], bool] | None = None
    ) -> Path:
        """A folder, taken from an archive if it has not been extracted.

        Args:
            name: The folder's path within this place and within the archive.
            archives: Names of the archive that may hold it.
            keep: Which members of the archive are needed; all by default.

        Returns:
            The folder.

        Raises:
            MissingArchiveError: Neither folder nor archive is there.
            DamagedArchiveError: The archive does not hold the folder.
        """
        path = self.find(name)
        if path is not None:
            return path
        archive = self.get(*archives)
        path = self.extract(archive, keep) / name
        if not path.is_dir():
            raise DamagedArchiveError(f"{archive} holds nothing that is needed of {name}")
        return path


@dataclass(frozen=True)
class Part:
    """A file or folder of a data set, by itself or in the archive in which it comes."""

    path: str
    """Within the archive; there may be one folder above it."""
    archives: tuple[str, ...]
    """Names of the archive."""
    extracted: tuple[str, ...] = ()
    """Where it is once extracted; `path` by default."""
    holds: str = ""
    """A file or folder in it, if once extracted it must be told from another of its name."""

    @property
    def names(self) -> tuple[str, ...]:
        """Alternatives for `Layout.needs`."""
        return (*self._extracted, *self.archives)

    @property
    def _extracted(self) -> tuple[str, ...]:
        paths = self.extracted or (self.path,)
        return tuple(PurePosixPath(path, self.holds).as_posix() for path in paths)

    def locate(self, place: Place, keep: Callable[[str], bool] | None = None) -> Path:
        """Finds it, and extracts the archive if it has to.

        Args:
            place: Where to look.
            keep: Which members of the archive are needed, by name; all by default. The parts of
                one archive must agree on it.

        Returns:
            The file or folder.

        Raises:
            MissingArchiveError: Neither it nor its archive is there.
            DamagedArchiveError: The archive does not hold it.
        """
        found = place.find(*self._extracted)
        if found is not None:
            return found.parent if self.holds else found
        archive = place.get(*self.archives)
        top = place.extract(archive, keep)
        for path in (top / self.path, *sorted(top.glob(f"*/{self.path}"))):
            if path.exists():
                return path
        raise DamagedArchiveError(f"{archive} holds nothing that is needed of {self.path}")


@dataclass(frozen=True)
class Layout:
    """One form in which people have a data set."""

    title: str
    """What it is, for messages."""
    needs: tuple[tuple[str, ...], ...]
    """The files or folders that must be there, each with its alternatives."""
    read: Callable[[Place], Mapping[str, Any]]
    """Finds the images of every split."""
    by_class: tuple[tuple[str, ...], ...] = ()
    """Those needs that, as folders of images, must have a folder for every class."""

    def missing(self, place: Place) -> list[str]:
        """What is not there.

        Args:
            place: Where to look.

        Returns:
            The missing files, each with its alternatives, and the missing folders of classes.
        """
        missing = []
        for names in self.needs:
            path = place.find(*names)
            if path is None:
                missing.append(" or ".join(names))
            elif names in self.by_class and list_images(path) and not has_classes(path):
                missing.append(f"a folder for every class in {path}, which has images only")
        return missing

    def begun(self, place: Place) -> bool:
        """Whether something of it is there.

        Args:
            place: Where to look.

        Returns:
            True if so.
        """
        return any(place.find(*names) is not None for names in self.needs)

    def describe(self) -> str:
        """The layout and its files, a line each."""
        return "\n".join([f"{self.title}:", *(f"    {' or '.join(n)}" for n in self.needs)])


def inside(folder: Path, name: str) -> Path:
    """A file that a folder must have, directly or in a folder of its own.

    Args:
        folder: The folder.
        name: The file's path within it.

    Returns:
        The file.

    Raises:
        DamagedArchiveError: It is not there.
    """
    for path in (folder / name, *sorted(folder.glob(f"*/{name}"))):
        if path.exists():
            return path
    raise DamagedArchiveError(f"{folder} has no {name}")


def class_folders(name: str, splits: Mapping[str, Sequence[str]]) -> Layout:
    """A folder for every split, in it a folder for every class.

    Args:
        name: The data set's own folder, by any of its names, or "." if its files are looked for in
            no other.
        splits: For every split the names that its folder may have.

    Returns:
        The layout.
    """
    needs = {
        split: tuple(PurePosixPath(name, folder).as_posix() for folder in of)
        for split, of in splits.items()
    }
    return Layout(
        f"image folders, one a class, as in {next(iter(needs.values()))[0]}/CLASS/NAME.jpg",
        tuple(needs.values()),
        lambda place: {split: read_folders(place.get(*of)) for split, of in needs.items()},
        by_class=tuple(needs.values()),
    )


def has_classes(folder: Path) -> bool:
    """Whether there are folders in a folder, as of classes.

    Args:
        folder: The folder.

    Returns:
        True if there is one that is not hidden.
    """
    # Path.iterdir would ask for the status of every file, and there may be 50,000.
    with os.scandir(folder) as entries:
        return any(entry.is_dir() and not entry.name.startswith(".") for entry in entries)


def read_folders(folder: Path) -> Pictures:
    """The images of a folder with one folder a class.

    Args:
        folder: The folder.

    Returns:
        Classes and files, sorted by name.
    """
    classes = {
        path.name: list_images(path)
        for path in folder.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    }
    return picture_files(classes, folder)
