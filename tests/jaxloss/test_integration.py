"""Sums of a classification loss and a metric loss."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import enable_x64, raises
from tests.jaxloss.loss_table import CLASSES, classifier_inputs
from tests.tolerances import FLOAT32

SUMS = {
    "sum": jaxloss.sum_loss,
    "direct_sum": jaxloss.direct_sum_loss,
    "spectral_sum": jaxloss.spectral_sum_loss,
}
every_sum = pytest.mark.parametrize("name", SUMS)
OF_A_CLASSIFIER = {
    "classifier": (
        partial(jaxloss.classifier_loss, scale=1.7, margin=0.1, block_size=3),
        partial(references.classifier_loss, scale=1.7, margin=0.1),
    ),
    "cosine": (
        partial(jaxloss.classifier_loss, similarity="cosine", scale=10.0),
        partial(references.classifier_loss, similarity="cosine", scale=10.0),
    ),
    "group softmax": (
        partial(jaxloss.group_softmax_loss, num_groups=3),
        partial(references.group_softmax_loss, num_groups=3),
    ),
}


def problem(seed=90, n=12):
    return classifier_inputs(np.random.default_rng(seed), n, np.float64)


@pytest.mark.parametrize("dim", [CLASSES, CLASSES - 1, 1])
def test_direct_sum_needs_more_dimensions_than_classes(dim):
    features, labels = jnp.zeros((5, dim)), jnp.zeros(5, int)
    weights = jnp.zeros((dim, CLASSES))
    with raises(ValueError, match=rf"got shape \({dim}, {CLASSES}\); use spectral_sum_loss"):
        jaxloss.direct_sum_loss(features, labels, weights)
    for loss in (jaxloss.spectral_sum_loss, jaxloss.sum_loss):
        assert jax.eval_shape(loss, features, labels, weights).shape == ()
    enough = jnp.zeros((5, CLASSES + 1)), labels, jnp.zeros((CLASSES + 1, CLASSES))
    assert jax.eval_shape(jaxloss.direct_sum_loss, *enough).shape == ()


@pytest.mark.parametrize(
    ("name", "classification"),
    [
        *(("direct_sum", classification) for classification in OF_A_CLASSIFIER),
        ("sum", "classifier"),
        ("spectral_sum", "group softmax"),
    ],
)
def test_classification_losses_of_a_classifier(name, classification):
    """With a metric loss and a weight that are not the defaults."""
    ours, theirs = OF_A_CLASSIFIER[classification]
    args = problem(101)
    args = args[:3] if classification == "cosine" else args
    common = {"where": np.arange(12) != 4, "sample_weights": np.linspace(0.4, 1.6, 12)}
    with enable_x64(True):
        metric_loss = partial(jaxloss.nca_loss, temperature=3.0)
        options = {"metric_loss": metric_loss, "metric_weight": 0.7}
        run = jax.jit(partial(SUMS[name], classification_loss=ours, **options))
        got = np.asarray(run(*map(jnp.asarray, args), **common))
    expected = getattr(references, f"{name}_loss")(
        *args,
        classification=lambda logits, labels, **common: theirs(*args, **common),
        metric=partial(references.nca_loss, temperature=3.0),
        metric_weight=0.7,
        **common,
    )
    np.testing.assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y, **common: jaxloss.softmax_loss(z, y, **common),
        lambda *arrays, **common: jaxloss.softmax_loss(*arrays, **common),
        lambda z, y, smoothing=0.0, **common: jaxloss.softmax_loss(
            z, y, label_smoothing=smoothing, **common
        ),
        lambda x, y, w, b, **common: jaxloss.classifier_loss(x, y, w, b, **common),
        lambda x, y, w, b=None, **common: jaxloss.classifier_loss(x, y, w, b, **common),
        jax.jit(jaxloss.classifier_loss, static_argnames=("reduction", "axis_name")),
    ],
    ids=["logits", "any number", "an option", "classifier", "optional bias", "jitted"],
)
def test_the_number_of_arrays_decides_and_not_their_names(loss):
    args = tuple(map(jnp.asarray, problem(104)))
    got = jax.jit(partial(jaxloss.sum_loss, classification_loss=loss))(*args)
    np.testing.assert_allclose(got, jax.jit(jaxloss.sum_loss)(*args), rtol=FLOAT32)


def test_a_traced_weight_has_the_dtype_of_the_computation():
    """Here that of the classifier, beside features of float32."""
    with enable_x64(True):
        features, labels, *classifier = map(jnp.asarray, problem(105))
        features = features.astype(jnp.float32)
        got, expected = (
            jax.jit(
                lambda x, t: jaxloss.spectral_sum_loss(x, labels, *classifier, metric_weight=t)
            )(x, 0.3)
            for x in (features, features.astype(jnp.float64))
        )
    np.testing.assert_allclose(got, expected, rtol=1e-14)


@every_sum
def test_other_losses_raise(name):
    args, total = problem(103), SUMS[name]
    keywords = "not take axis_name, reduction, sample_weights.*write `def loss"
    wrong: list[tuple[str, str, Any]] = [
        ("classification_loss", "features, labels, prototypes", jaxloss.prototype_loss),
        ("classification_loss", "logits", lambda logits, **_: logits),
        ("classification_loss", "no arrays", lambda **_: 0),
    ]
    for which, loss in (("classification", jaxloss.classifier_loss), ("metric", jaxloss.nca_loss)):
        a_tuple = partial(loss, metrics=True)
        wrong.append((f"{which}_loss", "must return a loss, got a tuple", a_tuple))
    for which, scored in (("classification_loss", "logits"), ("metric_loss", "features")):
        advice = rf"{keywords}\({scored}, labels, \*\*keywords\)`"
        wrong += [(which, advice, lambda x, y, where=None: 0)]
        wrong += [(which, "must be a function, got int", 3)]
    for which, mentions, loss in wrong:
        with raises(TypeError, match=f"`{which}`.*{mentions}"):
            jax.eval_shape(partial(total, **{which: loss}), *args)


@pytest.mark.parametrize("loss", [jaxloss.direct_sum_loss, jaxloss.spectral_sum_loss])
def test_gradients_of_low_precision_are_rounded_once(loss):
    """Each entry has the bits of its dtype, also where the two gradients nearly cancel."""
    features, labels, weights, bias = classifier_inputs(np.random.default_rng(12), 24, np.float32)
    low = jnp.asarray(features, jnp.bfloat16)
    gradient = jax.grad(partial(loss, metric_weight=-1.0), (0, 2))
    got = gradient(low, labels, jnp.asarray(weights, jnp.bfloat16), bias)
    wide = low.astype(jnp.float32), jnp.asarray(weights, jnp.bfloat16).astype(jnp.float32)
    expected = gradient(wide[0], labels, wide[1], bias)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=2**-8, atol=1e-7)
