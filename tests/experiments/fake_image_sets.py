"""Tiny archives in the layouts in which people have the sets for classification and many labels.

As in `fake_archives`, every image is of one colour: `colour(key, i)` with a key of its own for
every class of a split.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import shutil
import string
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from scipy.io import savemat

from experiments.core.config import Folders
from experiments.core.protocol import ImageSet
from tests.experiments.fake_archives import (
    PARTS,
    Counts,
    Expected,
    Fakes,
    arrays,
    colour,
    expect,
    image_set,
    packed,
    write_image,
    write_json,
    write_lines,
    write_lists,
    write_photos,
    write_pickle,
)

_TWO: Counts = {"train": {"ant": 3, "bee": 2}, "test": {"ant": 1, "bee": 2}}
_THREE: Counts = {"train": _TWO["train"], "validation": {"ant": 1, "bee": 1}, "test": _TWO["test"]}


def _both(names: Iterable[str], count: int = 2) -> Counts:
    """The same classes for training and test."""
    return {split: dict.fromkeys(names, count) for split in _TWO}


def class_folders(manual_dir: Path, name: str, *parts: str) -> Expected:
    """`NAME/train/CLASS/*.jpg` and so on; the last part is the test split."""
    splits = ("train", "validation", "test") if len(parts) == 3 else ("train", "test")
    classes = {split: {"ant": 2, "bee fly": 1 + len(split) % 2} for split in splits}
    for split, part in zip(splits, parts, strict=True):
        write_photos(manual_dir, {split: classes[split]}, f"{name}/{part}/{{name}}/{{i:03}}.jpg")
    return expect(classes)


def class_folders_of_food101(manual_dir: Path) -> Expected:
    return class_folders(manual_dir, "food101", "train", "val")


def food101_folder(manual_dir: Path) -> Expected:
    folder, file = manual_dir / "food-101", "{name}/{split}{i}"
    write_lists(folder / "meta/{}.txt", write_photos(folder, _TWO, f"images/{file}.jpg", file))
    return expect(_TWO)


def sun397(manual_dir: Path) -> Expected:
    """`SUN397.tar.gz`, with images that no list names, and `Partitions.zip`."""
    classes, file = _both(("abbey", "apartment_building/outdoor")), "/a/{name}/sun_{split}{i}.jpg"
    with packed(manual_dir / "SUN397.tar.gz") as folder:
        write_lines(folder / "SUN397/a/abbey/sun_none.jpg", ["no image, in no list"])
        lists = write_photos(folder, classes, f"SUN397{file}", file)
    with packed(manual_dir / "Partitions.zip") as partitions:
        write_lines(partitions / "Training_01.txt", lists["train"])
        write_lines(partitions / "Testing_01.txt", lists["test"])
    return expect(classes)


def dtd(manual_dir: Path) -> Expected:
    """`dtd-r1.0.1.tar.gz`, which has ten splits."""
    file = "{name}/{name}_{split}{i:04}.jpg"
    with packed(manual_dir / "dtd-r1.0.1.tar.gz") as folder:
        lists = write_photos(folder / "dtd", _THREE, f"images/{file}", file)
        write_lists(folder / "dtd/labels/{}1.txt", lists)
    return expect(_THREE)


def aircraft(manual_dir: Path) -> Expected:
    """`fgvc-aircraft-2013b`, with names of several words."""
    classes = {split: {"707-320": 1, "F/A-18": 2, "Gulfstream IV": 1} for split in _THREE}
    data = manual_dir / "aircraft/fgvc-aircraft-2013b/data"
    lists = write_photos(data, classes, "images/{number:07}.jpg", "{number:07} {name}")
    write_lists(data / "images_variant_{}.txt", lists)
    return expect(classes)


def pets(manual_dir: Path) -> Expected:
    classes, file = _both(("Abyssinian", "american_bulldog")), "{name}_{number}"
    with packed(manual_dir / "oxford-iiit-pet/images.tar.gz") as folder:
        lists = write_photos(folder, classes, f"images/{file}.jpg", f"{file} 1 1 1")
        write_lines(folder / "images/Abyssinian_101.mat", [""])
    with packed(manual_dir / "oxford-iiit-pet/annotations.tar.gz") as folder:
        write_lines(folder / "annotations/trainval.txt", ["#Image CLASS-ID", *lists["train"]])
        write_lines(folder / "annotations/test.txt", lists["test"])
    return expect(classes)


def cub(manual_dir: Path) -> Expected:
    classes, file = _both(("001.Bird_a", "002.Bird_b")), "{name}/{split}_{i}.jpg"
    with packed(manual_dir / "CUB_200_2011.tgz") as top:
        folder = top / "CUB_200_2011"
        lists = write_photos(folder, classes, f"images/{file}", f"{{number}} {file}")
        names = [*itertools.chain(*lists.values())]
        training = [f"{name.split()[0]} {int(name in lists['train'])}" for name in names]
        write_lines(folder / "images.txt", names)
        write_lines(folder / "train_test_split.txt", training[::-1])
    return expect(classes)


def _structures(**columns: Iterable) -> dict[str, np.ndarray]:
    """As MATLAB writes an array of structures, under the name of cars and of ImageNet."""
    kinds = [(name, object) for name in columns]
    found = np.array([*zip(*columns.values(), strict=True)], kinds)[None]
    return {"annotations": found, "synsets": found.T}


def cars(manual_dir: Path) -> Expected:
    classes = {split: {"AM General Hummer SUV 2000": 2, "Acura RL Sedan 2012": 1} for split in _TWO}
    folder, files = manual_dir / "stanford_cars", [f"{number:05}.jpg" for number in (1, 2, 3)]
    for split, of in classes.items():
        with packed(folder / f"cars_{split}.tgz") as images:
            write_photos(images, {split: of}, f"cars_{split}/{{number:05}}.jpg")
    unlabelled = {"bbox_x1": [1, 1, 2], "fname": files}
    labelled = _structures(**{"class": [1, 1, 2]}, **unlabelled)
    with packed(folder / "car_devkit.tgz") as top:
        (devkit := top / "devkit").mkdir()
        names = np.array([*classes["train"]], object)[None]
        savemat(devkit / "cars_meta.mat", {"class_names": names})
        savemat(devkit / "cars_train_annos.mat", labelled)
        savemat(devkit / "cars_test_annos.mat", _structures(**unlabelled))
    savemat(folder / "cars_test_annos_withlabels.mat", labelled)
    return expect(classes)


def flowers102(manual_dir: Path) -> Expected:
    classes = {split: {"flower 001": 1, "flower 002": 2} for split in _THREE}
    folder = manual_dir / "flowers-102"
    with packed(folder / "102flowers.tgz") as images:
        write_photos(images, classes, "jpg/image_{number:05}.jpg")
    savemat(folder / "imagelabels.mat", {"labels": np.array([3 * [1, 2, 2]], np.uint8)})
    numbers = np.arange(1, 10).reshape(3, 1, 3)
    savemat(folder / "setid.mat", dict(zip(("trnid", "valid", "tstid"), numbers, strict=True)))
    return expect(classes)


def _drawn(folder: Path, names: tuple[str, ...], count: int, train: int) -> Expected:
    """Folders of classes; those images whose names come first by their hash are to train."""
    splits: dict = {"train": {}, "test": {}}
    for name in names:
        files = {f"{name}/image_{i:04}.jpg": i for i in range(count)}
        for file, i in files.items():
            write_image(folder / file, name, i)
        order = sorted(files, key=lambda file: hashlib.sha256(file.encode()).hexdigest())
        for split, of in (("train", order[:train]), ("test", order[train:])):
            splits[split][name] = [colour(name, files[file]) for file in sorted(of)]
    return {split: image_set(of) for split, of in splits.items()}


def caltech101(manual_dir: Path) -> Expected:
    """`caltech-101.zip`, which holds `101_ObjectCategories.tar.gz`."""
    inner = "101_ObjectCategories"
    with (
        packed(manual_dir / "caltech-101.zip") as folder,
        packed(folder / f"caltech-101/{inner}.tar.gz") as images,
    ):
        return _drawn(images / inner, ("BACKGROUND_Google", "accordion"), 32, 30)


def caltech256(manual_dir: Path) -> Expected:
    """`256_ObjectCategories.tar`, which has a class of clutter and files that are not images."""
    with packed(manual_dir / "256_ObjectCategories.tar") as top:
        folder = top / "256_ObjectCategories"
        write_image(folder / "257.clutter/257_0001.jpg", "clutter", 0)
        (folder / "056.dog/greg").mkdir(parents=True)
        (folder / "056.dog/RENAME2").write_bytes(b"")
        return _drawn(folder, ("001.ak47", "056.dog"), 62, 60)


def _planes(images: np.ndarray) -> np.ndarray:
    """Rows as CIFAR has them."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def cifar10(manual_dir: Path) -> Expected:
    """`cifar-10-python.tar.gz`: five batches."""
    kinds = ["airplane", "automobile"]
    classes: Counts = {"train": dict.fromkeys(kinds, 5), "test": {"airplane": 1, "automobile": 2}}
    with packed(manual_dir / "cifar-10-python.tar.gz") as top:
        folder = top / "cifar-10-batches-py"
        for split, names, images in arrays(classes, 32):
            batches = {f"data_batch_{n + 1}": slice(2 * n, 2 * n + 2) for n in range(5)}
            for file, part in (batches if split == "train" else {"test_batch": slice(3)}).items():
                labels = [kinds.index(name) for name in names[part]]
                write_pickle(folder / file, {"data": _planes(images[part]), "labels": labels})
        write_pickle(folder / "batches.meta", {"label_names": kinds})
    return expect(classes)


def cifar100(manual_dir: Path) -> Expected:
    kinds = ["apple", "aquarium_fish", "worm"]
    classes = {"train": dict.fromkeys(kinds, 2), "test": dict(zip(kinds, (2, 1, 3), strict=True))}
    folder = manual_dir / "cifar-100-python"
    for split, names, images in arrays(classes, 32):
        labels = {"fine_labels": [*map(kinds.index, names)], "coarse_labels": [0] * 6}
        write_pickle(folder / split, labels | {"data": _planes(images)})
    write_pickle(folder / "meta", {"fine_label_names": kinds, "coarse_label_names": ["thing"]})
    return expect(classes)


def svhn_extra(manual_dir: Path) -> Expected:
    """`train_32x32.mat`, `extra_32x32.mat` and `test_32x32.mat`, in which the digit 0 is 10."""
    classes = {
        split: {str(digit): len(range(digit, size, 10)) for digit in range(10)}
        for split, size in {"train": 13, "extra": 21, "test": 10}.items()
    }
    (folder := manual_dir / "svhn").mkdir(parents=True)
    for split, names, images in arrays(classes, 32):
        digits = np.array([int(name) or 10 for name in names], np.uint8)[:, None]
        savemat(folder / f"{split}_32x32.mat", {"X": np.moveaxis(images, 0, -1), "y": digits})
    return expect(classes)


def svhn(manual_dir: Path) -> Expected:
    return {split: of for split, of in svhn_extra(manual_dir).items() if split != "extra"}


def stl10(manual_dir: Path) -> Expected:
    """`stl10_binary.tar.gz`, with images without labels."""
    classes = {"train": {"airplane": 2, "bird": 2}, "test": {"airplane": 1, "bird": 2}}
    with packed(manual_dir / "stl10/stl10_binary.tar.gz") as top:
        folder = top / "stl10_binary"
        write_lines(folder / "class_names.txt", [*classes["train"]])
        for split, names, images in arrays(classes, 96):
            images.transpose(0, 3, 2, 1).tofile(folder / f"{split}_X.bin")
            np.array([1 + (n == "bird") for n in names], np.uint8).tofile(folder / f"{split}_y.bin")
        np.zeros(3 * 96 * 96, np.uint8).tofile(folder / "unlabeled_X.bin")
    return expect(classes)


_SYNSETS: Counts = {
    "train": {"n01440764": 2, "n02102040": 3},
    "test": {"n01440764": 2, "n02102040": 1},
}
_TRAINING: Counts = {"train": _SYNSETS["train"]}
# Numbers of the challenge are in another order than the names; internal nodes come after.
_NUMBERS = {1: "n02102040", 2: "n01440764", 3: "n00001740"}
# Class and number in the class of the validation images, the classes mixed.
_VALIDATION = [("n02102040", 0), ("n01440764", 0), ("n01440764", 1)]
_VALIDATION_FILE = "ILSVRC2012_val_{:08}.JPEG"


def _write_validation(folder: Path) -> None:
    for number, (name, i) in enumerate(_VALIDATION, 1):
        write_image(folder / _VALIDATION_FILE.format(number), f"test {name}", i)


def imagenet_archives(manual_dir: Path) -> Expected:
    """The three tars of the challenge; that of training images holds a tar for every class."""
    with packed(manual_dir / "ILSVRC2012_img_val.tar") as folder:
        _write_validation(folder)
    with packed(manual_dir / "ILSVRC2012_devkit_t12.tar.gz") as folder:
        data = folder / "ILSVRC2012_devkit_t12/data"
        numbers = {name: str(number) for number, name in _NUMBERS.items()}
        truth = [numbers[name] for name, _ in _VALIDATION]
        write_lines(data / "ILSVRC2012_validation_ground_truth.txt", truth)
        savemat(data / "meta.mat", _structures(ILSVRC2012_ID=_NUMBERS, WNID=_NUMBERS.values()))
    with packed(manual_dir / "ILSVRC2012_img_train.tar") as outer:
        for name, count in _TRAINING["train"].items():
            with packed(outer / f"{name}.tar") as folder:
                write_photos(folder, {"train": {name: count}}, "{name}_{i}.JPEG")
    return expect(_SYNSETS)


def imagenet_kaggle(manual_dir: Path) -> Expected:
    folder = manual_dir / "imagenet/ILSVRC/Data/CLS-LOC"
    write_photos(folder, _TRAINING, "train/{name}/{name}_{i}.JPEG")
    _write_validation(folder / "val")
    write_image(folder / "test/ILSVRC2012_test_00000001.JPEG", "unlabelled", 0)
    lines = [
        f"{_VALIDATION_FILE.format(number)[:-5]},{name} 85 1 499 272 {name} 1 1 20 20 "
        for number, (name, _) in enumerate(_VALIDATION, 1)
    ]
    path = manual_dir / "imagenet/LOC_val_solution.csv"
    write_lines(path, ["ImageId,PredictionString", *lines])
    return expect(_SYNSETS)


def imagenet200(manual_dir: Path) -> Expected:
    file, test = "val_{number}.JPEG", {"test": _SYNSETS["test"]}
    with packed(manual_dir / "tiny-imagenet-200.zip") as top:
        folder = top / "tiny-imagenet-200"
        write_photos(folder, _TRAINING, "train/{name}/images/{name}_{i}.JPEG")
        lists = write_photos(folder, test, f"val/images/{file}", f"{file}\t{{name}}\t0\t32\t44\t62")
        write_image(folder / "test/images/test_0.JPEG", "unlabelled", 0)
        write_lines(folder / "val/val_annotations.txt", lists["test"])
        write_lines(folder / "wnids.txt", list(_SYNSETS["train"]))
    return expect(_SYNSETS)


def _labelled(images: Iterable[tuple[tuple, list[int]]], names: tuple[str, ...]) -> ImageSet:
    """The expected images of a split, from the colour and the targets of each."""
    colours, targets = zip(*images, strict=True)
    return ImageSet(np.array(colours), np.array(targets, np.int8), names)


def _coco(manual_dir: Path, year: int) -> Expected:
    """Categories whose numbers have gaps, several objects of one kind, and images without any."""
    objects = {"train": {9: [3, 1, 3], 25: [], 30: [90]}, "test": {42: [1, 90], 73: [3], 74: []}}
    names = {1: "person", 3: "car", 90: "toothbrush"}
    outlines = [{"counts": [1], "size": [2]}, [[1.5, 2.5, 3.0, 4.0]], [[0.0]]]
    expected = {}
    for split, images in objects.items():
        part = f"{'train' if split == 'train' else 'val'}{year}"
        file = ("COCO_{}_{:012}.jpg" if year == 2014 else "{1:012}.jpg").format
        for n in images:
            write_image(manual_dir / part / file(part, n), split, n)
        content = {
            "images": [{"id": n, "file_name": file(part, n)} for n in reversed(images)],
            "annotations": [
                {"id": k, "image_id": n, "category_id": category, "segmentation": outlines[k]}
                for n, of in images.items()
                for k, category in enumerate(of)
            ],
            "categories": [{"id": n, "name": names[n]} for n in (90, 1, 3)],
        }
        write_json(manual_dir / f"annotations/instances_{part}.json", content)
        images = {n: of for n, of in images.items() if of}
        targets = [(colour(split, n), [int(c in of) for c in names]) for n, of in images.items()]
        expected[split] = _labelled(targets, tuple(names.values()))
    return expected


def coco_2014(manual_dir: Path) -> Expected:
    expected = _coco(manual_dir / "coco", 2014)
    for part in ("train2014", "val2014", "annotations"):
        name = "annotations_trainval2014" if part == "annotations" else part
        with packed(manual_dir / f"coco/{name}.zip") as folder:
            shutil.move(manual_dir / "coco" / part, folder)
    return expected


def coco_2017(manual_dir: Path) -> Expected:
    return _coco(manual_dir / "coco", 2017)


_VOC = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
_Objects = dict[str, dict[str, list[tuple[str, int]]]]
# For every image its objects, and whether each is difficult.
_VOC_OBJECTS: _Objects = {
    "train": {"000012": [("car", 0)], "000017": [("person", 0), ("horse", 1)]},
    "val": {"000005": [("chair", 1), ("chair", 0), ("chair", 1)]},
    "test": {"000001": [("dog", 0), ("person", 0)], "000002": [("train", 1), ("train", 1)]},
}


def _voc(manual_dir: Path, objects: _Objects) -> None:
    top = manual_dir / "VOCdevkit/VOC2007"
    for part, images in objects.items():
        write_lines(top / f"ImageSets/Main/{part}.txt", list(images))
        for number, of in images.items():
            write_image(top / f"JPEGImages/{number}.jpg", "voc", int(number))
            found = "".join(
                f"<object><name>{name}</name><difficult>{difficult}</difficult>"
                f"<part><name>head</name></part></object>"
                for name, difficult in of
            )
            line = f"<annotation><filename>{number}.jpg</filename>{found}</annotation>"
            write_lines(top / f"Annotations/{number}.xml", [line])


def voc2007(manual_dir: Path) -> Expected:
    for name, parts in (("trainval", ("train", "val")), ("test", ("test",))):
        with packed(manual_dir / f"VOC{name}_06-Nov-2007.tar") as folder:
            _voc(folder, {part: _VOC_OBJECTS[part] for part in parts})

    def targets(objects: list[tuple[str, int]]) -> list[int]:
        kinds = {name: {d for of, d in objects if of == name} for name in _VOC}
        return [0 if not of else 1 if 0 in of else -1 for of in kinds.values()]

    images = {split: _VOC_OBJECTS[PARTS[split]].items() for split in _THREE}
    return {
        split: _labelled([(colour("voc", int(n)), targets(objects)) for n, objects in of], _VOC)
        for split, of in images.items()
    }


def random_voc2007(root: Path) -> Folders:
    """20, 8 and 16 images of 6 kinds, some without an object."""
    rng, sizes = np.random.default_rng(0), {"train": (0, 20), "val": (100, 8), "test": (200, 16)}
    objects: _Objects = {part: {} for part in sizes}
    for part, (first, count) in sizes.items():
        for n in range(first, first + count):
            objects[part][f"{n:06}"] = [
                (kind, int(rng.random() < 0.2)) for kind in _VOC[:6] if rng.random() < 0.3
            ]
    _voc(root, objects)
    return Folders(data_dir=root / "data", manual_dir=root)


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


def _nus(folder: Path, separator: str) -> Expected:
    """Writes the images, and returns what must be found."""
    expected = {}
    for split, images in _NUS.items():
        found = []
        for file in (file for file in images if "missing" not in file):
            write_image(folder / file.replace("\\", separator), file, 0)
            targets = [int(name in images[file]) for name in _NUS_NAMES]
            found += [(colour(file, 0), targets)] * any(targets)
        expected[split] = _labelled(found, _NUS_NAMES)
    return expected


def nus_wide_published(manual_dir: Path) -> Expected:
    folder = manual_dir / "nus-wide"
    with packed(folder / "Groundtruth.zip") as elsewhere:
        for split, images in _NUS.items():
            part = split.capitalize()
            write_lines(folder / f"ImageList/{part}Imagelist.txt", list(images))
            for name in _NUS_NAMES:
                lines = [str(int(name in labels)) for labels in images.values()]
                path = elsewhere / f"Groundtruth/TrainTestLabels/Labels_{name}_{part}.txt"
                write_lines(path, lines)
    write_lines(folder / "ConceptsList/Concepts81.txt", list(_NUS_NAMES))
    return _nus(folder / "Flickr", "/")


def nus_wide_table(manual_dir: Path) -> Expected:
    folder = manual_dir / "NUS-WIDE"
    lines = ["filepath,label,split_name"]
    for split, images in _NUS.items():
        for file, labels in images.items():
            name = file.replace("\\", "_")
            lines.append(f'images/{name},"{labels}",{"val" if split == "test" else split}')
    write_lines(folder / "nus_wid_data.csv", lines)
    return _nus(folder / "images", "_")


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


def idx_files(names: Iterable[str], file: str, *, test: str = "t10k") -> Callable:
    """A set of the MNIST family: `file` is a format of the split and of the `kind` of file.

    As published, EMNIST has transposed images, and labels of letters that begin with 1.
    """
    kinds = tuple(names)

    def write(manual_dir: Path) -> Expected:
        expected = {}
        train = {name: 1 + i % 2 for i, name in enumerate(kinds)}
        for split, of, found in arrays({"train": train, "test": dict.fromkeys(kinds, 1)}, 28):
            labels, images = np.array([kinds.index(name) for name in of], np.uint8), found[..., 0]
            order = np.argsort(labels, kind="stable")
            expected[split] = ImageSet(images[order, 0, :1], labels[order].astype(np.int32), kinds)
            images = images.swapaxes(1, 2) if "emnist" in file else images
            for array, kind in ((images, "images"), (labels + ("letters" in file), "labels")):
                part = test if split == "test" else "train"
                path = manual_dir / file.format(part, kind=kind, axes=array.ndim)
                path.parent.mkdir(parents=True, exist_ok=True)
                content = idx(array)
                path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
        return expected

    write.__name__ = file
    return write


def _emnist(split: str, names: Iterable[str], folder: str = "") -> Callable:
    file = f"{folder}emnist-{split}-{{}}-{{kind}}-idx{{axes}}-ubyte.gz"
    return idx_files(names, file, test="test")


def emnist_letters(manual_dir: Path) -> Expected:
    """`gzip.zip`, with all files of EMNIST."""
    with packed(manual_dir / "gzip.zip") as folder:
        write_lines(folder / "gzip/emnist-digits-train-labels-idx1-ubyte.gz", ["damaged"])
        return _emnist("letters", string.ascii_lowercase, "gzip/")(folder)


_PUBLISHED = "/{}-{kind}-idx{axes}-ubyte"
fashion_mnist = idx_files(_CLOTHES, f"fashion-mnist{_PUBLISHED}.gz")

ONE_LABEL: Fakes = {
    "imagenet": (imagenet_archives, imagenet_kaggle),
    "imagenet200": (imagenet200,),
    "food101": (food101_folder, class_folders_of_food101),
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
    "cub": (cub,),
    "dtd": (dtd,),
    "flowers102": (flowers102,),
    "pets": (pets,),
}

MANY_LABELS: Fakes = {
    "coco": (coco_2014, coco_2017),
    "voc2007": (voc2007,),
    "nus_wide": (nus_wide_published, nus_wide_table),
}
