"""One self-contained page of pictures, and the pictures as files."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments.storage import write_atomically, write_json, write_picture

PAGE = "index.html"
NUMBERS = "look.json"


class Table(NamedTuple):
    """The numbers beside a picture, for readers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]


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
    table: Table | None = None


_STYLE = """
body { max-width: 100rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff;
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h1, p, nav, footer { max-width: 62rem; }
nav { margin: 1rem 0; }
nav a { margin-right: 1rem; white-space: nowrap; }
section { margin: 2.5rem 0; border-top: 1px solid #ddd; padding-top: 1.5rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.15rem 1rem 0.15rem 0; }
td + td { font-variant-numeric: tabular-nums; }
summary { cursor: pointer; color: #0072B2; }
code { overflow-wrap: anywhere; }
footer { color: #555; font-size: 0.9rem; }
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
    """Writes the pictures, their numbers, and the page that contains them; returns the paths.

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
    page = page_html(
        title=title, summary=summary, pictures=pictures, files=files, notes=notes, command=command
    )
    numbers = {picture.name: picture.numbers for picture in pictures}
    return [
        write_atomically(directory / PAGE, page),
        write_json(directory / NUMBERS, numbers),
        *files,
    ]


def page_html(
    *,
    title: str,
    summary: str,
    pictures: Sequence[Picture],
    files: Sequence[Path],
    notes: Sequence[str],
    command: str,
) -> str:
    """The page as HTML that refers to nothing outside of it: pictures are part of the text."""
    links = "\n".join(f'<a href="#{p.name}">{html.escape(p.title)}</a>' for p in pictures)
    sections = "\n".join(
        _section(picture, file) for picture, file in zip(pictures, files, strict=True)
    )
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(summary)}</p>
<nav aria-label="Pictures">
{links}
</nav>
{sections}
<footer>
<ul>{items}</ul>
<p><code>{html.escape(command)}</code></p>
</footer>
</body>
</html>
"""


def _section(picture: Picture, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    alt = html.escape(f"{picture.title}. {picture.caption}", quote=True)
    image = f'<img src="data:image/png;base64,{data}" alt="{alt}">'
    table = "" if picture.table is None else _details(picture.table)
    return f'<section id="{picture.name}">\n{image}\n{table}</section>'


def _details(table: Table) -> str:
    head = "".join(f"<th>{html.escape(str(heading))}</th>" for heading in table.headings)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return (
        f"<details><summary>Numbers</summary>\n<table>\n<tr>{head}</tr>\n{rows}\n</table>"
        "</details>\n"
    )
