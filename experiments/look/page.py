"""One self-contained page of pictures, and the pictures as files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from tabulate import tabulate

from experiments.storage import write_atomically, write_json, write_picture


class Picture(NamedTuple):
    """A figure, with the numbers that it shows."""

    name: str
    """Of its file, without the ending."""
    title: str
    caption: str
    """How to read it, in a sentence or two; the figure shows it, too."""
    figure: Figure
    numbers: dict[str, Any]
    """What the figure shows, as JSON types."""
    table: Sequence[Sequence[Any]] = ()
    """The numbers beside the picture, for readers: headings, then rows."""


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ max-width: 100rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff;
       font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; margin-bottom: 0; }}
h1, p, nav, footer {{ max-width: 62rem; }}
nav {{ margin: 1rem 0; }}
nav a {{ margin-right: 1rem; white-space: nowrap; }}
section {{ margin: 2.5rem 0; border-top: 1px solid #ddd; padding-top: 1.5rem; }}
img {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-size: 0.9rem; }}
th, td {{ text-align: left; padding: 0.15rem 1rem 0.15rem 0; }}
td + td {{ font-variant-numeric: tabular-nums; }}
summary {{ cursor: pointer; color: #0072B2; }}
code {{ overflow-wrap: anywhere; }}
footer {{ color: #555; font-size: 0.9rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
<nav aria-label="Pictures">
{links}
</nav>
{sections}
<footer>
<ul>{notes}</ul>
<p><code>{command}</code></p>
</footer>
</body>
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

    The page refers to nothing outside of it: pictures are part of the text.

    Args:
      directory: Where to; made if it is missing. Pictures of an earlier call are replaced.
      title: The heading of the page.
      summary: A sentence on what is shown.
      pictures: In the order of the page.
      notes: Sentences for the end of the page.
      command: The command that wrote it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("*.png"):
        stale.unlink()
    files = [write_picture(directory / f"{p.name}.png", p.figure) for p in pictures]
    page = _PAGE.format(
        title=escape(title),
        summary=escape(summary),
        links="\n".join(f'<a href="#{p.name}">{escape(p.title)}</a>' for p in pictures),
        sections="\n".join(map(_section, pictures, files)),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
        command=escape(command),
    )
    numbers = {picture.name: picture.numbers for picture in pictures}
    return [
        write_atomically(directory / "index.html", page),
        write_json(directory / "look.json", numbers),
        *files,
    ]


def _section(picture: Picture, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    section = f'<img src="data:image/png;base64,{data}" alt="{escape(picture.title)}. '
    section += f'{escape(picture.caption)}">\n'
    if picture.table:
        headings, *rows = picture.table
        table = tabulate(rows, headings, tablefmt="html", disable_numparse=True)
        section += f"<details><summary>Numbers</summary>\n{table}</details>\n"
    return f'<section id="{picture.name}">\n{section}</section>'
