"""Which files of a folder are images, and which folders are classes."""

from __future__ import annotations

import logging
import os
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.core.terminal import has_controls
from experiments.datasets.archives import DamagedArchiveError, readable
from experiments.datasets.images import image_extensions
from experiments.datasets.splits import ClassSplit, split_of_files

_log = logging.getLogger(__name__)

# In lower case. Hidden files and folders are skipped, too.
_OF_SYSTEMS = {
    *("__macosx", "@eadir", "@recycle", "@recently-snapshot", "#recycle", "#snapshot"),
    *("lost+found", "$recycle.bin", "system volume information", "network trash folder"),
    *("temporary items", "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "icon\r"),
}


def is_of_system(name: str) -> bool:
    """Whether systems, and not people, leave files or folders of this name behind."""
    return name.startswith(".") or name.lower() in _OF_SYSTEMS


def list_folders(folder: Path) -> list[Path]:
    """The folders in a folder, also behind links, sorted; without those that systems leave."""
    # Path.iterdir needs a system call per file to tell folders apart; there may be 50,000 files.
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if not is_of_system(entry.name) and entry.is_dir()]
    return [folder / name for name in sorted(names)]


def list_images(folder: Path) -> list[Path]:
    """The image files directly in a folder, by their extension; none if there is no folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if is_image(entry.name) and not _is_special(entry)]
    return [folder / name for name in names]


def is_image(name: str) -> bool:
    """Whether files of this name are read as images, by the extension."""
    return os.path.splitext(name)[1].lower() in image_extensions() and not is_of_system(name)


def _is_special(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a pipe, a socket or a device. A link to nothing is an error."""
    return not entry.is_file() and os.path.exists(entry)


def list_files(folder: Path) -> list[Path]:
    """The files in a folder and its subfolders, each once, without those that systems leave behind.

    Links that lead out of the folder are left out, and pipes, sockets and devices.
    """
    return [Path(entry.path) for entry in _walk(folder, folder, []) if not _is_special(entry)]


def leads_out(path: Path | os.DirEntry[str], root: Path | None) -> bool:
    """Whether it is a link to a place that is not below `root`."""
    if root is None or not path.is_symlink():
        return False
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _walk(folder: Path, root: Path | None, links: list[Path]) -> Iterator[os.DirEntry[str]]:
    """All that is no folder, in a folder and its subfolders; `links` receives what leads out."""
    visited: set[str] = set()
    places = [os.fspath(folder)]
    while places:
        real = os.path.realpath(place := places.pop(0))
        if real in visited:  # A link to a folder above.
            continue
        visited.add(real)
        with os.scandir(place) as found:
            named = [entry for entry in found if not is_of_system(entry.name)]
        entries = [entry for entry in named if not leads_out(entry, root)]
        links += [Path(entry.path) for entry in named if leads_out(entry, root)]
        below = [entry.path for entry in entries if entry.is_dir()]
        places[:0] = sorted(below)
        yield from (entry for entry in entries if not entry.is_dir())


def alike(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of different names that are equal but for case, spaces and encoded accents.

    The first of a pair comes before the second.
    """
    first: dict[str, str] = {}
    pairs = []
    for name in dict.fromkeys(names):
        folded = unicodedata.normalize("NFC", name).casefold()
        key = unicodedata.normalize("NFC", " ".join(folded.split()))
        if first.setdefault(key, name) != name:
            pairs.append((first[key], name))
    return pairs


def left_out(paths: Iterable[Path], folder: Path, noun: str, why: str) -> list[str]:
    """A line with the number of a folder's files or folders (`noun`), why, and the first names.

    No line if there are none.
    """
    names = sorted(readable(path.relative_to(folder)) for path in paths)
    if not names:
        return []
    count = f"{len(names)} {noun}" + "s" * (len(names) > 1)
    shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    return [f"left out {count} {why}: {shown}"]


def class_name(folder: Path) -> str:
    """The name of a folder, for a class; a `DamagedArchiveError` if it cannot be one."""
    try:
        folder.name.encode()
    except UnicodeEncodeError:
        problem = "is not UTF-8"
    else:
        if not has_controls(folder.name):
            return folder.name
        problem = "has several lines or control characters"
    raise DamagedArchiveError(
        f"the name of the folder {readable(folder)} {problem}; rename it, as the class has its name"
    )


def list_classes(
    folder: Path, root: Path | None = None
) -> tuple[dict[str, list[Path]], list[str], list[Path]]:
    """Lists the images of a folder with one folder per class, also in subfolders of these.

    Returns:
      The files of every class; lines that count and name what is left out; and the links that lead
      out of `root`, if it is given, which are left out, too.
    """
    classes: dict[str, list[Path]] = {}
    others = [path for path in folder.iterdir() if path.is_file() and not is_of_system(path.name)]
    links: list[Path] = []
    for path in list_folders(folder):
        if leads_out(path, root):
            links.append(path)
            continue
        images = classes.setdefault(class_name(path), [])
        for entry in _walk(path, root, links):
            counts = is_image(entry.name) and not _is_special(entry)
            (images if counts else others).append(Path(entry.path))
    heic = [file for file in others if file.suffix.lower() in (".heic", ".heif")]
    lines = left_out({*others} - {*heic}, folder, "file", "without an image")
    lines += left_out(heic, folder, "photograph", "as HEIC, to be converted to JPEG")
    return classes, lines, links


def read_folders(folder: Path) -> ClassSplit:
    """The images of a folder with one folder per class; the log says what is left out."""
    classes, lines, _ = list_classes(folder)
    for line in lines:
        _log.warning("%s: %s", readable(folder), line)
    return split_of_files(classes, folder)
