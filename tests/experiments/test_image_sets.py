"""The data sets for classification, many labels and transfer."""

import itertools
import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from experiments.config import Folders
from experiments.data import builders
from experiments.data.builders.archives import (
    DamagedArchiveError,
    MissingArchiveError,
    UnsafeArchiveError,
)
from experiments.data.pipeline import RecordImages, class_counts, load_split
from experiments.protocols import classification
from tests.experiments import fake_archives as few
from tests.experiments import fake_image_sets as many
from tests.experiments.fake_archives import check_colours, encode_png, packed, write_pickle
from tests.experiments.fake_image_sets import MANY_LABELS, ONE_LABEL

LAYOUTS = few.LAYOUTS | ONE_LABEL | MANY_LABELS
NAMES = {write: name for name, of in LAYOUTS.items() for write in of}


@pytest.fixture
def folders(tmp_path):
    return {"data_dir": tmp_path / "data", "manual_dir": tmp_path / "manual"}


def _small(name):
    """The same data set with small images, where it has sizes: that is quicker."""
    return f"{name}@16" if builders.BUILDERS[name].SPEC.resizable else name


def test_every_set_is_tested():
    assert set(LAYOUTS) == set(builders.BUILDERS) - {"icons", "kanji", "kanji_radicals"}
    assert {name for name in LAYOUTS if builders.is_multi_label(name)} == set(MANY_LABELS)


def _is_read(folders, name, expected):
    """Checks that a set, of one label or many, has the expected images in every split."""
    assert tuple(expected.splits) == builders.split_names(name)
    for split, of in expected.splits.items():
        loaded = load_split(name, split, **folders)
        if builders.is_multi_label(name):
            names, exact = expected.names, False
            labels = np.array([targets for _, targets in of], np.int8)
            counts, colours = (labels == 1).sum(0), [colour for colour, _ in of]
        else:
            names, exact = tuple(of), expected.exact
            counts = [len(colours) for colours in of.values()]
            labels = np.repeat(np.arange(len(of), dtype=np.int32), counts)
            colours = [colour for colours in of.values() for colour in colours]
        assert loaded.class_names == names
        assert loaded.labels.dtype == labels.dtype
        np.testing.assert_array_equal(loaded.labels, labels)
        shape = builders.builder_class(name).SPEC.array_shape
        assert loaded.images.shape == (len(colours), *shape)
        check_colours(loaded.images, colours, exact)
        np.testing.assert_array_equal(class_counts(name, **folders)[split], counts)
    assert not list((folders["data_dir"] / builders.builder_class(name).name).rglob("extracted"))


@pytest.mark.parametrize("write", NAMES, ids=lambda write: write.__name__)
def test_every_layout_is_read(folders, write):
    _is_read(folders, _small(NAMES[write]), write(folders["manual_dir"]))


@pytest.mark.parametrize(
    ("write", "own"),
    [
        pytest.param(write, own, id=f"{write.__name__}-{own}")
        for name, of in LAYOUTS.items()
        for own, write in zip(
            builders.BUILDERS[name].SPEC.own_folders, itertools.cycle(of), strict=False
        )
    ],
)
def test_each_folder_of_a_set_is_read(folders, tmp_path, write, own):
    name = NAMES[write]
    expected = write(tmp_path / "written")
    target = folders["manual_dir"] / own
    target.mkdir(parents=True)
    for path in list((tmp_path / "written").iterdir()):
        inside = path.name in builders.BUILDERS[name].SPEC.own_folders
        for moved in path.iterdir() if inside else [path]:
            moved.rename(target / moved.name)
    _is_read(folders, _small(name), expected)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (name, own)
        for name in ONE_LABEL
        if "image folders" in (builders.BUILDERS[name].instructions() or "")
        for own in builders.BUILDERS[name].SPEC.own_folders
    ],
)
def test_class_folders_are_read_from_each_folder_of_the_set(folders, name, own):
    parts = ["train", "val", "test"]
    if "validation" not in builders.split_names(name):
        parts.remove("test" if name == "imagenet" else "val")
    ending = "png" if len(parts) == 3 else "jpg"
    expected = many.class_folders(folders["manual_dir"], own, *parts, ending=ending)
    _is_read(folders, _small(name), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_missing_archive_says_which_files_go_where(folders, name):
    with pytest.raises(MissingArchiveError) as error:
        load_split(name, builders.split_names(name)[0], **folders)
    message = str(error.value)
    assert str(folders["manual_dir"]) in message
    spec = builders.BUILDERS[name].SPEC
    for file in (file for layout in spec.layouts for names in layout.needs for file in names):
        assert file in message
    for folder in spec.folders:
        assert folder == "." or f"{folder}/" in message
    assert message in str(builders.describe(name, **folders)).replace("\n  ", "\n")
    assert not folders["data_dir"].exists()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "svhn_extra", "stl10"])
def test_rows_columns_and_colours_of_arrays(folders, monkeypatch, name):
    def pattern(key, i, size):
        rows, columns = np.mgrid[0:size, 0:size]
        return np.stack([2 * rows, columns, np.full_like(rows, 10 * i)], -1).astype(np.uint8)

    monkeypatch.setattr(many, "pixels", pattern)
    ONE_LABEL[name][0](folders["manual_dir"])
    images = load_split(name, "test", **folders).images[:]
    numbers = sorted(image[0, 0, 2] // 10 for image in images)
    assert numbers == list(range(len(images)))
    for image in images:
        np.testing.assert_array_equal(image, pattern("", image[0, 0, 2] // 10, len(image)))


@pytest.mark.parametrize(("name", "train"), [("svhn", 13), ("svhn_extra", 13 + 21)])
def test_extra_digits_are_for_training_where_they_are_wanted(folders, name, train):
    ONE_LABEL[name][0](folders["manual_dir"])
    places = Folders(folders["data_dir"], folders["manual_dir"])
    data = classification.ClassificationData(name=name)
    counts = classification.class_counts(data, places)
    assert counts["train"].sum() == train
    assert counts["test"].tolist() == [1] * 10
    images = classification.load(data, places, "train")
    np.testing.assert_array_equal(np.bincount(images.labels), counts["train"])


# --- Damage -------------------------------------------------------------------------------------


def cut(count=200):
    return lambda path: path.write_bytes(path.read_bytes()[:-count])


def empty(folder):
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def emptied(path):
    with packed(path):
        pass


def text(content):
    return lambda path: path.write_text(content)


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


_PNG = encode_png(np.zeros((84, 84, 3), np.uint8))
_PROGRAM = b"cos\nsystem\n(S'true'\ntR."
_ROWS = np.zeros((2, 3072), np.uint8)
_DIGITS = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [11]])}
_SPLIT = {"base": ["Danaus plexippus"], "novel": ["Lynx lynx"]}


def _caches(images, rows):
    return pickled({"image_data": images, "class_dict": {"x": rows}})


def _cifar(rows, labels):
    return pickled({"data": rows, "fine_labels": labels})


# By layout: a file or folder in the manual directory, what is done to it, and what the error says,
# where {} is its name.
_DAMAGE = {
    few.mini_imagenet_folder: [
        ("n0193011200000001.jpg", cut(), "{}"),
        ("n0295082600000000.jpg", Path.unlink, "{}"),
        ("val.csv", text("a.jpg,n1\n"), "{}"),
        ("val.csv", lambda path: path.write_bytes(b"\xff\xfe\x00\xd8"), "{}"),
        ("val.csv", copied("train.csv"), "{}"),
        ("test.csv", text("filename,label\n"), "{}"),
    ],
    few.mini_imagenet_caches: [
        ("*-test.pkl", cut(), "{}"),
        ("*-val.pkl", pickled({"images": 1}), "{} has no entry image_data, class_dict"),
        ("*-val.pkl", _caches(np.zeros((2, 84, 84, 3), np.uint8), [0, 2]), "{}"),
        ("*-val.pkl", _caches(np.zeros((2, 84, 84, 3)), [0, 1]), "{}: images should be uint8"),
    ],
    few.tiered_imagenet: [
        ("val_images_png.pkl", pickled([]), "{}"),
        ("val_images_png.pkl", pickled([_PNG, _PNG[:60]]), "{}, image 1"),
        ("test_labels.pkl", _label_beyond, "{}"),
    ],
    few.cub_archive: [("CUB_200_2011.tgz", cut(), "{}")],
    few.cub_folder: [
        ("003.Bird_c", empty, "CUB_200_2011/images lists the class '{}'"),
        ("003.Bird_c", shutil.rmtree, "004.Bird_d is at position 3"),
    ],
    few.cifar_fs_folder: [
        ("val.txt", text("otter\nwhale\n"), "{} lists the class 'whale', without images")
    ],
    few.cifar_fs_archive: [("cifar100.zip", emptied, "{}")],
    few.inat2017_boxes: [
        ("meta_iNat_testcats.pth", lambda path: few.write_torch_list(path, [30, 5]), "{}"),
        ("train_2017_bboxes.json", cut(), "{}"),
    ],
    few.inat2017_folder: [
        ("inat2017_few*.json", text(json.dumps(_SPLIT)), "{} lists the class 'Lynx lynx'")
    ],
    many.food101_class_folders: [
        ("val/ant", renamed("wasp"), "one of them, for example '{}'"),
        ("val/ant", empty, "lists the class '{}', without images"),
        ("val", empty, "no classes for the split test"),
    ],
    many.food101_folder: [
        ("test.txt", Path.unlink, "food-101 has no meta/{}"),
        ("test.txt", replaced("bee/", "bee/../../"), "{}, line 2: expected an image and a class"),
        ("ant/train1.jpg", Path.unlink, "{}"),
    ],
    many.aircraft: [
        ("*_val.txt", replaced(" 707-320", ""), "{}, line 1: expected an image and a class")
    ],
    many.sun397: [("SUN397.tar.gz", cut(50), "{}")],
    many.caltech101_folder: [
        ("accordion/image_0000.jpg", Path.unlink, "accordion has 30 images; more than 30 are")
    ],
    many.imagenet_archives: [("ILSVRC2012_img_train.tar", cut(12_000), "{}")],
    many.imagenet_kaggle: [
        ("*val_00000002.JPEG", Path.unlink, "1 of 3 images, for example ILSVRC2012_val_00000002")
    ],
    many.cub: [("CUB_200_2011.tgz", text("something"), "{}")],
    many.cars_in_one: [("cars_annos.mat", cut(), "{} is not a readable MATLAB file")],
    many.flowers102: [
        ("setid.mat", copied("imagelabels.mat"), "{} has no variable trnid, valid, tstid")
    ],
    many.svhn: [
        ("test_*.mat", lambda path: savemat(path, _DIGITS), "{}: a label is not one of the 10")
    ],
    many.cifar100: [
        ("train", lambda path: path.write_bytes(_PROGRAM), "{} requests os.system"),
        ("test", _cifar(_ROWS, [0, 1, 2]), "2 images, but 3 labels"),
        ("test", _cifar(_ROWS.reshape(2, 32, 32, 3), [0, 1]), "[n, 3072]"),
    ],
    many.coco_2017: [
        ("*_val2017.json", cut(20), "{} is not a JSON file"),
        ("*_val2017.json", _image_lost, "{}: an entry lacks a field, or refers to a missing image"),
        ("*_val2017.json", replaced("person", "people"), "{} has other labels than"),
    ],
    many.voc2007_annotations: [
        ("000017.xml", Path.unlink, "{} is missing"),
        ("000017.xml", replaced("horse", "unicorn"), "{} has an object of the unknown class 'un"),
    ],
    many.nus_wide_published: [
        ("TestImagelist.txt", replaced("sky\\0001_5.jpg\n", ""), "animal_Test.txt should have 1 l")
    ],
    many.nus_wide_table: [
        ("nus_wid_data.csv", replaced("['animal']", "print('a')"), "{}, line 4: expected a list"),
        ("images", lambda path: [p.unlink() for p in path.glob("sky*")], "none of the images"),
    ],
}
DAMAGE = [
    pytest.param(write, *damage, id=f"{write.__name__}-{number}")
    for write, damages in _DAMAGE.items()
    for number, damage in enumerate(damages)
]


@pytest.mark.parametrize(("write", "place", "change", "named"), DAMAGE)
def test_damage_is_named_and_nothing_is_prepared(folders, write, place, change, named):
    name = _small(NAMES[write])
    write(folders["manual_dir"])
    (path,) = folders["manual_dir"].rglob(place)
    change(path)
    split = builders.split_names(name)[0]
    error = UnsafeArchiveError if "requests" in named else DamagedArchiveError
    with pytest.raises(error, match=re.escape(named.format(path.name))):
        load_split(name, split, **folders)
    left = [p for p in folders["data_dir"].rglob("*") if p.is_file() and p.name != ".lock"]
    assert not left
    assert not builders.describe(name, **folders).ready
    # Once it is mended, the same call works.
    if NAMES[write] in few.LAYOUTS:
        write(folders["manual_dir"])
        assert len(load_split(name, split, **folders).labels) > 0


# --- Images without their classes ---------------------------------------------------------------


def test_the_images_of_imagenet_want_their_classes(folders):
    expected = many.imagenet_folders_and_devkit(folders["manual_dir"])
    folder = folders["manual_dir"] / "ILSVRC2012"
    (folders["manual_dir"] / "ImageNet").rename(folder)
    devkit = folder / "ILSVRC2012_devkit_t12"
    devkit.rename(folder / "elsewhere")
    with pytest.raises(MissingArchiveError) as error:
        load_split("imagenet@16", "test", **folders)
    for words in (
        f"its files are not all in {folders['manual_dir']}.",
        "Missing for the archives of the challenge, or the folders of Kaggle: "
        "ILSVRC2012_devkit_t12 or ILSVRC2012_devkit_t12.tar.gz or LOC_val_solution.csv",
        f"one folder per class in {folder / 'val'}, which contains only images",
    ):
        assert words in str(error.value)
    assert builders.describe("imagenet@16", **folders).missing == str(error.value)
    assert not folders["data_dir"].exists()
    (folder / "elsewhere").rename(devkit)
    _is_read(folders, "imagenet@16", expected)


# --- Sizes --------------------------------------------------------------------------------------


def test_a_set_may_be_had_in_several_sizes(folders):
    many.food101_folder(folders["manual_dir"])
    for size in (16, 24):
        name = f"food101@{size}"
        assert builders.image_shape(name) == (size, size, 3)
        assert load_split(name, "train", **folders).images.shape[1:] == (size, 2 * size, 3)
        assert f"shorter side {size}" in builders.describe(name, **folders).description
        assert builders.describe(name, **folders).ready
    assert not builders.describe("food101", **folders).ready
    assert builders.builder_class("food101@256") is builders.builder_class("food101")
    assert builders.builder_class("food101@24") is builders.builder_class("food101@24")
    assert (folders["data_dir"] / "food101_at_16").is_dir()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar10@64", r"cifar10 is only available at 32×32"),
        ("imagenet@", "the size after the @ must be 8 to 2048 pixels"),
        ("imagenot@64", "no data set 'imagenot'"),
    ],
)
def test_sizes_that_cannot_be(name, message):
    with pytest.raises(ValueError, match=message):
        builders.image_shape(name)


# --- Splits -------------------------------------------------------------------------------------


def test_splits_may_be_joined(folders):
    expected = many.dtd(folders["manual_dir"]).splits
    joined = load_split("dtd@16", "train+validation", **folders)
    assert joined.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    parts = itertools.product(("ant", "bee"), ("train", "validation"))
    colours = [colour for name, split in parts for colour in expected[split][name]]
    check_colours(joined.images, colours, exact=False)
    apart = load_split("dtd@16", "train+validation", memory_limit=0, **folders)
    assert isinstance(apart.images, RecordImages)
    two = np.array([6, 3])
    np.testing.assert_array_equal(apart.images[two].pixels, joined.images[two].pixels)


def test_classes_of_joined_few_shot_splits_follow_each_other(folders):
    expected = few.cifar_fs_folder(folders["manual_dir"]).splits
    for splits, labels in (
        (("base", "validation", "novel"), [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]),
        (("novel", "base"), [0, 0, 1, 2, 2, 2, 3, 3]),
    ):
        joined = load_split("cifar_fs", "+".join(splits), **folders)
        assert joined.class_names == tuple(name for split in splits for name in expected[split])
        assert joined.labels.tolist() == labels
        assert joined.labels.dtype == np.int32
        colours = [c for split in splits for of in expected[split].values() for c in of]
        check_colours(joined.images, colours, exact=True)


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("icons", "base+novel+base", "contains a split twice"),
        ("dtd", "train+train", "contains a split twice"),
        ("dtd", "train+novel", "dtd has no split 'novel'; it has train, validation, test"),
        ("food101", "validation", "food101 has no split 'validation'; it has train, test"),
    ],
)
def test_splits_that_cannot_be_joined(folders, name, split, message):
    with pytest.raises(ValueError, match=message):
        load_split(name, split, **folders)


def test_records_and_status_of_many_labels_and_damaged_targets(folders):
    expected = many.coco_2017(folders["manual_dir"]).splits["train"]
    load_split("coco@16", "train", **folders)
    builder = builders.builder_class("coco@16")(data_dir=str(folders["data_dir"]))
    records = list(builder.as_data_source("train"))  # pyright: ignore
    assert [record["labels"].tolist() for record in records] == [targets for _, targets in expected]
    status = builders.describe("coco@16", **folders)
    assert status.classes == {"train": 3, "test": 3}
    assert "classes: 3 in train, test" in str(status)

    path = folders["data_dir"] / "coco_at_16/2.0.0/targets-train.npy"
    zeros = np.zeros_like(np.load(path))
    for damage in (cut(3), lambda path: np.save(path, zeros), Path.unlink):
        damage(path)
        with pytest.raises(DamagedArchiveError, match=r"targets-train\.npy.*delete that folder"):
            load_split("coco@16", "train", **folders)
