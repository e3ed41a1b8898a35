"""What losses of `metrics=True` report beside their values; of two towers, without options."""

from functools import partial

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
    s = references.similarities(FEATURES, rows, similarity)
    kept = references.kept_rows(of_anchors, WHERE)
    found = []
    for i in kept:
        used = references.kept_rows(labels, WHERE if own else None)
        used = used[used != i] if own else used
        is_positive = references.overlaps(of_anchors[i], labels[used]) > 0
        if is_positive.any():
            pairs = zip(s[i, used], s[i, used] / temperature, is_positive, strict=True)
            found.append([*pairs])
    return jaxloss.ContrastiveMetrics(*references.contrastive_metrics(found))  # pyright: ignore


@pytest.mark.parametrize("block_size", [None, 5])
@pytest.mark.parametrize("own", [True, False], ids=["batch", "references"])
@every_loss
def test_metrics_equal_dense_ones(name, own, block_size):
    loss, labels, *_ = LOSSES[name]
    rows, row_labels = (FEATURES, labels) if own else (REFERENCES, labels[:9])
    given = {} if own else {"references": rows, "reference_labels": row_labels}

    def total(features, metrics):
        return loss(
            features,
            jnp.asarray(labels),
            where=WHERE,
            block_size=block_size,
            metrics=metrics,
            **given,
        )

    with precision(np.float64):
        run = partial(jax.jit, compiler_options=QUICK)
        features = jnp.asarray(FEATURES)
        (value, metrics), gradient = run(
            jax.value_and_grad(partial(total, metrics=True), has_aux=True)
        )(features)
        expected = run(jax.value_and_grad(partial(total, metrics=False)))(features)
        of_metrics = run(jax.grad(lambda x: sum(total(x, metrics=True)[1])))(features)
    chex.assert_trees_all_close((value, gradient), expected, rtol=1e-12)
    chex.assert_trees_all_close(metrics, dense(name, rows, row_labels, own), rtol=1e-12)
    assert not np.any(of_metrics)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shard_map", "Explicit", "two axes"])
@pytest.mark.parametrize("name", ["nca", "sincere"])
def test_metrics_over_devices(name, way):
    loss, labels, *_ = LOSSES[name]
    loss = partial(loss, metrics=True)
    shape, names = ((2, 2), ("a", "b")) if way == "two axes" else ((4,), ("batch",))
    with precision(np.float64):
        arrays = (*map(jnp.asarray, (FEATURES, labels)),)
        if way == "shard_map":
            spread = jax.shard_map(
                lambda x, y, where: loss(x, y, where=where, axis_name="batch"),
                mesh=mesh(),
                in_specs=P("batch"),
                out_specs=P(),
            )
            value, metrics = jax.jit(spread)(*arrays, jnp.asarray(WHERE))
        else:
            on = NamedSharding(mesh(shape, names, AxisType.Explicit), P(names))
            *arrays, where = jax.device_put((*arrays, jnp.asarray(WHERE)), on)
            terms, again = jax.jit(partial(loss, reduction="none"))(*arrays, where=where)
            value, metrics = jax.jit(loss)(*arrays, where=where)
            assert jax.typeof(terms).sharding.spec == P(names)
            chex.assert_trees_all_close(metrics, again, rtol=1e-12)
        expected = jax.jit(loss)(FEATURES, labels, where=WHERE)
    chex.assert_trees_all_close(widen((value, metrics)), widen(expected), rtol=1e-12)
    chex.assert_trees_all_close(metrics, dense(name, FEATURES, labels, True), rtol=1e-12)


TOWERS = {
    "info_nce": (jaxloss.info_nce_loss, lambda s: s / 0.07),
    "siglip": (jaxloss.sigmoid_contrastive_loss, lambda s: 10 * s - 10),
}
KEYS = np.concatenate([FEATURES[::-1] + FEATURES, REFERENCES])
KEY_WHERE = np.arange(len(KEYS)) % 7 != 1
every_similarity = pytest.mark.parametrize("similarity", ["cosine", "inner", "negative_distance"])
every_towers = pytest.mark.parametrize("name", TOWERS)


def of_towers(name: str, similarity: str, rows: int, axis_name: str | None = None):
    """The metrics, and those of a dense form, beside so many keys."""
    loss, logits = TOWERS[name]

    def run(queries, keys, where, key_where):
        masks = {"where": where, "key_where": key_where, "axis_name": axis_name}
        return loss(queries, keys, similarity=similarity, metrics=True, **masks)[1]

    keys, key_valid = KEYS[:rows], KEY_WHERE[:rows].copy()
    key_valid[:16] &= WHERE
    s, found = references.similarities(FEATURES, keys, similarity), []
    for i in np.flatnonzero(key_valid[:16]):
        is_own = np.arange(rows)[key_valid] == i
        found.append([*zip(s[i, key_valid], logits(s[i, key_valid]), is_own, strict=True)])
    dense = jaxloss.ContrastiveMetrics(*references.contrastive_metrics(found))  # pyright: ignore
    if axis_name is not None:
        run = jax.shard_map(run, mesh=mesh(), in_specs=P(axis_name), out_specs=P())
    with precision(np.float64):
        arrays = map(jnp.asarray, (FEATURES, keys, WHERE, KEY_WHERE[:rows]))
        return jax.jit(run)(*arrays), dense


@every_similarity
@every_towers
def test_metrics_of_towers_equal_dense_ones(name, similarity):
    """Without options: similarities are summed by sums of rows, or in the tiles."""
    chex.assert_trees_all_close(*of_towers(name, similarity, len(KEYS)), rtol=1e-12)


@pytest.mark.slow
@every_similarity
@every_towers
def test_metrics_of_towers_over_devices(name, similarity):
    found, dense = of_towers(name, similarity, 16, "batch")
    chex.assert_trees_all_close(widen(found), dense, rtol=1e-12)


def test_equal_logits_are_no_hits():
    """Of collapsed features, which a maximum alone would call right."""
    value, metrics = supcon(jnp.ones((6, 3)), jnp.arange(6) // 2, metrics=True)
    np.testing.assert_allclose(value, np.log(5), rtol=FLOAT32)
    np.testing.assert_allclose(metrics, (0, 1, 1, np.log(5) + 2), rtol=FLOAT32)


def test_nothing_counts():
    for loss, labels, *_ in LOSSES.values():
        results = loss(jnp.asarray(FEATURES), jnp.asarray(0 * labels - 1), metrics=True)
        np.testing.assert_array_equal(jax.tree.leaves(results), 0)
