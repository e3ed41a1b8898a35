"""Tiny archives in the layouts in which people have the sets for classification and many labels.

As in `fake_archives`, every image is of one colour: `colour(key, i)` with a key of its own for
every class of a split.
"""

from __future__ import annotations

import gzip
import hashlib
import string
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.core.config import Folders
from experiments.core.protocol import ImageSet
from tests.experiments.fake_archives import (
    PARTS,
    Counts,
    Expected,
    Write,
    arrays,
    colour,
    expect,
    fake,
    image_set,
    write,
)

_TWO: Counts = {"train": {"ant": 3, "bee": 2}, "test": {"ant": 1, "bee": 2}}
_THREE: Counts = {"train": _TWO["train"], "validation": {"ant": 1, "bee": 1}, "test": _TWO["test"]}


def _both(names: Iterable[str]) -> Counts:
    """Two images of every class for training and for test."""
    return {split: dict.fromkeys(names, 2) for split in _TWO}


def class_folders(name: str, *parts: str) -> Write:
    """`NAME/train/CLASS/*.jpg` and so on; the last part is the test split."""
    splits = [*_THREE] if len(parts) == 3 else [*_TWO]
    classes = {split: {"ant": 2, "bee fly": 1 + len(split) % 2} for split in splits}
    image = f"{name}/{{part}}/{{name}}/{{i:03}}.jpg"
    return fake(classes, image, parts=dict(zip(splits, parts, strict=True)))


# --- Lists of images ----------------------------------------------------------------------------

food101 = fake(
    _TWO,
    "food-101/images/{name}/{split}{i}.jpg",
    {"food-101/meta/{part}.txt": "{name}/{split}{i}"},
)
sun397 = fake(
    _both(("abbey", "apartment_building/outdoor")),
    "SUN397.tar.gz/SUN397/a/{name}/sun_{split}{i}.jpg",
    {"Partitions.zip/{part}_01.txt": "/a/{name}/sun_{split}{i}.jpg"},
    {"SUN397.tar.gz/SUN397/a/abbey/sun_none.jpg": ["no image, in no list"]},
    {"train": "Training", "test": "Testing"},
)
dtd = fake(
    _THREE,
    "dtd-r1.0.1.tar.gz/dtd/images/{name}/{name}_{split}{i:04}.jpg",
    {"dtd-r1.0.1.tar.gz/dtd/labels/{part}1.txt": "{name}/{name}_{split}{i:04}.jpg"},
)
_AIRCRAFT = "aircraft/fgvc-aircraft-2013b/data"
aircraft = fake(
    {split: {"707-320": 1, "F/A-18": 2, "Gulfstream IV": 1} for split in _THREE},
    f"{_AIRCRAFT}/images/{{number:07}}.jpg",
    {f"{_AIRCRAFT}/images_variant_{{part}}.txt": "{number:07} {name}"},
)
_PETS = "oxford-iiit-pet/annotations.tar.gz/annotations"
pets = fake(
    _both(("Abyssinian", "american_bulldog")),
    "oxford-iiit-pet/images.tar.gz/images/{name}_{number}.jpg",
    {f"{_PETS}/{{part}}.txt": "{name}_{number} 1 1 1"},
    {f"{_PETS}/trainval.txt": ["#Image CLASS-ID SPECIES BREED ID"]},
    {"train": "trainval", "test": "test"},
)
_CUB = "CUB_200_2011.tgz/CUB_200_2011"
cub = fake(
    _both(("001.Bird_a", "002.Bird_b")),
    f"{_CUB}/images/{{name}}/{{split}}_{{i}}.jpg",
    {
        f"{_CUB}/images.txt": "{number} {name}/{split}_{i}.jpg",
        f"{_CUB}/train_test_split.txt": "{number} {part}",
    },
    {f"{_CUB}/train_test_split.txt": ["9 1"]},
    {"train": "1", "test": "0"},
)


def _structures(**columns: Iterable) -> dict[str, np.ndarray]:
    """As MATLAB writes an array of structures, under the name of cars and of ImageNet."""
    kinds = [(name, object) for name in columns]
    found = np.array([*zip(*columns.values(), strict=True)], kinds)[None]
    return {"annotations": found, "synsets": found.T}


_MODELS = {"AM General Hummer SUV 2000": 2, "Acura RL Sedan 2012": 1}
_TRAIN_CARS, _TEST_CARS = ([f"{number:05}.jpg" for number in of] for of in ((1, 2, 3), (4, 5, 6)))
cars = fake(
    {"train": _MODELS, "test": _MODELS},
    "stanford_cars/cars_{split}.tgz/cars_{split}/{number:05}.jpg",
    more={
        "stanford_cars/car_devkit.tgz/devkit/cars_meta.mat": {
            "class_names": np.array([*_MODELS], object)[None]
        },
        "stanford_cars/car_devkit.tgz/devkit/cars_train_annos.mat": _structures(
            **{"class": [1, 1, 2]}, bbox_x1=[1, 1, 2], fname=_TRAIN_CARS
        ),
        "stanford_cars/car_devkit.tgz/devkit/cars_test_annos.mat": _structures(fname=_TEST_CARS),
        "stanford_cars/cars_test_annos_withlabels.mat": _structures(
            **{"class": [1, 1, 2]}, bbox_x1=[1, 1, 2], fname=_TEST_CARS
        ),
    },
)
flowers102 = fake(
    {split: {"flower 001": 1, "flower 002": 2} for split in _THREE},
    "flowers-102/102flowers.tgz/jpg/image_{number:05}.jpg",
    more={
        "flowers-102/imagelabels.mat": {"labels": np.array([3 * [1, 2, 2]], np.uint8)},
        "flowers-102/setid.mat": {"trnid": [[1, 2, 3]], "valid": [[4, 5, 6]], "tstid": [[7, 8, 9]]},
    },
)


# --- Caltech ------------------------------------------------------------------------------------


def _drawn(
    manual_dir: Path, folder: str, names: tuple[str, ...], train: int, **more: Any
) -> Expected:
    """Folders of classes; those images whose names come first by their hash are to train."""
    splits: dict = {"train": {}, "test": {}}
    files = {f"{folder}/{path}": content for path, content in more.items()}
    for name in names:
        own = {f"{name}/image_{i:04}.jpg": colour(name, i) for i in range(train + 2)}
        files |= {f"{folder}/{path}": content for path, content in own.items()}
        order = sorted(own, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
        for split, of in (("train", order[:train]), ("test", order[train:])):
            splits[split][name] = [own[path] for path in sorted(of)]
    write(manual_dir, files)
    return {split: image_set(of) for split, of in splits.items()}


def caltech101(manual_dir: Path) -> Expected:
    """`caltech-101.zip`, which holds `101_ObjectCategories.tar.gz`."""
    folder = "caltech-101.zip/caltech-101/101_ObjectCategories.tar.gz/101_ObjectCategories"
    return _drawn(manual_dir, folder, ("BACKGROUND_Google", "accordion"), 30)


def caltech256(manual_dir: Path) -> Expected:
    """`256_ObjectCategories.tar`, which has a class of clutter and files that are not images."""
    more = {"257.clutter/257_0001.jpg": (1, 2, 3), "056.dog/greg/x": b"", "056.dog/RENAME2": b""}
    folder = "256_ObjectCategories.tar/256_ObjectCategories"
    return _drawn(manual_dir, folder, ("001.ak47", "056.dog"), 60, **more)


# --- Arrays -------------------------------------------------------------------------------------


def _planes(images: np.ndarray) -> np.ndarray:
    """Rows as CIFAR has them."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def cifar10(manual_dir: Path) -> Expected:
    """`cifar-10-python.tar.gz`: five batches."""
    kinds, folder = ["airplane", "automobile"], "cifar-10-python.tar.gz/cifar-10-batches-py"
    classes: Counts = {"train": dict.fromkeys(kinds, 5), "test": {"airplane": 1, "automobile": 2}}
    files: dict[str, Any] = {f"{folder}/batches.meta": {"label_names": kinds}}
    for split, names, images in arrays(classes, 32):
        batches = {f"data_batch_{n + 1}": slice(2 * n, 2 * n + 2) for n in range(5)}
        for file, part in (batches if split == "train" else {"test_batch": slice(3)}).items():
            labels = [*map(kinds.index, names[part])]
            files[f"{folder}/{file}"] = {"data": _planes(images[part]), "labels": labels}
    write(manual_dir, files)
    return expect(classes)


def cifar100(manual_dir: Path) -> Expected:
    kinds = ["apple", "aquarium_fish", "worm"]
    classes = {"train": dict.fromkeys(kinds, 2), "test": dict(zip(kinds, (2, 1, 3), strict=True))}
    meta = {"fine_label_names": kinds, "coarse_label_names": ["thing"]}
    files: dict[str, Any] = {"cifar-100-python/meta": meta}
    for split, names, images in arrays(classes, 32):
        labels = {"fine_labels": [*map(kinds.index, names)], "coarse_labels": [0] * 6}
        files[f"cifar-100-python/{split}"] = labels | {"data": _planes(images)}
    write(manual_dir, files)
    return expect(classes)


def svhn_extra(manual_dir: Path) -> Expected:
    """`train_32x32.mat`, `extra_32x32.mat` and `test_32x32.mat`, in which the digit 0 is 10."""
    classes = {
        split: {str(digit): len(range(digit, size, 10)) for digit in range(10)}
        for split, size in {"train": 13, "extra": 21, "test": 10}.items()
    }
    for split, names, images in arrays(classes, 32):
        digits = np.array([int(name) or 10 for name in names], np.uint8)[:, None]
        content = {"X": np.moveaxis(images, 0, -1), "y": digits}
        write(manual_dir, {f"svhn/{split}_32x32.mat": content})
    return expect(classes)


def svhn(manual_dir: Path) -> Expected:
    return {split: of for split, of in svhn_extra(manual_dir).items() if split != "extra"}


def stl10(manual_dir: Path) -> Expected:
    """`stl10_binary.tar.gz`, with images without labels."""
    classes = {"train": {"airplane": 2, "bird": 2}, "test": {"airplane": 1, "bird": 2}}
    files: dict[str, Any] = {"class_names.txt": ["airplane", "bird"], "unlabeled_X.bin": bytes(9)}
    for split, names, images in arrays(classes, 96):
        files[f"{split}_X.bin"] = images.transpose(0, 3, 2, 1).tobytes()
        files[f"{split}_y.bin"] = bytes(1 + (name == "bird") for name in names)
    folder = "stl10/stl10_binary.tar.gz/stl10_binary"
    write(manual_dir, {f"{folder}/{name}": content for name, content in files.items()})
    return expect(classes)


# --- ImageNet -----------------------------------------------------------------------------------

_SYNSETS: Counts = {
    "train": {"n01440764": 2, "n02102040": 3},
    "test": {"n01440764": 2, "n02102040": 1},
}
# Numbers of the challenge are in another order than the names; internal nodes come after.
_NUMBERS = {1: "n02102040", 2: "n01440764", 3: "n00001740"}
# Number in the challenge, and in the class, of the validation images, the classes mixed.
_VALIDATION = {"ILSVRC2012_val_00000001": (1, 0), "ILSVRC2012_val_00000002": (2, 0)}
_VALIDATION |= {"ILSVRC2012_val_00000003": (2, 1)}


def _validation(folder: str) -> dict[str, Any]:
    return {
        f"{folder}/{stem}.JPEG": colour(f"test {_NUMBERS[number]}", i)
        for stem, (number, i) in _VALIDATION.items()
    }


# The three tars of the challenge; that of training images holds a tar for every class.
_DEVKIT = "ILSVRC2012_devkit_t12.tar.gz/ILSVRC2012_devkit_t12/data"
imagenet_archives = fake(
    _SYNSETS,
    {"train": "ILSVRC2012_img_train.tar/{name}.tar/{name}_{i}.JPEG"},
    more=_validation("ILSVRC2012_img_val.tar")
    | {
        f"{_DEVKIT}/ILSVRC2012_validation_ground_truth.txt": ["1", "2", "2"],
        f"{_DEVKIT}/meta.mat": _structures(ILSVRC2012_ID=_NUMBERS, WNID=_NUMBERS.values()),
    },
)
_KAGGLE = "imagenet/ILSVRC/Data/CLS-LOC"
imagenet_kaggle = fake(
    _SYNSETS,
    {"train": f"{_KAGGLE}/train/{{name}}/{{name}}_{{i}}.JPEG"},
    more=_validation(f"{_KAGGLE}/val")
    | {
        f"{_KAGGLE}/test/ILSVRC2012_test_00000001.JPEG": (1, 2, 3),
        "imagenet/LOC_val_solution.csv": [
            "ImageId,PredictionString",
            *(f"{stem},{_NUMBERS[n]} 85 1 499 272 n0 1 " for stem, (n, _) in _VALIDATION.items()),
        ],
    },
)
_TINY = "tiny-imagenet-200.zip/tiny-imagenet-200"
imagenet200 = fake(
    _SYNSETS,
    {
        "train": f"{_TINY}/train/{{name}}/images/{{name}}_{{i}}.JPEG",
        "test": f"{_TINY}/val/images/val_{{number}}.JPEG",
    },
    {f"{_TINY}/{{part}}/val_annotations.txt": "val_{number}.JPEG\t{name}\t0\t32\t44\t62"},
    {f"{_TINY}/test/images/test_0.JPEG": (1, 2, 3)},
    {"train": "train", "test": "val"},
)


# --- Many labels --------------------------------------------------------------------------------


def _labelled(images: Iterable[tuple[tuple, list[int]]], names: tuple[str, ...]) -> ImageSet:
    """The expected images of a split, from the colour and the targets of each."""
    colours, targets = zip(*images, strict=True)
    return ImageSet(np.array(colours), np.array(targets, np.int8), names)


def _coco(manual_dir: Path, year: int, image: str, annotations: str) -> Expected:
    """Categories whose numbers have gaps, several objects of one kind, and images without any."""
    objects = {"train": {9: [3, 1, 3], 25: [], 30: [90]}, "test": {42: [1, 90], 73: [3], 74: []}}
    names = {1: "person", 3: "car", 90: "toothbrush"}
    outlines = [{"counts": [1], "size": [2]}, [[1.5, 2.5, 3.0, 4.0]], [[0.0]]]
    expected, files = {}, dict[str, Any]()
    for split, images in objects.items():
        part = f"{'train' if split == 'train' else 'val'}{year}"
        paths = {n: image.format(part=part, number=n) for n in images}
        files |= {f"coco/{paths[n]}": colour(split, n) for n in images}
        files[f"coco/{annotations}/instances_{part}.json"] = {
            "images": [{"id": n, "file_name": Path(paths[n]).name} for n in reversed(images)],
            "annotations": [
                {"id": k, "image_id": n, "category_id": category, "segmentation": outlines[k]}
                for n, of in images.items()
                for k, category in enumerate(of)
            ],
            "categories": [{"id": n, "name": names[n]} for n in (90, 1, 3)],
        }
        images = {n: of for n, of in images.items() if of}
        targets = [(colour(split, n), [int(c in of) for c in names]) for n, of in images.items()]
        expected[split] = _labelled(targets, tuple(names.values()))
    write(manual_dir, files)
    return expected


def coco_2014(manual_dir: Path) -> Expected:
    image = "{part}.zip/{part}/COCO_{part}_{number:012}.jpg"
    return _coco(manual_dir, 2014, image, "annotations_trainval2014.zip/annotations")


def coco_2017(manual_dir: Path) -> Expected:
    return _coco(manual_dir, 2017, "{part}/{number:012}.jpg", "annotations")


_VOC = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
_Objects = dict[str, list[tuple[str, int]]]
# For every image its objects, and whether each is difficult.
_VOC_OBJECTS: dict[str, _Objects] = {
    "train": {"000012": [("car", 0)], "000017": [("person", 0), ("horse", 1)]},
    "val": {"000005": [("chair", 1), ("chair", 0), ("chair", 1)]},
    "test": {"000001": [("dog", 0), ("person", 0)], "000002": [("train", 1), ("train", 1)]},
}


def _voc(part: str, images: _Objects, archive: str = "") -> dict[str, Any]:
    """The files of a part."""
    top = f"{archive}VOCdevkit/VOC2007"
    files: dict[str, Any] = {f"{top}/ImageSets/Main/{part}.txt": [*images]}
    for number, of in images.items():
        found = "".join(
            f"<object><name>{name}</name><difficult>{difficult}</difficult>"
            f"<part><name>head</name></part></object>"
            for name, difficult in of
        )
        files[f"{top}/JPEGImages/{number}.jpg"] = colour("voc", int(number))
        files[f"{top}/Annotations/{number}.xml"] = [f"<annotation>{found}</annotation>"]
    return files


def voc2007(manual_dir: Path) -> Expected:
    def targets(objects: list[tuple[str, int]]) -> list[int]:
        kinds = {name: {d for of, d in objects if of == name} for name in _VOC}
        return [0 if not of else 1 if 0 in of else -1 for of in kinds.values()]

    files, expected = {}, {}
    for split in _THREE:
        images = _VOC_OBJECTS[PARTS[split]]
        archive = f"VOC{'test' if split == 'test' else 'trainval'}_06-Nov-2007.tar/"
        files |= _voc(PARTS[split], images, archive)
        found = [(colour("voc", int(n)), targets(objects)) for n, objects in images.items()]
        expected[split] = _labelled(found, _VOC)
    write(manual_dir, files)
    return expected


def random_voc2007(root: Path) -> Folders:
    """20, 8 and 16 images of 6 kinds, some without an object."""
    rng = np.random.default_rng(0)
    for part, (first, count) in {"train": (0, 20), "val": (100, 8), "test": (200, 16)}.items():
        images = {
            f"{n:06}": [(kind, int(rng.random() < 0.2)) for kind in _VOC[:6] if rng.random() < 0.3]
            for n in range(first, first + count)
        }
        write(root, _voc(part, images))
    return Folders(data_dir=root / "data", manual_dir=root)


# An image without a label is left out, and one that is not on the disk.
_NUS = {
    "train": {
        "actor/0001_2124494179.jpg": ["sky", "person"],
        "zebra/0001_1.jpg": [],
        "zebra/0002_2.jpg": ["animal"],
        "zebra/0003_missing.jpg": ["animal"],
    },
    "test": {"sky/0001_5.jpg": ["sky"], "sky/0002_6.jpg": ["animal", "sky"]},
}
_NUS_NAMES = ("animal", "person", "sky")


def _nus(manual_dir: Path, folder: str, separator: str, files: dict[str, Any]) -> Expected:
    """Writes the images and other files, and returns what must be found."""
    expected = {}
    for split, images in _NUS.items():
        found = []
        for file in (file for file in images if "missing" not in file):
            files[f"{folder}/{file.replace('/', separator)}"] = colour(file, 0)
            targets = [int(name in images[file]) for name in _NUS_NAMES]
            found += [(colour(file, 0), targets)] * any(targets)
        expected[split] = _labelled(found, _NUS_NAMES)
    write(manual_dir, files)
    return expected


def nus_wide_published(manual_dir: Path) -> Expected:
    files = {"nus-wide/ConceptsList/Concepts81.txt": [*_NUS_NAMES]}
    for split, images in _NUS.items():
        part = split.capitalize()
        files[f"nus-wide/ImageList/{part}Imagelist.txt"] = [n.replace("/", "\\") for n in images]
        for name in _NUS_NAMES:
            path = f"nus-wide/Groundtruth.zip/Groundtruth/TrainTestLabels/Labels_{name}_{part}.txt"
            files[path] = [str(int(name in labels)) for labels in images.values()]
    return _nus(manual_dir, "nus-wide/Flickr", "/", files)


def nus_wide_table(manual_dir: Path) -> Expected:
    rows = [
        f'images/{file.replace("/", "_")},"{labels}",{"val" if split == "test" else split}'
        for split, images in _NUS.items()
        for file, labels in images.items()
    ]
    files = {"NUS-WIDE/nus_wid_data.csv": ["filepath,label,split_name", *rows]}
    return _nus(manual_dir, "NUS-WIDE/images", "_", files)


# --- The MNIST family ---------------------------------------------------------------------------

_DIGITS = tuple(string.digits)
_CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_KUZUSHIJI = tuple(
    "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわゐゑをんゝ"
)
_MERGED = tuple(sorted(string.digits + string.ascii_uppercase + "abdefghnqrt"))


def idx(array: np.ndarray) -> bytes:
    """The content of an IDX file of bytes."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def idx_files(
    names: Iterable[str], file: str, *, test: str = "t10k", more: dict[str, bytes] | None = None
) -> Write:
    """A set of the MNIST family: `file` is a format of the split and of the `kind` of file.

    As published, EMNIST has transposed images, and labels of letters that begin with 1.
    """
    kinds = tuple(names)

    def write_idx(manual_dir: Path) -> Expected:
        files, expected = dict(more or {}), {}
        train = {name: 1 + i % 2 for i, name in enumerate(kinds)}
        for split, of, found in arrays({"train": train, "test": dict.fromkeys(kinds, 1)}, 28):
            labels, images = np.array([kinds.index(name) for name in of], np.uint8), found[..., 0]
            order = np.argsort(labels, kind="stable")
            expected[split] = ImageSet(images[order, 0, :1], labels[order].astype(np.int32), kinds)
            images = images.swapaxes(1, 2) if "emnist" in file else images
            for array, kind in ((images, "images"), (labels + ("letters" in file), "labels")):
                part = test if split == "test" else "train"
                path, content = file.format(part, kind=kind, axes=array.ndim), idx(array)
                files[path] = gzip.compress(content, 1) if path.endswith(".gz") else content
        write(manual_dir, files)
        return expected

    write_idx.__name__ = file
    return write_idx


def _emnist(split: str, names: Iterable[str], folder: str = "", **more: Any) -> Callable:
    file = f"{folder}emnist-{split}-{{}}-{{kind}}-idx{{axes}}-ubyte.gz"
    return idx_files(names, file, test="test", **more)


# `gzip.zip` has all files of EMNIST.
emnist_letters = _emnist(
    "letters",
    string.ascii_lowercase,
    "gzip.zip/gzip/",
    more={"gzip.zip/gzip/emnist-digits-train-labels-idx1-ubyte.gz": b"damaged"},
)
_PUBLISHED = "/{}-{kind}-idx{axes}-ubyte"
fashion_mnist = idx_files(_CLOTHES, f"fashion-mnist{_PUBLISHED}.gz")

ONE_LABEL: dict[str, tuple[Write, ...]] = {
    "imagenet": (imagenet_archives, imagenet_kaggle, class_folders("imagenet", "train", "val")),
    "imagenet200": (imagenet200,),
    "food101": (food101, class_folders("food101", "train", "val")),
    "caltech256": (caltech256,),
    "sun397": (sun397,),
    "cifar10": (cifar10,),
    "cifar100": (cifar100,),
    "svhn": (svhn,),
    "svhn_extra": (svhn_extra,),
    "stl10": (stl10,),
    "fashion_mnist": (fashion_mnist, idx_files(_CLOTHES, f"fashion_mnist{_PUBLISHED}")),
    "mnist": (idx_files(_DIGITS, "mnist/{}-{kind}.idx{axes}-ubyte"),),
    "kmnist": (idx_files("おきすつなはまやれを", f"kmnist{_PUBLISHED}.gz"),),
    "k49": (idx_files(_KUZUSHIJI, f"k49{_PUBLISHED}.gz"),),
    "emnist_balanced": (_emnist("balanced", _MERGED),),
    "emnist_byclass": (_emnist("byclass", sorted(string.digits + string.ascii_letters)),),
    "emnist_bymerge": (_emnist("bymerge", _MERGED),),
    "emnist_digits": (_emnist("digits", _DIGITS),),
    "emnist_letters": (emnist_letters,),
    "emnist_mnist": (_emnist("mnist", _DIGITS),),
    "aircraft": (aircraft,),
    "caltech101": (caltech101,),
    "cars": (cars,),
    "cub": (cub, class_folders("CUB", "train", "test")),
    "dtd": (dtd, class_folders("dtd", "train", "val", "test")),
    "flowers102": (flowers102,),
    "pets": (pets, class_folders("pets", "train", "test")),
}

MANY_LABELS: dict[str, tuple[Write, ...]] = {
    "coco": (coco_2014, coco_2017),
    "voc2007": (voc2007,),
    "nus_wide": (nus_wide_published, nus_wide_table),
}
