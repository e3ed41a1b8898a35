"""Which files of a folder are images, and which folders are classes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
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

_PICTURES = {
    *(".heic", ".heif", ".jxl", ".psd", ".svg", ".pdf"),
    *(".cr2", ".cr3", ".nef", ".arw", ".dng"),
}
"""Extensions of pictures that are not read."""


def _is_of_system(name: str) -> bool:
    return name.startswith(".") or name.lower() in _OF_SYSTEMS


def list_folders(folder: Path) -> list[Path]:
    """The folders in a folder, also behind links, sorted; without those that systems leave."""
    # Path.iterdir needs a system call per file to tell folders apart; there may be 50,000 files.
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if not _is_of_system(entry.name) and entry.is_dir()]
    return [folder / name for name in sorted(names)]


def list_images(folder: Path) -> list[Path]:
    """The image files directly in a folder, by their extension; none if there is no folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if is_image(entry.name) and not entry.is_dir()]
    return [folder / name for name in names]


def is_image(name: str) -> bool:
    """Whether files of this name are read as images, by the extension."""
    return os.path.splitext(name)[1].lower() in image_extensions() and not _is_of_system(name)


def list_files(folder: Path) -> list[Path]:
    """The files in a folder and its subfolders, also behind links, without those of systems."""

    def refuse(error: OSError) -> None:
        raise error

    files: list[Path] = []
    visited: set[str] = set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:  # A link to a folder above.
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not _is_of_system(name))
        files += [Path(place, name) for name in names if not _is_of_system(name)]
    return files


def left_out(paths: Collection[Path], folder: Path, noun: str, why: str) -> list[str]:
    """A line with the number of a folder's files or folders (`noun`), why, and the first names.

    No line if there are none.
    """
    names = sorted(readable(path.relative_to(folder)) for path in paths)
    count = f"{len(names)} {noun}" + "s" * (len(names) > 1)
    shown = ", ".join(names[:10]) + ", …" * (len(names) > 10)
    kinds = sorted({path.suffix.lower() for path in paths} & _PICTURES)
    convert = f"; convert {' and '.join(kinds)} to JPEG or PNG" * bool(kinds)
    return [f"left out {count} {why}: {shown}{convert}"] if names else []


def class_name(folder: Path) -> str:
    """The name of a folder, for a class; a `DamagedArchiveError` if it cannot be one."""
    if has_controls(folder.name) or re.search("[\ud800-\udfff]", folder.name):
        raise DamagedArchiveError(
            f"the name of the folder {readable(folder)} is not UTF-8, or has control characters; "
            "rename it, as the class has its name"
        )
    return folder.name


def list_classes(folder: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """The images of every class of a folder with one folder per class, also in subfolders of these.

    Also lines that count and name other files, which are left out.
    """
    classes: dict[str, list[Path]] = {}
    others = [path for path in folder.iterdir() if path.is_file() and not _is_of_system(path.name)]
    for path in list_folders(folder):
        images = classes.setdefault(class_name(path), [])
        for file in list_files(path):
            (images if is_image(file.name) else others).append(file)
    beside = [path for path in others if is_image(path.name)]
    lines = left_out(beside, folder, "image", "in no folder of a class")
    return classes, lines + left_out({*others} - {*beside}, folder, "file", "of other kinds")


def read_folders(folder: Path) -> ClassSplit:
    """The images of a folder with one folder per class; the log says what is left out."""
    classes, lines = list_classes(folder)
    for line in lines:
        _log.warning("%s: %s", readable(folder), line)
    return split_of_files(classes, folder)
