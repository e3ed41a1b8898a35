"""Images of every mode, turned or not, and class folders with what people and systems put there."""

from __future__ import annotations

import io
import logging
import os
import re
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from experiments.data.pipeline import RecordImages, load_split
from experiments.datasets import describe
from experiments.datasets.archives import DamagedArchiveError
from experiments.datasets.images import SourceImage, encode, inspect_image
from tests.experiments.fake_archives import decode, write_image
from tests.experiments.fake_image_sets import class_folders

# --- Images -------------------------------------------------------------------------------------

_RAMP = np.arange(60 * 40, dtype=np.uint32).reshape(40, 60) * 27  # Up to 64,773.


def _colours() -> Image.Image:
    levels = (_RAMP // 257).astype(np.uint8)
    return Image.fromarray(np.stack([levels, levels[::-1], levels[:, ::-1]], -1))


def _grey(dtype: str, unit: float = 1) -> Image.Image:
    """A ramp of greys as numbers of a type, whose white is 65,535 units."""
    array = (_RAMP * unit).astype(dtype)
    if dtype == ">u2":
        return Image.frombytes("I;16B", (60, 40), array.tobytes())
    return Image.fromarray(array)


def _transparent(image: Image.Image) -> Image.Image:
    """The image with some transparent pixels."""
    image.putalpha(Image.fromarray((_RAMP // 300).astype(np.uint8)))
    return image


def _with_palette() -> Image.Image:
    return _with_key(_colours().quantize(64), bytes(range(64)))


def _with_key(image: Image.Image, key: object) -> Image.Image:
    """An image of which one index, level or colour is transparent, or several indices."""
    image.info["transparency"] = key
    return image


def _on(image: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    """What of an RGBA image is seen on a colour."""
    pixels = np.asarray(image).astype(float)
    share = pixels[..., 3:] / 255
    return np.floor(share * pixels[..., :3] + (1 - share) * colour + 0.5).astype(int)


def _written(image: Image.Image, kind: str, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    more = {"exif": exif} if kind in ("PNG", "TIFF", "JPEG", "WEBP", "AVIF", "MPO") else {}
    image.save(buffer, kind, **more)
    return buffer.getvalue()


def _tiff_of_12_bits() -> bytes:
    """A TIFF whose white is 4,095: two numbers are packed into three bytes."""
    levels = _RAMP // 16
    first, second = levels[:, ::2], levels[:, 1::2]
    packed = [first >> 4, (first & 15) << 4 | second >> 8, second & 255]
    pixels = np.stack(packed, -1).astype(np.uint8).tobytes()
    tags = [(256, 60), (257, 40), (258, 12), (259, 1), (262, 1), (273, 8 + 2 + 12 * 8 + 4)]
    tags += [(278, 40), (279, len(pixels))]
    header = b"II*\0" + (8).to_bytes(4, "little") + len(tags).to_bytes(2, "little")
    entries = [
        tag.to_bytes(2, "little") + b"\4\0\1\0\0\0" + value.to_bytes(4, "little")
        for tag, value in tags
    ]
    return header + b"".join(entries) + bytes(4) + pixels


# The image as Pillow writes it, and the kinds of files that can hold its mode.
MODES = {
    "1": (lambda: _colours().convert("1"), "PNG TIFF JPEG BMP PPM"),
    "L": (lambda: _colours().convert("L"), "PNG TIFF JPEG WEBP GIF"),
    "LA": (lambda: _transparent(_colours().convert("L")), "PNG TIFF JPEG2000"),
    "P": (lambda: _colours().quantize(64), "PNG TIFF GIF BMP"),
    "P, transparent": (_with_palette, "PNG"),
    "P, one transparent": (lambda: _with_key(_colours().quantize(64), 7), "PNG GIF"),
    "1, one transparent": (lambda: _with_key(_colours().convert("1"), 0), "PNG"),
    "L, one transparent": (lambda: _with_key(_colours().convert("L"), 90), "PNG"),
    "RGB, one transparent": (lambda: _with_key(_colours(), (0, 148, 6)), "PNG"),
    "RGB": (_colours, "PNG TIFF JPEG MPO WEBP AVIF TGA PPM"),
    "RGBA": (lambda: _transparent(_colours()), "PNG TIFF WEBP"),
    "CMYK": (lambda: _colours().convert("CMYK"), "TIFF JPEG"),
    "YCbCr": (lambda: _colours().convert("YCbCr"), "TIFF JPEG"),
    "I;16": (lambda: _grey("<u2"), "PNG TIFF JPEG2000 PPM"),
    "I;16B": (lambda: _grey(">u2"), "PNG TIFF"),
}
_TURNS = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}
"""What each EXIF orientation asks for, of pixels [h, w, c]."""


def _stored(content: bytes) -> np.ndarray:
    """The pixels of an image that is stored whole and without loss."""
    return decode(encode(SourceImage(content, "a"), (40, 40, 3), whole=True)).astype(int)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("mode", "kind"), [(mode, kind) for mode, (_, kinds) in MODES.items() for kind in kinds.split()]
)
def test_every_mode_is_stored_as_its_eight_bit_twin_and_upright(mode, kind):
    image = MODES[mode][0]()
    if image.mode.startswith("I;16"):
        expected = np.repeat(np.round(_RAMP / 257)[..., None], 3, axis=2).astype(int)
    else:
        # Of another copy: Pillow writes a GIF differently after this.
        expected = _on(MODES[mode][0]().convert("RGBA"), (255, 255, 255))
    lossy = kind in ("JPEG", "MPO", "WEBP", "AVIF")
    turned = (1, 3, 6) if kind not in ("GIF", "BMP", "PPM", "TGA", "JPEG2000") else (1,)
    for orientation in turned if mode != "RGB" or len(turned) == 1 else _TURNS:
        found = _stored(_written(image, kind, orientation))
        wanted = _TURNS[orientation](expected)
        assert found.shape == wanted.shape
        error = np.abs(found - wanted)
        assert error.mean() < 12 if lossy else error.max() == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (_tiff_of_12_bits(), np.round(_RAMP // 16 * 255 / 4095)),
        (b"P5 60 40 1000\n" + (_RAMP // 65).astype(">u2").tobytes(), _RAMP // 65 * 0.255),
    ],
    ids=["12-bit TIFF", "PGM of 1,000 levels"],
)
def test_greys_between_8_and_16_bits_reach_white(content, expected):
    assert np.abs(_stored(content)[..., 0] - expected).max() <= 1


def _stored_grey(content: bytes, **how: Any) -> np.ndarray:
    return decode(encode(SourceImage(content, "a"), (40, 60, 1), **how))


def test_transparent_images_are_seen_on_a_colour_and_only_then_turned_grey():
    image = _transparent(_colours())
    for name, colour in {"red": (255, 0, 0), "#204060": (32, 64, 96)}.items():
        source = SourceImage(_written(image, "PNG", 6), "a")
        found = decode(encode(source, (60, 40, 3), background=name))
        np.testing.assert_array_equal(found, np.rot90(_on(image, colour), -1))
    grey = _stored_grey(_written(image, "PNG"), background="black")
    wanted = Image.fromarray(_on(image, (0, 0, 0)).astype(np.uint8)).convert("L")
    np.testing.assert_array_equal(grey, wanted)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_the_bits_that_count_in_greys_of_16_bits(kind):
    levels = (_RAMP // 16).astype(np.uint16)  # 12 bits.
    content = _written(Image.fromarray(levels), kind)
    assert inspect_image(SourceImage(content, "a")).largest == levels.max()
    found = _stored_grey(content, bits=12)
    np.testing.assert_array_equal(found, np.floor(levels * (255 / 4095) + 0.5))
    if kind == "PNG":  # One level is transparent, and no grey.
        levels[3, 5] = 65535
        buffer = io.BytesIO()
        Image.fromarray(levels).save(buffer, "PNG", transparency=65535)
        seen = inspect_image(SourceImage(buffer.getvalue(), "a"))
        assert (seen.largest, seen.transparent) == ((_RAMP // 16).max(), True)
        on_black = _stored_grey(buffer.getvalue(), background="black", bits=12).copy()
        assert on_black[3, 5] == 0
        on_black[3, 5] = found[3, 5]
        np.testing.assert_array_equal(on_black, found)
    for stated in (_tiff_of_12_bits(), b"P5 2 1 1000\n" + bytes(4)):
        assert inspect_image(SourceImage(stated, "a")).largest == 0


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_greys_without_a_range_are_refused_by_name(tmp_path, dtype):
    path = tmp_path / "scan.tif"
    _grey(dtype, 1 / 65535 if dtype == "float32" else 1).save(path)
    message = rf"scan\.tif is not a readable image: .*mode {dtype[0].upper()}.* 8 or 16 bits"
    with pytest.raises(DamagedArchiveError, match=message):
        encode(SourceImage(path, str(path)), (40, 40, 3))


def test_damaged_exif_data_do_not_cost_the_orientation():
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112], exif[0x011A] = 6, 72.0
    _colours().save(buffer, "JPEG", exif=exif)
    number, text = b"\x01\x1a\0\5", b"\x01\x1a\0\2"  # A resolution that is called a text.
    assert buffer.getvalue().count(number) == 1
    found = _stored(buffer.getvalue().replace(number, text))
    np.testing.assert_array_equal(found, _stored(buffer.getvalue()))
    assert found.shape == (60, 40, 3)


def _png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


# What the extension promises is not what these are.
_POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
HOSTILE = {
    "EPS": (_POSTSCRIPT, "cannot identify"),
    "IPTC": (b"\x1c\2\0\0\2\0\0", "cannot identify"),
    "PSD": (b"8BPS\0\1" + bytes(99), "cannot identify"),
    "64 megapixels": (_png(8193, 8192), "exceeds limit"),
    "PPM": (b"P6 65536 65536 255\n", "exceeds limit"),
    "half": (_png(800, 800)[:-60], ""),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("content", "why"), HOSTILE.values(), ids=HOSTILE)
def test_no_program_is_started_and_no_large_image_decoded(tmp_path, monkeypatch, content, why):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "a.jpg").write_bytes(content)
    for given in (tmp_path / "a.jpg", content):
        with pytest.raises(DamagedArchiveError, match=f"here.jpg is not a readable image: .*{why}"):
            encode(SourceImage(given, "here.jpg"), (64, 64, 3))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [_png(16, 8), _png(8193, 8192), b"GIF89a"])
def test_a_record_of_another_size_or_format_is_damage(content):
    source = SimpleNamespace(__getitems__=lambda rows: [{"image": content} for _ in rows])
    spec = SimpleNamespace(whole=False, array_shape=(8, 8, 1))
    with pytest.raises(DamagedArchiveError, match="here is damaged"):
        RecordImages(source, spec, Path("here"), np.arange(1))[[0]]


# --- Class folders ------------------------------------------------------------------------------

_NFC, _NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
_LEFT_OUT = "train: left out {} of other kinds: {}"


def _put(images: str = "", texts: str = "", for_test: str = ""):
    """Writes images and other files, joined by `|`, below the folders of the splits."""

    def change(train: Path, test: Path) -> None:
        for folder, names in ((train, images), (test, for_test)):
            for name in filter(None, names.split("|")):
                write_image(folder / name, "a", 0)
        for name in filter(None, texts.split("|")):
            (train / name).parent.mkdir(parents=True, exist_ok=True)
            (train / name).write_text("not an image")

    return change


def _links(train: Path, test: Path) -> None:
    (train / "ant/again").symlink_to(train / "ant")
    write_image(train.parent / "elsewhere/a.png", "a", 0)
    (train / "ant/more").symlink_to(train.parent / "elsewhere")


_FORMATS = "ant/a.webp|ant/a.bmp|ant/a.TIFF|ant/a.gif|ant/a.jfif|ant/a.jp2|ant/a.ppm|ant/a.avif"
_OF_SYSTEMS = (
    "__MACOSX/._a.jpg|@eaDir/a.jpg|lost+found/a.jpg|.hidden/a.jpg|ant/._a.jpg|ant/.a.png|"
    "ant/@eaDir/a.jpg/SYNO_THUMB.jpg|ant/Thumbs.db|.DS_Store|ant/.DS_Store|ant/desktop.ini|"
    "$RECYCLE.BIN/a.jpg|#recycle/a.png|System Volume Information/a.jpg|thumbs.DB"
)
# What is done to the folders `train` and `test`, which have two classes, `ant` of two images and
# `bee fly`; the images of every class of `train` that were added, or the error; and what is logged.
ODD_FILES = {
    "formats": (_put(_FORMATS), {"ant": 8}, ""),
    "subfolders": (_put("ant/day/1/a.jpg|ant/day/1/b.webp|ant/c.d/e.png"), {"ant": 3}, ""),
    "links": (_links, {"ant": 1}, ""),
    "left behind by systems": (_put(_OF_SYSTEMS), {}, ""),
    "other files": (
        _put("cover.jpg", "ant/b/notes.txt|bee fly/film.mpg|ant/\x1b[2J\u202e.txt"),
        {},
        "train: left out 1 image in no folder of a class: cover.jpg\n"
        + _LEFT_OUT.format("3 files", r"ant/\x1b[2J\u202e.txt, ant/b/notes.txt, bee fly/film.mpg"),
    ),
    "NFC and NFD": (_put(f"{_NFC}/a.png", for_test=f"{_NFD}/a.png"), {_NFC: 1}, ""),
    "NFD and NFC": (_put(f"{_NFD}/a.png", for_test=f"{_NFC}/a.png"), {_NFC: 1}, ""),
    "not UTF-8": (_put(os.fsdecode(b"caf\xe9/a.png")), r"train/caf\xe9 is not UTF-8", ""),
    "a name of two lines": (_put("a\nb/a.png"), r"train/a\nb is not UTF-8, or has control", ""),
    "an empty class": (
        _put(texts="wasp/a.mov"),
        "train has the class 'wasp', without images",
        _LEFT_OUT.format("1 file", "wasp/a.mov"),
    ),
    "no image": (_put(texts="ant/a.webp"), "train/ant/a.webp is not a readable image", ""),
}


@pytest.mark.parametrize(("change", "expected", "logged"), ODD_FILES.values(), ids=ODD_FILES)
def test_odd_files_in_class_folders(dirs, caplog, change, expected, logged):
    caplog.set_level(logging.WARNING)
    class_folders("food101", "train", "test")(dirs["manual_dir"])
    train, test = (dirs["manual_dir"] / "food101" / part for part in ("train", "test"))
    change(train, test)
    if isinstance(expected, str):
        with pytest.raises(DamagedArchiveError, match=re.escape(expected)):
            load_split("food101@16", "train", **dirs)
    else:
        loaded = load_split("food101@16", "train", **dirs)
        found = dict(zip(loaded.class_names, np.bincount(loaded.labels).tolist(), strict=True))
        counts = {"ant": 2, "bee fly": 2}
        assert found == counts | {name: counts.get(name, 0) + n for name, n in expected.items()}
        assert load_split("food101@16", "test", **dirs).class_names == loaded.class_names
    lines = [record.getMessage().removeprefix(f"{train.parent}/") for record in caplog.records]
    assert lines[0].startswith("preparing food101")
    assert lines[1:] == logged.splitlines()


def test_what_another_version_prepared_is_refused(dirs):
    class_folders("imagenet200", "train", "val")(dirs["manual_dir"])
    folder = dirs["data_dir"] / "imagenet200_at_16/2.0.0"
    folder.mkdir(parents=True)
    with pytest.raises(DamagedArchiveError, match=re.escape(f"{folder} was prepared by another")):
        load_split("imagenet200@16", "train", **dirs)
    assert "delete that folder" in describe("imagenet200@16", **dirs).missing
