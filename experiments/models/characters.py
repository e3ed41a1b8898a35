"""An encoder of short texts, character by character, as pure functions of its parameters."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789-"
_KERNEL = 3
"""Characters that a convolution sees."""
_LAYERS = 2


def character_codes(texts: Sequence[str]) -> np.ndarray:
    """The characters of texts as int32 [n, l], filled up with 0; a `ValueError` for others."""
    codes = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(codes, texts, strict=True):
        row[: len(text)] = [_ALPHABET.index(character) + 1 for character in text]
    return codes


def init_characters(key: Array, *, width: int, dim: int) -> dict[str, Array]:
    """The first parameters of an encoder with inner features `width` and outputs `dim`."""
    keys, normal = jax.random.split(key, _LAYERS + 2), jax.nn.initializers.he_normal()
    convolutions = {
        f"convolution_{k}": normal(keys[k], (_KERNEL * width, width)) for k in range(_LAYERS)
    }
    return convolutions | {
        "characters": 0.5 * jax.random.normal(keys[-1], (len(_ALPHABET) + 1, width)),
        "projection": jax.nn.initializers.lecun_normal()(keys[-2], (2 * width, dim)),
    }


def embed_characters(params: dict[str, Array], codes: Array) -> Array:
    """The outputs [n, dim] of `character_codes`: convolutions, then mean and largest value."""
    real = (codes > 0)[..., None]
    x = jnp.where(real, params["characters"][codes], 0)
    for layer in range(_LAYERS):
        padded = jnp.pad(x, ((0, 0), (_KERNEL // 2, _KERNEL // 2), (0, 0)))
        seen = [padded[:, k : k + codes.shape[1]] for k in range(_KERNEL)]
        moved = jax.nn.relu(jnp.concatenate(seen, -1) @ params[f"convolution_{layer}"])
        x = jnp.where(real, x + moved, 0)
    mean = x.sum(1) / real.sum(1)
    largest = jnp.where(real, x, -jnp.inf).max(1)
    return jnp.concatenate([mean, largest], -1) @ params["projection"]
