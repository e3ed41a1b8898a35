"""The options that all runs have: frozen dataclasses that the command line fills in."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro
from annotated_types import Ge, Gt, Le, Lt

from experiments.core.errors import ConfigError, nearest, unknown
from experiments.core.storage import check_local, storage_path
from experiments.core.terminal import one_line

CONFIG_FILE = "config.json"
# Upper bounds are above every published setting, and keep sizes and float32 from overflowing.
MOST = 10**6
Count = Annotated[int, Ge(1), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(10**8)]
Pixels = Annotated[int, Ge(0), Le(10**4)]
Width = Annotated[int, Ge(1), Le(10**5)]
WidthOrZero = Annotated[int, Ge(0), Le(10**5)]
Several = Annotated[int, Ge(2), Le(MOST)]
Side = Annotated[int, Ge(1), Le(1000)]
Depth = Annotated[int, Ge(1), Le(200)]
Steps = Annotated[int, Ge(0), Le(10**9)]
StepCount = Annotated[int, Ge(1), Le(10**9)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
Weight = Annotated[float, Ge(0), Le(MOST)]
Positive = Annotated[float, Gt(0), Le(MOST)]
Signed = Annotated[float, Ge(-MOST), Le(MOST)]
Share = Annotated[float, Ge(0), Lt(1)]
Ratio = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how they are augmented."""

    name: str = "icons"
    """Data set, as `python -m experiments datasets` lists it, or folder:PATH with images of your
    own: PATH/CLASS/NAME.jpg, PATH/train/CLASS/NAME.jpg and so on, or PATH/labels.csv. Without
    splits, 30 % of every class are for test; few-shot protocols train on half of the classes.
    Transparent images are laid on white; folder:PATH@black takes another colour."""
    mean: tuple[Signed, ...] = ()
    """Mean of the pixel values in [0, 1]: one number, or one per channel; empty: 0.5, or that of
    folder:PATH."""
    std: tuple[Positive, ...] = ()
    """Standard deviation of the pixel values: one number, or one per channel; empty: as mean."""
    pad: Pixels = 4
    """Pad every side by this many pixels, then crop back at a random position."""
    flip: bool = True
    """Flip each image horizontally with probability 0.5."""
    color_jitter: Weight = 0.0
    """Strength of random brightness, contrast and saturation (colour images)."""
    image_size: Pixels = 0
    """Side of the square images that the model receives; 0: as stored (photographs: the height)."""
    resize: Pixels = 0
    """Shorter side before the crop at the centre in evaluation; 0: --data.image-size."""
    resize_to_square: bool = False
    """Resize both sides to --data.resize pixels, whatever the aspect ratio."""
    crop_scale: tuple[Ratio, ...] = ()
    """Range of the share of the area in a random resized crop, as 0.08 1; empty: pad and crop. Its
    width / height is between 3/4 and 4/3, as in torchvision."""
    lighting: Weight = 0.0
    """Standard deviation of PCA colour noise with ImageNet's components."""
    mixup: Weight = 0.0
    """β of mixup, which draws its weights from Beta(β, β); 0: no mixup."""
    mixed_labels: Literal["both", "larger"] = "both"
    """Labels of mixup in the loss: both with their shares, or the larger share's."""


@dataclass(frozen=True)
class SamplingConfig:
    """How a training batch is drawn."""

    batch_size: Count = 128
    """Images in a random batch; ignored by NxK batches, which have N·K."""
    strategy: str = "random"
    """`random`, or `NxK` for N classes with K images each, for example `32x4`."""


@dataclass(frozen=True)
class ModelConfig:
    """The backbone."""

    backbone: Literal["conv4", "resnet12", "resnet18", "resnet50", "resnet32", "wrn28", "swin"] = (
        "conv4"
    )
    """Architecture; resnet32 is the ResNet for CIFAR, wrn28 the Wide ResNet-28."""
    widths: tuple[Width, ...] = (64, 64, 64, 64)
    """Channels of the four blocks or stages, or of the three of resnet32 and wrn28."""
    pooling: Literal["flatten", "mean"] = "flatten"
    """Flatten the last feature map, or average it over positions."""
    drop_block: Share = 0.0
    """Share of units that DropBlock removes in the last two stages (resnet12, resnet18)."""
    drop_block_size: Side = 5
    """Side of the squares that DropBlock removes."""
    drop_block_steps: Steps = 0
    """Training steps in which this share rises linearly from 0; 0: it is constant."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of the backbone; parameters and losses stay float32."""
    blocks: tuple[Depth, ...] = ()
    """Residual blocks of every stage, as 3 4 6 3, with which resnet18 is a ResNet-34; empty: as
    published. Unavailable for conv4 and resnet12."""
    dropout: Share = 0.0
    """Dropout inside the blocks of wrn28, or in the first two stages of resnet12, resnet18."""
    stochastic_depth: Share = 0.0
    """Probability that a branch of the last block is left out, from 0 in the first (swin)."""
    dim: WidthOrZero = 0
    """Outputs of an extra linear layer; 0: no such layer."""
    projection: Literal["linear-norm", "linear", "norm"] = "linear-norm"
    """What follows the backbone. Without --model.dim: nothing (linear-norm), or batch normalisation
    (norm). With it: a linear layer and batch normalisation, or a linear layer with a bias."""
    shortcut: Literal["pad", "conv3x3"] = "pad"
    """Shortcuts of resnet32 that change the shape: zero channels, or 3×3 convolutions."""
    weights: str = ""
    """Initial weights: a file *.safetensors for the backbone, or the directory of a run, to go on
    with another loss or data set in a new directory. With the same classes in the same order, of
    data sets that share images, and parameters of the same shapes, the classifier (or proxies, or
    prototypes) is the run's, too; else it is new. Empty: random."""


@dataclass(frozen=True)
class NamedLoss:
    """The option that the losses of all protocols have."""

    name: str = ""
    """Which of the protocol's losses."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser and its schedule."""

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    """SGD with momentum, Adam, or AdamW (both ignore momentum and nesterov)."""
    learning_rate: Positive = 0.1
    """Peak learning rate."""
    momentum: Share = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    weight_decay: Weight = 5e-4
    """L2 decay, added to the gradient; of adamw, times the learning rate, to the update."""
    decay_all: bool = False
    """Decay all parameters; else biases and the parameters of normalisation are exempt."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """Cosine decay to zero, division by ten at --optimizer.decay-steps, or none. A run can go on
    with more --steps in its directory, except with cosine, which depends on their number."""
    warmup_steps: Steps = 0
    """Steps of linear warm-up."""
    warmup_from: Share = 0.0
    """Learning rate at the first step of the warm-up, as a fraction of the peak."""
    decay_steps: tuple[StepCount, ...] = ()
    """Steps at which the schedule `step` divides the learning rate by ten."""
    backbone_rate: Positive = 1.0
    """Learning rate of the backbone divided by that of the classifier."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run: what all protocols have. Each has its own `loss`, and adds its sections."""

    protocol: ClassVar[str]
    """Name of the protocol in `experiments.papers.PROTOCOLS`."""

    preset: Annotated[str, tyro.conf.Fixed, tyro.conf.Suppress] = ""
    """Name of the preset that the options started from."""
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: NamedLoss = field(default_factory=NamedLoss)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: StepCount = 500
    """Training steps."""
    seed: Seed = 0
    """Seed of parameters, batches and augmentation."""
    validate_every: StepCount = 100
    """Validate and write a checkpoint every this many steps."""
    log_every: StepCount = 10
    """Write metrics every this many steps."""
    report_last: bool = False
    """Evaluate the last checkpoint too, not only the best by validation."""

    def fixed_steps(self) -> str:
        """Why a run cannot go on with more steps than before; empty if it can."""
        cosine = self.optimizer.schedule == "cosine"
        return "the cosine schedule depends on their number" if cosine else ""


ParallelMode = Literal["pmap", "jit"]
"""Data parallelism by `jax.pmap`, or by a jit over sharded global arrays."""


@dataclass(frozen=True)
class Folders:
    """Where data is stored."""

    data_dir: Path | None = None
    """Folder of prepared data sets, or gs://BUCKET/PATH; by default ~/tensorflow_datasets."""
    manual_dir: Path | None = None
    """Folder of the archives that you downloaded (by default DATA_DIR/downloads/manual)."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is not None:
                object.__setattr__(self, name, storage_path(str(value), name))
        check_local(self.manual_dir, "--manual-dir")


_BOUNDS = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


def check_config(config: Any, section: str = "") -> None:
    """Raises a `ConfigError` for an empty tuple, and for a number out of bounds or not finite.

    Bounds are in the type of a field; its metadata says whether the values of a tuple must be
    `distinct`. The message names the field, after the prefix `section`.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for option in dataclasses.fields(config):
        value, name = vars(config)[option.name], section + option.name
        if dataclasses.is_dataclass(value):
            check_config(value, f"{name}.")
            continue
        hint, numbers = hints[option.name], (value,)
        if isinstance(value, tuple):
            if not value and option.default != ():
                raise ConfigError(f"{name} needs at least one value")
            if option.metadata.get("distinct") and len({*value}) < len(value):
                raise ConfigError(f"{name} must be different values, got {value}")
            hint, numbers = typing.get_args(hint)[0], value
        bounds = [
            (*_BOUNDS[type(bound)], *dataclasses.astuple(bound))
            for bound in getattr(hint, "__metadata__", ())
            if type(bound) in _BOUNDS
        ]
        allowed = " and ".join(f"{words} {limit}" for _, words, limit in bounds)
        for number in numbers:
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{name} must be finite, got {number}")
            if not all(within(number, limit) for within, _, limit in bounds):
                raise ConfigError(f"{name} must be {allowed}, got {_short(number)}")


def _short(value: Any, most: int = 60) -> str:
    """A value as text, of which a longer one is cut."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most // 2]}… ({len(text)} characters)"


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON types: dataclasses become objects, tuples lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """A line for every name whose values differ, as in `seed: 0 -> 1`."""

    def shown(run: Mapping[str, Any], name: str) -> str:
        return _short(repr(run[name]), 200) if name in run else "(absent)"

    return [
        f"{one_line(name[:200])}: {shown(first, name)} -> {shown(second, name)}"
        for name in {**first, **second}
        if name not in first or name not in second or first[name] != second[name]
    ]


Config = TypeVar("Config")


def from_dict(kind: type[Config], values: Any, section: str = "") -> Config:
    """The configuration that `to_dict` made `values` from, if it has the keys of this version.

    Every value has the type of its option; the `ConfigError` for another one names the option,
    after the prefix `section`. Bounds are those of `check_config`, which is not called.
    """
    default, hints = vars(kind()), typing.get_type_hints(kind)
    values = values if isinstance(values, dict) else {}
    if default.keys() != values.keys():
        raise ConfigError(
            f"{section[:-1] or 'configuration'} of another version ({kind.__name__}): unknown keys "
            f"{_short(sorted(values.keys() - default.keys()))}, missing keys "
            f"{_short(sorted(default.keys() - values.keys()))}; train the run again, or use the "
            "version that trained it"
        )
    found = {}
    for name, value in values.items():
        option, several = section + name, isinstance(default[name], tuple)
        if dataclasses.is_dataclass(default[name]):
            found[name] = from_dict(type(default[name]), value, f"{option}.")
            continue
        given = tuple(value) if several and isinstance(value, list) else value
        # Such as 20.0, True or "20" for 20.
        if isinstance(given, tuple) != several or parse_option(hints[name], option, given) != given:
            raise ConfigError(f"{option}: {_short(repr(value))} is of another type")
        found[name] = given
    return kind(**found)


def option_types(config: Any) -> dict[str, Any]:
    """The type of every option of a configuration, by its name such as `loss.name`."""
    hints, found = typing.get_type_hints(type(config)), {}
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            found |= {f"{name}.{option}": kind for option, kind in option_types(value).items()}
        elif name != "preset":
            found[name] = hints[name]
    return found


def replace_option(config: Config, option: str, value: Any) -> Config:
    """The configuration with another value of one option, such as `loss.name`."""
    section, dot, rest = option.partition(".")
    if dot:
        value = replace_option(vars(config)[section], rest, value)
    return dataclasses.replace(config, **{section: value})  # pyright: ignore[reportArgumentType]


def set_options(config: Config, options: Mapping[str, Any]) -> Config:
    """The configuration with other values of options, such as `{"loss.name": "sce"}`.

    Names are those of the command line. Values may be of the type of the option, or text as on an
    axis of `sweep`. Raises a `ConfigError` for an unknown option, and a value of another type.
    """
    types = option_types(config)
    for name, value in options.items():
        option = check_option(name, types)
        config = replace_option(config, option, parse_option(types[option], option, value))
    return config


def check_option(name: str, types: Mapping[str, Any]) -> str:
    """The option of `option_types` that a name means, which may have hyphens; else an error."""
    option = name.replace("-", "_")
    if option not in types:
        raise unknown("option", option, types, "train PRESET --help lists them")
    return option


def parse_option(expected: Any, option: str, value: Any) -> Any:
    """A value, or text, as the type of an option; the numbers of several are joined by `+`."""
    if typing.get_origin(expected) is tuple:
        (element, *_) = typing.get_args(expected)
        if isinstance(value, str):
            value = value.split("+")
        parts = value if isinstance(value, Iterable) else (value,)
        return tuple(parse_option(element, option, part) for part in parts)
    text, choices = str(value), {str(choice): choice for choice in typing.get_args(expected)}
    if expected is bool:
        text, choices = text.capitalize(), {"True": True, "False": False}
    if choices and text not in choices:
        hint = nearest(text[:100], choices)
        known = f"must be one of {', '.join(choices)}{'; ' * bool(hint)}{hint}"
        raise ConfigError(f"{option}: {_short(text)!r} {known}")
    try:
        return choices[text] if choices else expected(text)
    except ValueError:
        kind = expected.__name__
        raise ConfigError(f"{option}: {_short(text)!r} must be of type {kind}") from None
