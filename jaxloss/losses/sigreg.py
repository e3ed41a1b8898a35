"""SIGReg: along random directions, features follow a standard normal distribution."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Key, UInt32

from jaxloss.core import batch, checks
from jaxloss.core.backend import on_cpu
from jaxloss.core.batch import AxisName
from jaxloss.core.blocks import in_blocks
from jaxloss.core.checks import Number
from jaxloss.core.linear import inverse_root, sizes_are_known, widen
from jaxloss.core.products import Low, low_dtypes, product, sixteen_bits, wide_product
from jaxloss.core.sharding import divided

_PROJECTIONS = 2**23
"""Of all rows, how many are held at once."""


@divided
def sigreg_loss(
    features: Float[Array, "n d"],
    key: Key[Array, ""] | UInt32[Array, " _"],
    *,
    num_directions: int = 1024,
    num_points: int = 17,
    limit: Number = 3.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, ""]:
    r"""SIGReg: the features are pulled towards an isotropic normal distribution. An addend.

    .. math:: \ell = \mathrm{mean}_a\, N \sum_k w_k e^{-t_k^2/2}
       \big((c_k - e^{-t_k^2/2})^2 + s_k^2\big), \quad
       c_k + i s_k = \mathrm{mean}_i\, e^{i t_k a·x_i}

    This is the test of Epps and Pulley for normality, of the projections on random unit vectors a.
    The points t_k are equally spaced from 0 to `limit`, and w_k the weights of the trapezoidal
    rule, times 2 for the points below 0. N is the number of rows of the global batch, in which
    normal features have about the same loss at any size.

    Directions are visited in blocks, with the gradient in the same visit: no array is as large as
    n × directions × points. There is no forward mode; the gradient has both.

    Args:
      features: `[n, d]`, such as the embeddings of a view.
      key: A random key, from `jax.random.key` or `jax.random.PRNGKey`, the same on all devices. Use
        a new one in each step, such as `jax.random.fold_in(key, step)`. The directions are the
        columns of `jax.random.normal(key, (d, num_directions), dtype)`, divided by their norms, in
        the dtype of the computation.
      num_directions: The number of vectors a.
      num_points: The number of points t_k, an odd one of at least 3.
      limit: The last point, above 0. It has no gradient.
      where, axis_name: Common keywords of `jaxloss`.
      sample_weights: floats `[n]`, the weights s ≥ 0 of the rows in the means. Doubling all of them
        changes nothing, and a row of weight 0 does not count in N.

    Returns:
      A scalar. Without a row that counts, it is 0.

    Raises:
      ValueError: If `num_directions` is below 1, `num_points` is even or below 3, or `limit` is not
        positive.

    Example:
      >>> import jax, jaxloss
      >>> keys = jax.random.split(jax.random.key(0))
      >>> features = jax.random.normal(keys[0], (256, 16))
      >>> losses = [jaxloss.sigreg_loss(scale * features, keys[1]) for scale in (0.5, 1.0)]
      >>> print("{:.1f} {:.1f}".format(*losses))
      38.4 1.3

    References:
      Balestriero and LeCun, LeJEPA: Provable and Scalable Self-Supervised Learning Without the
      Heuristics, 2025, section 4.
    """
    features = checks.floating("features", features, "n d")
    mask = checks.row_mask(where, "features", features)
    checks.positive_count("num_directions", num_directions)
    checks.positive_count("num_points", num_points)
    if num_points % 2 == 0 or num_points < 3:
        raise ValueError(f"`num_points` must be odd and at least 3, got {num_points}")
    low, (rows,) = low_dtypes(features)[0], widen(features)
    limit = checks.in_range("limit", limit, rows.dtype, above=0)
    valid = jnp.ones(rows.shape[0], bool) if mask is None else mask
    shares = batch.shares(valid, sample_weights, "mean", axis_name, rows.dtype)
    number = batch.sum_over(jnp.sum(shares != 0, dtype=rows.dtype), axis_name)

    step = lax.stop_gradient(jnp.asarray(limit, rows.dtype)) / (num_points - 1)
    places = jnp.arange(1, num_points, dtype=rows.dtype)  # At 0, the statistic is 0.
    targets = jnp.exp(-((step * places) ** 2) / 2)
    weights = jnp.where(places == num_points - 1, step, 2 * step) * targets
    directions = jax.random.normal(key, (rows.shape[1], num_directions), rows.dtype)
    directions *= step * inverse_root(jnp.sum(directions**2, axis=0, keepdims=True))

    size, chunk = num_directions, rows.shape[0]
    if sizes_are_known(chunk):
        size = max(min(_PROJECTIONS // max(chunk, 1), 128 if on_cpu() else size, size), 1)
        if on_cpu():  # What is at hand stays in the caches.
            chunk = min(2**14 // size, -(-chunk // 2))
    directions, used = in_blocks((directions.T, jnp.ones_like(directions[0])), size)
    weights = weights[None, :, None] * used[:, None, :] * number / num_directions
    parts = in_blocks((rows, shares, mask), chunk or 1)
    arrays = batch.vary_alike((*parts, directions, weights, targets))
    value: Any = _statistic(low, axis_name, *arrays)
    return batch.sum_over(value, axis_name)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _statistic(low: Low, axis_name: AxisName | None, *arrays: Any) -> Float[Array, ""]:
    """Returns this device's part of the statistic, which is their sum over devices."""
    return _visit(low, axis_name, *arrays, with_gradient=False)[0]


def _forward(*arguments: Any) -> tuple[Array, Any]:
    return _visit(*arguments, with_gradient=True)


def _backward(_low: Low, _axis: Any, gradients: Any, cotangent: Float[Array, ""]) -> Any:
    return *(cotangent * gradient for gradient in gradients), *(None,) * 4


_statistic.defvjp(_forward, _backward)


def _visit(
    low: Low,
    axis_name: AxisName | None,
    rows: Float[Array, "chunks a d"],
    shares: Float[Array, "chunks a"],
    valid: Bool[Array, "chunks a"] | None,
    directions: Float[Array, "blocks b d"],
    weights: Float[Array, "blocks k b"],
    targets: Float[Array, " k"],
    *,
    with_gradient: bool,
) -> tuple[Float[Array, ""], tuple[Float[Array, "chunks a d"], Float[Array, "chunks a"]]]:
    """Returns the statistic, and its gradients by rows and shares, or zeros.

    Directions have the length t_1. So at the angle θ = a·x, the points of a row are the numbers
    z^k, of z = e^{iθ}.
    """
    powers = jnp.arange(1, targets.shape[0] + 1, dtype=targets.dtype)[None, :, None]

    @jax.checkpoint
    def circle(chunk: Any) -> tuple[Array, Array]:
        x, is_valid, directions = chunk
        angles = product(x, directions.T, (low, None))
        if is_valid is not None:
            angles = jnp.where(is_valid[:, None], angles, 0)
        return jnp.cos(angles), jnp.sin(angles)

    @jax.checkpoint
    def of_directions(found: Any, block: Any) -> tuple[Any, None]:
        (value, *gradients), (directions, weights) = found, block
        # In a loop of its own: XLA for CPUs would compute cosines anew for each power.
        z = lax.map(lambda chunk: circle((*chunk, directions)), (rows, valid))
        gaps = lax.map(lambda chunk: jax.checkpoint(_gaps)(*chunk, targets), (shares, z))
        gaps = batch.sum_over(jnp.sum(gaps, axis=0), axis_name)
        slopes = 2 * weights[None] * gaps
        value = value + jnp.sum(slopes * gaps) / 2
        level = targets[:, None] * slopes[0]

        @jax.checkpoint
        def add(gradients: Any, chunk: Any) -> tuple[Any, None]:
            (d_rows, d_shares), (place, p, z) = gradients, chunk
            turned = -p[:, None] * _polynomial(z, powers * slopes)[1]
            with sixteen_bits(low is not None):
                d_rows = d_rows.at[place].add(wide_product(turned, directions))
            by_share = _polynomial(z, slopes)[0] - jnp.sum(level, axis=0, keepdims=True)
            return (d_rows, d_shares.at[place].add(jnp.sum(by_share, axis=1))), None

        if with_gradient:
            gradients, _ = lax.scan(add, tuple(gradients), (jnp.arange(len(rows)), shares, z))
        return (value, *gradients), None

    zeros = jnp.zeros_like(shares, shape=()), jnp.zeros_like(rows), jnp.zeros_like(shares)
    zeros = batch.vary_alike((zeros, rows))[0]
    value, *gradients = lax.scan(of_directions, zeros, (directions, weights))[0]
    return value / (1 if axis_name is None else batch.axis_size(axis_name)), tuple(gradients)


def _gaps(
    shares: Float[Array, " a"], z: tuple[Array, Array], targets: Float[Array, " k"]
) -> Float[Array, "2 k b"]:
    """Returns real and imaginary parts of the means of `z^k − target`, of a chunk of the rows."""
    (cosines, sines), found = z, []
    real, imaginary = (shares[:, None] * part for part in z)
    for target in targets * jnp.sum(shares):
        found.append(jnp.stack([jnp.sum(real, axis=0) - target, jnp.sum(imaginary, axis=0)]))
        real, imaginary = real * cosines - imaginary * sines, real * sines + imaginary * cosines
    return jnp.stack(found, axis=1)


def _polynomial(
    z: tuple[Array, Array], coefficients: Float[Array, "2 k b"]
) -> tuple[Float[Array, "a b"], Float[Array, "a b"]]:
    """Returns both parts of `Σ_k (α_k − i β_k) z^k`, k from 1, by Horner's rule."""
    cosines, sines = z
    real = imaginary = jnp.zeros_like(cosines)
    for alpha, beta in zip(*coefficients[:, ::-1, None], strict=True):
        real, imaginary = real + alpha, imaginary - beta
        real, imaginary = real * cosines - imaginary * sines, real * sines + imaginary * cosines
    return real, imaginary
