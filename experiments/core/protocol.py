"""What a protocol is: the types that protocols, training, evaluation and reports agree on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from experiments.core.config import Folders
from experiments.core.errors import ConfigError

if TYPE_CHECKING:  # Loading data imports this module, but not JAX.
    from jax import Array
    from jax.sharding import Mesh

BATCH_AXIS = "batch"
"""Name of the devices' axis that the batch is spread over."""

ImageTable: TypeAlias = Any
"""Images by index, an array or records that are read when they are needed: `images[index]` is uint8
[..., h, w, c] or `Photographs`; `images.shape` and `len(images)` are those of such an array."""


@dataclass(frozen=True, eq=False)
class Photographs:
    """Whole images of different sizes, in arrays of one shape.

    An image fills the upper left corner of its array, and the rest is 0. Arrays are wider than
    high; an image that is higher than wide is stored transposed.
    """

    pixels: Any  # uint8 [n, s, l, c].
    sizes: Any  # int32 [n, 2]: height and width of every image, before it is transposed.

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the pixels."""
        return self.pixels.shape

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: Any) -> Photographs:
        return Photographs(self.pixels[index], self.sizes[index])


@dataclass(frozen=True, eq=False)
class ImageSet:
    """The images of one split, in an order that is the same on every machine."""

    images: ImageTable
    labels: np.ndarray
    """int32 [n], 0 to C−1 within the split, ascending; or, where an image has any number of
    labels, int8 [n, C]: 1, 0, or −1 where that is unknown."""
    class_names: tuple[str, ...]
    files: np.ndarray | None = None
    """The path of every image, text [n], of a folder of one's own; else None."""


ClassCounts: TypeAlias = Mapping[str, np.ndarray]
"""By split: the number of images of every class, int64 [C]."""


class Part(NamedTuple):
    """The images of one split of a protocol."""

    counts: Callable[[], np.ndarray]  # int64 [C], those of every class or with every label.
    load: Callable[[], ImageSet]
    size: int = 0  # Their number, where an image has any number of labels.


class Metric(NamedTuple):
    """What a number means, declared where the number is computed."""

    name: str
    unit: Literal["%", ""] = "%"
    """`%`: a fraction, printed in per cent. Empty: a plain number."""
    higher_is_better: bool | None = True
    """None: neither higher nor lower values are better."""

    def measured(self, value: float | None, interval: float | None = None) -> dict[str, Any]:
        """The metric with its value (None: undefined), as reports store it.

        The interval is half the width of a 95 % confidence interval, where there is one.
        """
        return self._asdict() | {"value": value, "interval": interval}


def measured(metrics: Sequence[Metric], values: Iterable[float | None]) -> list[dict[str, Any]]:
    """The metrics with their values."""
    return [metric.measured(value) for metric, value in zip(metrics, values, strict=True)]


def mean_and_interval(values: np.ndarray | Sequence[float]) -> tuple[float, float]:
    """The mean over episodes, and half the width of its 95 % confidence interval, t·σ/√E.

    Values are floats [E], E > 1; σ, and the quantile t of Student's distribution, have E − 1
    degrees of freedom.
    """
    from scipy.special import stdtrit  # Slow to import.

    values = np.asarray(values, np.float64)
    quantile = stdtrit(values.size - 1, 0.975)
    return float(values.mean()), float(quantile * values.std(ddof=1) / np.sqrt(values.size))


class Problem(NamedTuple):
    """What an objective is built for."""

    num_features: int  # Features d of the backbone.
    class_counts: np.ndarray  # int64 [C], training images of every class.
    axis_name: str | None = None  # The mapped axis over which the batch is spread.
    mesh: Mesh | None = None  # Of a sharded jit: its axis `BATCH_AXIS` spreads the features.
    num_epochs: int = 0  # Epochs that end within the run.
    seed: int = 0


class Loss(NamedTuple):
    """The loss of a batch."""

    value: Array  # float []: over all devices.
    objective_state: Any  # The new objective state: the same on all devices.
    means: dict[str, Array]  # For the metrics log: float [], over this device's rows of the batch.


class Objective(NamedTuple):
    """What a run minimises. All functions are pure and can be compiled."""

    init_head: Callable[[Array], Any]
    """From a key, the first parameters beside the backbone's."""
    loss: Callable[[Array, Array, Any, Any], Loss]
    """Of features [n, d], labels [n] or [n, C], the head, and the objective state."""
    logits: Callable[[Array, Any, Any], Array]
    """Of features [n, d], the head and the objective state: logits [n, C]."""
    init_state: Callable[[], Any] = tuple
    """The first objective state: what the run keeps beside its parameters. Part of checkpoints."""
    after_epoch: Callable[[Any], tuple[Any, dict[str, Array]]] | None = None
    """From the objective state after an epoch: the new one, and numbers for the metrics log."""
    classifier_state: tuple[str, ...] | None = ()
    """Entries of the objective state that belong to the classifier, as the head does; None: the
    loss trains no classifier."""


class Outputs(NamedTuple):
    """What a trained run computes for the images of a split."""

    features: np.ndarray
    """float32 [n, d], finite."""
    labels: np.ndarray
    """Integers [n], or [n, C] where an image has any number of labels; of new images −1."""
    logits: Callable[[], np.ndarray]
    """float32 [n, C], as `Objective.logits`; computed on request."""
    class_counts: np.ndarray
    """int64 [C], training images of every class."""
    objective_state: Any = ()
    """See `Objective.init_state`."""
    head: Any = None
    """The parameters that `Objective.init_head` began."""
    class_names: tuple[str, ...] = ()
    """The name of every label."""
    images: Any = None
    """Reads the images of rows [k], uint8 [k, h, w, c]; photographs as evaluation crops them."""
    files: np.ndarray | None = None
    """The path of every image, text [n], where it is a file of yours; else None."""

    def __repr__(self) -> str:
        shapes = f"features {self.features.shape}, labels {self.labels.shape}"
        return f"Outputs({shapes}, {len(self.class_names)} class names; logits(), images, files)"


OutputsOf: TypeAlias = Callable[[str], Outputs]
"""Gives the outputs of any split."""


class PairMetrics(NamedTuple):
    """What a run and the baseline of its grid give together."""

    metrics: Sequence[Metric]
    measure: Callable[[dict[str, Any], dict[str, Any]], list[dict[str, Any]]]
    """Of the reports of the two, neither of which diverged: a list of `Metric.measured`."""


class Protocol(ABC):
    """One experiment, built from the configuration of a run."""

    splits: tuple[str, str, str]
    """The splits for training, validation and evaluation."""
    metrics: Sequence[Metric]
    """The metrics of the evaluation split, in the order of the tables."""
    validation_metric: Metric
    """What `validate` computes, and the best checkpoint is chosen by; higher must be better."""
    description: dict[str, Any]
    """What a report states of a run beside its results, as JSON types: `label` among them."""
    compares_samples: bool = False
    """Whether the loss compares samples with each other, so that they cannot be mixed."""
    pair_metrics: PairMetrics | None = None
    """In a grid with a baseline, a run has these metrics, too."""

    @abstractmethod
    def parts(self, folders: Folders) -> Mapping[str, Part]:
        """Every available split; there may be more than `splits`. Reads no prepared image."""

    def check_options(self, num_features: int) -> None:
        """Raises a `ConfigError` where options do not fit each other or the number of features."""
        return

    @abstractmethod
    def check_data(self, num_features: int, counts: ClassCounts) -> None:
        """Raises a `ConfigError` unless a run on such classes can be trained and evaluated."""

    @abstractmethod
    def objective(self, problem: Problem) -> Objective:
        """What the run minimises."""

    @abstractmethod
    def validate(self, outputs: Outputs) -> float:
        """The value of `validation_metric`."""

    def diagnose(self, outputs: Outputs) -> dict[str, float]:
        """Numbers for the metrics log beside that of `validate`, from the same outputs."""
        return {}

    @abstractmethod
    def evaluate(self, split: str, outputs_of_split: OutputsOf) -> dict[str, Any]:
        """The results on a split, as JSON types.

        `metrics` is a list of `Metric.measured`. `episodes`, if any, has the values of metrics in
        every episode, by name; `notes`, if any, sentences for the report.
        """

    @abstractmethod
    def report(self, results: dict[str, Any]) -> list[str]:
        """A phrase that ends the line `Evaluation:`, and then the results as lines of Markdown."""

    def counts_by_split(self, folders: Folders) -> ClassCounts:
        """The number of images of every class, for every available split."""
        return {split: part.counts() for split, part in self.parts(folders).items()}

    def load(self, folders: Folders, split: str) -> ImageSet:
        """The images of a split; a `ConfigError` if there are none."""
        parts = self.parts(folders)
        if split not in parts:
            raise ConfigError(
                f"the data has no {split} images, only {', '.join(parts)}; choose one of these, or "
                "hold images out (data.holdout, where the protocol has it)"
            )
        return parts[split].load()
