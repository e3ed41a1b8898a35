"""Many runs: values of options against each other. Every run is a directory that is kept."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config import (
    Folders,
    ParallelMode,
    TrainConfig,
    get_option,
    option_types,
    replace_option,
)
from experiments.contracts import PairMetrics
from experiments.errors import ConfigError, ExperimentError
from experiments.processes import agree, on_first
from experiments.protocols import config_to_dict
from experiments.reporting import grid as reporting
from experiments.reporting.comparison import same_label
from experiments.runs import Plan, check_data, complete_run, plan_run, read_episodes, read_report
from experiments.training.run_directory import check_run_directory, read_config

logger = logging.getLogger(__name__)

_PAIRS_NOTES = {
    "data.subset_seed": "Subsets overlap and share their test images: means and intervals over "
    "data.subset_seed describe repetition over such subsets, not over new data."
}
"""What readers of a table need to know on an option of which the values are repetitions."""

_ALL_AT_0 = ("data.classes", "data.samples_per_class")
"""Options whose value 0 means all."""


class Axis(NamedTuple):
    """Options that change together, and the values that they take."""

    name: str
    options: tuple[str, ...]
    """Such as `loss.name`."""
    values: tuple[tuple[Any, ...], ...]
    """A value for each option, for each position on the axis."""
    labels: tuple[str, ...]
    """Name of every position."""


def make_axis(
    options: tuple[str, ...],
    values: Sequence[tuple[Any, ...]],
    *,
    name: str = "",
    labels: Sequence[str] = (),
) -> Axis:
    """An axis, named by default after its first option if that distinguishes the positions.

    The fields are those of `Axis`.
    """
    distinct = {position[0] for position in values}
    named = 1 if len(distinct) == len(values) else len(options)
    default_labels = [
        "/".join(map(_label, options[:named], position[:named])) for position in values
    ]
    return Axis(
        name or "/".join(options[:named]),
        options,
        tuple(values),
        tuple(labels) or tuple(default_labels),
    )


def parse_axis(text: str, config: TrainConfig) -> Axis:
    """Parses `OPTION=VALUE,VALUE,...`, or `OPTION/OPTION=VALUE/VALUE,VALUE/VALUE,...`.

    Options are those of `config`. The numbers of an option that takes several are joined by `+`.

    Raises:
      ConfigError: An option is unknown, or a value is of another type or repeated.
    """
    names, equals, values = text.partition("=")
    options = tuple(name.replace("-", "_") for name in names.split("/"))
    if not equals or not values or not all(options):
        raise ConfigError(
            f"--over {text!r} must be OPTION=VALUE,VALUE,..., such as loss.name=softmax,loose"
        )
    if "seed" in options:
        raise ConfigError("--over seed=...: use --seeds")
    positions = []
    for position in values.split(","):
        parts = position.split("/") if len(options) > 1 else [position]
        if len(parts) != len(options):
            raise ConfigError(
                f"--over {text!r}: {position!r} has {len(parts)} values for {len(options)} options"
            )
        parsed = (_parse(config, name, part) for name, part in zip(options, parts, strict=True))
        positions.append(tuple(parsed))
    if len(set(positions)) < len(positions):
        raise ConfigError(f"--over {text!r}: a value of {'/'.join(options)} is repeated")
    return make_axis(options, positions)


def _parse(config: TrainConfig, option: str, text: str) -> Any:
    types = option_types(config)
    if option not in types:
        close = [other for other in types if other.startswith(f"{option}.")]
        close = close or difflib.get_close_matches(option, types)
        hint = f"did you mean {', '.join(close)}?" if close else "train PRESET --help lists them"
        raise ConfigError(f"--over {option}: unknown option; {hint}")
    expected = types[option]
    if expected is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"--over {option}: {text!r} must be True or False")
        return text.lower() == "true"
    several = typing.get_origin(expected) is tuple
    element = typing.get_args(expected)[0] if several else expected
    if typing.get_origin(element) is typing.Literal:
        choices, parts = typing.get_args(element), text.split("+") if several else [text]
        for part in parts:
            if part not in choices:
                raise ConfigError(f"--over {option}: {part!r} must be one of {', '.join(choices)}")
        return tuple(parts) if several else text
    try:
        return tuple(map(element, text.split("+"))) if several else element(text)
    except ValueError:
        name = f"{element.__name__}s joined by +" if several else element.__name__
        raise ConfigError(f"--over {option}: {text!r} is not of type {name}") from None


def _label(option: str, value: Any) -> str:
    return "all" if option in _ALL_AT_0 and value == 0 else _text(value)


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


class Cell(NamedTuple):
    """One run of a grid."""

    place: tuple[str, ...]
    """Its label on every axis."""
    config: TrainConfig
    directory: Path


def parse_comparison(
    axes: Sequence[Axis], *, baseline: str = "", pairs_over: str = "", choose: Sequence[str] = ()
) -> reporting.Comparison:
    """How the runs on some axes are compared.

    Args:
      axes: The axes, which `split_axes` has split at the options of `pairs_over` and `choose`.
      baseline: OPTION=VALUE of one of the axes, or empty.
      pairs_over: The option whose values are repetitions, or empty.
      choose: The options of which validation chooses the values.

    Raises:
      ConfigError: No axis has such an option or value, an option is named twice, or no axis is
        left.
    """
    repeated = [_axis_of(axes, pairs_over, "--pairs-over").name] if pairs_over else []
    chosen = [_axis_of(axes, option, "--choose").name for option in choose]
    used = [*repeated, *chosen]
    if len(set(used)) < len(used):
        raise ConfigError(f"--pairs-over and --choose have an option twice: {', '.join(used)}")
    if len(used) == len(axes):
        raise ConfigError(
            "--pairs-over and --choose leave no axis for the table; add one to --over"
        )
    named = None
    if baseline:
        option, equals, value = baseline.partition("=")
        axis = _axis_of(axes, option, "--baseline")
        if not equals:
            raise ConfigError(
                f"--baseline {baseline} must be OPTION=VALUE, such as {axis.name}={axis.labels[0]}"
            )
        if axis.name in used:
            raise ConfigError(
                f"--baseline {baseline}: {axis.name} is in --pairs-over or --choose; name another "
                "axis"
            )
        label = _find_label(axis, value)
        if label is None:
            raise ConfigError(
                f"--baseline {baseline}: {axis.name} has no value {value}; it has "
                f"{', '.join(axis.labels)}"
            )
        if len(axis.labels) < 2:
            raise ConfigError(f"--baseline {baseline}: {axis.name} has no other value to compare")
        named = axis.name, label
    return reporting.Comparison(named, repeated[0] if repeated else "", tuple(chosen))


def _axis_of(axes: Sequence[Axis], name: str, argument: str) -> Axis:
    name = name.replace("-", "_")
    for axis in axes:
        if name in (axis.name, "/".join(axis.options)):
            return axis
    names = ", ".join(axis.name for axis in axes)
    raise ConfigError(f"{argument} {name}: no axis has this name; the axes are {names}")


def _find_label(axis: Axis, text: str) -> str | None:
    """The label of the position that is typed so: 0 stands for 0.0, too."""
    for label, values in zip(axis.labels, axis.values, strict=True):
        if same_label(text, label) or same_label(text, "/".join(map(_text, values))):
            return label
    return None


def split_axes(axes: Sequence[Axis], options: Sequence[str]) -> list[tuple[Axis, ...]]:
    """Every axis as several axes: each of the `options` on an axis of its own.

    An axis of other options, or of a single one, stays as it is.
    """
    options = [option.replace("-", "_") for option in options]
    return [_split(axis, [o for o in axis.options if o in options]) for axis in axes]


def _split(axis: Axis, apart: Sequence[str]) -> tuple[Axis, ...]:
    together = tuple(option for option in axis.options if option not in apart)
    groups = [group for group in (together, *((option,) for option in apart)) if group]
    if len(groups) < 2:
        return (axis,)
    return tuple(
        make_axis(group, list(dict.fromkeys(_values(axis, at, group) for at in axis.values)))
        for group in groups
    )


def _values(axis: Axis, position: tuple[Any, ...], options: Sequence[str]) -> tuple[Any, ...]:
    return tuple(position[axis.options.index(option)] for option in options)


def _split_place(
    axes: Sequence[Axis], parts: Sequence[Sequence[Axis]], place: Sequence[str]
) -> tuple[str, ...]:
    """The labels on the parts of every axis."""
    labels = []
    for axis, split, label in zip(axes, parts, place, strict=True):
        position = axis.values[axis.labels.index(label)]
        for part in split:
            labels.append(part.labels[part.values.index(_values(axis, position, part.options))])
    return tuple(labels)


def make_cells(
    config: TrainConfig, axes: Sequence[Axis], seeds: Sequence[int], root: Path
) -> list[Cell]:
    """All runs of a grid, seed by seed, in ROOT/OPTION=VALUE/.../seed-SEED.

    Raises:
      ConfigError: An option is on two axes.
    """
    options = [option for axis in axes for option in axis.options]
    if len(set(options)) < len(options):
        raise ConfigError(f"--over has an option twice: {', '.join(options)}")
    cells = []
    for seed in dict.fromkeys(seeds):
        for position in itertools.product(*(range(len(axis.values)) for axis in axes)):
            cell, folder, place = dataclasses.replace(config, seed=seed), root, []
            for axis, number in zip(axes, position, strict=True):
                settings = dict(zip(axis.options, axis.values[number], strict=True))
                for option, value in settings.items():
                    cell = replace_option(cell, option, value)
                name = ",".join(f"{option}={_text(value)}" for option, value in settings.items())
                folder /= re.sub("[:/]", "-", name)
                place.append(axis.labels[number])
            cells.append(Cell(tuple(place), cell, folder / f"seed-{seed}"))
    return cells


class Outcome(NamedTuple):
    """A grid that has been run."""

    paths: list[Path]
    """The files of its report, the table first."""
    runs: int
    diverged: list[str]
    """A line for every run that diverged."""


def run_grid(
    config: TrainConfig,
    axes: Sequence[Axis],
    seeds: Sequence[int],
    root: Path,
    folders: Folders,
    *,
    title: str,
    command: str,
    metrics: Sequence[str] = (),
    notes: Sequence[str] = (),
    baseline: str = "",
    pairs_over: str = "",
    choose: Sequence[str] = (),
    mode: ParallelMode = "pmap",
    mesh_shape: str = "",
    stuck_after: float = 0,
) -> Outcome:
    """Trains and evaluates the missing runs of a grid, and writes its table and figure.

    The table has the labels of the axes, at every seed that has been run.

    Args:
      config: What all runs have in common.
      axes: What they differ in.
      seeds: Every combination is trained once for each seed.
      root: Folder of the grid.
      folders: Where data is stored.
      title, command, metrics, notes: As in `experiments.reporting.grid.write_grid`.
      baseline, pairs_over, choose: As in `parse_comparison`; an option that shares an axis with
        others counts as an axis of its own.
      mode, mesh_shape, stuck_after: As in `train_run`.

    Raises:
      ConfigError: Before any training: a run cannot be trained and evaluated, no run has one of
        the metrics, or the runs cannot be compared so.
      ConfigMismatchError: Before any training: a directory belongs to a run of another
        configuration.
    """
    parts = split_axes(axes, [option for option in (pairs_over, *choose) if option])
    shown = [part for split in parts for part in split]
    comparison = parse_comparison(shown, baseline=baseline, pairs_over=pairs_over, choose=choose)
    pairs_notes = [_PAIRS_NOTES[name] for name in (comparison.pairs_over,) if name in _PAIRS_NOTES]
    cells = make_cells(config, axes, seeds, root)
    plans = [plan_run(cell.config) for cell in cells]
    pair_metrics = next((plan.protocol.pair_metrics for plan in plans), None) if baseline else None
    _check_metrics(metrics, plans, pair_metrics)
    agree("runs", {str(number): str(cell.place) for number, cell in enumerate(cells, start=1)})
    on_first(lambda: [check_run_directory(c.directory, config_to_dict(c.config)) for c in cells])
    for plan in plans:
        class_counts = check_data(plan, folders)
        held_out = plan.protocol.splits[1]
        if choose and held_out not in class_counts:
            raise ConfigError(
                f"--choose needs the split {held_out}, which {config.data.name} lacks with these "
                "options; hold images out, for example with --data.holdout 0.2"
            )
    diverged = []
    for number, (cell, plan) in enumerate(zip(cells, plans, strict=True), start=1):
        names = [f"{axis.name} = {at}" for axis, at in zip(axes, cell.place, strict=True)]
        print(
            f"[{number}/{len(cells)}]", ", ".join([*names, f"seed {plan.config.seed}"]), flush=True
        )
        report = complete_run(
            plan,
            cell.directory,
            folders,
            command=command,
            mode=mode,
            mesh_shape=mesh_shape,
            stuck_after=stuck_after,
        )
        if "diverged" in report:
            diverged.append(f"{cell.directory}: {report['diverged']}")
            print(report["diverged"], flush=True)

    def write() -> list[Path]:
        return reporting.write_grid(
            root,
            [reporting.Axis(axis.name, axis.labels) for axis in shown],
            [
                run._replace(place=_split_place(axes, parts, run.place))
                for run in finished_runs(config, axes, root)
            ],
            title=title,
            command=command,
            metrics=metrics,
            notes=[*pairs_notes, *notes],
            comparison=comparison,
            pair_metrics=pair_metrics,
            planned=list(dict.fromkeys(_split_place(axes, parts, cell.place) for cell in cells)),
        )

    return Outcome(on_first(write), len(cells), diverged)


def finished_runs(config: TrainConfig, axes: Sequence[Axis], root: Path) -> list[reporting.Run]:
    """All finished runs under `root` that lie on the axes, of any seed.

    Runs that differ from `config` elsewhere are left out; so are, with a warning, those that cannot
    be read.
    """
    runs = []
    for cell in make_cells(config, axes, _seeds(root, len(axes)), root):
        path = cell.directory / "report.json"
        if not path.exists():
            continue
        try:
            values = read_config(cell.directory)
        except ExperimentError as error:
            logger.warning("%s is left out of the table: %s", cell.directory, error)
            continue
        if values == config_to_dict(cell.config) and (report := read_report(path)):
            runs.append(reporting.Run(cell.place, report, read_episodes(cell.directory)))
    return runs


def check_not_set(config: TrainConfig, preset: TrainConfig, options: dict[str, str]) -> None:
    """Checks that the options of the axes keep the preset's value in what all runs share.

    Args:
      config: What all runs have in common.
      preset: The preset.
      options: For every option that the grid sets, how to set it there.

    Raises:
      ConfigError: An option has another value.
    """
    for option, instead in options.items():
        if get_option(config, option) != get_option(preset, option):
            name = option.replace("_", "-")
            raise ConfigError(f"the grid sets --{name} in every run; use {instead} instead")


def _check_metrics(
    names: Sequence[str], plans: Sequence[Plan], pair_metrics: PairMetrics | None
) -> None:
    metrics = [metric for plan in plans for metric in plan.protocol.metrics]
    metrics += pair_metrics.metrics if pair_metrics else ()
    available = dict.fromkeys([*(metric.name for metric in metrics), "validation"])
    for name in names:
        if name not in available:
            raise ConfigError(f"--metrics: no metric {name!r}; available: {', '.join(available)}")


def _seeds(root: Path, num_axes: int) -> list[int]:
    """The seeds with runs, in order."""
    names = {path.name for path in root.glob("/".join(["*"] * num_axes) + "/seed-*")}
    return sorted(int(seed) for name in names if (seed := name.removeprefix("seed-")).isdigit())
