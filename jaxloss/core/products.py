"""Products of matrices: which bits of their factors count.

The matrix units of accelerators multiply numbers of 8 bits (bfloat16) or 11 (float16), and add up
in float32. A product of two such numbers is exactly a float32 number. So a product of two
low-precision arrays, taken as they are, is what float32 arithmetic gives, in one pass.

A float32 array meets a low-precision one as the sum of low-precision parts, with one pass for each:
three for all of its bits, as a weight needs; two for 16 bits, as a cotangent needs. TPUs have such
mixed products. Elsewhere, the parts are explicit, and of bfloat16, which has the range of float32.

`product` is for JAX to differentiate. The other functions are for gradients that are written by
hand, and take the rows in the dtype in which they are multiplied.

Losses compute in float32. They say here which of their arrays are exact in a low dtype. On a CPU
none is: it multiplies float32 numbers as fast.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxloss.core.backend import platform

Low: TypeAlias = Any
"""A low dtype that has all numbers of a float32 array; None if there is none."""

_BITS = {jnp.dtype(jnp.bfloat16): (8, 8), jnp.dtype(jnp.float16): (5, 11)}
"""Of the exponent, and of the significand with its first bit."""
_OF_PARTS = {1: lax.Precision.DEFAULT, 2: lax.Precision.HIGH, 3: lax.Precision.HIGHEST}
"""How a TPU multiplies so many bfloat16 parts of a float32 number."""


def low_dtypes(*arrays: Float[Array, " ..."]) -> tuple[Low, ...]:
    """Returns for each array its dtype, if that is a low one and products are computed in it."""
    widest = max(array.dtype.itemsize for array in arrays)
    usable = platform() != "cpu" and widest <= 4
    return tuple(array.dtype if usable and array.dtype in _BITS else None for array in arrays)


def product(
    a: Float[Array, "n k"],
    b: Float[Array, "k m"],
    low: tuple[Low, Low] = (None, None),
    among: tuple[Low, ...] = (),
) -> Float[Array, "n m"]:
    """Returns `a @ b`, with a gradient of the same precision.

    Args:
      a, b: float32 or float64.
      low: In which low dtype a is exact, and in which b. One that is not would be rounded.
      among: The same of what a and b are computed from. Where any is low, cotangents have 16 bits.
    """
    return _low_product(low, a, b) if any(low + among) else wide_product(a, b)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def gram_of(columns: Float[Array, "k n"], low: Low, among: tuple[Low, ...]) -> Float[Array, "n n"]:
    """Returns `product(columns.T, columns, (low, low), among)`, whose gradient is one product."""
    return product(columns.T, columns, (low, low), among)


@gram_of.defjvp
def _gram_jvp(
    low: Low, among: tuple[Low, ...], primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (columns,), (d_columns,) = primals, tangents
    precision = _of_cotangents() if any(among) else lax.Precision.HIGHEST
    half = _mixed(low, precision, d_columns.T, columns)
    return gram_of(columns, low, among), half + half.T


def wide_product(a: Float[Array, " *n k"], b: Float[Array, "k m"]) -> Float[Array, " *n m"]:
    """Returns `a @ b` with the precision of their dtype, if JAX's own switch does not say less."""
    return jnp.matmul(a, b, precision=float32_precision())


def float32_precision() -> lax.Precision | None:
    """Returns all bits of float32, or None where JAX's own switch says what to do."""
    return lax.Precision.HIGHEST if switch() is None else None


def switch() -> Any:
    """Returns JAX's own switch of the precision of products, of which the default is None."""
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def meets_in_one_pass() -> bool:
    """Whether a cotangent meets low-precision rows as one number of 8 bits, by JAX's switch."""
    return switch() in ("bfloat16", "default", "fastest")


def _of_cotangents() -> lax.Precision:
    return lax.Precision.DEFAULT if meets_in_one_pass() else lax.Precision.HIGH


def sixteen_bits(enough: bool) -> AbstractContextManager[None]:
    """Returns where `wide_product` takes three passes on a TPU, if 16 bits of each are enough.

    They are for cotangents of low-precision arrays, and for rows computed from such rows. Elsewhere
    than on TPUs, the same switch may be one of 11 bits.
    """
    usable = enough and platform() == "tpu" and switch() is None
    return jax.default_matmul_precision("high") if usable else nullcontext()


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _low_product(low: tuple[Low, Low], a: Array, b: Array) -> Array:
    if low[0] == low[1]:
        if low[0] is None:
            return wide_product(a, b)
        return exact_product(a.astype(low[0]), b.astype(low[1]))
    if low[1] is not None:
        return _mixed(low[1], lax.Precision.HIGHEST, a, b)
    return _mixed(low[0], lax.Precision.HIGHEST, b.T, a.T).T


@_low_product.defjvp
def _low_product_jvp(
    low: tuple[Low, Low], primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (a, b), (d_a, d_b) = primals, tangents
    by_a = _mixed(low[1], _of_cotangents(), d_a, b)
    by_b = _mixed(low[0], _of_cotangents(), d_b.T, a.T).T
    return _low_product(low, a, b), by_a + by_b


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _mixed(low: Low, precision: lax.Precision, wide: Array, rows: Array) -> Array:
    """Returns `wide @ rows`; `rows` are exact in the low dtype. JAX can transpose it by `wide`."""
    if platform() != "tpu":  # Parts could not be transposed.
        return wide_product(wide, rows)
    if low is None:
        with sixteen_bits(precision == lax.Precision.HIGH):
            return wide_product(wide, rows)
    return _mixed_on_tpu(wide, rows.astype(low), precision)


@_mixed.defjvp
def _mixed_jvp(
    low: Low, precision: lax.Precision, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (wide, rows), (d_wide, d_rows) = primals, tangents
    tangent = _mixed(low, precision, d_wide, rows) + wide_product(wide, d_rows)
    return _mixed(low, precision, wide, rows), tangent


@jax.custom_jvp
def with_cotangent_at_once(array: Float[Array, " *shape"]) -> Float[Array, " *shape"]:
    """Returns the array. XLA does not compute its cotangent in each block of a product anew."""
    return array


@with_cotangent_at_once.defjvp
def _cotangent_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], lax.optimization_barrier(tangents[0])


# For gradients that are written by hand ----


def exact_product(a: Array, b: Array) -> Array:
    """Returns `a @ b` of two low-precision arrays in float32."""
    precision = _passes(a.dtype)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)


def row_products(a: Float[Array, "n d"], b: Float[Array, "m d"]) -> Float[Array, "n m"]:
    """Returns `a @ b.T`. Rows of a low dtype are multiplied as they are, others with all bits."""
    if a.dtype not in _BITS and b.dtype not in _BITS:
        return wide_product(a, b.T)
    if a.dtype == b.dtype:
        return exact_product(a, b.T)
    if b.dtype in _BITS:
        return times(a.astype(jnp.float32), b.T, parts=3)
    return times(b, a.T, parts=3).T


def nearest(array: Float[Array, " *shape"], low: Low) -> Float[Array, " *shape"]:
    """Returns float32 numbers rounded to those of a low dtype. XLA does not see through it."""
    exponent, significand = _BITS[low]
    return lax.reduce_precision(array, exponent, significand - 1)


def rounded(cotangent: Float[Array, "a b"], low: Low) -> Float[Array, "a b"]:
    """Returns a cotangent as it meets low-precision rows: of 16 bits, or of 8 by JAX's switch."""
    if low is None:
        return cotangent
    return lax.reduce_precision(cotangent, 8, 7 if meets_in_one_pass() else 15)


def times(
    wide: Float[Array, "a b"], rows: Float[Array, "b d"], *, parts: int = 2
) -> Float[Array, "a d"]:
    """Returns `wide @ rows` of a float32 array: a cotangent that is `rounded`, or with three parts.

    Rows of a low dtype are multiplied as they are.
    """
    low = rows.dtype
    if low not in _BITS:
        return wide_product(wide, rows)
    if parts == 2 and meets_in_one_pass():
        parts = 1
    if platform() == "tpu":
        return _mixed_on_tpu(wide, rows, _OF_PARTS[parts])
    # A float16 number is the sum of two of bfloat16, which has room for a small cotangent.
    of_rows = [rows] if low == jnp.bfloat16 else split(rows.astype(jnp.float32), 2)
    terms = [exact_product(part, row) for part in split(wide, parts) for row in of_rows]
    return reduce(operator.add, reversed(terms))  # The small ones first.


def times_in_parts(
    cotangent: Float[Array, "a b"], rows: Float[Array, "b d"]
) -> Float[Array, "a d"]:
    """Returns `cotangent @ rows` of a `rounded` cotangent and of 16 bits of float32 rows."""
    large, small = split(rows, 2)
    return times(cotangent, small) + times(cotangent, large)


def split(wide: Float[Array, "a b"], parts: int) -> list[Array]:
    """Returns bfloat16 arrays whose sum is a float32 array, the large one first."""
    found, bfloat16 = [], jnp.dtype(jnp.bfloat16)
    for _ in range(parts):
        part = nearest(wide, bfloat16)
        found.append(part.astype(bfloat16))
        wide = wide - part
    return found


def _mixed_on_tpu(wide: Array, rows: Array, precision: lax.Precision) -> Array:
    return lax.dot_general(
        wide,
        rows,
        (((1,), (0,)), ((), ())),
        precision=(precision, _passes(rows.dtype)),
        preferred_element_type=jnp.float32,
    )


def _passes(low: Low) -> lax.Precision:
    """Returns the precision in which numbers of a low dtype are multiplied as they are."""
    # TPUs multiply float16 as float32, of which the default would keep 8 bits.
    both = low == jnp.float16 and platform() == "tpu"
    return lax.Precision.HIGH if both else lax.Precision.DEFAULT
