"""Conv4: four blocks of a 3×3 convolution, batch normalisation, ReLU and max-pooling."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from experiments.models.layers import ConvNorm, max_pool, pool_features


class Conv4(nnx.Module):
    """The four-block convolutional backbone of few-shot learning (Vinyals et al., 2016).

    Args:
        widths: Channels of the blocks.
        image_shape: Height, width and channels of an image.
        pooling: `flatten` or `mean` over the positions of the last block.
        dtype: Compute type; parameters, statistics and features are float32.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        image_shape: tuple[int, int, int],
        *,
        pooling: str,
        dtype: DTypeLike,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape
        self.pooling = pooling
        positions = (height >> len(widths)) * (width >> len(widths))
        self.num_features = widths[-1] * (1 if pooling == "mean" else positions)
        self.layers = nnx.List(
            ConvNorm(c_in, c_out, 3, dtype=dtype, axis_name=axis_name, rngs=rngs)
            for c_in, c_out in zip((channels, *widths), widths, strict=False)
        )

    def __call__(self, images: Array, *, train: bool, keys: Array | None = None) -> Array:
        """Features of a batch.

        Args:
            images: float32 [n, h, w, c], normalised.
            train: Normalise by the batch's statistics and update the running ones.
            keys: Unused; the backbones share one signature.

        Returns:
            float32 [n, num_features].
        """
        del keys
        x = images
        for layer in self.layers:
            # Pool, then ReLU: equal to the usual order, since ReLU does not decrease.
            x = jax.nn.relu(max_pool(layer(x, train=train)))
        return pool_features(x, self.pooling)
