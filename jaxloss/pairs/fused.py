r"""Visits that serve the value and the gradient at once, for losses of a known form.

**Known cotangents.** If a loss is a weighted sum `Σ_i w_i u_i` of sums `u_i`, the cotangents
`g_i = w_i` of its statistic are known before the backward pass. `weighted_sum` then visits a tile
once, for the value and for the gradient: 6n²d operations in place of 8n²d, and one way around a
ring. Its backward pass multiplies by a number.

**Two stages.** The numbers of the anchors can be a function `c = b(results)` of the results of a
first stage, and the second stage can be sums, `u_i = Σ_j v(s_ij, o_ij, c_i)`. By two calls, the
backward pass visits the tiles twice, because the first stage waits for the cotangents of c. But
those are the cotangent of u_i times the slope `Σ_j ∂v_ij/∂c_i`, which is another sum of the second
stage.
With the slopes from the forward pass, one visit serves both stages: with symmetry, 5n²d operations
in place of 8n²d.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxloss.core.batch import vary_alike
from jaxloss.core.blocks import in_blocks, joined
from jaxloss.core.logsumexp import Part
from jaxloss.pairs.rows import Rows
from jaxloss.pairs.statistics import ByClass, Pair, Params, Parts, Statistic
from jaxloss.pairs.tiles import Loaded, Plan, State, nothing, reduced, results_of, tile_of
from jaxloss.pairs.visits import (
    Found,
    Index,
    Place,
    Residuals,
    Sides,
    add_gradients,
    at,
    backward,
    both_loaded,
    each_tile,
    forward,
    gradients_of,
    merged_at,
    no_gradients,
    prepared,
)


def weighted_sum(
    sides: Sides,
    params: Params,
    statistic: Statistic,
    weights: Float[Array, " n"],
    others: tuple[Statistic, ...] = (),
) -> tuple[Float[Array, ""], tuple[ByClass, ...]]:
    """Returns `Σ_i w_i u_i` over the anchors i of this device, for sums `u_i` over all pairs.

    Args:
      statistic: Of the sums.
      others: Statistics without a gradient, which are returned, too.
    """
    plan, params, center, anchors, references = prepared(sides, params, (statistic, *others))
    params, anchors, references, weights = vary_alike((params, anchors, references, weights))
    assert references is not None
    weights = in_blocks(weights.astype(plan.dtype), anchors.valid.shape[1])
    results: Any = _weighted_sum(plan, params, center, anchors, references, weights)
    total, found = results
    return total, joined(found, sides.anchors.labels.shape[0])


def in_two_stages(
    sides: Sides,
    params: Params,
    first: tuple[Statistic, ...],
    between: Callable[[tuple[ByClass, ...]], Array],
    second: tuple[Statistic, ...],
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...]]:
    """Returns `first`, and statistics of `SUM` whose number of an anchor is `between(first)`.

    The function `between` works element by element. The rows have no numbers of their own.
    """
    plan, *arguments = prepared(sides, params, first)
    results = _two_stages(plan, between, second, *arguments)
    return joined(results, sides.anchors.labels.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(
    plan: Plan,
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows,
    weights: Float[Array, "k a"],
) -> tuple[Float[Array, ""], tuple[ByClass, ...]]:
    (((sums, *others), _), _) = forward(plan, params, center, anchors, references)
    return jnp.sum(weights * _of_all(plan, sums)), tuple(others)


def _of_all(plan: Plan, sums: ByClass) -> Float[Array, "k a"]:
    return sums.negative if plan.of_towers else sums.positive + sums.negative


def _weighted_forward(
    plan: Plan,
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows,
    weights: Float[Array, "k a"],
) -> tuple[tuple[Float[Array, ""], tuple[ByClass, ...]], Any]:
    """Returns the results, and the gradients of the sum."""
    factors = (Parts(*(Part(jnp.zeros_like(weights), weights),) * 2),)
    own, others = both_loaded(plan, center, anchors, references)

    def visit(
        own: tuple[Loaded, State], others: Loaded, found: Found, i: Index, j: Index, place: Place
    ) -> Found:
        state, d_anchors = found.of_anchors
        tile = tile_of(plan, center, at(own[0], i), at(others, j))
        state = merged_at(plan, state, i, reduced(plan, params, tile, axis=1))
        found = found._replace(of_anchors=d_anchors)
        found = add_gradients(plan.of_gradient(), params, tile, (own[1], None), found, i, j, place)
        return found._replace(of_anchors=(state, found.of_anchors))

    d_anchors, *zeros = no_gradients(plan, params, anchors, references)
    found = Found((nothing(plan, anchors), d_anchors), *zeros)
    found = each_tile(plan.axis_name, visit, found, (own, factors), others)
    state, d_anchors = found.of_anchors
    found, rows = found._replace(of_anchors=d_anchors), (anchors, references)
    gradients = gradients_of(plan, center, found, rows, (own, others))
    sums, *others = results_of(plan, state)
    results = jnp.sum(weights * _of_all(plan, sums)), tuple(others)
    return results, (*gradients, _of_all(plan, sums))


def _weighted_backward(plan: Plan, gradients: Any, cotangents: tuple[Float[Array, ""], Any]) -> Any:
    cotangent, _ = cotangents
    return jax.tree.map(lambda gradient: (cotangent * gradient).astype(gradient.dtype), gradients)


_weighted_sum.defvjp(_weighted_forward, _weighted_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _two_stages(
    plan: Plan,
    between: Callable[[tuple[ByClass, ...]], Array],
    second: tuple[Statistic, ...],
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows | None,
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...]]:
    (first, _), residuals = forward(plan, params, center, anchors, references)
    anchors = anchors._replace(numbers=between(first))
    plan = plan._replace(statistics=second, by_row=True)
    (later, _), _ = forward(plan, params, center, anchors, references, residuals.kept)
    return first, later


def _two_stages_forward(
    plan: Plan,
    between: Callable[[tuple[ByClass, ...]], Array],
    second: tuple[Statistic, ...],
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows | None,
) -> tuple[Any, Any]:
    (first, _), before = forward(plan, params, center, anchors, references)
    anchors = anchors._replace(numbers=between(first))
    plan = plan._replace(statistics=(*second, *map(_slope, second)), by_row=True)
    (later, _), residuals = forward(plan, params, center, anchors, references, before.kept)
    states = ((*before.states[0], *residuals.states[0][: len(second)]), None)
    later, slopes = later[: len(second)], later[len(second) :]
    return (first, later), (residuals._replace(states=states, kept=before.kept), first, slopes)


def _two_stages_backward(
    plan: Plan,
    between: Callable[[tuple[ByClass, ...]], Array],
    second: tuple[Statistic, ...],
    residuals: tuple[Residuals, tuple[ByClass, ...], tuple[ByClass, ...]],
    cotangents: Any,
) -> Any:
    residuals, first, slopes = residuals  # pyright: ignore
    of_first, of_second = cotangents
    products = jax.tree.map(jnp.multiply, of_second, slopes)  # 0 of what has no gradient.
    (through_numbers,) = jax.vjp(between, first)[1](sum(jax.tree.leaves(products)))
    cotangents = (*jax.tree.map(jnp.add, of_first, through_numbers), *of_second)
    both = plan._replace(
        statistics=(*plan.statistics, *second), by_row=True, num_alike=len(plan.statistics)
    )
    gradients = backward(both, residuals, (cotangents, None))  # pyright: ignore
    d_params, d_center, d_anchors, d_references = gradients
    return d_params, d_center, d_anchors._replace(numbers=None), d_references


_two_stages.defvjp(_two_stages_forward, _two_stages_backward)


def _slope(statistic: Statistic) -> Statistic:
    """Returns the sum of the derivatives by the numbers of the anchors."""

    def value(pair: Pair, params: Any) -> Array:
        def of_number(anchor: Array) -> Array:
            return statistic.value(Pair(pair.similarity, {**pair.known, "anchor": anchor}), params)

        return jax.jvp(of_number, (pair.anchor,), (jnp.ones_like(pair.anchor),))[1]

    return statistic._replace(value=value)
