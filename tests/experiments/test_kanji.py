"""The characters: a fake of the package that they are drawn from, and the package itself."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from scipy.interpolate import BPoly

from experiments.data.pipeline import load_split
from experiments.datasets import describe, kanji, lookup, share_images
from experiments.datasets.archives import DamagedArchiveError, MissingArchiveError
from experiments.datasets.layouts import SearchPath

_SVG = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:kvg="http://kanjivg.tagaini.net">
<g><g kvg:element="{character}">{components}</g></g><g><text>1</text></g>
</svg>
"""
# Characters, each before its components; the first component is in two parts.
_WORDS = ("明日月", "日", "月", "林木木", "木", "杳木日", "朋月月", "旧丨日", "炎", "𠀋木")
_CHARACTERS = {word[0]: word[1:] for word in _WORDS}


def _write_groups(folder, character, groups, suffix=""):
    text = _SVG.format(character=character, components="".join(groups))
    (folder / f"{ord(character):05x}{suffix}.svg").write_text(text, encoding="utf-8")


def _write(folder, character, components, path="M9,54.5c30,0,60,0,91,0", suffix=""):
    groups = [
        f'<g kvg:element="{name}" kvg:part="{i}"><path d="{path}"/></g>'
        for i, name in enumerate(components or character)
    ]
    _write_groups(folder, character, groups, suffix)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of the characters above, as the package installs it."""
    site = tmp_path / "site"
    (site / "kanjivg-1.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: kanjivg\nVersion: 1\n"
    (site / "kanjivg-1.dist-info/METADATA").write_text(metadata)
    folder = site / "kanji"
    folder.mkdir()
    for character, components in _CHARACTERS.items():
        _write(folder, character, components)
    # No character of its own, and none of this script.
    _write(folder, "明", "日月木", suffix="-Kaisho")
    _write(folder, "あ", "日月木")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(kanji, "_MIN_CHARACTERS", 3)
    return folder


def test_characters_with_their_components(package, tmp_path):
    seen = {}
    for split, tenths in kanji._SPLITS.items():
        loaded = load_split("kanji", split, data_dir=tmp_path)
        assert loaded.class_names == ("日", "月", "木")
        assert loaded.images.shape == (len(loaded.labels), 48, 48, 1)
        characters = sorted(c for c in _CHARACTERS if kanji._tenth(c) in tenths)
        seen |= dict(zip(characters, loaded.labels.tolist(), strict=True))
    assert seen == {
        character: [int(name in character + components) for name in "日月木"]
        for character, components in _CHARACTERS.items()
    }


def test_another_size_is_drawn_not_resized(package, tmp_path):
    images = load_split("kanji@109", "train", data_dir=tmp_path).images
    assert images.shape[1:] == (109, 109, 1)
    rows = np.flatnonzero(images[0, :, 54, 0] > 127)
    assert rows.tolist() == list(range(52, 57))  # a stroke of 5 about 54.5
    columns = np.flatnonzero(images[0, 54, :, 0] > 127)
    assert abs(columns[0] - 6.5) <= 1  # round ends, half a stroke beyond 9 and 100
    assert abs(columns[-1] - 102.5) <= 1


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(kanji, "distribution", Mock(side_effect=PackageNotFoundError))
    with pytest.raises(MissingArchiveError, match=r"kanjivg, which is not installed: pip install"):
        load_split("kanji", "train", data_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    assert 'pip install -e ".[kanji]"' in str(describe("kanji", data_dir=tmp_path))


@pytest.mark.parametrize("path", ["M1,2l3,4", "M1,2c3,4", "M1,2c3,4,5,6,7,x", "not XML: <"])
def test_a_stroke_that_cannot_be_read_is_named(package, tmp_path, path):
    _write(package, "明", "日月", path)
    with pytest.raises(DamagedArchiveError, match=r"0660e\.svg is not a readable"):
        load_split("kanji", "train", data_dir=tmp_path)


# A radical, and what its marks say: the kind of the mark, the component, what it is a form of.
_MARKED = {
    "明": "general:日",
    "早": "general:日",
    "汁": "general:氵/水",
    "泉": "general:白 tradit:水",  # the traditional radical is not the first mark
    "月": "nelson:丿 tradit:月",
    "朝": "tradit:月 nelson:十",
    "林": "general:木 jis:月",
    "村": "general:木 general:木",  # in two parts
    "材": "general:木",
    "凹": "",
}
_CLASSES = {
    "base": {"日": "早明", "木": "材村林"},
    "validation": {"水": "汁泉"},
    "novel": {"月": "月朝"},
}


def test_every_character_has_one_traditional_radical(package, tmp_path, monkeypatch):
    """Each of four radicals is in a split by itself, or with one other."""
    for path in package.iterdir():
        path.unlink()
    for character, marks in _MARKED.items():
        groups = []
        for kind, name in (mark.split(":") for mark in marks.split()):
            element, _, original = name.partition("/")
            form = f' kvg:original="{original}"' * bool(original)
            groups.append(f'<g kvg:element="{element}"{form} kvg:radical="{kind}"/>')
        _write_groups(package, character, groups)
    monkeypatch.setattr(kanji, "_MIN_RADICAL", 2)
    monkeypatch.setattr(kanji, "_tenth", {"日": 0, "木": 4, "水": 5, "月": 9}.__getitem__)
    assert _members() == {
        name: [*sorted(of)] for own in _CLASSES.values() for name, of in own.items()
    }
    for split, own in _CLASSES.items():
        loaded = load_split("kanji_radicals", split, data_dir=tmp_path)
        assert loaded.class_names == tuple(own)
        np.testing.assert_array_equal(np.bincount(loaded.labels), [*map(len, own.values())])
        assert loaded.images.shape == (len(loaded.labels), 48, 48, 1)
    assert share_images("kanji_radicals@32", "kanji")


def _members():
    splits: Any = lookup("kanji_radicals").layouts[0].read(SearchPath((), Path())).values()
    classes = [of for split in splits for of in split.classes.items()]
    return {name: [chr(int(path.stem, 16)) for path in paths] for name, paths in classes}


_CURVE = "M10,20C13,50,40,60,70.5-5"
_CURVES = "M0,0C0,10,5,20,20,20C35,20,40,15,40,0C40,-15,50,-30,60,-30"


def test_a_curve_goes_through_its_points():
    points = list(kanji._points(_CURVE))
    curve = BPoly([[10 + 20j], [13 + 50j], [40 + 60j], [70.5 - 5j]], [0, 1])
    assert len(points) > 11
    np.testing.assert_allclose(points, curve(np.linspace(0, 1, len(points))), atol=1e-9)


@pytest.mark.parametrize(
    ("path", "same"),
    [
        ("m10,20c3,30,30,40,60.5-25", _CURVE),  # relative
        ("M10,20 C 13 50 40 60 70.5 -5", _CURVE),  # spaces
        ("M 10.0,20 c3 30,+30 40,60.5-25.0", _CURVE),
        # Smooth and repeated.
        ("M0,0C0,10,5,20,20,20S40,15,40,0S50-30,60-30", _CURVES),
        ("M0,0c0,10,5,20,20,20s20-5,20-20s10-30,20-30", _CURVES),
        ("M0,0c0,10,5,20,20,20,15,0,20-5,20-20,0-15,10-30,20-30", _CURVES),
    ],
)
def test_forms_of_the_same_path(path, same):
    np.testing.assert_allclose(list(kanji._points(path)), list(kanji._points(same)))


@pytest.mark.long
def test_the_real_characters():
    splits: Any = lookup("kanji").layouts[0].read(SearchPath((), Path()))
    sizes = {name: len(split.keys) for name, split in splits.items()}
    assert sizes == {"train": 3815, "validation": 1296, "test": 1311}
    targets = [split.targets for split in splits.values()]
    assert all(of.shape[1] == 70 and of.sum(0).min() >= 10 for of in targets)
    assert 3.2 < np.concatenate(targets).sum(1).mean() < 3.3
    drawn: list[Any] = [s.open()(p).content(32) for s in splits.values() for p in s.keys[::20]]
    assert 0.1 < np.mean(np.stack(drawn) > 127) < 0.3


@pytest.mark.long
def test_the_real_radicals():
    splits: Any = lookup("kanji_radicals").layouts[0].read(SearchPath((), Path()))
    published = lookup("kanji_radicals")
    assert {name: len(split.classes) for name, split in splits.items()} == published.classes
    sizes = list(map(len, (members := _members()).values()))
    assert (len(sizes), sum(sizes), min(sizes)) == (67, 5407, kanji._MIN_RADICAL)
    characters = {character: name for name, of in members.items() for character in of}
    # 相 is under 目 in traditional dictionaries, and under 木 in Nelson's.
    assert [characters[c] for c in "海相休語"] == ["水", "目", "人", "言"]
