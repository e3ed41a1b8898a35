"""Makes what the results' pages show of `experiments/results`: tables, commands, numbers, figures.

    python docs/results.py

In these pages, `<!-- results/NAME.csv -->` stands above the table of this file, and `<!-- commands
of results/NAME.csv -->` above the commands that made it. A number in a sentence is a link whose
title names its cell: `[+0.6 ± 0.3](results/NAME.csv "ROW: COLUMN")`, in `docs` with the whole
address of the file. It keeps its number of decimals. `"minus ROW: COLUMN"` is the negative of the
cell; `"ROW: COLUMN – upper"`, or `lower`, is an end of its interval.

A file has a table in CSV, below lines such as `# command: …`. If it has a column `seed`, or `draw`
of the data, it has the values of runs, and the table has their means, standard deviations and
paired differences of the baseline and this row: `# baseline: COLUMN=NAME` for NAME − this,
`# baseline: this − COLUMN=NAME` for the opposite sign.
"""

import csv
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from experiments.core.protocol import mean_and_interval
from experiments.core.storage import write_picture
from experiments.reporting import markdown, style

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
RESULTS = EXPERIMENTS / "results"
PAGES = (
    "experiments/RESULTS.md",
    "experiments/RESULTS_APPENDIX.md",
    "docs/losses/grouping.md",
    "docs/losses/hypersphere.md",
    "docs/losses/margins.md",
    "docs/recipes/long_tail.md",
    "docs/which_loss.md",
)

_NUMBER = re.compile(r"([+−]?)(\d[\d,]*(?:\.(\d+))?)(?: ± (\d+(?:\.\d+)?))?")
_PLACE = re.compile(r"(minus )?(.+?): (.+?)(?: – (upper|lower))?")
_QUOTE = re.compile(r'\[([^][]*)\]\((https://\S+/|)results/([\w-]+)\.csv "([^"]*)"\)')
_MADE = re.compile(r"(<!-- (commands of )?results/([\w-]+)\.csv -->)\n+(?:(?:\||    ).*\n)*\n*")


class Number(NamedTuple):
    """A cell that is a number."""

    value: float
    half: float | None
    """Half the interval, or the standard deviation."""
    is_difference: bool
    excludes_0: bool
    """Of a difference, whether its interval does."""


def number_of(cell: str) -> Number | None:
    """What a cell says: `80.1`, `80.1 ± 0.5`, or a difference `−0.2 ± 0.4`.

    `!` marks an interval that excludes 0 before it is rounded.
    """
    found = _NUMBER.fullmatch(cell.strip("* !"))
    if not found:
        return None
    value = float(found[2].replace(",", "")) * (-1 if found[1] == "−" else 1)
    half = float(found[4]) if found[4] else None
    is_difference = half is not None and (bool(found[1]) or value == 0)
    return Number(value, half, is_difference, abs(value) > (half or 0) or cell.endswith("!"))


class Table(NamedTuple):
    """A table of the results."""

    facts: dict[str, list[str]]
    """What is known of it, such as its commands."""
    headings: list[str]
    body: list[list[str]]

    def fact(self, name: str, default: str = "") -> str:
        """The last line with this name."""
        return self.facts.get(name, [default])[-1]

    @property
    def names(self) -> int:
        """How many columns name a row."""
        return int(self.fact("names", "1"))

    @property
    def rows(self) -> dict[str, list[str]]:
        """The cells of each row by its name, such as `cosines, m = −0.05`."""
        rows, last = {}, ""
        for cells in self.body:
            parts = zip(self.headings[: self.names], cells, strict=False)
            named = [f"{of.split()[0]} = {cell}" if number_of(cell) else cell for of, cell in parts]
            name = ", ".join(named).replace("`", "")
            last = f"{last}, {name[2:]}" if name.startswith("– ") else name  # Of the one above.
            rows[last] = cells
        return rows

    def number(self, place: str) -> Number:
        """That of `ROW: COLUMN`, of `minus ROW: COLUMN`, or of an end, `ROW: COLUMN – upper`."""
        minus, row, column, end = _PLACE.fullmatch(place).groups()  # pyright: ignore
        number = number_of(self.rows[row][self.headings.index(column)])
        if number is None or (end and not number.is_difference):
            raise ValueError(f"{place!r} is no number, or has no interval")
        if end:
            value = round(number.value + {"upper": 1, "lower": -1}[end] * (number.half or 0), 6)
            number = number._replace(value=value, half=None)
        return number._replace(value=-number.value) if minus else number

    def markdown(self) -> list[str]:
        """Its lines, with the best numbers and intervals that exclude 0 in bold."""
        best = self._best()
        rows = [
            [_bold(cell, (i, j) in best) for j, cell in enumerate(cells)]
            for i, cells in enumerate(self.body)
        ]
        names = [any(not number_of(row[k]) for row in self.body) for k in range(self.names)]
        marks = [":--" if of else ":-:" for of in names] + [":-:"] * (
            len(self.headings) - self.names
        )
        escaped = [[cell.replace("|", r"\|") for cell in row] for row in (self.headings, *rows)]
        lines = [f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in escaped]
        return [lines[0], f"|{'|'.join(marks)}|", *lines[1:]]

    def _best(self) -> set[tuple[int, int]]:
        """The places of the best of each column or row, or of a column in rows that begin alike."""
        groups: dict[Any, list[tuple[float, tuple[int, int]]]] = {}
        rule = self.fact("bold")
        for i, cells in enumerate(self.body):
            for j, cell in list(enumerate(cells))[self.names :]:
                number = number_of(cell)
                if rule in ("column", "row", "group") and number and not number.is_difference:
                    key = {"column": j, "row": i, "group": (cells[0], j)}[rule]
                    sign = -1 if "↓" in self.headings[j] else 1
                    groups.setdefault(key, []).append((sign * number.value, (i, j)))
        several = [group for group in groups.values() if len(group) > 1]
        return {place for of in several for value, place in of if value == max(of)[0]}


def _bold(cell: str, is_best: bool) -> str:
    """The text of a cell. Stars in a file are for cells with more than a number."""
    number = number_of(cell)
    if number and number.is_difference:
        cell, is_best = cell.removesuffix(" !"), number.excludes_0
    return f"**{cell}**" if is_best else cell


def read(name: str) -> Table:
    """The table of a file of the results."""
    lines = (RESULTS / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    facts: dict[str, list[str]] = {}
    while lines[0].startswith("# "):
        key, _, value = lines.pop(0)[2:].partition(": ")
        facts.setdefault(key, []).append(value)
    headings, *body = csv.reader(lines)
    if {"seed", "draw"} & set(headings):
        headings, body = _of_runs(pd.DataFrame(body, columns=headings), facts)
    table = Table(facts, headings, body)
    if len(set(headings)) < len(headings) or len(table.rows) < len(body):
        raise ValueError(f"{name}.csv: rows and columns must have names of their own")
    return table


def _of_runs(runs: pd.DataFrame, facts: dict[str, list[str]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the means of runs, and of their differences to the baseline."""
    columns = list(runs.columns)
    place = next(k for k, name in enumerate(columns) if name in ("seed", "draw"))
    names, metrics = columns[:place], columns[place + 1 :]
    facts["names"] = [str(len(names))]
    text = facts.get("baseline", [""])[-1]
    of, _, baseline = text.removeprefix("this − ").partition("=")
    sign, order = (-1, "this − {}") if text.startswith("this − ") else (1, "{} − this")
    runs[metrics] = runs[metrics].apply(pd.to_numeric)  # Nothing stands for a run that diverged.
    runs = runs.set_index([*names, columns[place]])
    rows = []
    for key, own in runs.groupby(level=names, sort=False):
        cells = [_value(own[metric]) for metric in metrics]
        if of:
            paired = own.droplevel(of)
            differences = sign * (runs.xs(baseline, level=of).reindex(paired.index) - paired)
            is_other = dict(zip(names, key, strict=True))[of] != baseline
            cells += [
                _difference(differences[m]) if is_other else markdown.MISSING for m in metrics
            ]
        rows.append([*key, *cells])
    compared = [f"{order.format(baseline)}: {metric}" for metric in metrics] if of else []
    return [*names, *metrics, *compared], rows


def _value(values: pd.Series) -> str:
    deviation = f" ± {values.std():.1f}" if values.count() > 1 else ""
    return f"{values.mean():.1f}{deviation}"


def _difference(values: pd.Series) -> str:
    if values.count() < 2:
        return f"{values.mean():+.2f}".replace("-", "−")
    mean, half = mean_and_interval(values.dropna().to_numpy())
    text = f"{mean:+.2f} ± {half:.2f}".replace("-", "−")
    return f"{text} !" if abs(mean) > half else text


# Pages ----


def render(text: str) -> str:
    """A page with the tables, commands and numbers that the files have now."""

    def made(match: re.Match[str]) -> str:
        table = read(match[3])
        if match[2]:
            lines = ["", *(line for of in table.facts["command"] for line in _wrapped(of))]
        else:
            lines = table.markdown()
        return "\n".join([match[1], *lines, "", ""])

    return _QUOTE.sub(_quoted, _MADE.sub(made, text))


def _quoted(match: re.Match[str]) -> str:
    text, before, name, title = match.groups()
    try:
        number = read(name).number(title)
        sign, _, digits, half_digits = _NUMBER.fullmatch(text).groups()  # pyright: ignore
    except (AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"{match[0]}: {error!r}") from error
    value = _rounded(number.value, digits)
    new = f"{value:{'+' if sign else ''},}"
    if half_digits and number.half is not None:
        half = _rounded(number.half, half_digits.partition(".")[2])
        new += f" ± {half}"
        if number.is_difference and number.excludes_0 != (abs(value) > half):
            raise ValueError(f"{match[0]}: {new} hides that 0 is excluded: it needs more decimals")
    return f'[{new.replace("-", "−")}]({before}results/{name}.csv "{title}")'


def _rounded(value: float, digits: str | None) -> Decimal:
    """With as many decimals as `digits` has."""
    return Decimal(str(value)).quantize(Decimal(10) ** -len(digits or ""), ROUND_HALF_UP)


def _wrapped(command: str) -> Iterator[str]:
    """The lines of a command in a page."""
    line = "    "
    for option in re.split(" (?=--)", command):
        if len(line) + len(option) > 120 and line.strip():
            yield f"{line}\\"
            line = " " * 8
        line += f"{option} "
    yield line.rstrip()


# Figures ----


class Picture(NamedTuple):
    """What a figure shows of a table, one panel a column."""

    table: str
    common: str
    """What the headings of the columns have in common."""
    title: str
    is_transposed: bool = False
    """Whether the methods are the columns of the table."""
    curves: bool = False
    """Whether the last name of a row is a number of steps, to draw curves over them."""


FIGURES = {
    "integration-differences-800": Picture(
        "a-nca-800", "− sum", "Novel classes of the icons, 800 steps: differences to the sum"
    ),
    "integration-differences-3200": Picture(
        "a-nca-3200", "− sum", "Novel classes of the icons, 3,200 steps: differences to the sum"
    ),
    "metric-losses-differences": Picture(
        "a-metric-losses", "⊕ − +", "Novel classes of the icons: direct sum (⊕) minus sum (+)"
    ),
    "groups-grouping": Picture(
        "b-grouping",
        "difference to",
        "Test error of group softmax on 25 classes (lower is better)",
    ),
    "sphere-differences": Picture(
        "c-balanced",
        "dynamic − this",
        "Hyperspherical classification of the icons, d = 50: dynamic minus each other method",
    ),
    "longtail-differences": Picture(
        "c-longtail-three",
        "",
        "Long tail of the icons, three pairs: dynamic minus each other method",
    ),
    "kanji": Picture("d-losses", "mAP@", "Multi-label losses on kanji: mean average precision"),
    "kanji-differences": Picture(
        "d-losses", "this − two-way", "Multi-label losses on kanji: each loss minus two-way"
    ),
    "kanji-temperature": Picture(
        "d-temperature",
        "this − the author's",
        "Two-way loss on kanji: each setting minus the author's, T_P = 4 and ε = 0",
    ),
    "margin-differences": Picture(
        "e-icons",
        "",
        "Pre-training with a margin m, 25 base classes of the icons: differences to m = 0",
    ),
    "margin-radicals": Picture(
        "e-radicals", "-shot", "Margins from kanji radicals to icons: differences to m = 0"
    ),
    "margin-lengths": Picture(
        "e-lengths",
        "-shot",
        "Accuracy without a margin against the number of training steps",
        curves=True,
    ),
    "fine-tuning-margin": Picture(
        "e-finetuning",
        "− (m = 0)",
        "Fine-tuning with a margin m, validation classes of the icons: differences to m = 0",
        is_transposed=True,
    ),
}


def panels_of(picture: Picture) -> tuple[list[str], dict[str, list[Number | None]]]:
    """The headings of the columns that a figure shows, and the numbers of each row by its name."""
    table = read(picture.table)
    if picture.is_transposed:
        headings, *body = map(list, zip(table.headings, *table.body, strict=True))
        table = table._replace(headings=headings, body=body)
    differences = "−" in picture.common or not picture.common
    rows = {
        name: [number_of(cell) if " ± " in cell else None for cell in cells]
        for name, cells in table.rows.items()
    }
    shown = [
        k
        for k, heading in enumerate(table.headings)
        if k >= table.names and picture.common in heading and (differences or "−" not in heading)
        if any(numbers[k] for numbers in rows.values())
    ]
    chosen = {name: [numbers[k] for k in shown] for name, numbers in rows.items()}
    headings = [table.headings[k].replace(f"{picture.common}: ", "") for k in shown]
    return headings, {name: numbers for name, numbers in chosen.items() if any(numbers)}


def draw(picture: Picture) -> Figure:
    """A figure of differences with their intervals, or of means with their deviations."""
    headings, rows = panels_of(picture)
    columns = 2 if len(headings) == 4 else min(3, len(headings))
    lines = -(-len(headings) // columns)
    first = next(number for numbers in rows.values() for number in numbers if number)
    over = read(picture.table).fact("over", "pairs of runs")
    best = [
        (min if "↓" in heading else max)(row[k].value for row in rows.values() if row[k])
        for k, heading in enumerate(headings)
    ]
    figure = style.new_figure(
        1.2 + 0.075 * max(map(len, rows)) + 2.1 * columns,
        (0.55 + 0.3 * len(rows)) * lines,
        title=picture.title,
        caption=f"Means and 95 % intervals over {over}. Filled: the interval excludes 0."
        if first.is_difference
        else "Means and standard deviations over the seeds. Filled: the best of its column.",
    )
    for place, heading in enumerate(headings):
        panel = figure.add_subplot(lines, columns, place + 1)
        panel.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        for y, number in enumerate(numbers[place] for numbers in rows.values()):
            if number:
                filled = number.value == best[place]
                if first.is_difference:
                    filled = number.excludes_0
                _point(panel, y, number, filled=filled)
        panel.set_title(heading, size=style.MEDIUM)
        panel.set_yticks(range(len(rows)), rows if place % columns == 0 else [""] * len(rows))
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("points" if first.is_difference else "%")
        if first.is_difference:
            panel.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    return figure


def _point(panel: Any, y: float, number: Number, *, filled: bool) -> None:
    ground = style.BLUE if filled else "white"
    marker = {"marker": "o", "markersize": 5, "markerfacecolor": ground}
    half = number.half
    panel.errorbar(number.value, y, xerr=half, color=style.BLUE, elinewidth=1.6, **marker)


def draw_curves(picture: Picture) -> Figure:
    """A figure of means over steps, a line for each data set."""
    headings, rows = panels_of(picture)
    figure = style.new_figure(
        3.2 * len(headings),
        3.4,
        title=picture.title,
        caption="Means and standard deviations over the runs.",
    )
    for place, heading in enumerate(headings):
        panel = figure.add_subplot(1, len(headings), place + 1)
        lines: dict[str, list[tuple[float, ...]]] = {}
        for row, numbers in rows.items():
            of, _, steps = row.partition(", steps = ")
            if number := numbers[place]:
                point = (int(steps.replace(",", "")), number.value, number.half or 0)
                lines.setdefault(of, []).append(point)
        for k, (of, points) in enumerate(lines.items()):
            steps, values, bars = zip(*points, strict=True)
            panel.errorbar(steps, values, yerr=bars, capsize=2, label=of, **style.series_mark(k))
        panel.set_title(heading, size=style.MEDIUM)
        panel.set(xscale="log", xlabel="steps", ylabel="%" if place == 0 else "")
        panel.set_xticks(steps, [f"{step:,}" for step in steps])
        panel.minorticks_off()
        if place == len(headings) - 1:
            panel.legend(frameon=False, fontsize=style.SMALL, loc="lower right")
    return figure


def read_verdicts() -> list[dict[str, Any]]:
    """The rows of verdicts.csv, with the number of the cell that each of them names."""
    with (RESULTS / "verdicts.csv").open(encoding="utf-8") as file:
        verdicts = list(csv.DictReader(file))
    return [of | {"number": read(of["table"]).number(of["cell"])} for of in verdicts]


def draw_verdicts(verdicts: list[dict[str, Any]]) -> Figure:
    """A figure of differences below the names of their papers, and of what the papers have."""
    lines, papers = [], set()
    for of in verdicts:
        lines += [of] if of["paper"] in papers else [None, of]
        papers.add(of["paper"])
    figure = style.new_figure(
        7,
        0.5 + 0.21 * len(lines),
        title="Differences that test the papers' claims",
        caption="Points, with 95 % intervals; right: as the paper says; filled: 0 is excluded. "
        "Diamonds: the paper's or its authors', on other data (A: each method's best sampling; B: "
        "100 classes of ImageNet; C: CIFAR-100; D: MS-COCO; E: m = −0.3, validation classes). "
        "Rows without a diamond: no such number.",
    )
    panel = figure.add_subplot()
    names = [of["difference"] if of else lines[y + 1]["paper"] for y, of in enumerate(lines)]
    panel.set_yticks(range(len(lines)), names)
    for y, (of, label) in enumerate(zip(lines, panel.get_yticklabels(), strict=True)):
        if of is None:
            label.set_weight("bold")
            continue
        _point(panel, y, of["number"], filled=of["number"].excludes_0)
        published = [float(value) for value in of["published"].split()]
        panel.plot(published, [y - 0.3] * len(published), "D", color=style.ORANGE, markersize=4)
    panel.set_ylim(len(lines) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    panel.set_xlabel("points")
    return figure


def figures() -> Iterator[tuple[str, Figure]]:
    """All figures by the names of their files."""
    for name, picture in FIGURES.items():
        yield name, draw_curves(picture) if picture.curves else draw(picture)
    verdicts = read_verdicts()
    yield "verdicts", draw_verdicts(verdicts)
    for page in sorted({of["page"] for of in verdicts}):
        yield f"verdicts-{page}", draw_verdicts([of for of in verdicts if of["page"] == page])


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    with matplotlib.rc_context(style.STYLE):
        for name, figure in figures():
            write_picture(EXPERIMENTS / "figures" / f"{name}.png", figure)
