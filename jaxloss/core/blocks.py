"""Rows in blocks, and sums over them whose gradient is taken in the same visit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Shaped

Total: TypeAlias = Callable[[Any, Any, Any], tuple[Float[Array, ""], Any]]
"""Of the floats and the integers of a block of rows, and of what all blocks share: the total, and
a pytree of further sums, which have no gradient."""


def even_size(number: int, least: int, most: int) -> int | None:
    """Returns the largest size of blocks that hold this number of rows without padding, if any.

    To fill up the last block is to copy all rows.
    """
    return next((size for size in range(most, least - 1, -1) if number % size == 0), None)


def in_blocks(arrays: Any, size: int) -> Any:
    """Returns every array `[n, ...]` as `[ceil(n / size), size, ...]`, padded with zeros."""

    def blocks_of(array: Shaped[Array, " n *shape"]) -> Shaped[Array, "k a *shape"]:
        missing = -array.shape[0] % size if array.shape[0] else size
        if missing:
            array = jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1))
        return array.reshape(-1, size, *array.shape[1:])

    return jax.tree.map(blocks_of, arrays)


def joined(blocks: Any, number: int) -> Any:
    """Returns the first rows of every array `[blocks, size, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:number], blocks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_of_blocks(
    totals: tuple[Total, Total], floats: Any, integers: Any, shared: Any
) -> tuple[Float[Array, ""], Any]:
    """Returns the sum of `total(floats, integers, shared)` over blocks of rows.

    The gradient of the total is computed block by block in the forward pass, so that nothing of a
    block is kept or computed again: the backward pass multiplies by a number. A second derivative
    computes the blocks again.

    Args:
      totals: The same function in two forms, without a gradient and with one. It reads no array
        from where it is defined.
      floats, integers: Pytrees of arrays `in_blocks`.
      shared: A pytree of float arrays, such as weights.
    """
    return _sum(totals[0], floats, integers, shared)


def _sum(total: Total, floats: Any, integers: Any, shared: Any) -> tuple[Float[Array, ""], Any]:
    def step(block: Any) -> tuple[Array, Any]:
        return jax.checkpoint(total)(*block, shared)

    return _sum_of_each(lax.map(step, (floats, integers)))


def _sum_of_each(sums: Any) -> Any:
    return jax.tree.map(partial(jnp.sum, axis=0), sums)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_gradients(
    totals: tuple[Total, Total], floats: Any, integers: Any, shared: Any
) -> tuple[Any, Any]:
    def step(found: Any, block: Any) -> tuple[Any, Any]:
        run = jax.value_and_grad(totals[1], (0, 2), has_aux=True)
        sums, (d_floats, d_shared) = run(*block, shared)
        return jax.tree.map(jnp.add, found, d_shared), (sums, d_floats)

    nothing = jax.tree.map(jnp.zeros_like, shared)
    d_shared, (sums, d_floats) = lax.scan(step, nothing, (floats, integers))
    return _sum_of_each(sums), (d_floats, None, d_shared)


@_with_gradients.defjvp
def _derivative(totals: tuple[Total, Total], primals: Any, tangents: Any) -> Any:
    integers = primals[1]

    def of_floats(floats: Any, shared: Any) -> Any:
        run = jax.value_and_grad(partial(_sum, totals[0]), (0, 2), has_aux=True)
        sums, (d_floats, d_shared) = run(floats, integers, shared)
        return sums, (d_floats, None, d_shared)

    return jax.jvp(of_floats, primals[::2], tangents[::2])


def _backward(totals: tuple[Total, Total], gradients: Any, cotangents: tuple[Array, Any]) -> Any:
    def by_cotangent(gradient: Array) -> Array:
        return (cotangents[0] * gradient.astype(cotangents[0].dtype)).astype(gradient.dtype)

    return jax.tree.map(by_cotangent, gradients)


sum_of_blocks.defvjp(_with_gradients, _backward)
