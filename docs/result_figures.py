"""Draws figures of RESULTS.md and its appendix from the tables above them: the same rows and names.

    python docs/result_figures.py

Each picture has the columns of a table whose headings have a word, one panel a column. Bars are
the intervals of the table; a value that it prints in bold is filled. `sweep` draws figures with
single seeds, too, in the folder of the runs.
"""

import csv
import re
from pathlib import Path
from typing import NamedTuple

import matplotlib

from experiments.core.storage import write_picture
from experiments.reporting import style

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


class Picture(NamedTuple):
    """What a figure shows of a table; a table of steps gives curves over them."""

    section: str
    """Heading of the section; the table is the first there whose headings have `common`."""
    common: str
    """What the headings of the columns have in common, or the heading of the first column."""
    title: str
    over: str | None = "pairs of runs"
    """What the intervals of differences are over; None for means over seeds."""
    names: int = 1
    """How many columns name a row."""
    transposed: bool = False
    """Whether the methods are the columns of the table."""


FIGURES = {
    "integration-differences-800": Picture(
        "The gradient through the projection: eight pairs, d = 640, 800 steps",
        "− sum",
        "Novel classes of the icons, 800 steps: differences to the sum",
    ),
    "integration-differences-3200": Picture(
        "Four times as long: eight pairs, 3,200 steps",
        "− sum",
        "Novel classes of the icons, 3,200 steps: differences to the sum",
    ),
    "metric-losses-differences": Picture(
        "Other metric losses",
        "⊕ − +",
        "Novel classes of the icons: direct sum (⊕) minus sum (+)",
    ),
    "groups-grouping": Picture(
        "How features are grouped",
        "difference to",
        "Test error of group softmax on 25 classes (lower is better)",
        over="subsets of classes",
    ),
    "sphere-differences": Picture(
        "Against both learnable baselines, d = 50",
        "dynamic − this",
        "Hyperspherical classification of the icons, d = 50: dynamic minus each other method",
    ),
    "longtail-differences": Picture(
        "Long tail: three pairs",
        "dynamic − this",
        "Long tail of the icons, three pairs: dynamic minus each other method",
    ),
    "kanji": Picture(
        "Eight losses", "mAP@", "Multi-label losses on kanji: mean average precision", over=None
    ),
    "kanji-differences": Picture(
        "Eight losses", "this − two-way", "Multi-label losses on kanji: each loss minus two-way"
    ),
    "kanji-temperature": Picture(
        "Temperature and margin of the two-way loss",
        "this − the author's",
        "Two-way loss on kanji: each setting minus the author's, T_P = 4 and ε = 0",
        names=2,
    ),
    "margin-differences": Picture(
        "Five pairs, 25 base classes",
        "difference to m = 0",
        "Pre-training with a margin m, 25 base classes of the icons: differences to m = 0",
        names=2,
    ),
    "margin-radicals": Picture(
        "Margins from radicals to icons: eight pairs",
        "-shot",
        "Margins from kanji radicals to icons: differences to m = 0",
    ),
    "fine-tuning-margin": Picture(
        "Margin of the fine-tuning",
        "− (m = 0)",
        "Fine-tuning with a margin m, validation classes of the icons: differences to m = 0",
        over="the episodes of one run",
        transposed=True,
    ),
}

CURVES = {
    "margin-lengths": Picture(
        "Novel accuracy against the length of the training",
        "-shot",
        "Accuracy without a margin against the number of training steps",
        names=2,
    )
}

_NUMBER = re.compile(r"([+−]?[\d.]+) ± ([\d.]+)")
_VALUE = re.compile(r"−?[\d.,]+").fullmatch


def read_table(picture: Picture) -> tuple[list[str], dict[str, list[str]]]:
    """The headings of the columns that a figure shows, and its rows by their names."""
    texts = [
        (EXPERIMENTS / name).read_text(encoding="utf-8")
        for name in ("RESULTS.md", "RESULTS_APPENDIX.md")
    ]
    sections = re.split(r"^#+ ", "\n".join(texts), flags=re.MULTILINE)
    own = "\n".join(text for text in sections if text.startswith(f"{picture.section}\n"))
    tables = re.findall(r"(?:^\|.*\n)+", own, re.MULTILINE)
    table = next(table for table in tables if picture.common in table)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    del table[1]
    if picture.transposed:
        table = [list(column) for column in zip(*table, strict=True)]
    headings, *body = table
    common = "" if picture.common == headings[0] else picture.common
    shown = [
        number
        for number, heading in enumerate(headings)
        if number >= picture.names and common in heading and ("−" not in heading or picture.over)
        if any(_NUMBER.search(cells[number]) for cells in body)
    ]
    rows, last = {}, ""
    for cells in body:
        parts = zip(headings[: picture.names], cells, strict=False)
        named = [f"{of.split()[0]} = {cell}" if _VALUE(cell) else cell for of, cell in parts]
        name = ", ".join(named).replace("`", "")
        last = f"{last}, {name[2:]}" if name.startswith("– ") else name  # Of the method above.
        if any(_NUMBER.search(cells[number]) for number in shown):
            rows[last] = [cells[number] for number in shown]
    return [headings[number].replace(f"{picture.common}: ", "") for number in shown], rows


def draw(name: str, picture: Picture) -> None:
    """Draws and writes one figure."""
    headings, rows = read_table(picture)
    columns = 2 if len(headings) == 4 else min(3, len(headings))
    lines = -(-len(headings) // columns)
    figure = style.new_figure(
        1.2 + 0.075 * max(map(len, rows)) + 2.1 * columns,
        (0.55 + 0.3 * len(rows)) * lines,
        title=picture.title,
        caption=f"Means and 95 % intervals over {picture.over}. Filled: the interval excludes 0."
        if picture.over
        else "Means and standard deviations over the seeds. Filled: the best of its column.",
    )
    for place, heading in enumerate(headings):
        panel = figure.add_subplot(lines, columns, place + 1)
        panel.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        for y, cells in enumerate(rows.values()):
            if not (numbers := _NUMBER.findall(cells[place])):
                continue
            value, bar = (float(part.replace("−", "-")) for part in numbers[0])
            filled = "**" in cells[place] or (picture.over and abs(value) > bar)
            ground = style.BLUE if filled else "white"
            marker = {"marker": "o", "markersize": 5, "markerfacecolor": ground}
            panel.errorbar(value, y, xerr=bar, color=style.BLUE, elinewidth=1.6, **marker)
        panel.set_title(heading, size=style.MEDIUM)
        panel.set_yticks(range(len(rows)), rows if place % columns == 0 else [""] * len(rows))
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("points" if picture.over else "%")
        if picture.over:
            panel.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    write_picture(EXPERIMENTS / "figures" / f"{name}.png", figure)


def draw_curves(name: str, picture: Picture) -> None:
    """Draws and writes one figure of means over steps, a line for each data set."""
    headings, rows = read_table(picture._replace(over=None))
    figure = style.new_figure(
        3.2 * len(headings),
        3.4,
        title=picture.title,
        caption="Means and standard deviations over the runs.",
    )
    for place, heading in enumerate(headings):
        panel = figure.add_subplot(1, len(headings), place + 1)
        lines: dict[str, list[tuple[float, ...]]] = {}
        for row, cells in rows.items():
            of, _, steps = row.partition(", steps = ")
            if found := _NUMBER.search(cells[place]):
                point = (int(steps.replace(",", "")), *map(float, found.groups()))
                lines.setdefault(of, []).append(point)
        for number, (of, points) in enumerate(lines.items()):
            steps, values, bars = zip(*points, strict=True)
            marks = style.series_mark(number)
            panel.errorbar(steps, values, yerr=bars, capsize=2, label=of, **marks)
        panel.set_title(heading, size=style.MEDIUM)
        panel.set(xscale="log", xlabel="steps", ylabel="%" if place == 0 else "")
        panel.set_xticks(steps, [f"{step:,}" for step in steps])
        panel.minorticks_off()
        if place == len(headings) - 1:
            panel.legend(frameon=False, fontsize=style.SMALL, loc="lower right")
    write_picture(EXPERIMENTS / "figures" / f"{name}.png", figure)


def read_verdicts() -> list[dict[str, str]]:
    """The rows of verdicts.csv, each with the cell of a table that it names."""
    with (Path(__file__).parent / "verdicts.csv").open(encoding="utf-8") as file:
        verdicts = list(csv.DictReader(file))
    for of in verdicts:
        picture = Picture(of["section"], of["column"], "", names=int(of["names"]))
        of["cell"] = read_table(picture)[1][of["row"]][0]
    return verdicts


def draw_verdicts(name: str, verdicts: list[dict[str, str]]) -> None:
    """Draws and writes differences below the names of their papers."""
    lines, papers = [], set()
    for of in verdicts:
        lines += [of] if of["paper"] in papers else [None, of]
        papers.add(of["paper"])
    figure = style.new_figure(
        7,
        0.5 + 0.21 * len(lines),
        title="What was found of the papers' claims",
        caption="Points, with 95 % intervals; right: as the paper says; filled: 0 is excluded.",
    )
    panel = figure.add_subplot()
    names = [of["difference"] if of else lines[y + 1]["paper"] for y, of in enumerate(lines)]
    panel.set_yticks(range(len(lines)), names)
    for y, (of, label) in enumerate(zip(lines, panel.get_yticklabels(), strict=True)):
        if of is None:
            label.set_weight("bold")
            continue
        value, bar = (float(part.replace("−", "-")) for part in _NUMBER.findall(of["cell"])[0])
        ground = style.BLUE if abs(value) > bar else "white"
        marker = {"marker": "o", "markersize": 5, "markerfacecolor": ground}
        value *= int(of["sign"])
        panel.errorbar(value, y, xerr=bar, color=style.BLUE, elinewidth=1.6, **marker)
    panel.set_ylim(len(lines) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    write_picture(EXPERIMENTS / "figures" / f"{name}.png", figure)


if __name__ == "__main__":
    with matplotlib.rc_context(style.STYLE):
        for file, picture in FIGURES.items():
            draw(file, picture)
        for file, picture in CURVES.items():
            draw_curves(file, picture)
        verdicts = read_verdicts()
        draw_verdicts("verdicts", verdicts)
        for page in sorted({verdict["page"] for verdict in verdicts}):
            draw_verdicts(f"verdicts-{page}", [v for v in verdicts if v["page"] == page])
