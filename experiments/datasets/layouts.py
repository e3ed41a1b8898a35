"""Layouts: the forms in which a data set is distributed, and where its files are looked up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from experiments.datasets.archives import DamagedArchiveError, MissingArchiveError, extract
from experiments.datasets.files import read_folders
from experiments.datasets.splits import Split, split_of_pickle

FEW_SHOT_PARTS = {"base": "train", "validation": "val", "novel": "test"}
"""The names that most distributions of few-shot data sets give their splits."""
PARTS = {"train": "train", "validation": "val", "test": "test"}
"""Those of other data sets."""
Keep = Callable[[str], bool]
"""Whether a member of an archive, by its name, is extracted."""


@dataclass(frozen=True)
class SearchPath:
    """The folders in which a layout looks for its files."""

    folders: tuple[Path, ...]
    """The folders, in the order of the search."""
    scratch: Path
    """Archives are extracted here. The folder is removed once the data set is prepared."""

    def find(self, *names: str) -> Path | None:
        """The first alternative that exists in the first folder that has one."""
        places = (folder / name for folder, name in itertools.product(self.folders, names))
        return next(filter(_is_there, places), None)

    def get(self, *names: str) -> Path:
        """As `find`; raises a `MissingArchiveError` where none exists."""
        path = self.find(*names)
        if path is None:
            raise MissingArchiveError(f"no {' or '.join(names)} in {self.folders[-1]}")
        return path

    def extract(self, archive: Path, keep: Keep | None = None) -> Path:
        """Extracts an archive into the scratch folder, once; `keep` selects members by name."""
        return extract(archive, self.scratch / archive.name, keep)


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

    def locate(self, search_path: SearchPath, keep: Keep | None = None) -> Path:
        """Finds it, perhaps in its archive, all parts of which must `keep` the same members."""
        found = search_path.find(*self._extracted)
        if found is not None:
            return found.parent if self.contains else found
        return inside(search_path.extract(search_path.get(*self.archives), keep), self.path)


@dataclass(frozen=True)
class Layout:
    """One form in which a data set is distributed."""

    title: str
    """A short description for messages."""
    needs: tuple[tuple[str, ...], ...]
    """The required files or folders, each with its alternatives."""
    read: Callable[[SearchPath], Mapping[str, Split]]
    """Lists the images of every split."""
    check: Callable[[], object] = lambda: None
    """Raises a `MissingArchiveError` if there is no data."""

    def missing(self, search_path: SearchPath) -> list[str]:
        """The missing files, each with its alternatives."""
        self.check()
        return [" or ".join(names) for names in self.needs if search_path.find(*names) is None]

    def describe(self) -> str:
        """The title and the required files, one per line."""
        return "\n".join([f"{self.title}:", *(f"    {' or '.join(n)}" for n in self.needs)])


def inside(folder: Path, name: str) -> Path:
    """Finds a file of an archive directly in a folder or one level below."""
    for path in (folder / name, *sorted(folder.glob(f"*/{name}"))):
        if _is_there(path):
            return path
    raise DamagedArchiveError(f"{folder} has no {name}")


def _is_there(path: Path) -> bool:
    """Whether there is a file or folder: to open a pipe or a device could take forever."""
    return path.is_file() or path.is_dir()


def class_folders(names: Sequence[str], splits: Mapping[str, Sequence[str]]) -> Layout:
    """The layout `NAME/SPLIT/CLASS/`, with possible names of the data set and of every split."""
    needs = {
        split: tuple(f"{name}/{folder}" for name in names for folder in folders)
        for split, folders in splits.items()
    }
    return Layout(
        f"image folders, one per class, as in {next(iter(needs.values()))[0]}/CLASS/NAME.jpg",
        tuple(needs.values()),
        lambda search_path: {
            split: read_folders(search_path.get(*names)) for split, names in needs.items()
        },
    )


def by_split(
    title: str,
    files: Mapping[str, str],
    read: Callable[[Path, SearchPath], Split],
    *more: tuple[str, ...],
) -> Layout:
    """The layout with one file per split, which `read` reads, and what else it needs."""
    return Layout(
        title,
        (*more, *((name,) for name in files.values())),
        lambda search_path: {
            split: read(search_path.get(name), search_path) for split, name in files.items()
        },
    )


def labelled_pickles(title: str, files: Mapping[str, str]) -> Layout:
    """The layout with one pickle per split, with entries `data` and `labels`."""
    splits = {file: split for split, file in files.items()}
    return by_split(
        title, files, lambda path, _: split_of_pickle(path, f"{splits[path.name]} class")
    )
