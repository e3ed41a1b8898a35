"""Mixup: convex combinations of images, for losses of two labels."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Mixed(NamedTuple):
    """Images of two samples each, and the label of the other one."""

    images: Array
    """`weights · images + (1 − weights) · partners`, float [n, ...]."""
    partner_labels: Array
    """int32 [n]."""


def mixup_weights(keys: Array, beta: float) -> Array:
    """Weights λ ~ Beta(β, β) of the samples against their partners.

    Args:
        keys: Typed PRNG keys [n], one for each sample; or one key [] for a weight that the whole
            batch shares, as in the paper's code.
        beta: β; 1 is the uniform distribution.

    Returns:
        float32, of the shape of `keys`.
    """

    def draw(key: Array) -> Array:
        return jax.random.beta(key, beta, beta, dtype=jnp.float32)

    return jax.vmap(draw)(keys) if keys.ndim else draw(keys)


def mixup(images: Array, labels: Array, weights: Array, *, axis_name: str | None = None) -> Mixed:
    """Mix every sample with the one that stands as far from the other end of the global batch.

    A batch in random order makes that a random partner. The loss of such a batch is
    λ·ℓ(x, y) + (1 − λ)·ℓ(x, y'), with y' the label of the partner (Zhang et al., 2018):

        mixed = mixup(images, labels, weights)
        loss = weights * loss_of(features, labels) + (1 - weights) * loss_of(features, mixed[1])

    Args:
        images: Float [n, ...], after all other augmentation.
        labels: Integers [n].
        weights: λ, [n] or [].
        axis_name: Device axis over which the batch is spread, or None.

    Returns:
        Images and the labels of the partners. Partners are the same on any number of devices.
    """
    partners, partner_labels = (_opposite(x, axis_name) for x in (images, labels))
    share = weights.reshape(weights.shape + (1,) * (images.ndim - 1)) if weights.ndim else weights
    return Mixed(share * images + (1 - share) * partners, partner_labels)


def _opposite(x: Array, axis_name: str | None) -> Array:
    """The global batch in reverse order."""
    if axis_name is None:
        return x[::-1]
    last = lax.axis_size(axis_name) - 1
    return lax.ppermute(x[::-1], axis_name, [(i, last - i) for i in range(last + 1)])
