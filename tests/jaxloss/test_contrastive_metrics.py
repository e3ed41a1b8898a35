"""What losses of `metrics=True` report beside their values; of two towers, without options."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import QUICK, P, mesh, precision, widen
from tests.jaxloss.loss_table import make_features, make_labels, make_targets
from tests.tolerances import FLOAT32

RNG = np.random.default_rng(50)
FEATURES, REFERENCES = (make_features(RNG, n, np.float64) for n in (16, 9))
LABELS = make_labels(RNG, 16)
LABELS[[2, 7]] = -1
TARGETS = make_targets(RNG, 16, [0.1, 0.6, 0.3])
WHERE = np.arange(16) % 5 != 3
supcon = partial(jaxloss.supervised_contrastive_loss, temperature=0.5)
LOSSES = {
    "nca": (partial(jaxloss.nca_loss, temperature=2.0), LABELS, "negative_squared_distance", 2.0),
    "supcon": (supcon, LABELS, "cosine", 0.5),
    "sincere": (partial(supcon, denominator="negatives"), LABELS, "cosine", 0.5),
    "distances": (
        partial(supcon, similarity="negative_distance"),
        LABELS,
        "negative_distance",
        0.5,
    ),
    "multi_hot": (partial(supcon, similarity="inner"), TARGETS, "inner", 0.5),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def dense(name: str, rows: np.ndarray, labels: np.ndarray, own: bool) -> jaxloss.ContrastiveMetrics:
    """Of the anchors that count, beside references of these rows and labels."""
    _, of_anchors, similarity, temperature = LOSSES[name]
    s, found = references.similarities(FEATURES, rows, similarity), []
    for i in references.kept_rows(of_anchors, WHERE):
        used = references.kept_rows(labels, WHERE if own else None)
        used = used[used != i] if own else used
        is_positive = references.overlaps(of_anchors[i], labels[used]) > 0
        if is_positive.any():
            found.append([*zip(s[i, used], s[i, used] / temperature, is_positive, strict=True)])
    return jaxloss.ContrastiveMetrics(*references.contrastive_metrics(found))  # pyright: ignore


@pytest.mark.parametrize("block_size", [None, 5])
@pytest.mark.parametrize("own", [True, False], ids=["batch", "references"])
@every_loss
def test_metrics_equal_dense_ones(name, own, block_size):
    loss, labels, *_ = LOSSES[name]
    rows, row_labels = (FEATURES, labels) if own else (REFERENCES, labels[:9])
    given = {} if own else {"references": rows, "reference_labels": row_labels}
    total = partial(loss, labels=jnp.asarray(labels), where=WHERE, block_size=block_size, **given)

    def every(features):
        plain = jax.value_and_grad(total)(features)
        with_metrics = jax.value_and_grad(partial(total, metrics=True), has_aux=True)(features)
        of_metrics = jax.grad(lambda x: sum(total(x, metrics=True)[1]))(features)
        return plain, with_metrics, of_metrics

    with precision(np.float64):
        run = jax.jit(every, compiler_options=QUICK)
        expected, ((value, metrics), gradient), of_metrics = run(jnp.asarray(FEATURES))
    chex.assert_trees_all_close((value, gradient), expected, rtol=1e-12)
    chex.assert_trees_all_close(metrics, dense(name, rows, row_labels, own), rtol=1e-12)
    assert not np.any(of_metrics)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sharded_loss", "Explicit", "two axes"])
@pytest.mark.parametrize("name", ["nca", "sincere"])
def test_metrics_over_devices(name, way):
    loss, labels, *_ = LOSSES[name]
    loss = partial(loss, metrics=True)
    shape, names = ((2, 2), ("a", "b")) if way == "two axes" else ((4,), ("batch",))
    with precision(np.float64):
        expected = jax.jit(loss)(FEATURES, labels, where=WHERE)
        arrays, where = (jnp.asarray(FEATURES), jnp.asarray(labels)), jnp.asarray(WHERE)
        if way == "sharded_loss":
            loss = jaxloss.sharded_loss(loss, mesh(), "batch")
        else:
            on = NamedSharding(mesh(shape, names, AxisType.Explicit), P(names))
            *arrays, where = jax.device_put((*arrays, where), on)
            terms, again = jax.jit(partial(loss, reduction="none"))(*arrays, where=where)
            assert jax.typeof(terms).sharding.spec == P(names)
            chex.assert_trees_all_close(widen(again), widen(expected[1]), rtol=1e-12)
        got = jax.jit(loss)(*arrays, where=where)
    chex.assert_trees_all_close(widen(got), widen(expected), rtol=1e-12)


TOWERS = {
    "info_nce": (jaxloss.info_nce_loss, lambda s: s / 0.07),
    "siglip": (jaxloss.sigmoid_contrastive_loss, lambda s: 10 * s - 10),
}


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("similarity", ["cosine", "inner", "negative_distance"])
@pytest.mark.parametrize("name", TOWERS)
def test_metrics_of_towers_equal_dense_ones(name, similarity, devices):
    """Without options: similarities are summed by sums of rows, or in the tiles."""
    loss, logits = TOWERS[name]
    keys = np.concatenate([FEATURES[::-1] + FEATURES, REFERENCES[:8]])
    given = np.arange(len(keys)) % 7 != 1
    used = given & np.append(WHERE, np.ones(8, bool))
    s, found = references.similarities(FEATURES, keys, similarity), []
    for i in np.flatnonzero(used[:16]):
        is_own = np.arange(len(keys))[used] == i
        found.append([*zip(s[i, used], logits(s[i, used]), is_own, strict=True)])
    run: Any = partial(loss, similarity=similarity, metrics=True)
    if devices > 1:
        run = jaxloss.sharded_loss(run, mesh((devices,)), "batch")
    with precision(np.float64):
        arrays = map(jnp.asarray, (FEATURES, keys))
        _, metrics = jax.jit(run)(*arrays, where=jnp.asarray(WHERE), key_where=jnp.asarray(given))
    expected = jaxloss.ContrastiveMetrics(*references.contrastive_metrics(found))  # pyright: ignore
    chex.assert_trees_all_close(widen(metrics), expected, rtol=1e-12)


def test_equal_logits_are_no_hits():
    """Of collapsed features, which a maximum alone would call right."""
    value, metrics = supcon(jnp.ones((6, 3)), jnp.arange(6) // 2, metrics=True)
    np.testing.assert_allclose(value, np.log(5), rtol=FLOAT32)
    np.testing.assert_allclose(metrics, (0, 1, 1, np.log(5) + 2), rtol=FLOAT32)


def test_nothing_counts():
    for loss, labels, *_ in LOSSES.values():
        results = loss(jnp.asarray(FEATURES), jnp.asarray(0 * labels - 1), metrics=True)
        np.testing.assert_array_equal(jax.tree.leaves(results), 0)
