"""Many runs, or many evaluations of one run: values of options against each other.

Every run and every evaluation is a directory that is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import logging
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.assembly import Plan, check_data, plan_run
from experiments.config import Folders, TrainConfig, get_option, option_types, replace_option
from experiments.errors import ConfigError, ExperimentError
from experiments.processes import agree, on_first
from experiments.protocols import config_to_dict
from experiments.reporting.grid import write_grid
from experiments.reporting.results import ALL, VALIDATION, Axis, Comparison, Place, Run
from experiments.reporting.run import read_episodes, read_report, write_report
from experiments.restored import evaluation_of, restore_run, run_directory, with_evaluation
from experiments.training.run_directory import check_run_directory, read_config

logger = logging.getLogger(__name__)

_PAIRS_NOTES = {
    "data.subset_seed": "Subsets overlap and share their test images: means and intervals over "
    "data.subset_seed describe repetition over such subsets, not over new data."
}
"""What readers of a table need to know on an option of which the values are repetitions."""

_ALL_AT_0 = ("data.classes", "data.samples_per_class")
"""Options whose value 0 means all."""

Settings = dict[str, Any]
"""Values of options, such as `loss.name`."""


def parse_over(text: str, config: TrainConfig) -> list[Settings]:
    """Parses `OPTION=VALUE,VALUE,...`, or `OPTION/OPTION=VALUE/VALUE,VALUE/VALUE,...`.

    Options are those of `config`. The numbers of an option that takes several are joined by `+`.

    Raises:
      ConfigError: An option is unknown, or a value is of another type or repeated.
    """
    names, _, values = text.partition("=")
    options, types = names.replace("-", "_").split("/"), option_types(config)
    if not values:
        raise ConfigError(
            f"--over {text!r} must be OPTION=VALUE,VALUE,..., such as loss.name=softmax,loose"
        )
    if "seed" in options:
        raise ConfigError("--over seed=...: use --seeds")
    for option in options:
        if option not in types:
            near = [other for other in types if other.startswith(f"{option}.")]
            near = ", ".join(near or difflib.get_close_matches(option, types))
            hint = f"did you mean {near}?" if near else "train PRESET --help lists them"
            raise ConfigError(f"--over {option}: unknown option; {hint}")
    positions: list[Settings] = []
    for position in values.split(","):
        parts = position.split("/") if len(options) > 1 else [position]
        if len(parts) != len(options):
            raise ConfigError(
                f"--over {text!r}: {position!r} has {len(parts)} values for {len(options)} options"
            )
        parsed = {o: _parse(types[o], o, part) for o, part in zip(options, parts, strict=True)}
        if parsed in positions:
            raise ConfigError(f"--over {text!r}: a value of {'/'.join(options)} is repeated")
        positions.append(parsed)
    return positions


def _parse(expected: Any, option: str, text: str) -> Any:
    """A value of a type, which may be a tuple of any length."""
    if typing.get_origin(expected) is tuple:
        (element, *_) = typing.get_args(expected)
        return tuple(_parse(element, option, part) for part in text.split("+"))
    choices = {str(choice): choice for choice in typing.get_args(expected)}
    if expected is bool:
        text, choices = text.capitalize(), {"True": True, "False": False}
    try:
        return choices[text] if choices else expected(text)
    except (KeyError, ValueError):
        kind = f"one of {', '.join(choices)}" if choices else f"of type {expected.__name__}"
        raise ConfigError(f"--over {option}: {text!r} must be {kind}") from None


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def setting_names(settings: Mapping[str, Any]) -> list[str]:
    """Options with their values, for names of files."""
    return [f"{option}={_text(value)}" for option, value in settings.items()]


def make_axes(positions: Sequence[Settings], apart: Sequence[str] = ()) -> list[Axis]:
    """The axes of the options of one `--over`: one axis, and one for each of the options `apart`.

    An axis is named after its first option if that distinguishes the positions.
    """
    together = tuple(option for option in positions[0] if option not in apart)
    axes = []
    for options in filter(None, [together, *((o,) for o in positions[0] if o in apart)]):
        values = tuple(dict.fromkeys(tuple(at[o] for o in options) for at in positions))
        distinct = len({position[0] for position in values}) == len(values)
        named = options[:1] if distinct else options
        labels = tuple(
            "/".join(
                ALL if option in _ALL_AT_0 and value == 0 else _text(value)
                for option, value in zip(named, position, strict=False)
            )
            for position in values
        )
        axes.append(Axis("/".join(named), labels, options, values))
    return axes


def parse_comparison(
    axes: Sequence[Axis], *, baseline: str = "", pairs_over: str = "", choose: Sequence[str] = ()
) -> Comparison:
    """How the runs on some axes are compared.

    Args:
      axes: The axes; the options of `pairs_over` and `choose` have axes of their own.
      baseline: OPTION=VALUE of one of the axes, or empty.
      pairs_over: The option whose values are repetitions, or empty.
      choose: The options of which validation chooses the values.

    Raises:
      ConfigError: No axis has such an option or value, an option is named twice, or no axis is
        left.
    """

    def axis_of(argument: str, name: str) -> Axis:
        name = name.replace("-", "_")
        for axis in axes:
            if name in (axis.name, "/".join(axis.options)):
                return axis
        names = ", ".join(axis.name for axis in axes)
        raise ConfigError(f"{argument} {name}: no axis has this name; the axes are {names}")

    repeated = axis_of("--pairs-over", pairs_over).name if pairs_over else ""
    chosen = tuple(axis_of("--choose", option).name for option in choose)
    used = [*filter(None, [repeated]), *chosen]
    if len(set(used)) < len(used) or len(used) == len(axes):
        raise ConfigError(
            f"--pairs-over and --choose must be different axes, and leave one for the table; got "
            f"{', '.join(used)}"
        )
    if not baseline:
        return Comparison(None, repeated, chosen)
    option, _, value = baseline.partition("=")
    axis = axis_of("--baseline", option)
    found = [
        label
        for label, values in zip(axis.labels, axis.values, strict=True)
        if _parts(value) in (_parts(label), _parts("/".join(map(_text, values))))
    ]
    if not found or axis.name in used or len(axis.labels) < 2:
        raise ConfigError(
            f"--baseline {baseline} must be OPTION=VALUE of an axis of several values that is not "
            f"in --pairs-over or --choose; {axis.name} has {', '.join(axis.labels)}"
        )
    return Comparison((axis.name, found[0]), repeated, chosen)


def _parts(text: str) -> list[float | str]:
    """The parts of a label, so that softmax/0 and softmax/0.0 are equal."""
    parts: list[float | str] = [*text.split("/")]
    for number, part in enumerate(parts):
        with contextlib.suppress(ValueError):
            parts[number] = float(part)
    return parts


class Cell(NamedTuple):
    """One run of a grid."""

    settings: Settings
    config: TrainConfig
    directory: Path

    def place(self, axes: Sequence[Axis]) -> Place:
        """Its label on every axis."""
        values = (tuple(self.settings[option] for option in axis.options) for axis in axes)
        return tuple(a.labels[a.values.index(at)] for a, at in zip(axes, values, strict=True))

    def describe(self, axes: Sequence[Axis]) -> str:
        """The same for people: `loss.name = softmax, data.classes = 50`."""
        pairs = zip(axes, self.place(axes), strict=True)
        return ", ".join(f"{axis.name} = {label}" for axis, label in pairs)


def make_cells(
    config: TrainConfig, over: Sequence[Sequence[Settings]], seeds: Iterable[int], root: Path
) -> list[Cell]:
    """All runs of a grid, seed by seed, in ROOT/OPTION=VALUE/.../seed-SEED.

    Args:
      config: What all runs have in common.
      over: For each folder of the path, the settings that differ.
      seeds: Of the runs.
      root: Folder of the grid.

    Raises:
      ConfigError: An option is in two of the `over`.
    """
    options = [option for positions in over for option in positions[0]]
    if len(set(options)) < len(options):
        raise ConfigError(f"--over has an option twice: {', '.join(options)}")
    cells = []
    for seed, positions in itertools.product(dict.fromkeys(seeds), itertools.product(*over)):
        folders = [re.sub("[:/]", "-", ",".join(setting_names(at))) for at in positions]
        settings = {option: value for at in positions for option, value in at.items()}
        cell = dataclasses.replace(config, seed=seed)
        for option, value in settings.items():
            cell = replace_option(cell, option, value)
        cells.append(Cell(settings, cell, root.joinpath(*folders, f"seed-{seed}")))
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
    over: Sequence[Sequence[Settings]],
    seeds: Sequence[int],
    root: Path,
    folders: Folders,
    complete: Callable[[Plan, Path], dict[str, Any]],
    *,
    axes: Sequence[Axis] = (),
    notes: Sequence[str] = (),
    baseline: str = "",
    pairs_over: str = "",
    choose: Sequence[str] = (),
    **report: Any,
) -> Outcome:
    """Trains and evaluates the missing runs of a grid, and writes its table and figure.

    The table has the settings in `over`, at every seed that has been run.

    Args:
      config, over, seeds, root: As in `make_cells`.
      folders: Where data is stored.
      complete: Trains and evaluates a run in its directory unless it is finished; returns its
        report.
      axes: Those of the table, by default as `make_axes` makes them.
      baseline, pairs_over, choose: As in `parse_comparison`; an option that shares an `--over` with
        others has an axis of its own.
      notes, report: As in `experiments.reporting.grid.write_grid`: title, command, metrics.

    Raises:
      ConfigError: Before any training: a run cannot be trained and evaluated, no run has one of
        the metrics, or the runs cannot be compared so.
      ConfigMismatchError: Before any training: a directory belongs to a run of another
        configuration.
    """
    apart = [option.replace("-", "_") for option in (pairs_over, *choose)]
    axes = axes or [axis for positions in over for axis in make_axes(positions, apart)]
    comparison = parse_comparison(axes, baseline=baseline, pairs_over=pairs_over, choose=choose)
    cells = make_cells(config, over, seeds, root)
    plans = [plan_run(cell.config) for cell in cells]
    pair_metrics = plans[0].protocol.pair_metrics if baseline else None
    available = [metric for plan in plans for metric in plan.protocol.metrics]
    available += pair_metrics.metrics if pair_metrics else ()
    _check_metrics(report.get("metrics", ()), [*(metric.name for metric in available), VALIDATION])
    agree("runs", {str(number): str(cell.settings) for number, cell in enumerate(cells, start=1)})
    for cell in cells:
        check_run_directory(cell.directory, config_to_dict(cell.config))
    for plan in plans:
        held_out = plan.protocol.splits[1]
        if held_out not in check_data(plan, folders) and choose:
            raise ConfigError(
                f"--choose needs the split {held_out}, which {config.data.name} lacks with these "
                "options; hold images out, for example with --data.holdout 0.2"
            )
    diverged = []
    for number, (cell, plan) in enumerate(zip(cells, plans, strict=True), start=1):
        run = f"{cell.describe(axes)}, seed {cell.config.seed}"
        print(f"[{number}/{len(cells)}] {run}", flush=True)
        found = complete(plan, cell.directory)
        if "diverged" in found:
            diverged.append(f"{cell.directory}: {found['diverged']}")
            print(found["diverged"], flush=True)

    def write() -> list[Path]:
        return write_grid(
            root,
            axes,
            finished_runs(config, over, axes, root),
            notes=[*filter(None, [_PAIRS_NOTES.get(comparison.pairs_over)]), *notes],
            comparison=comparison,
            pair_metrics=pair_metrics,
            planned=list(dict.fromkeys(cell.place(axes) for cell in cells)),
            **report,
        )

    return Outcome(on_first(write) or [], len(cells), diverged)


def finished_runs(
    config: TrainConfig, over: Sequence[Sequence[Settings]], axes: Sequence[Axis], root: Path
) -> list[Run]:
    """All finished runs of a grid, of any seed.

    Runs that differ from `config` elsewhere are left out; so are, with a warning, those that cannot
    be read.
    """
    names = {path.name for path in root.glob("/".join(["*"] * len(over)) + "/seed-*")}
    seeds = [int(seed) for name in names if (seed := name.removeprefix("seed-")).isdigit()]
    runs = []
    for cell in make_cells(config, over, sorted(seeds), root):
        path = cell.directory / "report.json"
        if not path.exists():
            continue
        try:
            values = read_config(cell.directory)
        except ExperimentError as error:
            logger.warning("%s is left out of the table: %s", cell.directory, error)
            continue
        if values == config_to_dict(cell.config) and (report := read_report(path)):
            runs.append(Run(cell.place(axes), report, read_episodes(cell.directory)))
    return runs


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
    check_not_set(shared, config, {o: "its values in --over" for at in positions for o in at[0]})
    name = ",".join([f"{split}-step{run.step}", *setting_names(overrides)])
    root = run_directory(path) / "evaluations" / name
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
        runs.append(Run(cell.place(axes), report, read_episodes(cell.directory)))
    # Values such as the number of shots have metrics of their own.
    available = dict.fromkeys(metric["name"] for run in runs for metric in run.report["metrics"])
    _check_metrics(metrics, available)
    return write_grid(
        root,
        axes,
        runs,
        title=f"{runs[0].report['label']} on {config.data.name}, {split} split",
        command=command,
        metrics=metrics or list(available),
        comparison=comparison,
    )


def check_not_set(config: TrainConfig, preset: TrainConfig, options: Mapping[str, str]) -> None:
    """Raises a `ConfigError` if an option that the grid sets does not have the preset's value.

    `options` holds, for each of these options, how to set it instead.
    """
    for option, instead in options.items():
        if get_option(config, option) != get_option(preset, option):
            name = option.replace("_", "-")
            raise ConfigError(f"the grid sets --{name} in every run; use {instead} instead")


def _check_metrics(names: Sequence[str], available: Iterable[str]) -> None:
    if unknown := set(names) - {*available}:
        known = ", ".join(dict.fromkeys(available))
        raise ConfigError(f"--metrics: no metric {', '.join(unknown)!r}; available: {known}")
