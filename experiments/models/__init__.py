"""Backbones: images to features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from experiments.config import ModelConfig
from experiments.errors import ConfigError
from experiments.models.conv4 import Conv4
from experiments.models.projected import Projected
from experiments.models.resnet import ResNet, basic, bottleneck
from experiments.models.resnet12 import ResNet12
from experiments.models.wide_resnet import WideResNet

__all__ = ["Backbone", "Conv4", "Projected", "ResNet", "ResNet12", "WideResNet", "build_backbone"]

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
_NUMERALS = {3: "three", 4: "four"}


Backbone = Conv4 | ResNet12 | ResNet | WideResNet | Projected
"""A module with `num_features`, called as `model(images, train=..., keys=...)`."""


class _Architecture(NamedTuple):
    build: Callable[..., Backbone]
    """From a configuration, the blocks of every stage, and what all backbones take."""
    num_widths: int
    blocks: tuple[int, ...] = ()
    """Blocks of every stage; empty where their number is fixed."""
    options: tuple[str, ...] = ()
    """Which of the fields in `_OPTIONAL` it takes."""


def _conv4(config: ModelConfig, blocks: tuple[int, ...], **common: Any) -> Conv4:
    return Conv4(config.widths, **common)


def _resnet12(config: ModelConfig, blocks: tuple[int, ...], **common: Any) -> ResNet12:
    return ResNet12(config.widths, drop_rate=config.drop_block, **common)


def _resnet18(config: ModelConfig, blocks: tuple[int, ...], **common: Any) -> ResNet:
    small = config.stem == "small"
    return ResNet(config.widths, blocks, block=basic, small_stem=small, **common)


def _resnet50(config: ModelConfig, blocks: tuple[int, ...], **common: Any) -> ResNet:
    small = config.stem == "small"
    return ResNet(config.widths, blocks, block=bottleneck, small_stem=small, **common)


def _resnet32(config: ModelConfig, blocks: tuple[int, ...], **common: Any) -> ResNet:
    return ResNet(config.widths, blocks, block=basic, small_stem=True, project=False, **common)


def _wrn28(config: ModelConfig, blocks: tuple[int, ...], **common: Any) -> WideResNet:
    return WideResNet(config.widths, blocks, dropout_rate=config.dropout, **common)


_ARCHITECTURES = {
    "conv4": _Architecture(_conv4, 4),
    "resnet12": _Architecture(_resnet12, 4, options=("drop_block",)),
    "resnet18": _Architecture(_resnet18, 4, (2, 2, 2, 2), ("stem",)),
    "resnet50": _Architecture(_resnet50, 4, (3, 4, 6, 3), ("stem",)),
    "resnet32": _Architecture(_resnet32, 3, (5, 5, 5)),
    "wrn28": _Architecture(_wrn28, 3, (4, 4, 4), ("dropout",)),
}
_OPTIONAL = {
    "drop_block": ("DropBlock", 0),
    "dropout": ("dropout", 0),
    "stem": ("stem", "imagenet"),
}
"""Fields that few backbones take: what they set, and their value for the others."""


def build_backbone(
    config: ModelConfig,
    *,
    image_shape: tuple[int, int, int],
    axis_name: str | None,
    rngs: nnx.Rngs,
) -> Backbone:
    """The backbone that a configuration names.

    Args:
        config: Which backbone, its widths and blocks, pooling, what it drops, and compute type.
        image_shape: Height, width and channels of an image.
        axis_name: Device axis (of `jax.pmap` or `jax.shard_map`) over which batch statistics are
            synchronised; None on one device and under a jit over sharded global arrays.
        rngs: Source of the initial parameters.

    Returns:
        A module with `num_features`, called as `model(images, train=..., keys=...)`.

    Raises:
        ConfigError: If the configuration names nothing that exists, its widths or blocks are not as
            many as the backbone has, it sets what the backbone does not have, or the images are
            too small to be halved four times.
    """
    architecture = _ARCHITECTURES.get(config.backbone)
    if architecture is None:
        raise ConfigError(
            f"model.backbone must be one of {', '.join(_ARCHITECTURES)}, got {config.backbone!r}"
        )
    _check(config, architecture, image_shape)
    backbone = architecture.build(
        config,
        config.blocks or architecture.blocks,
        image_shape=image_shape,
        pooling=config.pooling,
        dtype=_DTYPES[config.dtype],
        axis_name=axis_name,
        rngs=rngs,
    )
    if not config.dim:
        return backbone
    return Projected(backbone, config.dim, axis_name=axis_name, rngs=rngs)


def _check(
    config: ModelConfig, architecture: _Architecture, image_shape: tuple[int, int, int]
) -> None:
    height, width, channels = image_shape
    for name, number in (("widths", architecture.num_widths), ("blocks", len(architecture.blocks))):
        given = getattr(config, name)
        if name == "blocks" and not given:
            continue
        if number == 0:
            raise ConfigError(f"{config.backbone} has no model.{name} to choose, got {given}")
        if len(given) != number or min(given) < 1:
            raise ConfigError(
                f"model.{name} of {config.backbone} needs {_NUMERALS[number]} positive numbers, "
                f"got {given}"
            )
    if min(height, width) < 16 or channels < 1:
        raise ConfigError(
            f"backbones need images of at least 16×16 pixels, got {height}×{width}×{channels}"
        )
    if config.pooling not in ("flatten", "mean"):
        raise ConfigError(f"model.pooling must be flatten or mean, got {config.pooling!r}")
    if config.stem not in ("imagenet", "small"):
        raise ConfigError(f"model.stem must be imagenet or small, got {config.stem!r}")
    if config.dtype not in _DTYPES:
        raise ConfigError(f"model.dtype must be one of {', '.join(_DTYPES)}, got {config.dtype!r}")
    for name in ("drop_block", "dropout"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"model.{name} must be in [0, 1), got {getattr(config, name)}")
    for name, (what, unset) in _OPTIONAL.items():
        value = getattr(config, name)
        if name not in architecture.options and value != unset:
            raise ConfigError(f"{config.backbone} has no {what}, got model.{name}={value}")
