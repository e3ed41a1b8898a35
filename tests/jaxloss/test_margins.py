"""Margins of classes, samples and angles, and sub-centres: limits, and meshes."""

import math
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss.harness import (
    P,
    array_shapes,
    assert_close,
    compiled,
    enable_x64,
    mesh,
    over_mesh,
    raises,
)
from tests.tolerances import FLOAT32

N, DIM, CLASSES, CENTRES = 15, 6, 5, 3
cosine_loss = partial(jaxloss.classifier_loss, similarity="cosine")


@cache
def problem() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(130)
    return {
        "features": rng.normal(0.1, 1.0, (N, DIM)) * np.linspace(0.4, 1.2, DIM),
        "labels": rng.integers(0, CLASSES, N),
        "weights": rng.normal(0.05, 0.6, (DIM, CLASSES)),
        "centres": rng.normal(0.05, 0.6, (DIM, CLASSES, CENTRES)),
        "bias": rng.normal(0, 0.4, CLASSES),
        "margin": rng.normal(0.1, 0.2, CLASSES),
        "angular_margin": rng.uniform(0, 1.5, CLASSES),
        "sample_margin": rng.normal(0, 0.2, N),
        "sample_angular_margin": rng.normal(0, 0.4, N),
    }


# Where other packages differ ----


def test_the_logit_falls_with_the_angle():
    """Above π, unlike that of pytorch-metric-learning, it does not jump, nor rise as insightface's.

    `test_contract` has the formula and its gradient.
    """
    angles = np.linspace(0.05, math.pi - 1e-3, 2001)
    cosines = np.stack([np.cos(angles), np.zeros(len(angles))], axis=1)
    labels = np.zeros(len(angles), np.int32)
    loss = partial(jaxloss.margin_softmax_loss, angular_margin=1.2, margin=0.1, reduction="none")
    with enable_x64(True):
        # The loss of two classes tells the logit of the target.
        targets = -np.log(np.expm1(jax.jit(loss)(cosines, labels)))
    within = angles + 1.2 <= math.pi
    np.testing.assert_allclose(targets[within], np.cos(angles + 1.2)[within] - 0.1, atol=1e-12)
    assert np.diff(targets).max() < 0
    assert np.abs(np.diff(targets)).max() < 3 * (angles[1] - angles[0])


def test_below_zero_the_angle_is_zero():
    cosines, labels = jnp.asarray([[0.9, 0.2], [-0.3, 0.2]]), jnp.asarray([0, 0])
    options = {"margin": 0.25, "sample_angular_margin": jnp.asarray([-2.0, -0.4])}
    got = jaxloss.margin_softmax_loss(cosines, labels, **options, reduction="none")
    targets = np.array([1.0, math.cos(math.acos(-0.3) - 0.4)]) - 0.25
    np.testing.assert_allclose(got, np.log1p(np.exp(0.2 - targets)), rtol=FLOAT32)


# All options at once ----

EVERYTHING = ("margin", "angular_margin", "sample_margin", "sample_angular_margin")
LEAVES = ("features", "centres", "bias", *EVERYTHING)


def objective(loss, leaves, labels, **options):
    features, centres, bias, *margins = leaves
    options |= dict(zip(EVERYTHING, margins, strict=True))
    return loss(features, labels, centres, bias, scale=3.0, **options)


def composition(features, labels, centres, bias, *, sample_margin, **options):
    """By `margin_softmax_loss`, with the bias as a margin and added to the other logits."""
    logits = jaxloss.cosine_logits(features, centres)
    is_target = labels[:, None] == jnp.arange(CLASSES, dtype=labels.dtype)[None, :]
    logits = jnp.where(is_target, logits, logits + bias[None, :])
    own_margin = sample_margin - bias[labels]
    return jaxloss.margin_softmax_loss(logits, labels, sample_margin=own_margin, **options)


def leaves_and_labels(dtype: Any = np.float64):
    arrays = problem()
    leaves = tuple(jnp.asarray(arrays[name], dtype) for name in LEAVES)
    return leaves, jnp.asarray(arrays["labels"], jnp.int32)


@pytest.mark.slow
def test_with_a_bias_in_blocks():
    """Gradients of the margins, too, and second derivatives."""
    with enable_x64(True):
        leaves, labels = leaves_and_labels()
        directions = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), leaves)

        @partial(jax.jit, static_argnums=0)
        def derivatives(loss, leaves):
            run = partial(objective, loss, labels=labels)
            curved = jax.jvp(jax.grad(run), (leaves,), (directions,))[1]
            return jax.value_and_grad(run)(leaves), curved

        got, curved = derivatives(partial(cosine_loss, block_size=2), leaves)
        expected, its_curvature = derivatives(composition, leaves)
        assert_close(got, expected, 1e-12)
        assert_close(curved, its_curvature, 1e-11)


def test_a_class_that_is_left_out_costs_infinity():
    """Whatever its angle; the samples of other classes do not see it."""
    x, labels, bias = jnp.eye(3, 2), jnp.array([0, 1, 1]), jnp.array([-jnp.inf, 0.5])
    loss = partial(cosine_loss, weights=jnp.eye(2), bias=bias, reduction="none")
    np.testing.assert_array_equal(loss(x, labels, angular_margin=0.3), [np.inf, 0, 0])


def test_memory_of_sub_centres():
    """Neither logits of all classes, nor products with all sub-centres."""
    n, dim, classes, centres = 48, 16, 600, 3
    specs = ((n, dim), np.float32), ((n,), np.int32), ((dim, classes, centres), np.float32)
    loss = partial(cosine_loss, block_size=64, angular_margin=0.3)
    text, size = compiled(jax.value_and_grad(loss, argnums=(0, 2)), *specs)
    for shape in ((n, classes), (n, classes, centres), (n, classes * centres)):
        assert f"[{','.join(map(str, shape))}]" not in text
    assert size < 4 * n * classes * centres
    # The default size of a block counts the sub-centres.
    n, classes = 512, 2000
    rows = jax.ShapeDtypeStruct((n, dim), np.float32), jax.ShapeDtypeStruct((n,), np.int32)
    weights = jax.ShapeDtypeStruct((dim, classes, centres), np.float32)
    shapes = array_shapes(partial(cosine_loss, scale=3.0, reduction="none"), *rows, weights)
    assert max(math.prod(shape) for shape in shapes if shape[:1] == (n,)) < n * classes


# Devices ----

SPECS = (
    (P("batch"), P(None, "classes"), P("classes"), P("classes"), P("classes"), *[P("batch")] * 2),
    P("batch"),
)


@cache
def divisible():
    """16 samples and 6 classes, with masked rows."""
    with enable_x64(True):
        leaves, labels = leaves_and_labels()
        features, centres, bias, margin, angle, *of_samples = leaves
        leaves = (
            jnp.concatenate([features, -features[:1]]),
            jnp.concatenate([centres, -centres[:, :1]], axis=1),
            *(jnp.concatenate([x, x[:1] + 0.1]) for x in (bias, margin, angle, *of_samples)),
        )
        labels = jnp.concatenate([labels, jnp.asarray([5], jnp.int32)]).at[2].set(-1)
        return leaves, labels, jnp.arange(16) > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    ["shard_map", *(pytest.param(k, marks=pytest.mark.long) for k in ("mesh", "sharded_loss"))],
)
def test_classes_and_rows_on_devices(way):
    axes, run = ("batch", "classes"), partial(objective, partial(cosine_loss, block_size=2))
    with enable_x64(True):
        leaves, labels, where = divisible()
        single = jax.jit(jax.value_and_grad(run))
        expected = jax.tree.map(np.asarray, single(leaves, labels, where=where))
        if way == "shard_map":
            names = {"axis_name": "batch", "class_axis_name": "classes"}
            loss = over_mesh(
                lambda *args: run(*args[:2], where=args[2], **names),
                *((*SPECS, P("batch")), P(), (2, 2), axes),
            )
            got = jax.jit(jax.value_and_grad(loss))(leaves, labels, where)
        elif way == "sharded_loss":
            spread = jaxloss.sharded_loss(jaxloss.classifier_loss, mesh((2, 2), axes), "batch")
            spread = partial(spread, similarity="cosine", class_axis_name="classes")
            value = partial(objective, spread, labels=labels, where=where)
            got = jax.jit(jax.value_and_grad(value))(leaves)
        else:
            devices = mesh((2, 2), axes, jax.sharding.AxisType.Explicit)
            places = jax.tree.map(lambda spec: jax.NamedSharding(devices, spec), SPECS)
            got = single(*jax.device_put((leaves, labels), places), where=where)
            for gradient, place in zip(got[1], places[0], strict=True):
                assert gradient.sharding.is_equivalent_to(place, gradient.ndim)
        assert_close(got, expected, 1e-12)


@pytest.mark.long
def test_number_and_array_of_classes_are_the_same():
    """On an Explicit mesh, where an array without dimensions is not spread over the classes."""
    leaves, labels, where = divisible()
    features, centres = (jnp.asarray(np.asarray(x), jnp.float32) for x in leaves[:2])
    devices = mesh((2, 2), ("batch", "classes"), jax.sharding.AxisType.Explicit)
    placed = jax.device_put(centres, jax.NamedSharding(devices, P(None, "classes")))
    run = partial(cosine_loss, features, labels, where=where)
    got = jax.jit(run)(weights=placed, margin=jnp.asarray(0.25), angular_margin=jnp.asarray(0.5))
    expected = run(weights=centres, margin=jnp.full(6, 0.25), angular_margin=jnp.full(6, 0.5))
    np.testing.assert_allclose(got, expected, rtol=FLOAT32)


# Arguments ----


def test_margins_take_the_dtype_of_the_logits():
    logits, labels = jnp.ones((3, 4), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    with enable_x64(True):
        of_classes, of_samples = jnp.full(4, 0.25), jnp.full(3, 0.25)
        margins = (of_classes, of_classes, of_samples, of_samples)
        options: Any = dict(zip(EVERYTHING, margins, strict=True))
        assert jaxloss.margin_softmax_loss(logits, labels, **options).dtype == np.float32


def test_wrong_margins_are_named():
    leaves, labels = leaves_and_labels(np.float32)
    features, centres = leaves[:2]
    inner: Any = partial(jaxloss.classifier_loss, features, labels, centres[:, :, 0])
    for options in ({"angular_margin": 0.3}, {"sample_angular_margin": jnp.zeros(N)}):
        with raises(ValueError, "`angular_margin` and `sample_angular_margin` are for cosines"):
            inner(**options)
    inner(angular_margin=0.0)
    with raises(ValueError, r"`weights` must have shape \[d, C\], got \(6, 5, 3\)"):
        jaxloss.classifier_loss(features, labels, centres)
    with raises(ValueError, r"`weights` must have shape \[d, C, K\] with K at least 1"):
        jaxloss.cosine_logits(features, centres[:, :, :0])
    for name in ("margin", "angular_margin"):
        for shape in ((4,), (1,), (5, 1)):
            with raises(ValueError, rf"`{name}` must .*\[C\].*got \({shape[0]},"):
                inner(**{name: jnp.zeros(shape)})
        for key, wrong, error, match in (
            (name, jnp.zeros(CLASSES, jnp.int32), TypeError, "must have a float dtype, got int32"),
            (f"sample_{name}", jnp.zeros(N - 1), ValueError, "and `labels` must have the same num"),
            (f"sample_{name}", jnp.zeros(()), ValueError, r"must have shape \[n\], got \(\)"),
        ):
            with raises(error, f"`{key}` {match}"):
                inner(**{key: wrong})


SAMPLE_MARGIN: Any = np.full(4, 0.2)


LARGE: list[tuple[Any, dict[str, Any]]] = [
    (jaxloss.warp_loss, {}),
    (jaxloss.robust_multilabel_loss, {}),
    (jaxloss.robust_multilabel_loss, {"leak": 0.0}),
    (jaxloss.margin_softmax_loss, {"margin": 0.5, "scale": 32.0}),
    (jaxloss.margin_softmax_loss, {"margin": -0.5, "sample_margin": SAMPLE_MARGIN}),
    (jaxloss.classifier_loss, {"margin": 0.5, "weights": np.eye(2)}),
    (jaxloss.two_way_loss, {"margin": 0.5}),
]


@pytest.mark.parametrize("offset", [1.7e7, 1e8, 1e30])
@pytest.mark.parametrize(("loss", "options"), LARGE)
def test_margins_beside_large_logits(loss, options, offset):
    """They are lost in a sum with a large logit, and not beside a difference of two."""
    labels = np.array([[1, 0], [0, 1], [1, 0], [1, 0]], np.int32)
    if loss in (jaxloss.margin_softmax_loss, jaxloss.classifier_loss):
        labels = labels.argmax(1)
    logits = np.full((4, 2), offset, np.float32)
    logits[1, 1] = np.nextafter(logits[1, 1], np.float32(np.inf))  # A step apart.

    def results(dtype):
        arrays = {k: v.astype(dtype) if np.ndim(v) else v for k, v in options.items()}
        run = jax.value_and_grad(lambda logits: loss(logits, labels, **arrays))
        return jax.tree.map(np.asarray, run(jnp.asarray(logits, dtype)))

    got = results(np.float32)
    with enable_x64(True):
        value, gradient = results(np.float64)
    np.testing.assert_allclose(got[0], value, rtol=4 * FLOAT32)
    np.testing.assert_allclose(got[1], gradient, rtol=4 * FLOAT32, atol=FLOAT32)
