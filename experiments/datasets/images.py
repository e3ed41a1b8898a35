"""Images of others: read in bounded memory, and converted to the stored size."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from experiments.core.storage import regular
from experiments.datasets.archives import DamagedArchiveError, reading

Encoding = Literal["png", "jpeg"]

LONGEST = 2
"""The longer side of a photograph that is stored whole, relative to the size of the data set."""

Image.init()
Image.MAX_IMAGE_PIXELS = 2**25  # Pillow refuses twice as many, 64 megapixels, and warns below that.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Of damaged EXIF data, a line for each entry; the pixels are read all the same.
warnings.filterwarnings("ignore", category=UserWarning, module="PIL")

_KNOWN = (
    *("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "DIB", "PPM", "JPEG2000", "AVIF"),
    *("ICO", "PCX", "QOI", "SGI", "SUN", "TGA"),
)
_FORMATS = [name for name in _KNOWN if name in Image.OPEN]
"""The formats of images that are read, whatever the extension says. Others of Pillow's start a
program (EPS), open what is inside a file in any format (IPTC), or are not those of photographs."""


@dataclass(frozen=True)
class SourceImage:
    """An image and its origin."""

    content: Path | bytes | np.ndarray | Callable[[int], np.ndarray]
    """A file, an encoded image (also as an array of bytes), pixels uint8 [h, w, c], or a function
    that draws it with these sides."""
    source: str
    """The name of the image in error messages."""


@functools.cache
def image_extensions() -> frozenset[str]:
    """The extensions of the images that are read, in lower case."""
    read = {*_FORMATS, "MPO"}  # Stereo photographs are opened as JPEG.
    return frozenset(end for end, name in Image.registered_extensions().items() if name in read)


def encode(
    image: SourceImage,
    shape: tuple[int, int, int],
    *,
    whole: bool = False,
    encoding: Encoding = "png",
    background: str = "white",
    bits: int = 16,
) -> bytes:
    """Converts an image to the size of the data set, upright and opaque, and encodes it.

    Pixels of an image of the right size stay. Any other is resized (bilinear, with antialiasing)
    and cropped at the centre. With `whole`, nothing is cropped or enlarged: the shorter side
    becomes `shape[0]` pixels long, or less if the longer one would exceed `LONGEST` times as many.
    JPEG has quality 95 and no chroma subsampling. `background` and `bits` are those of `_decoded`.
    """
    height, width, channels = shape
    with _opened(image, height) as opened:
        decoded = _decoded(opened, channels, background, bits)
        if whole:
            shorter, longer = sorted(decoded.size)
            if shorter > height:
                shorter, longer = height, longer * height // shorter
            if longer > LONGEST * height:
                shorter, longer = max(1, shorter * LONGEST * height // longer), LONGEST * height
            size = (shorter, longer) if decoded.width < decoded.height else (longer, shorter)
        else:
            scale = max(width / decoded.width, height / decoded.height)
            size = round(decoded.width * scale), round(decoded.height * scale)
        if size != decoded.size:
            decoded = decoded.resize(size, Image.Resampling.BILINEAR)
        if not whole:
            left, top = (decoded.width - width) // 2, (decoded.height - height) // 2
            decoded = decoded.crop((left, top, left + width, top + height))
    buffer = io.BytesIO()
    if encoding == "png":
        decoded.save(buffer, "PNG", compress_level=3)
    else:
        decoded.save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def of_every_image(
    action: Callable[[Any], Any],
    items: Iterable[Any],
    skip: Callable[[Any, str], None] | None = None,
) -> Iterator[Any]:
    """The results of an action for all images, in order; several threads take part.

    Damaged images are left out. `skip` is called with each and the reason. Without it, one
    `DamagedArchiveError` at the end has their number and the first of them.
    """
    errors: list[str] = []
    rest = iter(items)

    def run(item: Any) -> Any:
        try:
            return action(item)
        except DamagedArchiveError as error:
            (errors.append(str(error)) if skip is None else skip(item, str(error)))

    # Pillow releases the GIL while it decodes, resizes and encodes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while chunk := list(itertools.islice(rest, 256)):
            yield from (result for result in pool.map(run, chunk) if result is not None)
    if errors:
        shown = "; ".join(sorted(errors)[:3]) + "; …" * (len(errors) > 3)
        few = f"{len(errors)} images cannot be read; repair or delete them: "
        raise DamagedArchiveError(few * (len(errors) > 1) + shown)


@contextlib.contextmanager
def _opened(image: SourceImage, side: int = 0) -> Iterator[Image.Image]:
    """Opens an image, which is decoded in the context; the one way from a file to an image."""
    with reading(image.source, "image"):  # Pillow's decoders raise almost any error.
        content = image.content(side) if callable(image.content) else image.content
        if isinstance(content, np.ndarray) and content.ndim == 3 and content.shape[-1] in (1, 3):
            yield Image.fromarray(content[..., 0] if content.shape[-1] == 1 else content)
            return
        if isinstance(content, np.ndarray):  # An encoded image, as OpenCV returns it.
            content = content.tobytes()
        file = io.BytesIO(content) if isinstance(content, bytes) else regular(content)
        with Image.open(file, formats=_FORMATS) as opened:
            yield opened


def _decoded(image: Image.Image, channels: int, background: str, bits: int) -> Image.Image:
    """Decodes an opened image, which changes: 8 bits a channel, turned upright, and opaque.

    Transparent images are laid on the colour `background`: what a file hides under transparent
    pixels is arbitrary. Of greys of 16 bits of which the file states nothing, the lower `bits`
    count.
    """
    image.load()
    white = _white(image, bits)
    inverted = white is not None and getattr(image, "tag_v2", {}).get(262) == 0
    image.getexif()
    transparency = image.info.get("transparency")
    # Pillow now knows the orientation. The rest is neither stored nor converted: damaged EXIF data
    # would stop `exif_transpose`.
    image.info.clear()
    ImageOps.exif_transpose(image, in_place=True)
    if white is not None:
        levels = np.asarray(image).astype(np.uint32)
        opaque = None if transparency is None else levels != transparency  # A level.
        levels = ((255 * np.minimum(levels, white) + white // 2) // white).astype(np.uint8)
        image = Image.fromarray(255 - levels if inverted else levels)
        if opaque is not None:
            image.putalpha(Image.fromarray(opaque.astype(np.uint8) * 255))
    elif transparency is not None:
        image.info["transparency"] = transparency
    if image.has_transparency_data:
        over = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, background), over)
    return image.convert("L" if channels == 1 else "RGB")


class Inspected(NamedTuple):
    """What an image needs of its data set."""

    side: int
    """The shorter one."""
    grey: bool
    transparent: bool
    """Whether a pixel is transparent."""
    largest: int
    """The largest of greys of 16 bits of which the file does not state how many count; else 0."""


def inspect_image(image: SourceImage) -> Inspected:
    """What an image needs of its data set; it is decoded, JPEG at a part of its size."""
    with _opened(image) as opened:
        side, transparent, largest = min(opened.size), opened.has_transparency_data, 0
        deep = opened.mode.startswith("I;16")
        if deep and opened.format in ("PNG", "TIFF") and _white(opened, 0) == 0:
            levels = np.asarray(opened)
            opaque = levels[levels != opened.info.get("transparency", -1)]
            transparent, largest = opaque.size < levels.size, int(opaque.max(initial=0))
        elif transparent:
            transparent = opened.convert("RGBA").getchannel("A").getextrema()[0] < 255  # pyright: ignore
        grey = opened.mode in ("1", "L", "LA", "La", "I", "F") or deep
        opened.draft(None, (64, 64))
        _decoded(opened, 1, "white", 16)  # Raises for damaged pixels.
        return Inspected(side, grey, transparent, largest)


def _white(image: Image.Image, bits: int) -> int | None:
    """The white of greys with more than 8 bits; None for other images.

    `bits` count where the format does not say how many of 16 do. Raises a ValueError for greys of
    32 bits, as no format states their white.
    """
    if image.mode.startswith("I;16") and image.format == "TIFF":
        stated = image.tag_v2.get(258, (16,))[0]  # pyright: ignore[reportAttributeAccessIssue]
        return 2 ** (bits if stated == 16 else stated) - 1
    # Pillow scales those of JPEG 2000 and PGM to 16 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return 2 ** (bits if image.format == "PNG" else 16) - 1
    if image.mode in ("I", "F"):
        raise ValueError(
            f"nothing states which of its greys (mode {image.mode}) is white; convert it to 8 or "
            "16 bits"
        )
    return None
