"""Sums of a classification loss and a metric loss."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import magnitude, raises, widen
from tests.jaxloss.loss_table import CLASSES, DIM, classifier_inputs, make_weights

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
    with jax.enable_x64(True):
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


@every_sum
@pytest.mark.parametrize(
    ("classification", "metric"),
    [("softmax", "nca 3"), ("sigmoid", "proto"), ("margin", "nca")],
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
    with jax.enable_x64(True):
        loss = partial(SUMS[name], classification_loss=ours, metric_loss=theirs, metric_weight=0.7)
        got = jax.jit(loss)(*map(jnp.asarray, args), where=where, sample_weights=weights)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-9)


@every_sum
def test_each_part_is_reduced_by_itself(name):
    """The anchor without positives counts for the classification loss only."""
    assert np.sum(problem(91)[1] == 3) == 1
    with jax.enable_x64(True):
        project = {
            "sum": lambda x, w: x,
            "direct_sum": jaxloss.project_complement,
            "spectral_sum": jaxloss.project_spectral_complement,
        }[name]

        @jax.jit
        def run(features, labels, weights, bias):
            logits = jaxloss.linear_logits(features, weights, bias)
            return (
                SUMS[name](features, labels, weights, bias),
                jaxloss.softmax_loss(logits, labels),
                jaxloss.nca_loss(project(features, weights), labels),
            )

        total, first, second = map(np.asarray, run(*map(jnp.asarray, problem(91))))
    np.testing.assert_allclose(total, first + second, rtol=1e-10)
    assert second > 0.1


@every_sum
def test_weight_zero_is_the_classification_loss(name):
    args = problem(92)
    with jax.enable_x64(True):
        got = jax.jit(partial(SUMS[name], metric_weight=0.0))(*map(jnp.asarray, args))
        logits = jaxloss.linear_logits(*(jnp.asarray(args[k]) for k in (0, 2, 3)))
        expected = jaxloss.softmax_loss(logits, jnp.asarray(args[1]))
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-12)


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


def test_spectral_sums_metric_gradient_is_orthogonal_at_power_zero():
    args = problem(94)
    complement = metric_gradients(jaxloss.spectral_sum_loss, args, power=0.0)
    assert magnitude(complement[0]) > 1e-3
    np.testing.assert_allclose(complement[0] @ args[2], 0, atol=1e-10)
    with_power = metric_gradients(jaxloss.spectral_sum_loss, args, power=0.3)
    assert magnitude(with_power[0] @ args[2]) > 1e-3


@every_sum
def test_a_stopped_metric_part_does_not_reach_the_classifier(name):
    options = {} if name == "sum" else {"stop_gradient": True}
    for metric in (jaxloss.nca_loss, jaxloss.prototypical_loss):
        part = metric_gradients(SUMS[name], problem(95), metric_loss=metric, **options)
        assert magnitude(part[0]) > 1e-3
        assert magnitude(part[1:]) < 1e-12


@pytest.mark.parametrize("name", ["direct_sum", "spectral_sum"])
def test_metric_part_reaches_the_classifier(name):
    """The whole gradient is that of PyTorch through the projection."""
    torch = pytest.importorskip("torch")
    from tests.jaxloss import torch_references

    args = problem(100)
    project = {
        "direct_sum": torch_references.project_complement,
        "spectral_sum": torch_references.project_spectral_complement,
    }[name]
    got = gradients(SUMS[name], args)
    labels = torch.tensor(args[1], dtype=torch.int64)
    leaves = [torch.tensor(args[k], requires_grad=True) for k in (0, 2, 3)]
    loss = torch_references.sum_loss(leaves[0], labels, *leaves[1:], transform=project)
    expected = torch.autograd.grad(loss, leaves)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-8, atol=1e-10)
    assert magnitude(gradients(SUMS[name], args, stop_gradient=True)[1] - got[1]) > 1e-4


def test_direct_sum_equals_spectral_sum_at_its_limits():
    args = problem(96)
    with jax.enable_x64(True):
        arrays = tuple(map(jnp.asarray, args))
        direct = jax.jit(partial(jaxloss.direct_sum_loss, epsilon=1e-11))(*arrays)
        spectral = jax.jit(partial(jaxloss.spectral_sum_loss, power=0.0))(*arrays)
        np.testing.assert_allclose(np.asarray(direct), np.asarray(spectral), rtol=1e-9)


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
    with jax.enable_x64(True):
        got = np.asarray(jax.jit(jaxloss.direct_sum_loss)(*map(jnp.asarray, args)))
    np.testing.assert_allclose(got, references.direct_sum_loss(*args), rtol=1e-9)


@every_sum
def test_bfloat16_features_beside_a_float32_classifier(name):
    features, labels, weights, bias = problem(98)
    narrow = jnp.asarray(features, jnp.bfloat16)
    rest = (jnp.asarray(labels), jnp.asarray(weights, np.float32), jnp.asarray(bias, np.float32))

    def loss(x, labels, weights, bias):
        return SUMS[name](x, labels, weights, bias)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3)))
    value, grads = run(narrow, *rest)
    expected, expected_grads = run(narrow.astype(np.float32), *rest)
    assert value.dtype == np.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16, np.float32, np.float32]
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        chex.assert_trees_all_close(
            widen(ours),
            widen(theirs),
            rtol=0,
            atol=magnitude(theirs) * (2**-7 if ours.dtype == jnp.bfloat16 else 1e-5),
        )


def test_memory_of_the_direct_sum():
    """Neither the loss nor its gradient holds a d×d matrix."""
    dim, classes, n = 1024, 300, 64
    specs = (
        jax.ShapeDtypeStruct((n, dim), np.float32),
        jax.ShapeDtypeStruct((n,), np.int32),
        jax.ShapeDtypeStruct((dim, classes), np.float32),
    )
    run = jax.jit(jax.value_and_grad(jaxloss.direct_sum_loss, argnums=(0, 2)))
    text = run.lower(*specs).compile().as_text()
    assert text is not None
    assert "1024,1024" not in text


def test_helpers_make_what_they_promise():
    weights = make_weights(np.random.default_rng(0), np.float64)
    assert weights.shape == (DIM, CLASSES)
    assert np.linalg.svd(weights, compute_uv=False).min() > 0.1


@every_sum
@pytest.mark.parametrize("classification", OF_A_CLASSIFIER)
def test_classification_losses_of_a_classifier(name, classification):
    ours, theirs = OF_A_CLASSIFIER[classification]
    args = problem(101)
    args = args[:3] if classification == "cosine" else args
    where, weights = np.arange(12) != 4, np.linspace(0.4, 1.6, 12)
    with jax.enable_x64(True):
        arrays = tuple(map(jnp.asarray, args))
        options = {"where": jnp.asarray(where), "sample_weights": jnp.asarray(weights)}
        got = jax.jit(partial(SUMS[name], classification_loss=ours))(*arrays, **options)
        zero = partial(SUMS[name], classification_loss=ours, metric_weight=0.0)
        classification_part = np.asarray(jax.jit(zero)(*arrays, **options))
        metric_part = np.asarray(got) - classification_part
        softmax = partial(SUMS[name], metric_weight=1.0)
        same_metric = jax.jit(softmax)(*arrays, **options)
        without = jax.jit(partial(softmax, metric_weight=0.0))(*arrays, **options)
    expected = theirs(*args, where=where, sample_weights=weights)
    np.testing.assert_allclose(classification_part, expected, rtol=1e-10)
    np.testing.assert_allclose(metric_part, np.asarray(same_metric - without), rtol=1e-8)


def test_a_jitted_classification_loss_takes_the_classifier():
    args = tuple(map(jnp.asarray, problem(102)))
    args = (args[0].astype(np.float32), args[1], *(a.astype(np.float32) for a in args[2:]))
    jitted = jax.jit(jaxloss.classifier_loss, static_argnames=("reduction", "axis_name"))
    got = jaxloss.sum_loss(*args, classification_loss=jitted)
    np.testing.assert_allclose(got, jaxloss.sum_loss(*args), rtol=1e-5)


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
    got = jaxloss.sum_loss(*args, classification_loss=loss)
    np.testing.assert_allclose(got, jaxloss.sum_loss(*args), rtol=1e-6)


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
