r"""Visits that serve the value and the gradient at once, for losses of a known form.

**Known cotangents.** If a loss is a weighted sum `Σ_i w_i u_i` of sums `u_i`, the cotangents
`g_i = w_i` of its statistic are known before the backward pass. `weighted_sum` then visits a tile
once, for the value and for the gradient: 6n²d operations in place of 8n²d, and one way around a
ring. Its backward pass multiplies by a number.

**Two stages.** The numbers of the anchors can be a function `c = b(results)` of the results of a
first stage, and the second stage can be sums, `u_i = Σ_j v(s_ij, c_i)`. By two calls, the
backward pass visits the tiles twice, because the first stage waits for the cotangents of c. But
those are the cotangent of u_i times the slope `Σ_j ∂v_ij/∂c_i`, which is another sum of the second
stage.
With the slopes from the forward pass, one visit serves both stages: with symmetry, 5n²d operations
in place of 8n²d.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxloss.core.batch import vary_alike
from jaxloss.core.blocks import in_blocks, joined
from jaxloss.pairs import tiles, visits
from jaxloss.pairs.comparison import Comparison
from jaxloss.pairs.rows import How, as_compared
from jaxloss.pairs.statistics import ByClass, Pair, Params, Parts, Statistic
from jaxloss.pairs.towers import Towers


def weighted_sum(
    towers: Towers, params: Params, statistics: tuple[Statistic, ...], weights: Float[Array, " n"]
) -> tuple[Float[Array, ""], tuple[ByClass, ...]]:
    """Returns `Σ_i w_i u_i` over the anchors i of this device, for sums `u_i` over all pairs.

    Args:
      towers: The anchors are the queries.
      params: What the values depend on.
      statistics: That of the sums, and others without a gradient, which are returned, too.
      weights: w.
    """
    how, inputs = visits.prepared(towers.anchors, towers.references, towers.how, params)
    inputs, weights = vary_alike((inputs, weights))
    weights = in_blocks(weights.astype(how.dtype), inputs.anchors.valid.shape[1])
    results: Any = _weighted_sum(how, statistics, inputs, weights)
    total, found = results
    return total, joined(found, towers.anchors.valid.shape[0])


def in_two_stages(
    pairs: Comparison,
    params: Params,
    first: tuple[Statistic, ...],
    between: Callable[[tuple[ByClass, ...]], Array],
    second: tuple[Statistic, ...],
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...]]:
    """Returns `first`, and statistics of `SUM` whose number of an anchor is `between(first)`.

    The function `between` works element by element. The rows have no numbers of their own.
    """
    how, inputs = visits.prepared(pairs.anchors, pairs.references, pairs.how, params)
    second = tuple(statistic._replace(by_row=True) for statistic in second)
    results = _two_stages(_Stages(how, first, between, second), inputs)
    return joined(results, pairs.anchors.valid.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weighted_sum(
    how: How, statistics: tuple[Statistic, ...], inputs: tiles.Inputs, weights: Float[Array, "k a"]
) -> tuple[Float[Array, ""], tuple[ByClass, ...]]:
    (((sums, *others), _), _) = visits.forward(how, statistics, inputs)
    return jnp.sum(weights * _of_all(how, sums)), tuple(others)


def _of_all(how: How, sums: ByClass) -> Float[Array, "k a"]:
    return sums.negative if how.ignores_equal else sums.positive + sums.negative


@as_compared
def _weighted_forward(
    how: How, statistics: tuple[Statistic, ...], inputs: tiles.Inputs, weights: Float[Array, "k a"]
) -> tuple[tuple[Float[Array, ""], tuple[ByClass, ...]], Any]:
    """Returns the results, and the gradients of the sum."""
    own, others = tiles.loaded_rows(how, inputs)
    factor = tiles.Factor(jnp.zeros_like(weights), weights)
    factors, of_sums = (Parts(factor, factor),), tiles.with_gradient(statistics, statistics)

    def of_tile(
        shared: Any, own: visits.Side, other: visits.Side, place: tiles.Place
    ) -> tiles.Found:
        tile = tiles.tile_of(how, shared, own[0], other[0])
        state = tiles.reduced(statistics, tile, axis=1)
        found = tiles.gradients_of_tile(of_sums, tile, (own[1], None), place)
        return found._replace(of_anchors=(state, found.of_anchors))

    def merge(old: Any, new: Any) -> Any:
        if isinstance(old, tiles.RowGradient):  # Of the references.
            return tiles.add(old, new)
        return tiles.merged(statistics, old[0], new[0]), tiles.add(old[1], new[1])

    found, shared = tiles.no_gradients(how, inputs), (inputs.params, inputs.center, None)
    found = found._replace(
        of_anchors=(tiles.nothing(how, statistics, inputs.anchors), found.of_anchors)
    )
    sides = (own, factors), others and (others, None)
    found = visits.Visits(how, of_tile, merge).of_each_tile(found, shared, *sides)
    state, d_anchors = found.of_anchors
    d_inputs = tiles.gradients(how, inputs, found._replace(of_anchors=d_anchors), (own, others))
    sums, *rest = tiles.by_class(how, statistics, state)
    sums = _of_all(how, sums)
    return (jnp.sum(weights * sums), tuple(rest)), (d_inputs, sums)


def _weighted_backward(
    how: How, statistics: Any, gradients: Any, cotangents: tuple[Float[Array, ""], Any]
) -> Any:
    cotangent, _ = cotangents
    return jax.tree.map(lambda gradient: (cotangent * gradient).astype(gradient.dtype), gradients)


_weighted_sum.defvjp(_weighted_forward, _weighted_backward)


class _Stages(NamedTuple):
    """Two stages, as in `in_two_stages`."""

    how: How
    first: tuple[Statistic, ...]
    between: Callable[[tuple[ByClass, ...]], Array]
    second: tuple[Statistic, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _two_stages(
    stages: _Stages, inputs: tiles.Inputs
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...]]:
    how, first, between, second = stages
    (found, _), before = visits.forward(how, first, inputs)
    inputs = inputs._replace(anchors=inputs.anchors._replace(numbers=between(found)))
    (later, _), _ = visits.forward(how, second, inputs, before.kept)
    return found, later


def _two_stages_forward(stages: _Stages, inputs: tiles.Inputs) -> tuple[Any, Any]:
    how, first, between, second = stages
    (found, _), before = visits.forward(how, first, inputs)
    inputs = inputs._replace(anchors=inputs.anchors._replace(numbers=between(found)))
    statistics, number = (*second, *map(_slope, second)), len(second)
    (later, _), residuals = visits.forward(how, statistics, inputs, before.kept)
    states = (*before.states[0], *residuals.states[0][:number]), None
    later, slopes = later[:number], later[number:]
    return (found, later), (residuals._replace(states=states, kept=before.kept), found, slopes)


def _two_stages_backward(
    stages: _Stages, residuals: tuple[visits.Residuals, Any, Any], cotangents: Any
) -> tuple[tiles.Inputs]:
    how, first, between, second = stages
    of_both, found, slopes = residuals
    of_found, of_later = cotangents
    products = jax.tree.map(jnp.multiply, of_later, slopes)  # 0 of what has no gradient.
    (through_numbers,) = jax.vjp(between, found)[1](sum(jax.tree.leaves(products)))
    cotangents = (*tiles.add(of_found, through_numbers), *of_later)
    (d_inputs,) = visits.backward(how, (*first, *second), of_both, (cotangents, None))
    return (d_inputs._replace(anchors=d_inputs.anchors._replace(numbers=None)),)


_two_stages.defvjp(_two_stages_forward, _two_stages_backward)


def _slope(statistic: Statistic) -> Statistic:
    """Returns the sum of the derivatives by the numbers of the anchors."""

    def value(pair: Pair, params: Any) -> Array:
        def of_number(anchor: Array) -> Array:
            return statistic.value(Pair(pair.similarity, {**pair.known, "anchor": anchor}), params)

        return jax.jvp(of_number, (pair.anchor,), (jnp.ones_like(pair.anchor),))[1]

    return statistic._replace(value=value)
