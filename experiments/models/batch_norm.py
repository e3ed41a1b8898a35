"""Batch normalisation as one multiplication and one addition for every value."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax


class BatchNorm(nnx.BatchNorm):
    """`nnx.BatchNorm` over all axes but the last, computed in float32.

    In training, `nnx.BatchNorm` computes `(x − mean) · factor + bias`. XLA then repeats the
    difference in several passes of the gradient on CPUs. Here it is `x · factor + offset` with
    numbers `factor` and `offset` for each channel: a training step of Conv4 takes 0.6 to 0.9 times
    as long.
    """

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Array, use_running_average: bool
    ) -> Array:
        """Normalises `x` [..., c]; without running averages, updates them."""
        if use_running_average:
            return super().__call__(x, use_running_average=True)
        assert self.scale is not None
        assert self.bias is not None
        x = x.astype(jnp.float32)
        axes = tuple(range(x.ndim - 1))
        means = jnp.stack([x.mean(axes), jnp.square(x).mean(axes)])
        if self.axis_name is not None:
            means = lax.pmean(means, self.axis_name)
        mean, mean_of_squares = means
        var = jnp.maximum(0.0, mean_of_squares - jnp.square(mean))
        self.mean[...] = self.momentum * self.mean[...] + (1 - self.momentum) * mean
        self.var[...] = self.momentum * self.var[...] + (1 - self.momentum) * var
        factor = lax.rsqrt(var + self.epsilon) * self.scale[...]
        return x * factor + (self.bias[...] - mean * factor)
