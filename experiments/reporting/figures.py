"""The picture of a comparison: every method and sampling with its uncertainty."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.files import write_picture
from experiments.loss_names import FAMILIES, parse_loss
from experiments.reporting.colors import BLUE, GREEN, INK, ORANGE, PURPLE, VERMILLION
from experiments.reporting.summary import (
    sampling_name,
    sampling_order,
    summarize,
)

_COLORS = dict(zip(FAMILIES.values(), (BLUE, ORANGE, GREEN, VERMILLION, PURPLE), strict=True))
_MARKERS = "sD^vPX*<>hp"
_DPI = 150

# Inches. The layout is reckoned in them, so that one method and twenty look alike.
_PANEL_WIDTH = 4.0
_GAP = 0.3
_LEGEND_WIDTH = 1.9
_LEGEND_LINE = 0.215
_MARK = 0.13
_BETWEEN_METHODS = 0.17
_CAPTION_LINE = 0.165
_TITLE_LINE = 0.25
_BELOW_AXES = 0.7
_MARGIN = 0.15


def comparison_figure(
    cells: Sequence[dict[str, Any]], path: Path, *, title: str, command: str
) -> None:
    """Draw the accuracy of every method and sampling, a panel for each number of shots.

    Args:
      cells: Runs, as `experiments.reporting.summary` describes them; at least one.
      path: The PNG file to write.
      title: What is compared.
      command: What was typed to get it; stands below the picture.

    Raises:
      ValueError: There is no cell.
    """
    rows = summarize(cells)
    if not rows:
        raise ValueError("there is no run to draw")
    labels = {row["loss"]: row["label"] for row in rows}
    samplings = sorted({row["sampling"] for row in rows}, key=sampling_order)
    shots = sorted({result["shots"] for row in rows for result in row["results"]})
    legends = _legend_entries(rows, samplings)

    pitch = _MARK * len(samplings) + _BETWEEN_METHODS
    legend_lines = sum(len(handles) + 1.8 for _, handles in legends)
    height = max(pitch * len(labels), _LEGEND_LINE * legend_lines)
    left = 0.75 + 0.085 * max(map(len, labels.values()))
    width = left + (_PANEL_WIDTH + _GAP) * len(shots) + _LEGEND_WIDTH
    heading = textwrap.wrap(title, int(width * 8.5))
    caption = _caption(rows, command, columns=int(width * 14.5))
    bottom = _MARGIN + _CAPTION_LINE * len(caption) + _BELOW_AXES
    total = bottom + height + 0.4 + _TITLE_LINE * len(heading) + _MARGIN

    figure = Figure(figsize=(width, total), dpi=_DPI)
    FigureCanvasAgg(figure)
    at_left = _MARGIN / width
    figure.text(
        at_left, 1 - _MARGIN / total, _math("\n".join(heading)), size=13, weight="bold", va="top"
    )
    figure.text(
        *(at_left, _MARGIN / total, _math("\n".join(caption))),
        size=8,
        color=INK,
        va="bottom",
        linespacing=1.3,
    )
    for number, shot in enumerate(shots):
        corner = left + number * (_PANEL_WIDTH + _GAP)
        axes = figure.add_axes(
            (corner / width, bottom / total, _PANEL_WIDTH / width, height / total)
        )
        _draw_panel(axes, rows, list(labels), samplings, shot)
        axes.set_title(f"{shot}-shot", size=11)
        axes.set_xlabel("Accuracy (%)")
        axes.set_yticks(range(len(labels)), [_math(label) for label in labels.values()])
        axes.tick_params(axis="y", length=0, labelleft=number == 0)
        if number == 0:
            axes.set_ylabel("Method")
    top = bottom + height
    for heading_text, handles in legends:
        figure.legend(
            handles=handles,
            title=heading_text,
            loc="upper left",
            bbox_to_anchor=(1 - _LEGEND_WIDTH / width, top / total),
            borderaxespad=0,
            frameon=False,
            fontsize=9,
            title_fontsize=9,
            alignment="left",
        )
        top -= _LEGEND_LINE * (len(handles) + 1.8)
    write_picture(path, figure)


def _draw_panel(
    axes: Axes, rows: list[dict[str, Any]], losses: list[str], samplings: list[str], shots: int
) -> None:
    share = _MARK / (_MARK * len(samplings) + _BETWEEN_METHODS)
    places = [parse_loss(loss).order[0] for loss in losses]
    for place in range(len(losses)):
        if places[place] % 2:
            axes.axhspan(place - 0.5, place + 0.5, color="#f3f3f3", zorder=0)
    for row in rows:
        result = next((r for r in row["results"] if r["shots"] == shots), None)
        if result is None:
            continue
        number = samplings.index(row["sampling"])
        y = losses.index(row["loss"]) + share * (number - (len(samplings) - 1) / 2)
        color, marker = _COLORS[row["family"]], _marker(samplings, row["sampling"])
        if len(result["accuracies"]) > 1:
            seeds = [100 * a for a in result["accuracies"]]
            axes.plot([min(seeds), max(seeds)], [y, y], color=color, linewidth=0.7, zorder=2)
            axes.plot(seeds, [y] * len(seeds), "|", color=INK, markersize=6, zorder=4)
        axes.errorbar(
            *(100 * result["accuracy"], y),
            xerr=100 * result["interval"],
            color=color,
            marker=marker,
            markersize=5.5,
            markeredgecolor=INK,
            markeredgewidth=0.5,
            ecolor=color,
            elinewidth=1.6,
            zorder=3,
        )
    axes.set_ylim(len(losses) - 0.5, -0.5)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.margins(x=0.06)
    axes.locator_params(axis="x", nbins=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend_entries(
    rows: list[dict[str, Any]], samplings: list[str]
) -> list[tuple[str, list[Line2D]]]:
    def mark(label: str, marker: str, color: str) -> Line2D:
        return Line2D(
            *([], []),
            linestyle="",
            marker=marker,
            markersize=6,
            color=color,
            markeredgecolor=INK,
            markeredgewidth=0.5,
            label=label,
        )

    families = list(dict.fromkeys(row["family"] for row in rows))
    lines = [Line2D([], [], color=INK, linewidth=1.6, label="95 % interval")]
    if any(result["spread"] is not None for row in rows for result in row["results"]):
        lines.append(
            Line2D([], [], linestyle="", marker="|", markersize=6, color=INK, label="one seed")
        )
    return [
        ("Loss (colour)", [mark(family, "o", _COLORS[family]) for family in families]),
        (
            "Training batch (shape)",
            [mark(sampling_name(s), _marker(samplings, s), "white") for s in samplings],
        ),
        ("Lines", lines),
    ]


def _marker(samplings: list[str], sampling: str) -> str:
    """Random batches are circles in every figure; they stand last among the samplings."""
    return "o" if sampling == "random" else _MARKERS[samplings.index(sampling) % len(_MARKERS)]


def _caption(rows: list[dict[str, Any]], command: str, *, columns: int) -> list[str]:
    episodes = sorted({n for row in rows for result in row["results"] for n in result["episodes"]})
    text = (
        f"Mean accuracy over {' or '.join(f'{n:,}' for n in episodes)} evaluation episodes. "
        "Bars: 95 % confidence interval of the mean over episodes."
    )
    if any(result["spread"] is not None for row in rows for result in row["results"]):
        text += " Where several seeds were trained, the mark is their mean, and each tick is one."
    return [
        *textwrap.wrap(text, columns),
        *textwrap.wrap(f"Command: {command}", columns, break_on_hyphens=False),
    ]


def _math(text: str) -> str:
    # The font sets a combining tilde beside its ⊕; TeX's accent sits on top.
    return text.replace("$", r"\$").replace("⊕\N{COMBINING TILDE}", r"$\tilde{\oplus}$")
