"""Images of one's own: `folder:PATH`, with a folder per class or a CSV file of labels.

The name of the prepared data follows from the content, so that it stands in for nothing, and a
changed folder is prepared anew. What is measured once is kept in the user's cache: by the path,
until names, sizes or times of the files change, which spares decoding photographs again, and by the
content. Not beside the prepared data, because a run is planned before anything asks where that is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image, ImageColor

from experiments.data.builders.archives import (
    DamagedArchiveError,
    MissingArchiveError,
    brief,
    readable,
)
from experiments.data.builders.base import DatasetSpec, ImageBuilder
from experiments.data.builders.images import (
    ClassSplit,
    Inspected,
    MultiLabelSplit,
    SourceImage,
    alike,
    encode,
    hash_pixels,
    inspect_image,
    is_image,
    leads_out,
    left_out,
    list_files,
    list_folders,
    list_images,
    open_files,
    split_of_files,
)
from experiments.data.builders.layouts import SearchPath, list_classes
from experiments.data.builders.readers import no_labels, read_table
from experiments.data.builders.tasks import ClassificationBuilder, FewShotBuilder, MultiLabelBuilder
from experiments.errors import ConfigError, nearest_path
from experiments.storage import (
    cache_folder,
    is_remote,
    load_json,
    regular,
    storage_path,
    write_json,
)
from experiments.terminal import has_controls

_log = logging.getLogger(__name__)

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
_MEASURED_IMAGES = 128
"""Training images of which mean and deviation are measured."""
_LOSSLESS_SIDE = 64
"""Images of a shorter side up to this are stored without loss."""

_NAME_BYTES = 100
"""Of a folder's name, in the names of files: these have at most 255."""
_SIGNS = frozenset(" ()<>|`$*[]{}\"'\\:?#%&")

Split = ClassSplit | MultiLabelSplit


class Named(NamedTuple):
    """The parts of `folder:PATH@SIZE@COLOUR#CONTENT`; all but the path may be absent."""

    path: Path
    """Absolute."""
    size: str
    colour: str
    """What transparent images are laid on; empty: white."""
    content: str
    """Identifies the files that a run was trained on, in a configuration."""

    def __str__(self) -> str:
        options = "".join(f"@{option}" for option in (self.size, self.colour) if option)
        return f"{PREFIX}{self.path}{options}" + (f"#{self.content}" if self.content else "")


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


@dataclass(frozen=True)
class _Listing:
    """The files of a folder, before any image is opened."""

    base: type[ImageBuilder]
    """Which of the three kinds of data sets it is."""
    root: Path
    splits: Mapping[str, Split]
    left_out: tuple[str, ...] = ()
    """Lines on what is not taken."""
    seen: Mapping[Path, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """The size and the time of every file when its name was listed."""


class _Facts(NamedTuple):
    """What is measured, as JSON types."""

    content: str
    """A hash of all files, their names and labels."""
    base: str
    side: int
    channels: int
    mean: list[float]
    std: list[float]
    classes: dict[str, dict[str, int]]
    """The images of every class or label, by split."""
    images: dict[str, int]
    """The images of every split."""
    copies: list[str]
    """Files without a split of their own that equal another one with the same labels."""
    shared: dict[str, tuple[int, str, str]]
    """Other images that equal an earlier one, in words by their splits or labels: their number, the
    first of them, and what it equals."""
    transparent: int
    """Images with transparent pixels."""
    largest: int
    """The largest of greys of 16 bits of which the files do not state how many count; else 0."""
    coarse: int
    """Images whose colours have 16 bits and stay below half, in every such image."""
    files: str = ""
    """A hash of the names, sizes and times of all files."""


_BASES = {
    kind.__name__: kind for kind in (ClassificationBuilder, FewShotBuilder, MultiLabelBuilder)
}


class FolderBuilder(ImageBuilder):
    """A folder of one's own; mixed into one of the classes in `tasks`."""

    PATH: ClassVar[Path]
    FACTS: ClassVar[_Facts]
    LISTING: ClassVar[_Listing | None]
    """None if the folder no longer has the content, which may still be prepared."""

    def _download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        super()._download_and_prepare(*args, **kwargs)
        assert self.LISTING is not None
        _check_unchanged(self.LISTING)

    def _records(self, split: Any, items: list[tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
        assert self.LISTING is not None
        with _naming_all(self.LISTING):
            yield from super()._records(split, items)

    @classmethod
    def typed(cls) -> str:
        """As the command line takes it."""
        return f"{PREFIX}{cls.PATH}"

    @classmethod
    def check_source(cls, search_path: SearchPath) -> None:
        """Raises a `MissingArchiveError` if the folder has changed."""
        if cls.LISTING is None:
            raise MissingArchiveError(
                f"{readable(cls.PATH)} no longer has the files of {cls.name}, which is not "
                "prepared; put the files back, or train again in another directory"
            )

    def read_splits(self, search_path: SearchPath) -> Mapping[str, Any]:
        """The files that were found."""
        self.check_source(search_path)
        assert self.LISTING is not None
        return self.LISTING.splits

    @classmethod
    def remarks(cls) -> list[str]:
        """What is odd in the images or the classes, in lines."""
        facts, lines = cls.FACTS, []
        if facts.transparent:
            lines.append(
                f"transparent images: {facts.transparent}, laid on {cls.SPEC.background}; for "
                f"another colour, set one after the path, as in {cls.typed()}@black"
            )
        if cls.SPEC.bits < 16:
            lines.append(
                f"greys of 16 bits: none is above {facts.largest}, so that {cls.SPEC.bits} bits "
                f"count and {2**cls.SPEC.bits - 1} is white"
            )
        if facts.coarse:
            lines.append(
                f"colours of 16 bits: none of {facts.coarse} images reaches half of white, and the "
                "upper 8 bits alone are read; convert them to 8 bits with the brightest as white"
            )
        lines += [
            f"{copies}: {count}, such as {first} of {other}; delete one of each"
            for copies, (count, first, other) in facts.shared.items()
        ]
        if "novel" in facts.classes:
            lines.append(
                "the splits have no class in common: they are base and novel classes. Few-shot "
                "protocols evaluate on the novel ones; `folder` trains on images of all"
            )
        if pairs := alike(name for of in facts.classes.values() for name in of):
            shown = ", ".join(f"{first!r} and {second!r}" for first, second in pairs[:3])
            lines.append(f"classes that differ in case or spaces alone: {shown}")
        return lines

    @classmethod
    def details(cls) -> list[str]:
        """What was found, in lines."""
        facts, noun = cls.FACTS, "label" if issubclass(cls, MultiLabelBuilder) else "class"
        lines = []
        for split, counts in facts.classes.items():
            least, most = (f(counts, key=lambda name: counts[name]) for f in (min, max))
            each = f"{counts[least]} of every {noun}"
            if counts[least] < counts[most]:
                each = f"{counts[least]} ({least}) to {counts[most]} ({most}) of a {noun}"
            lines.append(f"{split}: {facts.images[split]} images, {each}")
        if len(facts.classes) == 1:
            of = "the images" if noun == "label" else "every class"
            lines.append(
                f"no split of its own: 30 % of {of} are for test"
                + ("; few-shot protocols train on half of the classes" * (noun == "class"))
            )
        colours = "grey" if facts.channels == 1 else "colour"
        lines.append(f"{colours}; mean {_text(facts.mean)}, deviation {_text(facts.std)}")
        lines += cls.remarks()
        if cls.LISTING is not None:
            lines += cls.LISTING.left_out
        return lines


def _text(numbers: list[float]) -> str:
    return " ".join(f"{number:.3f}" for number in numbers)


def folder_builder(name: str) -> type[ImageBuilder]:
    """The builder of `folder:PATH`, perhaps with `@SIZE`, `@COLOUR` and `#CONTENT`.

    Raises:
      ConfigError: There is no such folder, it has no images, or no classes.
      DamagedArchiveError: A file is no readable image, or the CSV file is not as expected.
    """
    own = parse(name)
    background = own.colour or WHITE
    try:
        listing, facts = _examine(own.path, background, _stamp(own.path))
    except (ConfigError, DamagedArchiveError):
        if not own.content or (known := _remembered(own.content)) is None:
            raise
        listing, facts = None, known
    if own.content and facts.content != own.content:
        known = _remembered(own.content)
        if known is None:
            raise ConfigError(
                f"{readable(own.path)} has changed since the run was trained on it; put the files "
                "back, or train again in another directory"
            )
        listing, facts = None, known
    size = int(own.size or facts.side)
    total, number = (
        sum(facts.images.values()),
        len({n for of in facts.classes.values() for n in of}),
    )
    labels = facts.base == MultiLabelBuilder.__name__
    spec = DatasetSpec(
        description=f"{total} images {'with' if labels else 'of'} {number} "
        f"{'labels' if labels else 'classes'} in {readable(own.path)}",
        image_shape=(size, size, facts.channels),
        classes={split: len(names) for split, names in facts.classes.items()},
        homepage="",
        resizable=True,
        whole=True,
        encoding="png" if size <= _LOSSLESS_SIDE else "jpeg",
        background=background,
        bits=_bits(facts.largest),
        mean=tuple(facts.mean),
        std=tuple(facts.std),
    )
    return type(
        "Folder",
        (FolderBuilder, _BASES[facts.base]),
        {
            "__module__": __name__,
            "name": f"folder_{facts.content}" + (f"_at_{size}" if own.size else ""),
            "SPEC": spec,
            "PATH": own.path,
            "FACTS": facts,
            "LISTING": listing,
        },
    )


def pinned(name: str) -> str:
    """A name with an absolute path and the hash of the content."""
    own = parse(name)
    if own.content:
        return str(own)
    facts = _examine(own.path, own.colour or WHITE, _stamp(own.path))[1]
    return str(own._replace(content=facts.content))


def short_name(name: str) -> str:
    """A name for titles and files: the start of the folder's, and the hash of its content.

    Spaces, line breaks and the signs of markup and of other systems' paths are underscores in it.
    """
    own = parse(pinned(name))
    plain = (c if c.isprintable() and c not in _SIGNS else "_" for c in own.path.name)
    start = "".join(plain).encode()[:_NAME_BYTES].decode(errors="ignore") or "folder"
    return f"{start}-{own.content}" + (f"@{own.size}" if own.size else "")


def overlap(name: str, other: str) -> bool:
    """Whether two folders have the same content, or one contains the other."""
    mine, yours = parse(pinned(name)), parse(pinned(other))
    paths = os.path.realpath(mine.path), os.path.realpath(yours.path)
    return mine.content == yours.content or os.path.commonpath(paths) in paths


# --- What there is ------------------------------------------------------------------------------


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes when files are added to a folder or removed, for the cache of this process."""
    places = [path, *path.glob("*/")] if path.is_dir() else [path]
    places += [sub for place in places if place.name.lower() in _SPLITS for sub in place.glob("*/")]
    places += [path / LABELS] if (path / LABELS).exists() else []
    return tuple(place.stat().st_mtime_ns for place in places if place.exists())


@functools.lru_cache(maxsize=8)
def _examine(path: Path, background: str, stamp: tuple[int, ...]) -> tuple[_Listing | None, _Facts]:
    """What a folder has; of one that is gone, what it last had, without a listing."""
    # No path has a character 0.
    place = os.fsencode(path) + f"\0{background}".encode() * (background != WHITE)
    at_path = f"at-{hashlib.sha256(place).hexdigest()[:24]}"
    known = _remembered(at_path)
    if known is not None and not path.exists():
        _log.warning("%s%s is gone; what was prepared from it is used", PREFIX, readable(path))
        return None, known
    listing = _list(path)
    # The class method needs no instance, and says which classes are in only one split.
    listing.base.check_splits(listing.splits)
    files = [*_files(listing)]
    listing = replace(listing, seen={file: _size_and_time(file) for _, _, file in files})
    key = hashlib.sha256(repr([listing.base.__name__, *listing.splits]).encode())
    for split, labels, file in files:
        size, time = listing.seen[file]
        key.update(repr((split, labels, _below(file, listing), size)).encode())
        key.update(repr(time).encode())
    if known is None or known.files != key.hexdigest():
        with _naming_all(listing):
            known = _measure(listing, files, background)._replace(files=key.hexdigest())
        facts = known._asdict() | {"sha256": _digest(known._asdict())}
        with contextlib.suppress(OSError):  # They only save time.
            cache_folder("folders").mkdir(parents=True, exist_ok=True)
            for stem in (at_path, known.content):
                write_json(cache_folder("folders") / f"{stem}.json", facts)
    return _without_copies(listing, known.copies), known


def _size_and_time(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _check_unchanged(listing: _Listing) -> None:
    """Raises if a file is no longer as it was listed: its content would have another one's name."""
    for file, before in listing.seen.items():
        with contextlib.suppress(OSError):
            if _size_and_time(file) == before:
                continue
        _examine.cache_clear()
        raise DamagedArchiveError(
            f"{readable(file)} has changed while the images were read; run the command again"
        )


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
    lines: list[str] = []
    if "base" in parts and "novel" in parts:
        order = "base", "validation", "novel"
    elif "train" in parts and len(parts) > 1:
        order = "train", "validation", "test"
    elif len(folders) == 1 and "train" in parts and list_folders(parts["train"]):
        return _list(parts["train"], root)
    else:
        parts, order = {"train": path}, ("train",)
    if len(parts) > 1:
        beside = [folder for folder in folders if folder not in map(parts.get, order)]
        lines += left_out(beside, path, "folder", "beside the splits")
    splits: dict[str, Split] = {}
    for split in (split for split in order if split in parts):
        found, others, links = list_classes(parts[split], root)
        place = f"{parts[split].name}: " if len(parts) > 1 else ""
        empty = [parts[split] / name for name, images in found.classes.items() if not images]
        others += left_out(empty, parts[split], "folder", "without images")
        others += left_out(links, parts[split], "link", "out of the folder, to be copied into it")
        lines += [place + line for line in others]
        classes = {name: images for name, images in found.classes.items() if images}
        if not classes:
            raise _no_images(parts[split], links)
        splits[split] = ClassSplit(classes, found.open, found.source)
    return _classified(path, splits, lines)


def _classified(root: Path, splits: dict[str, Split], lines: list[str]) -> _Listing:
    """The listing of images with one class each; raises a `ConfigError` if there is one class."""
    names = [set(split.classes) for split in splits.values() if isinstance(split, ClassSplit)]
    if len(set.union(*names)) < 2:
        (name,) = names[0]
        inside = [f for own in list_folders(root) if own.name == name for f in list_folders(own)]
        hint = f"; for its {len(inside)} folders, set {PREFIX}{readable(root / name)}"
        hint *= bool(inside)
        hint = hint or "; add images of another class"
        hint += "".join(f"; {line}" for line in lines)
        raise ConfigError(f"{readable(root)} has images of one class only, {name!r}{hint}")
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
        if "novel" not in splits:
            splits["novel"] = splits.pop("validation")
    elif "train" in splits and "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    base = FewShotBuilder if "novel" in splits else ClassificationBuilder
    return _Listing(base, root, splits, tuple(lines))


def _no_images(folder: Path, links: list[Path]) -> ConfigError:
    shown = readable(folder)
    if links:
        return ConfigError(
            f"{shown} has no images but behind {len(links)} links out of the folder, such as "
            f"{readable(min(links).relative_to(folder))}; copy the files into it"
        )
    if count := len(list_images(folder)):
        return ConfigError(
            f"{shown} has {count} images, but no folder per class; put the images of each class "
            f"into a folder, or list them in {LABELS} with the columns file,labels"
        )
    if others := list_files(folder):
        return ConfigError(
            f"{shown} has {len(others)} files, but none is an image by its extension, such as "
            f"{readable(min(others).relative_to(folder))}; convert photographs to JPEG or PNG"
        )
    return ConfigError(
        f"{shown} has no images; put the images of each class into a folder: {shown}/CLASS/NAME.jpg"
    )


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
    splits: dict[str, dict[Path, set[str]]] = {}
    lines_of: dict[Path, tuple[str, int]] = {}
    absent: list[str] = []
    known_labels: dict[str, str] = {}
    for number, cells in rows:
        file = on_disk.get(_nfc(os.path.normpath(cells["file"].replace("\\", "/"))))
        if file is None or not is_image(file.name):
            convert = " (convert it to JPEG or PNG)" * (file is not None)
            absent.append(f"{brief(cells['file'])} in line {number}{convert}")
            continue
        split = _SPLITS.get(cells.get("split", "train").lower())
        if split is None:
            raise DamagedArchiveError(
                f"{shown}, line {number}: the split {brief(cells['split'])} is none of "
                "train, validation, test, base and novel"
            )
        before = lines_of.setdefault(file, (split, number))
        labels = {_nfc(cells["labels" if several else "label"])} - {""}
        if several:
            labels = {part.strip() for text in labels for part in re.split("[,;|]", text)} - {""}
        elif not labels:
            raise DamagedArchiveError(f"{shown}, line {number}: {cells['file']} has no label")
        if any(len(label) > 1000 for label in labels) or len(known_labels) > 10**6:
            raise DamagedArchiveError(f"{shown}, line {number}: a label is too long, or too many")
        labels = {known_labels.setdefault(label, label) for label in labels}
        known = splits.setdefault(split, {}).setdefault(file, set())
        if before[0] != split or (not several and known and known != labels):
            raise DamagedArchiveError(
                f"{shown}, lines {before[1]} and {number}: {cells['file']} has two "
                + ("splits" if before[0] != split else "labels; the column of several is `labels`")
            )
        known |= labels
    if absent:
        raise DamagedArchiveError(
            f"{shown} lists {len(absent)} file{'s' * (len(absent) > 1)} that are not images in "
            f"{readable(path.parent)}: {', '.join(absent[:3])}{', …' * (len(absent) > 3)}; put "
            "them there, or delete the lines"
        )
    if not splits:
        raise DamagedArchiveError(f"{shown} lists no images")
    unlisted = [f for f in on_disk.values() if is_image(f.name) and f not in lines_of]
    notes = left_out(unlisted, path.parent, "image", f"that {path.name} does not list")
    if not several:
        return _of_single_labels(path, splits, notes)
    return _of_many_labels(path, splits, notes)


def _of_single_labels(
    path: Path, splits: dict[str, dict[Path, set[str]]], notes: list[str]
) -> _Listing:
    found: dict[str, Split] = {}
    order = ("train", "base", "validation", "test", "novel")
    for split in (split for split in order if split in splits):
        classes: dict[str, list[Path]] = {}
        for file, (label,) in splits[split].items():
            classes.setdefault(label, []).append(file)
        found[split] = split_of_files(classes, path)
    _check_split_names(path, found)
    names = sorted({label for split in splits.values() for (label,) in split.values()})
    if joined := [name for name in names if re.search("[;|]", name)]:
        line = f"{len(joined)} classes have ; or | in their name, such as {joined[0]}"
        notes = [*notes, f"{line}: for several labels of an image, name the column labels"]
    return _classified(path.parent, found, notes)


def _of_many_labels(
    path: Path, splits: dict[str, dict[Path, set[str]]], notes: list[str]
) -> _Listing:
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    if not splits.keys() <= {"train", "validation", "test"}:
        raise DamagedArchiveError(
            f"{readable(path)}: images with several labels have the splits train, validation and "
            "test"
        )
    _check_split_names(path, splits)
    names = tuple(sorted(set().union(*splits["train"].values())))
    others = set().union(*(labels for images in splits.values() for labels in images.values()))
    if unknown := sorted(others - {*names}):
        known = [name for name, other in alike([*names, unknown[0]]) if other == unknown[0]]
        raise DamagedArchiveError(
            f"{readable(path)}: no training image has the label {unknown[0]!r}"
            + (f", nor {len(unknown) - 1} others" if len(unknown) > 1 else "")
            + (f"; give it the name of {known[0]!r}" if known else "")
            + "; a label needs an image of the split train"
        )
    if not names:
        raise DamagedArchiveError(f"{readable(path)}: no image has a label")
    found: dict[str, Split] = {}
    for split in (split for split in ("train", "validation", "test") if split in splits):
        images = dict(sorted(splits[split].items()))
        targets = no_labels(len(images), names, path)
        columns = {name: column for column, name in enumerate(names)}
        for row, own in zip(targets, images.values(), strict=True):
            row[[columns[name] for name in own]] = 1
        found[split] = MultiLabelSplit(names, [*images], targets, open_files, path)
    return _Listing(MultiLabelBuilder, path.parent, found, tuple(notes))


def _check_split_names(path: Path, splits: Mapping[str, Any]) -> None:
    names = {*splits}
    if not ("train" in names and not names & {"base", "novel"}) and not {"base", "novel"} <= names:
        raise DamagedArchiveError(
            f"{readable(path)} has the splits {', '.join(splits)}; use train with validation and "
            "test, or base and novel with validation"
        )


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


def _bits(largest: int) -> int:
    """How many bits count in greys of 16, of which this is the largest; 16 where it is 0."""
    return max(8, largest.bit_length()) if largest else 16


def _measure(listing: _Listing, files: list[tuple[str, str, Path]], background: str) -> _Facts:
    """Reads all files, and decodes those that may have the pixels of another one."""

    def examine(item: tuple[str, str, Path]) -> tuple[str, Inspected]:
        with regular(item[2]).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), inspect_image(item[2])

    def pixels(hashed: str, small: bool = False) -> Hashable:
        return hash_pixels(paths[hashed], channels, **how, small=small)

    def may_be_small(hashed: str) -> Hashable:
        size = found[hashed].size
        return size if size in mixed else pixels(hashed, small=True)

    examined = _in_threads(examine, files)
    paths = {hashed: file for (hashed, _), (_, _, file) in zip(examined, files, strict=True)}
    found, images = dict(examined), [image for _, image in examined]
    largest, transparent = max(i.largest for i in images), sum(i.transparent for i in images)
    coarse = [image.coarse for image in images if image.coarse is not None]
    tinted = transparent and len({*ImageColor.getrgb(background)}) > 1
    channels = 1 if all(image.grey for image in images) and not tinted else 3
    how: dict[str, Any] = {"background": background, "bits": (bits := _bits(largest))}
    # Only what is equal in size, and of JPEGs in a fast small version, is decoded.
    mixed = {image.size for image in found.values() if not image.is_jpeg}
    same: dict[str, Hashable] = {hashed: image.size for hashed, image in found.items()}
    for key in (may_be_small, pixels):
        times = Counter(same.values())
        repeated = [hashed for hashed, value in same.items() if times[value] > 1]
        same = dict(zip(repeated, _in_threads(key, repeated), strict=True))
    content, seen, copies = hashlib.sha256(listing.base.__name__.encode()), set(), []
    # The stored pixels depend on these, too.
    content.update(background.encode() * (transparent > 0) + str(bits).encode() * (bits < 16))
    first: dict[Hashable, tuple[str, Path]] = {}
    shared: dict[str, tuple[int, str, str]] = {}
    for (split, labels, file), (hashed, _) in zip(files, examined, strict=True):
        equal = same.get(hashed, hashed)
        if len(listing.splits) == 1 and (labels, equal) in seen:
            copies.append(_below(file, listing))
            continue
        seen.add((labels, equal))
        content.update(repr((split, labels, _below(file, listing), hashed)).encode())
        at, other = first.setdefault(equal, (split, file))
        if other != file and (at != split or len(listing.splits) == 1):
            which = f"{split} images that are copies of {at} images"
            if at == split:
                which = (
                    "copies of an image with other labels, perhaps one for training, one for test"
                )
            new = 0, _below(file, listing), _below(other, listing)
            count, one, another = shared.get(which, new)
            shared[which] = count + 1, one, another
    left = _without_copies(listing, copies)
    training = [file for split, _, file in _files(left) if split == next(iter(left.splits))]
    measured = training[:: -(-len(training) // _MEASURED_IMAGES)]
    mean, std = _mean_and_deviation(measured, channels, **how)
    return _Facts(
        content=content.hexdigest()[:12],
        base=listing.base.__name__,
        side=min(SIDE, max(image.size[0] for image in images)),
        channels=channels,
        mean=mean,
        std=std,
        classes={name: listing.base.class_counts(split) for name, split in left.splits.items()},
        images={name: sum(of == name for of, _, _ in _files(left)) for name in left.splits},
        copies=copies,
        shared=shared,
        transparent=transparent,
        largest=largest,
        coarse=len(coarse) * all(coarse),
    )


def _in_threads(action: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("ignore")
        return list(pool.map(action, items))


@contextlib.contextmanager
def _naming_all(listing: _Listing) -> Iterator[None]:
    """Where an image cannot be read, decodes all, and raises one error that names all of these.

    An image that was changed in the context has another error, also if it can be read.
    """

    def problem(file: Path) -> BaseException | None:
        try:
            encode(SourceImage(file, ""), (64, 64, 3), whole=True)
        except DamagedArchiveError as error:
            return error.__cause__

    def is_heic(file: Path) -> bool:
        with regular(file).open("rb") as opened:
            return opened.read(10)[4:] in (b"ftyphe", b"ftypmi")

    try:
        yield
        _check_unchanged(listing)
    except Exception:  # Pillow raises almost any exception on a damaged file.
        _check_unchanged(listing)
        files = [file for _, _, file in _files(listing)]
        problems = zip(files, _in_threads(problem, files), strict=True)
        if not (found := {file: error for file, error in problems if error}):
            raise
        names = ", ".join(_below(file, listing) for file in [*found][:10])
        heic = sum(map(is_heic, found))
        raise DamagedArchiveError(
            f"{readable(listing.root)}: {len(found)} of {len(files)} images cannot be read: "
            f"{names}{', …' * (len(found) > 10)}; repair or delete them"
            f"{f', or convert {heic} of them from HEIC to JPEG' * bool(heic)}. "
            f"The first: {next(iter(found.values()))}"
        ) from None


def _without_copies(listing: _Listing, copies: list[str]) -> _Listing:
    """The listing without some files, which it counts and names."""
    if not copies:
        return listing
    out = {*copies}
    splits: dict[str, Split] = {}
    for name, split in listing.splits.items():
        if isinstance(split, ClassSplit):
            classes = {
                label: [file for file in files if _below(file, listing) not in out]
                for label, files in split.classes.items()
            }
            splits[name] = replace(split, classes=classes)
        else:
            kept = [row for row, key in enumerate(split.keys) if _below(key, listing) not in out]
            keys = [split.keys[row] for row in kept]
            splits[name] = replace(split, keys=keys, targets=split.targets[kept])
    paths = [listing.root / name for name in copies]
    line = left_out(paths, listing.root, "image", "that equal another one of the same class")
    return replace(listing, splits=splits, left_out=(*listing.left_out, *line))


def _mean_and_deviation(
    files: list[Path], channels: int, **how: Any
) -> tuple[list[float], list[float]]:
    """Of the pixel values in [0, 1] of images that are at most 64 pixels high or wide."""

    def levels(file: Path) -> np.ndarray:
        small = encode(SourceImage(file, readable(file)), (64, 64, channels), whole=True, **how)
        with Image.open(io.BytesIO(small)) as image:
            return np.asarray(image, np.float64).reshape(-1, channels) / 255

    pixels = _in_threads(levels, files)
    # Every image counts the same.
    mean = np.mean([image.mean(axis=0) for image in pixels], axis=0)
    square = np.mean([(image**2).mean(axis=0) for image in pixels], axis=0)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return [round(float(m), 4) for m in mean], [max(round(float(s), 4), 0.01) for s in std]
