"""Losses of cosines: properties that the contract does not cover."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.pairs import visits
from tests.jaxloss import harness, references
from tests.jaxloss.harness import QUICK, P, enable_x64, mesh
from tests.jaxloss.loss_table import features_and_targets, make_features


def test_supcon_of_negatives_does_not_hide_nan_without_negatives():
    features = jnp.asarray(make_features(np.random.default_rng(97), 4, np.float32))
    labels = jnp.zeros(4, jnp.int32)
    loss = partial(jaxloss.supervised_contrastive_loss, denominator="negatives")
    both = jax.jit(jax.value_and_grad(loss))
    value, gradient = both(features.at[3].set(features[1]), labels)
    assert value == 0
    assert not np.any(gradient)
    value, gradient = both(features.at[2, 1].set(jnp.nan), labels)
    assert np.isnan(value)
    assert np.isnan(gradient[2]).any()


def test_supcon_multi_hot_references():
    rng = np.random.default_rng(93)
    (features, targets), (others, of_others) = (
        features_and_targets(rng, n, np.float64) for n in (9, 7)
    )
    targets[4], of_others[2] = -1, -1
    given = {"references": others, "reference_labels": of_others}
    loss = partial(jaxloss.supervised_contrastive_loss, reduction="none", block_size=4)
    with enable_x64(True):
        got = np.asarray(jax.jit(loss)(features, targets, **given))
    expected = references.supervised_contrastive_loss(features, targets, reduction="none", **given)
    assert np.count_nonzero(expected) > 4
    np.testing.assert_allclose(got, expected, rtol=1e-11)


@pytest.mark.parametrize("of_references", [False, True])
def test_supcon_does_not_hide_a_target_that_is_nan(of_references):
    """But one of a row that does not count is not looked at."""
    rows = jnp.asarray(make_features(np.random.default_rng(98), 6, np.float32))
    targets = jnp.asarray(np.eye(3)[[0, 1, 0, 1, 2, 2]], jnp.float32).at[4, 0].set(jnp.nan)

    def loss(rows, where):
        if of_references:
            given = {"references": rows, "reference_labels": targets, "reference_where": where}
            whole = jnp.where(jnp.isnan(targets), 0, targets)
            return jaxloss.supervised_contrastive_loss(rows[:3], whole[:3], **given)
        return jaxloss.supervised_contrastive_loss(rows, targets, where=where)

    both = jax.jit(jax.value_and_grad(loss))
    value, gradient = both(rows, jnp.ones(6, bool))
    assert np.isnan(value)
    assert np.isnan(gradient[4]).all()
    value, gradient = both(rows, jnp.arange(6) != 4)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_supcon_labels_are_checked():
    loss: Any = jaxloss.supervised_contrastive_loss
    features = jnp.ones((5, 3))
    indices, targets = jnp.zeros(5, int), jnp.zeros((5, 2), int)
    for labels, of_references, match in (
        (indices[:, None], None, r"`labels` must be class indices \[n\], or .*\(5, 1\)"),
        (targets[:4], None, r"`labels`.*\(4, 2\)"),
        (targets, targets[:, :1], "`reference_labels`"),
        (targets, jnp.zeros((5, 3), int), r"`reference_labels`.*C = 2.*\(5, 3\)"),
        (targets, indices, r"`reference_labels` must have shape \[m, C\]"),
        (indices, targets, r"`reference_labels` must have shape \[m\]"),
    ):
        more = {} if of_references is None else {"references": features}
        with harness.raises(ValueError, match):
            loss(features, labels, reference_labels=of_references, **more)
    with harness.raises(TypeError, "`labels` must be bool, integers or floats"):
        loss(features, targets.astype(jnp.complex64))


SUPCON = partial(jaxloss.supervised_contrastive_loss, denominator="negatives")
MULTI_SIMILARITY = partial(jaxloss.multi_similarity_loss, mining_margin=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "multi_hot", "of_references"),
    [
        pytest.param(SUPCON, True, True, id="supcon of references"),
        pytest.param(MULTI_SIMILARITY, False, False, marks=pytest.mark.long, id="multi-similarity"),
        pytest.param(SUPCON, True, False, marks=pytest.mark.long, id="supcon"),
        pytest.param(
            MULTI_SIMILARITY,
            False,
            True,
            marks=pytest.mark.long,
            id="multi-similarity of references",
        ),
    ],
)
def test_pairs_of_given_numbers_around_the_ring(loss, multi_hot, of_references, monkeypatch):
    """The numbers that are given for an anchor stay on its device, and get gradients there."""
    monkeypatch.setattr(visits, "GATHERED_BYTES", 0)
    devices, rows = 4, 3
    rng, n = np.random.default_rng(94), devices * rows
    features, targets = features_and_targets(rng, n, np.float64)
    labels = targets if multi_hot else rng.integers(-1, 3, n).astype(np.int32)
    arrays = {"features": features, "labels": labels, "where": np.arange(n) != 5}
    if of_references:
        others = make_features(np.random.default_rng(95), 8, np.float64)
        arrays |= {"references": others, "reference_labels": np.roll(labels, 2, 0)[:8]}
    with enable_x64(True):
        arrays = {name: jnp.asarray(array) for name, array in arrays.items()}

        def value_and_grad(axis_name, arrays):
            rest = {name: x for name, x in arrays.items() if name not in ("features", "references")}
            rows = {name: x for name, x in arrays.items() if name not in rest}
            return jax.value_and_grad(lambda r: loss(**r, **rest, axis_name=axis_name))(rows)

        spread = jax.shard_map(
            partial(value_and_grad, "b"),
            mesh=mesh(names=("b",)),
            in_specs=P("b"),
            out_specs=(P(), P("b")),
        )
        got = jax.jit(spread, compiler_options=QUICK)(arrays)
        expected = jax.jit(partial(value_and_grad, None), compiler_options=QUICK)(arrays)
    assert harness.magnitude(expected[1]) > 1e-3
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-12)
