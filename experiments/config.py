"""The configuration of a run: frozen dataclasses that the command line fills in."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how they are augmented."""

    name: str = "icons"
    """Data set, as `python -m experiments datasets` lists it."""
    mean: tuple[float, ...] = (0.5,)
    """Mean of the pixel values in [0, 1], one number or one a channel."""
    std: tuple[float, ...] = (0.5,)
    """Standard deviation of the pixel values, one number or one a channel."""
    pad: int = 4
    """Pad by so many pixels on every side, then crop back at a random place."""
    flip: bool = True
    """Mirror half of the images from left to right."""
    color_jitter: float = 0.0
    """Strength of random brightness, contrast and saturation (colour images)."""


@dataclass(frozen=True)
class SamplingConfig:
    """How a training batch is drawn."""

    batch_size: int = 128
    """Images in a random batch; an N-way K-shot batch has N·K."""
    strategy: str = "random"
    """`random`, or `NxK` for N classes with K images each, for example `32x4`."""


@dataclass(frozen=True)
class ModelConfig:
    """The backbone."""

    backbone: Literal["conv4", "resnet12"] = "conv4"
    """Architecture."""
    widths: tuple[int, ...] = (64, 64, 64, 64)
    """Channels of the four blocks."""
    pooling: Literal["flatten", "mean"] = "flatten"
    """Features are all positions of the last block, or their mean."""
    drop_block: float = 0.0
    """Probability that DropBlock removes a unit (ResNet-12)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the backbone; parameters and losses stay float32."""


@dataclass(frozen=True)
class LossConfig:
    """What is minimised."""

    name: str = "direct:sce+nca"
    """`sce`, `bce`, `nca`, `proto`, a sum `sce+nca`, or `direct:sce+nca`, `spectral:sce+nca`."""
    metric_weight: float = 1.0
    """Weight of the metric loss within a sum."""
    temperature: float = 1.0
    """Temperature of the metric losses in units of the feature dimension d: squared distances
    are divided by temperature·d, as if features were divided by √d."""
    epsilon: float = 1e-4
    """Regulariser of the projection onto the classifier subspace (direct sum)."""
    power: float = 0.3
    """Exponent p of the spectral sum."""


@dataclass(frozen=True)
class OptimizerConfig:
    """SGD with momentum and its schedule."""

    learning_rate: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    weight_decay: float = 5e-4
    """Added to the gradient of kernels; not of biases and normalisation."""
    schedule: Literal["cosine", "step"] = "cosine"
    """Cosine to zero, or steps down by ten."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    decay_steps: tuple[int, ...] = ()
    """Steps at which `step` divides the learning rate by ten."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Few-shot evaluation by the nearest prototype."""

    ways: int = 5
    """Classes of an episode."""
    shots: tuple[int, ...] = (1, 5)
    """Support images of each class, one evaluation for each number."""
    queries: int = 15
    """Query images of each class in an episode."""
    episodes: int = 2000
    """Episodes of each evaluation."""
    seed: int = 0
    """Seed of the episode list."""
    distance: Literal["euclidean", "cosine"] = "euclidean"
    """How far a query is from a prototype."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    steps: int = 500
    """Training steps."""
    seed: int = 0
    """Seed of parameters, batches and augmentation."""
    validate_every: int = 100
    """Steps between two validations, each of which writes a checkpoint."""
    validation_episodes: int = 500
    """5-way 1-shot episodes of a validation."""
    log_every: int = 10
    """Steps between two lines of the metrics file."""


@dataclass(frozen=True)
class Folders:
    """Where data lies."""

    data_dir: Path | None = None
    """Folder of prepared data sets (TFDS; by default ~/tensorflow_datasets)."""
    manual_dir: Path | None = None
    """Folder of the archives that you downloaded (by default DATA_DIR/downloads/manual)."""


Config = TypeVar("Config")


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON types: dataclasses become objects, tuples lists, paths strings."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {
                field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
            }
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    as_json: dict[str, Any] = plain(config)
    return as_json


def from_dict(kind: type[Config], values: dict[str, Any]) -> Config:
    """The configuration that `to_dict` made `values` from.

    Raises:
      ValueError: a key is unknown to this version, or missing.
    """
    hints = typing.get_type_hints(kind)
    unknown, missing = values.keys() - hints.keys(), hints.keys() - values.keys()
    if unknown or missing:
        raise ValueError(
            f"not a configuration of this version ({kind.__name__}): "
            f"unknown keys {sorted(unknown)}, missing keys {sorted(missing)}"
        )

    def typed(hint, value):
        if dataclasses.is_dataclass(hint):
            return from_dict(hint, value)  # pyright: ignore[reportArgumentType]
        return tuple(value) if isinstance(value, list) else value

    return kind(**{name: typed(hints[name], value) for name, value in values.items()})
