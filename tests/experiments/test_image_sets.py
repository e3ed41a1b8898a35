"""The data sets for classification, many labels and transfer."""

import gzip
import io
import itertools
import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from experiments.config import Folders
from experiments.data import builders
from experiments.data.builders import mnist
from experiments.data.builders.archives import (
    DamagedArchiveError,
    MissingArchiveError,
    UnsafeArchiveError,
)
from experiments.data.pipeline import RecordImages, load_split, stored_counts
from experiments.protocols import classification
from tests.experiments import fake_archives as few
from tests.experiments import fake_image_sets as many
from tests.experiments.fake_archives import check_colours, encode_png, write_pickle
from tests.experiments.fake_image_sets import MANY_LABELS, ONE_LABEL

LAYOUTS = few.LAYOUTS | ONE_LABEL | MANY_LABELS
NAMES = {write: name for name, of in LAYOUTS.items() for write in of}


def _small(name):
    """The same data set with small images, where it has sizes: that is quicker."""
    return f"{name}@16" if builders.BUILDERS[name].SPEC.resizable else name


def test_every_set_is_tested():
    assert set(LAYOUTS) == set(builders.BUILDERS) - {"icons", "kanji", "kanji_radicals"}
    assert {name for name in LAYOUTS if builders.is_multi_label(name)} == set(MANY_LABELS)


def _is_read(dirs, name, expected):
    """Checks that a set, of one label or many, has the expected images in every split."""
    assert tuple(expected) == builders.split_names(name)
    for split, of in expected.items():
        loaded = load_split(name, split, **dirs)
        assert loaded.class_names == of.class_names
        assert loaded.labels.dtype == of.labels.dtype
        np.testing.assert_array_equal(loaded.labels, of.labels)
        spec = builders.builder_class(name).SPEC
        assert loaded.images.shape == (len(of.images), *spec.array_shape)
        check_colours(loaded.images, of.images, exact=spec.encoding == "png")
        counts = (of.labels == 1).sum(0) if of.labels.ndim > 1 else np.bincount(of.labels)
        np.testing.assert_array_equal(stored_counts(name, **dirs)[split], counts)
    assert not list((dirs["data_dir"] / builders.builder_class(name).name).rglob("extracted"))


@pytest.mark.parametrize(
    ("write", "own"),
    [
        # A folder of its own is the same for every set; `make long` has them all.
        pytest.param(
            write,
            own,
            id=f"{write.__name__}-{own}",
            marks=pytest.mark.long if own and name > "c" else [],
        )
        for name, of in LAYOUTS.items()
        for write, own in [
            *zip(of, itertools.repeat("")),
            *zip(itertools.cycle(of), builders.BUILDERS[name].SPEC.own_folders),
        ]
    ],
)
def test_every_layout_is_read_as_it_is_written_and_from_each_folder(dirs, tmp_path, write, own):
    name = NAMES[write]
    expected = write(tmp_path / "written")
    target = dirs["manual_dir"] / own
    target.mkdir(parents=True)
    for path in list((tmp_path / "written").iterdir()):
        inside = own and path.name in builders.BUILDERS[name].SPEC.own_folders
        for moved in path.iterdir() if inside else [path]:
            moved.rename(target / moved.name)
    _is_read(dirs, _small(name), expected)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (name, own)
        for name in ONE_LABEL
        if "image folders" in (builders.BUILDERS[name].instructions() or "")
        for own in builders.BUILDERS[name].SPEC.own_folders
    ],
)
def test_class_folders_are_read_from_each_folder_of_the_set(dirs, name, own):
    parts = ["train", "val", "test"]
    if "validation" not in builders.split_names(name):
        parts.remove("test" if name == "imagenet" else "val")
    ending = "png" if len(parts) == 3 else "jpg"
    expected = many.class_folders(dirs["manual_dir"], own, *parts, ending=ending)
    _is_read(dirs, _small(name), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_missing_archive_says_which_files_go_where(dirs, monkeypatch, tmp_path, name):
    monkeypatch.setattr(mnist, "_DEBIAN", tmp_path / "no package")
    with pytest.raises(MissingArchiveError) as error:
        load_split(name, builders.split_names(name)[0], **dirs)
    message = str(error.value)
    assert str(dirs["manual_dir"]) in message
    spec = builders.BUILDERS[name].SPEC
    for file in (file for layout in spec.layouts for names in layout.needs for file in names):
        assert file in message
    for folder in spec.folders:
        assert folder == "." or f"{folder}/" in message
    assert message in str(builders.describe(name, **dirs)).replace("\n  ", "\n")
    assert not dirs["data_dir"].exists()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "svhn_extra", "stl10"])
def test_rows_columns_and_colours_of_arrays(dirs, monkeypatch, name):
    def pattern(key, i, size):
        rows, columns = np.mgrid[0:size, 0:size]
        return np.stack([2 * rows, columns, np.full_like(rows, 10 * i)], -1).astype(np.uint8)

    monkeypatch.setattr(few, "pixels", pattern)
    ONE_LABEL[name][0](dirs["manual_dir"])
    images = load_split(name, "test", **dirs).images[:]
    for image in images:
        np.testing.assert_array_equal(image, pattern("", image[0, 0, 2] // 10, len(image)))


@pytest.mark.parametrize("write", [many.fashion_mnist, many.mnist_keras, many.emnist_letters])
def test_rows_and_columns_of_the_mnist_family(dirs, monkeypatch, write):
    def pattern(key, i, size):
        rows, columns = np.mgrid[0:size, 0:size]
        return (9 * rows[..., None] + columns[..., None] // 4 * [1, 0, 0]).astype(np.uint8)

    monkeypatch.setattr(few, "pixels", pattern)
    write(dirs["manual_dir"])
    images = load_split(NAMES[write], "train", **dirs).images[:]
    assert (images == pattern("", 0, 28)[..., :1]).all()


def test_the_files_of_debians_package_are_found_where_it_has_them(dirs, monkeypatch, tmp_path):
    said = mnist.FashionMnist.instructions()
    assert "`apt-get install dataset-fashion-mnist`, found in /usr/share/datasets/fash" in said
    assert "--manual-dir ~/.keras/datasets" in said
    expected = many.fashion_mnist(tmp_path / "usr")
    monkeypatch.setattr(mnist, "_DEBIAN", tmp_path / "usr/fashion-mnist")
    found = builders.describe("fashion_mnist", **dirs).found
    assert [path.parent for path in found] == [tmp_path / "usr/fashion-mnist"] * 4
    _is_read(dirs, "fashion_mnist", expected)


def test_files_of_ones_own_are_not_mixed_with_those_of_debians_package(dirs, monkeypatch, tmp_path):
    many.fashion_mnist(tmp_path / "usr")
    monkeypatch.setattr(mnist, "_DEBIAN", tmp_path / "usr/fashion-mnist")
    own = dirs["manual_dir"] / "fashion-mnist"
    own.mkdir(parents=True)
    (own / "train-images-idx3-ubyte").write_bytes(b"damaged")
    assert builders.describe("fashion_mnist", **dirs).missing
    for file in (tmp_path / "usr/fashion-mnist").iterdir():
        (own / file.stem).write_bytes(b"damaged")  # Without .gz.
    found = builders.describe("fashion_mnist", **dirs).found
    assert [path.parent for path in found] == [own] * 4


def test_compression_is_seen_in_the_file_and_not_in_its_name(dirs):
    expected = many.fashion_mnist(dirs["manual_dir"])
    for path in dirs["manual_dir"].rglob("*.gz"):
        path.write_bytes(gzip.decompress(path.read_bytes()))
    _is_read(dirs, "fashion_mnist", expected)


@pytest.mark.parametrize(("name", "train"), [("svhn", 13), ("svhn_extra", 13 + 21)])
def test_extra_digits_are_for_training_where_they_are_wanted(dirs, name, train):
    ONE_LABEL[name][0](dirs["manual_dir"])
    places = Folders(dirs["data_dir"], dirs["manual_dir"])
    data = classification.ClassificationData(name=name)
    parts = classification.parts(data, places)
    assert parts["train"].counts().sum() == train
    assert parts["test"].counts().tolist() == [1] * 10
    labels = parts["train"].load().labels
    np.testing.assert_array_equal(np.bincount(labels), parts["train"].counts())


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


def renamed(name):
    return lambda path: path.rename(path.with_name(name))


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


def swapped(name):
    def change(path):
        other = path.with_name(name)
        contents = path.read_bytes(), other.read_bytes()
        other.write_bytes(contents[0])
        path.write_bytes(contents[1])

    return change


def _train_for_test(path):
    swapped(path.name.replace("t10k", "train"))(path)
    swapped("t10k-images-idx3-ubyte.gz")(path.with_name("train-images-idx3-ubyte.gz"))


def _labels_of_mnist(path):
    path.write_bytes(many.idx(np.array([5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 0, 1, 2, 3, 4], np.uint8)))


def folder(path):
    path.unlink()
    path.mkdir()


def _other_end(path):
    path.write_bytes(path.read_bytes()[:-8] + b"12345678")


def _npz_of_a_terabyte(path):
    header = io.BytesIO()
    npy = {"descr": "|u1", "fortran_order": False, "shape": (2**40,)}
    np.lib.format.write_array_header_1_0(header, npy)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("arr_0.npy", header.getvalue() + bytes(9))


def npz(**arrays):
    return lambda path: np.savez(path, **arrays)


DAMAGED_IDX = [
    ("train-images-idx3", cut(9), "{} is a damaged gzip file: Compressed file ended before the"),
    ("train-images-idx3", _other_end, "{} is a damaged gzip file: CRC check failed"),
    ("train-images-idx3", content(b""), "{} is not an IDX file: it starts with nothing, where a"),
    ("train-images-idx3", content(b"<html>"), "{} is not an IDX file: it starts with 3c 68 74 6d"),
    ("t10k-labels-idx1", unpacked(lambda raw: raw[:6]), "{} ends within its header"),
    ("t10k-labels-idx1", content(b"\0\0\x08\xff" + bytes(1020)), "{} has a damaged header: "),
    (
        "train-images-idx3",
        content(b"\0\0\x08\3" + bytes(4) + b"\xff" * 8),
        "{} has a damaged header: ",
    ),
    (
        "train-images-idx3",
        content(gzip.compress(b"\0\0\x08\3\x7f\xff\xff\xff" + b"\0\0\0\x1c" * 2)),
        "{} has a header that says 2147483647×28×28, above the limit of 1,073,741,824 bytes",
    ),
    ("train-images-idx3", folder, "{} is a folder; put the file in its place"),
    ("train-images-idx3", idx(15, 28, 28, code=13), "{} has elements of the type 0x0d, not unsig"),
    (
        "t10k-images-idx3",
        unpacked(lambda raw: raw[:-100]),
        "{} should have 7840 bytes after its header, which says 10×28×28, and has 7740",
    ),
    (
        "train-labels-idx1",
        unpacked(lambda raw: raw + bytes(2**24)),
        "{} should have 15 bytes after its header, which says 15, and has more",
    ),
    (
        "train-images-idx3",
        idx(15, 32, 32),
        "{}: images should be uint8 [n, 28, 28], not uint8 [15, 32",
    ),
    ("train-images-idx3", idx(0, 28, 28), "{} has no images"),
    (
        "train-images-idx3",
        swapped("train-labels-idx1-ubyte.gz"),
        "{} contains labels, but should contain images; are the two files swapped?",
    ),
    ("t10k-labels-idx1", copied("t10k-images-idx3-ubyte.gz"), "{} contains images, but should con"),
    ("train-labels-idx1", copied("t10k-labels-idx1-ubyte.gz"), "{}: 15 images, but 10 labels"),
    ("t10k-labels-idx1", _train_for_test, "has 10 labels, fewer than"),
    (
        "train-labels-idx1",
        _labels_of_mnist,
        "{} is the file of mnist, but is in a folder of fashion_",
    ),
    ("train-labels-idx1", idx(15, fill=10), "{}: a label is not one of the 10 classes"),
    ("t10k-labels-idx1", idx(10), "{} lists the class 'Trouser', without images"),
]
"""A file of Fashion-MNIST, what is done to it, and what the error says."""

_PNG = encode_png(np.zeros((84, 84, 3), np.uint8))
_DIGITS = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [11]])}

# A layout, a file or folder in the manual directory, what is done to it, and what the error says,
# where {} is its name.
DAMAGE = [
    (few.mini_imagenet_folder, "n0295082600000000.jpg", Path.unlink, "{}"),
    (few.mini_imagenet_folder, "val.csv", content(b"a.jpg,n1\n"), "{}"),
    (few.mini_imagenet_folder, "val.csv", content(b"\xff\xfe\x00\xd8"), "{} is not text in UTF-8"),
    (few.mini_imagenet_folder, "val.csv", copied("train.csv"), "{}"),
    (few.mini_imagenet_folder, "test.csv", content(b"filename,label\n"), "{} has no classes"),
    (few.mini_imagenet_caches, "*-test.pkl", cut(), "{}"),
    (few.mini_imagenet_caches, "*-val.pkl", pickled({}), "{} has no entry image_data, class_dict"),
    (few.mini_imagenet_caches, "*-val.pkl", _caches(np.uint8, [0, 2]), "{}"),
    (few.mini_imagenet_caches, "*-val.pkl", _caches(float, [0, 1]), "{}: images should be uint8"),
    (few.tiered_imagenet, "val_images_png.pkl", pickled([]), "{}"),
    (few.tiered_imagenet, "val_images_png.pkl", pickled([_PNG, _PNG[:60]]), "{}, image 1"),
    (few.tiered_imagenet, "test_labels.pkl", _label_beyond, "{}"),
    (few.cub_archive, "CUB_200_2011.tgz", cut(), "{}"),
    # No rule takes the place of two of three lists.
    (few.cub_archive, "val.json", Path.unlink, "base.json exists, but not {}"),
    (few.cub_folder, "003.Bird_c", shutil.rmtree, "004.Bird_d is at position 3"),
    (few.cifar_fs_archive, "*.zip", lambda path: zipfile.ZipFile(path, "w").close(), "{}"),
    (few.inat2017_boxes, "meta_iNat_testcats.pth", lambda path: torch.save([30, 5], path), "{}"),
    (few.inat2017_boxes, "train_2017_bboxes.json", cut(), "{}"),
    (many.food101_class_folders, "val/ant", renamed("wasp"), "one of them, for example '{}'"),
    (many.food101_class_folders, "val/ant", empty, "lists the class '{}', without images"),
    (many.food101_folder, "test.txt", Path.unlink, "food-101 has no meta/{}"),
    (many.food101_folder, "test.txt", replaced("bee/", "bee/../../"), "{}, line 2 should"),
    (many.aircraft, "*_val.txt", replaced(" 707-320", ""), "{}, line 1: expected an image and a"),
    (many.sun397, "SUN397.tar.gz", cut(50), "{}"),
    (many.caltech101_folder, "accordion/image_0000.jpg", Path.unlink, "accordion has 30 images"),
    (many.imagenet_archives, "ILSVRC2012_img_train.tar", cut(12_000), "{}"),
    (many.imagenet_kaggle, "*val_00000002.JPEG", Path.unlink, "1 of 3 images, for example ILS"),
    (many.cub, "CUB_200_2011.tgz", content(b"something"), "{}"),
    (many.cars_in_one, "cars_annos.mat", cut(), "{} is not a readable MATLAB file"),
    (many.flowers102, "setid.mat", copied("imagelabels.mat"), "{} has no variable trnid, valid"),
    (many.svhn, "test_*.mat", lambda path: savemat(path, _DIGITS), "{}: a label is not one of the"),
    (many.cifar100, "train", content(b"cos\nsystem\n(S'true'\ntR."), "{} requests os.system"),
    (many.cifar100, "test", _cifar((2, 3072), [0, 1, 2]), "2 images, but 3 labels"),
    (many.cifar100, "test", _cifar((2, 32, 32, 3), [0, 1]), "[n, 3072]"),
    *((many.fashion_mnist, f"{file}-ubyte.gz", *of) for file, *of in DAMAGED_IDX),
    (many.mnist_keras, "mnist.npz", cut(), "{} is not an .npz file with a readable array x_train"),
    (many.k49, "k49-test-labels.npz", npz(labels=np.zeros(49)), "with a readable array arr_0: Key"),
    (many.k49, "k49-test-labels.npz", npz(arr_0=np.arange(49)), "{}: labels should be uint8 [n]"),
    (
        many.k49,
        "k49-train-imgs.npz",
        _npz_of_a_terabyte,
        "and its header says 1099511627776",
    ),
    (many.k49, "k49-train-imgs.npz", copied("k49-train-labels.npz"), "{} contains labels, but"),
    (many.emnist_letters, "gzip.zip", cut(), "{} is damaged, encrypted, or not a zip"),
    (many.coco_2017, "*_val2017.json", cut(20), "{} is not a JSON file"),
    (many.coco_2017, "*_val2017.json", _image_lost, "{}: an annotation refers to the missing"),
    (many.coco_2017, "*_val2017.json", replaced("person", "people"), "{} has other labels than"),
    (many.voc2007_annotations, "000017.xml", Path.unlink, "{} is missing"),
    (
        many.voc2007_annotations,
        "000017.xml",
        replaced("horse", "unicorn"),
        "unknown class 'unicorn",
    ),
    (many.nus_wide_published, "TestImagelist.txt", content(b"a\n"), "_Test.txt should have 1 line"),
    (
        many.nus_wide_table,
        "nus_wid_data.csv",
        replaced("['animal']", "f()"),
        "{}, line 4: expected",
    ),
    (many.nus_wide_table, "images", empty, "none of the images"),
]


@pytest.mark.parametrize(("name", "file"), [("cub", "CUB_200_2011.tgz"), ("mnist", "mnist.npz")])
def test_a_pipe_is_no_archive(dirs, name, file):
    (dirs["manual_dir"] / name).mkdir(parents=True)
    os.mkfifo(dirs["manual_dir"] / name / file)
    with pytest.raises(MissingArchiveError, match=file):
        load_split(name, "train", **dirs)
    assert not builders.describe(name, **dirs).found


@pytest.mark.parametrize(("write", "place", "change", "named"), DAMAGE)
def test_damage_is_named_and_nothing_is_prepared(dirs, write, place, change, named):
    name = _small(NAMES[write])
    write(dirs["manual_dir"])
    (path,) = dirs["manual_dir"].rglob(place)
    change(path)
    split = builders.split_names(name)[0]
    error = UnsafeArchiveError if "requests" in named else DamagedArchiveError
    error = MissingArchiveError if "exists" in named else error
    with pytest.raises(error, match=re.escape(named.format(path.name))):
        load_split(name, split, **dirs)
    left = [p for p in dirs["data_dir"].rglob("*") if p.is_file() and p.name != ".lock"]
    assert not left
    assert not builders.describe(name, **dirs).ready
    # Once it is mended, the same call works.
    if NAMES[write] in few.LAYOUTS:
        write(dirs["manual_dir"])
        assert len(load_split(name, split, **dirs).labels) > 0


def test_the_images_of_imagenet_want_their_classes(dirs):
    expected = many.imagenet_folders_and_devkit(dirs["manual_dir"])
    folder = dirs["manual_dir"] / "ILSVRC2012"
    (dirs["manual_dir"] / "ImageNet").rename(folder)
    devkit = folder / "ILSVRC2012_devkit_t12"
    devkit.rename(folder / "elsewhere")
    missing = builders.describe("imagenet@16", **dirs).missing
    for words in (
        f"its files are not all in {dirs['manual_dir']}.",
        "Missing for the archives of the challenge, or the folders of Kaggle: "
        "ILSVRC2012_devkit_t12 or ILSVRC2012_devkit_t12.tar.gz or LOC_val_solution.csv",
        f"one folder per class in {folder / 'val'}, which contains only images",
    ):
        assert words in missing
    (folder / "elsewhere").rename(devkit)
    _is_read(dirs, "imagenet@16", expected)


def test_a_set_may_be_had_in_several_sizes(dirs):
    many.food101_folder(dirs["manual_dir"])
    for size in (16, 24):
        name = f"food101@{size}"
        assert builders.image_shape(name) == (size, size, 3)
        assert load_split(name, "train", **dirs).images.shape[1:] == (size, 2 * size, 3)
        assert f"shorter side {size}" in builders.describe(name, **dirs).description
        assert builders.describe(name, **dirs).ready
    assert not builders.describe("food101", **dirs).ready
    assert builders.builder_class("food101@256") is builders.builder_class("food101")
    assert builders.builder_class("food101@24") is builders.builder_class("food101@24")
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
    with pytest.raises(ValueError, match=message):
        load_split(name, split, **dirs)


def test_records_and_status_of_many_labels_and_damaged_targets(dirs):
    expected = many.coco_2017(dirs["manual_dir"])["train"]
    load_split("coco@16", "train", **dirs)
    builder = builders.builder_class("coco@16")(data_dir=str(dirs["data_dir"]))
    records = list(builder.as_data_source("train"))  # pyright: ignore
    np.testing.assert_array_equal([record["labels"] for record in records], expected.labels)
    status = builders.describe("coco@16", **dirs)
    assert status.classes == {"train": 3, "test": 3}
    assert "classes: 3 in train, test" in str(status)

    path = dirs["data_dir"] / "coco_at_16/4.0.0/targets-train.npy"
    zeros = np.zeros_like(np.load(path))
    for damage in (cut(3), lambda path: np.save(path, zeros), Path.unlink):
        damage(path)
        with pytest.raises(DamagedArchiveError, match=r"targets-train\.npy.*delete that folder"):
            load_split("coco@16", "train", **dirs)
