"""The configuration of a run: frozen dataclasses that the command line fills in."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from experiments.errors import ConfigError


@dataclass(frozen=True)
class Bounds:
    """What a number may be. It stands in the type of a field, and `check_config` reads it there."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf

    def __str__(self) -> str:
        words = {"at least": self.least, "above": self.above}
        words |= {"below": self.below, "at most": self.most}
        given = [f"{word} {bound}" for word, bound in words.items() if math.isfinite(bound)]
        return " and ".join(given) or "finite"

    def __contains__(self, number: float) -> bool:
        return self.above < number < self.below and self.least <= number <= self.most


Count = Annotated[int, Bounds(least=1)]
Pixels = Annotated[int, Bounds(least=0)]
Steps = Annotated[int, Bounds(least=0)]
Seed = Annotated[int, Bounds(least=0, below=2**32)]
Number = Annotated[float, Bounds()]
Weight = Annotated[float, Bounds(least=0)]
Positive = Annotated[float, Bounds(above=0)]
Share = Annotated[float, Bounds(least=0, below=1)]


LATER = {"later": True}
"""Metadata of an option that is younger than the runs that people have.

A configuration without such an option has its default, and one that has the default is written
without it: so runs from before stay readable, and go on where they stopped. The default is
therefore what those runs did, and must never change.
"""


def _may_be_absent(option: dataclasses.Field[Any], value: Any) -> bool:
    return option.metadata == LATER and value == option.default


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how they are augmented."""

    name: str = "icons"
    """Data set, as `python -m experiments datasets` lists it."""
    mean: tuple[Number, ...] = (0.5,)
    """Mean of the pixel values in [0, 1], one number or one a channel."""
    std: tuple[Positive, ...] = (0.5,)
    """Standard deviation of the pixel values, one number or one a channel."""
    pad: Pixels = 4
    """Pad by so many pixels on every side, then crop back at a random place."""
    flip: bool = True
    """Mirror half of the images from left to right."""
    color_jitter: Weight = 0.0
    """Strength of random brightness, contrast and saturation (colour images)."""
    image_size: Pixels = field(default=0, metadata=LATER)
    """Side of the square images that the model sees; 0: images are seen as they are stored."""
    resize: Pixels = field(default=0, metadata=LATER)
    """Shorter side of an image before IMAGE_SIZE pixels are cut out of its middle, in evaluation
    and where there is no random resized crop; 0: IMAGE_SIZE."""
    crop_scale: tuple[Positive, ...] = field(default=(), metadata=LATER)
    """Least and greatest part of the area in a random resized crop, such as 0.08 1; none: pad and
    crop."""
    crop_ratio: tuple[Positive, ...] = field(default=(3 / 4, 4 / 3), metadata=LATER)
    """Least and greatest width / height of a random resized crop."""
    lighting: Weight = field(default=0.0, metadata=LATER)
    """Standard deviation of random light along ImageNet's colours (PCA lighting)."""
    mixup: Weight = field(default=0.0, metadata=LATER)
    """β of mixup, whose weights are Beta(β, β); 0: none."""
    classes: Pixels = field(default=0, metadata=LATER)
    """How many of the classes, chosen once and for all; 0: all (not few-shot, multi-label)."""
    samples_per_class: Pixels = field(default=0, metadata=LATER)
    """Training images of each class, at most; 0: all (not few-shot, multi-label)."""
    imbalance: Annotated[float, Bounds(above=0, most=1)] = field(default=1.0, metadata=LATER)
    """Training images of the rarest class over those of the most frequent, falling exponentially
    between the two; 1: as they are (not few-shot, multi-label)."""
    holdout: Share = field(default=0.0, metadata=LATER)
    """Share of each class's training images, of a multi-label set of all of them, that is held out
    for validation, or with a negative margin for the episodes of the base classes."""


@dataclass(frozen=True)
class SamplingConfig:
    """How a training batch is drawn."""

    batch_size: Count = 128
    """Images in a random batch; an N-way K-shot batch has N·K."""
    strategy: str = "random"
    """`random`, or `NxK` for N classes with K images each, for example `32x4`."""


@dataclass(frozen=True)
class ModelConfig:
    """The backbone."""

    backbone: Literal["conv4", "resnet12", "resnet18", "resnet50", "resnet32", "wrn28"] = "conv4"
    """Architecture; resnet32 is the one for CIFAR, wrn28 the wide residual network."""
    widths: tuple[Count, ...] = (64, 64, 64, 64)
    """Channels of the four blocks (conv4, resnet12) or stages (resnet18, resnet50), or of the
    three stages (resnet32, wrn28)."""
    pooling: Literal["flatten", "mean"] = "flatten"
    """Features are all positions of the last block, or their mean."""
    drop_block: Share = 0.0
    """Probability that DropBlock removes a unit (resnet12)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the backbone; parameters and losses stay float32."""
    blocks: tuple[Count, ...] = field(default=(), metadata=LATER)
    """Residual blocks of every stage (not conv4, resnet12); none: the architecture's own."""
    stem: Literal["imagenet", "small"] = field(default="imagenet", metadata=LATER)
    """First layers of resnet18 and resnet50: 7×7 with stride 2 and max-pooling, which shrink the
    image to a quarter, or for small images one 3×3 convolution, which keeps its size."""
    dropout: Share = field(default=0.0, metadata=LATER)
    """Probability that dropout removes a unit between two convolutions (wrn28)."""
    dim: Pixels = field(default=0, metadata=LATER)
    """Features of a linear layer with batch normalisation behind the backbone; 0: no such layer."""
    weights: str = field(default="", metadata=LATER)
    """What the backbone starts from: a file *.safetensors, or a run directory; none: at random."""


@dataclass(frozen=True)
class NamedLoss:
    """What every protocol's loss has."""

    name: str = ""
    """Which of the protocol's losses."""


@dataclass(frozen=True)
class LossConfig(NamedLoss):
    """What is minimised."""

    name: str = "direct:sce+nca"
    """`sce`, `bce`, `nca`, `proto`, a sum `sce+nca`, or `direct:sce+nca`, `spectral:sce+nca`."""
    metric_weight: Weight = 1.0
    """Weight of the metric loss within a sum."""
    temperature: Positive = 1.0
    """Temperature of the metric losses in units of the feature dimension d: squared distances
    are divided by temperature·d, as if features were divided by √d."""
    epsilon: Weight = 1e-4
    """Regulariser of the projection onto the classifier subspace (direct sum)."""
    power: Weight = 0.3
    """Exponent p of the spectral sum."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser and its schedule."""

    learning_rate: Positive = 0.1
    """Peak learning rate."""
    momentum: Share = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    weight_decay: Weight = 5e-4
    """Added to the gradient of kernels; not of biases and normalisation."""
    schedule: Literal["cosine", "step"] = "cosine"
    """Cosine to zero, or steps down by ten."""
    warmup_steps: Steps = 0
    """Steps of linear warm-up from zero."""
    decay_steps: tuple[Count, ...] = ()
    """Steps at which `step` divides the learning rate by ten."""
    kind: Literal["sgd", "adam"] = field(default="sgd", metadata=LATER)
    """SGD with momentum, or Adam (which has no use for momentum and Nesterov's form)."""
    backbone_rate: Positive = field(default=1.0, metadata=LATER)
    """Learning rate of the backbone over that of the classifier."""
    warmup_from: Share = field(default=0.0, metadata=LATER)
    """Where the warm-up starts, as a share of the peak."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Few-shot evaluation by the nearest prototype."""

    ways: Annotated[int, Bounds(least=2)] = 5
    """Classes of an episode."""
    shots: tuple[Count, ...] = (1, 5)
    """Support images of each class, one evaluation for each number."""
    queries: Count = 15
    """Query images of each class in an episode."""
    episodes: Annotated[int, Bounds(least=2)] = 2000
    """Episodes of each evaluation."""
    seed: Seed = 0
    """Seed of the episode list."""
    distance: Literal["euclidean", "cosine"] = "euclidean"
    """How far a query is from a prototype."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run: what all protocols have. Each adds its own options, `loss` among them."""

    protocol: ClassVar[str]
    """Its name in `experiments.protocols.PROTOCOLS`."""

    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: NamedLoss = field(default_factory=NamedLoss)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: Count = 500
    """Training steps."""
    seed: Seed = 0
    """Seed of parameters, batches and augmentation."""
    validate_every: Count = 100
    """Steps between two validations, each of which writes a checkpoint."""
    log_every: Count = 10
    """Steps between two lines of the metrics file."""


@dataclass(frozen=True)
class FewShotConfig(TrainConfig):
    """A run of protocol A: few-shot transfer with integrated losses."""

    protocol: ClassVar[str] = "few-shot"

    loss: LossConfig = field(default_factory=LossConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    validation_episodes: Count = 500
    """1-shot episodes of a validation, otherwise like those of the evaluation."""


@dataclass(frozen=True)
class Folders:
    """Where data lies."""

    data_dir: Path | None = None
    """Folder of prepared data sets (TFDS; by default ~/tensorflow_datasets)."""
    manual_dir: Path | None = None
    """Folder of the archives that you downloaded (by default DATA_DIR/downloads/manual)."""


Config = TypeVar("Config")


def check_config(config: Any, section: str = "") -> None:
    """Raises unless every number is within the bounds that its field's type states.

    Args:
      config: a dataclass of numbers, tuples of numbers and further sections.
      section: what stands before the names of its fields, such as `evaluation.`.

    Raises:
      ConfigError: one is not; the message names the option and its value.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for option in dataclasses.fields(config):
        value, name = getattr(config, option.name), section + option.name
        if dataclasses.is_dataclass(value):
            check_config(value, f"{name}.")
            continue
        hint, numbers = hints[option.name], (value,)
        if isinstance(value, tuple):
            if not value and option.default != ():
                raise ConfigError(f"{name} needs at least one value")
            hint, numbers = typing.get_args(hint)[0], value
        for bounds in getattr(hint, "__metadata__", ()):
            for number in numbers:
                if isinstance(bounds, Bounds) and number not in bounds:
                    raise ConfigError(f"{name} must be {bounds}, got {number}")


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON types: dataclasses become objects, tuples lists, paths strings.

    An option that is `LATER` is left out where it has its default.
    """

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {
                option.name: plain(getattr(value, option.name))
                for option in dataclasses.fields(value)
                if not _may_be_absent(option, getattr(value, option.name))
            }
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    as_json: dict[str, Any] = plain(config)
    return as_json


def from_dict(kind: type[Config], values: dict[str, Any]) -> Config:
    """The configuration that `to_dict` made `values` from.

    Raises:
      ConfigError: a key is unknown to this version, or missing and not one that is `LATER`.
    """
    hints = typing.get_type_hints(kind)
    options: Any = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    required = {option.name for option in options if option.metadata != LATER}
    unknown = values.keys() - {option.name for option in options}
    missing = required - values.keys()
    if unknown or missing:
        raise ConfigError(
            f"not a configuration of this version ({kind.__name__}): "
            f"unknown keys {sorted(unknown)}, missing keys {sorted(missing)}"
        )

    def typed(hint, value):
        if dataclasses.is_dataclass(hint):
            return from_dict(hint, value)  # pyright: ignore[reportArgumentType]
        return tuple(value) if isinstance(value, list) else value

    return kind(**{name: typed(hints[name], value) for name, value in values.items()})
