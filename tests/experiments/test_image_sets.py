"""Every data set: its layouts, what is damaged or missing in them, sizes and splits."""

import gzip
import json
import os
import pickle
import re
import shutil
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.io import savemat

from experiments.core.config import Folders
from experiments.core.errors import ConfigError
from experiments.data.pipeline import RecordImages, load_split, stored_counts
from experiments.datasets import DATASETS, describe, lookup
from experiments.datasets.archives import (
    DamagedArchiveError,
    MissingArchiveError,
    UnsafeArchiveError,
)
from experiments.datasets.preparation import Records
from experiments.papers import classification
from tests.experiments import fake_archives as few
from tests.experiments import fake_image_sets as many
from tests.experiments.fake_archives import check_colours, encode_png, write_pickle
from tests.experiments.fake_image_sets import MANY_LABELS, ONE_LABEL

LAYOUTS = few.LAYOUTS | ONE_LABEL | MANY_LABELS
NAMES = {write: name for name, of in LAYOUTS.items() for write in of}


def _small(name):
    """The same data set with small images, where it has sizes: that is quicker."""
    return f"{name}@16" if DATASETS[name].resizable else name


def test_every_set_is_tested():
    assert set(LAYOUTS) == set(DATASETS) - {"icons", "kanji", "kanji_radicals"}
    assert {name for name in LAYOUTS if DATASETS[name].multi_label} == set(MANY_LABELS)
    assert {d.images_of for d in DATASETS.values()} <= {*DATASETS, ""}


def _is_read(dirs, name, expected):
    """Checks that a set, of one label or many, has the expected images in every split."""
    dataset = lookup(name)
    assert [*expected] == [*dataset.classes]
    for split, of in expected.items():
        loaded = load_split(name, split, **dirs)
        assert loaded.class_names == of.class_names
        assert loaded.labels.dtype == of.labels.dtype
        np.testing.assert_array_equal(loaded.labels, of.labels)
        assert loaded.images.shape == (len(of.images), *dataset.array_shape)
        check_colours(loaded.images, of.images, exact=dataset.encoding == "png")
        counts = (of.labels == 1).sum(0) if of.labels.ndim > 1 else np.bincount(of.labels)
        np.testing.assert_array_equal(stored_counts(name, **dirs)[split], counts)
    assert not list((dirs["data_dir"] / dataset.name).rglob("extracted"))


@pytest.mark.parametrize(
    ("write", "own"),
    [
        # A folder of its own is the same for every set; `make long` has them all.
        pytest.param(write, own, marks=pytest.mark.long if own and name > "c" else [])
        for name, of in LAYOUTS.items()
        for write, own in [*((each, "") for each in of), (of[-1], DATASETS[name].own_folders[-1])]
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_layout_is_read_as_it_is_written_and_from_a_folder(dirs, tmp_path, write, own):
    name = NAMES[write]
    expected = write(tmp_path / "written")
    target = dirs["manual_dir"] / own
    target.mkdir(parents=True)
    for path in list((tmp_path / "written").iterdir()):
        inside = own and path.name in DATASETS[name].own_folders
        for moved in path.iterdir() if inside else [path]:
            moved.rename(target / moved.name)
    _is_read(dirs, _small(name), expected)


@pytest.mark.parametrize(
    "name", [name for name in ONE_LABEL if "image folders" in DATASETS[name].instructions()]
)
def test_class_folders_are_read(dirs, name):
    parts = ["train", "val", "test"]
    if "validation" not in DATASETS[name].classes:
        parts.remove("test" if name == "imagenet" else "val")
    ending = "png" if len(parts) == 3 else "jpg"
    own = DATASETS[name].own_folders[0]
    expected = many.class_folders(dirs["manual_dir"], own, *parts, ending=ending)
    _is_read(dirs, _small(name), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_missing_archive_says_which_files_go_where(dirs, monkeypatch, name):
    dataset = DATASETS[name]
    monkeypatch.setitem(DATASETS, name, replace(dataset, package=None))
    with pytest.raises(MissingArchiveError) as error:
        load_split(name, next(iter(dataset.classes)), **dirs)
    message = str(error.value)
    assert str(dirs["manual_dir"]) in message
    for file in (file for of in dataset.layouts for names in of.needs for file in names):
        assert file in message
    for folder in dataset.folders:
        assert folder == "." or f"{folder}/" in message
    assert message in str(describe(name, **dirs)).replace("\n  ", "\n")
    assert not dirs["data_dir"].exists()


def _pattern(key, i, size):
    rows, columns = np.mgrid[0:size, 0:size]
    return np.stack([2 * rows, columns, np.full_like(rows, 10 * i)], -1).astype(np.uint8)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "svhn_extra", "stl10"])
def test_rows_columns_and_colours_of_arrays(dirs, monkeypatch, name):
    monkeypatch.setattr(few, "pixels", _pattern)
    ONE_LABEL[name][0](dirs["manual_dir"])
    images = load_split(name, "test", **dirs).images[:]
    for image in images:
        np.testing.assert_array_equal(image, _pattern("", image[0, 0, 2] // 10, len(image)))


@pytest.mark.parametrize("write", [many.fashion_mnist, many.emnist_letters])
def test_rows_and_columns_of_the_mnist_family(dirs, monkeypatch, write):
    monkeypatch.setattr(few, "pixels", lambda *of: _pattern(*of)[..., [0, 1, 1]])
    write(dirs["manual_dir"])
    images = load_split(NAMES[write], "train", **dirs).images[:]
    assert (images == _pattern("", 0, 28)[..., :1]).all()


def test_the_files_of_a_package_are_read_and_not_mixed_with_ones_own(dirs, monkeypatch, tmp_path):
    assert "`apt-get install dataset-fashion-mnist`" in DATASETS["fashion_mnist"].instructions()
    expected, package = many.fashion_mnist(tmp_path / "usr"), tmp_path / "usr/fashion-mnist"
    monkeypatch.setitem(
        DATASETS, "fashion_mnist", replace(DATASETS["fashion_mnist"], package=package)
    )
    found = describe("fashion_mnist", **dirs).found
    assert [path.parent for path in found] == [package] * 4
    _is_read(dirs, "fashion_mnist", expected)
    (own := dirs["manual_dir"] / "fashion-mnist").mkdir(parents=True)
    (own / "train-images-idx3-ubyte").write_bytes(b"damaged")
    assert describe("fashion_mnist", tmp_path / "elsewhere", dirs["manual_dir"]).missing


def test_compression_is_seen_in_the_file_and_not_in_its_name(dirs):
    expected = many.fashion_mnist(dirs["manual_dir"])
    for path in dirs["manual_dir"].rglob("*.gz"):
        path.write_bytes(gzip.decompress(path.read_bytes()))
    _is_read(dirs, "fashion_mnist", expected)


def test_extra_digits_are_for_training(dirs):
    many.svhn_extra(dirs["manual_dir"])
    places = Folders(dirs["data_dir"], dirs["manual_dir"])
    data = classification.ClassificationData(name="svhn_extra")
    parts = classification.parts(data, places)
    assert parts["train"].counts().sum() == 13 + 21
    assert parts["test"].counts().tolist() == [1] * 10
    labels = parts["train"].load().labels
    np.testing.assert_array_equal(np.bincount(labels), parts["train"].counts())


# --- Damaged files ------------------------------------------------------------------------------


def cut(count=200):
    return lambda path: path.write_bytes(path.read_bytes()[:-count])


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def content(new):
    return lambda path: path.write_bytes(new)


def replaced(old, new):
    def change(path):
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


def copied(name):
    return lambda path: path.write_bytes((path.parent / name).read_bytes())


def pickled(value):
    return lambda path: write_pickle(path, value)


def _label_beyond(path):
    content = pickle.loads(path.read_bytes())
    content["label_specific"][0] = 9
    write_pickle(path, content)


def _image_lost(path):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"images": content["images"][:-1]}))


def _caches(dtype, rows):
    images = np.zeros((2, 84, 84, 3), dtype)
    return pickled({"image_data": images, "class_dict": {"x": rows}})


def _cifar(shape, labels):
    return pickled({"data": np.zeros(shape, np.uint8), "fine_labels": labels})


def idx(*shape, code=8, fill=0):
    """An IDX file of one number, in place of another."""
    written = many.idx(np.full(shape, fill, np.uint8))
    return content(written[:2] + bytes([code]) + written[3:])


def unpacked(change):
    return lambda path: path.write_bytes(change(gzip.decompress(path.read_bytes())))


_PNG = encode_png(np.zeros((84, 84, 3), np.uint8))
_DIGITS = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [11]])}
_TERABYTES = gzip.compress(b"\0\0\x08\3\x7f\xff\xff\xff" + b"\0\0\0\x1c" * 2)
_IDX = [
    # A file of Fashion-MNIST, and what is done to it.
    ("train-images-idx3", cut(9), "ended before"),
    ("train-images-idx3", content(b"<html>"), "it starts with 3c 68 74 6d"),
    ("t10k-labels-idx1", unpacked(lambda raw: raw[:6]), "IDX"),
    ("t10k-labels-idx1", content(b"\0\0\x08\xff" + bytes(1020)), "IDX"),
    ("train-images-idx3", content(_TERABYTES), "more than 1,073,741,824 bytes"),
    ("train-images-idx3", idx(15, 28, 28, code=13), "IDX"),
    ("t10k-images-idx3", unpacked(lambda raw: raw[:-100]), "7840 bytes, and it has 7740"),
    ("train-labels-idx1", unpacked(lambda raw: raw + bytes(2**24)), "it has more"),
    ("train-images-idx3", idx(15, 32, 32), "should be uint8 [n, 28, 28], not uint8 [15, 32, 32]"),
    ("t10k-labels-idx1", copied("t10k-images-idx3-ubyte.gz"), "should be uint8 [n], not"),
    ("train-labels-idx1", copied("t10k-labels-idx1-ubyte.gz"), "15 images, but 10 labels"),
    ("train-labels-idx1", idx(15, fill=10), "a label is not one of the 10 classes"),
    ("t10k-labels-idx1", idx(10), "without images"),
]
# A layout, a file or folder in the manual directory, what is done to it, and words of the error
# beside the name of the file.
DAMAGE = [
    *((many.fashion_mnist, f"{file}-ubyte.gz", *of) for file, *of in _IDX),
    (few.mini_imagenet_folder, "n0295082600000000.jpg", lambda path: path.unlink(), ""),
    (few.mini_imagenet_folder, "val.csv", content(b"a.jpg,n1\n"), ""),
    (few.mini_imagenet_folder, "val.csv", copied("train.csv"), "which is also in"),
    (few.mini_imagenet_folder, "test.csv", content(b"filename,label\n"), "has no classes"),
    (few.mini_imagenet_caches, "*-test.pkl", cut(), ""),
    (few.mini_imagenet_caches, "*-val.pkl", pickled({}), "no entry image_data, class_dict"),
    (few.mini_imagenet_caches, "*-val.pkl", _caches(np.uint8, [0, 2]), "rows 0 to 2"),
    (few.mini_imagenet_caches, "*-val.pkl", _caches(float, [0, 1]), "should be uint8"),
    (few.tiered_imagenet, "val_images_png.pkl", pickled([]), ""),
    (few.tiered_imagenet, "val_images_png.pkl", pickled([_PNG, _PNG[:60]]), "image 1"),
    (few.tiered_imagenet, "test_labels.pkl", _label_beyond, ""),
    (few.cub_archive, "CUB_200_2011.tgz", cut(), ""),
    # No rule takes the place of two of three lists.
    (few.cub_archive, "val.json", lambda path: path.unlink(), "base.json exists, but not"),
    (few.cub_folder, "003.Bird_c", shutil.rmtree, "is at position 3"),
    (few.inat2017_boxes, "*testcats.pth", lambda path: torch.save([30, 5], path), "no class 5"),
    (few.inat2017_boxes, "train_2017_bboxes.json", cut(), ""),
    (many.food101_class_folders, "val/ant", lambda p: p.rename(p.with_name("z")), "in only one"),
    (many.food101_class_folders, "val/ant", empty, "without images"),
    (many.food101_folder, "test.txt", lambda path: path.unlink(), ""),
    (many.food101_folder, "test.txt", replaced("bee/", "bee/../../"), "line 2"),
    (many.aircraft, "*_val.txt", replaced(" 707-320", ""), "line 1"),
    (many.sun397, "SUN397.tar.gz", cut(50), ""),
    (many.caltech101_folder, "accordion/image_0000.jpg", lambda path: path.unlink(), "30 images"),
    (many.imagenet_archives, "ILSVRC2012_img_train.tar", cut(12_000), ""),
    (many.imagenet_kaggle, "*val_00000002.JPEG", lambda path: path.unlink(), "1 of 3 images"),
    (many.cub, "CUB_200_2011.tgz", content(b"something"), ""),
    (many.flowers102, "setid.mat", copied("imagelabels.mat"), "no variable trnid, valid"),
    (many.svhn, "test_*.mat", lambda path: savemat(path, _DIGITS), "not one of the 10 classes"),
    (many.cifar100, "train", content(b"cos\nsystem\n(S'true'\ntR."), "requests os.system"),
    (many.cifar100, "test", _cifar((2, 3072), [0, 1, 2]), "2 images, but 3 labels"),
    (many.cifar100, "test", _cifar((2, 32, 32, 3), [0, 1]), "[n, 3072]"),
    (many.emnist_letters, "gzip.zip", cut(), ""),
    (many.coco_2017, "*_val2017.json", cut(20), "is not a JSON file"),
    (many.coco_2017, "*_val2017.json", _image_lost, "refers to the missing image"),
    (many.coco_2017, "*_val2017.json", replaced("person", "people"), "must have the same classes"),
    (many.nus_wide_published, "TestImagelist.txt", content(b"a\n"), "1 lines of 0 or 1"),
    (many.nus_wide_table, "nus_wid_data.csv", replaced("['animal']", "f()"), "line 4"),
    (many.nus_wide_table, "images", empty, "none of the images"),
]


@pytest.mark.parametrize(("write", "place", "change", "words"), DAMAGE)
def test_damage_is_named_and_nothing_is_prepared(dirs, write, place, change, words):
    name = _small(NAMES[write])
    write(dirs["manual_dir"])
    (path,) = dirs["manual_dir"].rglob(place)
    change(path)
    split = next(iter(lookup(name).classes))
    error = UnsafeArchiveError if "requests" in words else DamagedArchiveError
    error = MissingArchiveError if "exists" in words else error
    with pytest.raises(error, match=re.escape(words) or None) as caught:
        load_split(name, split, **dirs)
    assert path.name in str(caught.value) or words
    assert not [p for p in dirs["data_dir"].rglob("*") if p.is_file() and p.name != ".lock"]
    assert not describe(name, **dirs).ready
    if write is few.mini_imagenet_folder:  # Once it is mended, the same call works.
        write(dirs["manual_dir"])
        assert len(load_split(name, split, **dirs).labels) > 0


def test_other_archives_of_the_name_are_no_data(dirs):
    dirs["manual_dir"].mkdir()
    zipfile.ZipFile(dirs["manual_dir"] / "102flowers.tgz", "w").close()
    for name in ("imagelabels.mat", "setid.mat"):
        savemat(dirs["manual_dir"] / name, {"labels": [1], "trnid": 1, "valid": 1, "tstid": 1})
    with pytest.raises(DamagedArchiveError, match=r"102flowers\.tgz contains no"):
        load_split("flowers102", "train", **dirs)
    (dirs["manual_dir"] / "cub").mkdir()
    os.mkfifo(dirs["manual_dir"] / "cub/CUB_200_2011.tgz")
    with pytest.raises(MissingArchiveError, match="CUB_200_2011"):
        load_split("cub", "train", **dirs)
    assert not describe("cub", **dirs).found


def test_the_images_of_imagenet_want_their_classes(dirs):
    expected = many.imagenet_folders_and_devkit(dirs["manual_dir"])
    folder = dirs["manual_dir"] / "ImageNet"
    devkit = folder / "ILSVRC2012_devkit_t12"
    devkit.rename(folder / "elsewhere")
    missing = describe("imagenet@16", **dirs).missing
    for words in (
        f"its files are not all in {dirs['manual_dir']}.",
        "Missing for the archives of the challenge, or the folders of Kaggle: "
        "ILSVRC2012_devkit_t12 or ILSVRC2012_devkit_t12.tar.gz or LOC_val_solution.csv",
        f"one folder per class in {folder / 'val'}, which contains only images",
    ):
        assert words in missing
    (folder / "elsewhere").rename(devkit)
    _is_read(dirs, "imagenet@16", expected)


# --- Sizes, splits, records ---------------------------------------------------------------------


def test_a_set_may_be_had_in_several_sizes(dirs):
    many.food101_folder(dirs["manual_dir"])
    for size in (16, 24):
        name = f"food101@{size}"
        assert lookup(name).image_shape == (size, size, 3)
        assert load_split(name, "train", **dirs).images.shape[1:] == (size, 2 * size, 3)
        assert f"shorter side {size}" in describe(name, **dirs).description
        assert describe(name, **dirs).ready
    assert not describe("food101", **dirs).ready
    assert lookup("food101@256") is lookup("food101")
    assert (dirs["data_dir"] / "food101_at_16").is_dir()


def test_splits_may_be_joined(dirs):
    expected = many.dtd(dirs["manual_dir"])
    train, validation = (expected[split].images[:] for split in ("train", "validation"))
    joined = load_split("dtd@16", "train+validation", **dirs)
    assert joined.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    colours = [*train[:3], validation[0], *train[3:], validation[1]]
    check_colours(joined.images, colours, exact=False)
    apart = load_split("dtd@16", "train+validation", memory_limit=0, **dirs)
    assert isinstance(apart.images, RecordImages)
    two = np.array([6, 3])
    np.testing.assert_array_equal(apart.images[two].pixels, joined.images[two].pixels)


def test_classes_of_joined_few_shot_splits_follow_each_other(dirs):
    expected = few.cifar_fs_folder(dirs["manual_dir"])
    for splits, labels in (
        (("base", "validation", "novel"), [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]),
        (("novel", "base"), [0, 0, 1, 2, 2, 2, 3, 3]),
    ):
        joined = load_split("cifar_fs", "+".join(splits), **dirs)
        assert joined.class_names == sum((expected[split].class_names for split in splits), ())
        assert joined.labels.tolist() == labels
        assert joined.labels.dtype == np.int32
        colours = np.concatenate([expected[split].images[:] for split in splits])
        check_colours(joined.images, colours, exact=True)


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("dtd", "train+train", "contains a split twice"),
        ("dtd", "train+novel", "dtd has no split 'novel'; it has train, validation, test"),
        ("cifar10@64", "train", r"cifar10 is only available at 32×32"),
        ("imagenet@", "train", "the size after the @ must be 8 to 2048 pixels"),
        ("imagenot@64", "train", "no data set imagenot; did you mean imagenet or "),
    ],
)
def test_sizes_and_splits_that_cannot_be(dirs, name, split, message):
    with pytest.raises(ConfigError, match=message):
        load_split(name, split, **dirs)


def test_records_and_status_of_many_labels_and_damaged_targets(dirs):
    expected = many.coco_2017(dirs["manual_dir"])["train"]
    load_split("coco@16", "train", **dirs)
    records: list = [*Records(lookup("coco@16"), dirs["data_dir"]).as_data_source("train")]  # pyright: ignore
    np.testing.assert_array_equal([record["labels"] for record in records], expected.labels)
    status = describe("coco@16", **dirs)
    assert status.classes == {"train": 3, "test": 3}
    assert "classes: 3 in train, test" in str(status)

    path = dirs["data_dir"] / "coco_at_16/4.0.0/targets-train.npy"
    zeros = np.zeros_like(np.load(path))
    for damage in (cut(3), lambda path: np.save(path, zeros), lambda path: path.unlink()):
        damage(path)
        with pytest.raises(DamagedArchiveError, match=r"targets-train\.npy.*delete that folder"):
            load_split("coco@16", "train", **dirs)
