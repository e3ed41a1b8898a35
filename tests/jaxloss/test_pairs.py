"""Losses of one's own, written with `jaxloss.pairs`, equal their dense forms.

Values and gradients in float64: in tiles of 1, of 5 and of all rows, on four devices, and on an
Explicit mesh by `divided`.
"""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Bool, Float, Integer

import jaxloss
from jaxloss import testing
from jaxloss.pairs import (
    COUNT,
    LOGSUMEXP,
    MAX,
    MIN,
    SUM,
    Statistic,
    compare,
    compare_towers,
)
from jaxloss.testing import ContractError, check_loss
from tests.jaxloss.harness import QUICK, P, enable_x64, mesh, over_mesh, raises
from tests.tolerances import FLOAT32

N, M, DIM = 8, 12, 5
RNG = np.random.default_rng(3)
X = RNG.normal(0.2, 0.8, (N, DIM))
R = RNG.normal(0.2, 0.8, (M, DIM))
Y, L = (np.array([0, 1, 2, 0, 1, 0, 3, 2])[:N], RNG.integers(-1, 4, M))
BIAS = RNG.normal(size=M)
LEVELS = RNG.normal(size=N)
Rows = Float[Array, "n d"]
Labels = Integer[Array, " n"]


@jaxloss.divided()
def hardness_weighted(
    features: Rows,
    labels: Labels,
    *,
    hardness: Any = 2.0,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Any = "mean",
    axis_name: Any = None,
):
    """Hard negatives weigh more, and the hardest counts once more."""
    pairs = compare(features, labels, where=where, block_size=block_size, axis_name=axis_name)

    def weighted(pair, h):
        return pair.similarity * 4.0 + jnp.where(pair.same, 0.0, h * pair.similarity)

    sums, hardest = pairs.statistics(
        jnp.asarray(hardness, pairs.dtype),
        Statistic(LOGSUMEXP, weighted),
        Statistic(MAX, lambda pair, h: pair.similarity * h),
    )
    counts = sums.has_positive & sums.has_negative
    gaps = sums.negative - sums.positive + 0.5 * hardest.negative - hardest.positive
    return pairs.reduce(
        jax.nn.softplus(jnp.where(counts, gaps, 0.0)), counts, sample_weights, reduction
    )


def dense_hardness_weighted(x, y, hardness=2.0):
    s, own, others = dense_pairs(x, y)
    values = s * 4.0 + jnp.where(own, 0.0, hardness * s)
    gaps = among(values, others) - among(values, own)
    gaps += 0.5 * hardness * jnp.max(s, axis=1, where=others, initial=-jnp.inf)
    gaps -= hardness * jnp.max(s, axis=1, where=own, initial=-jnp.inf)
    counts = own.any(1) & others.any(1)
    losses = jnp.where(counts, jax.nn.softplus(jnp.where(counts, gaps, 0.0)), 0.0)
    return jnp.sum(losses) / jnp.sum(counts, dtype=losses.dtype)


@jaxloss.divided()
def leveled(
    features: Rows,
    labels: Labels,
    *,
    levels: Float[Array, " n"],
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    axis_name: Any = None,
):
    """Numbers of each anchor, and a mask that depends on them."""
    pairs = compare(
        features,
        labels,
        numbers={"level": levels},
        similarity="inner",
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )

    def gap(pair, scale):
        gap = scale * (pair.similarity - pair.anchor["level"])
        return jax.nn.softplus(gap * jnp.where(pair.same, -1.0, 1.0))

    above = Statistic(
        SUM, gap, lambda pair, _: pair.same | (pair.similarity > pair.anchor["level"] - 0.5)
    )
    (sums,) = pairs.statistics(jnp.asarray(1.5, pairs.dtype), above)
    return pairs.reduce(sums.positive + sums.negative, jnp.ones_like(labels, bool))


def dense_leveled(x, y, levels):
    _, own, others = dense_pairs(x, y)
    s = x @ x.T
    values = 1.5 * (s - levels[:, None]) * jnp.where(own, -1.0, 1.0)
    used = own | (others & (s > levels[:, None] - 0.5))
    return jnp.mean(jnp.sum(jnp.where(used, jax.nn.softplus(values), 0.0), axis=1))


@jaxloss.divided()
def of_distances(
    features: Rows,
    labels: Labels,
    *,
    references: Float[Array, "m d"] | jaxloss.Queue | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Any = "mean",
    axis_name: Any = None,
):
    """The contrastive loss of Hadsell et al., with a margin of 2."""
    pairs = compare(
        features,
        labels,
        references=references,
        reference_labels=reference_labels,
        reference_where=reference_where,
        similarity="negative_distance",
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )

    def near(pair, margin):
        s = pair.similarity
        return jnp.where(pair.same, s**2, jnp.maximum(margin + s, 0.0) ** 2)

    (sums,) = pairs.statistics(jnp.asarray(2.0, pairs.dtype), Statistic(SUM, near))
    counts = jnp.ones_like(labels, bool)
    return pairs.reduce(sums.positive + sums.negative, counts, sample_weights, reduction)


def dense_of_distances(x, y, r=None, of_r: Any = None):
    others = x if r is None else r
    squares = jnp.sum((x[:, None, :] - others[None, :, :]) ** 2, axis=2)
    used = ~jnp.eye(len(x), dtype=bool) if r is None else (of_r >= 0)[None, :]
    distances = jnp.where(squares == 0, 0.0, jnp.sqrt(jnp.where(squares == 0, 1.0, squares)))
    same = y[:, None] == (y if of_r is None else of_r)[None, :]
    values = jnp.where(same, squares, jnp.maximum(2.0 - distances, 0.0) ** 2)
    return jnp.mean(jnp.sum(jnp.where(used, values, 0.0), axis=1))


@jaxloss.divided()
def biased_towers(
    queries: Rows,
    keys: Float[Array, "m d"],
    *,
    key_bias: Float[Array, " m"],
    key_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    axis_name: Any = None,
):
    """InfoNCE with a number of each key, in both directions."""
    towers = compare_towers(
        queries,
        keys,
        key_numbers=key_bias,
        key_where=key_where,
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    logits = Statistic(LOGSUMEXP, lambda pair, scale: scale * pair.similarity + pair.reference)
    (rivals,), (of_keys,) = towers.statistics(
        jnp.asarray(3.0, towers.own.dtype), logits, of_keys=True
    )
    number = queries.shape[0]
    own = 3.0 * towers.own + key_bias[:number]
    return towers.reduce(jax.nn.softplus(rivals - own) + jax.nn.softplus(of_keys[:number] - own))


@jaxloss.divided
def hardest_keys(
    queries: Rows,
    keys: Float[Array, "m d"],
    *,
    key_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    axis_name: Any = None,
):
    """The largest similarity of each query to another key, and of each key to another query."""
    towers = compare_towers(
        queries, keys, key_where=key_where, block_size=block_size, axis_name=axis_name
    )
    (of_queries,), (of_keys,) = towers.statistics(
        (), Statistic(MAX, lambda pair, _: pair.similarity**2), of_keys=True
    )
    return towers.reduce(of_queries * towers.own + of_keys[: queries.shape[0]] * towers.own**2)


def dense_hardest_keys(q, k):
    s = unit(q) @ unit(k).T
    others = ~jnp.eye(len(q), len(k), dtype=bool)
    by_query = jnp.max(s * s, axis=1, where=others, initial=-jnp.inf)
    by_key = jnp.max(s * s, axis=0, where=others, initial=-jnp.inf)[: len(q)]
    own = jnp.diagonal(s)
    return jnp.mean(by_query * own + by_key * own**2)


@jaxloss.divided
def singular(
    features: Rows,
    labels: Labels,
    *,
    temperatures: Float[Array, " n"],
    where: Bool[Array, " n"] | None = None,
    block_size: int | None = None,
    axis_name: Any = None,
):
    """Values that are infinite for an anchor with itself, and divide by a number of the anchor."""
    pairs = compare(
        features,
        labels,
        similarity="negative_squared_distance",
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    ).given(temperatures)
    distances = Statistic(SUM, lambda pair, a: a * jnp.sqrt(-pair.similarity) / pair.anchor)
    logs = Statistic(LOGSUMEXP, lambda pair, a: -jnp.log(-pair.similarity) / pair.anchor)
    sums, logits = pairs.statistics(1.5, distances, logs)
    counts = logits.has_positive & logits.has_negative
    values = sums.positive + jnp.where(counts, logits.negative - logits.positive, 0.0)
    return pairs.reduce(values, counts)


def dense_singular(x, y, temperatures, where=None):
    squares = jnp.sum((x[:, None, :] - x[None, :, :]) ** 2, axis=2)
    valid = jnp.ones(len(x), bool) if where is None else where
    used = ~jnp.eye(len(x), dtype=bool) & valid[:, None] & valid[None, :]
    squares = jnp.where(used, squares, 1.0)
    divisor = jnp.where(valid, temperatures, 1.0)[:, None]
    same = y[:, None] == y[None, :]
    sums = jnp.sum(jnp.where(used & same, 1.5 * jnp.sqrt(squares) / divisor, 0.0), axis=1)
    logits = -jnp.log(squares) / divisor
    counts = (used & same).any(1) & (used & ~same).any(1)
    gaps = among(logits, used & ~same) - among(logits, used & same)
    losses = jnp.where(counts, sums + jnp.where(counts, gaps, 0.0), 0.0)
    return jnp.sum(losses) / jnp.sum(counts, dtype=losses.dtype)


@jaxloss.divided
def of_both_rows(
    features: Rows,
    labels: Labels,
    *,
    weights: Float[Array, " n"],
    sessions: Labels,
    references: Float[Array, "m d"] | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_weights: Float[Array, " m"] | None = None,
    block_size: int | None = None,
    axis_name: Any = None,
):
    """Numbers of both rows, floats and integers; the smallest value, and the number of pairs."""
    of_references = None
    if reference_weights is not None and reference_labels is not None:
        of_references = {"weight": reference_weights, "session": reference_labels % 2}
    pairs = compare(
        features,
        labels,
        references=references,
        reference_labels=reference_labels,
        numbers={"weight": weights, "session": sessions},
        reference_numbers=of_references,
        block_size=block_size,
        axis_name=axis_name,
    )

    def value(pair, scale):
        return scale * pair.similarity * pair.reference["weight"] + pair.anchor["weight"] ** 2

    def mask(pair, _):
        return pair.anchor["session"] >= pair.reference["session"]

    sums, least, count = pairs.statistics(
        1.5, Statistic(SUM, value, mask), Statistic(MIN, value, mask), Statistic(COUNT, mask=mask)
    )
    counts = least.has_negative & count.has_negative & sums.has_negative
    values = sums.negative / jnp.maximum(count.negative, 1) + jnp.where(counts, least.negative, 0)
    return pairs.reduce(values + sums.positive, counts)


def dense_of_both_rows(x, y, w, sessions, r: Any = None, of_r: Any = None, w_r: Any = None):
    others, of_others, ws = (x, y, w) if r is None else (r, of_r, w_r)
    theirs = sessions if r is None else of_r % 2
    s = unit(x) @ unit(others).T
    valid = ~jnp.eye(len(x), dtype=bool) if r is None else (of_r >= 0)[None, :]
    same = y[:, None] == of_others[None, :]
    used = valid & (sessions[:, None] >= theirs[None, :])
    values = 1.5 * s * ws[None, :] + w[:, None] ** 2
    negative, positive = used & ~same, used & same
    counts = negative.any(1)
    mean = jnp.sum(values, axis=1, where=negative) / jnp.maximum(
        negative.sum(1, dtype=values.dtype), 1
    )
    least = jnp.min(values, axis=1, where=negative, initial=jnp.inf)
    total = mean + jnp.where(counts, least, 0.0) + jnp.sum(values, axis=1, where=positive)
    return jnp.sum(jnp.where(counts, total, 0.0)) / jnp.sum(counts, dtype=total.dtype)


@jaxloss.divided
def guided(
    features: Rows,
    labels: Labels,
    *,
    teacher: Float[Array, "n e"],
    guide_similarity: Any = None,
    block_size: int | None = None,
    axis_name: Any = None,
):
    pairs = compare(
        features,
        labels,
        guide=teacher,
        guide_similarity=guide_similarity,
        block_size=block_size,
        axis_name=axis_name,
    )
    follow = Statistic(SUM, lambda pair, _: (pair.similarity - pair.guide) ** 2)
    near = Statistic(LOGSUMEXP, mask=lambda pair, _: pair.guide > -1.0)
    sums, nearest = pairs.statistics((), follow, near)
    values = sums.positive + sums.negative
    return pairs.reduce(values + jnp.where(nearest.has_negative, nearest.negative, 0))


def dense_guided(x, y, teacher, of_teacher=None):
    s, own, others = dense_pairs(x, y)
    far = jnp.sum((teacher[:, None] - teacher[None]) ** 2, axis=2)
    guide = {
        None: unit(teacher) @ unit(teacher).T,
        "inner": teacher @ teacher.T,
        "negative_distance": -jnp.sqrt(jnp.where(far > 0, far, 1.0)),
        "negative_squared_distance": -far,
    }[of_teacher]
    guide, used = jax.lax.stop_gradient(guide), others & (guide > -1.0)
    total = jnp.sum((s - guide) ** 2, axis=1, where=own | others)
    return jnp.mean(total + jnp.where(used.any(1), among(s, used), 0.0))


@jaxloss.divided
def towers_of_ids(
    queries: Rows,
    keys: Float[Array, "m d"],
    *,
    ids: Labels,
    key_ids: Integer[Array, " m"],
    weights: Float[Array, " n"],
    key_weights: Float[Array, " m"],
    teacher: Float[Array, "n e"],
    key_teacher: Float[Array, "m e"],
    block_size: int | None = None,
    axis_name: Any = None,
):
    """Ids and numbers of both towers, and guides, in both directions."""
    towers = compare_towers(
        queries,
        keys,
        ids=ids,
        key_ids=key_ids,
        numbers=weights,
        key_numbers=key_weights,
        guide=teacher,
        key_guide=key_teacher,
        similarity="inner",
        block_size=block_size,
        axis_name=axis_name,
    )

    def value(pair, _):
        return pair.similarity * pair.anchor - pair.reference**2 * pair.guide

    (sums, largest), (of_keys, _) = towers.statistics(
        (), Statistic(SUM, value), Statistic(MAX, value), of_keys=True
    )
    own_guide: Any = towers.own_guide
    found = of_keys[: queries.shape[0]] * own_guide
    return towers.reduce(jnp.sin(sums) + found + towers.own**2 + largest)


def dense_towers_of_ids(q, k, ids, key_ids, w, w_k, t, t_k):
    guide = jax.lax.stop_gradient(t @ t_k.T)
    used = ~jnp.eye(len(q), len(k), dtype=bool)
    used &= (ids[:, None] != key_ids[None, :]) | (ids[:, None] < 0)
    every = (q @ k.T) * w[:, None] - w_k[None, :] ** 2 * guide
    values, largest = jnp.where(used, every, 0.0), jnp.where(used, every, -jnp.inf).max(1)
    found = jnp.sum(values, axis=0)[: len(q)] * jnp.diagonal(guide)
    own = jnp.sum(q * k[: len(q)], axis=1)
    return jnp.mean(jnp.sin(jnp.sum(values, axis=1)) + found + own**2 + largest)


def dense_biased_towers(q, k, bias):
    logits = 3.0 * unit(q) @ unit(k).T + bias[None, :]
    own = jnp.diagonal(logits)
    by_query = jax.nn.logsumexp(logits, axis=1) - own
    by_key = jax.nn.logsumexp(logits, axis=0)[: len(q)] - own
    return jnp.mean(by_query + by_key)


def unit(x):
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def among(values, mask):
    return jax.nn.logsumexp(values, axis=1, where=mask)


def dense_pairs(x, y):
    """Cosines, and which pairs are of one class and of two."""
    same, own = y[:, None] == y[None, :], jnp.eye(len(x), dtype=bool)
    return unit(x) @ unit(x).T, same & ~own, ~same


CASES = {
    "hardness": (hardness_weighted, dense_hardness_weighted, {"features": X, "labels": Y}),
    "given": (leveled, dense_leveled, {"features": X, "labels": Y, "levels": LEVELS}),
    "distances": (of_distances, dense_of_distances, {"features": X, "labels": Y}),
    "references": (
        of_distances,
        dense_of_distances,
        {"features": X, "labels": Y, "references": R, "reference_labels": L},
    ),
    "towers": (biased_towers, dense_biased_towers, {"queries": X, "keys": R, "key_bias": BIAS}),
    "largest": (hardest_keys, dense_hardest_keys, {"queries": X, "keys": R}),
    "singular": (
        singular,
        dense_singular,
        {"features": X, "labels": Y, "temperatures": 1 + LEVELS**2},
    ),
    "both rows": (
        of_both_rows,
        dense_of_both_rows,
        {"features": X, "labels": Y, "weights": LEVELS, "sessions": np.arange(N) % 3},
    ),
    "both, of references": (
        of_both_rows,
        dense_of_both_rows,
        {
            **{"features": X, "labels": Y, "weights": LEVELS, "sessions": np.arange(N) % 3},
            **{"references": R, "reference_labels": L, "reference_weights": BIAS},
        },
    ),
    **{
        f"guide: {similarity}": (
            partial(guided, guide_similarity=similarity),
            partial(dense_guided, of_teacher=similarity),
            {"features": X, "labels": Y, "teacher": R[:N, :3] + 3},
        )
        for similarity in (None, "inner", "negative_distance", "negative_squared_distance")
    },
    "towers of ids": (
        towers_of_ids,
        dense_towers_of_ids,
        {
            **{"queries": X, "keys": R, "ids": Y - 1, "key_ids": np.arange(M) % 5 - 1},
            **{"weights": LEVELS, "key_weights": BIAS},
            **{"teacher": X[:, :2], "key_teacher": R[:, 1:3]},
        },
    ),
    "as many keys": (
        biased_towers,
        dense_biased_towers,
        {"queries": X, "keys": R[:N], "key_bias": BIAS[:N]},
    ),
}


def gradients(loss, arrays):
    """The value, and the gradients by all floats."""
    floats = {name: x for name, x in arrays.items() if x.dtype.kind == "f"}
    others = {name: x for name, x in arrays.items() if name not in floats}
    run = jax.value_and_grad(lambda floats: loss(**floats, **others))
    return jax.jit(run, compiler_options=QUICK)(floats)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("place", "block_size"),
    [
        ("alone", None),
        pytest.param("alone", 1, marks=pytest.mark.slow),
        pytest.param("alone", 5, marks=pytest.mark.slow),
        pytest.param("shard_map", 1, marks=pytest.mark.slow),
        pytest.param("shard_map", None, marks=pytest.mark.long),
        pytest.param("Explicit", 5, marks=pytest.mark.slow),
    ],
)
def test_losses_of_ones_own_equal_dense_forms(name, place, block_size):
    loss, dense, arrays = CASES[name]
    loss = partial(loss, block_size=block_size)
    with enable_x64(True):
        arrays = {key: jnp.asarray(value) for key, value in arrays.items()}
        expected = gradients(lambda **given: dense(*(given[key] for key in arrays)), arrays)
        if place == "shard_map":
            loss = jaxloss.sharded_loss(loss, mesh(), "batch")
        elif place == "Explicit":
            rows = NamedSharding(mesh(kind=AxisType.Explicit), P("batch"))
            arrays = jax.device_put(arrays, rows)
        got = gradients(loss, arrays)
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", [None, *AxisType][:3:2])
def test_a_queue_takes_the_place_of_references(kind):
    """Here of seven places, which do not spread evenly over four devices, and one empty."""
    queue = jaxloss.make_queue(7, DIM)
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y)
    queue = jaxloss.push(queue, jnp.asarray(R[:6], jnp.float32), y[:6])

    def dense(x):
        return dense_of_distances(x, y, queue.features, queue.labels)

    expected = jax.value_and_grad(dense)(x)
    rows = x, y
    if kind is not None:
        rows = jax.device_put(rows, NamedSharding(mesh(kind=AxisType.Explicit), P("batch")))

    @jax.jit
    def run(x, y, queue):
        def loss(x, features):
            return of_distances(x, y, references=queue._replace(features=features))

        return jax.value_and_grad(loss, (0, 1))(x, queue.features)

    value, (of_rows, of_queue) = run(*rows, queue)
    chex.assert_trees_all_close((value, of_rows), expected, rtol=1e-4, atol=1e-6)
    assert not np.any(np.asarray(of_queue))


@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, True])
def test_numbers_and_guides_of_a_queue(spread):
    """They are as its rows: the same on every device, each of which takes a share."""
    x, y, ages = jnp.asarray(X, jnp.float32), jnp.asarray(Y), jnp.linspace(0.5, 2, 7)
    queue = jaxloss.push(jaxloss.make_queue(7, DIM), jnp.asarray(R[:6], jnp.float32), y[:6])

    def loss(x, y, ages, queue, axis_name=None):
        how: Any = {"guide": x[:, :2], "reference_guide": queue.features[:, :2]}
        pairs = compare(x, y, references=queue, reference_numbers=ages, axis_name=axis_name, **how)
        value = Statistic(SUM, lambda pair, _: pair.similarity * pair.reference + pair.guide)
        (sums,) = pairs.statistics((), value)
        return pairs.reduce(sums.positive - sums.negative)

    def dense(x, ages):
        s, guide = unit(x) @ unit(queue.features[:6]).T, unit(x[:, :2]) @ unit(R[:6, :2]).T
        values = s * ages[None, :6] + jax.lax.stop_gradient(guide).astype(s.dtype)
        same = y[:, None] == queue.labels[None, :6]
        return jnp.mean(jnp.sum(jnp.where(same, values, -values), axis=1))

    run: Any = loss
    if spread:
        rows = P("b"), P("b"), P(), P()
        run = over_mesh(partial(loss, axis_name="b"), rows, P(), names=("b",))
    got = jax.jit(jax.value_and_grad(lambda x, ages: run(x, y, ages, queue), (0, 1)))(x, ages)
    chex.assert_trees_all_close(
        got, jax.value_and_grad(dense, (0, 1))(x, ages), rtol=1e-4, atol=1e-5
    )


def test_losses_of_ones_own_keep_the_contract(monkeypatch):
    """In what the dense forms do not show."""
    rules = ("jit", "masks", "padding_leaks", "device_gradients")
    monkeypatch.setattr(testing, "RULES", [r for r in testing.RULES if r.name in rules])

    def rows(rng, n):
        return rng.normal(size=(n, DIM)), rng.integers(0, 3, n)

    check_loss(hardness_weighted, rows)

    def without_the_mask(features, labels, *, where=None, **options):
        return hardness_weighted(features, labels, **options)

    with pytest.raises(ContractError, match="mask"):
        check_loss(without_the_mask, rows)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [None, 3])
def test_numbers_of_rows_that_do_not_count_do_not_leak(block_size):

    def of_both(loss, x, temperatures):
        return loss(x, temperatures=temperatures)

    where = np.arange(N) % 4 != 1
    with enable_x64(True):
        x, y, where = jnp.asarray(X), jnp.asarray(Y), jnp.asarray(where)
        temperatures = jnp.where(where, 1 + LEVELS**2, jnp.nan)
        run = partial(singular, labels=y, where=where, block_size=block_size)
        dense = partial(dense_singular, y=y, where=where)
        got, expected = (
            jax.jit(jax.value_and_grad(partial(of_both, f), (0, 1)))(x, temperatures)
            for f in (run, dense)
        )
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-11)
    keys = np.where(np.arange(M)[:, None] == 9, np.nan, R)
    bias, used = np.where(np.arange(M) == 9, np.nan, 1 + BIAS**2), np.arange(M) != 9

    def loss(q, k, b):
        towers = compare_towers(
            q, k, key_numbers=b, key_where=jnp.asarray(used), block_size=block_size
        )
        ratio = Statistic(LOGSUMEXP, lambda pair, _: pair.similarity / pair.reference)
        (sums,) = towers.statistics((), ratio)
        return towers.reduce(sums)

    arrays = [jnp.asarray(a, jnp.float32) for a in (X, keys, bias)]
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options=QUICK)
    value, gradients = run(*arrays)
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("similarity", "value", "mask"),
    [
        ("inner", lambda s: -jnp.log(s), None),
        ("inner", lambda s: 1 / s, lambda s: s > 0.3),
        ("negative_squared_distance", lambda s: jnp.sqrt(1 + s), None),
    ],
    ids=["log", "inverse", "root"],
)
@pytest.mark.parametrize("block_size", [None, 2])
def test_values_may_have_a_pole_anywhere(similarity, value, mask, block_size):
    """Pairs that do not count get no similarity at which a value might have no derivative."""
    # With these numbers, no pair has a squared distance of 1 or more, where the root has no value.
    numbers = np.random.default_rng(0).normal(size=(6, 3))
    rows = jax.nn.softmax(jnp.asarray(numbers, jnp.float32))
    labels = jnp.array([0, 0, 1, 1, 2, 3])  # Tiles of two rows, some without a pair that counts.

    def loss(rows):
        pairs = compare(rows, labels, similarity=similarity, block_size=block_size)
        own = None if mask is None else lambda pair, _: mask(pair.similarity)
        (sums,) = pairs.statistics((), Statistic(SUM, lambda pair, _: value(pair.similarity), own))
        return jnp.sum(sums.positive)

    def dense(rows):
        square = jnp.sum((rows[:, None] - rows[None]) ** 2, axis=2)
        s = rows @ rows.T if similarity == "inner" else -square
        used = (labels[:, None] == labels[None]) & ~np.eye(6, dtype=bool)
        used = used if mask is None else used & mask(s)
        return jnp.sum(jnp.where(used, value(jnp.where(used, s, 0.5 * s.max())), 0))

    got, expected = (jax.jit(jax.value_and_grad(f))(rows) for f in (loss, dense))
    chex.assert_trees_all_close(got, expected, rtol=16 * FLOAT32, atol=16 * FLOAT32)


@pytest.mark.parametrize("block_size", [None, 3])
@pytest.mark.parametrize(
    ("value", "mask"),
    [
        (lambda pair, _: pair.similarity / jnp.abs(pair.anchor - pair.reference), None),
        (lambda pair, _: (pair.similarity - pair.guide) ** 2 / -pair.guide, None),
        (
            lambda pair, _: jnp.sqrt(pair.anchor - pair.similarity),
            lambda pair, _: pair.similarity < pair.anchor,
        ),
        (
            lambda pair, _: pair.similarity * pair.reference / (pair.reference - 1),
            lambda pair, _: pair.reference < 0.9,
        ),
    ],
    ids=["gap", "guide", "limit", "masked"],
)
def test_numbers_and_guides_may_have_a_pole_where_pairs_do_not_count(value, mask, block_size):
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y)
    numbers = jnp.asarray(np.where(np.arange(N) == 3, 1, 0.1 * LEVELS), jnp.float32)
    how: Any = {"guide": x[:, :2], "guide_similarity": "negative_squared_distance"}

    def loss(x, numbers, block_size):
        pairs = compare(x, y, numbers=numbers, block_size=block_size, **how)
        (sums,) = pairs.statistics((), Statistic(SUM, value, mask))
        return pairs.reduce(sums.positive + sums.negative)

    got, expected = (
        jax.jit(jax.value_and_grad(partial(loss, block_size=size), (0, 1)))(x, numbers)
        for size in (block_size, 1)
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_pole_beside_an_infinite_row():
    """Pairs that do not count get no infinite similarity, whose value would be 0 times infinity."""
    rows = jnp.array([[1.0, 0.0], [0.5, 0.5], [jnp.inf, 0.0], [0.25, 1.0]])
    compared = compare(rows, jnp.array([0, 0, 1, 1]), similarity="inner")

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def loss(exponents):
        powers = Statistic(
            SUM, lambda pair, _: pair.anchor * jnp.log(pair.similarity), lambda pair, _: pair.same
        )
        (sums,) = compared.given(exponents).statistics((), powers)
        return jnp.sum(sums.positive[:2]), sums.positive

    gradients, values = loss(jnp.array([2.0, 3.0, 1.0, 1.0]))
    log = np.log(np.float32(0.5))
    np.testing.assert_allclose(values, [2 * log, 3 * log, np.inf, np.inf], rtol=FLOAT32)
    np.testing.assert_allclose(gradients[:2], log, rtol=FLOAT32)


@pytest.mark.parametrize("block_size", [None, 32])
def test_each_row_has_a_gradient_by_its_largest_value(block_size):
    """Also where XLA rounds a value otherwise when it looks for its place."""
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.float32)

    def value(s):
        return s + s * s

    def loss(rows):
        pairs = compare(rows, jnp.arange(64), block_size=block_size)
        (largest,) = pairs.statistics((), Statistic(MAX, lambda pair, _: value(pair.similarity)))
        return jnp.sum(largest.negative)

    def dense(rows):
        units = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
        s = jnp.where(np.eye(64, dtype=bool), -0.5, units @ units.T)
        return jnp.sum(value(jnp.max(s, axis=1)))

    got, expected = (jax.jit(jax.grad(f))(rows) for f in (loss, dense))
    chex.assert_trees_all_close(got, expected, rtol=64 * FLOAT32, atol=16 * FLOAT32)


@pytest.mark.parametrize("reduction", [SUM, LOGSUMEXP, MIN, MAX])
def test_a_value_of_another_dtype_is_converted(reduction):
    rows = jnp.asarray(X[:6], jnp.float32)
    labels = jnp.array([0, 0, 1, 1, 2, 2])

    def loss(rows, value):
        (sums,) = compare(rows, labels).statistics((), Statistic(reduction, value))
        return jnp.sum(jnp.where(sums.has_positive, sums.positive, 0))

    def of_bool(pair, _):
        return pair.same

    def of_low(pair, _):
        return (2 * pair.similarity).astype(jnp.bfloat16)

    for value in (of_bool, of_low):

        def wide(*arguments, value=value):
            return value(*arguments).astype(jnp.float32)

        got, expected = (
            jax.jit(jax.value_and_grad(partial(loss, value=f)), compiler_options=QUICK)(rows)
            for f in (value, wide)
        )
        chex.assert_trees_all_equal(got, expected)


def test_a_distance_of_zero_has_no_gradient():
    x = jnp.asarray(np.repeat(X[:2], 2, axis=0))
    run = jax.jit(jax.value_and_grad(of_distances), compiler_options=QUICK)
    value, gradient = run(x, jnp.array([0, 0, 0, 0]))
    assert float(value) > 0
    assert np.all(np.isfinite(gradient))
    _, together = run(x[:2], jnp.array([0, 1]))
    np.testing.assert_array_equal(together, 0)


def test_a_distance_below_its_rounding_is_zero():
    """Of rows that are equal, far from the mean of all."""
    rows = np.random.default_rng(5).normal(size=(8, 64))
    x, labels = jnp.asarray(np.tile(rows, (2, 1)), jnp.float32), jnp.arange(16) % 8

    @jax.jit
    def sums(x):
        pairs = compare(x, labels, similarity="negative_distance")
        return pairs.statistics((), Statistic(SUM))[0]

    found = sums(x)
    np.testing.assert_array_equal(found.positive, 0)
    assert np.all(np.asarray(found.negative) < -14 * 8)


def test_wrong_arguments_are_named():
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y)
    wrong: Any = "euclidean"
    with raises(ValueError, "`similarity` must be one of inner, cosine, .*, got 'euclidean'"):
        compare(x, y, similarity=wrong)
    with raises(ValueError, "`block_size` must be at least 1, got 0"):
        compare(x, y, block_size=0)
    with raises(ValueError, r"`numbers` must have shape \[n\] with n = 8, got \(7,\)"):
        compare(x, y).given(x[:7, 0])
    with raises(ValueError, "`labels` and `features` must have the same number of rows"):
        compare(x, y[:3])
    with raises(ValueError, r"`key_numbers` must have shape \[m\] with m = 8, got \(3,\)"):
        compare_towers(x, x, key_numbers=x[:3, 0])
    with raises(ValueError, "`keys` must have shape .* with m at least 8"):
        compare_towers(x, x[:3])
    with raises(ValueError, "`result` must be one of"):
        jaxloss.divided(result=wrong)
    with raises(TypeError, "`without` must take `axis_name=None`"):

        @jaxloss.divided
        def without(features, labels):
            return features

    pairs, towers = compare(x, y), compare_towers(x, x)

    def own(pair: Any, _: Any) -> Any:
        return pair.similarity

    for function, kind in ((lambda pair, _: pair.similarity.sum(1), "value"), (own, "mask")):
        masked: Any = (function, None) if kind == "value" else (own, lambda pair, _: pair.same[0])
        with raises(ValueError, r"element by element.*\(8, 8\).*result of shape \(8,\)"):
            pairs.statistics((), Statistic(SUM, *masked))
    scalars: Any = (lambda pair, _: pair.similarity.sum(), lambda _, scale: scale, lambda *_: None)
    for scalar in scalars:
        with raises(ValueError, r"element by element.*number for all pairs is jnp.full_like"):
            pairs.statistics(2.0, Statistic(SUM, scalar))
    one: Any = lambda *_: 1  # noqa: E731
    numbers, arrays = pairs.statistics((), Statistic(SUM, one), Statistic(COUNT))
    np.testing.assert_array_equal(numbers.negative, arrays.negative)
    with raises(TypeError, "`params` must be numbers or float arrays, got a Statistic"):
        pairs.statistics(Statistic(SUM, own))
    wrong_ones: tuple[Any, ...] = (own, Statistic(wrong, own))
    for statistic in wrong_ones:
        for compared in (pairs, towers):
            with raises(TypeError, r"`statistics` must be of `Statistic\(reduction, value\)`"):
                compared.statistics((), statistic)
    for name in ("anchor", "reference", "guide"):
        with raises(ValueError, rf"`pair\.{name}` is not known here: pass `"):
            pairs.statistics((), Statistic(SUM, lambda pair, _, name=name: getattr(pair, name)))
    with raises(ValueError, "`pair.same` is not known here: keys have no class"):
        towers.statistics((), Statistic(SUM, lambda pair, _: pair.same))
    options: Any
    for options, missing in (
        ({"reference_numbers": x[:, 0]}, "`reference_numbers` must come with `references`"),
        ({"reference_guide": x}, "`reference_guide` must come with `references`"),
        ({"guide": x, "references": x, "reference_labels": y}, "`reference_guide` is missing"),
        ({"guide": x, "guide_similarity": "l2"}, "`guide_similarity` must be one of inner"),
    ):
        with raises(ValueError, missing):
            compare(x, y, **options)
    with raises(ValueError, "`ids` is missing beside `key_ids`"):
        compare_towers(x, x, key_ids=y)
    with raises(TypeError, "`mask` of a statistic must return bool, got float32"):
        pairs.statistics((), Statistic(SUM, own, mask=own))
    with raises(ValueError, r"`values` must have shape \[n\], got \(8, 8\)"):
        pairs.reduce(x @ x.T, y >= 0)
    with raises(TypeError, "`counts` must have dtype bool"):
        pairs.reduce(x[:, 0], x[:, 0])  # pyright: ignore[reportArgumentType]
    with raises(ValueError, "`counts` and `queries` must have the same number of rows"):
        towers.reduce(x[:, 0], y[:3] >= 0)


class OwnLoss:
    """As `nca_loss`, with no more annotations than are needed."""

    @staticmethod
    def of_rows(embeddings: Rows, classes: "Integer[Array, ' n']", *, t: "Unknown" = 1.0, **more):  # noqa: F821  # pyright: ignore
        return jaxloss.nca_loss(embeddings, classes, temperature=t, **more)

    @staticmethod
    def of_references(features: Rows, labels: Labels, references: Float[Array, "m d"], **more):
        return jaxloss.nca_loss(features, labels, references=references, **more)

    @staticmethod
    def other_letters(embeddings: Float[Array, "b k"], classes: Integer[Array, " b"], **more):
        return jaxloss.nca_loss(embeddings, classes, **more)

    def __call__(self, features: Rows, labels: Labels, **more):
        return self.of_rows(features, labels, **more)


def on_devices(loss, way):
    """The loss, and arrays that devices divide."""
    rows = jnp.asarray(X, jnp.float32), jnp.asarray(Y)
    if way == "sharded_loss":
        return jaxloss.sharded_loss(loss, mesh(), "batch"), rows
    explicit = NamedSharding(mesh(kind=AxisType.Explicit), P("batch"))
    return jaxloss.divided(loss), jax.device_put(rows, explicit)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sharded_loss", "divided"])
@pytest.mark.parametrize("loss", [OwnLoss.of_rows, OwnLoss()], ids=["function", "object"])
def test_an_array_without_an_annotation_is_copied(way, loss):
    """Here a queue, whose rows count once: of as many places as the batch, some of them empty."""
    queue = jaxloss.make_queue(N, DIM)
    queue = jaxloss.push(queue, jnp.asarray(R[:5], jnp.float32), jnp.asarray(Y[:5]))
    options: Any = {"references": queue, "t": jnp.asarray(0.7)}

    def total(function, x, y):
        losses = function(x, y, reduction="none", **options)
        return jnp.sum(jnp.sin(losses)), losses

    spread, rows = on_devices(loss, way)
    alone = jax.value_and_grad(partial(total, OwnLoss.of_rows), has_aux=True)
    expected = alone(jnp.asarray(X, jnp.float32), jnp.asarray(Y))
    got = jax.jit(jax.value_and_grad(partial(total, spread), has_aux=True))(*rows)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)
    assert way == "sharded_loss" or got[0][1].sharding.spec == P("batch")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sharded_loss", "divided"])
def test_errors_say_what_to_annotate(way):
    r, of_r = jnp.asarray(R, jnp.float32), jnp.asarray(L)
    given = {"references": r, "reference_labels": of_r}
    own = partial(OwnLoss.of_rows, **given)
    first = r'the first argument, .* `{}: Float\[Array, "n d"\]`'
    copied = r'no annotation .* write `{}: Shaped\[Array, "n ..."\]` .* "m ..." for references'
    for loss, options, message in (
        (OwnLoss.other_letters, {}, first.format("embeddings")),
        (lambda x, y, axis_name=None: jnp.sum(x), {}, first.format("x")),
        (OwnLoss(), {"where": jnp.arange(N) > 2}, copied.format("where")),
        (OwnLoss.of_references, given, copied.format("reference_labels")),
        (OwnLoss.of_rows, given, copied.format("references")),
        (jaxloss.sum_loss, {"weights": r[:DIM].T, "metric_loss": own}, copied.format("references")),
    ):
        spread, rows = on_devices(loss, way)
        with raises(ValueError, message):
            jax.jit(partial(spread, **options))(*rows)


@pytest.mark.slow
@pytest.mark.parametrize("m", [N, M, M + 1])
def test_keys_without_a_mask(m):
    keys = np.concatenate([R, R[:1]])[:m]
    q, k = jnp.asarray(X, jnp.float32), jnp.asarray(keys, jnp.float32)

    def without_mask(queries: Rows, keys: Float[Array, "m d"], *, axis_name=None):
        return jaxloss.info_nce_loss(queries, keys, axis_name=axis_name)

    run = jax.jit(jaxloss.sharded_loss(without_mask, mesh(), "batch"))
    if m == M + 1:
        with raises(ValueError, "`keys` has 13 rows, .* over the 4 devices; .* take `key_where"):
            run(q, k)
    else:
        np.testing.assert_allclose(run(q, k), jaxloss.info_nce_loss(q, k), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "dtype"), [(1, np.int32), (2, np.uint32)])
def test_ids_that_differ_leave_out_no_key(devices, dtype):
    """Negative ones, too, and the largest of an unsigned dtype, beside keys of no query."""
    q, k = jnp.asarray(X[:4], jnp.float32), jnp.asarray(R[:8], jnp.float32)
    ids = jnp.asarray(np.array([-1, 3, -2, 0]).astype(dtype))
    loss = jaxloss.sharded_loss(jaxloss.info_nce_loss, mesh((devices,)), "batch")
    got = jax.jit(loss, compiler_options=QUICK)(q, k, ids=ids)
    np.testing.assert_allclose(got, jaxloss.info_nce_loss(q, k), rtol=1e-5)


def test_references_of_float64_beside_features_of_float32():
    """A traced temperature keeps its bits, too."""
    with enable_x64(True):
        x, y, r = jnp.asarray(X, jnp.float32), jnp.asarray(Y), jnp.asarray(R)
        run = partial(jaxloss.nca_loss, references=r, reference_labels=jnp.asarray(L))
        got, expected = (
            jax.jit(lambda x, t: run(x, y, temperature=t))(rows, 0.7)
            for rows in (x, x.astype(jnp.float64))
        )
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["negative_squared_distance", "negative_distance"])
def test_towers_of_distances(similarity):
    """Query 0 and its key are equal: their distance has no gradient."""
    eye = jnp.eye(N, M, dtype=bool)

    def loss(queries, keys):
        towers = compare_towers(queries, keys, similarity=similarity)
        (others,) = towers.statistics((), Statistic(LOGSUMEXP))
        return towers.reduce(others - towers.own)

    def dense(queries, keys):
        far = jnp.sum((queries[:, None, :] - keys[None, :, :]) ** 2, axis=2)
        if similarity == "negative_distance":
            far = jnp.where(far > 0, jnp.sqrt(jnp.where(far > 0, far, 1.0)), 0.0)
        own = jnp.sum(jnp.where(eye, far, 0.0), axis=1)
        return jnp.mean(among(-far, ~eye) + own)

    with enable_x64(True):
        arrays = {"queries": jnp.asarray(X), "keys": jnp.asarray(np.concatenate([X[:1], R[1:]]))}
        got, expected = gradients(loss, arrays), gradients(dense, arrays)
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-11)


def test_second_derivatives_of_far_pairs():
    """Relative to the nearest pair, the exponential of an anchor with itself would overflow."""
    x, y = jnp.asarray(100 * X, jnp.float32), jnp.asarray(Y)
    gradient = jax.grad(jaxloss.nca_loss)
    product = jax.jit(jax.grad(lambda x: jnp.vdot(gradient(x, y), x)))(x)
    assert np.all(np.isfinite(product))
    assert np.any(product)


@pytest.mark.parametrize("denominator", ["all", "negatives"])
def test_an_overlap_below_one_is_a_weight(denominator):
    """A single positive has all of the weight, as with class indices."""
    x, labels = jnp.asarray(X[:4], jnp.float32), jnp.array([0, 0, 1, 1])
    targets = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1]])
    loss = partial(jaxloss.supervised_contrastive_loss, x, denominator=denominator)
    np.testing.assert_allclose(loss(targets), loss(labels), rtol=1e-5)
