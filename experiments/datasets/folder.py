"""Images of one's own: `folder:PATH`, with a folder per class or a CSV file of labels.

The name of the prepared data follows from the content, so that it stands for nothing else, and a
changed folder is prepared anew. What is measured is kept in the user's cache, so that photographs
are not read again until names, sizes or times of the files change, and so that a run goes on
without the folder. It is not beside the prepared data: a run is planned before that is looked for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import numpy as np
from PIL import Image, ImageColor

from experiments.core.errors import ConfigError, ExperimentError, nearest_path
from experiments.core.storage import cache_folder, load_json, storage_path, write_json
from experiments.core.terminal import has_controls
from experiments.datasets.archives import (
    DamagedArchiveError,
    MissingArchiveError,
    brief,
    readable,
    reading,
)
from experiments.datasets.base import Dataset
from experiments.datasets.files import is_image, left_out, list_classes, list_files, list_folders
from experiments.datasets.images import SourceImage, encode, inspect_image, of_every_image
from experiments.datasets.layouts import Layout
from experiments.datasets.readers import multi_hot, read_table
from experiments.datasets.splits import (
    MultiLabelSplit,
    Split,
    check_splits,
    grouped,
    split_of_files,
)

PREFIX = "folder:"
"""What the names of one's own folders begin with."""
_LABELS = "labels.csv"
"""The file in such a folder that takes precedence over class folders."""
_SIDE = 128
"""Largest shorter side of the stored images, unless `@SIZE` is given."""

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
    **{"base": "base", "novel": "novel"},
}
_SHARED, _FEW_SHOT = ("train", "validation", "test"), ("base", "validation", "novel")
_MEASURED_IMAGES = 128
"""Training images of which mean and deviation are measured."""
_LOSSLESS_SIDE = 64
"""Images of a shorter side up to this are stored without loss."""
_SIGNS = frozenset(" ()<>|`$*[]{}\"'\\:?#%&")
_COLOURS = "|".join([*ImageColor.colormap, "#[0-9a-f]{3}", "#[0-9a-f]{6}"])
_OPTIONS = {"content": "#([0-9a-f]{12})", "size": "@([0-9]+)", "colour": f"@({_COLOURS})"}


# --- Names --------------------------------------------------------------------------------------


class Named(NamedTuple):
    """The parts of `folder:PATH@SIZE@COLOUR#CONTENT`; all but the absolute path may be empty.

    Transparent images are laid on the colour. The content identifies the files that a run was
    trained on, in a configuration.
    """

    path: Path
    content: str
    size: str
    colour: str

    def __str__(self) -> str:
        options = "".join(f"@{option}" for option in (self.size, self.colour) if option)
        return f"{PREFIX}{self.path}{options}" + (f"#{self.content}" if self.content else "")


def is_own(name: str) -> bool:
    """Whether a data set is a folder of one's own."""
    return name.startswith(PREFIX)


def parse(name: str) -> Named:
    """The parts of a name that begins with `PREFIX`; raises a `ConfigError` if it has no path."""
    text = name.removeprefix(PREFIX)
    if not text or "://" in text:
        raise ConfigError(f"{name} has no local path; set data.name = {PREFIX}PATH")
    found = dict.fromkeys(_OPTIONS, "")
    for option in ("content", "size", "colour", "size"):  # Size and colour in any order.
        match = re.fullmatch(f"(.*){_OPTIONS[option]}", text, re.DOTALL | re.IGNORECASE)
        if match and not found[option] and not os.path.exists(os.path.expanduser(text)):
            text, found[option] = match[1], match[2].lower()
    path = storage_path(os.path.abspath(os.path.expanduser(text)), "the folder")
    if has_controls(str(path)):
        raise ConfigError(f"{readable(path)} has control characters in its path; rename it")
    return Named(path, **found)


def pinned(name: str) -> str:
    """The name for the configuration of a run: a folder has its path and a hash of its content."""
    if not is_own(name):
        return name
    own = parse(name)
    return str(own if own.content else own._replace(content=_content(_examine(own)[1])))


def short_name(name: str) -> str:
    """The name in titles and names of files; a folder's is its start and a hash of its content."""
    if not is_own(name):
        return name
    own = parse(pinned(name))
    plain = (c if c.isprintable() and c not in _SIGNS else "_" for c in own.path.name)
    # Names of files have at most 255 bytes.
    start = "".join(plain).encode()[:100].decode(errors="ignore") or "folder"
    return f"{start}-{own.content}" + (f"@{own.size}" if own.size else "")


def overlap(name: str, other: str) -> bool:
    """Whether two folders have the same content, or one contains the other."""
    mine, yours = parse(pinned(name)), parse(pinned(other))
    paths = os.path.realpath(mine.path), os.path.realpath(yours.path)
    return mine.content == yours.content or os.path.commonpath(paths) in paths


# --- The data set -------------------------------------------------------------------------------


class _Listing(NamedTuple):
    """The files of a folder, before any image is opened."""

    root: Path
    splits: dict[str, Split]
    files: list[tuple[str, str, Path]]
    """The split, the labels and the path of every image, in the order of the records."""
    left_out: list[str]
    """Lines on what is not taken."""

    def key(self, name: str) -> str:
        """A hash that changes with the name, and names, labels, sizes and times of the files."""
        parts = [name, *(type(split).__name__ for split in self.splits.values())]
        with reading(readable(self.root), "folder of images"):
            for file in self.files:
                status = file[2].stat()
                parts.append(repr((file, status.st_size, status.st_mtime_ns)))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def own_dataset(name: str) -> Dataset:
    """The data set of `folder:PATH`, perhaps with `@SIZE`, `@COLOUR` and `#CONTENT`."""
    own = parse(name)
    shown, again = readable(own.path), "put the files back, or train again in another directory"
    try:
        listing, dataset, unchanged = _examine(own)
        if own.content not in ("", _content(dataset)):
            raise ConfigError(f"{shown} has changed since the run was trained on it; {again}")
    except (ConfigError, DamagedArchiveError):
        if not own.content or (known := _remembered(own.content)) is None:
            raise
        listing, dataset, unchanged = None, known, lambda: True  # It may still be prepared.
    size, channels = int(own.size or dataset.image_shape[0]), dataset.image_shape[2]
    remarks = (*dataset.remarks, *(listing.left_out if listing else ()))

    def check() -> None:
        if listing is None:
            raise MissingArchiveError(
                f"{shown} no longer has the files of {dataset.name}, which is not prepared; {again}"
            )

    def verify() -> None:
        if not unchanged():
            _examine_again.cache_clear()
            raise DamagedArchiveError(f"{shown} has changed while it was read; run again")

    return replace(
        dataset,
        name=dataset.name + (f"_at_{size}" if own.size else ""),
        description=f"{dataset.description} in {shown}",
        layouts=(Layout("", (), lambda _: listing.splits if listing else {}, check=check),),
        image_shape=(size, size, channels),
        resizable=True,
        whole=True,
        encoding="png" if size <= _LOSSLESS_SIDE else "jpeg",
        argument=f"{PREFIX}{own.path}",
        own=True,
        files={
            split: [os.path.normpath(own.path / os.fsdecode(unquote_to_bytes(n))) for n in names]
            for split, names in dataset.files.items()
        },
        remarks=remarks,
        details=(*dataset.details, *remarks),
        verify=verify,
    )


def _content(dataset: Dataset) -> str:
    """The hash of all files, their names and labels."""
    return dataset.name.removeprefix("folder_")


# --- What there is ------------------------------------------------------------------------------


def _examine(own: Named) -> tuple[_Listing, Dataset, Callable[[], bool]]:
    """The readable images of a folder, what is measured, and whether its files are the same."""
    path = own.path
    places = [path, *path.glob("*/")] if path.is_dir() else [path]
    places += [sub for place in places if place.name.lower() in _SPLITS for sub in place.glob("*/")]
    places += [path / _LABELS]
    # Times change when files are added to a folder or removed.
    times = tuple(place.stat().st_mtime_ns for place in places if place.exists())
    return _examine_again(path, own.colour, times)


@functools.lru_cache(maxsize=8)
def _examine_again(
    path: Path, colour: str, times: tuple[int, ...]
) -> tuple[_Listing, Dataset, Callable[[], bool]]:
    def quoted(file: Path) -> str:  # Because a name need not be UTF-8.
        return quote(os.fsencode(os.path.relpath(file, path)))

    def unchanged() -> bool:
        return every.key(name) == key

    every, name = _list(path), f"{path}@{colour}"
    check_splits(every.splits)
    key = every.key(name)
    if (dataset := _remembered(key)) is not None and dataset.files:
        known = set().union(*dataset.files.values())
        missing = {file for _, _, file in every.files if quoted(file) not in known}
        return _without(every, missing), dataset, unchanged
    broken: dict[Path, str] = {}
    files = [file for _, _, file in every.files]
    examined = dict(of_every_image(_examined, files, broken.__setitem__))
    why = {file: text.partition(" is not a readable image: ")[2] for file, text in broken.items()}
    shown = [f"{readable(f.relative_to(every.root))} ({why[f]})" for f in sorted(why)]
    shown = ", ".join(shown[:5]) + ", …" * (len(shown) > 5)
    count = "1 damaged image" if len(why) == 1 else f"{len(why)} damaged images"
    lines = [f"left out {count}: {shown}"] * bool(why)
    try:
        listing = _without(every, broken)
    except ExperimentError as error:
        raise DamagedArchiveError(f"{lines[0]}. Without them, {error}") from error
    if lost := sorted(_names(every) - _names(listing)):
        lines.append(f"left out {', '.join(lost)[:300]}: none of their images can be read")
    facts = _measure(listing, examined, colour or "white")
    facts["remarks"] = (*lines, *facts["remarks"])
    facts["files"] = grouped((split, quoted(file)) for split, _, file in listing.files)
    dataset = Dataset(layouts=(), **facts)
    if unchanged():
        with contextlib.suppress(OSError):  # They only save time.
            cache_folder("folders").mkdir(parents=True, exist_ok=True)
            for stem in (key, _content(dataset)):
                write_json(cache_folder("folders") / f"{stem}.json", facts)
    return listing, dataset, unchanged


def _names(listing: _Listing) -> set[str]:
    """All classes or labels."""
    return set().union(*(split.counts() for split in listing.splits.values()))


def _examined(path: Path) -> tuple[Path, tuple[str, Any]]:
    """A file, its hash, and what is seen in it."""
    image = inspect_image(SourceImage(path, readable(path)))
    with path.open("rb") as file:
        return path, (hashlib.file_digest(file, "sha256").hexdigest(), image)


def _without(listing: _Listing, broken: Collection[Path]) -> _Listing:
    """The listing without files that cannot be read, and without classes of such files alone."""
    if not broken:
        return listing
    several = any(isinstance(split, MultiLabelSplit) for split in listing.splits.values())
    images = {split: dict[Path, set[str]]() for split in listing.splits}
    for split, labels, file in listing.files:
        if file not in broken:
            images[split][file] = {*labels.split("|")} - {""} if several else {labels}
    if empty := [split for split, of in images.items() if not of]:
        raise DamagedArchiveError(f"there is no image of the split {empty[0]}")
    rest = _listing(listing.root, images, listing.left_out, several)
    check_splits(rest.splits)
    return rest


def _remembered(stem: str) -> Dataset | None:
    """What is known of a content, or of files by their `key`."""
    try:
        facts = load_json(cache_folder("folders") / f"{stem}.json")
        tuples = {name: tuple(of) for name, of in facts.items() if isinstance(of, list)}
        return Dataset(layouts=(), **facts | tuples)
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # Absent, damaged, or of another version.


def _list(path: Path) -> _Listing:
    """Finds the splits and classes of a folder, or of a CSV file."""
    shown = f"{PREFIX}{readable(path)}"
    if path.suffix.lower() == ".csv" and path.is_file():
        return _read_csv(path)
    if not path.is_dir():
        near = "" if path.exists() else nearest_path(path)
        hint = near or "set a folder with one folder of images per class"
        raise ConfigError(f"{shown} does not exist, or is no folder; {hint}")
    if (path / _LABELS).is_file():
        return _read_csv(path / _LABELS)
    folders = list_folders(path)
    parts: dict[str, Path] = {}
    for folder in folders:
        if (split := _SPLITS.get(folder.name.lower())) is not None:
            if split in parts:
                raise ConfigError(f"{shown} has both {parts[split].name} and {folder.name}")
            parts[split] = folder
    if {"base", "novel"} <= {*parts} or ("train" in parts and len(parts) > 1):
        order = _FEW_SHOT if "novel" in parts else _SHARED
    elif len(folders) == 1 and "train" in parts and list_folders(parts["train"]):
        return _list(parts["train"])
    else:
        parts, order = {"train": path}, ("train",)
    lines, images = list[str](), dict[str, dict[Path, set[str]]]()
    if len(parts) > 1:
        beside = {*folders} - {*map(parts.get, order)}
        lines += left_out(beside, path, "folder", "beside the splits")
    for split in (split for split in order if split in parts):
        found, others = list_classes(parts[split])
        empty = [parts[split] / name for name, files in found.items() if not files]
        others += left_out(empty, parts[split], "folder", "without images")
        place = f"{parts[split].name}: " if len(parts) > 1 else ""
        lines += [place + line for line in others]
        images[split] = {file: {_nfc(name)} for name, files in found.items() for file in files}
        if not images[split]:
            folder = readable(parts[split])
            raise ConfigError(
                f"{folder} has no folder of images; put the images of each class, as JPEG or PNG, "
                f"into a folder: {folder}/CLASS/NAME.jpg. {'; '.join(lines)}".removesuffix(". ")
            )
    return _listing(path, images, lines)


def _listing(
    root: Path, images: dict[str, dict[Path, set[str]]], lines: list[str], several: bool = False
) -> _Listing:
    """The listing of images with their labels, by split; a `ConfigError` if these do not fit."""
    names = {split: set().union(*of.values()) for split, of in images.items()}
    known, shown = set().union(*names.values()), readable(root)
    if len(known) < 2 and not several:
        raise ConfigError(
            f"{shown} has images of one class only, {min(known)!r}; add images of another class, "
            f"or set the folder that has the folders of classes. {'; '.join(lines)}".strip(". ")
        )
    together = [names["train"]] if several else [*names.values()]
    for first, second in _alike(name for own in names.values() for name in sorted(own)):
        if "train" in names and any(len({first, second} & own) == 1 for own in together):
            raise ConfigError(
                f"{shown}: the class {second!r} is {first!r} in another split, but for case or "
                "spaces; give it one name, or name the splits base and novel if these are two "
                "classes"
            )
    if several and (unknown := known - names["train"]):
        raise ConfigError(f"{shown}: no image of the split train has the label {min(unknown)!r}")
    shared = several or sum(map(len, names.values())) > len(known)
    if not shared and "train" in images and len(images) > 1:
        # The layout of most few-shot data sets.
        images = {_FEW_SHOT[_SHARED.index(split)]: of for split, of in images.items()}
    last = "novel" if "base" in images else "test"
    if len(images) > 1 and last not in images:
        images[last] = images.pop("validation")
    splits, all_files = dict[str, Split](), list[tuple[str, str, Path]]()
    for split, of in images.items():
        if several:
            all_names, files = tuple(sorted(known)), sorted(of)
            targets = multi_hot([of[file] for file in files], all_names)
            splits[split] = MultiLabelSplit(all_names, files, targets, root)
        else:
            classes = grouped((name, file) for file, (name,) in of.items())
            ordered = splits[split] = split_of_files(classes, root)
            files = [file for own in ordered.classes.values() for file in own]
        all_files += [(split, "|".join(sorted(of[file])), file) for file in files]
    return _Listing(root, splits, all_files, lines)


def _alike(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of different names that are equal but for case, spaces and encoded accents.

    The first of a pair comes before the second.
    """
    first: dict[str, str] = {}
    pairs = []
    for name in dict.fromkeys(names):
        key = _nfc(" ".join(_nfc(name).casefold().split()))
        if first.setdefault(key, name) != name:
            pairs.append((first[key], name))
    return pairs


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


# --- CSV files ----------------------------------------------------------------------------------


def _read_csv(path: Path) -> _Listing:
    """Reads the columns `file`, `label` or `labels`, and perhaps `split`."""
    header, rows = read_table(path, delimiters=",;\t")
    shown, several, root = readable(path), "labels" in header, path.parent
    if "file" not in header or several + ("label" in header) != 1:
        raise DamagedArchiveError(
            f"{shown} has the columns {', '.join(header)[:200] or '(none)'}; it needs file and "
            "labels (any number for each image) or label (one class for each image)"
        )
    images = [file for file in list_files(root) if is_image(file.name)]
    on_disk = {_nfc(str(file.relative_to(root))): file for file in images}
    listed: dict[Path, tuple[str, set[str]]] = {}
    absent: list[str] = []
    for number, cells in rows:
        where = f"{shown}, line {number}: {brief(cells['file'])}"
        file = on_disk.get(_nfc(os.path.normpath(cells["file"].replace("\\", "/"))))
        if file is None:
            absent.append(f"{brief(cells['file'])} in line {number}")
            continue
        split = _SPLITS.get(cells.get("split", "train").lower())
        if split is None:
            raise DamagedArchiveError(
                f"{where} has the split {brief(cells['split'])}, none of "
                f"{', '.join(dict.fromkeys(_SPLITS.values()))}"
            )
        text = _nfc(cells["labels" if several else "label"])
        labels = {part.strip() for part in (re.split("[,;|]", text) if several else [text])} - {""}
        before, known = listed.setdefault(file, (split, set()))
        if before != split or (not several and (not labels or known not in (set(), labels))):
            raise DamagedArchiveError(
                f"{where} has no label, or two splits or two labels in several lines; the column "
                "of several labels is `labels`"
            )
        known |= labels
    if absent:
        raise DamagedArchiveError(
            f"{shown} lists {len(absent)} {'file' if len(absent) == 1 else 'files'} of which "
            f"{readable(root)} has no image: "
            f"{', '.join(absent[:3])}; put them there as JPEG or PNG, or delete the lines"
        )
    files = grouped((split, file) for file, (split, _) in listed.items())
    found = {split: {file: listed[file][1] for file in of} for split, of in files.items()}
    order = _FEW_SHOT if {"base", "novel"} <= {*found} and not several else _SHARED
    if not {*found} <= {*order} or order[0] not in found:
        raise DamagedArchiveError(
            f"{shown} has the splits {', '.join(sorted(found)) or '(none)'}; use train with "
            "validation and test, or, for one class an image, base and novel with validation"
        )
    found = {split: found[split] for split in order if split in found}
    unlisted = [file for file in images if file not in listed]
    notes = left_out(unlisted, root, "image", f"that {path.name} does not list")
    return _listing(root, found, notes, several)


# --- What is measured ---------------------------------------------------------------------------


def _measure(listing: _Listing, examined: dict[Path, Any], background: str) -> dict[str, Any]:
    """What is measured, of files that were `_examined`: fields of the `Dataset` as JSON types."""
    files, train = listing.files, next(iter(listing.splits))
    several = isinstance(listing.splits[train], MultiLabelSplit)
    images = [examined[file][1] for _, _, file in files]
    transparent = sum(image.transparent for image in images)
    tinted = transparent and len({*ImageColor.getrgb(background)}) > 1
    channels = 1 if all(image.grey for image in images) and not tinted else 3
    largest = max(image.largest for image in images)
    bits = max(8, largest.bit_length()) if largest else 16
    whole, first, copies = hashlib.sha256(), dict[str, tuple[str, str]](), list[str]()
    for split, labels, file in files:
        hashed, name = examined[file][0], _nfc(readable(file.relative_to(listing.root)))
        whole.update(repr((split, labels, name, hashed)).encode())
        # A copy of a file of another split or, without splits, of any other.
        at, other = first.setdefault(hashed, (split, name))
        if other != name and (at != split or len(listing.splits) == 1):
            copies.append(f"{name} of {other}")
    # The stored pixels depend on these, too.
    whole.update(repr((several, background * (transparent > 0), bits)).encode())
    training = [file for split, _, file in files if split == train]

    def levels(file: Path) -> np.ndarray:
        """Values in [0, 1] of an image that is at most 64 pixels high or wide."""
        image, shape = SourceImage(file, readable(file)), (64, 64, channels)
        small = encode(image, shape, whole=True, background=background, bits=bits)
        with Image.open(io.BytesIO(small)) as opened:
            return np.asarray(opened, np.float64).reshape(-1, channels) / 255

    pixels = [*of_every_image(levels, training[:: -(-len(training) // _MEASURED_IMAGES)])]
    # Every image counts the same.
    mean = np.mean([image.mean(axis=0) for image in pixels], axis=0)
    square = np.mean([(image**2).mean(axis=0) for image in pixels], axis=0)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    side = min(_SIDE, max(image.side for image in images))
    names = [name for split in listing.splits.values() for name in split.counts()]
    kind = "labels" if several else "classes"
    facts = {
        "name": f"folder_{whole.hexdigest()[:12]}",
        "description": f"{len(files)} images of {len({*names})} {kind}",
        "classes": {name: len(split.counts()) for name, split in listing.splits.items()},
        "image_shape": (side, side, channels),
        "multi_label": several,
        "mean": tuple(round(float(m), 4) for m in mean),
        "std": tuple(max(round(float(s), 4), 0.01) for s in std),
        "background": background,
        "bits": bits,
    }
    remarks, details = list[str](), list[str]()
    if transparent:
        remarks.append(
            f"transparent images: {transparent}, laid on {background}; for another colour, set one "
            f"after the path, as in {PREFIX}PATH@black"
        )
    if bits < 16:
        remarks.append(f"greys of 16 bits: none is above {largest}, so {2**bits - 1} is white")
    if copies:
        remarks.append(
            f"copies that may be in training and in test: {len(copies)}, such as {copies[0]}; "
            "delete one of each"
        )
    if "novel" in listing.splits:
        remarks.append(
            "the splits have no class in common: they are base and novel classes. Few-shot "
            "protocols evaluate on the novel ones; `folder` trains on images of all"
        )
    if pairs := _alike(names):
        shown = ", ".join(f"{first!r} and {second!r}" for first, second in pairs[:3])
        remarks.append(f"classes that differ in case or spaces alone: {shown}")
    for name, split in listing.splits.items():
        counts, number = split.counts(), sum(of == name for of, _, _ in files)
        least, most = (f(counts, key=lambda name: counts[name]) for f in (min, max))
        each = f"{counts[least]} ({least}) to {counts[most]} ({most}) of a class or label"
        each = each if counts[least] < counts[most] else f"{counts[least]} of every class or label"
        details.append(f"{name}: {number} images, {each}")
    if len(listing.splits) == 1:
        or_novel = "" if several else ", or half of the classes are novel"
        details.append(f"no split of its own: 30 % are for test{or_novel}")
    mean, std = (" ".join(f"{n:.3f}" for n in facts[name]) for name in ("mean", "std"))
    details.append(f"{'grey' if channels == 1 else 'colour'}; mean {mean}, deviation {std}")
    return facts | {"remarks": tuple(remarks), "details": tuple(details)}
