"""Prototypes on the unit sphere: construction, separation, and assignment to classes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Int32, Key, UInt32

from jaxloss.core import checks
from jaxloss.core.checks import Number
from jaxloss.core.linear import l2_normalize, widen
from jaxloss.core.products import wide_product
from jaxloss.core.sharding import divided

# The separation does not depend on it between 0.003 and 0.03.
_LEARNING_RATE = 0.01


def simplex_prototypes(num_prototypes: int, dim: int) -> Float[Array, "d M"]:
    r"""The vertices of a regular simplex: M unit vectors with the largest possible separation.

    .. math:: p_i^\top p_j = -\frac{1}{M-1} \quad (i ≠ j)

    Args:
      num_prototypes: M of the result `[d, M]`, from 1 to d + 1.
      dim: d.

    Returns:
      Prototypes `[d, M]`, float32, unit columns. Only the first M − 1 coordinates are not 0. A
      single prototype is the first basis vector.

    Raises:
      TypeError: If an argument is not an integer.
      ValueError: If an argument is below 1, or M > d + 1, where no regular simplex exists.

    Example:
      >>> import numpy as np, jaxloss
      >>> prototypes = np.asarray(jaxloss.simplex_prototypes(3, 2))
      >>> print((prototypes.T @ prototypes).round(3))
      [[ 1.  -0.5 -0.5]
       [-0.5  1.  -0.5]
       [-0.5 -0.5  1. ]]

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024 (prototypes fixed before training).
      Kasarla et al., Maximum Class Separation as Inductive Bias in One Matrix, NeurIPS 2022.
    """
    checks.positive_count("num_prototypes", num_prototypes)
    checks.positive_count("dim", dim)
    if num_prototypes > dim + 1:
        raise ValueError(
            f"`num_prototypes` must be at most dim + 1 = {dim + 1} for a regular simplex, got "
            f"{num_prototypes}; use uniform_prototypes"
        )
    if num_prototypes == 1:
        return jnp.zeros((dim, 1), jnp.float32).at[0, 0].set(1)
    # Helmert's matrix: row k is 1 before column k, −k at it and 0 after it, scaled to a unit norm.
    # Its rows are orthogonal to one another and to the vector of ones.
    row = jnp.arange(1, dim + 1, dtype=jnp.float32)[:, None]
    column = jnp.arange(num_prototypes, dtype=jnp.float32)[None, :]
    helmert = jnp.where(column < row, 1, jnp.where(column == row, -row, 0))
    helmert = helmert * lax.rsqrt(row * (row + 1))
    scale = (num_prototypes / (num_prototypes - 1)) ** 0.5
    return jnp.where(row < num_prototypes, scale * helmert, 0)


def uniform_prototypes(
    key: Key[Array, ""] | UInt32[Array, " _"],
    num_prototypes: int,
    dim: int,
    *,
    num_steps: int = 2000,
    temperature: Number = 2.0,
    final_temperature: Number = 100.0,
) -> Float[Array, "d M"]:
    r"""Unit vectors spread over the sphere by minimising the uniformity loss.

    .. math:: \min_P \log \underset{i<j}{\mathrm{mean}}\, e^{-t \|p_i - p_j\|^2}

    t rises geometrically from `temperature` to `final_temperature`. A small t spreads all vectors;
    a large t separates the closest pairs. Equal values give a fixed t, which is 2 in the authors'
    code. The optimiser is Adam with a cosine schedule, in one compiled loop. A step takes two
    products of d·M² each.

    Args:
      key: A random key, from `jax.random.key` or `jax.random.PRNGKey`.
      num_prototypes: M of the result `[d, M]`.
      dim: d. For d = 1, the prototypes alternate between the two points of the sphere.
      num_steps: The number of optimiser steps.
      temperature: t > 0 at the first step.
      final_temperature: t > 0 at the last step.

    Returns:
      Prototypes `[d, M]`, float32, unit columns. With the default options, M ≤ d + 1 prototypes are
      a randomly rotated regular simplex, up to rounding; `simplex_prototypes` is exact and faster.
      For d + 1 < M ≤ 2d, the largest cosine is within 0.005 of the optimum, 0.

    Raises:
      TypeError: If `num_prototypes`, `dim` or `num_steps` is not an integer.
      ValueError: If `num_prototypes`, `dim` or `num_steps` is below 1, or `temperature` or
        `final_temperature` is not positive.

    Example:
      >>> import jax, numpy as np, jaxloss
      >>> prototypes = jaxloss.uniform_prototypes(jax.random.key(0), 4, 2, num_steps=500)
      >>> largest_cosine, _ = jaxloss.prototype_separation(prototypes)
      >>> print(f"{abs(largest_cosine):.2f}")
      0.00

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024, the authors' published code (prototypes by uniformity).
      Wang and Isola, Understanding Contrastive Representation Learning through Alignment and
      Uniformity on the Hypersphere, ICML 2020, eq. (2).
    """
    for name, count in (("num_prototypes", num_prototypes), ("dim", dim), ("num_steps", num_steps)):
        checks.positive_count(name, count)
    temperature = checks.in_range("temperature", temperature, jnp.float32, above=0)
    final_temperature = checks.in_range(
        "final_temperature", final_temperature, jnp.float32, above=0
    )
    if dim == 1:  # The sphere is two points, so a gradient cannot move a prototype.
        first = jax.random.rademacher(key, (1, 1), jnp.float32)
        return jnp.where(jnp.arange(num_prototypes) % 2 == 0, 1, -1)[None, :] * first
    first, last = (jnp.asarray(t, jnp.float32) for t in (temperature, final_temperature))
    return _spread(key, first, last, num_prototypes, dim, num_steps)


@partial(jax.jit, static_argnames=("num_prototypes", "dim", "num_steps"))
def _spread(
    key: Key[Array, ""] | UInt32[Array, " _"],
    temperature: Float[Array, ""],
    final_temperature: Float[Array, ""],
    num_prototypes: int,
    dim: int,
    num_steps: int,
) -> Float[Array, "d M"]:
    start = l2_normalize(jax.random.normal(key, (dim, num_prototypes), jnp.float32), axis=0)
    optimizer = optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, num_steps))
    growth = (final_temperature / temperature) ** (1 / max(num_steps - 1, 1))

    def step(k, carry):
        prototypes, state = carry
        k = jnp.asarray(k, jnp.float32)  # Without jit, it is a number of Python.
        gradient = _uniformity_gradient(prototypes, temperature * growth**k)
        # Optax mixes floats with an integer step count, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, state)
        return l2_normalize(prototypes + updates, axis=0), state

    prototypes, _ = lax.fori_loop(0, num_steps, step, (start, optimizer.init(start)))
    return prototypes


def _uniformity_gradient(
    prototypes: Float[Array, "d M"], temperature: Float[Array, ""]
) -> Float[Array, "d M"]:
    """Returns the gradient along the sphere of `M/2 · log mean_{i<j} exp(−t‖p_i − p_j‖²)`.

    Since `‖p_i − p_j‖² = 2 − 2 p_i·p_j`, it is P times the softmax of `2t p_i·p_j` over all pairs.
    """
    num_prototypes = prototypes.shape[1]
    itself = jnp.eye(num_prototypes, dtype=bool)
    logits = 2 * temperature * wide_product(prototypes.T, prototypes)
    # The lowest finite number, unlike −∞, gives a single prototype a zero gradient.
    logits = jnp.where(itself, jnp.finfo(logits.dtype).min, logits)
    pull = jax.nn.softmax(logits, axis=(0, 1))
    gradient = 2 * num_prototypes * temperature * wide_product(prototypes, pull)
    along = jnp.sum(prototypes * gradient, axis=0, keepdims=True)
    return gradient - along * prototypes


class PrototypeSeparation(NamedTuple):
    """The largest cosine of all pairs, and the mean over prototypes of their largest cosine."""

    largest_cosine: Float[Array, ""]
    mean_largest_cosine: Float[Array, ""]


@divided(result="replicated")
def prototype_separation(prototypes: Float[Array, "d M"]) -> PrototypeSeparation:
    r"""The largest cosine of all pairs, and the mean over prototypes of their largest cosine.

    .. math:: \max_{i≠j} \cos(p_i, p_j), \quad
       \frac1M \sum_i \max_{j≠i} \cos(p_i, p_j)

    Args:
      prototypes: `[d, M]`, M ≥ 2, columns of any length.

    Returns:
      `largest_cosine` and `mean_largest_cosine`, scalars.

    Raises:
      ValueError: If there are fewer than two prototypes.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> separation = jaxloss.prototype_separation(jnp.array([[1.0, 0.0, 0.6], [0.0, 1.0, 0.8]]))
      >>> print(f"{separation.largest_cosine:.2f} {separation.mean_largest_cosine:.2f}")
      0.80 0.73

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024, the authors' published code (separation of prototypes).
    """
    prototypes = checks.floating("prototypes", prototypes, "d M")
    num_prototypes = prototypes.shape[1]
    if num_prototypes < 2:
        raise ValueError(
            f"`prototypes` must have at least two columns, got shape {prototypes.shape}"
        )
    (prototypes,) = widen(prototypes)
    units = l2_normalize(prototypes, axis=0)
    cosines = wide_product(units.T, units)
    nearest = jnp.max(jnp.where(jnp.eye(num_prototypes, dtype=bool), -jnp.inf, cosines), axis=0)
    return PrototypeSeparation(jnp.max(nearest), jnp.mean(nearest))


@divided(result="replicated")
def assign_prototypes(
    class_means: Float[Array, "d C"], prototypes: Float[Array, "d M"]
) -> Int32[Array, " C"]:
    r"""The one-to-one assignment of prototypes to classes with the largest sum of cosines.

    .. math:: A = \arg\max_{A\ \text{one-to-one}} \sum_c \cos(m_c, p_{A(c)})

    The assignment is optimal up to rounding of the cosines. The algorithm is optax's, which needs
    at most C²·M operations. It works inside `jit` and `vmap`. Equal means give equal assignments on
    all devices. Inside `jax.shard_map` with `check_vma=True`, the arguments must not vary over the
    devices. The assignment has no gradient. A zero mean and a NaN cosine count as orthogonal. If
    all cosines are equal, class c gets prototype c.

    Args:
      class_means: `[d, C]`. See `update_class_means`.
      prototypes: `[d, M]`, M ≥ C.

    Returns:
      The prototype of each class, int32 `[C]`, all different.

    Raises:
      ValueError: If there are fewer prototypes than classes.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> class_means = jnp.array([[0.0, 1.0], [1.0, 0.0]])
      >>> prototypes = jnp.array([[1.0, 0.6, -1.0], [0.0, 0.8, 0.0]])
      >>> print(jaxloss.assign_prototypes(class_means, prototypes))
      [1 0]

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024 (dynamic assignment).
      Kuhn, The Hungarian Method for the Assignment Problem, Naval Research Logistics Quarterly 2,
      1955.
    """
    class_means = checks.floating("class_means", class_means, "d C")
    dim, num_classes = class_means.shape
    prototypes = checks.floating("prototypes", prototypes, "d M")
    source = f"`class_means` {class_means.shape}"
    checks.same_size("prototypes", prototypes, "d M", "d", dim, source)
    if num_classes > prototypes.shape[1]:
        raise ValueError(
            f"`class_means` must have at most M = {prototypes.shape[1]} columns to match "
            f"`prototypes` {prototypes.shape}, got {class_means.shape}; use more prototypes"
        )
    class_means, prototypes = lax.stop_gradient(widen(class_means, prototypes))
    cosines = wide_product(l2_normalize(class_means, axis=0).T, l2_normalize(prototypes, axis=0))
    # Optax's integers and floats have JAX's default width, which strict promotion does not mix.
    with jax.numpy_dtype_promotion("standard"):
        classes, columns = optax.assignment.hungarian_algorithm(
            -jnp.where(jnp.isnan(cosines), 0, cosines)
        )
    return jnp.zeros(num_classes, jnp.int32).at[classes].set(columns.astype(jnp.int32))
