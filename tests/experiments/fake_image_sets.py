"""Tiny archives in the layouts in which people have the sets for classification and many labels.

As in `fake_archives`, every image is of one colour: `colour(key, i)` with a key of its own for
every class of a split.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.io import savemat

from tests.experiments.fake_archives import (
    Expected,
    add,
    colour,
    pixels,
    png,
    write_image,
    write_pickle,
    zip_folder,
)

Counts = dict[str, dict[str, int]]


def _photos(classes: Counts) -> Iterator[tuple[str, str, str, int]]:
    """Split, class, the key of its colours, and number of every image."""
    for split, of in classes.items():
        for name, count in of.items():
            for i in range(count):
                yield split, name, f"{split} {name}", i


def _expect(classes: Counts, exact: bool = False) -> Expected:
    return Expected(
        {
            split: {
                name: [colour(f"{split} {name}", i) for i in range(n)] for name, n in of.items()
            }
            for split, of in classes.items()
        },
        exact,
    )


def _pack(folder: Path, path: Path) -> None:
    """A folder's content as a tar; the ending says whether it is compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, file.name)


def _write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def class_folders(
    manual_dir: Path, name: str, parts: dict[str, str], ending: str = "jpg"
) -> Expected:
    """`NAME/train/CLASS/*.jpg` and so on."""
    classes = {split: {"ant": 2, "bee fly": 1 + len(split) % 2} for split in parts}
    for split, of, key, i in _photos(classes):
        write_image(manual_dir / name / parts[split] / of / f"{i:03}.{ending}", key, i, (20, 24))
    return _expect(classes)


_TWO: Counts = {"train": {"ant": 3, "bee": 2}, "test": {"ant": 1, "bee": 2}}
_THREE: Counts = {**_TWO, "validation": {"ant": 1, "bee": 1}}
_THREE = {split: _THREE[split] for split in ("train", "validation", "test")}
_PARTS = {"train": "train", "validation": "val", "test": "test"}


# --- Listed -------------------------------------------------------------------------------------


def food101_folder(manual_dir: Path) -> Expected:
    """`food-101/images/*/*.jpg` and `food-101/meta/*.txt`."""
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for split, name, key, i in _photos(_TWO):
        lists[split].append(f"{name}/{split}{i}")
        write_image(manual_dir / f"food-101/images/{name}/{split}{i}.jpg", key, i)
    for split, lines in lists.items():
        _write_lines(manual_dir / f"food-101/meta/{split}.txt", lines)
    return _expect(_TWO)


def food101_archive(manual_dir: Path) -> Expected:
    """The same as `food-101.tar.gz`."""
    expected = food101_folder(manual_dir / "elsewhere")
    _pack(manual_dir / "elsewhere", manual_dir / "food101" / "food-101.tar.gz")
    return expected


def food101_class_folders(manual_dir: Path) -> Expected:
    """`food101/train/*/*.jpg` and `food101/val`."""
    return class_folders(manual_dir, "food101", {"train": "train", "test": "val"})


_SCENES: Counts = {
    "train": {"abbey": 2, "apartment_building/outdoor": 3},
    "test": {"abbey": 2, "apartment_building/outdoor": 1},
}


def _scene(split: str, name: str, i: int) -> str:
    return f"/a/{name}/sun_{split}{i}.jpg"


def _write_partitions(folder: Path) -> None:
    _write_lines(folder / "ClassName.txt", [f"/a/{name}" for name in _SCENES["train"]])
    for split, part in (("train", "Training"), ("test", "Testing")):
        files = [_scene(of, name, i) for of, name, _, i in _photos(_SCENES) if of == split]
        _write_lines(folder / f"{part}_01.txt", files)


def sun397(manual_dir: Path) -> Expected:
    """`SUN397.tar.gz`, with images that no list names, and `Partitions.zip`."""
    manual_dir.mkdir(parents=True, exist_ok=True)
    with tarfile.open(manual_dir / "SUN397.tar.gz", "w:gz") as archive:
        add(archive, "SUN397/a/abbey/sun_none.jpg", b"no image, in no list")
        for split, name, key, i in _photos(_SCENES):
            add(archive, f"SUN397{_scene(split, name, i)}", png(key, i, (30, 40)))
    _write_partitions(manual_dir / "elsewhere")
    zip_folder(manual_dir / "elsewhere", manual_dir / "Partitions.zip")
    return _expect(_SCENES)


def sun397_folder(manual_dir: Path) -> Expected:
    """`SUN397/a/abbey/*.jpg` and so on, with the lists in `SUN397/Partitions`."""
    for split, name, key, i in _photos(_SCENES):
        write_image(manual_dir / f"SUN397{_scene(split, name, i)}", key, i, (30, 40))
    _write_partitions(manual_dir / "SUN397/Partitions")
    return _expect(_SCENES)


def dtd(manual_dir: Path) -> Expected:
    """`dtd-r1.0.1.tar.gz`, which has ten splits."""
    elsewhere = manual_dir / "elsewhere"
    lists: dict[str, list[str]] = {split: [] for split in _THREE}
    for split, name, key, i in _photos(_THREE):
        file = f"{name}/{name}_{split}{i:04}.jpg"
        write_image(elsewhere / "dtd/images" / file, key, i)
        lists[split].append(file)
    for split, lines in lists.items():
        _write_lines(elsewhere / f"dtd/labels/{_PARTS[split]}1.txt", lines)
        _write_lines(elsewhere / f"dtd/labels/{_PARTS[split]}2.txt", lines[:1])
    _pack(elsewhere, manual_dir / "dtd-r1.0.1.tar.gz")
    return _expect(_THREE)


def dtd_class_folders(manual_dir: Path) -> Expected:
    """`dtd/train/*/*.jpg` and so on, in a folder of the name that is in the archive."""
    return class_folders(manual_dir, "dtd", _PARTS, "png")


def aircraft(manual_dir: Path) -> Expected:
    """`fgvc-aircraft-2013b`, with names of several words."""
    classes = {split: {"707-320": 1, "F/A-18": 2, "Gulfstream IV": 1} for split in _PARTS}
    data = manual_dir / "aircraft/fgvc-aircraft-2013b/data"
    lists: dict[str, list[str]] = {split: [] for split in classes}
    for number, (split, name, key, i) in enumerate(_photos(classes), 34958):
        write_image(data / f"images/{number:07}.jpg", key, i)
        lists[split].append(f"{number:07} {name}")
    for split, lines in lists.items():
        _write_lines(data / f"images_variant_{_PARTS[split]}.txt", lines)
    return _expect(classes)


def pets(manual_dir: Path) -> Expected:
    """`images.tar.gz` and `annotations.tar.gz`."""
    classes = {split: {"Abyssinian": 2, "american_bulldog": 2} for split in ("train", "test")}
    elsewhere = manual_dir / "elsewhere"
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for split, name, key, i in _photos(classes):
        stem = f"{name}_{10 * len(split) + i}"
        write_image(elsewhere / f"1/images/{stem}.jpg", key, i)
        lists[split].append(f"{stem} 1 1 1")
    (elsewhere / "1/images/Abyssinian_101.mat").write_bytes(b"")
    _write_lines(elsewhere / "2/annotations/list.txt", ["#Image CLASS-ID SPECIES BREED ID"])
    _write_lines(elsewhere / "2/annotations/trainval.txt", lists["train"])
    _write_lines(elsewhere / "2/annotations/test.txt", lists["test"])
    _pack(elsewhere / "1", manual_dir / "oxford-iiit-pet/images.tar.gz")
    _pack(elsewhere / "2", manual_dir / "oxford-iiit-pet/annotations.tar.gz")
    return _expect(classes)


def pets_class_folders(manual_dir: Path) -> Expected:
    """`pets/train/*/*.jpg` and `pets/test`."""
    return class_folders(manual_dir, "pets", {"train": "train", "test": "test"})


# --- With files of their own --------------------------------------------------------------------


def cub(manual_dir: Path) -> Expected:
    """`CUB_200_2011.tgz` with its lists of numbers."""
    classes = {
        "train": {"001.Bird_a": 2, "002.Bird_b": 1},
        "test": {"001.Bird_a": 1, "002.Bird_b": 2},
    }
    elsewhere = manual_dir / "elsewhere"
    names, training = [], []
    for number, (split, name, key, i) in enumerate(_photos(classes), 1):
        names.append(f"{number} {name}/{split}_{i}.jpg")
        training.append(f"{number} {int(split == 'train')}")
        write_image(elsewhere / f"CUB_200_2011/images/{name}/{split}_{i}.jpg", key, i)
    _write_lines(elsewhere / "CUB_200_2011/images.txt", names)
    _write_lines(elsewhere / "CUB_200_2011/train_test_split.txt", training[::-1])
    _pack(elsewhere, manual_dir / "CUB_200_2011.tgz")
    return _expect(classes)


_CARS = {split: {"AM General Hummer SUV 2000": 2, "Acura RL Sedan 2012": 1} for split in _TWO}


def _structures(entries: list[dict]) -> np.ndarray:
    """As MATLAB writes an array of structures."""
    kinds = [(name, object) for name in entries[0]]
    return np.array([tuple(entry.values()) for entry in entries], kinds)[None]


def cars(manual_dir: Path) -> Expected:
    """`cars_train.tgz`, `cars_test.tgz`, `car_devkit.tgz` and the classes of the test images."""
    names = list(_CARS["train"])
    elsewhere = manual_dir / "elsewhere"
    entries: dict[str, list[dict]] = {"train": [], "test": []}
    for split, name, key, i in _photos(_CARS):
        file = f"{len(entries[split]) + 1:05}.jpg"
        write_image(elsewhere / f"{split}/cars_{split}/{file}", key, i)
        label = {"bbox_x1": 1, "class": names.index(name) + 1, "fname": file}
        entries[split].append(label)
    (elsewhere / "devkit/devkit").mkdir(parents=True)
    folder = manual_dir / "stanford_cars"
    for split in _CARS:
        _pack(elsewhere / split, folder / f"cars_{split}.tgz")
    devkit = elsewhere / "devkit/devkit"
    savemat(devkit / "cars_meta.mat", {"class_names": np.array(names, object)[None]})
    savemat(devkit / "cars_train_annos.mat", {"annotations": _structures(entries["train"])})
    unlabelled = [{"bbox_x1": 1, "fname": entry["fname"]} for entry in entries["test"]]
    savemat(devkit / "cars_test_annos.mat", {"annotations": _structures(unlabelled)})
    _pack(elsewhere / "devkit", folder / "car_devkit.tgz")
    savemat(
        folder / "cars_test_annos_withlabels.mat", {"annotations": _structures(entries["test"])}
    )
    return _expect(_CARS)


def cars_in_one(manual_dir: Path) -> Expected:
    """`car_ims.tgz` and `cars_annos.mat`."""
    names = list(_CARS["train"])
    elsewhere = manual_dir / "elsewhere"
    entries = []
    for number, (split, name, key, i) in enumerate(_photos(_CARS), 1):
        file = f"car_ims/{number:06}.jpg"
        write_image(elsewhere / file, key, i)
        entries.append(
            {
                "relative_im_path": file,
                "class": names.index(name) + 1,
                "test": int(split == "test"),
            }
        )
    _pack(elsewhere, manual_dir / "car_ims.tgz")
    content = {"annotations": _structures(entries), "class_names": np.array(names, object)[None]}
    savemat(manual_dir / "cars_annos.mat", content)
    return _expect(_CARS)


def flowers102(manual_dir: Path) -> Expected:
    """`102flowers.tgz`, `imagelabels.mat` and `setid.mat`."""
    classes = {split: {"flower 001": 1, "flower 002": 2} for split in _PARTS}
    elsewhere = manual_dir / "elsewhere"
    labels, numbers = [], {split: [] for split in classes}
    for number, (split, name, key, i) in enumerate(_photos(classes), 1):
        write_image(elsewhere / f"jpg/image_{number:05}.jpg", key, i)
        labels.append(int(name[-3:]))
        numbers[split].append(number)
    folder = manual_dir / "flowers-102"
    _pack(elsewhere, folder / "102flowers.tgz")
    savemat(folder / "imagelabels.mat", {"labels": np.array(labels, np.uint8)[None]})
    ids = dict(zip(("trnid", "valid", "tstid"), numbers.values(), strict=True))
    savemat(folder / "setid.mat", {name: np.array(of)[None] for name, of in ids.items()})
    return _expect(classes)


def _drawn(folder: Path, names: tuple[str, ...], count: int, train: int) -> Expected:
    """Folders of classes; those images whose names come first by their hash are to train."""
    splits: dict = {"train": {}, "test": {}}
    for name in names:
        files = [f"image_{i:04}.jpg" for i in range(count)]
        for i, file in enumerate(files):
            write_image(folder / name / file, name, i, (16, 16))

        def place(i: int, name: str = name, files: list[str] = files) -> str:
            return hashlib.sha256(f"{name}/{files[i]}".encode()).hexdigest()

        order = sorted(range(count), key=place)
        splits["train"][name] = [colour(name, i) for i in sorted(order[:train])]
        splits["test"][name] = [colour(name, i) for i in sorted(order[train:])]
    return Expected(splits, exact=False)


def caltech101(manual_dir: Path) -> Expected:
    """`caltech-101.zip`, which holds `101_ObjectCategories.tar.gz`."""
    elsewhere = manual_dir / "elsewhere"
    names = ("BACKGROUND_Google", "Faces", "accordion")
    expected = _drawn(elsewhere / "1/101_ObjectCategories", names, 32, 30)
    _pack(elsewhere / "1", elsewhere / "2/caltech-101/101_ObjectCategories.tar.gz")
    zip_folder(elsewhere / "2", manual_dir / "caltech-101.zip")
    return expected


def caltech101_folder(manual_dir: Path) -> Expected:
    """`101_ObjectCategories/*/*.jpg`."""
    folder = manual_dir / "caltech101/101_ObjectCategories"
    return _drawn(folder, ("accordion", "airplanes"), 31, 30)


def caltech256(manual_dir: Path) -> Expected:
    """`256_ObjectCategories.tar`, which has a class of clutter and files that are no images."""
    elsewhere = manual_dir / "elsewhere"
    folder = elsewhere / "256_ObjectCategories"
    expected = _drawn(folder, ("001.ak47", "056.dog"), 62, 60)
    write_image(folder / "257.clutter/257_0001.jpg", "clutter", 0)
    (folder / "056.dog/greg").mkdir()
    (folder / "056.dog/RENAME2").write_bytes(b"")
    _pack(elsewhere, manual_dir / "256_ObjectCategories.tar")
    return expected


# --- Arrays -------------------------------------------------------------------------------------


def _planes(keys: list[tuple[str, int]]) -> np.ndarray:
    """Rows as CIFAR has them."""
    images = np.stack([pixels(key, i, 32) for key, i in keys])
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def cifar10(manual_dir: Path) -> Expected:
    """`cifar-10-python.tar.gz`: five batches, as Python 2 wrote them."""
    names = ["airplane", "automobile"]
    keys = {"train": [("train", i) for i in range(10)], "test": [("test", i) for i in range(3)]}
    labels = {"train": [i % 3 % 2 for i in range(10)], "test": [1, 0, 1]}
    folder = manual_dir / "elsewhere/cifar-10-batches-py"
    for batch in range(5):
        rows = slice(2 * batch, 2 * batch + 2)
        content = {b"data": _planes(keys["train"][rows]), b"labels": labels["train"][rows]}
        write_pickle(folder / f"data_batch_{batch + 1}", content)
    write_pickle(folder / "test_batch", {b"data": _planes(keys["test"]), b"labels": labels["test"]})
    write_pickle(folder / "batches.meta", {b"label_names": [n.encode() for n in names]})
    _pack(manual_dir / "elsewhere", manual_dir / "cifar-10-python.tar.gz")
    return _expect_rows(names, keys, labels)


def cifar100(manual_dir: Path) -> Expected:
    """`cifar-100-python`."""
    names = ["apple", "aquarium_fish", "worm"]
    keys = {split: [(split, i) for i in range(6)] for split in ("train", "test")}
    labels = {"train": [2, 0, 1, 0, 1, 2], "test": [0, 0, 1, 2, 2, 2]}
    folder = manual_dir / "cifar-100-python"
    for split in keys:
        content = {
            "filenames": ["a.png"] * 6,
            "fine_labels": labels[split],
            "coarse_labels": [0] * 6,
            "data": _planes(keys[split]),
        }
        write_pickle(folder / split, content)
    write_pickle(folder / "meta", {"fine_label_names": names, "coarse_label_names": ["thing"]})
    return _expect_rows(names, keys, labels)


def svhn(manual_dir: Path) -> Expected:
    """`train_32x32.mat` and `test_32x32.mat`, in which the digit 0 is 10."""
    return _digits(manual_dir, {"train": 13, "test": 10})


def svhn_extra(manual_dir: Path) -> Expected:
    """The same, and `extra_32x32.mat`."""
    return _digits(manual_dir, {"train": 13, "extra": 21, "test": 10})


def _digits(manual_dir: Path, sizes: dict[str, int]) -> Expected:
    keys = {split: [(split, i) for i in range(size)] for split, size in sizes.items()}
    labels = {split: [(3 * i + 1) % 10 for i in range(size)] for split, size in sizes.items()}
    labels["test"] = list(range(10))
    folder = manual_dir / "svhn"
    folder.mkdir(parents=True)
    for split in keys:
        images = np.stack([pixels(key, i, 32) for key, i in keys[split]], axis=-1)
        digits = np.array([label or 10 for label in labels[split]], np.uint8)[:, None]
        savemat(folder / f"{split}_32x32.mat", {"X": images, "y": digits})
    return _expect_rows([str(digit) for digit in range(10)], keys, labels)


def stl10(manual_dir: Path) -> Expected:
    """`stl10_binary.tar.gz`, with images without labels."""
    names = ["airplane", "bird"]
    keys = {"train": [("train", i) for i in range(4)], "test": [("test", i) for i in range(3)]}
    labels = {"train": [1, 0, 0, 1], "test": [0, 1, 1]}
    folder = manual_dir / "elsewhere/stl10_binary"
    folder.mkdir(parents=True)
    for split in keys:
        images = np.stack([pixels(key, i, 96) for key, i in keys[split]])
        images.transpose(0, 3, 2, 1).tofile(folder / f"{split}_X.bin")
        (np.array(labels[split], np.uint8) + 1).tofile(folder / f"{split}_y.bin")
    np.zeros(3 * 96 * 96, np.uint8).tofile(folder / "unlabeled_X.bin")
    _write_lines(folder / "class_names.txt", names)
    _pack(manual_dir / "elsewhere", manual_dir / "stl10" / "stl10_binary.tar.gz")
    return _expect_rows(names, keys, labels)


def _expect_rows(names: list[str], keys: dict, labels: dict) -> Expected:
    return Expected(
        {
            split: {
                name: [
                    colour(*key)
                    for key, label in zip(of, labels[split], strict=True)
                    if label == number
                ]
                for number, name in enumerate(names)
            }
            for split, of in keys.items()
        }
    )


# --- ImageNet -----------------------------------------------------------------------------------

_SYNSETS: Counts = {
    "train": {"n01440764": 2, "n02102040": 3},
    "test": {"n01440764": 2, "n02102040": 1},
}
# Numbers of the challenge are in another order than the names; internal nodes come after.
_NUMBERS = {1: "n02102040", 2: "n01440764", 3: "n00001740"}


def _validation() -> list[tuple[str, str, int, str]]:
    """Class, key, number and file of the validation images, the classes mixed."""
    photos = [(name, key, i) for split, name, key, i in _photos(_SYNSETS) if split == "test"]
    return [
        (*photos[at], f"ILSVRC2012_val_{number:08}.JPEG") for number, at in enumerate((2, 0, 1), 1)
    ]


def _write_devkit(folder: Path) -> None:
    data = folder / "ILSVRC2012_devkit_t12/data"
    numbers = {name: number for number, name in _NUMBERS.items()}
    lines = [str(numbers[name]) for name, *_ in _validation()]
    _write_lines(data / "ILSVRC2012_validation_ground_truth.txt", lines)
    synsets = [
        {"ILSVRC2012_ID": number, "WNID": name, "words": "a thing", "num_children": number // 3}
        for number, name in _NUMBERS.items()
    ]
    savemat(data / "meta.mat", {"synsets": _structures(synsets).T})


def imagenet_archives(manual_dir: Path) -> Expected:
    """The three tars of the challenge; that of training images holds a tar for every class."""
    manual_dir.mkdir(parents=True, exist_ok=True)
    with tarfile.open(manual_dir / "ILSVRC2012_img_train.tar", "w") as outer:
        for name, count in reversed(_SYNSETS["train"].items()):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as inner:
                for i in range(count):
                    add(inner, f"{name}_{i}.JPEG", png(f"train {name}", i, (50, 40)))
            add(outer, f"{name}.tar", buffer.getvalue())
    with tarfile.open(manual_dir / "ILSVRC2012_img_val.tar", "w") as archive:
        for _, key, i, file in _validation():
            add(archive, file, png(key, i, (40, 50)))
    _write_devkit(manual_dir / "elsewhere")
    _pack(manual_dir / "elsewhere", manual_dir / "ILSVRC2012_devkit_t12.tar.gz")
    return _expect(_SYNSETS)


def imagenet_kaggle(manual_dir: Path) -> Expected:
    """`ILSVRC/Data/CLS-LOC` and `LOC_val_solution.csv`."""
    folder = manual_dir / "imagenet/ILSVRC/Data/CLS-LOC"
    for split, name, key, i in _photos(_SYNSETS):
        if split == "train":
            write_image(folder / f"train/{name}/{name}_{i}.JPEG", key, i)
    lines = ["ImageId,PredictionString"]
    for name, key, i, file in _validation():
        write_image(folder / "val" / file, key, i)
        lines.append(f"{file[:-5]},{name} 85 1 499 272 {name} 1 1 20 20 ")
    write_image(folder / "test/ILSVRC2012_test_00000001.JPEG", "unlabelled", 0)
    _write_lines(manual_dir / "imagenet/LOC_val_solution.csv", lines)
    return _expect(_SYNSETS)


def imagenet_class_folders(manual_dir: Path) -> Expected:
    """`imagenet/train/*/*.JPEG` and `imagenet/val`."""
    return class_folders(manual_dir, "imagenet", {"train": "train", "test": "val"}, "JPEG")


def imagenet_folders_and_devkit(manual_dir: Path) -> Expected:
    """`ImageNet/train/*/*.JPEG`, the validation images in one folder, and the devkit."""
    for split, name, key, i in _photos(_SYNSETS):
        if split == "train":
            write_image(manual_dir / f"ImageNet/train/{name}/{name}_{i}.JPEG", key, i)
    for _, key, i, file in _validation():
        write_image(manual_dir / "ImageNet/val" / file, key, i)
    _write_devkit(manual_dir / "ImageNet")
    return _expect(_SYNSETS)


def imagenet_class_folders_and_devkit(manual_dir: Path) -> Expected:
    """The same with a devkit, which is not needed."""
    _write_devkit(manual_dir)
    return imagenet_class_folders(manual_dir)


def imagenet200(manual_dir: Path) -> Expected:
    """`tiny-imagenet-200.zip`."""
    elsewhere = manual_dir / "elsewhere"
    folder = elsewhere / "tiny-imagenet-200"
    lines = []
    for split, name, key, i in _photos(_SYNSETS):
        if split == "train":
            file = f"train/{name}/images/{name}_{i}.JPEG"
        else:
            file = f"val/images/val_{len(lines)}.JPEG"
            lines.append(f"{Path(file).name}\t{name}\t0\t32\t44\t62")
        write_image(folder / file, key, i, (64, 64))
    write_image(folder / "test/images/test_0.JPEG", "unlabelled", 0, (64, 64))
    _write_lines(folder / "val/val_annotations.txt", lines)
    _write_lines(folder / "wnids.txt", list(_SYNSETS["train"]))
    zip_folder(elsewhere, manual_dir / "tiny-imagenet-200.zip")
    return _expect(_SYNSETS)


# --- Many labels --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectedLabels:
    """What a data set of many labels made from a fake archive must hold."""

    names: tuple[str, ...]
    splits: dict[str, list[tuple[tuple[int, int, int], list[int]]]]
    """For every split the colours of the images in order, each with its targets."""


def _coco(manual_dir: Path, year: int) -> ExpectedLabels:
    """Categories whose numbers have gaps, several objects of one kind, and images without any."""
    prefix = "COCO_{}_" if year == 2014 else ""
    objects = {"train": {9: [3, 1, 3], 25: [], 30: [90]}, "test": {42: [1, 90], 73: [3], 74: []}}
    columns = {1: 0, 3: 1, 90: 2}
    expected: dict = {}
    for split, images in objects.items():
        part = f"{'train' if split == 'train' else 'val'}{year}"
        files = {n: f"{prefix.format(part)}{n:012}.jpg" for n in images}
        for number, file in files.items():
            write_image(manual_dir / part / file, split, number, (30, 20))
        content = {
            "info": {"year": year},
            "images": [{"id": n, "file_name": files[n], "height": 20} for n in reversed(images)],
            "annotations": [
                {
                    "id": k,
                    "image_id": n,
                    "category_id": category,
                    "segmentation": [[1.5, 2.5, 3.0, 4.0]] if k else {"counts": [1], "size": [2]},
                    "bbox": [0, 0, 1, 1],
                }
                for n, of in images.items()
                for k, category in enumerate(of)
            ],
            "categories": [
                {"id": 90, "name": "toothbrush"},
                {"id": 1, "name": "person"},
                {"id": 3, "name": "car"},
            ],
        }
        path = manual_dir / f"annotations/instances_{part}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        expected[split] = [
            (colour(split, n), [int(c in {columns[o] for o in of}) for c in range(3)])
            for n, of in images.items()
            if of
        ]
    return ExpectedLabels(("person", "car", "toothbrush"), expected)


def coco_2014(manual_dir: Path) -> ExpectedLabels:
    """The zips of 2014."""
    elsewhere = manual_dir / "elsewhere"
    expected = _coco(elsewhere, 2014)
    for part in ("train2014", "val2014", "annotations"):
        apart = elsewhere / f"apart/{part}"
        apart.mkdir(parents=True)
        (elsewhere / part).rename(apart / part)
        name = "annotations_trainval2014" if part == "annotations" else part
        (manual_dir / "coco").mkdir(exist_ok=True)
        zip_folder(apart, manual_dir / f"coco/{name}.zip")
    return expected


def coco_2017(manual_dir: Path) -> ExpectedLabels:
    """The folders of 2017."""
    return _coco(manual_dir / "coco", 2017)


_VOC = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
# For every image its objects, and whether each is difficult.
_VOC_OBJECTS = {
    "train": {"000012": [("car", 0)], "000017": [("person", 0), ("horse", 1)]},
    "val": {"000005": [("chair", 1), ("chair", 0), ("chair", 1)]},
    "test": {"000001": [("dog", 0), ("person", 0)], "000002": [("train", 1), ("train", 1)]},
}


def _voc_targets(objects: list[tuple[str, int]]) -> list[int]:
    kinds = {name: {d for of, d in objects if of == name} for name in _VOC}
    return [0 if not of else 1 if 0 in of else -1 for of in kinds.values()]


def _voc(manual_dir: Path, parts: tuple[str, ...], lists: bool) -> None:
    top = manual_dir / "VOCdevkit/VOC2007"
    for part in parts:
        images = _VOC_OBJECTS[part]
        _write_lines(top / f"ImageSets/Main/{part}.txt", list(images))
        if lists:
            for column, name in enumerate(_VOC):
                values = {1: " 1", 0: "-1", -1: " 0"}
                lines = [f"{n} {values[_voc_targets(of)[column]]}" for n, of in images.items()]
                _write_lines(top / f"ImageSets/Main/{name}_{part}.txt", lines)
        for number, objects in images.items():
            write_image(top / f"JPEGImages/{number}.jpg", "voc", int(number), (50, 30))
            found = "".join(
                f"<object><name>{name}</name><difficult>{difficult}</difficult>"
                f"<part><name>head</name></part></object>"
                for name, difficult in objects
            )
            _write_lines(
                top / f"Annotations/{number}.xml",
                [f"<annotation><filename>{number}.jpg</filename>{found}</annotation>"],
            )


def _expect_voc() -> ExpectedLabels:
    splits = {"train": "train", "validation": "val", "test": "test"}
    return ExpectedLabels(
        _VOC,
        {
            split: [
                (colour("voc", int(number)), _voc_targets(objects))
                for number, objects in _VOC_OBJECTS[part].items()
            ]
            for split, part in splits.items()
        },
    )


def voc2007_archives(manual_dir: Path) -> ExpectedLabels:
    """The two tars, with lists of classes."""
    for name, parts in (
        ("VOCtrainval_06-Nov-2007", ("train", "val")),
        ("VOCtest_06-Nov-2007", ("test",)),
    ):
        _voc(manual_dir / "elsewhere" / name, parts, lists=True)
        _pack(manual_dir / "elsewhere" / name, manual_dir / f"{name}.tar")
    return _expect_voc()


def voc2007_annotations(manual_dir: Path) -> ExpectedLabels:
    """The extracted folder, with annotations only."""
    _voc(manual_dir / "voc2007", ("train", "val", "test"), lists=False)
    return _expect_voc()


# An image without a label is left out, and one that is not on the disk.
_NUS = {
    "train": {
        r"actor\0001_2124494179.jpg": ["sky", "person"],
        r"zebra\0001_1.jpg": [],
        r"zebra\0002_2.jpg": ["animal"],
        r"zebra\0003_missing.jpg": ["animal"],
    },
    "test": {r"sky\0001_5.jpg": ["sky"], r"sky\0002_6.jpg": ["animal", "sky"]},
}
_NUS_NAMES = ("animal", "person", "sky")


def _expect_nus() -> ExpectedLabels:
    return ExpectedLabels(
        _NUS_NAMES,
        {
            split: [
                (colour(file, 0), [int(name in labels) for name in _NUS_NAMES])
                for file, labels in images.items()
                if labels and "missing" not in file
            ]
            for split, images in _NUS.items()
        },
    )


def nus_wide_published(manual_dir: Path) -> ExpectedLabels:
    """`Flickr/*/*.jpg` and the published lists, some as archives."""
    folder, elsewhere = manual_dir / "nus-wide", manual_dir / "elsewhere"
    for split, images in _NUS.items():
        part = split.capitalize()
        for file in images:
            if "missing" not in file:
                write_image(folder / "Flickr" / file.replace("\\", "/"), file, 0)
        _write_lines(folder / f"ImageList/{part}Imagelist.txt", list(images))
        for name in _NUS_NAMES:
            lines = [str(int(name in labels)) for labels in images.values()]
            _write_lines(elsewhere / f"Groundtruth/TrainTestLabels/Labels_{name}_{part}.txt", lines)
    zip_folder(elsewhere, folder / "Groundtruth.zip")
    _write_lines(folder / "ConceptsList/Concepts81.txt", list(_NUS_NAMES))
    return _expect_nus()


def nus_wide_table(manual_dir: Path) -> ExpectedLabels:
    """`images/*.jpg` and the table of Ben-Baruch et al."""
    folder = manual_dir / "NUS-WIDE"
    lines = ["filepath,label,split_name"]
    for split, images in _NUS.items():
        for file, labels in images.items():
            name = file.replace("\\", "_")
            if "missing" not in file:
                write_image(folder / "images" / name, file, 0)
            lines.append(f'images/{name},"{labels}",{"val" if split == "test" else split}')
    _write_lines(folder / "nus_wid_data.csv", lines)
    return _expect_nus()


ONE_LABEL: dict[str, tuple[Callable[[Path], Expected], ...]] = {
    "imagenet": (
        imagenet_archives,
        imagenet_kaggle,
        imagenet_folders_and_devkit,
        imagenet_class_folders,
        imagenet_class_folders_and_devkit,
    ),
    "imagenet200": (imagenet200,),
    "food101": (food101_folder, food101_archive, food101_class_folders),
    "caltech256": (caltech256,),
    "sun397": (sun397, sun397_folder),
    "cifar10": (cifar10,),
    "cifar100": (cifar100,),
    "svhn": (svhn,),
    "svhn_extra": (svhn_extra,),
    "stl10": (stl10,),
    "aircraft": (aircraft,),
    "caltech101": (caltech101, caltech101_folder),
    "cars": (cars, cars_in_one),
    "cub": (cub,),
    "dtd": (dtd, dtd_class_folders),
    "flowers102": (flowers102,),
    "pets": (pets, pets_class_folders),
}
"""Every data set for classification with the functions that write a fake of it."""

MANY_LABELS: dict[str, tuple[Callable[[Path], ExpectedLabels], ...]] = {
    "coco": (coco_2014, coco_2017),
    "voc2007": (voc2007_archives, voc2007_annotations),
    "nus_wide": (nus_wide_published, nus_wide_table),
}
"""The same of the data sets of many labels."""
