"""The small parts of Markdown reports: tables, numbers and headings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from experiments.contracts import Metric

MISSING = "–"
"""Shown where there is no number."""

_FORMATS = {"%": (100.0, 1), "": (1.0, 2)}
"""For every unit of a `Metric`: the factor and the digits after the point."""
_ALIGNMENTS = {"l": "left", "c": "center", "r": "right"}


def table(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], *, align: str | None = None
) -> list[str]:
    """A Markdown table.

    Args:
      headings: One for each column.
      rows: Cells, printed with `str`; None is printed as `MISSING`.
      align: `l`, `c` or `r` for each column. By default, the first column is aligned left and all
        others are centred.

    Returns:
      Lines.
    """
    align = align or "l" + "c" * (len(headings) - 1)
    text = tabulate(
        [[_cell(value) for value in row] for row in rows],
        headers=[_cell(heading) for heading in headings],
        tablefmt="pipe",
        disable_numparse=True,
        colalign=[_ALIGNMENTS[letter] for letter in align],
    )
    return text.splitlines()


def bullets(items: Iterable[str]) -> list[str]:
    """A Markdown list, one line an item."""
    return [f"- {item}" for item in items]


def bold(text: str) -> str:
    """Text in bold."""
    return f"**{text}**"


def code(text: str) -> str:
    """Text as code, such as a command."""
    return f"`{text}`"


def scaled(value: float, unit: str) -> float:
    """A number in the unit that is printed: a fraction in per cent, any other number as it is."""
    return _FORMATS[unit][0] * value


def format_value(value: float | None, unit: str) -> str:
    """A number as tables print it: a fraction as `71.3`, a plain number as `1.23`.

    Args:
      value: None is printed as `MISSING`.
      unit: As in `Metric`.
    """
    return MISSING if value is None else f"{scaled(value, unit):.{_FORMATS[unit][1]}f}"


def percent(fraction: float | None) -> str:
    """A fraction in per cent, with one digit and without the sign."""
    return format_value(fraction, "%")


def metric_heading(metric: Metric) -> str:
    """The name of a metric with its unit, and an arrow if lower is better."""
    unit = f" ({metric.unit})" if metric.unit else ""
    return f"{metric.name}{unit}{'' if metric.higher_is_better else ' ↓'}"


def _cell(value: Any) -> str:
    return MISSING if value is None else str(value).replace("|", r"\|")
