"""Backbones: images to features."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from experiments.config import ModelConfig
from experiments.errors import ConfigError
from experiments.models.conv4 import Conv4
from experiments.models.layers import Backbone, DropOptions, LayerOptions
from experiments.models.projected import Projected
from experiments.models.resnet import ResNet, basic, bottleneck
from experiments.models.resnet12 import ResNet12
from experiments.models.swin import HEAD_WIDTH, Swin
from experiments.models.wide_resnet import WideResNet

__all__ = [
    "Backbone",
    "Conv4",
    "Projected",
    "ResNet",
    "ResNet12",
    "Swin",
    "WideResNet",
    "build_backbone",
]

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

_SHORTCUTS = {"pad": 0, "conv3x3": 3}
"""Kernel sizes, 0 for none."""

Shape = tuple[int, int, int]
"""Height, width and channels of an image."""


class _Architecture(NamedTuple):
    build: Callable[[ModelConfig, Shape, LayerOptions], Backbone]
    num_widths: int
    blocks: tuple[int, ...] = ()
    """Default number of blocks in every stage. Empty if it is fixed."""
    options: tuple[str, ...] = ()
    """The fields of `_OPTIONAL` that the architecture supports."""


def _conv4(config: ModelConfig, shape: Shape, options: LayerOptions) -> Backbone:
    return Conv4(config.widths, shape, config.pooling, options)


def _resnet12(config: ModelConfig, shape: Shape, options: LayerOptions) -> Backbone:
    return ResNet12(config.widths, shape, config.pooling, options, drops=_drops(config))


def _resnet18(config: ModelConfig, shape: Shape, options: LayerOptions) -> Backbone:
    return ResNet(
        config.widths,
        config.blocks,
        shape,
        config.pooling,
        options,
        block=basic,
        small_stem=config.stem == "small",
        drops=_drops(config),
    )


def _drops(config: ModelConfig) -> DropOptions:
    return DropOptions(
        dropout=config.dropout,
        drop_block=config.drop_block,
        block_size=config.drop_block_size,
        rising_steps=config.drop_block_steps,
    )


def _resnet50(config: ModelConfig, shape: Shape, options: LayerOptions) -> Backbone:
    widths, blocks, pooling = config.widths, config.blocks, config.pooling
    small = config.stem == "small"
    return ResNet(widths, blocks, shape, pooling, options, block=bottleneck, small_stem=small)


def _resnet32(config: ModelConfig, shape: Shape, options: LayerOptions) -> Backbone:
    return ResNet(
        config.widths,
        config.blocks,
        shape,
        config.pooling,
        options,
        block=basic,
        small_stem=True,
        shortcut=_SHORTCUTS[config.shortcut],
    )


def _wrn28(config: ModelConfig, shape: Shape, options: LayerOptions) -> Backbone:
    widths, blocks, rate = config.widths, config.blocks, config.dropout
    return WideResNet(widths, blocks, shape, config.pooling, options, dropout_rate=rate)


def _swin(config: ModelConfig, shape: Shape, options: LayerOptions) -> Backbone:
    if any(width % HEAD_WIDTH for width in config.widths):
        raise ConfigError(
            f"model.widths of swin must be multiples of {HEAD_WIDTH}, got {config.widths}"
        )
    rate = config.stochastic_depth
    return Swin(config.widths, config.blocks, shape, config.pooling, options, depth_rate=rate)


_DROPS = ("dropout", "drop_block", "drop_block_size", "drop_block_steps")
_ARCHITECTURES = {
    "conv4": _Architecture(_conv4, 4),
    "resnet12": _Architecture(_resnet12, 4, options=_DROPS),
    "resnet18": _Architecture(_resnet18, 4, (2, 2, 2, 2), ("stem", *_DROPS)),
    "resnet50": _Architecture(_resnet50, 4, (3, 4, 6, 3), ("stem",)),
    "resnet32": _Architecture(_resnet32, 3, (5, 5, 5), ("shortcut",)),
    "wrn28": _Architecture(_wrn28, 3, (4, 4, 4), ("dropout",)),
    "swin": _Architecture(_swin, 4, (2, 2, 6, 2), ("stochastic_depth",)),
}
_OPTIONAL = {
    "drop_block": ("DropBlock", 0),
    "drop_block_size": ("DropBlock", 5),
    "drop_block_steps": ("DropBlock", 0),
    "dropout": ("dropout", 0),
    "shortcut": ("choice of shortcuts", "pad"),
    "stem": ("choice of stems", "imagenet"),
    "stochastic_depth": ("stochastic depth", 0),
}
"""Fields that few architectures support: their names in messages, and their default values."""


def build_backbone(
    config: ModelConfig, *, image_shape: Shape, axis_name: str | None, rngs: nnx.Rngs
) -> Backbone:
    """Builds the backbone that a configuration describes.

    Args:
      config: The architecture and its options.
      image_shape: Height, width and channels of an image.
      axis_name: Device axis (of `jax.pmap` or `jax.shard_map`) over which batch statistics are
        synchronised. None on one device, and in a jit over sharded global arrays.
      rngs: Source of the initial parameters.

    Returns:
      The backbone.

    Raises:
      ConfigError: The number of widths or blocks does not match the architecture, it does not
        support an option, or the images are smaller than 16×16.
    """
    architecture = _ARCHITECTURES[config.backbone]
    _check(config, architecture, image_shape)
    if not config.blocks:
        config = dataclasses.replace(config, blocks=architecture.blocks)
    options = LayerOptions(_DTYPES[config.dtype], axis_name, rngs)
    backbone = architecture.build(config, image_shape, options)
    if not config.dim and config.projection != "norm":
        return backbone
    normalize = config.projection != "linear"
    return Projected(backbone, config.dim, normalize=normalize, axis_name=axis_name, rngs=rngs)


def _check(config: ModelConfig, architecture: _Architecture, image_shape: Shape) -> None:
    height, width, channels = image_shape
    numbers = {"widths": architecture.num_widths}
    if config.blocks:
        numbers["blocks"] = len(architecture.blocks)
    for name, number in numbers.items():
        given = getattr(config, name)
        if number == 0:
            raise ConfigError(f"{config.backbone} does not support model.{name}, got {given}")
        if len(given) != number:
            raise ConfigError(
                f"model.{name} of {config.backbone} needs {number} numbers, got {given}"
            )
    if min(height, width) < 16 or channels < 1:
        raise ConfigError(
            f"backbones need images of at least 16×16 pixels, got {height}×{width}×{channels}"
        )
    if config.projection == "norm" and config.dim:
        raise ConfigError(
            f"model.projection = norm has no linear layer, got model.dim = {config.dim}; set "
            "model.dim = 0"
        )
    if config.projection == "linear" and not config.dim:
        raise ConfigError("model.projection = linear needs model.dim, the outputs of the layer")
    for name, (what, default) in _OPTIONAL.items():
        value = getattr(config, name)
        if name not in architecture.options and value != default:
            raise ConfigError(f"{config.backbone} has no {what}, got model.{name}={value}")
