"""Retrieval metrics equal loops, on one device and on many.

`tests/test_readme.py` runs docs/coming_from.md, which compares them with pytorch-metric-learning.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import P, mesh, precision
from tests.jaxloss.loss_table import make_features, make_labels
from tests.tolerances import FLOAT32

KS = (1, 3, 40)
pytestmark = pytest.mark.usefixtures("checked_annotations")
metrics = jax.jit(
    jaxloss.retrieval_metrics, static_argnames=("ks", "distance", "block_size", "axis_name")
)


def make_rows(seed, n=16):
    """Rows with duplicates, of which some are masked and some ignored."""
    rng = np.random.default_rng(seed)
    features, labels = make_features(rng, n, np.float64), make_labels(rng, n)
    features[[3, 7, 9]] = features[1]
    labels[[4, 10]] = -1
    return features, labels, np.arange(n) % 5 != 2


def flat(values):
    return np.concatenate([np.atleast_1d(x) for x in values])


GALLERY = ("references", "reference_labels", "reference_where")


def check(rows, gallery, dtype: Any = np.float32, **options):
    """Against the loops, with NaN in masked rows."""
    features, labels, where = rows
    given = dict(zip(GALLERY, gallery, strict=False))
    euclidean = options["distance"] == "euclidean"
    expected = references.retrieval_metrics(
        features.astype(np.float64), labels, KS, where=where, euclidean=euclidean, **given
    )
    with precision(dtype):
        x, *others = (
            jnp.asarray(a, dtype if a.dtype.kind == "f" else a.dtype)
            for a in (np.where(where[:, None], features, np.nan), *gallery)
        )
        given = dict(zip(GALLERY, others, strict=False))
        got = metrics(x, jnp.asarray(labels), where=jnp.asarray(where), ks=KS, **given, **options)
    assert got.recall.dtype == dtype
    np.testing.assert_allclose(flat(got), expected, rtol=FLOAT32)
    return expected


@pytest.mark.parametrize(
    ("distance", "block_size"),
    [
        ("cosine", None),
        ("euclidean", 3),
        pytest.param("cosine", 3, marks=pytest.mark.long),
        pytest.param("euclidean", None, marks=pytest.mark.long),
    ],
)
def test_equals_loops(distance, block_size):
    options = {"distance": distance, "block_size": block_size}
    for dtype in (np.float32, np.float64):
        recalls = check(make_rows(0), (), dtype, **options)[:3]
        assert 0 < recalls[0] < recalls[1] < recalls[2]
        check(make_rows(0), (*make_rows(1)[:2], make_rows(2)[2]), dtype, **options)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sharded_loss", "Explicit"])
@pytest.mark.parametrize("devices", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 4])
def test_devices_equal_one(way, devices):
    features, labels, where = map(jnp.asarray, make_rows(4))
    where = where.at[: 16 // devices].set(devices == 1)  # A device without a sample.
    features = features.astype(jnp.float32)
    expected = flat(metrics(features, labels, where=where))
    on = mesh((devices,), kind=AxisType.Explicit if way == "Explicit" else AxisType.Auto)
    run: Any = jaxloss.retrieval_metrics
    if way == "sharded_loss":
        run = jaxloss.sharded_loss(run, on, "batch")
    x, y, w = jax.device_put((features, labels, where), NamedSharding(on, P("batch")))
    np.testing.assert_allclose(flat(jax.jit(run)(x, y, where=w)), expected, rtol=FLOAT32)


def test_nothing_counts_and_nan():
    features, labels = jnp.eye(4), jnp.arange(4)
    assert not flat(metrics(features, labels)).any()
    assert not flat(metrics(features, labels, where=jnp.zeros(4, bool))).any()
    assert not flat(metrics(features[:0], labels[:0])).any()
    assert np.isnan(flat(metrics(features.at[1].set(jnp.nan), labels // 2))).all()
    # Also in a reference of a class that no sample has.
    references = {"references": features.at[3].set(jnp.nan), "reference_labels": labels}
    assert np.isnan(flat(metrics(features[:3], labels[:3], **references))).all()


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_ties_are_means_over_all_orders(distance):
    """A collapsed network is as good as chance, and the order of codes of few bits is nothing."""
    features, labels = 0.3 * jnp.ones((96, 3)), jnp.arange(96) % 8
    got = metrics(features, labels, distance=distance)
    np.testing.assert_allclose((got.recall[0], got.r_precision), 11 / 95, rtol=1e-6)
    gallery = {"references": features, "reference_labels": labels, "distance": distance}
    np.testing.assert_allclose(metrics(features, labels, **gallery).recall[0], 12 / 96, rtol=1e-6)
    rng = np.random.default_rng(7)
    codes, labels = rng.integers(0, 3, (60, 4)).astype(np.float32), rng.integers(0, 4, 60)
    order = rng.permutation(60)
    got, expected = (
        flat(metrics(codes[of], labels[of], distance=distance, ks=KS)) for of in (order, slice(60))
    )
    np.testing.assert_allclose(got, expected, rtol=FLOAT32)


def test_features_far_from_zero_and_rows_far_away():
    """Distances of float32 are those of the deviations from the mean of most rows."""
    features = 1000 + make_features(np.random.default_rng(5), 60, np.float32)
    labels, where = make_labels(np.random.default_rng(6), 60), np.arange(60) % 5 != 2
    far = np.append(features[40:], 1e6 + features[:1], 0), np.append(labels[40:], 99)
    for gallery in ((), (features[40:], labels[40:]), far):
        check((features, labels, where), gallery, distance="euclidean")


def test_means_have_all_bits_of_float32():
    traced = metrics.trace(jnp.ones((8, 4)), jnp.arange(8) // 2, ks=KS)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    found = re.findall(r"precision = \[(\w+), (\w+)\]", text)
    assert len(found) == 3 + len(KS)
    assert set(found) == {("HIGHEST", "HIGHEST")}
