"""Random keys of samples; importing this does not load the trainer."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax


def sample_keys(key: Array, step: Array, num_samples: int, axis_name: str | None) -> Array:
    """A key for every sample, from the step and its position in the global batch."""
    positions = jnp.arange(num_samples)
    if axis_name is not None:
        positions = positions + lax.axis_index(axis_name) * num_samples
    step_key = jax.random.fold_in(key, step)
    return jax.vmap(partial(jax.random.fold_in, step_key))(positions)
