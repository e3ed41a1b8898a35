"""Calls outside of `jax.jit`, as in a notebook: compiled once, or operation by operation."""

import logging
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.core import programs
from jaxloss.pairs import LOGSUMEXP, SUM, Statistic, compare, compare_towers
from tests.jaxloss import harness
from tests.jaxloss.harness import cast, evaluate, make_batch, over
from tests.jaxloss.loss_table import EVERY_LOSS, FUNCTIONS, TILES_OF_A_KIND, LossRow

FLOAT32 = 2e-6


def rows_of(number: int, dim: int = 5, seed: int = 0):
    return jax.random.normal(jax.random.key(seed), (number, dim))


LABELS = jnp.arange(12) % 4
KEY = jax.random.key(3)
X, W = rows_of(12), rows_of(5, 4, seed=1)
QUEUE = jaxloss.Queue(rows_of(6), jnp.arange(6) % 3, jnp.zeros((), jnp.int32))
OTHERS: dict[str, Any] = {
    "assign_prototypes": partial(jaxloss.assign_prototypes, W, rows_of(5, 6)),
    "class_balanced_lengths": partial(jaxloss.class_balanced_lengths, LABELS, 4),
    "contiguous_groups": partial(jaxloss.contiguous_groups, 3, 5, 2),
    "discriminability": partial(jaxloss.discriminability, X, LABELS),
    "discriminative_groups": partial(jaxloss.discriminative_groups, X, LABELS, W, 2),
    "make_queue": partial(jaxloss.make_queue, 6, 5),
    "prototype_separation": partial(jaxloss.prototype_separation, W),
    "push": partial(jaxloss.push, QUEUE, X, LABELS),
    "random_groups": partial(jaxloss.random_groups, KEY, 3, 5, 2),
    "retrieval_metrics": partial(jaxloss.retrieval_metrics, X, LABELS),
    "simplex_prototypes": partial(jaxloss.simplex_prototypes, 3, 5),
    "spectral_basis": partial(jaxloss.spectral_basis, W),
    "spectral_overlap": partial(jaxloss.spectral_overlap, W, power=0.3),
    "uniform_prototypes": partial(jaxloss.uniform_prototypes, KEY, 7, 2, num_steps=2),
    "update_class_means": partial(jaxloss.update_class_means, W, X, LABELS),
}
OPTIONS: dict[str, Any] = {
    "queue": partial(jaxloss.nca_loss, X, LABELS, references=QUEUE),
    "metrics": partial(jaxloss.info_nce_loss, X, X + 1, metrics=True, ids=LABELS, block_size=5),
    "function of a user": partial(
        *(jaxloss.direct_sum_loss, X, LABELS, W),
        metric_loss=lambda x, y, **common: jaxloss.circle_loss(x, y, block_size=5, **common),
    ),
    "array of a hyperparameter": partial(jaxloss.nca_loss, X, LABELS, temperature=jnp.array(2.0)),
}
"""With arrays of their own, or in containers."""


def compilations(caplog, call) -> int:
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        jax.block_until_ready(call())
    return sum(record.getMessage().startswith("Compiling") for record in caplog.records)


def test_all_public_functions_are_called():
    """These three make functions; those of pairs have tests of their own."""
    names = {row.function.__name__ for row in (*EVERY_LOSS, *FUNCTIONS)} | {*OTHERS}
    functions = {name for name in jaxloss.__all__ if callable(getattr(jaxloss, name))}
    types = {name for name in functions if isinstance(getattr(jaxloss, name), type)}
    assert functions - types - names == {"cached_value_and_grad", "divided", "sharded_loss"}


@over([*EVERY_LOSS, *TILES_OF_A_KIND, *FUNCTIONS], often=EVERY_LOSS)
def test_a_second_call_compiles_nothing(row, caplog):
    args = row.make_inputs(np.random.default_rng(0), 12, np.float32)
    places = row.differentiable if isinstance(row, LossRow) else range(len(args))
    args = cast(args, places, np.float32)

    def value(*args):
        return jnp.sum(row.function(*args, **row.kwargs))

    call = partial(jax.value_and_grad(value, tuple(places)), *args)
    call()
    assert compilations(caplog, call) == 0


@pytest.mark.parametrize("name", OTHERS | OPTIONS)
def test_a_second_call_of_other_functions_compiles_nothing(name, caplog):
    call = (OTHERS | OPTIONS)[name]
    jax.block_until_ready(call())
    assert compilations(caplog, call) == 0


def _scaled(pair, scale):
    return pair.similarity * scale


@pytest.mark.parametrize("similarity", ["cosine", "negative_distance"])
def test_a_second_visit_of_pairs_compiles_nothing(similarity, caplog):
    how = {"similarity": similarity, "block_size": 5}

    def of_batch(x, scale):
        pairs = compare(x, LABELS, **how)
        (sums,) = pairs.statistics(scale, Statistic(LOGSUMEXP, _scaled))
        return jnp.sum(sums.negative)

    def of_towers(x, scale):
        towers = compare_towers(x, x + 1, ids=LABELS, **how)
        (rows,), (keys,) = towers.statistics(scale, Statistic(SUM, _scaled), of_keys=True)
        return jnp.sum(rows) + jnp.sum(keys)

    for function in (of_batch, of_towers):
        call = jax.value_and_grad(function)
        jax.block_until_ready(call(X, 2.0))
        assert compilations(caplog, partial(call, X + 1, 3.0)) == 0


def test_transformations_compile_once(caplog):
    loss = partial(jaxloss.circle_loss, block_size=5)
    for call in (
        partial(jax.vmap(loss, (0, None)), jnp.stack([X, X + 1]), LABELS),
        partial(jax.jacrev(jax.grad(loss)), X, LABELS),
    ):
        jax.block_until_ready(call())
        assert compilations(caplog, call) == 0


def test_options_are_not_mixed_up():
    """Programs are kept for types and values of the options: 1 is not True, nor 0.1 0.2."""
    array: Any = jnp.array(3)
    with harness.raises(TypeError, "`block_size` must be a Python integer, got ArrayImpl"):
        jaxloss.nca_loss(X, LABELS, block_size=array)
    loss = partial(jaxloss.triplet_loss, X, LABELS)
    chex.assert_trees_all_close(loss(margin=1), loss(margin=1.0))
    assert float(loss(margin=0.1)) < float(loss(margin=0.2))
    with harness.raises(TypeError, "`soft` must be a Python bool, got 1"):
        loss(soft=1)  # pyright: ignore[reportArgumentType]
    assert float(loss(soft=True)) > float(loss(soft=False))
    assert jaxloss.info_nce_loss(X, X, metrics=True)[1].accuracy == 1
    assert jnp.shape(jaxloss.info_nce_loss(X, X, metrics=False)) == ()


def test_a_function_that_reads_a_changing_number_is_called_each_time():
    number = 1.0

    def metric_loss(features, labels, **common):
        return number * jaxloss.nca_loss(features, labels, **common)

    loss = partial(jaxloss.direct_sum_loss, X, LABELS, W, metric_loss=metric_loss)
    first = loss()
    number = 2.0
    assert not np.isclose(first, loss())


def test_a_changing_number_compiles_once(caplog):
    """A second value makes it an argument of the program; its range is checked as before."""
    loss: Any = partial(jaxloss.circle_loss, X, LABELS, block_size=5)
    for scale in (2.0, 3.0):
        loss(scale=scale)
    assert compilations(caplog, partial(loss, scale=np.float32(4.0))) == 0
    np.testing.assert_allclose(loss(scale=4.0), jax.jit(partial(loss, scale=4.0))(), rtol=FLOAT32)
    with harness.raises(ValueError, "`scale` must be a scalar, finite and above 0, got -1.0"):
        loss(scale=-1.0)
    sums = [
        partial(
            *(jaxloss.direct_sum_loss, X, LABELS, W),
            metric_loss=partial(jaxloss.triplet_loss, mining="all", margin=margin),
            metric_weight=weight,
        )
        for margin, weight in ((0.1, 1.0), (0.2, 0.5), (0.3, 0.25))
    ]
    for direct_sum in sums[:2]:
        direct_sum()
    assert compilations(caplog, sums[2]) == 0
    np.testing.assert_allclose(sums[2](), jax.jit(sums[2])(), rtol=FLOAT32)


def test_values_of_pairs_that_read_something_are_not_mixed_up(monkeypatch):
    """What a program is kept for has the numbers, objects and globals that its functions read."""

    class Value:
        def __init__(self, factor):
            self.factor = factor

        def value(self, pair, _):
            return self.factor * pair.similarity

    def total(value):
        return float(jnp.sum(compare(X, LABELS).statistics((), Statistic(SUM, value))[0].negative))

    def local(factor):
        return lambda pair, _: factor * pair.similarity

    values = (local, lambda factor: Value(factor).value, lambda factor: _times_global)
    for make in values:
        monkeypatch.setitem(globals(), "FACTOR", 1.0)
        once = total(make(1.0))
        monkeypatch.setitem(globals(), "FACTOR", 2.0)
        assert np.isclose(total(make(2.0)), 2 * once)


FACTOR = 1.0


def _times_global(pair, _):
    return FACTOR * pair.similarity


def test_programs_are_not_kept_without_limit(caplog):
    """The latest options alone."""
    loss = partial(jaxloss.nca_loss, X, LABELS)
    for k in range(1, programs._KEPT + 2):
        loss(block_size=k + 20)
    assert compilations(caplog, partial(loss, block_size=programs._KEPT + 21)) == 0
    assert compilations(caplog, partial(loss, block_size=21)) == 1


def test_recorded_calls_are_not_wrapped():
    """Inside of `jax.jit`, a loss is a part of the program, not a function that it calls."""
    text = jax.jit(jaxloss.softmax_loss).lower(jnp.ones((3, 2)), jnp.arange(3) % 2).as_text()
    assert "call @softmax_loss" not in text


@pytest.mark.slow
@over([*EVERY_LOSS, *TILES_OF_A_KIND], often=EVERY_LOSS)
def test_operations_one_by_one(row):
    """With `jit` disabled and `debug_nans`: no operation needs `jit`, and none gives a NaN.

    Nor does NaN leak from rows that do not count: XLA turns no product with a mask into a choice.
    """
    batch = make_batch(row, seed=26)
    args, weights = cast(batch.args, row.differentiable, np.float32), jnp.ones(12)

    def loss(*leaves):
        given = harness.merge(args, row.differentiable, leaves)
        return row.function(
            *given, where=jnp.asarray(batch.where), sample_weights=weights, **row.kwargs
        )

    leaves = [args[k] for k in row.differentiable]
    with jax.disable_jit(), jax.debug_nans(True):
        value, gradients = jax.value_and_grad(loss, tuple(range(len(leaves))))(*leaves)
    if row.one_of_a_kind:
        weights = jnp.where(batch.where, weights, jnp.nan)
        leaves[0] = jnp.where(batch.where[:, None], leaves[0], jnp.nan)
        with jax.disable_jit():
            np.testing.assert_allclose(loss(*leaves), value, rtol=FLOAT32)
    expected = evaluate(row, batch._replace(sample_weights=np.ones(12)), np.float32)
    np.testing.assert_allclose(value, expected["mean"], rtol=FLOAT32)
    harness.assert_close(gradients, expected["mean_grad"][:-1], 4 * FLOAT32)


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_one_by_one(name):
    expected = OTHERS[name]()
    with jax.disable_jit(), jax.debug_nans(True):
        got = OTHERS[name]()
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)
