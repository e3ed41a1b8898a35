"""Tiny archives in the layouts in which people have the few-shot sets.

Every image is of one colour, its own, so that a test can tell which image it sees: `colour(key, i)`
for image i of a class with a key of its own, which is its split and its name.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.io import savemat

from experiments.core.protocol import ImageSet, Photographs

Counts = dict[str, dict[str, int]]
"""The number of images of every class, by split."""
Expected = dict[str, ImageSet]
"""What a data set made from a fake archive must hold; its images are their colours, [n, 3]."""
Write = Callable[[Path], Expected]
"""Writes a fake into the folder of archives."""


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


def write(folder: Path, files: Mapping[str, Any]) -> None:
    """Writes files by their paths, in which an archive is a folder, and packs these.

    The content is that of the file, a colour for an image, the lines of a text, or, by the ending,
    a value for JSON or MATLAB; it is pickled else.
    """
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, tuple):
            Image.new("RGB", (50, 30), content).save(path, "PNG")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".json":
            path.write_text(json.dumps(content))
        elif path.suffix == ".mat":
            savemat(path, content)
        elif path.suffix in (".csv", ".jpg", ".txt", ".xml"):
            path.write_text("\n".join(content) + "\n")
        else:
            path.write_bytes(pickle.dumps(content, protocol=2))
    for path in sorted(folder.rglob("*"), key=lambda path: -len(path.parts)):  # The inner first.
        if path.is_dir() and path.suffix in (".zip", ".tar", ".tgz", ".gz"):
            inside = path.rename(path.with_name("packed"))
            if path.suffix == ".zip":
                with zipfile.ZipFile(path, "w") as archive:
                    for file in sorted(inside.rglob("*")):
                        archive.write(file, file.relative_to(inside))
            else:
                with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
                    for file in sorted(inside.iterdir(), reverse=True):
                        archive.add(file, file.name)
            shutil.rmtree(inside)


PARTS = {
    **{"base": "train", "novel": "test"},
    **{"train": "train", "validation": "val", "test": "test"},
}
"""What most archives call the splits."""


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


def fake(
    classes: Counts,
    image: str | Mapping[str, str],
    lists: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    parts: Mapping[str, str] = PARTS,
) -> Write:
    """What writes the images of a data set, `lists` of them, and `more` files.

    The path of an `image`, perhaps one for each split, the paths of lists and their lines are
    formats of the `split`, its `part` of the archive, the `name` of the class, and the number of an
    image: `i` in its class, or `number` in the data set.
    """
    paths = dict.fromkeys(classes, image) if isinstance(image, str) else image

    def write_fake(manual_dir: Path) -> Expected:
        files, lines = dict(more or {}), dict[str, list[str]]()
        for number, (split, name, key, i) in enumerate(photos(classes), 1):
            values = {"split": split, "part": parts[split], "name": name, "i": i, "number": number}
            if split in paths:
                files[paths[split].format(**values)] = colour(key, i)
            for path, line in (lists or {}).items():
                lines.setdefault(path.format(**values), []).append(line.format(**values))
        for path, own in lines.items():
            files[path] = [*files.get(path, ()), *own]
        write(manual_dir, files)
        return expect(classes)

    write_fake.__name__ = image if isinstance(image, str) else next(iter(image.values()))
    return write_fake


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
mini_imagenet_folder = fake(
    _MINI,
    "mini-imagenet/images/{name}{i:08}.jpg",
    {"mini-imagenet/{part}.csv": "{name}{i:08}.jpg,{name}"},
    {f"mini-imagenet/{PARTS[split]}.csv": ["filename,label"] for split in _MINI},
)


def mini_imagenet_caches(manual_dir: Path) -> Expected:
    for split, names, images in arrays(_MINI, 84):
        rows = {name: [i for i, of in enumerate(names) if of == name] for name in _MINI[split]}
        content = {"image_data": images, "class_dict": rows}
        write(manual_dir, {f"mini-imagenet-cache-{PARTS[split]}.pkl": content})
    return expect(_MINI)


def mini_imagenet_phases(manual_dir: Path) -> Expected:
    numbers = {name: number for number, name in enumerate(n for of in _MINI.values() for n in of)}
    for split, names, images in arrays(_MINI, 84):
        part = "train_phase_train" if split == "base" else PARTS[split]
        content = {"data": images, "labels": [numbers[name] for name in names]}
        content["catname2label"] = {name: numbers[name] for name in _MINI[split]}
        path = f"mini_imagenet/miniImageNet_category_split_{part}.pickle"
        write(manual_dir, {path: pickle.dumps(content, protocol=4)})
    return expect(_MINI)


def tiered_imagenet(manual_dir: Path) -> Expected:
    """The pickles of Ren et al.; "crane" is a bird in one split and a machine in another."""
    classes = {
        "base": {"Yorkshire terrier": 3, "crane (base 1)": 2},
        "validation": {"ladle": 2},
        "novel": {"crane (novel 0)": 2, "teapot": 1},
    }
    for split, names, images in arrays(classes, 84):
        path, own = f"tiered-imagenet/{PARTS[split]}", [*classes[split]]
        # As cv2.imencode returns it.
        encoded = [np.frombuffer(encode_png(image), np.uint8)[:, None].copy() for image in images]
        labels: dict = {"label_specific": np.array([*map(own.index, names)], np.int32)}
        labels["label_specific_str"] = [name.partition(" (")[0] for name in own]
        write(manual_dir, {f"{path}_images_png.pkl": encoded, f"{path}_labels.pkl": labels})
    return expect(classes)


_BIRDS = [f"{number:03}.Bird_{number}" for number in range(1, 9)]


def _birds(base: list[str], validation: list[str], novel: list[str]) -> Counts:
    splits = {"base": base, "validation": validation, "novel": novel}
    return {split: dict.fromkeys(names, 2) for split, names in splits.items()}


# The images alone: the split goes by the class number.
cub_folder = fake(
    _birds(_BIRDS[::2], _BIRDS[1::4], _BIRDS[3::4]),
    "CUB_200_2011/images/{name}/{name}_{i:04}.jpg",
)


def cub_archive(manual_dir: Path) -> Expected:
    """With the lists of Chen et al., which have the paths of their machine."""
    classes = _birds(_BIRDS[:4], _BIRDS[4:6], _BIRDS[6:])
    file = "CUB_200_2011/images/{name}/{name}_{i:04}.png"
    files: dict[str, Any] = {"CUB_200_2011.tgz/CUB_200_2011/classes.txt": ["1 001.Bird_1"]}
    for split, of in classes.items():
        own = [(name, file.format(name=name, i=i)) for _, name, _, i in photos({split: of})]
        files[f"{'val' if split == 'validation' else split}.json"] = {
            "label_names": _BIRDS,
            "image_names": [f"/home/someone/filelists/CUB/{path}" for _, path in own],
            "image_labels": [_BIRDS.index(name) for name, _ in own],
        }
    return fake(classes, f"CUB_200_2011.tgz/{file}", more=files)(manual_dir)


_CIFAR = {
    "base": {"apple": 3, "maple_tree": 2},
    "validation": {"otter": 2},
    "novel": {"baby": 2, "worm": 1},
}
cifar_fs_folder = fake(
    _CIFAR,
    "cifar100/data/{name}/{name}_s_{i:06}.png",
    more={f"cifar100/splits/bertinetto/{PARTS[s]}.txt": [*of] for s, of in _CIFAR.items()},
)


def cifar_fs_pickles(manual_dir: Path) -> Expected:
    """The pickles of MetaOptNet, which number the classes."""
    numbered = {
        split: {f"{split} class {label:03}": count for label, count in enumerate(of.values(), 10)}
        for split, of in _CIFAR.items()
    }
    for split, names, images in arrays(numbered, 32):
        content = {"data": images, "labels": [int(name[-3:]) for name in names]}
        write(manual_dir, {f"cifar-fs/CIFAR_FS_{PARTS[split]}.pickle": content})
    return expect(numbered)


_SPECIES = {
    "base": {"Danaus plexippus": 3, "Cygnus olor": 2},
    "novel": {"Sciurus carolinensis": 2, "Bufo bufo": 1},
}
_NUMBERS = {"Danaus plexippus": 11, "Cygnus olor": 7, "Sciurus carolinensis": 30, "Bufo bufo": 2}


def inat2017_boxes(manual_dir: Path) -> Expected:
    """Two boxes on every image, but none on an image of Cygnus olor that is not in `_SPECIES`."""
    archive, file = "train_val_images.tar.gz", "train_val_images/Animals/{name}/{number:032x}.jpg"
    files = {
        number: (name, file.format(name=name, number=number))
        for number, (_, name, *_) in enumerate(photos(_SPECIES), 1)
    }
    unboxed = file.format(name="Cygnus olor", number=99)
    boxes = [{"image_id": n, "category_id": _NUMBERS[name]} for n, (name, _) in files.items()]
    named = [*((n, path) for n, (_, path) in files.items()), (99, unboxed)]
    content = {
        "images": [{"id": n, "file_name": path} for n, path in named],
        "annotations": [box | {"id": n, "bbox": [0, 0, 5, 5]} for n, box in enumerate(2 * boxes)],
        "categories": [{"id": number, "name": name} for name, number in _NUMBERS.items()],
    }
    more = {
        "inat2017/train_2017_bboxes.json": content,
        f"inat2017/{archive}/{unboxed}": ["no image, no box"],
    }
    for split, of in _SPECIES.items():
        numbers, buffer = [_NUMBERS[name] for name in of], io.BytesIO()
        torch.save(numbers, buffer, _use_new_zipfile_serialization=split == "base")
        more[f"inat2017/meta_iNat_{PARTS[split]}cats.pth"] = buffer.getvalue()
    return fake(_SPECIES, f"inat2017/{archive}/{file}", more=more)(manual_dir)


inat2017_prepared = fake(
    {split: {str(_NUMBERS[n]): count for n, count in of.items()} for split, of in _SPECIES.items()},
    "meta_iNat/{part}/{name}/{i:032x}.png",
)

LAYOUTS: dict[str, tuple[Write, ...]] = {
    "mini_imagenet": (mini_imagenet_folder, mini_imagenet_caches, mini_imagenet_phases),
    "tiered_imagenet": (tiered_imagenet,),
    "cub_fewshot": (cub_folder, cub_archive),
    "cifar_fs": (cifar_fs_folder, cifar_fs_pickles),
    "inat2017_fewshot": (inat2017_boxes, inat2017_prepared),
}
