"""Norms, unit vectors and distances: the linear algebra that the losses share."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from jaxloss.core.backend import on_cpu
from jaxloss.core.products import Low, product
from jaxloss.core.programs import compiled_once


def widen(*arrays: Float[Array, " ..."]) -> tuple[Float[Array, " ..."], ...]:
    """Returns the arrays in one dtype: float64 if any of them is float64, otherwise float32."""
    wide = wide_dtype(*arrays)
    return tuple(array.astype(wide) for array in arrays)


def wide_dtype(*arrays: Float[Array, " ..."]) -> jnp.dtype:
    """Returns the dtype in which functions of these arrays are computed."""
    is_double = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)


def sizes_are_known(*sizes: Any) -> bool:
    """Returns whether the sizes are numbers. In `jax.export`, they can be symbols."""
    return all(isinstance(size, int) for size in sizes)


def product_with_columns(
    rows: Float[Array, "n d"], columns: Float[Array, "d C"], low: tuple[Low, Low] = (None, None)
) -> Float[Array, "n C"]:
    """Returns `product(rows, columns, low)`, on CPUs with a fast gradient for few columns."""
    number, num_columns = rows.shape[0], columns.shape[1]
    if on_cpu() and sizes_are_known(number, num_columns) and 4 * num_columns <= number:
        # XLA for CPUs takes up to three times as long for `[d, C]` gradients as for `[C, d]` ones.
        columns = lax.optimization_barrier(columns.T).T
    return product(rows, columns, low)


def negative_squared_distances(
    products: Float[Array, "a b"],
    own_squares: Float[Array, " a"],
    other_squares: Float[Array, " b"],
) -> Float[Array, "a b"]:
    """Returns `−‖x_i − y_j‖²` from `x_i · y_j`, `‖x_i‖²` and `‖y_j‖²`. It is never positive."""
    distances = own_squares[:, None] + other_squares[None, :] - 2 * products
    # Clamp the value only: a clamped gradient has wrong second derivatives.
    return -(distances + lax.stop_gradient(jnp.maximum(-distances, 0)))


def rounding_of_squares(
    squares: Float[Array, " *shape"], norms: Float[Array, " *#shape"]
) -> Float[Array, " *shape"]:
    """Returns the rounding error of squared distances from rows of these squared norms."""
    return 16 * jnp.finfo(squares.dtype).eps * (norms + squares)


def distances_of_squares(
    squares: Float[Array, " *shape"], norms: Float[Array, " *#shape"]
) -> Float[Array, " *shape"]:
    """Returns the distances, from their squares and the squared norms of one side's rows.

    The root has no gradient at 0. There, the square is all rounding error, which the root enlarges.
    """
    zero = squares <= rounding_of_squares(squares, norms)
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, squares)))


class InverseNorms(NamedTuple):
    """Norms of vectors: `1 / ‖x‖ = scale · relative`, a product that could underflow."""

    scale: Float[Array, "c d"]
    relative: Float[Array, "c d"]
    """0 for a zero vector."""


def inverse_norms(
    x: Float[Array, "a b"],
    *,
    axis: int,
    skipped: Bool[Array, "c d"] | None = None,
    dtype: DTypeLike | None = None,
) -> InverseNorms:
    """Returns the inverse norms along `axis`, in a dtype; 1 and 0 for skipped vectors.

    Scales are powers of two: 1 where no square over- or underflows, as is usual.
    """
    if skipped is not None:  # The same numbers, without a gradient where they are not finite.
        x = jnp.where(skipped, lax.stop_gradient(x), x)
    dtype = x.dtype if dtype is None else dtype
    squared = jnp.sum(jnp.square(x.astype(dtype)), axis=axis, keepdims=True)
    exact = squares_are_normal(squared)
    exact = exact if skipped is None else exact | skipped
    norms = lax.cond(
        jnp.all(exact),
        lambda squared, _: InverseNorms(jnp.ones_like(squared), lax.rsqrt(squared)),
        lambda _, x: _scaled_inverse_norms(axis, x.astype(dtype)),
        *(squared, x),
    )
    if skipped is not None:
        scale, relative = norms  # Of a row of NaN, which 0 times its scale would not remove.
        norms = InverseNorms(jnp.where(skipped, 1, scale), jnp.where(skipped, 0, relative))
    return norms


def squares_are_normal(squared: Float[Array, " *shape"]) -> Bool[Array, " *shape"]:
    """False if a square has overflowed or underflowed, for NaN, and for a zero vector."""
    limits = jnp.finfo(squared.dtype)
    return (squared > limits.tiny / limits.eps**2) & (squared <= limits.max)


def _scaled_inverse_norms(axis: int, x: Float[Array, "a b"]) -> InverseNorms:
    """Returns them of float32 or wider vectors, scaled so that no square over- or underflows."""
    scale = power_of_two_scale(x, axis=axis)
    # A number below tiny counts as 0, as some processors have it. NaN stays visible.
    zero = jnp.max(jnp.abs(x), axis=axis, keepdims=True) <= jnp.finfo(x.dtype).tiny
    squared = jnp.sum((x * scale) ** 2, axis=axis, keepdims=True)
    squared = squared + (squared - squared)  # NaN where it is infinite, as the vector is.
    return InverseNorms(scale, jnp.where(zero, 0, lax.rsqrt(jnp.where(zero, 1, squared))))


def power_of_two_scale(x: Float[Array, " ..."], *, axis: int = -1) -> Float[Array, " ..."]:
    """Returns powers of two that bring the largest number of each vector near to 2^8.

    No square of a vector times this overflows or underflows, and a product with a low-precision
    vector is exact.
    """
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), axis=axis, keepdims=True)
    usable = (largest > 0) & (largest < jnp.inf)
    _, exponent = jnp.frexp(jnp.where(usable, largest, 1))
    limit = -int(jnp.finfo(x.dtype).minexp)
    return jnp.ldexp(jnp.ones_like(largest), jnp.clip(8 - exponent, -limit, limit))


def inverse_norms_of_scaled(x: Float[Array, " ..."], *, axis: int = -1) -> Float[Array, " ..."]:
    """Returns the inverse norms of vectors that are `scaled`, and 0 for a zero vector."""
    return inverse_root(jnp.sum(x * x, axis=axis))


def inverse_root(squares: Float[Array, " *shape"]) -> Float[Array, " *shape"]:
    """Returns `1 / √s`, and 0 for 0."""
    zero = squares == 0  # False for NaN, so that NaN stays visible.
    return jnp.where(zero, 0, lax.rsqrt(jnp.where(zero, 1, squares)))


def inverse_or_zero(norms: Float[Array, " n"]) -> Float[Array, " n"]:
    """Returns `1 / ‖x‖`, and 0 for a zero row."""
    return jnp.where(norms == 0, 0, 1 / jnp.where(norms == 0, 1, norms))


@compiled_once
def power_of_two_scaled(rows: Float[Array, "n d"], valid: Bool[Array, " n"]) -> Float[Array, "n d"]:
    """Returns rows times powers of two, which is exact, so that no square over- or underflows.

    Rows whose squares are far from that stay as they are. Most often, these are all valid ones.
    """
    squared = jnp.sum(rows.astype(jnp.float32) ** 2, axis=1)
    usual = (squared > 2.0**-60) & (squared < 2.0**60)  # False for NaN, and for a zero vector.

    def careful(rows: Array) -> Array:
        wide = rows.astype(jnp.float32)
        scale = jnp.where(usual[:, None], 1, power_of_two_scale(wide))
        return (wide * scale).astype(rows.dtype)

    return lax.cond(jnp.all(usual | ~valid), lambda rows: rows, careful, rows)


def tangential(
    gradient: Float[Array, " ..."],
    x: Float[Array, " ..."],
    inverse: Float[Array, " ..."],
    *,
    axis: int = -1,
) -> Float[Array, " ..."]:
    """Returns the part of a gradient across `x`, along which a unit vector does not change.

    It is 0 for a zero vector. The inverse norms have an axis of length 1.
    """
    along = jnp.sum(x * gradient, axis=axis, keepdims=True) * inverse**2
    return jnp.where(inverse == 0, 0, gradient - x * along)


@compiled_once
def l2_normalize(
    x: Float[Array, "a b"],
    valid: Bool[Array, " a"] | None = None,
    *,
    axis: int = -1,
    norms: InverseNorms | None = None,
) -> Float[Array, "a b"]:
    """Returns unit vectors along `axis`. A zero vector stays zero and has a zero gradient.

    So does a row that is not valid. It reads the rows as they are: zeros in place of the invalid
    ones would be another array. If the inverse norms are known, they are not computed again.
    """
    if norms is None:
        skipped = None if valid is None else ~valid[:, None]
        norms = inverse_norms(x, axis=axis, skipped=skipped)
    return _units(x, norms, axis)[0]


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _units(
    x: Float[Array, "a b"], norms: InverseNorms, axis: int
) -> tuple[Float[Array, "a b"], Float[Array, "c d"]]:
    """Returns unit vectors along `axis`, and the inverse norms.

    The rule below ignores the derivative of the norms, which it has in closed form. In a scan, JAX
    may differentiate this body in its place, and needs it.
    """
    units = jnp.where(norms.relative == 0, 0, x * norms.scale * norms.relative)
    return units, norms.scale * norms.relative


@_units.defjvp
def _units_jvp(axis: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """`∂u = (∂x − u (u · ∂x)) / ‖x‖` reads the unit vectors, which a loss has, and not x."""
    (x, norms), (d_x, _) = primals, tangents
    units, inverse = _units(x, norms, axis)
    d_x = jnp.where(inverse == 0, 0, d_x)
    along = jnp.sum(units * d_x, axis=axis, keepdims=True)
    # Without this mask, XLA for CPUs computes the gradient inside a product, which is slower.
    along = jnp.where(inverse == 0, 0, along)
    d_units = d_x * inverse - units * (along * inverse)
    return (units, inverse), (d_units, -along * inverse * inverse)
