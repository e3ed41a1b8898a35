"""The caption of a grid's tables: a sentence for every symbol that occurs in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from experiments.contracts import Metric
from experiments.reporting.entries import VALIDATION, Axis, Entry, Found, Run, seeds_of
from experiments.reporting.markdown import MISSING, code
from experiments.reporting.run import code_version

_INTERVAL = "half the width of its 95 % confidence interval over evaluation episodes"


def symbol_lines(axes: Sequence[Axis], runs: Sequence[Run], found: Found) -> list[str]:
    """What the entries and the headings of the tables mean.

    Args:
      axes: Those of the tables.
      runs: Those of the tables.
      found: The entries of the tables.
    """
    rows, *others = axes
    columns = [
        [values.get((label, *rest)) for label in rows.labels]
        for values in found.values()
        for rest in itertools.product(*(axis.labels for axis in others))
    ]
    missing = any(
        not (entry and (entry.values or entry.diverged)) for column in columns for entry in column
    )
    known = [[entry for entry in column if entry and entry.values] for column in columns]
    return [
        *_value_lines(seeds_of(runs), list(itertools.chain.from_iterable(known))),
        *_comparison_lines(len(seeds_of(runs)), known, list(found)),
        *([f"{MISSING}: no result."] if missing else []),
        *_validation_lines(runs, list(found)),
    ]


def run_lines(runs: Sequence[Run], command: str) -> list[str]:
    """What is known of the runs: those that diverged, notes, time, code and commands.

    Args:
      runs: All runs.
      command: For runs that do not state their own.
    """
    lines = []
    if diverged := [_name(run) for run in runs if "diverged" in run.report]:
        lines.append(
            "Diverged (the loss, its gradient or the features are not finite): "
            f"{'; '.join(diverged)}."
        )
    lines += [f"{_name(run)}: {note}" for run in runs for note in run.report.get("notes") or []]
    minutes = sum(run.report.get("seconds") or 0 for run in runs) / 60
    digits = 0 if minutes >= 10 else 1
    number = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    lines.append(f"{number}, {minutes:.{digits}f} minutes in total.")
    if versions := dict.fromkeys(text for run in runs if (text := code_version(run.report))):
        lines.append(f"Code: {'; '.join(versions)}.")
    commands = dict.fromkeys(run.report.get("command") or command for run in runs)
    return [*lines, *(f"Command: {code(typed)}" for typed in commands)]


def _value_lines(seeds: Sequence[int], entries: Sequence[Entry]) -> Iterator[str]:
    """What a number is, and over which seeds."""
    names = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    intervals = any(entry.interval is not None for entry in entries)
    if any(len(entry.values) > 1 for entry in entries):
        yield f"a ± b: mean and standard deviation over the {names}."
        if intervals:
            yield f"a ± b of a single seed: the value and {_INTERVAL}."
    else:
        if intervals:
            yield f"a ± b: the value and {_INTERVAL}."
        yield f"Trained with {names}."
    if any(len(entry.values) < len(seeds) for entry in entries):
        yield f"(k of {len(seeds)}): results of k seeds; the others diverged or are not finished."


def _comparison_lines(
    num_seeds: int, columns: Sequence[Sequence[Entry]], metrics: Sequence[Metric]
) -> Iterator[str]:
    """What is compared, and in which direction."""
    if any(sum(len(entry.values) == num_seeds for entry in column) > 1 for column in columns):
        yield f"Bold: the best of a column{' among entries of all seeds' * (num_seeds > 1)}."
    if any(not metric.higher_is_better for metric in metrics):
        yield "↓: lower is better."


def _validation_lines(runs: Sequence[Run], metrics: Sequence[Metric]) -> Iterator[str]:
    stated = [run.report[VALIDATION]["name"] for run in runs if run.report.get(VALIDATION)]
    if stated and any(metric.name == VALIDATION for metric in metrics):
        names = " or ".join(dict.fromkeys(stated))
        yield f"{VALIDATION}: {names} on the validation split, by which the checkpoint was chosen."


def _name(run: Run) -> str:
    return f"{', '.join(run.place)} (seed {run.report['seed']})"
