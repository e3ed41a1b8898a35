"""For which platform programs are compiled, and what XLA's compiler for CPUs needs to be told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Integer


def platform() -> str:
    """Returns "cpu", "gpu", "tpu" or another: of the default device, or else of the backend."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def on_cpu() -> bool:
    """Whether programs are compiled for a CPU."""
    return platform() == "cpu"


def indices(number: int, dtype: DTypeLike = jnp.int32) -> Integer[Array, " number"]:
    """Returns `0, …, number − 1`, for masks of columns.

    Where XLA for CPUs knows that the numbers of the columns are their indices, it computes the mask
    and all that is fused with it number by number: up to five times as long. It does not know it of
    numbers that are looked up.
    """
    numbers = jnp.arange(number, dtype=dtype)
    return numbers.at[numbers].get(mode="promise_in_bounds") if on_cpu() else numbers
