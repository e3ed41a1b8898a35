"""Images of one's own: `folder:PATH`, with a folder per class or a CSV file of labels.

The name of the prepared data follows from the content, so that it stands in for nothing, and a
changed folder is prepared anew. What is measured once is kept in the user's cache: by the path,
until names, sizes or times of the files change, which spares reading photographs again, and by the
content. Not beside the prepared data, because a run is planned before anything asks where that is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageColor

from experiments.core.errors import ConfigError, nearest_path
from experiments.core.storage import (
    cache_folder,
    is_remote,
    load_json,
    storage_path,
    write_json,
)
from experiments.core.terminal import has_controls
from experiments.datasets.archives import (
    DamagedArchiveError,
    MissingArchiveError,
    brief,
    readable,
)
from experiments.datasets.base import Dataset
from experiments.datasets.files import (
    alike,
    is_image,
    leads_out,
    left_out,
    list_classes,
    list_files,
    list_folders,
    list_images,
)
from experiments.datasets.images import Damaged, Inspected, SourceImage, encode, inspect_image
from experiments.datasets.layouts import Layout
from experiments.datasets.readers import multi_hot, read_table
from experiments.datasets.splits import (
    ClassSplit,
    MultiLabelSplit,
    Split,
    check_splits,
    open_files,
    split_of_files,
)

PREFIX = "folder:"
"""What the names of one's own folders begin with."""
LABELS = "labels.csv"
"""The file in such a folder that takes precedence over class folders."""
WHITE = "white"
"""The colour that transparent images are laid on, unless `@COLOUR` is given."""
SIDE = 128
"""Largest shorter side of the stored images, unless `@SIZE` is given."""

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
    "base": "base",
    "novel": "novel",
}
_KNOWN = ", ".join(dict.fromkeys(_SPLITS.values()))
_MEASURED_IMAGES = 128
"""Training images of which mean and deviation are measured."""
_LOSSLESS_SIDE = 64
"""Images of a shorter side up to this are stored without loss."""
_NAME_BYTES = 100
"""Of a folder's name, in the names of files: these have at most 255."""
_SIGNS = frozenset(" ()<>|`$*[]{}\"'\\:?#%&")


# --- Names --------------------------------------------------------------------------------------


class Named(NamedTuple):
    """The parts of `folder:PATH@SIZE@COLOUR#CONTENT`; all but the absolute path may be empty.

    Transparent images are laid on the colour. The content identifies the files that a run was
    trained on, in a configuration.
    """

    path: Path
    size: str
    colour: str
    content: str

    def __str__(self) -> str:
        options = "".join(f"@{option}" for option in (self.size, self.colour) if option)
        return f"{PREFIX}{self.path}{options}" + (f"#{self.content}" if self.content else "")


def is_own(name: str) -> bool:
    """Whether a data set is a folder of one's own."""
    return name.startswith(PREFIX)


def parse(name: str) -> Named:
    """The parts of a name that begins with `PREFIX`; raises a `ConfigError` if it has no path."""
    text = name.removeprefix(PREFIX)
    if not text:
        raise ConfigError(f"{name} lacks a path; set data.name = {PREFIX}PATH, a folder of images")
    if is_remote(Path(text)) or "://" in text:
        raise ConfigError(f"{name} must be a local folder; copy it to this machine")
    path, content = text, ""
    match = re.fullmatch(r"(.*)#([0-9a-f]{12})", text, re.DOTALL)
    if match and not os.path.exists(os.path.expanduser(text)):
        path, content = match.groups()
    found = {"size": "", "colour": ""}
    patterns = "[0-9]+", "|".join([*ImageColor.colormap, "#[0-9a-f]{3}", "#[0-9a-f]{6}"])
    for option, pattern in 2 * tuple(zip(found, patterns, strict=True)):  # In any order.
        match = re.fullmatch(rf"(.*)@({pattern})", path, re.DOTALL | re.IGNORECASE)
        if match and not found[option] and not os.path.exists(os.path.expanduser(path)):
            path, found[option] = match[1], match[2].lower()
    path = storage_path(os.path.abspath(os.path.expanduser(path)), "the folder")
    if has_controls(str(path)):
        raise ConfigError(f"{readable(path)} has control characters in its path; rename it")
    return Named(path, found["size"], found["colour"], content)


def pinned(name: str) -> str:
    """The name of a data set for the configuration of a run.

    That of a folder of one's own has its absolute path and a hash of its content.
    """
    if not is_own(name):
        return name
    own = parse(name)
    if own.content:
        return str(own)
    return str(own._replace(content=_examine(own.path, own.colour, _stamp(own.path))[1].content))


def short_name(name: str) -> str:
    """The name of a data set in titles and names of files, without signs that mean anything there.

    That of a folder of one's own is the start of the folder's, and the hash of its content.
    """
    if not is_own(name):
        return name
    own = parse(pinned(name))
    plain = (c if c.isprintable() and c not in _SIGNS else "_" for c in own.path.name)
    start = "".join(plain).encode()[:_NAME_BYTES].decode(errors="ignore") or "folder"
    return f"{start}-{own.content}" + (f"@{own.size}" if own.size else "")


def overlap(name: str, other: str) -> bool:
    """Whether two folders have the same content, or one contains the other."""
    mine, yours = parse(pinned(name)), parse(pinned(other))
    paths = os.path.realpath(mine.path), os.path.realpath(yours.path)
    return mine.content == yours.content or os.path.commonpath(paths) in paths


# --- The data set -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Listing:
    """The files of a folder, before any image is opened."""

    root: Path
    splits: Mapping[str, Split]
    left_out: tuple[str, ...] = ()
    """Lines on what is not taken."""
    seen: tuple[tuple[Path, tuple[int, int]], ...] = ()
    """The size and the time of every file when its name was listed."""

    def verify(self) -> None:
        """Raises if a file is no longer as it was listed: its content would have another name."""
        for file, before in self.seen:
            with contextlib.suppress(OSError):
                if _size_and_time(file) == before:
                    continue
            _examine.cache_clear()
            raise DamagedArchiveError(
                f"{readable(file)} has changed while the images were read; run the command again"
            )


class _Facts(NamedTuple):
    """What is measured, as JSON types."""

    content: str
    """A hash of all files, their names and labels."""
    multi_label: bool
    side: int
    channels: int
    mean: list[float]
    std: list[float]
    classes: dict[str, dict[str, int]]
    """The number of images of every class or label, by split."""
    images: dict[str, int]
    copies: list[list[str]]
    """Files that equal one of another split or, without splits, any other: both, with the split."""
    transparent: int
    largest: int
    """The largest of greys of 16 bits of which the files do not state how many count; else 0."""
    files: str = ""
    """A hash of the names, sizes and times of all files."""

    @property
    def bits(self) -> int:
        """How many bits count in greys of 16."""
        return max(8, self.largest.bit_length()) if self.largest else 16


def own_dataset(name: str) -> Dataset:
    """The data set of `folder:PATH`, perhaps with `@SIZE`, `@COLOUR` and `#CONTENT`.

    Raises:
      ConfigError: There is no such folder, it has no images, or no classes.
      DamagedArchiveError: A file is no readable image, or the CSV file is not as expected.
    """
    own = parse(name)
    try:
        listing, facts = _examine(own.path, own.colour, _stamp(own.path))
        if own.content not in ("", facts.content):
            raise ConfigError(
                f"{readable(own.path)} has changed since the run was trained on it; put the files "
                "back, or train again in another directory"
            )
    except (ConfigError, DamagedArchiveError):
        if not own.content or (known := _remembered(own.content)) is None:
            raise
        listing, facts = None, known  # It may still be prepared.
    size = int(own.size or facts.side)
    number = len({label for of in facts.classes.values() for label in of})
    of = f"with {number} labels" if facts.multi_label else f"of {number} classes"
    prepared = f"folder_{facts.content}" + (f"_at_{size}" if own.size else "")
    remarks = _remarks(own, facts)

    def check() -> None:
        if listing is None:
            raise MissingArchiveError(
                f"{readable(own.path)} no longer has the files of {prepared}, which is not "
                "prepared; put the files back, or train again in another directory"
            )

    return Dataset(
        name=prepared,
        description=f"{sum(facts.images.values())} images {of} in {readable(own.path)}",
        classes={split: len(names) for split, names in facts.classes.items()},
        layouts=(Layout("", (), lambda _: listing.splits if listing else {}, check=check),),
        image_shape=(size, size, facts.channels),
        multi_label=facts.multi_label,
        resizable=True,
        whole=True,
        mean=tuple(facts.mean),
        std=tuple(facts.std),
        encoding="png" if size <= _LOSSLESS_SIDE else "jpeg",
        background=own.colour or WHITE,
        bits=facts.bits,
        argument=f"{PREFIX}{own.path}",
        own=True,
        remarks=remarks,
        details=(*_details(facts), *remarks, *(listing.left_out if listing else ())),
        verify=listing.verify if listing else check,
    )


def _remarks(own: Named, facts: _Facts) -> tuple[str, ...]:
    """What is odd in the images or the classes, in lines."""
    lines = []
    if facts.transparent:
        lines.append(
            f"transparent images: {facts.transparent}, laid on {own.colour or WHITE}; for another "
            f"colour, set one after the path, as in {PREFIX}{own.path}@black"
        )
    if facts.bits < 16:
        lines.append(
            f"greys of 16 bits: none is above {facts.largest}, so {2**facts.bits - 1} is white"
        )
    if facts.copies:
        file, other = facts.copies[0]
        lines.append(
            f"copies that may be in training and in test: {len(facts.copies)}, such as {file} of "
            f"{other}; delete one of each"
        )
    if "novel" in facts.classes:
        lines.append(
            "the splits have no class in common: they are base and novel classes. Few-shot "
            "protocols evaluate on the novel ones; `folder` trains on images of all"
        )
    if pairs := alike(name for of in facts.classes.values() for name in of):
        shown = ", ".join(f"{first!r} and {second!r}" for first, second in pairs[:3])
        lines.append(f"classes that differ in case or spaces alone: {shown}")
    return tuple(lines)


def _details(facts: _Facts) -> list[str]:
    """What was found, in lines."""
    lines, noun = [], "label" if facts.multi_label else "class"
    for split, counts in facts.classes.items():
        least, most = (f(counts, key=lambda name: counts[name]) for f in (min, max))
        each = f"{counts[least]} of every {noun}"
        if counts[least] < counts[most]:
            each = f"{counts[least]} ({least}) to {counts[most]} ({most}) of a {noun}"
        lines.append(f"{split}: {facts.images[split]} images, {each}")
    if len(facts.classes) == 1:
        of = "the images" if facts.multi_label else "every class"
        few_shot = "; few-shot protocols train on half of the classes" * (not facts.multi_label)
        lines.append(f"no split of its own: 30 % of {of} are for test{few_shot}")
    mean, std = (" ".join(f"{n:.3f}" for n in numbers) for numbers in (facts.mean, facts.std))
    colours = "grey" if facts.channels == 1 else "colour"
    return [*lines, f"{colours}; mean {mean}, deviation {std}"]


# --- What there is ------------------------------------------------------------------------------


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes when files are added to a folder or removed, for the cache of this process."""
    places = [path, *path.glob("*/")] if path.is_dir() else [path]
    places += [sub for place in places if place.name.lower() in _SPLITS for sub in place.glob("*/")]
    places += [path / LABELS] if (path / LABELS).exists() else []
    return tuple(place.stat().st_mtime_ns for place in places if place.exists())


@functools.lru_cache(maxsize=8)
def _examine(path: Path, colour: str, stamp: tuple[int, ...]) -> tuple[_Listing, _Facts]:
    """What a folder has."""
    place = os.fsencode(path) + f"\0{colour}".encode()  # No path has a character 0.
    at_path = f"at-{hashlib.sha256(place).hexdigest()[:24]}"
    known, listing = _remembered(at_path), _list(path)
    check_splits(listing.splits)
    files = [*_files(listing)]
    listing = replace(listing, seen=tuple((file, _size_and_time(file)) for _, _, file in files))
    key = hashlib.sha256(repr([(split, type(of)) for split, of in listing.splits.items()]).encode())
    for (split, labels, file), (_, seen) in zip(files, listing.seen, strict=True):
        key.update(repr((split, labels, _below(file, listing), seen)).encode())
    if known is None or known.files != key.hexdigest():
        try:
            known = _measure(listing, files, colour or WHITE)._replace(files=key.hexdigest())
        finally:
            listing.verify()
        facts = known._asdict() | {"sha256": _digest(known._asdict())}
        with contextlib.suppress(OSError):  # They only save time.
            cache_folder("folders").mkdir(parents=True, exist_ok=True)
            for stem in (at_path, known.content):
                write_json(cache_folder("folders") / f"{stem}.json", facts)
    return listing, known


def _size_and_time(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _remembered(stem: str) -> _Facts | None:
    """What is known of a content, or a path."""
    try:
        facts = load_json(cache_folder("folders") / f"{stem}.json")
        return _Facts(**facts) if facts.pop("sha256") == _digest(facts) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # Absent, damaged, or of another version.


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _list(path: Path, root: Path | None = None) -> _Listing:
    """Finds the splits and classes of a folder, or of a CSV file; `root` is the folder as named."""
    root = root or path
    shown = f"{PREFIX}{readable(path)}"
    if path.is_file() and path.suffix.lower() == ".csv":
        return _read_csv(path)
    if not path.is_dir():
        what = "is a file, neither a folder nor a CSV file" if path.exists() else "does not exist"
        hint = not path.exists() and nearest_path(path)
        raise ConfigError(
            f"{shown} {what}; {hint or 'set a folder with one folder of images per class'}"
        )
    folders = list_folders(path)
    for place in (path / LABELS, *(own for own in folders if own.name.lower() in _SPLITS)):
        if leads_out(place, root):
            raise ConfigError(f"{shown}: {place.name} is a link out of the folder; copy it in")
    if (path / LABELS).is_file():
        return _read_csv(path / LABELS)
    parts: dict[str, Path] = {}
    for folder in folders:
        if (split := _SPLITS.get(folder.name.lower())) is not None:
            if split in parts:
                raise ConfigError(f"{shown} has both {parts[split].name} and {folder.name}")
            parts[split] = folder
    if "base" in parts and "novel" in parts:
        order = "base", "validation", "novel"
    elif "train" in parts and len(parts) > 1:
        order = "train", "validation", "test"
    elif len(folders) == 1 and "train" in parts and list_folders(parts["train"]):
        return _list(parts["train"], root)
    else:
        parts, order = {"train": path}, ("train",)
    lines, splits = list[str](), dict[str, Split]()
    if len(parts) > 1:
        beside = [folder for folder in folders if folder not in map(parts.get, order)]
        lines += left_out(beside, path, "folder", "beside the splits")
    for split in (split for split in order if split in parts):
        found, others, links = list_classes(parts[split], root)
        place = f"{parts[split].name}: " if len(parts) > 1 else ""
        empty = [parts[split] / name for name, images in found.items() if not images]
        others += left_out(empty, parts[split], "folder", "without images")
        others += left_out(links, parts[split], "link", "out of the folder, to be copied into it")
        lines += [place + line for line in others]
        classes = {name: images for name, images in found.items() if images}
        if not classes:
            raise _no_images(parts[split], links)
        splits[split] = split_of_files(classes, parts[split])
    return _classified(path, splits, lines)


def _classified(root: Path, splits: dict[str, Split], lines: list[str]) -> _Listing:
    """The listing of images with one class each; raises a `ConfigError` if there is one class."""
    names = [{*split.counts()} for split in splits.values()]
    if len(set.union(*names)) < 2:
        (name,) = names[0]
        inside = [f for own in list_folders(root) if own.name == name for f in list_folders(own)]
        hint = "add images of another class"
        if inside:
            hint = f"for its {len(inside)} folders, set {PREFIX}{readable(root / name)}"
        shown = "; ".join(
            [f"{readable(root)} has images of one class only, {name!r}", hint, *lines]
        )
        raise ConfigError(shown)
    for first, second in alike(name for own in names for name in sorted(own)):
        if "train" in splits and any(len({first, second} & own) == 1 for own in names):
            where = next(at for at, own in zip(splits, names, strict=True) if second in own)
            raise ConfigError(
                f"{readable(root)}: the class {second!r} of {where} is {first!r} in another split, "
                "but for case or spaces; give it one name, or name the splits base and novel if "
                "these are two classes"
            )
    disjoint = len(splits) > 1 and sum(map(len, names)) == len(set.union(*names))
    if disjoint and "train" in splits:
        # The layout of most few-shot data sets.
        renamed = {"train": "base", "validation": "validation", "test": "novel"}
        splits = {renamed[split]: found for split, found in splits.items()}
    last = "novel" if "base" in splits else "test"
    if len(splits) > 1 and last not in splits:
        splits[last] = splits.pop("validation")
    return _Listing(root, splits, tuple(lines))


def _no_images(folder: Path, links: list[Path]) -> ConfigError:
    why = f"; put the images of each class into a folder: {readable(folder)}/CLASS/NAME.jpg"
    if links:
        first = readable(min(links).relative_to(folder))
        why = f" but behind {len(links)} links out of it, such as {first}; copy the files into it"
    elif count := len(list_images(folder)):
        why = f" in folders, but {count} beside; make a folder for each class, or a file {LABELS}"
    elif others := list_files(folder):
        first = readable(min(others).relative_to(folder))
        why = f" among {len(others)} files, such as {first}; convert photographs to JPEG or PNG"
    return ConfigError(f"{readable(folder)} has no images{why}")


# --- CSV files ----------------------------------------------------------------------------------


def _read_csv(path: Path) -> _Listing:
    """Reads the columns `file`, `label` or `labels`, and perhaps `split`."""
    header, rows = read_table(path, delimiters=",;\t", most=2**21)
    shown, several = readable(path), "labels" in header
    if "file" not in header or several + ("label" in header) != 1:
        raise DamagedArchiveError(
            f"{shown} has the columns {', '.join(header)[:200] or '(none)'}; it needs file and "
            "labels (any number for each image) or label (one class for each image)"
        )
    on_disk = {_nfc(str(file.relative_to(path.parent))): file for file in list_files(path.parent)}
    listed: dict[Path, tuple[str, int, set[str]]] = {}
    absent: list[str] = []
    for number, cells in rows:
        where = f"{shown}, line {number}: {brief(cells['file'])}"
        file = on_disk.get(_nfc(os.path.normpath(cells["file"].replace("\\", "/"))))
        if file is None or not is_image(file.name):
            convert = " (convert it to JPEG or PNG)" * (file is not None)
            absent.append(f"{brief(cells['file'])} in line {number}{convert}")
            continue
        split = _SPLITS.get(cells.get("split", "train").lower())
        if split is None:
            wrong = brief(cells["split"])
            raise DamagedArchiveError(f"{where} has the split {wrong}, none of {_KNOWN}")
        text = _nfc(cells["labels" if several else "label"])
        labels = {part.strip() for part in (re.split("[,;|]", text) if several else [text])} - {""}
        if (not labels and not several) or any(len(label) > 1000 for label in labels):
            raise DamagedArchiveError(f"{where} has no label, or a very long one")
        before, first, known = listed.setdefault(file, (split, number, set()))
        if before != split or (not several and known not in (set(), labels)):
            raise DamagedArchiveError(
                f"{shown}, lines {first} and {number}: {brief(cells['file'])} has two splits, or "
                "two labels; the column of several is `labels`"
            )
        known |= labels
    if absent:
        raise DamagedArchiveError(
            f"{shown} lists {len(absent)} file{'s' * (len(absent) > 1)} that are not images in "
            f"{readable(path.parent)}: {', '.join(absent[:3])}{', …' * (len(absent) > 3)}; put "
            "them there, or delete the lines"
        )
    if not listed:
        raise DamagedArchiveError(f"{shown} lists no images")
    there = {split for split, _, _ in listed.values()}
    order = ("train", "validation", "test")
    if {"base", "novel"} <= there and not several:
        order = ("base", "validation", "novel")
    if not there <= {*order} or order[0] not in there:
        raise DamagedArchiveError(
            f"{shown} has the splits {', '.join(sorted(there))}; use train with validation and "
            "test, or, for one class an image, base and novel with validation"
        )
    images = {
        split: {file: own for file, (of, _, own) in sorted(listed.items()) if of == split}
        for split in order
        if split in there
    }
    unlisted = [f for f in on_disk.values() if is_image(f.name) and f not in listed]
    notes = left_out(unlisted, path.parent, "image", f"that {path.name} does not list")
    if several:
        return _of_many_labels(path, images, notes)
    splits: dict[str, Split] = {}
    for split, of in images.items():
        classes: dict[str, list[Path]] = {}
        for file, (label,) in of.items():
            classes.setdefault(label, []).append(file)
        splits[split] = split_of_files(classes, path)
    return _classified(path.parent, splits, notes)


def _of_many_labels(
    path: Path, images: dict[str, dict[Path, set[str]]], notes: list[str]
) -> _Listing:
    if "test" not in images and "validation" in images:
        images["test"] = images.pop("validation")
    names = tuple(sorted(set().union(*images["train"].values())))
    others = set().union(*(labels for of in images.values() for labels in of.values()))
    if unknown := sorted(others - {*names}):
        known = [name for name, other in alike([*names, unknown[0]]) if other == unknown[0]]
        hint = f"; give it the name of {known[0]!r}" if known else ""
        raise DamagedArchiveError(
            f"{readable(path)}: no image of the split train has the label {unknown[0]!r}{hint}"
        )
    if not names:
        raise DamagedArchiveError(f"{readable(path)}: no image has a label")
    splits: dict[str, Split] = {}
    for split, of in images.items():
        targets = multi_hot([*of.values()], names, path)
        splits[split] = MultiLabelSplit(names, [*of], targets, open_files, path)
    return _Listing(path.parent, splits, tuple(notes))


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


# --- What is measured ---------------------------------------------------------------------------


def _files(listing: _Listing) -> Iterator[tuple[str, str, Path]]:
    """The split, the labels and the path of every image, in the order of the records."""
    for name, split in listing.splits.items():
        if isinstance(split, ClassSplit):
            for label, files in split.classes.items():
                yield from ((name, label, file) for file in files)
        else:
            for file, row in zip(split.keys, split.targets, strict=True):
                own = [label for label, has in zip(split.names, row, strict=True) if has]
                yield name, "|".join(own), file


def _below(file: Path, listing: _Listing) -> str:
    return _nfc(readable(file.relative_to(listing.root)))


def _measure(listing: _Listing, files: list[tuple[str, str, Path]], background: str) -> _Facts:
    """Reads all files; few images are decoded."""
    multi_label = isinstance(listing.splits[files[0][0]], MultiLabelSplit)

    def examine(item: tuple[str, str, Path]) -> tuple[str, Inspected]:
        image = inspect_image(SourceImage(item[2], readable(item[2])))
        with item[2].open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), image

    examined = _of_every_image(examine, files)
    images = [image for _, image in examined]
    transparent = sum(image.transparent for image in images)
    tinted = transparent and len({*ImageColor.getrgb(background)}) > 1
    whole, first, copies = hashlib.sha256(), dict[str, tuple[str, str]](), list[list[str]]()
    for (split, labels, file), (hashed, _) in zip(files, examined, strict=True):
        name = _below(file, listing)
        whole.update(repr((split, labels, name, hashed)).encode())
        at, other = first.setdefault(hashed, (split, name))
        if other != name and (at != split or len(listing.splits) == 1):
            copies.append([name, other])
    facts = _Facts(
        content="",
        multi_label=multi_label,
        side=min(SIDE, max(image.side for image in images)),
        channels=1 if all(image.grey for image in images) and not tinted else 3,
        mean=[],
        std=[],
        classes={name: split.counts() for name, split in listing.splits.items()},
        images={name: sum(of == name for of, _, _ in files) for name in listing.splits},
        copies=copies,
        transparent=transparent,
        largest=max(image.largest for image in images),
    )
    # The stored pixels depend on these, too.
    whole.update(repr((multi_label, background * (transparent > 0), facts.bits)).encode())
    training = [file for split, _, file in files if split == files[0][0]]
    measured = training[:: -(-len(training) // _MEASURED_IMAGES)]
    mean, std = _mean_and_deviation(measured, facts, background)
    return facts._replace(content=whole.hexdigest()[:12], mean=mean, std=std)


def _of_every_image(action: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """The results of an action for all images; one error names all that cannot be read."""
    damaged = Damaged()

    def run(item: Any) -> Any:
        with damaged:
            return action(item)

    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("ignore")
        results = list(pool.map(run, items))
    damaged.check(len(items))
    return results


def _mean_and_deviation(
    files: list[Path], facts: _Facts, background: str
) -> tuple[list[float], list[float]]:
    """Of the pixel values in [0, 1] of images that are at most 64 pixels high or wide."""

    def levels(file: Path) -> np.ndarray:
        image, shape = SourceImage(file, readable(file)), (64, 64, facts.channels)
        small = encode(image, shape, whole=True, background=background, bits=facts.bits)
        with Image.open(io.BytesIO(small)) as opened:
            return np.asarray(opened, np.float64).reshape(-1, facts.channels) / 255

    pixels = _of_every_image(levels, files)
    # Every image counts the same.
    mean = np.mean([image.mean(axis=0) for image in pixels], axis=0)
    square = np.mean([(image**2).mean(axis=0) for image in pixels], axis=0)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return [round(float(m), 4) for m in mean], [max(round(float(s), 4), 0.01) for s in std]
