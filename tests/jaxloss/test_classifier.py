"""The classifier's loss in blocks of classes, on one device and with its classes on several."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxloss
from jaxloss.losses import class_blocks
from tests.jaxloss import harness
from tests.jaxloss.harness import QUICK, P, assert_close, compiled, enable_x64, magnitude
from tests.tolerances import FLOAT32

CLASSES = 12
OPTIONS = {
    "inner": {},
    "inner, scaled": {"margin": -0.3, "scale": 1.7, "label_smoothing": 0.2},
    "cosine": {"similarity": "cosine", "margin": 0.2, "scale": 6.0, "label_smoothing": 0.1},
}


def composition(features, labels, weights, bias, similarity="inner", margin=0.0, scale=1.0, **more):
    """The same loss of logits `[n, C]`."""
    cosine = similarity == "cosine"
    logits = (jaxloss.cosine_logits if cosine else jaxloss.linear_logits)(features, weights)
    logits = logits if bias is None else logits + bias[None, :]
    target = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
    return jaxloss.softmax_loss(scale * (logits - margin * target), labels, **more)


def problem(options, dtype: Any = np.float32, n=16, dim=6, classes=CLASSES) -> tuple[Any, ...]:
    rng = np.random.default_rng(110)
    bias = None if options.get("similarity") == "cosine" else rng.normal(size=classes)
    arrays = rng.normal(size=(n, dim)), rng.normal(size=(dim, classes)), bias
    features, weights, bias = (None if a is None else jnp.asarray(a, dtype) for a in arrays)
    return features, jnp.asarray(rng.integers(0, classes, n), jnp.int32), weights, bias


@pytest.mark.slow
@pytest.mark.parametrize(("similarity", "block_size"), [("inner", None), ("cosine", 4)])
def test_classes_that_are_switched_off(similarity, block_size):
    """Whole blocks of logits of -inf, as of classes that fill up the last device."""
    features, labels, weights, bias = problem({})
    labels, bias = labels % 4, bias.at[4:].set(-jnp.inf)

    def run(loss, **options):
        def value(features, weights):
            return loss(features, labels, weights, bias, similarity=similarity, **options)

        return jax.jit(jax.value_and_grad(value, (0, 1)))(features, weights)

    expected = run(composition)
    assert np.isfinite(expected[0])
    loss = partial(jaxloss.classifier_loss, block_size=block_size)
    got = run(loss)
    assert_close(got, expected, FLOAT32)
    assert not got[1][1][:, 4:].any()
    # As the target, such a class has an infinite loss.
    losses = jax.jit(partial(loss, reduction="none"))(features, labels.at[3].set(4), weights, bias)
    np.testing.assert_array_equal(np.isposinf(losses), np.arange(16) == 3)
    assert np.isfinite(np.delete(losses, 3)).all()


@pytest.mark.long
@pytest.mark.parametrize("centres", [1, 3])
def test_products_that_wait_in_the_gradient(centres):
    """Of no more rows than features: the same derivatives, of two orders and of one argument."""
    with enable_x64(True):
        features, labels, weights, _ = problem({}, np.float64, n=5, classes=CLASSES * centres)
        labels, weights = labels % CLASSES, weights.reshape(-1, CLASSES, centres)

        def run(block_size):
            def loss(x, w):
                options = {"similarity": "cosine", "scale": 3.0, "block_size": block_size}
                return jaxloss.classifier_loss(x, labels, w, label_smoothing=0.1, **options)

            slope = jax.grad(loss, argnums=(0, 1))
            curved = jax.grad(lambda x, w: sum(jnp.sum(jnp.sin(g)) for g in slope(x, w)), (0, 1))
            single = jax.grad(loss), jax.grad(loss, argnums=1)
            return jax.jit(lambda *x: [f(*x) for f in (slope, curved, *single)])(features, weights)

        assert_close(run(5), run(CLASSES), 1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "devices"), [((6, CLASSES), 1), ((6, CLASSES, 3), 4)])
def test_rows_in_blocks(shape, devices, monkeypatch):
    """Each with its gradient, by every number: as one block, with second derivatives."""
    monkeypatch.setattr(class_blocks, "rows_of_block", lambda *_: 3)
    rng = np.random.default_rng(113)
    labels = rng.integers(-1, CLASSES, 16).astype(np.int32)

    def loss(*args: Any) -> Any:
        numbers, x, margins, block_size, axis_name, labels = args
        weights, bias, options = numbers
        options = options | {"sample_margin": margins, "sample_angular_margin": margins / 3}
        options |= {"sample_weights": 1 + margins**2, "block_size": block_size}
        arrays = x, labels, weights, bias
        return jaxloss.classifier_loss(
            *arrays, similarity="cosine", where=labels % 3 > 0, axis_name=axis_name, **options
        )

    def in_blocks(numbers, x, margins):
        if devices == 1:
            return loss(numbers, x, margins, None, None, labels)
        return jax.shard_map(
            lambda *args: loss(*args[:3], None, "batch", args[3]),
            mesh=mesh((4, 1)),
            in_specs=(P(), P("batch"), P("batch"), P("batch")),
            out_specs=P(),
        )(numbers, x, margins, labels)

    with enable_x64(True):
        options = {"scale": 3.0, "label_smoothing": 0.2, "margin": rng.normal(size=CLASSES)}
        numbers = rng.normal(size=shape), rng.normal(size=CLASSES), options
        args = jax.tree.map(jnp.asarray, (numbers, rng.normal(size=(16, 6)), rng.normal(size=16)))

        def derivatives(function):
            slope = jax.value_and_grad(function, argnums=(0, 1, 2))
            waves = jax.grad(lambda *x: sum(map(jnp.sum, map(jnp.sin, jax.tree.leaves(slope(*x))))))
            along = jax.jvp(slope, args, jax.tree.map(jnp.cos, args))[1]
            return slope(*args), waves(*args), along

        got = jax.jit(lambda: derivatives(in_blocks), compiler_options=QUICK)()
        expected = jax.jit(lambda: derivatives(lambda *x: loss(*x, CLASSES, None, labels)))()
        assert_close(got, expected, 1e-12)


def test_padding_of_blocks_of_rows_is_of_no_class(monkeypatch):
    """Nor of a class that is left out, whose loss is infinite."""
    monkeypatch.setattr(class_blocks, "rows_of_block", lambda *_: 3)
    features, labels, weights, _ = problem({"similarity": "cosine"})
    bias = jnp.zeros(CLASSES).at[0].set(-jnp.inf)

    def run(block_size):
        def loss(x, w, b):
            options = {"angular_margin": 0.3, "block_size": block_size}
            return jaxloss.classifier_loss(
                x, jnp.maximum(labels, 1), w, b, similarity="cosine", **options
            )

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(features, weights, bias)

    assert_close(run(None), run(CLASSES), FLOAT32)


@pytest.mark.parametrize("way", ["blocks", "rows", "one", "bfloat16", "devices", "targets"])
def test_metrics(way, monkeypatch):
    """Of the rows that count, the same for each way to visit the classes; a tie is a miss."""
    if way in ("rows", "targets"):
        monkeypatch.setattr(class_blocks, "rows_of_block", lambda *_: 3)
    dtype = jnp.bfloat16 if way == "bfloat16" else np.float32
    features, labels, weights, bias = problem({}, dtype, classes=192)
    labels, where = labels.at[3].set(-1).at[5].set(192), jnp.arange(16) % 5 > 0
    labels = jnp.where(
        jnp.arange(16) % 3 > 1, jnp.argmax(features @ weights + bias[None, :], 1), labels
    )
    options: Any = {"logsumexp_penalty": 0.1, "soft_cap": 5.0, "scale": 2.0, "metrics": True}
    if way == "targets":
        labels, where = 0.75 * jax.nn.one_hot(labels, 192) + 1e-3, where & (labels >= 0)
        options["label_smoothing"] = 0.1
    else:
        options |= {"margin": 0.3, "block_size": {"rows": None, "one": 192}.get(way, 50)}

    def loss(*arrays, **more):
        value = partial(jaxloss.classifier_loss, where=where, **options, **more)
        if way == "devices":
            value = over_classes(value)
        return value(*arrays)

    (value, metrics), _ = jax.jit(jax.value_and_grad(loss, (0, 2), has_aux=True))(
        features, labels, weights, bias
    )
    x, w, b = (np.asarray(a, np.float64) for a in (features, weights, bias))
    capped = 5 * np.tanh((x @ w + b) / 5)
    own = np.asarray(labels if labels.ndim == 1 else labels.argmax(1))
    counts = np.asarray(where) & (own >= 0)
    lowered = 2 * (capped - (0.3 * np.eye(193)[own, :192] if labels.ndim == 1 else 0))
    log_sums = np.where(own < 192, np.log(np.exp(lowered).sum(1)), np.nan)
    hits = capped.argmax(1) == own
    assert 0 < hits[counts].mean() < 1
    np.testing.assert_allclose(metrics.accuracy, hits[counts].mean(), rtol=FLOAT32)
    np.testing.assert_allclose(metrics.logsumexp, log_sums[counts].mean(), rtol=4 * FLOAT32)
    assert np.isnan(value) == np.isnan(metrics.logsumexp)
    loss = partial(jaxloss.classifier_loss, metrics=True)
    tied = loss(jnp.ones((4, 2)), jnp.array([0, 1, 2, -1]), jnp.ones((2, 3)))[1]
    np.testing.assert_allclose(tied, (0, 2 + np.log(3)), rtol=FLOAT32)


def test_confident_samples():
    """Relative to the other logits, the exponential of the target would overflow."""
    loss = partial(jaxloss.classifier_loss, labels=jnp.array([0]), weights=jnp.eye(2), block_size=1)
    product = jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), x)))
    assert np.all(np.isfinite(product(jnp.array([[200.0, 0.0]]))))
    arrays = jnp.ones((3, 2)), jnp.zeros(3, jnp.int32), jnp.ones((2, 1))  # Of a single class.
    for block_size in (1, 2):
        loss = partial(jaxloss.classifier_loss, block_size=block_size)
        assert magnitude(jax.jit(jax.value_and_grad(loss, argnums=(0, 2)))(*arrays)) == 0


def test_forward_mode_takes_a_single_block():
    features, labels, weights, _ = problem({})

    def tangent(size):
        loss = partial(jaxloss.classifier_loss, labels=labels, weights=weights, block_size=size)
        return jax.jit(lambda x: jax.jvp(loss, (x,), (x,))[1])(features)

    assert magnitude(tangent(CLASSES)) > 0
    with pytest.raises(TypeError, match="custom_vjp"):
        tangent(CLASSES - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("similarity", "dtype"),
    [
        ("inner", jnp.float16),
        ("cosine", "bfloat16"),
        pytest.param("cosine", np.float32, marks=pytest.mark.long),
        pytest.param("inner", np.float32, marks=pytest.mark.long),
    ],
)
def test_memory(similarity, dtype):
    """There are no logits of all classes, and no copy of the weights in any dtype."""
    n, dim, classes, block_size = 48, 64, 5000, 256
    specs = ((n, dim), np.float32), ((n,), np.int32), ((dim, classes), dtype)
    loss = partial(jaxloss.classifier_loss, similarity=similarity, block_size=block_size)
    # On a CPU, the gradient of bfloat16 weights is collected in float32.
    collected = 4 * dim * classes if dtype == "bfloat16" else 0
    for function, of_weights in ((loss, 0), (jax.value_and_grad(loss, argnums=(0, 2)), collected)):
        text, size = compiled(function, *specs)
        assert f"[{n},{classes}]" not in text
        assert size < dim * classes + of_weights  # A quarter of the weights in float32.


# Classes on several devices ----

mesh = partial(harness.mesh, names=("batch", "classes"))


def over_classes(loss):
    specs = (P(), P(), P(None, "classes"), P("classes"))
    loss = partial(loss, class_axis_name="classes")
    return jax.shard_map(loss, mesh=mesh((1, 4)), in_specs=specs, out_specs=P())


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [pytest.param(None, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    ("off", "options", "tolerance"),
    [
        (-np.inf, {}, FLOAT32),
        (-1e4, {"similarity": "cosine", "scale": 6.0, "margin": 0.2}, 4 * FLOAT32),
    ],
    ids=["inner", "cosine"],
)
def test_a_device_may_have_no_class_that_counts(block_size, off, options, tolerance):
    """The last two of four devices have classes that are switched off by their bias."""
    features, labels, weights, bias = problem({})
    labels, bias = labels % 5, jnp.where(jnp.arange(CLASSES) < 5, bias, off)
    loss = partial(jaxloss.classifier_loss, block_size=block_size, **options)

    def run(loss, weights, bias):
        return jax.jit(jax.value_and_grad(loss, (0, 2)))(features, labels, weights, bias)

    value, (d_features, d_weights) = run(over_classes(loss), weights, bias)
    expected = run(partial(composition, **options), weights[:, :5], bias[:5])
    assert_close((value, (d_features, d_weights[:, :5])), expected, tolerance)
    assert not d_weights[:, 5:].any()


@pytest.mark.parametrize(
    ("name", "shape"), [("inner", (2, 2)), ("inner, scaled", (1, 4)), ("cosine", (2, 2))]
)
@pytest.mark.parametrize(
    ("way", "masked"),
    [
        pytest.param("inside", True, marks=pytest.mark.slow),
        pytest.param("inside", False, marks=pytest.mark.long),
        pytest.param("outside", True, marks=pytest.mark.long),
        pytest.param("outside, unchecked", True, marks=pytest.mark.slow),
        pytest.param("inside, unchecked", True, marks=pytest.mark.long),
    ],
)
def test_classes_on_devices_with_gradients(name, shape, way, masked):
    """Inside of `shard_map` and outside. A kernel, which all share, makes the features."""
    rng, checked = np.random.default_rng(111), "unchecked" not in way
    of_params = {"kernel": P(), "weights": P(None, "classes"), "bias": P("classes")}

    def objective(loss, params, batch):
        (inputs, labels), masks = batch
        arrays = inputs @ params["kernel"], labels, params["weights"], params["bias"]
        return loss(*arrays, **masks, **OPTIONS[name])

    def step(params, batch):
        value, grads = jax.value_and_grad(on_devices)(params, batch)
        grads = lax.pmean(grads, "batch")
        if not checked:  # The docstring says what the caller does with the gradients.
            shares = {k: grads.pop(k) for k in ("weights", "bias")}
            shares = jax.tree.map(lambda g: g / lax.axis_size("classes"), shares)
            grads = lax.pmean(grads, "classes") | shares
        return value, grads

    axes = {"axis_name": "batch", "class_axis_name": "classes", "block_size": 2}
    on_devices = partial(objective, partial(jaxloss.classifier_loss, **axes))
    spread = partial(
        jax.shard_map, mesh=mesh(shape), in_specs=(of_params, P("batch")), check_vma=checked
    )
    with enable_x64(True):
        _, labels, weights, bias = problem(OPTIONS[name], np.float64)
        params = {"kernel": jnp.asarray(rng.normal(size=(5, 6))), "weights": weights, "bias": bias}
        inputs, masks = jnp.asarray(rng.normal(size=(16, 5))), {}
        if masked:
            labels = labels.at[np.array([2, 9])].set(-1)
            sample_weights = jnp.asarray(rng.uniform(0.2, 2.0, 16))
            masks = {"where": jnp.arange(16) > 4, "sample_weights": sample_weights}
        batch = (inputs, labels), masks
        if "inside" in way:
            function = spread(step, out_specs=(P(), of_params))
        else:
            function = jax.value_and_grad(spread(on_devices, out_specs=P()))
        got = jax.jit(function, compiler_options=QUICK)(params, batch)
        expected = jax.jit(jax.value_and_grad(partial(objective, composition)))(params, batch)
        assert magnitude(expected[1]["kernel"]) > 1e-2
        assert_close(got, expected, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_labels_are_indices_among_all_classes(dtype):
    """By `shard_map`, and by `pmap`, where each device has all rows and its columns."""
    features, labels, weights, bias = problem({})
    labels = labels.at[3].set(CLASSES).astype(dtype)
    loss = partial(jaxloss.classifier_loss, block_size=2, reduction="none")
    run, own = jax.jit(over_classes(loss)), partial(loss, class_axis_name="classes")
    pmapped = jax.pmap(own, "classes", in_axes=(None, None, 1, 0))
    columns = weights.reshape(len(weights), 4, -1), bias.reshape(4, -1)
    expected = composition(features, labels.astype(np.int32), weights, bias, reduction="none")
    assert np.isnan(expected[3])
    for got in (run(features, labels, weights, bias), *pmapped(features, labels, *columns)):
        np.testing.assert_allclose(got, expected, rtol=4 * FLOAT32)
