"""Many evaluations of one run: values of evaluation options against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.config import Folders, get_option
from experiments.errors import ConfigError
from experiments.grid import check_not_set, make_cells, parse_axis, parse_comparison
from experiments.reporting import grid as reporting
from experiments.runs import (
    evaluation_of,
    read_episodes,
    read_report,
    restore_run,
    run_directory,
    with_evaluation,
    write_report,
)


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
      over: Axes of evaluation options, as `parse_axis` reads them.
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
    axes = [parse_axis(text, config) for text in over]
    swept = {option: "its values in --over" for axis in axes for option in axis.options}
    comparison = parse_comparison(axes, baseline=baseline)
    shared = with_evaluation(config, overrides)
    check_not_set(shared, config, swept)
    settings = setting_names(overrides)
    root = run_directory(path) / "evaluations" / ",".join([f"{split}-step{run.step}", *settings])
    cells = make_cells(shared, axes, [config.seed], root)
    changes = [dict(overrides) | {o: get_option(c.config, o) for o in swept} for c in cells]
    for changed in changes:
        with_evaluation(config, changed)
    evaluate, runs = evaluation_of(run, folders), []
    for number, (cell, changed) in enumerate(zip(cells, changes, strict=True), start=1):
        names = [f"{axis.name} = {at}" for axis, at in zip(axes, cell.place, strict=True)]
        print(f"[{number}/{len(cells)}]", ", ".join(names), flush=True)
        file = cell.directory / "report.json"
        report = read_report(file) if file.exists() else None
        if report is None:
            protocol, report = evaluate(split, changed)
            report["command"] = command
            cell.directory.mkdir(parents=True, exist_ok=True)
            write_report(cell.directory, protocol, report)
        runs.append(reporting.Run(cell.place, report, read_episodes(cell.directory)))
    # Values such as the number of shots have metrics of their own.
    available = dict.fromkeys(metric["name"] for run in runs for metric in run.report["metrics"])
    _check_metrics(metrics, available)
    return reporting.write_grid(
        root,
        [reporting.Axis(axis.name, axis.labels) for axis in axes],
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


def _check_metrics(names: Sequence[str], available: Iterable[str]) -> None:
    for name in names:
        if name not in available:
            raise ConfigError(f"--metrics: no metric {name!r}; available: {', '.join(available)}")
