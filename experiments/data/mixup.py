"""Mixup and CutMix: images of two samples in one, for losses of two labels."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.config import DataConfig
from experiments.errors import ConfigError


class Mixed(NamedTuple):
    """Mixed images, and the labels of the partners."""

    images: Array
    """Float [n, ...], from the images and those of their partners."""
    partner_labels: Array
    """int32 [n]."""


class MixedBatch(NamedTuple):
    """Mixed images with both of their labels."""

    images: Array
    """Float [n, ...]."""
    labels: Array
    """Integers [n] or [n, C], the labels with the larger share."""
    other_labels: Array
    """The labels with the smaller share, as `labels`."""
    share: Array
    """float32 [] in [0.5, 1], the share of `labels`."""


def mix_batch(
    images: Array, labels: Array, key: Array, config: DataConfig, *, axis_name: str | None
) -> MixedBatch:
    """Mixes a batch by mixup or CutMix; where both are set, by one of them at random.

    The whole batch has one share, and one box, as in the papers' code: they depend on `key` alone.

    Args:
      images: Float [n, h, w, c], after all other augmentations.
      labels: Integers [n], or [n, C].
      key: Typed PRNG key [], the same on all devices.
      config: The options `mixup` and `cutmix`, not both zero.
      axis_name: Device axis over which the batch is sharded, or None.
    """
    if not config.cutmix:
        return _by_mixup(images, labels, key, config.mixup, axis_name)
    by_cutmix = _by_cutmix(images, labels, jax.random.fold_in(key, 1), config.cutmix, axis_name)
    if not config.mixup:
        return by_cutmix
    by_mixup = _by_mixup(images, labels, key, config.mixup, axis_name)
    first = jax.random.bernoulli(jax.random.fold_in(key, 2))
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), by_mixup, by_cutmix)


def _by_mixup(
    images: Array, labels: Array, key: Array, beta: float, axis_name: str | None
) -> MixedBatch:
    share = mixup_weights(key, beta)
    # The distribution is symmetric; a sample's own label gets the larger share.
    share = jnp.maximum(share, 1 - share)
    mixed = mixup(images, labels, share, axis_name=axis_name)
    return MixedBatch(mixed.images, labels, mixed.partner_labels, share)


def _by_cutmix(
    images: Array, labels: Array, key: Array, beta: float, axis_name: str | None
) -> MixedBatch:
    height, width = images.shape[1:3]
    box = cutmix_box(key, beta, height, width)
    mixed = cutmix(images, labels, box, axis_name=axis_name)
    area = (box[2] - box[0]) * (box[3] - box[1])
    share = 1 - area.astype(jnp.float32) / (height * width)
    own, other = labels, mixed.partner_labels
    larger = share >= 0.5
    return MixedBatch(
        mixed.images,
        jnp.where(larger, own, other),
        jnp.where(larger, other, own),
        jnp.maximum(share, 1 - share),
    )


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
      `weights · images + (1 − weights) · partners`, and the labels of the partners. The partners
      do not depend on the number of devices.
    """
    partners, partner_labels = (_opposite(x, axis_name) for x in (images, labels))
    share = weights.reshape(weights.shape + (1,) * (images.ndim - 1)) if weights.ndim else weights
    return Mixed(share * images + (1 - share) * partners, partner_labels)


def cutmix_box(key: Array, beta: float, height: int, width: int) -> Array:
    """Draws the box of CutMix (Yun et al., 2019): its area is 1 − λ of the image, λ ~ Beta(β, β).

    The centre is uniform over the pixels, and the half sides are rounded down. What is outside the
    image is cut off, so that the box may be smaller, or empty.

    Returns:
      int32 [4]: top, left, bottom, right, the last two exclusive.
    """
    weight_key, center_key = jax.random.split(key)
    half = 0.5 * jnp.sqrt(1 - mixup_weights(weight_key, beta))
    sides = jnp.array([height, width])
    center = jax.random.randint(center_key, (2,), 0, sides)
    halves = (half * sides).astype(jnp.int32)
    return jnp.concatenate(
        [jnp.maximum(center - halves, 0), jnp.minimum(center + halves, sides)]
    ).astype(jnp.int32)


def cutmix(images: Array, labels: Array, box: Array, *, axis_name: str | None = None) -> Mixed:
    """Replaces a box of sample i of the global batch by that of sample n − 1 − i.

    Args:
      images: Float [n, h, w, c].
      labels: Integers [n].
      box: Integers [4], as `cutmix_box` gives them.
      axis_name: Device axis over which the batch is sharded, or None.
    """
    partners, partner_labels = (_opposite(x, axis_name) for x in (images, labels))
    rows, columns = (jnp.arange(side) for side in images.shape[1:3])
    top, left, bottom, right = box
    inside = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    return Mixed(jnp.where(inside[..., None], partners, images), partner_labels)


def _opposite(x: Array, axis_name: str | None) -> Array:
    """The global batch in reversed order."""
    if axis_name is None:
        return x[::-1]
    last = lax.axis_size(axis_name) - 1
    return lax.ppermute(x[::-1], axis_name, [(i, last - i) for i in range(last + 1)])


def check_mixing(data: DataConfig, loss: str, *, compares_samples: bool) -> None:
    """Checks that images are not mixed for a loss that compares samples.

    Raises:
      ConfigError: Mixup or CutMix is on, and the loss of this name compares samples.
    """
    mixing = {"data.mixup": data.mixup, "data.cutmix": data.cutmix}
    for option, beta in mixing.items():
        if beta and compares_samples:
            raise ConfigError(
                f"{option} = {beta} needs a loss of single samples, and {loss} compares samples "
                f"with each other; set {option} = 0"
            )
