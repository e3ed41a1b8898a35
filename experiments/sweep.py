"""Any options of any protocol against each other: each of them is a run directory."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.cells import Cell, read_report
from experiments.config import TrainConfig
from experiments.errors import ConfigError, ExperimentError
from experiments.protocols import protocol_of, run_to_dict
from experiments.reporting.sweep import ALL, VALIDATION
from experiments.training.checkpoints import read_config

logger = logging.getLogger(__name__)

_ALL_AT_0 = ("data.classes", "data.samples_per_class")


class Axis(NamedTuple):
    """Options that change together, and the values that they take."""

    options: tuple[str, ...]
    """Such as `loss.name`."""
    values: tuple[tuple[Any, ...], ...]
    """A value for each option, for each place on the axis."""

    @property
    def name(self) -> str:
        """Its first option, where that tells its places apart; else all."""
        return "/".join(self.options[: self._told])

    def labels(self) -> list[str]:
        """Its places in words: the values of the options that `name` has."""
        told = self.options[: self._told]
        return ["/".join(map(_label, told, values)) for values in self.values]

    @property
    def _told(self) -> int:
        first = {values[0] for values in self.values}
        return 1 if len(first) == len(self.values) else len(self.options)


def parse_axis(text: str, config: TrainConfig) -> Axis:
    """Reads `OPTION=VALUE,VALUE,...`, or `OPTION/OPTION=VALUE/VALUE,VALUE/VALUE,...`.

    The value of an option that takes several numbers has them joined by `+`.

    Args:
      text: what was typed.
      config: the configuration whose options these are.

    Raises:
      ConfigError: there is no such option, a value is not of its type, or comes twice.
    """
    names, equals, values = text.partition("=")
    options = tuple(name.replace("-", "_") for name in names.split("/"))
    if not equals or not values or not all(options):
        raise ConfigError(
            f"--over {text!r} must be OPTION=VALUE,VALUE,..., such as loss.name=softmax,loose"
        )
    if "seed" in options:
        raise ConfigError("--over seed=...: give --seeds")
    places = []
    for place in values.split(","):
        parts = place.split("/")
        if len(parts) != len(options):
            raise ConfigError(
                f"--over {text!r}: {place!r} has {len(parts)} values for {len(options)} options"
            )
        parsed = (_value(config, name, part) for name, part in zip(options, parts, strict=True))
        places.append(tuple(parsed))
    if len(set(places)) < len(places):
        raise ConfigError(f"--over {text!r}: a value of {'/'.join(options)} comes twice")
    return Axis(options, tuple(places))


def _value(config: Any, option: str, text: str) -> Any:
    known = _options(config)
    if option not in known:
        close = [other for other in known if other.startswith(f"{option}.")]
        close = close or difflib.get_close_matches(option, known)
        told = f"; there is {', '.join(close)}" if close else "; train PRESET --help lists them"
        raise ConfigError(f"--over {option}: there is no option of that name{told}")
    hint = known[option]
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"--over {option}: {text!r} must be True or False")
        return text.lower() == "true"
    if typing.get_origin(hint) is typing.Literal:
        if text not in typing.get_args(hint):
            raise ConfigError(
                f"--over {option}: {text!r} must be one of {', '.join(typing.get_args(hint))}"
            )
        return text
    several = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if several else hint
    try:
        return tuple(map(kind, text.split("+"))) if several else kind(text)
    except ValueError:
        told = f"{kind.__name__}s joined by +" if several else kind.__name__
        raise ConfigError(f"--over {option}: {text!r} is no {told}") from None


def _options(config: Any) -> dict[str, Any]:
    """The type of every option, by its name."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if typing.get_origin(hint) is typing.ClassVar:
            continue
        if dataclasses.is_dataclass(value):
            found |= {f"{name}.{option}": kind for option, kind in _options(value).items()}
        else:
            found[name] = hint
    return found


def check_metrics(wanted: Sequence[str], cells: Sequence[Cell]) -> None:
    """Raises unless some of the runs will have each of the metrics.

    Raises:
      ConfigError: no run has a metric of that name.
    """
    there = [protocol_of(cell.config).metrics(cell.config) for cell in cells]
    names = dict.fromkeys([*itertools.chain.from_iterable(there), VALIDATION])
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--metrics: no metric {name!r}; there are {', '.join(names)}")


def _label(option: str, value: Any) -> str:
    return ALL if option in _ALL_AT_0 and value == 0 else _text(value)


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _with(config: Any, option: str, value: Any) -> Any:
    section, dot, rest = option.partition(".")
    if dot:
        value = _with(getattr(config, section), rest, value)
    return dataclasses.replace(config, **{section: value})


def cells(
    config: TrainConfig, axes: Sequence[Axis], seeds: Sequence[int], root: Path
) -> list[Cell]:
    """All runs of a sweep, seed by seed, in ROOT/OPTION=VALUE/.../seed-SEED.

    Raises:
      ConfigError: an option is on two axes.
    """
    options = [option for axis in axes for option in axis.options]
    if len(set(options)) < len(options):
        raise ConfigError(f"--over has an option twice: {', '.join(options)}")
    found = []
    for seed in dict.fromkeys(seeds):
        for place in itertools.product(*(range(len(axis.values)) for axis in axes)):
            cell, folder = dataclasses.replace(config, seed=seed), root
            for axis, number in zip(axes, place, strict=True):
                settings = dict(zip(axis.options, axis.values[number], strict=True))
                for option, value in settings.items():
                    cell = _with(cell, option, value)
                folder /= ",".join(f"{option}={_text(value)}" for option, value in settings.items())
            labels = tuple(axis.labels()[number] for axis, number in zip(axes, place, strict=True))
            told = [f"{axis.name} = {at}" for axis, at in zip(axes, labels, strict=True)]
            name = ", ".join([*told, f"seed {seed}"])
            found.append(Cell(name, cell, folder / f"seed-{seed}", labels))
    return found


def finished(
    config: TrainConfig, axes: Sequence[Axis], root: Path
) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Places and reports of all finished runs under `root` that lie on the axes, of any seed.

    Those that differ from `config` elsewhere are left out; of those that cannot be read, a warning
    tells.
    """
    found = []
    everywhere = cells(config, axes, _seeds(root, len(axes)), root)
    for cell in sorted(everywhere, key=lambda cell: cell.directory):
        path = cell.directory / "report.json"
        if not path.exists():
            continue
        try:
            values = read_config(cell.directory)
        except ExperimentError as error:
            logger.warning("%s is left out of the table: %s", cell.directory, error)
            continue
        if values == run_to_dict(cell.config) and (report := read_report(path, cell.config)):
            found.append((cell.place, report))
    return found


def _seeds(root: Path, num_axes: int) -> list[int]:
    """The seeds of which there are runs, in order."""
    names = {path.name for path in root.glob("/".join(["*"] * num_axes) + "/seed-*")}
    return sorted(int(seed) for name in names if (seed := name.removeprefix("seed-")).isdigit())
