"""Pictures, images as tiles in them, and the one self-contained page that shows them."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.font_manager as fonts
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from experiments.core.errors import ConfigError
from experiments.core.storage import (
    check_json,
    is_remote,
    load_json,
    write_atomically,
    write_json,
    write_picture,
)
from experiments.core.terminal import one_line
from experiments.reporting.markdown import format_value
from experiments.reporting.style import INK, new_figure


@dataclass
class Picture:
    """A figure to draw in, with the numbers that it shows."""

    name: str
    """Of its file, without the ending."""
    title: str
    caption: str
    """How to read it, in a sentence or two."""
    size: tuple[float, float]
    """Inches of the room for panels."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the figure shows, as JSON types."""

    def __post_init__(self):
        self.figure = new_figure(*self.size)  # The page has title and caption as text.


class Tile(NamedTuple):
    """A place in a row of images; without an image it is empty."""

    image: np.ndarray | None = None
    """As in `draw_image`."""
    frame: str = "none"
    """The colour of a frame."""
    note: str = ""


def escape(text: str) -> str:
    """Text of others for the page, on one line."""
    return escape_html(one_line(text))


def draw_image(
    axes: Axes, image: np.ndarray, xy: Sequence[float], *, side: float, frame: str, ink: str = INK
) -> None:
    """Draws an image and its frame in the square with centre (x, y) and sides of a length.

    The image is uint8 [h, w, 3], or [h, w, 1], light on dark, which is drawn as ink of a colour.
    """
    if image.shape[2] == 1:
        ground = np.broadcast_to(to_rgb(ink), (*image.shape[:2], 3))
        image = np.dstack([ground, image / 255])
    (left, bottom), (right, top) = np.subtract(xy, 0.44 * side), np.add(xy, 0.44 * side)
    axes.imshow(image, extent=(left, right, bottom, top), aspect="equal", zorder=3)
    edge: Any = {"fill": False, "edgecolor": frame, "linewidth": 1.6, "zorder": 3}
    axes.add_patch(Rectangle((left, bottom), right - left, top - bottom, **edge))


def draw_rows(axes: Axes, rows: Sequence[tuple[str, Sequence[Tile]]], heading: str) -> None:
    """Fills an empty panel with rows of tiles of size 1, each with its name, below a heading."""
    room = 2.6 if any(name for name, _ in rows) else 0
    pitch = 1 + 0.3 * max(1 + tile.note.count("\n") for _, tiles in rows for tile in tiles)
    axes.set(xlim=(-room, max(len(tiles) for _, tiles in rows)), ylim=(-pitch * len(rows), 0))
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(heading, loc="left")
    for number, (name, tiles) in enumerate(rows):
        y = -pitch * number - 0.5
        axes.text(-0.1, y, name, ha="right", va="center")
        for column, (image, frame, note) in enumerate(tiles):
            if image is not None:
                draw_image(axes, image, (column + 0.5, y), side=1, frame=frame)
            axes.text(column + 0.5, y - pitch / 2, note, size=7, ha="center", va="center", c=INK)


def short(name: str, characters: int) -> str:
    """A name with at most so many characters; code points for those that the font lacks."""
    font = fonts.get_font(fonts.findfont(fonts.FontProperties()))
    name = "".join(c if font.get_char_index(ord(c)) else f"U+{ord(c):04X}" for c in name)
    name = name.replace("$", r"\$").replace("_", " ")
    return name if len(name) <= characters else name[: characters - 1] + "…"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{title}</title>
<style>
body {{ max-width: 80rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }}
a {{ color: light-dark(#0055aa, #7ab8f5); }}
nav a {{ display: inline-block; margin-right: 1rem; }}
section {{ scroll-margin-top: 1rem; }}
p, li, figcaption {{ max-width: 50rem; }}
figure {{ margin: 1rem 0 3rem; }}
.picture {{ overflow-x: auto; margin-top: 1rem; }}
.picture::-webkit-scrollbar {{ height: 0.5rem; }}
.picture::-webkit-scrollbar-thumb {{ border-radius: 0.25rem; background: #888; }}
img {{ width: 100%; min-width: 44rem; box-sizing: border-box; background: #fff; }}
table {{ border-collapse: collapse; margin-top: 1.5rem; }}
caption {{ text-align: left; font-weight: bold; padding-bottom: 0.4rem; }}
th, td {{ padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid #8888; text-align: left; }}
td {{ font-variant-numeric: tabular-nums; }}
code {{ overflow-wrap: anywhere; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #16191d; color: #e4e6e9; }}
  img {{ padding: 0.5rem; filter: brightness(0.9); }}
}}
</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{summary}</p>
<nav aria-label="Pictures">{links}</nav>
</header>
<main>
{table}
{sections}
</main>
<footer><ul>{notes}</ul><code>{command}</code></footer>
</body>
</html>
"""
_SECTION = """<section id="{name}"><h2>{title}</h2>
<figure><figcaption>{caption}</figcaption>
<div class="picture" tabindex="0" role="region" aria-label="{title}">
<img src="data:image/png;base64,{data}" alt="{title}. {caption}"/></div></figure></section>"""
_TABLE = """<table><caption>Report of step {step}, {split} images</caption>
<thead><tr><th scope="col">metric</th><th scope="col">value</th></tr></thead>
<tbody>{rows}</tbody></table>"""


def _report_table(report: dict[str, Any]) -> str:
    """The metrics of a run's report, or nothing."""
    rows = []
    for metric in report.get("metrics", ()):
        name, unit, value, bar = (metric[key] for key in ("name", "unit", "value", "interval"))
        text = f"{format_value(value, unit)} {escape(unit)}"
        text += f" ± {format_value(bar, unit)}" if bar else ""
        rows.append(f'<tr><th scope="row">{escape(name)}</th><td>{text}</td></tr>')
    facts = {key: escape(str(report.get(key))) for key in ("step", "split")}
    return _TABLE.format(rows="\n".join(rows), **facts) if rows else ""


def write_page(
    directory: Path,
    pictures: Sequence[Picture],
    notes: Sequence[str],
    report: dict[str, Any] | None = None,
    **texts: str,
) -> list[Path]:
    """Writes the page, the numbers of its pictures, and the pictures; returns the paths.

    The texts are `title`, `summary` and `command`; the report is that of the run, if it has one.
    Pictures are part of the page's text. Those of an earlier call are deleted.
    """
    if not is_remote(directory) and directory.is_symlink():
        raise ConfigError(
            f"{directory} is a link, and pictures are written into the run; remove it"
        )
    directory.mkdir(parents=True, exist_ok=True)
    files, sections = [], []
    for picture in pictures:
        files.append(write_picture(directory / f"{picture.name}.png", picture.figure))
        data = base64.b64encode(files[-1].read_bytes()).decode()
        words = {"title": escape(picture.title), "caption": escape(picture.caption)}
        sections.append(_SECTION.format(name=picture.name, data=data, **words))
    page = _PAGE.format(
        links="\n".join(f'<a href="#{p.name}">{escape(p.title)}</a>' for p in pictures),
        table=_report_table(report or {}),
        sections="\n".join(sections),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
        **{name: escape(text) for name, text in texts.items()},
    )
    numbers = {picture.name: picture.numbers for picture in pictures}
    written = write_atomically(directory / "index.html", page)
    for stale in _written_before(directory / "look.json") - {*numbers}:
        (directory / f"{stale}.png").unlink(missing_ok=True)
    return [written, write_json(directory / "look.json", numbers), *files]


def _written_before(path: Path) -> set[str]:
    """The names of the pictures of an earlier call; none where its numbers are damaged."""
    try:
        numbers = load_json(path)
        check_json(numbers, {})
    except (OSError, ValueError):
        return set()
    return {name for name in numbers if re.fullmatch("[a-z-]+", name)}
