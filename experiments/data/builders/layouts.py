"""Layouts: the forms in which a data set is distributed, and where its files are looked up."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from experiments.data.builders.archives import (
    DamagedArchiveError,
    MissingArchiveError,
    extract,
    readable,
)
from experiments.data.builders.images import (
    ClassSplit,
    class_name,
    is_of_system,
    leads_out,
    left_out,
    list_folders,
    list_images,
    list_images_and_others,
    split_of_files,
    split_of_pickle,
)

_log = logging.getLogger(__name__)

FEW_SHOT_PARTS = {"base": "train", "validation": "val", "novel": "test"}
"""The names that most distributions of few-shot data sets give their splits."""
TRAIN_TEST_FOLDERS = {"train": ("train",), "test": ("test", "val")}
"""Possible folder names of two splits."""
TRAIN_VALIDATION_TEST_FOLDERS = {
    "train": ("train",),
    "validation": ("val", "valid", "validation"),
    "test": ("test",),
}
"""Possible folder names of three splits."""


@dataclass(frozen=True)
class SearchPath:
    """The folders in which a layout looks for its files."""

    folders: tuple[Path, ...]
    """The folders, in the order of the search."""
    scratch: Path
    """Archives are extracted here. The folder is removed once the data set is prepared."""
    own_folders: tuple[str, ...] = ()
    """Possible names of the data set's own folder."""

    def find(self, *names: str) -> Path | None:
        """Finds the first file or folder that exists.

        Args:
          *names: Alternative paths, relative to the folders. If the first part of a path is a
            name of the data set's own folder, all of its names are tried.

        Returns:
          The path, or None.
        """
        spelled = itertools.chain.from_iterable(map(self._spellings, names))
        for name, folder in itertools.product(spelled, self.folders):
            if _is_there(folder / name):
                return folder / name
        return None

    def _spellings(self, name: str) -> list[str]:
        first, slash, rest = name.partition("/")
        if slash and first in self.own_folders:
            return [f"{own}/{rest}" for own in self.own_folders]
        return [name]

    def get(self, *names: str) -> Path:
        """Finds the first file or folder that exists, or raises.

        Args:
          *names: As in `find`.

        Returns:
          The path.

        Raises:
          MissingArchiveError: None of the paths exists.
        """
        path = self.find(*names)
        if path is None:
            raise MissingArchiveError(f"no {' or '.join(names)} in {self.folders[-1]}")
        return path

    def extract(self, archive: Path, keep: Callable[[str], bool] | None = None) -> Path:
        """Extracts an archive into the scratch folder, once.

        Args:
          archive: A zip or tar file.
          keep: Selects members by name. Default: all members.

        Returns:
          The folder of the extracted files.
        """
        return extract(archive, self.scratch / archive.name, keep=keep)


@dataclass(frozen=True)
class Part:
    """A file or folder of a data set: already extracted, or inside an archive."""

    path: str
    """Path within the archive, possibly below one more folder."""
    archives: tuple[str, ...]
    """Alternative names of the archive."""
    extracted: tuple[str, ...] = ()
    """Alternative paths after extraction. Default: `path`."""
    contains: str = ""
    """A file or folder inside, which distinguishes it from others of the same name."""

    @property
    def names(self) -> tuple[str, ...]:
        """The alternatives for `Layout.needs`."""
        return (*self._extracted, *self.archives)

    @property
    def _extracted(self) -> tuple[str, ...]:
        paths = self.extracted or (self.path,)
        return tuple(PurePosixPath(path, self.contains).as_posix() for path in paths)

    def locate(self, search_path: SearchPath, keep: Callable[[str], bool] | None = None) -> Path:
        """Finds the file or folder, and extracts its archive if necessary.

        Args:
          search_path: Where to look.
          keep: Selects members of the archive by name. Default: all members. All parts of an
            archive must use the same selection, because it is extracted once.

        Returns:
          The file or folder.

        Raises:
          MissingArchiveError: Neither the extracted path nor the archive exists.
          DamagedArchiveError: The archive does not contain it.
        """
        found = search_path.find(*self._extracted)
        if found is not None:
            return found.parent if self.contains else found
        archive = search_path.get(*self.archives)
        top = search_path.extract(archive, keep)
        for path in (top / self.path, *sorted(top.glob(f"*/{self.path}"))):
            if _is_there(path):
                return path
        raise DamagedArchiveError(f"{archive} contains no required file of {self.path}")


@dataclass(frozen=True)
class Layout:
    """One form in which a data set is distributed."""

    title: str
    """A short description for messages."""
    needs: tuple[tuple[str, ...], ...]
    """The required files or folders, each with its alternatives."""
    read: Callable[[SearchPath], Mapping[str, Any]]
    """Lists the images of every split."""
    by_class: tuple[tuple[str, ...], ...] = ()
    """The entries of `needs` that must contain one folder per class if they are folders."""

    def missing(self, search_path: SearchPath) -> list[str]:
        """Lists what is missing.

        Args:
          search_path: Where to look.

        Returns:
          The missing files, each with its alternatives, and the missing class folders.
        """
        missing = []
        for names in self.needs:
            path = search_path.find(*names)
            if path is None:
                missing.append(" or ".join(names))
            elif names in self.by_class and list_images(path) and not has_class_folders(path):
                missing.append(f"one folder per class in {path}, which contains only images")
        return missing

    def is_partial(self, search_path: SearchPath) -> bool:
        """Whether at least one of the required files exists.

        Args:
          search_path: Where to look.

        Returns:
          True if one exists.
        """
        return any(search_path.find(*names) is not None for names in self.needs)

    def describe(self) -> str:
        """The title and the required files, one per line."""
        return "\n".join([f"{self.title}:", *(f"    {' or '.join(n)}" for n in self.needs)])


def inside(folder: Path, name: str) -> Path:
    """Finds a file directly in a folder or one level below.

    Args:
      folder: The folder.
      name: The path of the file within the folder.

    Returns:
      The file.

    Raises:
      DamagedArchiveError: The file does not exist.
    """
    for path in (folder / name, *sorted(folder.glob(f"*/{name}"))):
        if _is_there(path):
            return path
    raise DamagedArchiveError(f"{folder} has no {name}")


def _is_there(path: Path) -> bool:
    """Whether there is a file or folder: to open a pipe or a device could take forever."""
    return path.is_file() or path.is_dir()


def class_folders(name: str, splits: Mapping[str, Sequence[str]]) -> Layout:
    """The layout with one folder per split, and in it one folder per class.

    Args:
      name: Any name of the data set's own folder, or "." if there is no other folder.
      splits: Possible folder names of every split.

    Returns:
      The layout.
    """
    needs = {
        split: tuple(PurePosixPath(name, folder).as_posix() for folder in names)
        for split, names in splits.items()
    }
    return Layout(
        f"image folders, one per class, as in {next(iter(needs.values()))[0]}/CLASS/NAME.jpg",
        tuple(needs.values()),
        lambda search_path: {
            split: read_folders(search_path.get(*names)) for split, names in needs.items()
        },
        by_class=tuple(needs.values()),
    )


def labelled_pickles(title: str, files: Mapping[str, str]) -> Layout:
    """The layout with one pickle per split, with entries `data` and `labels`.

    Args:
      title: A short description for messages.
      files: The file of every split.

    Returns:
      The layout.
    """
    return Layout(
        title,
        tuple((name,) for name in files.values()),
        lambda search_path: {
            split: split_of_pickle(search_path.get(name), f"{split} class")
            for split, name in files.items()
        },
    )


def has_class_folders(folder: Path) -> bool:
    """Whether a folder contains folders that people made."""
    return bool(list_folders(folder))


def read_folders(folder: Path) -> ClassSplit:
    """As `list_classes`, but the log has the lines."""
    split, lines, _ = list_classes(folder)
    for line in lines:
        _log.warning("%s: %s", readable(folder), line)
    return split


def list_classes(
    folder: Path, root: Path | None = None
) -> tuple[ClassSplit, list[str], list[Path]]:
    """Lists the images of a folder that contains one folder per class.

    Images in the subfolders of a class belong to it. Files that are not images are left out.

    Args:
      folder: The folder.
      root: If given, links that lead out of this folder are left out, too.

    Returns:
      The classes and their files, sorted by name; lines that count and name the files that are
      left out, if there are any; and the links that lead out of `root`.

    Raises:
      DamagedArchiveError: The name of a folder cannot be that of a class.
    """
    classes: dict[str, list[Path]] = {}
    others = [path for path in folder.iterdir() if path.is_file() and not is_of_system(path.name)]
    links = [path for path in list_folders(folder) if leads_out(path, root)]
    for path in list_folders(folder):
        if not leads_out(path, root):
            classes[class_name(path)], beside, out = list_images_and_others(path, root)
            others += beside
            links += out
    heic = [file for file in others if file.suffix.lower() in (".heic", ".heif")]
    lines = left_out({*others} - {*heic}, folder, "file", "without an image")
    lines += left_out(heic, folder, "photograph", "as HEIC, to be converted to JPEG")
    return split_of_files(classes, folder), lines, links
