"""Draws figures of RESULTS.md from the tables above them: the same rows, names and numbers.

    python docs/result_figures.py

Each picture has the columns of a table whose headings have a word, one panel a column. Bars are
the intervals of the table; a value that it prints in bold is filled. `sweep` draws figures with
single seeds, too, in the folder of the runs.
"""

import re
from pathlib import Path

from experiments.reporting import style
from experiments.storage import write_picture

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FIGURES = {
    "integration-differences-800": (
        "The gradient through the projection: eight pairs, d = 640, 800 steps",
        "− sum",
        "Differences to the sum SCE+NCA on novel classes of the icons, 800 steps, d = 640",
    ),
    "integration-differences-3200": (
        "Four times as long: eight pairs, 3,200 steps",
        "− sum",
        "Differences to the sum SCE+NCA on novel classes of the icons, 3,200 steps, d = 640",
    ),
    "sphere-differences": (
        "Against both learnable baselines, d = 50",
        "dynamic − this",
        "Hyperspherical classification of the icons, d = 50: dynamic minus each other method",
    ),
    "longtail-fresh": (
        "Six fresh seeds for dynamic, static and fixed-ce",
        "",
        "Long tail of the icons: dynamic minus each other method",
    ),
    "kanji": ("Eight losses", "mAP@", "Multi-label losses on kanji: mean average precision"),
    "kanji-differences": (
        "Eight losses",
        "this − two-way",
        "Multi-label losses on kanji: each loss minus the two-way loss",
    ),
}
"""For each file: heading of the section, what its columns have in common, and the title."""

_NUMBER = re.compile(r"([+−]?[\d.]+) ± ([\d.]+)")


def read_table(text: str, heading: str) -> tuple[list[str], dict[str, list[str]]]:
    """The headings of the first table below a heading, and its rows by the name in front."""
    section = text.partition(f"# {heading}\n")[2]
    lines = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    columns, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows, last = {}, ""
    for name, *cells in body:
        last = f"{last}, {name[2:]}" if name.startswith("– ") else name  # Of the method above.
        rows[last] = cells
    return columns[1:], rows


def draw(name: str, heading: str, common: str, title: str) -> None:
    """Draws and writes one figure."""
    text = (EXPERIMENTS / "RESULTS.md").read_text(encoding="utf-8")
    columns, rows = read_table(text, heading)
    differs = "−" in common or "minus" in title
    shown = [
        number
        for number, column in enumerate(columns)
        if common in column and (differs or "−" not in column)
        if any(_NUMBER.search(cells[number]) for cells in rows.values())
    ]
    rows = {row: of for row, of in rows.items() if _NUMBER.search(of[shown[0]])}
    height = 0.55 + 0.3 * len(rows)
    figure = style.new_figure(
        1.2 + 0.075 * max(map(len, rows)) + 2.1 * min(3, len(shown)),
        height * -(-len(shown) // 3),
        title=title,
        caption="Means and 95 % intervals over pairs of runs. Filled: the interval excludes 0."
        if differs
        else "Means and standard deviations over the seeds. Filled: the best of its column.",
    )
    for place, number in enumerate(shown):
        panel = figure.add_subplot(-(-len(shown) // 3), min(3, len(shown)), place + 1)
        for y, cells in enumerate(cells[number] for cells in rows.values()):
            value, bar = (float(part.replace("−", "-")) for part in _NUMBER.findall(cells)[0])
            ground = style.BLUE if "**" in cells else "white"
            marker = {"marker": "o", "markersize": 5, "markerfacecolor": ground}
            panel.errorbar(value, y, xerr=bar, color=style.BLUE, elinewidth=1.6, **marker)
        panel.set_title(columns[number].replace(f"{common}: ", ""), size=style.MEDIUM)
        panel.set_yticks(range(len(rows)), rows if place % 3 == 0 else [""] * len(rows))
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("points" if differs else "%")
        style.style_axes(panel)
        if differs:
            panel.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    write_picture(EXPERIMENTS / "figures" / f"{name}.png", figure)


if __name__ == "__main__":
    for file, texts in FIGURES.items():
        draw(file, *texts)
