"""Mixup: convex combinations of images, for losses of two labels."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Mixed(NamedTuple):
    """Mixed images, and the labels of the partners."""

    images: Array
    """`weights · images + (1 − weights) · partners`, float [n, ...]."""
    partner_labels: Array
    """int32 [n]."""


def mixup_weights(keys: Array, beta: float) -> Array:
    """Draws the weights λ ~ Beta(β, β) of the samples relative to their partners.

    Args:
      keys: Typed PRNG keys [n], one per sample, or one key [] for a weight that the whole batch
        shares, as in the paper's code.
      beta: β. 1 gives the uniform distribution.

    Returns:
      float32, with the shape of `keys`.
    """

    def draw(key: Array) -> Array:
        return jax.random.beta(key, beta, beta, dtype=jnp.float32)

    return jax.vmap(draw)(keys) if keys.ndim else draw(keys)


def mixup(images: Array, labels: Array, weights: Array, *, axis_name: str | None = None) -> Mixed:
    """Mixes sample i of the global batch with sample n − 1 − i.

    The partner is random if the order of the batch is random. The loss of a mixed batch is
    λ·ℓ(x, y) + (1 − λ)·ℓ(x, y'), where y' is the label of the partner (Zhang et al., 2018):

        mixed = mixup(images, labels, weights)
        loss = weights * loss_of(features, labels) + (1 - weights) * loss_of(features, mixed[1])

    Args:
      images: Float [n, ...], after all other augmentations.
      labels: Integers [n].
      weights: λ, [n] or [].
      axis_name: Device axis over which the batch is sharded, or None.

    Returns:
      Mixed images and partner labels. The partners do not depend on the number of devices.
    """
    partners, partner_labels = (_opposite(x, axis_name) for x in (images, labels))
    share = weights.reshape(weights.shape + (1,) * (images.ndim - 1)) if weights.ndim else weights
    return Mixed(share * images + (1 - share) * partners, partner_labels)


def _opposite(x: Array, axis_name: str | None) -> Array:
    """The global batch in reversed order."""
    if axis_name is None:
        return x[::-1]
    last = lax.axis_size(axis_name) - 1
    return lax.ppermute(x[::-1], axis_name, [(i, last - i) for i in range(last + 1)])
