"""Backbones: images to features."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from experiments.config import ModelConfig
from experiments.errors import ConfigError
from experiments.models.conv4 import Conv4
from experiments.models.resnet12 import ResNet12

__all__ = ["Conv4", "ResNet12", "build_backbone"]

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def build_backbone(
    config: ModelConfig,
    *,
    image_shape: tuple[int, int, int],
    axis_name: str | None,
    rngs: nnx.Rngs,
) -> Conv4 | ResNet12:
    """The backbone that a configuration names.

    Args:
        config: Which backbone, its widths, pooling, DropBlock rate and compute type.
        image_shape: Height, width and channels of an image.
        axis_name: Device axis (of `jax.pmap` or `jax.shard_map`) over which batch statistics are
            synchronised; None on one device and under a jit over sharded global arrays.
        rngs: Source of the initial parameters.

    Returns:
        A module with `num_features`, called as `model(images, train=..., keys=...)`.

    Raises:
        ConfigError: If the configuration names nothing that exists, does not have four widths, or
            the images are too small for four poolings.
    """
    height, width, channels = image_shape
    if len(config.widths) != 4 or min(config.widths) < 1:
        raise ConfigError(f"model.widths needs four positive numbers, got {config.widths}")
    if min(height, width) < 16 or channels < 1:
        raise ConfigError(
            f"four poolings need images of at least 16×16 pixels, got {height}×{width}×{channels}"
        )
    if config.pooling not in ("flatten", "mean"):
        raise ConfigError(f"model.pooling must be flatten or mean, got {config.pooling!r}")
    if config.dtype not in _DTYPES:
        raise ConfigError(f"model.dtype must be one of {', '.join(_DTYPES)}, got {config.dtype!r}")
    if not 0 <= config.drop_block < 1:
        raise ConfigError(f"model.drop_block must be in [0, 1), got {config.drop_block}")
    dtype = _DTYPES[config.dtype]
    if config.backbone == "conv4":
        if config.drop_block > 0:
            raise ConfigError(f"conv4 has no DropBlock, got model.drop_block={config.drop_block}")
        return Conv4(
            config.widths,
            image_shape,
            pooling=config.pooling,
            dtype=dtype,
            axis_name=axis_name,
            rngs=rngs,
        )
    if config.backbone == "resnet12":
        return ResNet12(
            config.widths,
            image_shape,
            pooling=config.pooling,
            drop_rate=config.drop_block,
            dtype=dtype,
            axis_name=axis_name,
            rngs=rngs,
        )
    raise ConfigError(f"model.backbone must be conv4 or resnet12, got {config.backbone!r}")
