"""Pictures, and the one self-contained page that shows them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from experiments.reporting.style import LARGE, MEDIUM, SMALL, new_figure
from experiments.storage import write_atomically, write_json, write_picture

FONTS: Any = {
    "font.size": SMALL,
    "axes.titlesize": LARGE,
    **{f"{part}.labelsize": MEDIUM for part in ("axes", "xtick", "ytick")},
    "legend.fontsize": MEDIUM,
    "legend.frameon": False,
}
"""What matplotlib is set to while pictures are drawn."""


@dataclass
class Picture:
    """A figure to draw in, with the numbers that it shows."""

    name: str
    """Of its file, without the ending."""
    title: str
    caption: str
    """How to read it, in a sentence or two; the figure shows it, too."""
    size: tuple[float, float]
    """Inches of the room for panels."""
    legend: Sequence[Line2D] = ()
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the figure shows, as JSON types."""

    def __post_init__(self):
        self.figure = new_figure(
            *self.size, title=self.title, caption=self.caption, legend=self.legend
        )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8"/>
<title>{title}</title>
<style>
body {{ max-width: 100rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff;
       font: 16px/1.5 system-ui, sans-serif; }}
nav a {{ margin-right: 1rem; white-space: nowrap; }}
section {{ margin: 2.5rem 0; border-top: 1px solid #ddd; padding-top: 1.5rem; }}
img {{ max-width: 100%; height: auto; }}
footer {{ color: #555; font-size: 0.9rem; overflow-wrap: anywhere; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<nav>{links}</nav>
{sections}
<footer><ul>{notes}</ul><code>{command}</code></footer>
</html>
"""


def write_page(
    directory: Path,
    *,
    title: str,
    summary: str,
    pictures: Sequence[Picture],
    notes: Sequence[str],
    command: str,
) -> list[Path]:
    """Writes the page, the numbers of its pictures, and the pictures; returns the paths.

    Pictures are part of the page's text. Those of an earlier call are deleted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("*.png"):
        stale.unlink()
    files, sections, links = [], [], []
    for picture in pictures:
        file = write_picture(directory / f"{picture.name}.png", picture.figure)
        data = base64.b64encode(file.read_bytes()).decode("ascii")
        alt = escape(f"{picture.title}. {picture.caption}")
        image = f'<img src="data:image/png;base64,{data}" alt="{alt}"/>'
        files.append(file)
        sections.append(f'<section id="{picture.name}">{image}</section>')
        links.append(f'<a href="#{picture.name}">{escape(picture.title)}</a>')
    page = _PAGE.format(
        title=escape(title),
        summary=escape(summary),
        links="\n".join(links),
        sections="\n".join(sections),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
        command=escape(command),
    )
    numbers = {picture.name: picture.numbers for picture in pictures}
    written = write_atomically(directory / "index.html", page)
    return [written, write_json(directory / "look.json", numbers), *files]
