"""The data sets for classification, many labels and transfer."""

import itertools
import json
import pickle

import numpy as np
import pytest

from experiments.config import Folders
from experiments.data import builders
from experiments.data.archives import DamagedArchiveError, MissingArchiveError, UnsafeArchiveError
from experiments.data.pipeline import RecordImages, class_counts, load_split
from experiments.protocols import classification
from tests.experiments import fake_archives, fake_image_sets
from tests.experiments.fake_archives import check_colours
from tests.experiments.fake_image_sets import MANY_LABELS, ONE_LABEL

LAYOUTS = fake_archives.LAYOUTS | ONE_LABEL | MANY_LABELS
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
    if builders.is_multi_label(name):
        _many_labels_are_read(folders, name, expected)
    else:
        _one_label_is_read(folders, name, expected)
    assert not list((folders["data_dir"] / builders.builder_class(name).name).rglob("extracted"))


def _one_label_is_read(folders, name, expected):
    for split, classes in expected.splits.items():
        loaded = load_split(name, split, **folders)
        assert loaded.class_names == tuple(classes)
        assert loaded.labels.dtype == np.int32
        counts = [len(colours) for colours in classes.values()]
        np.testing.assert_array_equal(loaded.labels, np.repeat(np.arange(len(classes)), counts))
        colours = [colour for of in classes.values() for colour in of]
        assert loaded.images.shape == (
            len(colours),
            *builders.builder_class(name).SPEC.array_shape,
        )
        check_colours(loaded.images, colours, expected.exact)
        np.testing.assert_array_equal(class_counts(name, **folders)[split], counts)


def _many_labels_are_read(folders, name, expected):
    for split, images in expected.splits.items():
        loaded = load_split(name, split, **folders)
        assert loaded.class_names == expected.names
        assert loaded.labels.dtype == np.int8
        targets = np.array([targets for _, targets in images])
        np.testing.assert_array_equal(loaded.labels, targets)
        check_colours(loaded.images, [colour for colour, _ in images], exact=False)
        np.testing.assert_array_equal(class_counts(name, **folders)[split], (targets == 1).sum(0))


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
        for moved in (
            path.iterdir() if path.name in builders.BUILDERS[name].SPEC.own_folders else [path]
        ):
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
    parts = {"train": "train", "validation": "val", "test": "test"}
    parts = {split: parts[split] for split in builders.split_names(name)}
    if name == "imagenet":
        parts["test"] = "val"
    expected = fake_image_sets.class_folders(folders["manual_dir"], own, parts)
    _is_read(folders, _small(name), expected)


@pytest.mark.parametrize(
    "name", [n for n in ONE_LABEL if len(builders.BUILDERS[n].SPEC.own_folders) > 1]
)
def test_the_folders_of_a_set_are_named_once(name):
    message = builders.BUILDERS[name].instructions() or ""
    assert sum(f" {own}/train" in message for own in builders.BUILDERS[name].SPEC.own_folders) <= 1


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

    monkeypatch.setattr(fake_image_sets, "pixels", pattern)
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


def _cut(path, count=200):
    path.write_bytes(path.read_bytes()[:-count])


def _rewrite(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def _json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _copy(source, target):
    target.write_bytes(source.read_bytes())


def _labels_beyond(path):
    content = pickle.loads(path.read_bytes())
    content["label_specific"][0] = 9
    fake_archives.write_pickle(path, content)


# Layout, what is done to it in the manual directory, and what the error must name.
DAMAGE = {
    "unreadable image": (
        fake_archives.mini_imagenet_folder,
        lambda d: _cut(d / "mini-imagenet/images/n0193011200000001.jpg"),
        "n0193011200000001.jpg",
    ),
    "missing image": (
        fake_archives.mini_imagenet_folder,
        lambda d: (d / "mini-imagenet/images/n0295082600000000.jpg").unlink(),
        "n0295082600000000.jpg",
    ),
    "list without header": (
        fake_archives.mini_imagenet_folder,
        lambda d: (d / "mini-imagenet/val.csv").write_text("a.jpg,n1\n"),
        "val.csv",
    ),
    "binary list": (
        fake_archives.mini_imagenet_folder,
        lambda d: (d / "mini-imagenet/val.csv").write_bytes(b"\xff\xfe\x00\xd8"),
        "val.csv",
    ),
    "empty list": (
        fake_archives.mini_imagenet_folder,
        lambda d: (d / "mini-imagenet/test.csv").write_text("filename,label\n"),
        "test.csv",
    ),
    "the same list twice": (
        fake_archives.mini_imagenet_folder,
        lambda d: _copy(d / "mini-imagenet/train.csv", d / "mini-imagenet/val.csv"),
        "val.csv",
    ),
    "pickle cut off": (
        fake_archives.mini_imagenet_caches,
        lambda d: _cut(d / "mini-imagenet-cache-test.pkl"),
        "mini-imagenet-cache-test.pkl",
    ),
    "pickle of another form": (
        fake_archives.mini_imagenet_caches,
        lambda d: fake_archives.write_pickle(d / "mini-imagenet-cache-val.pkl", {"images": 1}),
        "mini-imagenet-cache-val.pkl has no entry image_data, class_dict",
    ),
    "rows beyond the array": (
        fake_archives.mini_imagenet_caches,
        lambda d: fake_archives.write_pickle(
            d / "mini-imagenet-cache-val.pkl",
            {"image_data": np.zeros((2, 84, 84, 3), np.uint8), "class_dict": {"x": [0, 2]}},
        ),
        "mini-imagenet-cache-val.pkl",
    ),
    "images of another type": (
        fake_archives.mini_imagenet_caches,
        lambda d: fake_archives.write_pickle(
            d / "mini-imagenet-cache-val.pkl",
            {"image_data": np.zeros((2, 84, 84, 3)), "class_dict": {"x": [0, 1]}},
        ),
        "mini-imagenet-cache-val.pkl: images should be uint8",
    ),
    "fewer images than labels": (
        fake_archives.tiered_imagenet,
        lambda d: fake_archives.write_pickle(d / "tiered-imagenet/val_images_png.pkl", []),
        "val_images_png.pkl",
    ),
    "label without a name": (
        fake_archives.tiered_imagenet,
        lambda d: _labels_beyond(d / "tiered-imagenet/test_labels.pkl"),
        "test_labels.pkl",
    ),
    "encoded image cut off": (
        fake_archives.tiered_imagenet,
        lambda d: fake_archives.write_pickle(
            d / "tiered-imagenet/val_images_png.pkl",
            [fake_archives.png("a", 0, (84, 84)), fake_archives.png("a", 1, (84, 84))[:60]],
        ),
        "val_images_png.pkl, image 1",
    ),
    "few-shot archive cut off": (
        fake_archives.cub_archive,
        lambda d: _cut(d / "CUB_200_2011.tgz"),
        "CUB_200_2011.tgz",
    ),
    "few-shot class without images": (
        fake_archives.cub_folder,
        lambda d: [p.unlink() for p in (d / "CUB_200_2011/images/003.Bird_c").iterdir()],
        "CUB_200_2011/images lists the class '003.Bird_c'",
    ),
    "class missing": (
        fake_archives.cub_folder,
        lambda d: (d / "CUB_200_2011/images/003.Bird_c").rename(d / "elsewhere"),
        "004.Bird_d is at position 3",
    ),
    "listed class without images": (
        fake_archives.cifar_fs_folder,
        lambda d: (d / "cifar100/splits/bertinetto/val.txt").write_text("otter\nwhale\n"),
        "val.txt lists the class 'whale', without images",
    ),
    "archive of something else": (
        fake_archives.cifar_fs_archive,
        lambda d: _copy(fake_archives.zip_of_nothing(d), d / "cifar100.zip"),
        "cifar100.zip",
    ),
    "category without name": (
        fake_archives.inat2017_boxes,
        lambda d: fake_archives.write_torch_list(d / "inat2017/meta_iNat_testcats.pth", [30, 5]),
        "meta_iNat_testcats.pth",
    ),
    "boxes cut off": (
        fake_archives.inat2017_boxes,
        lambda d: _cut(d / "inat2017/train_2017_bboxes.json"),
        "train_2017_bboxes.json",
    ),
    "species without images": (
        fake_archives.inat2017_folder,
        lambda d: (d / "inat2017_fewshot_split.json").write_text(
            json.dumps({"base": ["Danaus plexippus"], "novel": ["Lynx lynx"]})
        ),
        "inat2017_fewshot_split.json lists the class 'Lynx lynx'",
    ),
    "a class in one split only": (
        fake_image_sets.food101_class_folders,
        lambda d: (d / "food101/val/ant").rename(d / "food101/val/wasp"),
        "in only one of them, for example 'ant'",
    ),
    "a class without images": (
        fake_image_sets.imagenet_class_folders,
        lambda d: [path.unlink() for path in (d / "imagenet/val/ant").iterdir()],
        "lists the class 'ant', without images",
    ),
    "no classes": (
        fake_image_sets.imagenet_class_folders,
        lambda d: [(d / "imagenet/val" / n).rename(d / n) for n in ("ant", "bee fly")],
        "no classes for the split test",
    ),
    "list missing": (
        fake_image_sets.food101_folder,
        lambda d: (d / "food-101/meta/test.txt").unlink(),
        "food-101 has no meta/test.txt",
    ),
    "list of another form": (
        fake_image_sets.aircraft,
        lambda d: _rewrite(
            d / "aircraft/fgvc-aircraft-2013b/data/images_variant_val.txt", " 707-320", ""
        ),
        "images_variant_val.txt, line 1: expected an image and a class",
    ),
    "a list that leads out": (
        fake_image_sets.food101_folder,
        lambda d: _rewrite(d / "food-101/meta/test.txt", "bee/", "bee/../../"),
        "test.txt, line 2: expected an image and a class",
    ),
    "listed image missing": (
        fake_image_sets.food101_folder,
        lambda d: (d / "food-101/images/ant/train1.jpg").unlink(),
        "train1.jpg",
    ),
    "archive cut off": (
        fake_image_sets.sun397,
        lambda d: _cut(d / "SUN397.tar.gz", 50),
        "SUN397.tar.gz",
    ),
    "too few to draw from": (
        fake_image_sets.caltech101_folder,
        lambda d: (d / "caltech101/101_ObjectCategories/accordion/image_0000.jpg").unlink(),
        "accordion has 30 images; more than 30 are needed",
    ),
    "training tar cut off": (
        fake_image_sets.imagenet_archives,
        lambda d: _cut(d / "ILSVRC2012_img_train.tar", 12_000),
        "ILSVRC2012_img_train.tar",
    ),
    "validation image missing": (
        fake_image_sets.imagenet_kaggle,
        lambda d: (d / "imagenet/ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_00000002.JPEG").unlink(),
        "lacks 1 of 3 images, for example ILSVRC2012_val_00000002",
    ),
    "annotation without image": (
        fake_image_sets.cub,
        lambda d: (d / "CUB_200_2011.tgz").write_bytes(b"something"),
        "CUB_200_2011.tgz",
    ),
    "no MATLAB file": (
        fake_image_sets.cars_in_one,
        lambda d: _cut(d / "cars_annos.mat"),
        "cars_annos.mat is not a readable MATLAB file",
    ),
    "another MATLAB file": (
        fake_image_sets.flowers102,
        lambda d: (d / "flowers-102/setid.mat").write_bytes(
            (d / "flowers-102/imagelabels.mat").read_bytes()
        ),
        "setid.mat has no variable trnid, valid, tstid",
    ),
    "digits that are none": (
        fake_image_sets.svhn,
        lambda d: fake_image_sets.savemat(
            d / "svhn/test_32x32.mat",
            {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [11]])},
        ),
        "test_32x32.mat: a label is not one of the 10 classes",
    ),
    "another number of labels": (
        fake_image_sets.cifar100,
        lambda d: fake_archives.write_pickle(
            d / "cifar-100-python/test",
            {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0, 1, 2]},
        ),
        "2 images, but 3 labels",
    ),
    "data of another shape": (
        fake_image_sets.cifar100,
        lambda d: fake_archives.write_pickle(
            d / "cifar-100-python/test",
            {"data": np.zeros((2, 32, 32, 3), np.uint8), "fine_labels": [0, 1]},
        ),
        "data should be uint8 [n, 3072]",
    ),
    "annotations cut off": (
        fake_image_sets.coco_2017,
        lambda d: _cut(d / "coco/annotations/instances_val2017.json", 20),
        "instances_val2017.json is not a JSON file",
    ),
    "an object on no image": (
        fake_image_sets.coco_2017,
        lambda d: _json(
            d / "coco/annotations/instances_val2017.json", lambda content: content["images"].pop()
        ),
        "instances_val2017.json: an entry lacks a field, or refers to a missing image",
    ),
    "other categories": (
        fake_image_sets.coco_2017,
        lambda d: _rewrite(d / "coco/annotations/instances_val2017.json", "person", "people"),
        "instances_val2017.json has other labels than",
    ),
    "no annotation": (
        fake_image_sets.voc2007_annotations,
        lambda d: (d / "voc2007/VOCdevkit/VOC2007/Annotations/000017.xml").unlink(),
        "000017.xml is missing",
    ),
    "unknown object": (
        fake_image_sets.voc2007_annotations,
        lambda d: _rewrite(
            d / "voc2007/VOCdevkit/VOC2007/Annotations/000017.xml", "horse", "unicorn"
        ),
        "000017.xml has an object of the unknown class 'unicorn'",
    ),
    "labels of another length": (
        fake_image_sets.nus_wide_published,
        lambda d: _rewrite(d / "nus-wide/ImageList/TestImagelist.txt", "sky\\0001_5.jpg\n", ""),
        "Labels_animal_Test.txt should have 1 lines of 0 or 1",
    ),
    "code for labels": (
        fake_image_sets.nus_wide_table,
        lambda d: _rewrite(d / "NUS-WIDE/nus_wid_data.csv", "['animal']", "print('animal')"),
        "nus_wid_data.csv, line 4: expected a list of labels",
    ),
    "no images at all": (
        fake_image_sets.nus_wide_table,
        lambda d: [path.unlink() for path in (d / "NUS-WIDE/images").glob("sky*")],
        "has none of the images",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_nothing_is_prepared(folders, kind):
    write, damage, named = DAMAGE[kind]
    name = _small(NAMES[write])
    write(folders["manual_dir"])
    damage(folders["manual_dir"])
    split = builders.split_names(name)[0]
    with pytest.raises(DamagedArchiveError) as error:
        load_split(name, split, **folders)
    assert named in str(error.value)
    left = [p for p in folders["data_dir"].rglob("*") if p.is_file() and p.name != ".lock"]
    assert not left
    assert not builders.describe(name, **folders).ready
    # Once it is mended, the same call works.
    if NAMES[write] in fake_archives.LAYOUTS and kind != "class missing":
        write(folders["manual_dir"])
        assert len(load_split(name, split, **folders).labels) > 0


def test_a_pickle_with_code_is_refused(folders):
    fake_image_sets.cifar100(folders["manual_dir"])
    path = folders["manual_dir"] / "cifar-100-python/train"
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UnsafeArchiveError, match=r"train requests os\.sys"):
        load_split("cifar100", "train", **folders)


def test_the_missing_images_of_nus_wide_are_counted(folders, caplog):
    fake_image_sets.nus_wide_table(folders["manual_dir"])
    load_split("nus_wide@16", "train", **folders)
    assert "1 of 3 images" in caplog.text


# --- Images without their classes ---------------------------------------------------------------


def _is_missing(folders, name, *named):
    """Checks that a set is refused, and not shown as ready, with a message that has these words."""
    with pytest.raises(MissingArchiveError) as error:
        load_split(_small(name), "test", **folders)
    for words in named:
        assert words in str(error.value)
    status = builders.describe(_small(name), **folders)
    assert status.missing == str(error.value)
    assert "prepared on first use" not in str(status)
    assert not folders["data_dir"].exists()


@pytest.mark.parametrize("own", ["imagenet", "ImageNet", "ILSVRC2012"])
def test_the_validation_images_of_imagenet_want_their_classes(folders, own):
    expected = fake_image_sets.imagenet_folders_and_devkit(folders["manual_dir"])
    folder = folders["manual_dir"] / own
    (folders["manual_dir"] / "ImageNet").rename(folder)
    devkit = folder / "ILSVRC2012_devkit_t12"
    devkit.rename(folder / "elsewhere")
    _is_missing(
        folders,
        "imagenet",
        f"its files are not all in {folders['manual_dir']}.",
        "Missing for the archives of the challenge, or the folders of Kaggle: "
        "ILSVRC2012_devkit_t12 or ILSVRC2012_devkit_t12.tar.gz or "
        "LOC_val_solution.csv",
        f": one folder per class in {folder / 'val'}, which contains only images",
    )
    (folder / "elsewhere").rename(devkit)
    _is_read(folders, "imagenet@16", expected)


def _flatten(folder):
    for of in [path for path in folder.iterdir() if path.is_dir()]:
        for path in of.iterdir():
            path.rename(folder / f"{of.name}_{path.name}")
        of.rmdir()


def test_the_devkit_is_no_help_without_the_classes_to_learn(folders):
    fake_image_sets.imagenet_folders_and_devkit(folders["manual_dir"])
    train = folders["manual_dir"] / "ImageNet/train"
    _flatten(train)
    _is_missing(folders, "imagenet", f"one folder per class in {train}, which contains only images")


@pytest.mark.parametrize("parts", [("train",), ("val",), ("train", "val")])
def test_images_without_folders_of_classes(folders, parts):
    fake_image_sets.food101_class_folders(folders["manual_dir"])
    flat = [folders["manual_dir"] / "food101" / part for part in parts]
    for folder in flat:
        _flatten(folder)
        (folder / ".hidden").mkdir()
    named = [f"one folder per class in {folder}, which contains only images" for folder in flat]
    _is_missing(folders, "food101", *named)


# --- Sizes --------------------------------------------------------------------------------------


def test_a_set_may_be_had_in_several_sizes(folders):
    fake_image_sets.food101_folder(folders["manual_dir"])
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


def test_few_shot_photographs_may_be_had_larger(folders):
    fake_archives.cub_folder(folders["manual_dir"])
    assert load_split("cub_fewshot@100", "novel", **folders).images.shape[1:] == (100, 200, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar10@64", r"cifar10 is only available at 32×32"),
        ("imagenet@", "the size after the @ must be 8 to 2048 pixels"),
        ("imagenet@4", "the size after the @ must be"),
        ("imagenet@1e2", "the size after the @ must be"),
        ("imagenot@64", "no data set 'imagenot'"),
    ],
)
def test_sizes_that_cannot_be(name, message):
    with pytest.raises(ValueError, match=message):
        builders.image_shape(name)


# --- Splits -------------------------------------------------------------------------------------


def test_splits_may_be_joined(folders):
    expected = fake_image_sets.dtd(folders["manual_dir"]).splits
    joined = load_split("dtd@16", "train+validation", **folders)
    assert joined.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    colours = [
        colour for name in ("ant", "bee") for split in ("train", "validation")
        for colour in expected[split][name]
    ]  # fmt: skip
    check_colours(joined.images, colours, exact=False)
    apart = load_split("dtd@16", "train+validation", memory_limit=0, **folders)
    assert isinstance(apart.images, RecordImages)
    two = np.array([6, 3])
    np.testing.assert_array_equal(apart.images[two].pixels, joined.images[two].pixels)


def test_splits_of_many_labels_may_be_joined(folders):
    expected = fake_image_sets.voc2007_annotations(folders["manual_dir"]).splits
    joined = load_split("voc2007@16", "train+validation", **folders)
    images = expected["train"] + expected["validation"]
    np.testing.assert_array_equal(joined.labels, [targets for _, targets in images])
    check_colours(joined.images, [colour for colour, _ in images], exact=False)


def test_classes_of_joined_few_shot_splits_follow_each_other(folders):
    expected = fake_archives.cifar_fs_folder(folders["manual_dir"]).splits
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


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_damaged_targets_are_named(folders, damage):
    fake_image_sets.coco_2017(folders["manual_dir"])
    load_split("coco@16", "train", **folders)
    path = folders["data_dir"] / "coco_at_16/2.0.0/targets-train.npy"
    targets = np.load(path)
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        _cut(path, 3)
    else:
        np.save(path, targets[::-1] * 0)
    with pytest.raises(DamagedArchiveError, match=r"targets-train\.npy.*delete that folder"):
        load_split("coco@16", "train", **folders)


def test_records_of_many_labels_hold_their_targets(folders):
    expected = fake_image_sets.coco_2017(folders["manual_dir"]).splits["train"]
    load_split("coco@16", "train", **folders)
    builder = builders.builder_class("coco@16")(data_dir=str(folders["data_dir"]))
    records = list(builder.as_data_source("train"))  # pyright: ignore
    assert [record["labels"].tolist() for record in records] == [targets for _, targets in expected]


def test_status_of_many_labels(folders):
    fake_image_sets.coco_2017(folders["manual_dir"])
    load_split("coco@16", "train", **folders)
    status = builders.describe("coco@16", **folders)
    assert status.images == {"train": 2, "test": 2}
    assert status.classes == {"train": 3, "test": 3}
    assert "classes: 3 in train, test" in str(status)
