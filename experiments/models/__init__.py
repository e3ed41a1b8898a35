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
    blocks: tuple[int, ...] = ()  # Default number in every stage; empty if it is fixed.
    options: tuple[str, ...] = ()  # The fields of `_OPTIONAL` that it supports.


_DROPS = ("dropout", "drop_block", "drop_block_size", "drop_block_steps")
_ARCHITECTURES = {
    "conv4": _Architecture(Conv4, 4),
    "resnet12": _Architecture(ResNet12, 4, options=_DROPS),
    "resnet18": _Architecture(partial(ResNet, block=basic), 4, (2, 2, 2, 2), _DROPS),
    "resnet50": _Architecture(partial(ResNet, block=bottleneck), 4, (3, 4, 6, 3)),
    "resnet32": _Architecture(
        partial(ResNet, block=basic, small_stem=True), 3, (5, 5, 5), ("shortcut",)
    ),
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
    name, given, supported = config.backbone, vars(config), architecture.options
    supported += ("blocks",) * bool(architecture.blocks)
    for option in ("blocks", *sorted(_OPTIONAL)):
        if given[option] != getattr(ModelConfig, option) and option not in supported:
            raise ConfigError(f"{name} does not support model.{option}, got {given[option]}")
    numbers = {"widths": architecture.num_widths}
    numbers |= {"blocks": len(architecture.blocks)} if config.blocks else {}
    for option, number in numbers.items():
        if len(given[option]) != number:
            raise ConfigError(
                f"model.{option} of {name} needs {number} numbers, got {given[option]}"
            )
    if name == "swin" and any(width % HEAD_WIDTH for width in config.widths):
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
