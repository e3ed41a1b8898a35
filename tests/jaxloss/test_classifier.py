"""The classifier's loss in blocks of classes, on one device and with its classes on several."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxloss
from tests.jaxloss import harness
from tests.jaxloss.harness import QUICK, P, assert_close, compiled, enable_x64, magnitude
from tests.tolerances import FLOAT32

CLASSES = 12
OPTIONS = {
    "inner": {},
    "inner, scaled": {"margin": -0.3, "scale": 1.7, "label_smoothing": 0.2},
    "cosine": {"similarity": "cosine", "margin": 0.2, "scale": 6.0, "label_smoothing": 0.1},
}


def composition(
    features, labels, weights, bias, similarity="inner", margin=0.0, scale=1.0, label_smoothing=0.0
):
    """The same loss of logits `[n, C]`."""
    if similarity == "cosine":
        logits = jaxloss.cosine_logits(features, weights)
        logits = logits if bias is None else logits + bias[None, :]
    else:
        logits = jaxloss.linear_logits(features, weights, bias)
    target = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
    scaled = scale * (logits - margin * target)
    return jaxloss.softmax_loss(scaled, labels, label_smoothing=label_smoothing)


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
    got = run(jaxloss.classifier_loss, block_size=block_size)
    assert_close(got, expected, FLOAT32)
    assert not got[1][1][:, 4:].any()
    # As the target, such a class has an infinite loss.
    loss = jax.jit(partial(jaxloss.classifier_loss, reduction="none", block_size=block_size))
    losses = loss(features, labels.at[3].set(4), weights, bias)
    np.testing.assert_array_equal(np.isposinf(losses), np.arange(16) == 3)
    assert np.isfinite(np.delete(losses, 3)).all()


@cache
def results(name, dtype, block_size=None, loss=jaxloss.classifier_loss):
    """Value and gradients, those of traced hyperparameters too."""
    options = OPTIONS[name]
    similarity = {k: v for k, v in options.items() if k == "similarity"}
    static = similarity if block_size is None else similarity | {"block_size": block_size}
    with enable_x64(dtype == np.float64):
        features, labels, weights, bias = problem(options, dtype)
        numbers = {k: jnp.asarray(v, dtype) for k, v in options.items() if k != "similarity"}

        def value(leaves):
            (features, weights, bias), numbers = leaves
            return loss(features, labels, weights, bias, **static, **numbers)

        run = jax.jit(jax.value_and_grad(value))
        return jax.tree.map(np.asarray, run(((features, weights, bias), numbers)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [
        (np.float32, 5),
        (np.float64, 11),  # A class is left over.
        *(pytest.param(np.float64, size, marks=pytest.mark.long) for size in (1, 100)),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_equals_the_loss_of_the_logits(name, dtype, block_size):
    tolerance = 2 * FLOAT32 if dtype == np.float32 else 1e-13
    value, (grads, d_numbers) = results(name, dtype, block_size)
    expected, (expected_grads, expected_d_numbers) = results(name, dtype, loss=composition)
    assert_close((value, grads), (expected, expected_grads), tolerance)
    # Sums over all samples, whose terms nearly cancel.
    assert_close(d_numbers, expected_d_numbers, 5 * tolerance)


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


@pytest.mark.parametrize("block_size", [1, 2])
def test_a_single_class_is_certain(block_size):
    loss = partial(jaxloss.classifier_loss, block_size=block_size)
    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 2)))(
        jnp.ones((3, 2)), jnp.zeros(3, jnp.int32), jnp.ones((2, 1))
    )
    assert value == 0
    assert magnitude(grads) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "cosine" else pytest.mark.long) for n in OPTIONS]
)
def test_reverse_over_reverse(name):
    options = OPTIONS[name]
    with enable_x64(True):
        features, labels, weights, bias = problem(options, np.float64)
        leaves = (features, weights, bias)
        direction = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), leaves)

        def product(loss):
            def slope(leaves):
                grads = jax.grad(lambda x: loss(x[0], labels, *x[1:], **options))(leaves)
                terms = jax.tree.map(lambda g, v: jnp.sum(g * v), grads, direction)
                return sum(jax.tree.leaves(terms))

            return jax.jit(jax.grad(slope))(leaves)

        got = product(partial(jaxloss.classifier_loss, block_size=5))
        expected = product(composition)
        assert magnitude(expected) > 1e-3
        assert_close(got, expected, 1e-12)


def test_second_derivatives_of_a_confident_sample():
    """Relative to the other logits, the exponential of the target would overflow."""
    loss = partial(jaxloss.classifier_loss, labels=jnp.array([0]), weights=jnp.eye(2), block_size=1)
    gradient = jax.grad(loss)
    x = jnp.array([[200.0, 0.0]])
    product = jax.jit(jax.grad(lambda x: jnp.vdot(gradient(x), x)))(x)
    assert np.all(np.isfinite(product))


def test_forward_mode_takes_a_single_block():
    features, labels, weights, _ = problem({})

    def tangent(block_size):
        def loss(features):
            return jaxloss.classifier_loss(features, labels, weights, block_size=block_size)

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

    def temporaries(function):
        text, size = compiled(function, *specs)
        assert f"[{n},{classes}]" not in text
        return size

    bound = dim * classes  # A quarter of the weights in float32.
    assert temporaries(loss) < bound
    # On a CPU, the gradient of bfloat16 weights is collected in float32.
    collected = 4 * dim * classes if dtype == "bfloat16" else 0
    assert temporaries(jax.value_and_grad(loss, argnums=(0, 2))) < bound + collected


# Classes on several devices ----


mesh = partial(harness.mesh, names=("batch", "classes"))


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
    loss = partial(
        jaxloss.classifier_loss, block_size=block_size, class_axis_name="classes", **options
    )
    specs = (P(), P(), P(None, "classes"), P("classes"))
    spread = jax.shard_map(loss, mesh=mesh((1, 4)), in_specs=specs, out_specs=P())

    def run(loss, weights, bias):
        return jax.jit(jax.value_and_grad(loss, (0, 2)))(features, labels, weights, bias)

    value, (d_features, d_weights) = run(spread, weights, bias)
    expected = run(partial(composition, **options), weights[:, :5], bias[:5])
    assert_close((value, (d_features, d_weights[:, :5])), expected, tolerance)
    assert not d_weights[:, 5:].any()


INPUTS = 5


@cache
def sharded_problem(name, masked=True):
    """Parameters and a batch. A kernel makes the features, so that there is a shared parameter."""
    features, labels, weights, bias = problem(OPTIONS[name], np.float64)
    rng = np.random.default_rng(111)
    params = {
        "kernel": rng.normal(size=(INPUTS, features.shape[1])),
        "weights": np.asarray(weights),
        "bias": None if bias is None else np.asarray(bias),
    }
    batch = {"inputs": rng.normal(size=(len(labels), INPUTS)), "labels": np.array(labels)}
    if masked:
        batch["labels"][[2, 9]] = -1
        batch["where"] = np.arange(len(labels)) > 4
        batch["sample_weights"] = rng.uniform(0.2, 2.0, len(labels))
    return params, batch


def objective(params, batch, **options):
    batch = dict(batch)
    features = batch.pop("inputs") @ params["kernel"]
    labels, weights, bias = batch.pop("labels"), params["weights"], params["bias"]
    return jaxloss.classifier_loss(features, labels, weights, bias, **batch, **options)


@cache
def on_one_device(name, masked):
    with enable_x64(True):
        single = jax.jit(jax.value_and_grad(partial(objective, **OPTIONS[name])))
        return jax.tree.map(np.asarray, single(*sharded_problem(name, masked)))


SPECS = ({"kernel": P(), "weights": P(None, "classes"), "bias": P("classes")}, P("batch"))


def inside(loss, shard_map, checked=True):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = lax.pmean(grads, "batch")
        if not checked:  # The docstring says what the caller does with the gradients.
            shares = {k: grads.pop(k) for k in ("weights", "bias")}
            shares = jax.tree.map(lambda g: g / lax.axis_size("classes"), shares)
            grads = lax.pmean(grads, "classes") | shares
        return value, grads

    return shard_map(step, in_specs=SPECS, out_specs=(P(), SPECS[0]), check_vma=checked)


def outside(loss, shard_map, **options):
    return jax.value_and_grad(shard_map(loss, in_specs=SPECS, out_specs=P(), **options))


@pytest.mark.parametrize(
    ("name", "shape"), [("inner", (2, 2)), ("inner, scaled", (1, 4)), ("cosine", (2, 2))]
)
@pytest.mark.parametrize(
    ("way", "masked"),
    [
        pytest.param(inside, True, marks=pytest.mark.slow),
        pytest.param(inside, False, marks=pytest.mark.long),
        pytest.param(outside, True, marks=pytest.mark.long),
        pytest.param(partial(outside, check_vma=False), True, marks=pytest.mark.slow),
        pytest.param(partial(inside, checked=False), True, marks=pytest.mark.long),
    ],
    ids=["inside", "inside, no masks", "outside", "outside, unchecked", "inside, unchecked"],
)
def test_classes_on_devices_with_gradients(name, shape, way, masked):
    """Inside of `shard_map` and outside."""
    options, expected = {**OPTIONS[name], "block_size": 2}, on_one_device(name, masked)
    with enable_x64(True):
        params, batch = sharded_problem(name, masked)
        sharded = partial(objective, axis_name="batch", class_axis_name="classes", **options)
        function = way(sharded, partial(jax.shard_map, mesh=mesh(shape)))
        got = jax.jit(function, compiler_options=QUICK)(params, batch)
        assert magnitude(expected[1]["kernel"]) > 1e-2
        assert_close(got, expected, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_labels_are_indices_among_all_classes(dtype):
    """By `shard_map`, and by `pmap`, where each device has all rows and its columns."""
    features, labels, weights, bias = problem({})
    labels = labels.at[3].set(CLASSES).astype(dtype)
    loss = partial(
        jaxloss.classifier_loss, class_axis_name="classes", block_size=2, reduction="none"
    )
    specs = (P(), P(), P(None, "classes"), P("classes"))
    run = jax.jit(jax.shard_map(loss, mesh=mesh((1, 4)), in_specs=specs, out_specs=P()))
    pmapped = jax.pmap(loss, "classes", in_axes=(None, None, 1, 0))
    columns = weights.reshape(len(weights), 4, -1), bias.reshape(4, -1)
    logits = jaxloss.linear_logits(features, weights, bias)
    expected = jaxloss.softmax_loss(logits, labels.astype(np.int32), reduction="none")
    assert np.isnan(expected[3])
    for got in (run(features, labels, weights, bias), *pmapped(features, labels, *columns)):
        np.testing.assert_allclose(got, expected, rtol=4 * FLOAT32)
