"""The small parts of Markdown reports: tables, numbers and headings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from experiments.core.protocol import Metric
from experiments.core.terminal import printable

MISSING = "–"  # Shown where there is no number.
_FACTORS_AND_DIGITS = {"%": (100.0, 1), "": (1.0, 2)}  # For every unit of a `Metric`.


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table: first column left, others centred, None as `MISSING`."""

    def cell(value: Any) -> str:
        return MISSING if value is None else plain(str(value)).replace("|", r"\|")

    text = tabulate(
        [[*map(cell, row)] for row in rows],
        headers=[*map(cell, headings)],
        tablefmt="pipe",
        disable_numparse=True,
        colalign=["left"] + ["center"] * (len(headings) - 1),
    )
    return text.splitlines()


def plain(text: str) -> str:
    """Text on one line, without HTML and named links: others may have chosen it."""
    return re.sub(r"[\\<[]", r"\\\g<0>", printable(" ".join(text.split())))


def heading(text: str) -> str:
    """A Markdown heading of the third level."""
    return f"### {plain(text)}"


def bullets(items: Iterable[str]) -> list[str]:
    """A Markdown list, one line an item."""
    return [f"- {plain(item)}" for item in items]


def scaled(value: Any, unit: str) -> Any:
    """A number in the unit that is printed: a fraction in per cent, any other number as it is."""
    return _FACTORS_AND_DIGITS[unit][0] * value


def format_value(value: float | None, unit: str, digits: int | None = None) -> str:
    """A number as tables print it: a fraction as `71.3`, a plain number as `1.23`."""
    if value is None:
        return MISSING
    digits = _FACTORS_AND_DIGITS[unit][1] if digits is None else digits
    return f"{scaled(value, unit):.{digits}f}"


def format_difference(value: float, unit: str, *, sign: str = "+") -> str:
    """A difference, with one digit more than values have, and by default a sign: `−1.30`."""
    text = f"{scaled(value, unit):{sign}.{_FACTORS_AND_DIGITS[unit][1] + 1}f}"
    return text.replace("-", "−")


def with_unit(name: str, unit: str) -> str:
    """The name of a metric with its unit."""
    return f"{name} ({unit})" if unit else name


def metric_heading(metric: Metric, *, difference: bool = False) -> str:
    """The name of a metric with its unit, and an arrow if lower is better.

    The unit of a difference between fractions is the percentage point.
    """
    unit = metric.unit.replace("%", "points") if difference else metric.unit
    return with_unit(metric.name, unit) + (" ↓" if metric.higher_is_better is False else "")
