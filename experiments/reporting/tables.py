"""The table of a comparison: methods against sampling strategies, as in the paper.

What a cell is, `experiments.reporting.summary` tells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.files import write_atomically
from experiments.loss_names import FAMILIES, parse_loss
from experiments.reporting.figures import comparison_figure
from experiments.reporting.summary import (
    sampling_name,
    sampling_order,
    summarize,
)

_MISSING = "–"
_DIVERGED = "diverged"


def markdown_table(
    cells: Sequence[dict[str, Any]], *, command: str, title: str = "Few-shot accuracy"
) -> str:
    """The comparison as a Markdown table with a caption that explains every symbol.

    Args:
      cells: Runs, as `experiments.reporting.summary` describes them.
      command: What was typed last, for cells that do not tell their own.
      title: First line.
    """
    rows = summarize(cells)
    if not rows:
        return f"### {title}\n\nNo run has finished yet.\n\nCommand: `{command}`\n"
    samplings = sorted({row["sampling"] for row in rows}, key=sampling_order)
    shots = sorted({result["shots"] for row in rows for result in row["results"]})
    by_key = {(row["loss"], row["sampling"]): row for row in rows}
    labels = {row["loss"]: row["label"] for row in rows}
    best = {loss: _best_sampling(rows, loss, shots[0]) if shots else None for loss in labels}
    lines = [
        f"### {title}",
        "",
        f"| Method | {' | '.join(sampling_name(s) for s in samplings)} |",
        f"|:--{'|:-:' * len(samplings)}|",
    ]
    for family in FAMILIES.values():
        members = [loss for loss in labels if parse_loss(loss).heading == family]
        if members:
            lines.append(f"| **{family} loss** |{' |' * len(samplings)}")
        for loss in members:
            entries = [
                _entry(by_key.get((loss, s)), shots, bold=s == best[loss]) for s in samplings
            ]
            lines.append(f"| {labels[loss]} | {' | '.join(entries)} |")
    return "\n".join([*lines, "", *_caption(cells, rows, samplings, shots, command)]) + "\n"


def json_report(cells: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """The comparison for programs: the commands, the rows of `summarize`, and the cells."""
    return {"commands": commands_of(cells, command), "rows": summarize(cells), "cells": list(cells)}


def write_report(
    directory: Path,
    cells: Sequence[dict[str, Any]],
    command: str,
    *,
    title: str = "Few-shot accuracy",
) -> list[Path]:
    """Write table.md, table.json and figure.png; files that are there are replaced.

    Args:
      directory: Where to; made if it does not exist.
      cells: Runs, as `experiments.reporting.summary` describes them.
      command: What was typed last, for cells that do not tell their own.
      title: Title of the table and the figure.

    Returns:
      The paths written. Without a result there is no figure.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text = markdown_table(cells, command=command, title=title)
    drawn = any(cell["results"] for cell in cells)
    if drawn:
        text += "\n![Accuracy of every method and sampling](figure.png)\n"
    report = json.dumps(json_report(cells, command), indent=2, ensure_ascii=False) + "\n"
    paths = [
        write_atomically(directory / "table.md", text),
        write_atomically(directory / "table.json", report),
    ]
    if drawn:
        figure = directory / "figure.png"
        commands = "; ".join(commands_of(cells, command))
        comparison_figure(cells, figure, title=title, command=commands)
        paths.append(figure)
    return paths


def _result(row: dict[str, Any] | None, shots: int) -> dict[str, Any] | None:
    return next((r for r in row["results"] if r["shots"] == shots), None) if row else None


def _best_sampling(rows: list[dict[str, Any]], loss: str, shots: int) -> str | None:
    """The sampling of the highest accuracy; None where there is nothing to choose from."""
    found = [
        (result["accuracy"], row["sampling"])
        for row in rows
        if row["loss"] == loss and (result := _result(row, shots))
    ]
    return max(found, key=lambda pair: pair[0])[1] if len(found) > 1 else None


def _entry(row: dict[str, Any] | None, shots: list[int], *, bold: bool) -> str:
    if row is None:
        return _MISSING
    if len(row["diverged"]) == len(row["seeds"]):
        return _DIVERGED
    parts = []
    for shot in shots:
        result = _result(row, shot)
        if result is None:
            parts.append(_MISSING)
            continue
        part = f"{_percent(result['accuracy'])} ± {_percent(result['interval'])}"
        if result["spread"] is not None:
            part += f" (seeds {_percent(result['spread'])})"
        parts.append(part)
    text = ", ".join(parts)
    if row["diverged"]:
        text += f" ({len(row['diverged'])} of {len(row['seeds'])} seeds {_DIVERGED})"
    return f"**{text}**" if bold else text


def _caption(
    cells: Sequence[dict[str, Any]],
    rows: list[dict[str, Any]],
    samplings: list[str],
    shots: list[int],
    command: str,
) -> list[str]:
    measured = [cell for cell in cells if "diverged" not in cell] or cells
    place = _common(measured, "data")
    split = _common(measured, "split")
    several = any(result["spread"] is not None for row in rows for result in row["results"])
    each = f"Each entry gives {' and '.join(f'{s}-shot' for s in shots)} evaluation"
    each += ", in this order." if len(shots) > 1 else "."
    lines = [
        f"- Accuracy in %{f' on {place}' if place else ''}{f', {split} classes' if split else ''}. "
        + (each if shots else ""),
        "- a ± b: mean accuracy over episodes, and half the width of its 95 % confidence interval"
        + (" (averaged over seeds)." if several else "."),
    ]
    if several:
        lines.append(
            "- (seeds c): several runs were trained that differ in their seed; a is their mean, c "
            "the largest minus the smallest."
        )
    evaluation = _common(measured, "evaluation")
    if evaluation:
        distance = evaluation["distance"].replace("euclidean", "Euclidean")
        lines.append(
            f"- An evaluation episode has {evaluation['ways']} classes, K labelled images of each "
            f"(K-shot), and {evaluation['queries']} images of each to classify by the nearest "
            f"class mean in {distance} distance."
        )
    if any(sampling != "random" for sampling in samplings):
        lines.append(
            "- Columns tell how a training batch is drawn: N-way K-shot takes N classes with K "
            "images of each"
            + ("; a random batch pays no regard to classes." if "random" in samplings else ".")
        )
    if any(row["diverged"] for row in rows):
        lines.append(
            f"- {_DIVERGED}: the loss, its gradient or the features became infinite or not a "
            "number; what was measured is of the other seeds."
        )
    if len(samplings) > 1 and shots:
        lines.append(f"- Bold: the best sampling of a method by {shots[0]}-shot accuracy.")
    if len(rows) < len({row["loss"] for row in rows}) * len(samplings):
        lines.append(f"- The mark {_MISSING}: not run.")
    notation = _notation(measured, rows)
    if notation:
        lines.append(f"- {notation}")
    for shot in shots:
        results = [r for row in rows if (r := _result(row, shot))]
        counts = sorted({n for r in results for n in r["episodes"]})
        hashes = sorted({h for r in results for h in r["hashes"]})
        line = f"- {shot}-shot: {' or '.join(f'{n:,}' for n in counts)} episodes, "
        if len(hashes) == 1:
            line += f"the same for every run (episode list `{hashes[0]}`)"
        else:
            shown = ", ".join(f"`{h}`" for h in hashes[:4]) + (", …" if len(hashes) > 4 else "")
            line += f"**not the same for every run** (episode lists {shown}): compare with care"
        lines.append(line)
    seconds = sum(row["seconds"] for row in rows)
    if seconds:
        runs = f"{len(cells)} runs, together" if len(cells) > 1 else "1 run,"
        lines.append(f"- {runs} {seconds / 60:.1f} minutes")
    return [*lines, *(f"- Command: `{text}`" for text in commands_of(cells, command))]


def commands_of(cells: Sequence[dict[str, Any]], command: str) -> list[str]:
    """The commands that gave the cells, each once; `command` for cells that do not tell."""
    return list(dict.fromkeys(cell.get("command", command) for cell in cells)) or [command]


def _notation(cells: Sequence[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    names = {
        "sce": "SCE: softmax cross-entropy",
        "bce": "BCE: sigmoid cross-entropy",
        "nca": "NCA: neighbourhood component analysis",
        "proto": "Proto: prototypical loss",
    }
    losses = [parse_loss(row["loss"]) for row in rows]
    used = {part for loss in losses for part in (loss.classification, loss.metric)}
    parts = [text for name, text in names.items() if name in used]
    families = {loss.family for loss in losses}
    if "sum" in families:
        parts.append("A+B: sum of two losses on the same features")
    if "direct" in families:
        parts.append("A⊕B: B acts in the complement of the subspace that A's classifier spans")
    if "spectral" in families:
        spectral = [cell for cell in cells if parse_loss(cell["loss"]).family == "spectral"]
        power = _common(spectral, "power")
        parts.append(
            "A⊕̃B: the same with a soft, spectral complement"
            + (f" of exponent p = {power:g}" if power is not None else "")
        )
    if _common(cells, "num_features"):
        parts.append(f"features have {_common(cells, 'num_features'):,} dimensions")
    return "; ".join(parts) + "." if parts else ""


def _common(cells: Sequence[dict[str, Any]], key: str) -> Any:
    values = [cell.get(key) for cell in cells]
    return values[0] if all(value == values[0] for value in values) else None


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"
