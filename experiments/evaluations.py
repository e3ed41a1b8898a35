"""Many evaluations of one run: values of evaluation options against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.config import Folders
from experiments.grid import (
    check_metrics,
    check_not_set,
    make_axes,
    make_cells,
    parse_comparison,
    parse_over,
)
from experiments.reporting import results
from experiments.reporting.grid import write_grid
from experiments.reporting.run import read_episodes, read_report, write_report
from experiments.restored import evaluation_of, restore_run, run_directory, with_evaluation


def evaluate_over(
    path: Path,
    folders: Folders,
    over: Sequence[str],
    *,
    split: str | None = None,
    which: str = "best",
    overrides: Mapping[str, Any],
    metrics: Sequence[str] = (),
    baseline: str = "",
    command: str,
) -> list[Path]:
    """Evaluates a checkpoint at all combinations of values; writes their table and figure.

    Evaluations are kept in RUN/evaluations/SPLIT-stepSTEP/OPTION=VALUE/...; those that are there
    are read, not repeated.

    Args:
      path, folders, split, which: As in `evaluate_run`.
      over: Evaluation options and their values, as `parse_over` reads them.
      overrides: Values, by option, that all evaluations share and the run does not have.
      metrics: Those that the table and figure show, in this order; by default all that any of the
        evaluations has.
      baseline: As in `parse_comparison`. Evaluations with the same episodes are compared episode by
        episode.
      command: What was typed.

    Returns:
      The paths of the table, its JSON and the figures.

    Raises:
      CheckpointError: There is no such checkpoint, or none is intact.
      ConfigError: An option is not one of the evaluation, a value is out of bounds, the classes
        do not give the evaluation, or there is no such split, metric or baseline.
    """
    run = restore_run(path, which)
    config, split = run.plan.config, split or run.plan.protocol.splits[-1]
    positions = [parse_over(text, config) for text in over]
    axes = [axis for at in positions for axis in make_axes(at)]
    comparison = parse_comparison(axes, baseline=baseline)
    shared = with_evaluation(config, overrides)
    swept = {option: "its values in --over" for at in positions for option in at[0]}
    check_not_set(shared, config, swept)
    settings = setting_names(overrides)
    root = run_directory(path) / "evaluations" / ",".join([f"{split}-step{run.step}", *settings])
    cells = make_cells(shared, positions, [config.seed], root)
    for cell in cells:
        with_evaluation(config, {**overrides, **cell.settings})
    evaluate, runs = evaluation_of(run, folders), []
    for number, cell in enumerate(cells, start=1):
        print(f"[{number}/{len(cells)}] {cell.describe(axes)}", flush=True)
        file = cell.directory / "report.json"
        report = read_report(file) if file.exists() else None
        if report is None:
            protocol, report = evaluate(split, {**overrides, **cell.settings})
            report["command"] = command
            cell.directory.mkdir(parents=True, exist_ok=True)
            write_report(cell.directory, protocol, report)
        runs.append(results.Run(cell.place(axes), report, read_episodes(cell.directory)))
    # Values such as the number of shots have metrics of their own.
    available = dict.fromkeys(metric["name"] for run in runs for metric in run.report["metrics"])
    check_metrics(metrics, available)
    return write_grid(
        root,
        [results.Axis(axis.name, tuple(axis.labels.values())) for axis in axes],
        runs,
        title=f"{runs[0].report['label']} on {config.data.name}, {split} split",
        command=command,
        metrics=metrics or list(available),
        comparison=comparison,
    )


def setting_names(overrides: Mapping[str, Any]) -> list[str]:
    """Options with their values, for names of files."""
    return [
        f"{option}={'+'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for option, value in overrides.items()
    ]
