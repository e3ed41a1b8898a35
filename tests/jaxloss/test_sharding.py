"""Global arrays on meshes: any dimension may be sharded, and devices divide the work.

`test_devices.py` compares every loss on meshes with a single device.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Float, Integer

import jaxloss
from tests.jaxloss.harness import P, mesh, raises
from tests.tolerances import FLOAT32

N, DIM, CLASSES, QUEUE = 12, 8, 6, 7
rng = np.random.default_rng(5)


def normal(*shape: int) -> Array:
    return jnp.asarray(rng.normal(size=shape), np.float32)


X, W, B = normal(N, DIM), normal(DIM, CLASSES), normal(CLASSES)
Z, Q = normal(N, CLASSES), normal(QUEUE, DIM)
Y, L = (jnp.asarray(rng.integers(0, CLASSES, n), np.int32) for n in (N, QUEUE))
nca = partial(jaxloss.nca_loss, temperature=4.0)
# The tests compile functions that are looked up later.
softmax_loss, info_nce_loss = jaxloss.softmax_loss, jaxloss.info_nce_loss
direct_sum_loss, proxy_nca_loss = jaxloss.direct_sum_loss, jaxloss.proxy_nca_loss


def on_rows(*arrays: Array) -> Any:
    """Their rows over an Explicit mesh."""
    return jax.device_put(arrays, NamedSharding(mesh(kind=AxisType.Explicit), P("batch")))


def with_queue(x, y, q, labels):
    return nca(x, y, references=q, reference_labels=labels)


def direct_sum_with_queue(x, y, w, q, labels):
    metric = partial(jaxloss.nca_loss, references=q, reference_labels=labels)
    return jaxloss.direct_sum_loss(x, y, w, metric_loss=metric)


def of_groups(x, y, w):
    groups = jaxloss.discriminative_groups(x, y, w, 4)
    return jaxloss.group_softmax_loss(x, y, w, num_groups=4, groups=groups)


ON_A, ON_B, ON_AB, WHOLE = P("a"), P("b"), P("a", "b"), P()
softmax_terms = partial(softmax_loss, reduction="none")
Case = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
OFTEN: dict[str, Case] = {
    "logits over classes": (softmax_loss, (Z, Y), (P("a", "b"), ON_A)),
    "leading axes": (softmax_terms, (Z.reshape(2, 6, -1), Y.reshape(2, 6)), (ON_AB, ON_AB)),
    "leading axes without the first": (
        softmax_loss,
        (Z.reshape(2, 6, -1), jax.nn.softmax(2 * Z).reshape(2, 6, -1)),
        (P(None, "b", "a"), P("a")),
    ),
    "replicated references": (with_queue, (X, Y, Q, L), (ON_A, ON_A, WHOLE, WHOLE)),
    "classes beside rows over all axes": (
        jaxloss.classifier_loss,
        (X, Y, W, B),
        (P(("a", "b")), P(("a", "b")), P(None, "b"), ON_B),
    ),
    "a queue in the metric loss": (
        direct_sum_with_queue,
        (X, Y, W, Q, L),
        (ON_A, ON_A, WHOLE, WHOLE, WHOLE),
    ),
    "projection": (jaxloss.project_complement, (X, W), (ON_A, WHOLE)),
    "logits of sharded features": (jaxloss.linear_logits, (X, W), (P("a", "b"), ON_B)),
    "assignment": (jaxloss.assign_prototypes, (W, W[:, ::-1]), (ON_A, ON_B)),
}
SELDOM: dict[str, Case] = {
    "features over an axis": (nca, (X, Y), (P("a", "b"), ON_A)),
    "labels over another axis": (nca, (X, Y), (ON_A, ON_B)),
    "replicated features": (nca, (X, Y), (WHOLE, ON_B)),
    "labels on one device": (nca, (X, Y), (ON_A, None)),
    "references elsewhere": (with_queue, (X, Y, Q[:6], L[:6]), (ON_A, ON_A, ON_B, ON_B)),
    "references alone": (with_queue, (X, Y, Q[:6], L[:6]), (WHOLE, WHOLE, ON_B, ON_B)),
    "classes": (jaxloss.classifier_loss, (X, Y, W), (ON_A, ON_A, P(None, "a"))),
    "sharded weights": (direct_sum_loss, (X, Y, W), (ON_A, ON_A, ON_A)),
    "groups": (of_groups, (X, Y, W), (ON_A, ON_A, WHOLE)),
    "overlap": (partial(jaxloss.spectral_overlap, power=0.3), (W,), (ON_A,)),
    "class means": (jaxloss.update_class_means, (W, X, Y), (WHOLE, ON_A, ON_A)),
    "separation": (jaxloss.prototype_separation, (W,), (P(None, "a"),)),
    "lengths": (partial(jaxloss.class_balanced_lengths, num_classes=CLASSES), (Y,), (ON_A,)),
    "discriminability": (jaxloss.discriminability, (X, Y), (ON_A, ON_A)),
    "many batches": (
        jax.vmap(nca),
        (jnp.stack([X, X[::-1]]), jnp.stack([Y, Y[::-1]])),
        (P(None, "a"), P(None, "a")),
    ),
}
"""Like another case in most arrays; left to `make long`."""


def results_of(function: Any, *arrays: Any) -> Any:
    """The value, and the gradients by all float arrays of a sum of it."""

    def total(*arrays):
        value = function(*arrays)
        floats = [x for x in jax.tree.leaves(value) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(jnp.sin(x)) for x in floats), jnp.zeros(())), value

    floats = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))
    if not floats:
        return function(*arrays)
    return jax.grad(total, floats, has_aux=True)(*arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*OFTEN, *(pytest.param(c, marks=pytest.mark.long) for c in SELDOM)]
)
def test_any_dimension_may_be_sharded(case):
    function, arrays, specs = (OFTEN | SELDOM)[case]
    devices = mesh((2, 2), ("a", "b"), AxisType.Explicit)
    placed = [
        x if spec is None else jax.device_put(x, NamedSharding(devices, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    expected = jax.jit(partial(results_of, function))(*arrays)
    got = jax.jit(partial(results_of, function))(*placed)

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=8 * FLOAT32, atol=8 * FLOAT32)

    jax.tree.map(close, got, expected)
    floats = [x for x in placed if jnp.issubdtype(x.dtype, jnp.floating)]
    for gradient, argument in zip(got[0] if floats else (), floats, strict=True):
        assert gradient.sharding.is_equivalent_to(argument.sharding, argument.ndim)


@pytest.mark.long
def test_outside_of_jit_and_in_the_context_of_a_mesh():
    x, y = on_rows(X, Y)
    devices, rows = x.sharding.mesh, x.sharding
    assert float(nca(x, y)) == pytest.approx(float(jax.jit(nca)(X, Y)), rel=4 * FLOAT32)
    losses = nca(x, y, reduction="none")
    assert losses.sharding.is_equivalent_to(rows, 1)
    # Of copies, and of gradients, JAX compiles one operation after the other.
    loss = softmax_loss
    expected = float(loss(X, Y))
    copies = jax.device_put((X, Y), NamedSharding(devices, P()))
    assert float(loss(*copies)) == pytest.approx(expected, rel=4 * FLOAT32)
    with jax.set_mesh(devices):
        value, gradient = jax.value_and_grad(loss)(x, y)
    assert float(value) == pytest.approx(expected, rel=4 * FLOAT32)
    assert gradient.sharding.is_equivalent_to(rows, 2)


def test_an_option_of_the_call_replaces_that_of_a_partial():
    divided = jaxloss.sharded_loss(nca, mesh(), "batch")
    expected = jax.jit(partial(nca, temperature=1.5))(X, Y)
    np.testing.assert_allclose(divided(X, Y, temperature=1.5), expected, rtol=4 * FLOAT32)


@pytest.mark.parametrize("way", ["Explicit", pytest.param("sharded_loss", marks=pytest.mark.slow)])
def test_devices_divide_the_pairs(way):
    devices = mesh(kind=AxisType.Explicit if way == "Explicit" else AxisType.Auto)
    loss = nca if way == "Explicit" else jaxloss.sharded_loss(nca, devices, "batch")
    local = np.random.default_rng(0)
    x = local.normal(size=(4096, 16)).astype(np.float32)
    y = local.integers(0, 64, 4096).astype(np.int32)
    run = jax.jit(jax.value_and_grad(loss))
    placed = jax.device_put((x, y), NamedSharding(devices, P("batch")))
    text = str(run.lower(*placed).compile().as_text())
    # A loop over the tiles of a device for the value, and one for the gradient: a row of the 16
    # tiles of 1,024 rows each.
    assert re.findall(r'known_trip_count":{"n":"(\d+)"', text) == ["4", "4"]
    computations = {m[1]: m[2] for m in re.finditer(r"(?ms)^%(\S+) \([^\n]*{\n(.*?)^}", text)}
    bodies = re.findall(r"body=%([\w.-]+)", text)
    assert len(bodies) == 2
    assert not any("all-gather" in computations[name] for name in bodies)


def test_errors_are_those_of_the_whole_batch():
    x, y, w, fewer, narrow = on_rows(X, Y, W, Y[:8], X[:, :6])
    with raises(ValueError, r"`labels` and `features` must have the same number of rows.*\(8,\)"):
        nca(x, fewer)
    with raises(TypeError, r"`labels` must have an integer dtype, got float32"):
        jaxloss.nca_loss(x, y.astype(jnp.float32))
    with raises(ValueError, r"with d = 6 to match `features` \(12, 6\), got \(8, 6\)"):
        jaxloss.classifier_loss(narrow, y, w)
    with raises(ValueError, r"`reference_labels` and `references` .* \(6,\) and \(7, 8\)"):
        with_queue(x, y, Q, L[:6])
    with raises(TypeError, "labels"):
        jaxloss.nca_loss(x)  # pyright: ignore[reportCallIssue]
    text: Any = np.array(["a"] * N)
    with raises(TypeError, "`labels` must have a dtype that JAX has, got <U1"):
        nca(x, text)
    spread = jaxloss.sharded_loss(nca, mesh(), "batch")
    with raises(ValueError, r"`features` has 11 rows, .* 4 devices of 'batch'; fill them up"):
        spread(X[:11], Y[:11])
    with raises(ValueError, r"`axis_name` must be among the axes of the mesh"):
        jaxloss.sharded_loss(nca, mesh(), "model")
    over_classes = jaxloss.sharded_loss(
        jaxloss.classifier_loss, mesh((2, 2), ("batch", "c")), "batch"
    )
    with raises(ValueError, r"`class_axis_name` must be among the axes of the mesh"):
        over_classes(X, Y, w, class_axis_name="model")
    with raises(ValueError, r"`weights` has 5 classes, .* 2 devices of 'c'; add classes with"):
        over_classes(X, Y % 5, w[:, :5], class_axis_name="c")


def test_integers_that_do_not_fit_are_named():
    """Before they are placed on the devices, where JAX would cut them off."""
    (x,) = on_rows(X)
    wide: Any = np.arange(N) << 32
    further: Any = np.arange(QUEUE) << 32
    spread = jaxloss.sharded_loss(nca, mesh(), "batch")
    metric = partial(nca, references=Q, reference_labels=further)
    direct_sum = partial(direct_sum_loss, x, Y, W, metric_loss=metric)
    for name, call in (
        ("labels", lambda: nca(x, wide)),
        ("reference_labels", lambda: with_queue(x, Y, Q, further)),
        ("reference_labels", direct_sum),
        ("ids", lambda: info_nce_loss(x, x, ids=wide)),
        ("labels", lambda: spread(X, wide)),
    ):
        with raises(OverflowError, f"`{name}` must have integers that fit into int32"):
            call()


@pytest.mark.long
def test_references_that_fill_up_devices_do_not_count():
    """Whatever their label would be: -1 is a class of unsigned labels."""
    x, y = on_rows(X, Y)
    labels, expected = L.astype(jnp.uint8), with_queue(X, Y, Q, L)
    spread = jaxloss.sharded_loss(nca, mesh(), "batch")
    got = jax.jit(with_queue)(x, y, Q, labels)
    by_loss = jax.jit(spread)(X, Y, references=Q, reference_labels=labels)
    np.testing.assert_allclose([got, by_loss], [expected] * 2, rtol=4 * FLOAT32)


@pytest.mark.long
def test_a_second_call_outside_of_jit_compiles_nothing():
    x, y = on_rows(X, Y)
    expected = nca(x, y)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    np.testing.assert_allclose(nca(x, y), expected)
    assert not compiled


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_loss_takes_arrays_of_any_sharding(kind):
    devices = mesh(kind=kind)
    spread = jaxloss.sharded_loss(nca, devices, "batch")
    rows = NamedSharding(devices, P("batch"))
    expected = nca(X, Y)
    for x, y in ((X, Y), (np.asarray(X), np.asarray(Y)), jax.device_put((X, Y), rows)):
        np.testing.assert_allclose(spread(x, y), expected, rtol=4 * FLOAT32)  # pyright: ignore
        np.testing.assert_allclose(jax.jit(spread)(x, y), expected, rtol=4 * FLOAT32)  # pyright: ignore


def test_options_of_the_programs_outside_of_jit():
    """1, 1.0 and True are equal, but of other programs. A set has none, as it is not hashable."""

    def typed(logits: Float[Array, "n C"], labels: Integer[Array, " n"], *, option, axis_name=None):
        loss = softmax_loss(logits, labels, axis_name=axis_name)
        return 0 * loss + {bool: 1, int: 2, float: 3, set: 4}[type(option)]

    spread = jaxloss.sharded_loss(typed, mesh(), "batch")
    options: Any = (True, 1, 1.0, {1}, True)
    assert [float(spread(Z, Y, option=option)) for option in options] == [1, 2, 3, 4, 1]
    x, y = on_rows(X, Y)
    for arrays in ((x, y, W), (X, Y, W)):
        proxy_nca_loss(*arrays, normalize=True)
        with raises(TypeError, "`normalize` must be a Python bool, got 1"):
            proxy_nca_loss(*arrays, normalize=1)  # pyright: ignore[reportArgumentType]
