"""Backbones: images to features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.core.config import ModelConfig
from experiments.core.errors import ConfigError
from experiments.models.layers import Backbone, LayerOptions, Projected
from experiments.models.pooled import Conv4, ResNet12
from experiments.models.resnet import ResNet, WideResNet, basic, bottleneck
from experiments.models.swin import HEAD_WIDTH, Swin

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class _Architecture(NamedTuple):
    build: Callable[[ModelConfig, int, LayerOptions], Backbone]
    num_widths: int
    blocks: tuple[int, ...] = ()
    """Default number of blocks in every stage. Empty if it is fixed."""
    options: tuple[str, ...] = ()
    """The fields of `_OPTIONAL` that the architecture supports."""


def _resnet32(config: ModelConfig, channels: int, options: LayerOptions) -> Backbone:
    shortcut = {"pad": 0, "conv3x3": 3}[config.shortcut]
    return ResNet(config, channels, options, block=basic, shortcut=shortcut, small_stem=True)


_DROPS = ("dropout", "drop_block", "drop_block_size", "drop_block_steps")
_RESNET18, _RESNET50 = partial(ResNet, block=basic), partial(ResNet, block=bottleneck)
_ARCHITECTURES = {
    "conv4": _Architecture(Conv4, 4),
    "resnet12": _Architecture(ResNet12, 4, options=_DROPS),
    "resnet18": _Architecture(_RESNET18, 4, (2, 2, 2, 2), _DROPS),
    "resnet50": _Architecture(_RESNET50, 4, (3, 4, 6, 3)),
    "resnet32": _Architecture(_resnet32, 3, (5, 5, 5), ("shortcut",)),
    "wrn28": _Architecture(WideResNet, 3, (4, 4, 4), ("dropout",)),
    "swin": _Architecture(Swin, 4, (2, 2, 6, 2), ("stochastic_depth",)),
}
_OPTIONAL = {option for of in _ARCHITECTURES.values() for option in of.options}
"""Fields that few architectures support."""


def build_backbone(
    config: ModelConfig,
    *,
    image_shape: tuple[int, ...],
    axis_name: str | None,
    rngs: nnx.Rngs,
) -> Backbone:
    """Builds the backbone that a configuration describes, for images [height, width, channels].

    Batch statistics are synchronised over the mapped axis `axis_name`: None on one device, and in a
    jit over sharded global arrays. Raises a `ConfigError` where options or images do not fit.
    """
    architecture = _ARCHITECTURES[config.backbone]
    _check(config, architecture, image_shape)
    if not config.blocks:
        config = replace(config, blocks=architecture.blocks)
    options = LayerOptions(_DTYPES[config.dtype], axis_name, rngs)
    backbone = architecture.build(config, image_shape[-1], options)
    image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    backbone.num_features = jax.eval_shape(partial(backbone, train=False), image).shape[-1]
    projected = config.dim or config.projection == "norm"
    return Projected(backbone, config, options) if projected else backbone


def _check(config: ModelConfig, architecture: _Architecture, image_shape: tuple[int, ...]) -> None:
    for name in ("blocks", *sorted(_OPTIONAL)):
        value, default = vars(config)[name], getattr(ModelConfig, name)
        supported = architecture.blocks if name == "blocks" else name in architecture.options
        if value != default and not supported:
            raise ConfigError(f"{config.backbone} does not support model.{name}, got {value}")
    for name, number in (("widths", architecture.num_widths), ("blocks", len(architecture.blocks))):
        given = vars(config)[name]
        if len(given) != number and (given or name == "widths"):
            raise ConfigError(
                f"model.{name} of {config.backbone} needs {number} numbers, got {given}"
            )
    if config.backbone == "swin" and any(width % HEAD_WIDTH for width in config.widths):
        raise ConfigError(
            f"model.widths of swin must be multiples of {HEAD_WIDTH}, got {config.widths}"
        )
    height, width, channels = image_shape
    if min(height, width) < 16 or channels < 1:
        raise ConfigError(
            f"backbones need images of at least 16×16 pixels, got {height}×{width}×{channels}"
        )
    if config.projection == "norm" and config.dim:
        raise ConfigError(f"model.projection = norm needs model.dim = 0, got {config.dim}")
    if config.projection == "linear" and not config.dim:
        raise ConfigError("model.projection = linear needs model.dim, the outputs of the layer")
