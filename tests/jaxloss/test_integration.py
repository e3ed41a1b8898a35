"""Sums of a classification loss and a metric loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import enable_x64, magnitude, raises
from tests.jaxloss.loss_table import CLASSES, classifier_inputs

SUMS = {
    "sum": jaxloss.sum_loss,
    "direct_sum": jaxloss.direct_sum_loss,
    "spectral_sum": jaxloss.spectral_sum_loss,
}
every_sum = pytest.mark.parametrize("name", SUMS)
CLASSIFICATION = {
    "softmax": (jaxloss.softmax_loss, references.softmax_loss),
    "sigmoid": (jaxloss.sigmoid_loss, references.sigmoid_loss),
    "margin": (
        partial(jaxloss.margin_softmax_loss, margin=-0.2, scale=2.0),
        partial(references.margin_softmax_loss, margin=-0.2, scale=2.0),
    ),
}
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
METRIC = {
    "nca": (jaxloss.nca_loss, references.nca_loss),
    "nca 3": (
        partial(jaxloss.nca_loss, temperature=3.0),
        partial(references.nca_loss, temperature=3.0),
    ),
    "proto": (jaxloss.prototypical_loss, references.prototypical_loss),
}


def problem(seed=90, n=12):
    return classifier_inputs(np.random.default_rng(seed), n, np.float64)


def gradients(loss, args, **options):
    """Float64 gradients of the features, weights and bias."""
    with enable_x64(True):
        features, labels, *rest = map(jnp.asarray, args)

        def objective(features, *rest):
            return loss(features, labels, *rest, **options)

        grads = jax.jit(jax.grad(objective, argnums=(0, 1, 2)))(features, *rest)
        return [np.asarray(g) for g in grads]


def metric_gradients(loss, args, **options):
    """The gradients of the metric loss: the change from weight 0 to weight 1."""

    def part(*args):
        once, twice = (loss(*args, metric_weight=w, **options) for w in (1.0, 2.0))
        return twice - once

    return gradients(part, args)


@pytest.mark.parametrize(
    ("name", "classification", "metric"),
    [
        ("sum", "margin", "nca"),
        ("direct_sum", "softmax", "nca 3"),
        ("direct_sum", "sigmoid", "proto"),
        ("spectral_sum", "margin", "proto"),
    ],
)
def test_any_two_losses(name, classification, metric):
    args = problem()
    where = np.arange(12) % 5 != 1
    weights = np.linspace(0.4, 1.6, 12)
    ours, theirs = CLASSIFICATION[classification][0], METRIC[metric][0]
    expected = getattr(references, f"{name}_loss")(
        *args,
        classification=CLASSIFICATION[classification][1],
        metric=METRIC[metric][1],
        metric_weight=0.7,
        where=where,
        sample_weights=weights,
    )
    with enable_x64(True):
        loss = partial(SUMS[name], classification_loss=ours, metric_loss=theirs, metric_weight=0.7)
        got = jax.jit(loss)(*map(jnp.asarray, args), where=where, sample_weights=weights)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [jaxloss.nca_loss, jaxloss.prototypical_loss])
def test_direct_sums_metric_gradient_is_orthogonal_to_the_classifier(metric):
    args = problem(93)
    weights = args[2]
    plain = metric_gradients(jaxloss.sum_loss, args, metric_loss=metric)[0]
    complement = metric_gradients(jaxloss.direct_sum_loss, args, metric_loss=metric, epsilon=1e-10)
    assert magnitude(plain @ weights) > 1e-2
    assert magnitude(complement[0]) > 1e-3
    np.testing.assert_allclose(complement[0] @ weights, 0, atol=1e-9)
    # An epsilon leaves eps / (sigma^2 + eps) of each singular direction.
    soft = metric_gradients(jaxloss.direct_sum_loss, args, metric_loss=metric)[0]
    singular = np.linalg.svd(weights, compute_uv=False)
    bound = np.max(1e-4 * singular / (singular**2 + 1e-4))
    for row, free in zip(soft @ weights, plain, strict=True):
        assert np.linalg.norm(row) <= 10 * bound * max(np.linalg.norm(free), 1e-3)


@pytest.mark.parametrize("dim", [CLASSES, CLASSES - 1, 1])
def test_direct_sum_needs_more_dimensions_than_classes(dim):
    features, labels = jnp.zeros((5, dim)), jnp.zeros(5, int)
    weights = jnp.zeros((dim, CLASSES))
    with raises(ValueError, match="spectral_sum_loss") as caught:
        jaxloss.direct_sum_loss(features, labels, weights)
    assert str(dim) in str(caught.value)
    assert str(CLASSES) in str(caught.value)
    for loss in (jaxloss.spectral_sum_loss, jaxloss.sum_loss):
        assert jax.eval_shape(loss, features, labels, weights).shape == ()


def test_direct_sum_with_just_enough_dimensions():
    rng = np.random.default_rng(97)
    args = classifier_inputs(rng, 12, np.float64, dim=CLASSES + 1)
    with enable_x64(True):
        got = np.asarray(jax.jit(jaxloss.direct_sum_loss)(*map(jnp.asarray, args)))
    np.testing.assert_allclose(got, references.direct_sum_loss(*args), rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "classification"),
    [
        *(("direct_sum", classification) for classification in OF_A_CLASSIFIER),
        ("sum", "classifier"),
        ("spectral_sum", "group softmax"),
    ],
)
def test_classification_losses_of_a_classifier(name, classification):
    ours, theirs = OF_A_CLASSIFIER[classification]
    args = problem(101)
    args = args[:3] if classification == "cosine" else args
    common = {"where": np.arange(12) != 4, "sample_weights": np.linspace(0.4, 1.6, 12)}
    with enable_x64(True):
        run = jax.jit(partial(SUMS[name], classification_loss=ours))
        got = np.asarray(run(*map(jnp.asarray, args), **common))
    of_softmax = references.softmax_loss(
        references.linear_logits(args[0], *args[2:]), args[1], **common
    )
    metric = getattr(references, f"{name}_loss")(*args, **common) - of_softmax
    np.testing.assert_allclose(got, theirs(*args, **common) + metric, rtol=1e-9)


def test_a_jitted_classification_loss_takes_the_classifier():
    args = tuple(map(jnp.asarray, problem(102)))
    args = (args[0].astype(np.float32), args[1], *(a.astype(np.float32) for a in args[2:]))
    jitted = jax.jit(jaxloss.classifier_loss, static_argnames=("reduction", "axis_name"))
    got = jax.jit(partial(jaxloss.sum_loss, classification_loss=jitted))(*args)
    np.testing.assert_allclose(got, jax.jit(jaxloss.sum_loss)(*args), rtol=1e-5)


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
    ],
    ids=["logits", "any number", "an option", "classifier", "optional bias"],
)
def test_the_number_of_arrays_decides_and_not_their_names(loss):
    args = tuple(map(jnp.asarray, problem(104)))
    got = jax.jit(partial(jaxloss.sum_loss, classification_loss=loss))(*args)
    np.testing.assert_allclose(got, jax.jit(jaxloss.sum_loss)(*args), rtol=1e-6)


@every_sum
@pytest.mark.parametrize(
    ("loss", "mentions"),
    [
        (jaxloss.prototype_loss, "features, labels, prototypes"),
        (lambda logits, **_: logits, "logits"),
        (lambda **_: 0, "no arrays"),
    ],
    ids=["prototypes", "no labels", "no arrays"],
)
def test_other_classification_losses_raise(name, loss, mentions):
    args = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in problem(103)]
    with raises(TypeError, match=f"classification_loss.*{mentions}"):
        jax.eval_shape(partial(SUMS[name], classification_loss=loss), *args)


@every_sum
@pytest.mark.parametrize("which", ["classification_loss", "metric_loss"])
def test_losses_without_the_common_keywords_raise(name, which):
    args = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in problem(103)]
    for loss, mentions in (
        (lambda x, y, where=None: x.sum(), "does not take axis_name, reduction, sample_weights"),
        (3, "must be a function, got int"),
    ):
        with raises(TypeError, match=f"`{which}`.*{mentions}"):
            jax.eval_shape(partial(SUMS[name], **{which: loss}), *args)
