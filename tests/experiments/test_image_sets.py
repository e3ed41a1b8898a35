"""Every data set: its layouts, what is damaged or missing in them, sizes and splits."""

import gzip
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

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
from experiments.papers import classification
from tests.experiments import fake_archives as few
from tests.experiments import fake_image_sets as many
from tests.experiments.fake_archives import check_colours, encode_png
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


@pytest.mark.parametrize("write", NAMES, ids=lambda write: write.__name__)
def test_every_layout_is_read_as_it_is_written(dirs, write):
    _is_read(dirs, _small(NAMES[write]), write(dirs["manual_dir"]))


@pytest.mark.parametrize("write", [many.food101, many.imagenet_kaggle, many.coco_2017])
def test_the_files_may_be_in_any_folder_of_a_set(dirs, tmp_path, write):
    expected, name = write(tmp_path / "written"), NAMES[write]
    own = [folder for folder in DATASETS[name].folders if folder != "."]
    (target := dirs["manual_dir"] / own[-1]).mkdir(parents=True)
    for path in list((tmp_path / "written").iterdir()):
        for moved in path.iterdir() if path.name in own else [path]:
            moved.rename(target / moved.name)
    _is_read(dirs, _small(name), expected)


def test_files_of_the_system_are_read_compressed_or_not_whatever_their_names(
    dirs, monkeypatch, tmp_path
):
    expected = many.fashion_mnist(tmp_path / "usr")
    for path in tmp_path.rglob("train*.gz"):
        path.write_bytes(gzip.decompress(path.read_bytes()))
    folders = ("fashion_mnist", str(tmp_path / "usr/fashion-mnist"))
    dataset = replace(DATASETS["fashion_mnist"], folders=folders)
    monkeypatch.setitem(DATASETS, "fashion_mnist", dataset)
    _is_read(dirs, "fashion_mnist", expected)


def test_files_of_ones_own_come_before_those_of_the_system(dirs, monkeypatch, tmp_path):
    many.fashion_mnist(tmp_path / "usr")
    for path in tmp_path.rglob("*.gz"):
        path.write_bytes(b"damaged")
    expected = LAYOUTS["fashion_mnist"][1](dirs["manual_dir"])
    folders = ("fashion_mnist", str(tmp_path / "usr/fashion-mnist"))
    dataset = replace(DATASETS["fashion_mnist"], folders=folders)
    monkeypatch.setitem(DATASETS, "fashion_mnist", dataset)
    _is_read(dirs, "fashion_mnist", expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_missing_archive_says_which_files_go_where(dirs, monkeypatch, name):
    dataset = DATASETS[name]
    folders = tuple(folder for folder in dataset.folders if not folder.startswith("/"))
    monkeypatch.setitem(DATASETS, name, replace(dataset, folders=folders))
    with pytest.raises(MissingArchiveError) as error:
        load_split(name, next(iter(dataset.classes)), **dirs)
    message = str(error.value)
    needs = [file for of in dataset.layouts for names in of.needs for file in names]
    for place in (*needs, *(str(dirs["manual_dir"] / folder) for folder in folders)):
        assert place in message
    assert message in str(describe(name, **dirs)).replace("\n  ", "\n")
    assert not dirs["data_dir"].exists()


def _pattern(key, i, size):
    rows, columns = np.mgrid[0:size, 0:size]
    return np.stack([2 * rows, columns, np.full_like(rows, 10 * i)], -1).astype(np.uint8)


@pytest.mark.parametrize(
    "name", ["cifar10", "svhn_extra", "stl10", "fashion_mnist", "emnist_letters"]
)
def test_rows_columns_and_colours_of_arrays(dirs, monkeypatch, name):
    monkeypatch.setattr(few, "pixels", _pattern)
    ONE_LABEL[name][0](dirs["manual_dir"])
    for image in load_split(name, "test", **dirs).images[:]:
        *_, channels = image.shape
        expected = _pattern("", image[0, 0, 2] // 10 if channels == 3 else 0, len(image))
        np.testing.assert_array_equal(image, expected[..., :channels])


def test_extra_digits_are_for_training(dirs):
    many.svhn_extra(dirs["manual_dir"])
    data = classification.ClassificationData(name="svhn_extra")
    parts = classification.parts(data, Folders(**dirs))
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
    return lambda path: path.write_bytes(pickle.dumps(value))


def idx(*shape, fill=0):
    """An IDX file of one number, in place of another."""
    return content(many.idx(np.full(shape, fill, np.uint8)))


folders_of_food101 = ONE_LABEL["food101"][1]
_PNG = encode_png(np.zeros((84, 84, 3), np.uint8))
_DIGITS = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [11]])}
_CACHE = {"image_data": np.zeros((2, 84, 84, 3), np.uint8), "class_dict": {"x": [0, 2]}}
_ROWS = {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0, 1, 2]}
# A layout, a file or folder in the manual directory, what is done to it, and words of the error.
DAMAGE = [
    (many.fashion_mnist, "train-images-idx3-ubyte.gz", cut(9), "train-images-idx3"),
    (many.fashion_mnist, "train-images-idx3-ubyte.gz", idx(15), "train-images-idx3"),
    (many.fashion_mnist, "train-images-idx3-ubyte.gz", idx(14, 28, 28), "14 images, but 15 labels"),
    (many.fashion_mnist, "train-labels-idx1-ubyte.gz", idx(15, fill=10), "of the 10 classes"),
    (many.fashion_mnist, "t10k-labels-idx1-ubyte.gz", idx(10), "without images"),
    (few.mini_imagenet_folder, "n0295082600000000.jpg", Path.unlink, "00000000.jpg"),
    (few.mini_imagenet_folder, "val.csv", content(b"a.jpg,n1\n"), "the line filename,label"),
    (few.mini_imagenet_folder, "val.csv", replaced("n02950826000", "../000"), "val.csv, line 2"),
    (few.mini_imagenet_folder, "val.csv", copied("train.csv"), "which is also in"),
    (few.mini_imagenet_folder, "test.csv", content(b"filename,label\n"), "has no classes"),
    (few.mini_imagenet_caches, "*-test.pkl", cut(), "-test.pkl"),
    (few.mini_imagenet_caches, "*-val.pkl", pickled({}), "no entry image_data, class_dict"),
    (few.mini_imagenet_caches, "*-val.pkl", pickled(_CACHE), "2 images, and none of row 2"),
    (few.tiered_imagenet, "val_images_png.pkl", pickled([]), "0 images, and none of row 1"),
    (few.tiered_imagenet, "val_images_png.pkl", pickled([_PNG, _PNG[:60]]), "image 1"),
    (few.tiered_imagenet, "val_images_png.pkl", pickled(["/etc/x"] * 2), "neither bytes nor an"),
    (few.cifar_fs_folder, "val.txt", content(b"../x\n"), "val.txt"),
    (few.cub_archive, "CUB_200_2011.tgz", cut(), "CUB_200_2011.tgz"),
    # No rule takes the place of two of three lists.
    (few.cub_archive, "val.json", Path.unlink, "base.json exists, but not"),
    (few.cub_archive, "val.json", replaced("image_labels", "labels"), "val.json"),
    (few.cub_folder, "003.Bird_3", shutil.rmtree, "has no class 003, but 004.Bird_4"),
    (few.inat2017_boxes, "*testcats.pth", lambda path: torch.save([30, 5], path), "testcats.pth"),
    (few.inat2017_boxes, "train_2017_bboxes.json", replaced("_images/", "/../"), "bboxes.json"),
    (folders_of_food101, "val/ant", lambda path: path.rename(path.with_name("z")), "same classe"),
    (folders_of_food101, "val/ant", empty, "without images"),
    (many.food101, "test.txt", Path.unlink, "no meta/test.txt"),
    (many.food101, "test.txt", replaced("bee/", "bee/../../"), "below the images"),
    (many.aircraft, "*_val.txt", replaced(" 707-320", ""), "expected an image and a class"),
    (many.caltech101, "caltech-101.zip", cut(), "caltech-101.zip"),
    (many.imagenet_archives, "ILSVRC2012_img_train.tar", cut(12_000), "img_train.tar"),
    (many.imagenet_kaggle, "*val_00000002.JPEG", Path.unlink, "val_00000002"),
    (many.cub, "CUB_200_2011.tgz", content(b"something"), "CUB_200_2011.tgz"),
    (many.flowers102, "setid.mat", copied("imagelabels.mat"), "no entry trnid, valid"),
    (many.svhn_extra, "test_*.mat", lambda path: savemat(path, _DIGITS), "of the 10 classes"),
    (many.cifar100, "train", content(b"cos\nsystem\n(S'true'\ntR."), "requests os.system"),
    (many.cifar100, "test", pickled(_ROWS), "2 images, but 3 labels"),
    (many.coco_2017, "*_val2017.json", cut(20), "_val2017.json"),
    (many.coco_2017, "*_val2017.json", replaced('{"id": 73', '{"id": 75'), "_val2017.json"),
    (many.coco_2017, "*_val2017.json", replaced("person", "people"), "must have the same classes"),
    (many.nus_wide_published, "TestImagelist.txt", content(b"a\n"), "1 lines of 0 or 1"),
    (many.nus_wide_table, "nus_wid_data.csv", replaced("['animal']", "f()"), "nus_wid_data.csv"),
    (many.nus_wide_table, "images", empty, "no classes"),
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
    with pytest.raises(error, match=re.escape(words)):
        load_split(name, split, **dirs)
    assert not [p for p in dirs["data_dir"].rglob("*") if p.is_file() and p.name != ".lock"]
    assert not describe(name, **dirs).ready
    if write is few.mini_imagenet_folder:  # Once it is mended, the same call works.
        write(dirs["manual_dir"])
        assert len(load_split(name, split, **dirs).labels) > 0


# --- Sizes, splits, records ---------------------------------------------------------------------


def test_a_set_may_be_had_in_several_sizes(dirs):
    many.food101(dirs["manual_dir"])
    for size in (16, 24):
        name = f"food101@{size}"
        assert describe(name, **dirs).state == "available"
        assert load_split(name, "train", **dirs).images.shape[1:] == (size, 2 * size, 3)
        found = describe(name, **dirs)
        assert (found.state, found.classes) == ("prepared", {"train": 2, "test": 2})
        assert f"shorter side {size}" in found.description
        assert f"prepared in {dirs['data_dir']}/food101_at_{size}/" in str(found)
    assert not describe("food101", **dirs).ready
    assert lookup("food101@256") is lookup("food101")


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
    joined = load_split("cifar_fs", "novel+base", **dirs)
    assert joined.class_names == expected["novel"].class_names + expected["base"].class_names
    assert joined.labels.tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    assert joined.labels.dtype == np.int32
    colours = [*expected["novel"].images, *expected["base"].images]
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
