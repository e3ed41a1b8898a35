"""What makes a protocol: its options, its data, its objective, its evaluation, its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.config import Folders, TrainConfig
from experiments.contracts import ImageSet
from experiments.training.objective import Objective, Problem


class Outputs(NamedTuple):
    """What a trained run makes of the images of a split."""

    features: np.ndarray
    """float32 [n, d], finite."""
    labels: np.ndarray
    """Integers [n], or [n, C] where an image has any number of labels."""
    scores: Callable[[], np.ndarray]
    """float32 [n, C], as `Objective.scores`; computed when they are asked for."""
    counts: np.ndarray
    """int64 [C], training images of every class."""
    memory: Any = ()
    """What the objective remembers, see `Objective.memory`."""


class Protocol(NamedTuple):
    """A protocol. The configuration that its functions take is of its own type."""

    config: type[TrainConfig]
    """Its options."""
    splits: tuple[str, str, str]
    """The splits for training, validation and evaluation."""
    load: Callable[[Any, Folders, str], ImageSet]
    """The images of one of the splits."""
    counts: Callable[[Any, Folders], Mapping[str, np.ndarray]]
    """For every split that there is, the images of every class; no image is read."""
    check: Callable[[Any, int, Mapping[str, np.ndarray]], None]
    """Raises a `ConfigError` unless a run can be trained and evaluated, with so many features."""
    objective: Callable[[Any, Problem], Objective]
    """What a run minimises."""
    validate: Callable[[Any, Outputs], float]
    """What the best checkpoint is chosen by: the higher the better."""
    evaluate: Callable[[Any, str, Callable[[str], Outputs]], dict[str, Any]]
    """The results on a split, from a function that gives the outputs of any; as JSON types.
    `metrics` are named numbers, for tables."""
    metrics: Callable[[Any], tuple[str, ...]]
    """The names of the `metrics` of the last split."""
    describe: Callable[[Any], dict[str, Any]]
    """What a report says of a run before it tells of results, as JSON types: `label` among them."""
    report: Callable[[dict[str, Any]], list[str]]
    """The results as lines of Markdown."""
    check_options: Callable[[Any, int], None] = lambda config, num_features: None
    """Raises a `ConfigError` where options do not fit together, or not so many features: all that
    can be told before hours go into preparing the data."""
    for_validation: tuple[str, ...] = ()
    """Options of the configuration's `evaluation` that only the validations of a training use."""
