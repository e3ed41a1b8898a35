"""Many runs, or many evaluations of one run, each of which is a directory that is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from experiments.core.config import (
    Folders,
    TrainConfig,
    check_option,
    option_types,
    parse_option,
    set_options,
)
from experiments.core.errors import ConfigError, unknown
from experiments.core.processes import agree, on_first
from experiments.core.storage import component
from experiments.papers import build_protocol, config_to_dict
from experiments.reporting.grid import ALL, VALIDATION, Axis, Comparison, GridRun, Place
from experiments.reporting.grid_report import write_grid
from experiments.reporting.run import read_episodes, read_report, report_text, write_report
from experiments.run import (
    complete_run,
    evaluate,
    load_run,
    plan_run,
    prepare_and_count,
    split_of,
    with_evaluation,
)
from experiments.training.run_directory import check_run_directory

_ALL_AT_0 = ("data.classes", "data.samples_per_class")  # Their value 0 means all.


def parse_axis(text: str, config: TrainConfig) -> Axis:
    """Parses `OPTION=VALUE,VALUE,...`, or `OPTION/OPTION=VALUE/VALUE,VALUE/VALUE,...`.

    Options are those of `config`. The numbers of an option that takes several are joined by `+`.
    The axis is named after its first option if that distinguishes the positions.
    """
    names, _, values = text.partition("=")
    types = option_types(config)
    if not values:
        raise ConfigError(f"{text!r} must be OPTION=VALUE,VALUE,..., as loss.name=softmax,loose")
    options = [check_option(name, types) for name in names.split("/")]
    if "seed" in options:
        raise ConfigError("seed is not an axis: use --seeds")
    settings = []
    for position in values.split(","):
        parts = position.split("/", len(options) - 1)
        if len(parts) < len(options):
            count = f"{len(parts)} values for {len(options)} options"
            raise ConfigError(f"{text!r}: {position!r} has {count}")
        at = {o: parse_option(types[o], o, part) for o, part in zip(options, parts, strict=True)}
        if at in settings:
            raise ConfigError(f"{text!r}: the value {position!r} is repeated")
        settings.append(at)
    if len({at[options[0]] for at in settings}) == len(settings):
        options = options[:1]
    labels = (
        "/".join(ALL if o in _ALL_AT_0 and at[o] == 0 else option_text(at[o]) for o in options)
        for at in settings
    )
    return Axis("/".join(options), tuple(labels), tuple(settings))


def option_text(value: Any) -> str:
    """The value of an option as it is typed on an axis."""
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def setting_names(settings: Mapping[str, Any]) -> list[str]:
    """Options with their values, for names of files."""
    return [f"{option}={option_text(value)}" for option, value in settings.items()]


def parse_comparison(
    axes: Sequence[Axis],
    config: TrainConfig,
    baseline: str = "",
    pairs_over: str = "",
    choose: str = "",
) -> Comparison:
    """How the runs on some axes are compared: `OPTION=VALUE` of an axis, and names of others.

    An axis has the names of its options, too.
    """
    named = {name: axis.name for axis in axes for name in (axis.name, *axis.settings[0])}
    typed = (name.replace("-", "_") for name in (pairs_over, choose))
    pairs_over, choose = (named.get(name, name) for name in typed)
    left = [axis for axis in axes if axis.name not in (pairs_over, choose)]
    if not left or len(axes) - len(left) != bool(pairs_over) + bool(choose):
        raise ConfigError(
            "--pairs-over and --choose must name different axes, and leave one for the table; got "
            f"{', '.join(filter(None, (pairs_over, choose)))}, and the axes are "
            f"{', '.join(axis.name for axis in axes)}"
        )
    wanted = parse_axis(baseline, config).settings if baseline else ()
    found = [
        (axis.name, label)
        for axis in left
        for label, settings in zip(axis.labels, axis.settings, strict=True)
        if len(axis.labels) > 1 and any(at.items() <= settings.items() for at in wanted)
    ]
    if baseline and not len(found) == len(wanted) == 1:
        labels = (f"{axis.name} has {', '.join(axis.labels)}" for axis in axes)
        raise ConfigError(
            f"--baseline {baseline} must be one label of an axis of several that is not in "
            f"--pairs-over or --choose; {len(found)} labels have this value; {'; '.join(labels)}"
        )
    return Comparison(found[0] if found else None, pairs_over, choose)


class Cell(NamedTuple):
    """One run of a grid, or one evaluation."""

    place: Place
    settings: dict[str, Any]  # Values of options, such as `loss.name`.
    config: TrainConfig
    directory: Path


def make_cells(
    config: TrainConfig, axes: Sequence[Axis], seeds: Iterable[int], root: Path
) -> list[Cell]:
    """All runs of a grid, seed by seed, in ROOT/OPTION=VALUE/.../seed-SEED."""
    options = [option for axis in axes for option in axis.settings[0]]
    if len({*options}) < len(options):
        raise ConfigError(f"two axes have the same option: {', '.join(options)}")
    cells = []
    positions = (zip(axis.labels, axis.settings, strict=True) for axis in axes)
    for seed, *at in itertools.product(dict.fromkeys(seeds), *positions):
        place, parts = zip(*at, strict=True)
        settings = {option: value for part in parts for option, value in part.items()}
        folders = [component(",".join(setting_names(part))) for part in parts]
        of_cell = set_options(config, {**settings, "seed": seed})
        cells.append(Cell(place, settings, of_cell, root.joinpath(*folders, f"seed-{seed}")))
    if len({cell.directory for cell in cells}) < len(cells):
        raise ConfigError("two values of --over have the same directory; name them differently")
    return cells


def _announced(cells: Sequence[Cell], axes: Sequence[Axis]) -> Iterator[Cell]:
    """The runs; prints each as it begins: `[1/8] loss.name = softmax, seed 0`."""
    for number, cell in enumerate(cells, start=1):
        at = [f"{a.name} = {label}, " for a, label in zip(axes, cell.place, strict=True)]
        print(f"[{number}/{len(cells)}] {''.join(at)}seed {cell.config.seed}", flush=True)
        yield cell


def run_grid(
    config: TrainConfig,
    axes: Sequence[Axis],
    seeds: Sequence[int],
    root: Path,
    folders: Folders,
    *,
    comparison: Comparison,
    command: str,
    title: str = "",
    metrics: Sequence[str] = (),
    **how: Any,
) -> tuple[list[Path], list[str]]:
    """Trains and evaluates the missing runs of a grid, and writes its table and figure.

    Everything that makes a run impossible, or leaves a metric or a choice without runs, is an error
    before any training. `how` is what else `complete_run` takes. The title is by default the
    protocol, the data set and, if there is one, the loss.

    Returns:
      The files of the report, the table first; and a line for every run that diverged.
    """
    cells = make_cells(config, axes, seeds, root)
    plans = [plan_run(cell.config) for cell in cells]
    pair_metrics = plans[0].protocol.pair_metrics if comparison.baseline else None
    available = [metric for plan in plans for metric in plan.metrics]
    available += pair_metrics.metrics if pair_metrics else ()
    _check_metrics(metrics, [*(metric.name for metric in available), VALIDATION])
    agree("runs", {str(number): str(cell.settings) for number, cell in enumerate(cells, start=1)})
    for cell, plan in zip(cells, plans, strict=True):
        fixed = cell.config.fixed_steps()
        check_run_directory(cell.directory, config_to_dict(plan.config), fixed_steps=fixed)
    for plan in plans:
        held_out = plan.protocol.splits[1]
        if held_out not in prepare_and_count(plan, folders) and comparison.choose:
            raise ConfigError(
                f"--choose needs the split {held_out}, which {config.data.name} lacks with these "
                "options; hold images out, for example with --data.holdout 0.2"
            )
    reports, diverged = [], []
    for cell, plan in zip(_announced(cells, axes), plans, strict=True):
        found = complete_run(plan, cell.directory, folders, command=command, **how)
        reports.append(found)
        if "diverged" in found:
            diverged.append(f"{cell.directory}: {found['diverged']}")
            print(found["diverged"], flush=True)
    labels = {plan.protocol.description["label"] for plan in plans}
    loss = labels if len(labels) == 1 else ()  # The axes name several.

    def write() -> list[Path]:
        finished = zip(cells, reports, strict=True)
        return write_grid(
            root,
            axes,
            [GridRun(cell.place, of, read_episodes(cell.directory)) for cell, of in finished],
            title=title or ", ".join([f"{config.protocol} on {config.data.name}", *loss]),
            command=command,
            metrics=metrics,
            comparison=comparison,
            pair_metrics=pair_metrics,
        )

    return on_first(write) or [], diverged


def evaluate_over(
    path: Path,
    folders: Folders,
    over: Sequence[str],
    *,
    split: str | None = None,
    checkpoint: str = "best",
    overrides: dict[str, Any],
    metrics: Sequence[str] = (),
    baseline: str = "",
    command: str,
) -> list[Path]:
    """Evaluates a checkpoint at all combinations of values; writes their table and figure.

    Evaluations are kept in RUN/evaluations/SPLIT-stepSTEP/OPTION=VALUE/...; those that are there
    are read, not repeated. Values of `overrides` are those that all evaluations share and the run
    does not have. Metrics are by default those of the reports, in their order.
    """
    run = load_run(path, checkpoint)
    config, split = run.plan.config, split_of(run.plan, split)
    axes = [parse_axis(text, config) for text in over]
    comparison = parse_comparison(axes, config, baseline=baseline)
    shared = with_evaluation(config, overrides)
    check_not_set(shared, config, {o: "its values in --over" for a in axes for o in a.settings[0]})
    name = component(",".join([f"{split}-step{run.step}", *setting_names(overrides)]))
    root = run.directory / "evaluations" / name
    cells = make_cells(shared, axes, [config.seed], root)
    for cell in cells:
        with_evaluation(config, overrides | cell.settings)
    evaluated = []
    for cell in _announced(cells, axes):
        protocol = build_protocol(cell.config)
        report = read_report(cell.directory / "report.json", partial(report_text, protocol))
        if report is None:
            report = evaluate(run, overrides | cell.settings, split=split, folders=folders)
            report["command"] = command
            cell.directory.mkdir(parents=True, exist_ok=True)
            write_report(cell.directory, protocol, report)
            report.pop("episodes", None)
        evaluated.append(GridRun(cell.place, report, read_episodes(cell.directory)))
    # Values such as the number of shots have metrics of their own.
    available = dict.fromkeys(m["name"] for of in evaluated for m in of.report["metrics"])
    _check_metrics(metrics, available)
    return write_grid(
        root,
        axes,
        evaluated,
        title=f"{evaluated[0].report['label']} on {config.data.name}, {split} split",
        command=command,
        metrics=metrics or list(available),
        comparison=comparison,
    )


def check_not_set(config: TrainConfig, preset: TrainConfig, options: Mapping[str, str]) -> None:
    """Raises a `ConfigError` if an option of a grid, with how to set it, has another value."""
    for option, instead in options.items():
        value_of = attrgetter(option)
        if value_of(config) != value_of(preset):
            name = option.replace("_", "-")
            raise ConfigError(f"the grid sets --{name} in every run; use {instead} instead")


def _check_metrics(names: Sequence[str], available: Iterable[str]) -> None:
    known = dict.fromkeys(available)
    for name in names:
        if name not in known:
            raise unknown("metric", name, known)
