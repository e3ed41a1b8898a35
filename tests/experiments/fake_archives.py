"""Tiny archives in the layouts in which people have the few-shot sets.

Every image is of one colour, its own, so that a test can tell which image it sees: `colour(key, i)`
for image i of a class with a key of its own, which is its split and its name.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from experiments.core.protocol import ImageSet, Photographs

Counts = dict[str, dict[str, int]]
"""The number of images of every class, by split."""
Expected = dict[str, ImageSet]
"""What a data set made from a fake archive must hold; its images are their colours, [n, 3]."""
Fakes = dict[str, tuple[Callable[[Path], Expected], ...]]
"""By data set, what writes each of its layouts into a folder."""


def colour(name: str, index: int) -> tuple[int, int, int]:
    code = zlib.crc32(f"{name}/{index}".encode())
    return code & 255, code >> 8 & 255, code >> 16 & 255


def pixels(name: str, index: int, size: int) -> np.ndarray:
    return np.full((size, size, 3), colour(name, index), np.uint8)


def encode_png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def decode(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


def whole_images(images: Photographs) -> list[np.ndarray]:
    """Every photograph by itself, in its own size and orientation."""
    found = []
    for pixels, (height, width) in zip(images.pixels, images.sizes, strict=True):
        shorter, longer = sorted((height, width))
        assert not pixels[shorter:].any()
        assert not pixels[:, longer:].any()
        pixels = pixels[:shorter, :longer]
        found.append(pixels.swapaxes(0, 1) if height > width else pixels)
    return found


def check_colours(images: Any, colours: Any, exact: bool) -> None:
    """Checks that every image, of whatever size, has its colour in every pixel."""
    images = images[:]
    if isinstance(images, Photographs):
        images = whole_images(images)
    for image, wanted in zip(images, colours, strict=True):
        error = np.abs(np.asarray(image, int) - wanted)
        assert error.max() <= (0 if exact else 3)


def write_image(path: Path, name: str, index: int, size: tuple[int, int] = (24, 20)) -> None:
    """A file of one colour, without loss: Pillow reads a PNG under any name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour(name, index)).save(path, "PNG")


def write_pickle(path: Path, value: object, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol=protocol))


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def write_json(path: Path, value: object) -> None:
    write_lines(path, [json.dumps(value)])


@contextmanager
def packed(path: Path) -> Iterator[Path]:
    """A folder to fill; then a zip or a tar of it, compressed unless the ending is `.tar`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        yield folder
        if path.suffix == ".zip":
            with zipfile.ZipFile(path, "w") as archive:
                for file in sorted(folder.rglob("*")):
                    archive.write(file, file.relative_to(folder))
        else:
            with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
                for file in sorted(folder.iterdir(), reverse=True):
                    archive.add(file, file.name)


FEW_SHOT = {"base": "train", "validation": "val", "novel": "test"}
PARTS = FEW_SHOT | {"train": "train", "test": "test"}
"""What archives call the splits."""


def photos(classes: Counts) -> Iterator[tuple[str, str, str, int]]:
    """Split, class, the key of its colours, and number of every image."""
    for split, of in classes.items():
        for name, count in of.items():
            for i in range(count):
                yield split, name, f"{split} {name}", i


def image_set(classes: dict[str, list[tuple[int, int, int]]]) -> ImageSet:
    """The expected images of a split, from the colours of every class."""
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [*map(len, classes.values())])
    colours = [colour for of in classes.values() for colour in of]
    return ImageSet(np.array(colours), labels, tuple(classes))


def expect(classes: Counts) -> Expected:
    """What a data set of these numbers of images must hold."""
    found: dict = {split: {name: [] for name in sorted(of)} for split, of in classes.items()}
    for split, name, key, i in photos(classes):
        found[split][name].append(colour(key, i))
    return {split: image_set(of) for split, of in found.items()}


def write_photos(folder: Path, classes: Counts, file: str, line: str = "") -> dict[str, list[str]]:
    """Writes all images of a data set, and returns a line of a list for each, by split.

    `file` and `line` are formats of the `split`, its `part` of the archive, the `name` of the
    class, and the number of an image: `i` in its class, or `number` in the data set.
    """
    lines: dict[str, list[str]] = {split: [] for split in classes}
    for number, (split, name, key, i) in enumerate(photos(classes), 1):
        values = {"split": split, "part": PARTS[split], "name": name, "i": i, "number": number}
        write_image(folder / file.format(**values), key, i)
        lines[split].append(line.format(**values))
    return lines


def write_lists(path: Path, lists: dict[str, list[str]], *header: str) -> None:
    """A text file for every split, whose part of the archive goes into the name."""
    for split, lines in lists.items():
        write_lines(path.with_name(path.name.format(PARTS[split])), [*header, *lines])


def arrays(classes: Counts, size: int) -> Iterator[tuple[str, list[str], np.ndarray]]:
    """Every split, with the class of every image, the classes mixed, and the pixels of all."""
    for split, of in classes.items():
        own = sorted(photos({split: of}), key=lambda photo: photo[-1])
        images = np.stack([pixels(key, i, size) for *_, key, i in own])
        yield split, [name for _, name, *_ in own], images


_MINI = {
    "base": {"n02108551": 3, "n01532829": 2},
    "validation": {"n02950826": 2},
    "novel": {"n01930112": 2, "n07613480": 1},
}


def mini_imagenet_folder(manual_dir: Path) -> Expected:
    folder, file = manual_dir / "mini-imagenet", "{name}{i:08}.jpg"
    lists = write_photos(folder / "images", _MINI, file, f"{file},{{name}}")
    write_lists(folder / "{}.csv", lists, "filename,label")
    return expect(_MINI)


def mini_imagenet_caches(manual_dir: Path) -> Expected:
    for split, names, images in arrays(_MINI, 84):
        rows = {name: [i for i, of in enumerate(names) if of == name] for name in _MINI[split]}
        path = manual_dir / f"mini-imagenet-cache-{PARTS[split]}.pkl"
        write_pickle(path, {"image_data": images, "class_dict": rows})
    return expect(_MINI)


def mini_imagenet_phases(manual_dir: Path) -> Expected:
    numbers = {name: number for number, name in enumerate(n for of in _MINI.values() for n in of)}
    for split, names, images in arrays(_MINI, 84):
        part = "train_phase_train" if split == "base" else PARTS[split]
        content = {"data": images, "labels": [numbers[name] for name in names]}
        content["catname2label"] = {name: numbers[name] for name in _MINI[split]}
        path = manual_dir / f"mini_imagenet/miniImageNet_category_split_{part}.pickle"
        write_pickle(path, content, protocol=4)
    return expect(_MINI)


def tiered_imagenet(manual_dir: Path) -> Expected:
    """The pickles of Ren et al.; "crane" is a bird in one split and a machine in another."""
    classes = {
        "base": {"Yorkshire terrier": 3, "crane (base 1)": 2},
        "validation": {"ladle": 2},
        "novel": {"crane (novel 0)": 2, "teapot": 1},
    }
    folder = manual_dir / "tiered-imagenet"
    for split, names, images in arrays(classes, 84):
        # As cv2.imencode returns it.
        encoded = [np.frombuffer(encode_png(image), np.uint8)[:, None].copy() for image in images]
        write_pickle(folder / f"{PARTS[split]}_images_png.pkl", encoded)
        own = [*classes[split]]
        content: dict = {"label_specific": np.array([*map(own.index, names)], np.int32)}
        content["label_specific_str"] = [name.partition(" (")[0] for name in own]
        write_pickle(folder / f"{PARTS[split]}_labels.pkl", content)
    return expect(classes)


_BIRDS = [f"{number:03}.Bird_{number}" for number in range(1, 9)]


def cub_folder(manual_dir: Path) -> Expected:
    """`CUB_200_2011/images` alone: the split goes by the class number."""
    splits = {"base": _BIRDS[::2], "validation": _BIRDS[1::4], "novel": _BIRDS[3::4]}
    classes = {split: dict.fromkeys(names, 2) for split, names in splits.items()}
    write_photos(manual_dir / "CUB_200_2011/images", classes, "{name}/{name}_{i:04}.jpg")
    return expect(classes)


def cub_archive(manual_dir: Path) -> Expected:
    """`CUB_200_2011.tgz` and the lists of Chen et al., with the paths of their machine."""
    splits = {"base": _BIRDS[:4], "validation": _BIRDS[4:6], "novel": _BIRDS[6:]}
    classes = {split: dict.fromkeys(names, 2) for split, names in splits.items()}
    file = "CUB_200_2011/images/{name}/{name}_{i:04}.png"
    with packed(manual_dir / "CUB_200_2011.tgz") as folder:
        lists = write_photos(folder, classes, file, f"/home/someone/filelists/CUB/{file}")
        write_lines(folder / "attributes.txt", ["1 has_bill_shape::curved"])
        write_lines(folder / "CUB_200_2011/classes.txt", ["1 001.Bird_1"])
    for split, files in lists.items():
        labels = [_BIRDS.index(Path(file).parent.name) for file in files]
        content = {"label_names": _BIRDS, "image_names": files, "image_labels": labels}
        write_json(manual_dir / f"{'val' if split == 'validation' else split}.json", content)
    return expect(classes)


_CIFAR = {
    "base": {"apple": 3, "maple_tree": 2},
    "validation": {"otter": 2},
    "novel": {"baby": 2, "worm": 1},
}


def cifar_fs_folder(manual_dir: Path) -> Expected:
    folder = manual_dir / "cifar100"
    write_photos(folder / "data", _CIFAR, "{name}/{name}_s_{i:06}.png")
    write_lists(folder / "splits/bertinetto/{}.txt", {split: [*of] for split, of in _CIFAR.items()})
    return expect(_CIFAR)


def cifar_fs_pickles(manual_dir: Path) -> Expected:
    """The pickles of MetaOptNet, which number the classes."""
    numbered = {
        split: {f"{split} class {label:03}": count for label, count in enumerate(of.values(), 10)}
        for split, of in _CIFAR.items()
    }
    for split, names, images in arrays(numbered, 32):
        content = {"data": images, "labels": [int(name[-3:]) for name in names]}
        write_pickle(manual_dir / f"cifar-fs/CIFAR_FS_{PARTS[split]}.pickle", content)
    return expect(numbered)


_SPECIES = {
    "base": {"Danaus plexippus": 3, "Cygnus olor": 2},
    "novel": {"Sciurus carolinensis": 2, "Bufo bufo": 1},
}
_NUMBERS = {"Danaus plexippus": 11, "Cygnus olor": 7, "Sciurus carolinensis": 30, "Bufo bufo": 2}


def inat2017_boxes(manual_dir: Path) -> Expected:
    """Two boxes on every image, but none on an image of Cygnus olor that is not in `_SPECIES`."""
    folder, file = manual_dir / "inat2017", "train_val_images/Animals/{name}/{number:032x}.jpg"
    with packed(folder / "train_val_images.tar.gz") as top:
        lists = write_photos(top, _SPECIES, file, file)
        unboxed = file.format(name="Cygnus olor", number=99)
        write_lines(top / unboxed, ["no image, no box"])
        write_lines(top / "train_val_images/Animals/Gavia immer/1.jpg", ["not in the split"])
    files = list(enumerate(itertools.chain(*lists.values()), 100))
    boxes = [{"image_id": n, "category_id": _NUMBERS[Path(file).parent.name]} for n, file in files]
    content = {
        "images": [{"id": n, "file_name": file} for n, file in [*files, (99, unboxed)]],
        "annotations": [box | {"id": n, "bbox": [0, 0, 5, 5]} for n, box in enumerate(2 * boxes)],
        "categories": [{"id": number, "name": name} for name, number in _NUMBERS.items()],
    }
    write_json(folder / "train_2017_bboxes.json", content)
    for split, of in _SPECIES.items():
        path, numbers = folder / f"meta_iNat_{PARTS[split]}cats.pth", [_NUMBERS[n] for n in of]
        torch.save(numbers, path, _use_new_zipfile_serialization=split == "base")
    return expect(_SPECIES)


def inat2017_prepared(manual_dir: Path) -> Expected:
    numbered = {
        split: {str(_NUMBERS[name]): count for name, count in of.items()}
        for split, of in _SPECIES.items()
    }
    write_photos(manual_dir, numbered, "meta_iNat/{part}/{name}/{i:032x}.png")
    return expect(numbered)


LAYOUTS: Fakes = {
    "mini_imagenet": (mini_imagenet_folder, mini_imagenet_caches, mini_imagenet_phases),
    "tiered_imagenet": (tiered_imagenet,),
    "cub_fewshot": (cub_folder, cub_archive),
    "cifar_fs": (cifar_fs_folder, cifar_fs_pickles),
    "inat2017_fewshot": (inat2017_boxes, inat2017_prepared),
}
