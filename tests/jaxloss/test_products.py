"""Products as accelerators compute them, whose programs run on a CPU, too."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.core import products
from tests.jaxloss.harness import (
    QUICK,
    Batch,
    assert_close,
    cast,
    enable_x64,
    evaluate,
    magnitude,
    make_batch,
    merge,
    numbers_of,
    over,
    rounded,
    widen,
)
from tests.jaxloss.loss_table import LOSSES, TILES_OF_A_KIND, VARIANTS
from tests.tolerances import FLOAT32, rounded_to

BFLOAT16, FLOAT16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
LOW = (BFLOAT16, FLOAT16)
IN_TILES = {
    *("nca_references_in_tiles", "triplet_references_in_tiles", "prototypical_in_tiles"),
    *("multi_similarity_mined_in_tiles", "classifier_sub_centres_in_blocks"),
}
TILED = (*TILES_OF_A_KIND, *(row for row in VARIANTS if row.name in IN_TILES))


@pytest.fixture(params=["tpu", "gpu"])
def platform(request, monkeypatch) -> str:
    """Programs are traced as on an accelerator."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    return request.param


def numbers(seed: int, shape: tuple[int, int], low: Any = None, mean: float = 0.0) -> np.ndarray:
    made = np.random.default_rng(seed).normal(mean, 1, shape).astype(np.float32)
    return made if low is None else np.asarray(jnp.asarray(made, low).astype(jnp.float32))


# One product ----


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("sides", ["both", "first", "second"])
def test_values_and_gradients_of_a_product(platform, dtype, sides):
    low = (dtype if sides != "second" else None, dtype if sides != "first" else None)
    arrays = numbers(0, (40, 70), low[0]), numbers(1, (70, 30), low[1])
    cotangent, product = numbers(2, (40, 30)), partial(products.product, low=low)
    got, back = jax.vjp(product, *map(jnp.asarray, arrays))
    slopes = back(jnp.asarray(cotangent))
    _, tangent = jax.jvp(product, arrays, slopes)
    (a, b), cotangent, (d_a, d_b) = widen((arrays, cotangent, slopes))
    assert_close(widen(got), a @ b, FLOAT32)
    # A cotangent has 16 bits.
    assert_close((d_a, d_b), (cotangent @ b.T, a.T @ cotangent), 2.0**-15)
    assert_close(widen(tangent), d_a @ b + a @ d_b, 2.0**-15)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e-30, 1e20])
def test_a_product_of_parts(platform, dtype, parts, size):
    wide = numbers(3, (20, 50)) * np.float32(size)
    rows = numbers(4, (50, 10), dtype, mean=10.0)
    if parts == 2:
        wide = np.asarray(products.rounded(jnp.asarray(wide), dtype))
    got = jax.jit(partial(products.times, parts=parts))(wide, jnp.asarray(rows, dtype))
    expected = wide.astype(np.float64) @ rows.astype(np.float64)
    assert_close(widen(got) / size, expected / size, FLOAT32)


def test_rounded_cotangents_are_what_is_multiplied(platform):
    """So that the sums of their rows cancel a large mean of the other factor."""
    cotangent = products.rounded(jnp.asarray(numbers(5, (20, 60))), BFLOAT16)
    ones = jnp.full((60, 8), 256, jnp.bfloat16)
    found = jax.jit(products.times)(cotangent, ones)
    sums = jnp.sum(cotangent, axis=1, keepdims=True)
    np.testing.assert_allclose(found / 256, jnp.broadcast_to(sums, (20, 8)), atol=1e-5)


def for_tpu(run: Any, *arrays: Any) -> str:
    return jax.jit(run).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()


def test_the_switch_of_jax_is_followed_for_float32():
    def precision() -> list[tuple[str, str]]:
        text = for_tpu(lambda a, b: products.product(a, b), jnp.ones((8, 4)), jnp.ones((4, 8)))
        return re.findall(r"precision = \[(\w+), (\w+)\]", text)

    assert precision() == [("HIGHEST", "HIGHEST")]
    with jax.default_matmul_precision("high"):
        assert precision() == [("HIGH", "HIGH")]
    with jax.default_matmul_precision("bfloat16"):
        assert precision() != [("HIGHEST", "HIGHEST")]

    def both(x):  # A backward pass is traced later, outside of the `with`.
        with jax.default_matmul_precision("high"):
            return jaxloss.nca_loss(x, CLASSES_OF_FOUR) + jaxloss.info_nce_loss(x, 2 * x)

    text = for_tpu(jax.grad(jax.jit(both)), jnp.ones((16, 4)))
    assert set(re.findall(r"precision = \[(\w+), (\w+)\]", text)) == {("HIGH", "HIGH")}


def test_pairs_of_projected_low_precision_rows_take_three_passes_on_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    rows, weights = (jax.ShapeDtypeStruct(of, BFLOAT16) for of in ((N, DIM), (DIM, 40)))
    for sum_loss in (jaxloss.direct_sum_loss, partial(jaxloss.spectral_sum_loss, power=0.5)):
        loss = jax.value_and_grad(lambda x, w, of=sum_loss: of(x, LABELS % 40, w), (0, 1))
        found = re.findall(PRODUCT, for_tpu(loss, rows, weights))
        of_pairs = [set(precision) for *precision, _, _, shape in found if shape == f"{N}x{N}"]
        assert of_pairs == [{"HIGH"}]


def test_wide_products_stay():
    """Of all numbers on a CPU, and of float64 elsewhere."""
    low = jnp.ones((2, 2), jnp.bfloat16)
    assert products.low_dtypes(low) == (None,)
    with pytest.MonkeyPatch.context() as patch, enable_x64(True):
        patch.setattr(jax, "default_backend", lambda: "tpu")
        assert products.low_dtypes(low) == (low.dtype,)
        assert products.low_dtypes(low, jnp.ones((2, 2), jnp.float64)) == (None, None)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_no_rows_and_cotangents_near_zero(platform, dtype):
    rows = jnp.ones((3, 2), dtype)
    for wide in (jnp.zeros((0, 3)), jnp.full((2, 3), 1e-36, jnp.float32)):
        got = products.times(wide, rows)
        assert got.shape == (len(wide), 2)
        np.testing.assert_allclose(got, 3 * wide[:, :2], atol=1e-37)


def test_two_low_dtypes(platform):
    a = jnp.asarray(numbers(6, (5, 40)), BFLOAT16)
    b = jnp.asarray(numbers(7, (3, 40)), FLOAT16)
    for rows, others in ((a, b), (b, a)):
        got = products.row_products(rows, others)
        assert_close(widen(got), widen(rows) @ widen(others).T, FLOAT32)


# Losses ----


COMPARED = tuple(row for row in LOSSES + TILED if not row.takes_logits)
OFTEN = {
    *("nca", "prototypical", "classifier", "nca_in_tiles"),
    *("supervised_contrastive", "classifier_angles_in_blocks"),  # Cosines.
}


def ways_and_rows() -> Iterator[Any]:
    """Some losses on both platforms; in `make long`, all in one of four ways."""
    often = [("tpu", BFLOAT16, "spread"), ("gpu", BFLOAT16, "spread")]
    ways = [("tpu", BFLOAT16, "clustered"), ("gpu", FLOAT16, "spread")]
    ways += [("gpu", BFLOAT16, "clustered"), ("tpu", FLOAT16, "clustered")]
    for number, row in enumerate(COMPARED):
        for way in [*(often if row.name in OFTEN else []), ways[number % len(ways)]]:
            name = "-".join([row.name, *map(str, way)])
            yield pytest.param(row, *way, id=name, marks=[] if way in often else pytest.mark.long)


USED_TWICE = ("sum", "references", "info_nce", "sigmoid_contrastive", "of_one_batch")
"""In names of losses of which an array is two arguments, or the argument of two losses."""


def low_batch(row: Any, dtype: Any, clustered: bool = False, masked: bool = True) -> Batch:
    batch = make_batch(row, seed=12, masked=masked)
    if clustered:
        batch = batch.with_arg(0, slice(None), 10 + 0.1 * batch.args[0])
    return batch._replace(args=rounded(batch.args, row.differentiable, dtype))


def results(row: Any, batch: Batch, dtype: Any) -> tuple[Any, Any]:
    """The mean and its gradients, of a program that is traced anew."""

    def mean(values, args):
        merged = merge(args, row.differentiable, values)
        return row.function(*merged, where=batch.where, **row.kwargs)

    args = cast(batch.args, row.differentiable, dtype)
    values = tuple(args[k] for k in row.differentiable)
    return jax.jit(jax.value_and_grad(mean), compiler_options=QUICK)(values, args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "platform", "dtype", "rows"), ways_and_rows(), indirect=["platform"]
)
def test_losses_equal_those_of_float64(row, dtype, rows, platform):
    batch = low_batch(row, dtype, clustered=rows == "clustered")
    padding = ~batch.where
    poison = np.resize([np.nan, np.inf], (padding.sum(), 1))
    value, gradients = results(row, batch.with_arg(0, padding, poison), dtype)
    assert value.dtype == jnp.float32
    weighted = batch._replace(sample_weights=np.ones_like(batch.sample_weights))
    expected = evaluate(row, weighted, np.float64)
    wide = expected if rows == "spread" else widen(evaluate(row, weighted, np.float32))
    # What float32 arithmetic of the same numbers is off.
    off = 2 * magnitude(wide["mean"] - expected["mean"])
    np.testing.assert_allclose(value, expected["mean"], rtol=5e-6, atol=5e-6 + off)
    every = zip(gradients, expected["mean_grad"][:-1], wide["mean_grad"][:-1], strict=True)
    for ours, theirs, by_float32 in every:
        assert ours.dtype == dtype
        off = 2 * magnitude(by_float32 - theirs) + float(jnp.finfo(dtype).smallest_subnormal)
        error = np.abs(widen(ours) - theirs) - 2.0**-14 * magnitude(theirs) - off
        # Of rows that are used twice, each gradient is rounded before they are added.
        twice = any(word in row.name for word in USED_TWICE)
        size = magnitude(theirs) if twice else np.abs(theirs)
        assert np.all(error <= rounded_to(dtype) * size)


@pytest.mark.slow
@over(
    tuple(row for row in LOSSES if numbers_of(row) and row in COMPARED),
    often=tuple(row for row in LOSSES if row.name == "prototypical"),
)
def test_gradients_of_hyperparameters(row, platform):
    """That of a temperature which comes in after the products is written by hand."""
    batch = low_batch(row, BFLOAT16)
    # Not 1, where a factor that is missing would not show.
    numbers = {name: 1.25 * number for name, number in numbers_of(row).items()}

    def gradients(dtype, wide):
        args = cast(batch.args, row.differentiable, dtype)

        def mean(numbers):
            return row.function(*args, where=batch.where, **{**row.kwargs, **numbers})

        given = {name: number.astype(wide) for name, number in numbers.items()}
        return widen(jax.jit(jax.grad(mean), compiler_options=QUICK)(given))

    got = gradients(BFLOAT16, np.float32)
    with enable_x64(True):
        expected = gradients(np.float64, np.float64)
    chex.assert_trees_all_close(got, expected, rtol=64 * FLOAT32, atol=64 * FLOAT32)


@pytest.mark.long
@over([row for row in TILED if row.name in ("nca_in_tiles", "classifier_angles_in_blocks")])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_second_derivatives(row, dtype, platform):
    """A product of the Hessian, by forward mode of the gradient."""
    batch = low_batch(row, dtype, masked=False)

    def product(of):
        args = cast(batch.args, row.differentiable, of)

        def mean(features):
            return row.function(features, *args[1:], **row.kwargs)

        direction = jnp.cos(jnp.arange(args[0].size)).reshape(args[0].shape).astype(dtype)
        run = jax.jit(lambda x, v: jax.jvp(jax.grad(mean), (x,), (v,)), compiler_options=QUICK)
        return widen(run(args[0], direction.astype(of))[1])

    got = product(dtype)
    with enable_x64(True):
        expected = product(np.float64)
    assert_close(got, expected, rounded_to(dtype))


OF_ANY_LENGTH = {
    "contrastive": lambda x, z: jaxloss.supervised_contrastive_loss(x, CLASSES_OF_FOUR),
    "multi_similarity": lambda x, z: jaxloss.multi_similarity_loss(x, CLASSES_OF_FOUR),
    "triplets": lambda x, z: jaxloss.triplet_loss(x, CLASSES_OF_FOUR, mining="hard"),
    "logits": lambda x, z: jnp.mean(jnp.sin(jaxloss.cosine_logits(x, z.T))),
    "towers": lambda x, z: jaxloss.info_nce_loss(x, z, block_size=7),
    "classifier": lambda x, z: jaxloss.classifier_loss(
        x, CLASSES_OF_FOUR, z.T, similarity="cosine", scale=16.0, block_size=7
    ),
}
CLASSES_OF_FOUR: Any = np.arange(16) // 4


@pytest.mark.parametrize("name", OF_ANY_LENGTH)
def test_cosines_do_not_depend_on_the_lengths_of_rows(name, platform):
    """Of bfloat16 rows whose squares over- or underflow, or some of one, beside usual ones."""
    x, z = (jnp.asarray(numbers(seed, (16, 6)), jnp.bfloat16) for seed in (20, 21))
    exponents = np.resize([0, -100, 0, 90, 3, -62, 0], 16)
    powers = jnp.asarray(2.0 ** exponents[:, None], jnp.bfloat16)
    run = jax.jit(jax.value_and_grad(OF_ANY_LENGTH[name], argnums=(0, 1)), compiler_options=QUICK)
    value, gradients = widen(run(x, z))
    of_scaled, scaled = widen(run(x * powers, z * powers))
    assert_close(of_scaled, value, FLOAT32)
    for ours, theirs in zip(scaled, gradients, strict=True):
        assert_close(ours * widen(powers), theirs, 2.0**-7)


@pytest.mark.parametrize("rows", ["random", "equal", "opposite"])
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_logits_of_cosines_are_relative_to_those_of_some_classes(platform, rows, scale):
    """If the scale is known, as relative to their maximum: two derivatives, and a small weight."""
    x, w = numbers(22, (10, 6)), numbers(23, (6, 200))
    if rows != "random":
        x, w = 10 + x / 10, 10 + w / 10
    if rows == "opposite":
        w[:, 3:] *= -1
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    options: Any = {"similarity": "cosine", "block_size": 64, "angular_margin": 0.5}

    def loss(x, scale):
        return 1e-4 * jaxloss.classifier_loss(x, jnp.arange(10) * 5, w, scale=scale, **options)

    def run(x, scale):
        along = jax.jvp(lambda x: jax.grad(loss)(x, scale), (x,), (jnp.cos(x),))[1]
        return jax.value_and_grad(loss)(x, scale), along

    known = jax.jit(lambda x: run(x, scale), compiler_options=QUICK)(x)
    traced = jax.jit(run, compiler_options=QUICK)(x, scale)
    assert magnitude(widen(traced)[1]) > 0
    assert_close(widen(known)[0][0], widen(traced)[0][0], scale * FLOAT32)
    assert_close(widen(known), widen(traced), 2.0**-7)


def test_a_logit_far_above_those_of_some_classes(platform):
    """Relative to these, its exponential overflows: a second visit has the maximum of all."""
    x, w = jnp.asarray(numbers(22, (10, 6)), BFLOAT16), jnp.asarray(numbers(23, (6, 200)), BFLOAT16)
    labels, w = jnp.arange(10) * 5, w.at[:, 150].multiply(256)

    def results(x, w):
        loss = partial(jaxloss.classifier_loss, labels=labels, block_size=64)
        slope = jax.value_and_grad(lambda x, w: loss(x, weights=w), (0, 1))
        curved = jax.grad(lambda x: jnp.sum(jnp.sin(slope(x, w)[1][0].astype(jnp.float32))))
        value, gradients = jax.jit(slope)(x, w)
        return value, gradients, jax.jit(curved)(x)

    (value, gradients, curved), wide = results(x, w), [np.asarray(a, np.float64) for a in (x, w)]
    with enable_x64(True):
        expected = widen(results(*map(jnp.asarray, wide)))
    np.testing.assert_allclose(value, expected[0], rtol=4 * FLOAT32)
    assert_close(widen(gradients), expected[1], rounded_to(BFLOAT16))
    assert_close(widen(curved), expected[2], 2.0**-4)  # Of a gradient that is rounded before.


@over([row for row in TILED if row.name in ("nca_in_tiles", "classifier_angles_in_blocks")])
def test_one_pass_in_gradients_if_the_switch_of_jax_says_so(row, platform):
    """A cotangent is then one number of 8 bits, also where the switch is set for the loss alone."""
    args = cast(low_batch(row, BFLOAT16).args, row.differentiable, BFLOAT16)

    def passes(setting):
        def loss(x):
            with jax.default_matmul_precision(setting):
                return row.function(x, *args[1:], **row.kwargs)

        text = for_tpu(jax.grad(loss), args[0])
        return len(re.findall(r"dot_general", text)) + len(re.findall(r"\bHIGH\b", text))

    assert passes("bfloat16") < passes(None)


def test_padding_does_not_leak_into_proxies(platform):
    x, proxies = (jnp.asarray(numbers(seed, (6, 6)), BFLOAT16) for seed in (24, 25))
    labels = jnp.array([0, 1, 2, 0, 1, -1])
    run = jax.jit(jax.grad(lambda p, x: jaxloss.proxy_nca_loss(x, labels, p)))
    got, expected = run(proxies, x.at[5].set(jnp.nan)), run(proxies, x)
    np.testing.assert_array_equal(widen(got), widen(expected))


def test_hard_triplets_of_a_zero_row(platform):
    """It is at distance 1 from every unit vector, and its cosines are 0."""
    x = jnp.asarray(numbers(0, (9, 4)), BFLOAT16).at[4].set(0)
    loss = jax.value_and_grad(lambda x: jaxloss.triplet_loss(x, jnp.arange(9) // 3, margin=2.0))
    value, gradient = jax.jit(loss)(x)
    with enable_x64(True):
        expected = jax.jit(loss)(jnp.asarray(np.asarray(x, np.float64)))
    np.testing.assert_allclose(value, expected[0], rtol=4 * FLOAT32)
    assert_close(widen(gradient), widen(expected[1]), rounded_to(BFLOAT16))


N, DIM, CLASSES = 768, 512, 640
LABELS: Any = np.arange(N, dtype=np.int32) // 3
OF_ROWS: dict[str, Callable[..., Any]] = {
    "nca": jaxloss.nca_loss,
    "supcon": jaxloss.supervised_contrastive_loss,
    "multi-similarity": jaxloss.multi_similarity_loss,
    "circle": jaxloss.circle_loss,
    "triplets": jaxloss.triplet_loss,
    "triplets of distances": partial(jaxloss.triplet_loss, normalize=False),
    "prototypical": jaxloss.prototypical_loss,
}
OF_WEIGHTS: dict[str, Callable[..., Any]] = {
    "proxy-nca": jaxloss.proxy_nca_loss,
    "proxy-anchor": jaxloss.proxy_anchor_loss,
    "classifier": partial(jaxloss.classifier_loss, block_size=320),
    "arcface": partial(
        jaxloss.classifier_loss, similarity="cosine", scale=16.0, block_size=320, angular_margin=0.3
    ),
    "group-softmax": partial(jaxloss.group_softmax_loss, num_groups=2),
    "linear-logits": lambda x, _, w: jnp.sum(jnp.sin(jaxloss.linear_logits(x, w))),
    "cosine-logits": lambda x, _, w: jnp.sum(jnp.sin(jaxloss.cosine_logits(x, w))),
}
OF_TOWERS = {"info-nce": jaxloss.info_nce_loss, "siglip": jaxloss.sigmoid_contrastive_loss}
PRODUCT = (
    r"dot_general.*?precision = \[(\w+), (\w+)\]\s*: "
    r"\(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\) -> tensor<([\dx]*)x\w+>"
)


@pytest.mark.parametrize("name", [*OF_ROWS, *OF_WEIGHTS, *OF_TOWERS])
@pytest.mark.parametrize(
    "dtype", [BFLOAT16, pytest.param(FLOAT16, marks=pytest.mark.long)], ids=str
)
def test_no_large_product_is_of_float32_numbers_on_a_tpu(name, dtype, monkeypatch):
    """As lowered: two float32 arrays take six passes, two low ones one."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    rows, weights = (jax.ShapeDtypeStruct(of, dtype) for of in ((N, DIM), (DIM, CLASSES)))
    if name in OF_ROWS:
        function, arrays = lambda x: OF_ROWS[name](x, LABELS), (rows,)
    elif name in OF_WEIGHTS:
        function, arrays = lambda x, w: OF_WEIGHTS[name](x, LABELS % CLASSES, w), (rows, weights)
    else:
        function, arrays = OF_TOWERS[name], (rows, rows)
    found = re.findall(PRODUCT, for_tpu(jax.value_and_grad(function, range(len(arrays))), *arrays))
    assert found
    for *precision, first, second, shape in found:
        if np.prod([int(size) for size in shape.split("x")]) > 2**18:
            assert {first, second} != {"f32"}, (precision, shape)
            assert "HIGHEST" not in precision
