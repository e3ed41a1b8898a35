"""Convolutions against XLA's: values, gradients, devices, and what other platforms compile."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from experiments.models import convolution
from experiments.models.convolution import Conv, convolve
from experiments.models.layers import LayerOptions, conv

SHAPES = [
    (3, 5, 7, 2, 4, 3),  # n, h, w, c, o, size
    (3, 5, 7, 1, 4, 3),
    (6, 4, 4, 6, 5, 3),
    (5, 3, 2, 4, 8, 1),
    (4, 6, 5, 4, 3, 5),
]


def by_xla(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def random(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(shape):
    n, h, w, c, o, size = shape
    return random((n, h, w, c)), random((size, size, c, o), 1), random((n, h, w, o), 2)


def values_and_gradients(function, x, kernel, weights):
    y, pull = jax.vjp(function, x, kernel)
    return y, pull(weights)


@pytest.mark.parametrize(
    ("shape", "rows"), [*((shape, 50) for shape in SHAPES), (SHAPES[0], 1), (SHAPES[4], 10_000)]
)
def test_values_and_gradients_are_those_of_xla(monkeypatch, shape, rows):
    monkeypatch.setattr(convolution, "_ROWS", rows)
    jax.clear_caches()
    arrays = inputs(shape)
    found = jax.jit(partial(values_and_gradients, convolve))(*arrays)
    expected = jax.jit(partial(values_and_gradients, by_xla))(*arrays)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal_dtypes(found, expected)


def test_over_devices_the_batch_is_one():
    x, kernel, weights = inputs((8, 4, 4, 6, 5, 3))
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, copied = jax.P("batch"), jax.P()

    def loss(kernel, x, weights, axis_name=None):
        total = jnp.sum(jnp.sin(convolve(x, kernel)) * weights)
        return total if axis_name is None else lax.psum(total, axis_name)

    def gradients(kernel, x, weights):
        kernel_share, of_x = jax.grad(partial(loss, axis_name="batch"), (0, 1))(kernel, x, weights)
        return lax.pmean(kernel_share, "batch"), of_x

    expected = jax.grad(loss, (0, 1))(kernel, x, weights)
    mapped = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(copied, rows, rows),
        out_specs=(copied, rows),
    )
    chex.assert_trees_all_close(jax.jit(mapped)(kernel, x, weights), expected, rtol=1e-4, atol=1e-5)
    sharded = [
        jax.device_put(array, jax.NamedSharding(mesh, spec))
        for array, spec in ((kernel, copied), (x, rows), (weights, rows))
    ]
    chex.assert_trees_all_close(
        jax.jit(jax.grad(loss, (0, 1)))(*sharded), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_have_the_convolutions_of_xla(platform):
    def operations(function, platform):
        compiled = jax.jit(partial(values_and_gradients, function)).trace(*inputs(SHAPES[2]))
        text = compiled.lower(lowering_platforms=(platform,)).as_text()
        names = ("stablehlo.convolution", "stablehlo.dot_general", "stablehlo.while")
        return [text.count(name) for name in names]

    assert operations(convolve, platform) == operations(by_xla, platform) == [3, 0, 0]
    assert operations(convolve, "cpu") != [3, 0, 0]


def test_the_layer_has_the_parameters_of_flax():
    options = LayerOptions(jnp.float32, None, nnx.Rngs(0))
    ours, theirs = conv(2, 4, 3, options), conv(2, 4, 3, options, stride=2)
    assert isinstance(ours, Conv)
    assert not isinstance(theirs, Conv)
    chex.assert_trees_all_equal_shapes(*(nnx.state(layer) for layer in (ours, theirs)))
    x = random((2, 6, 5, 2))
    chex.assert_trees_all_close(ours(x), by_xla(x, ours.kernel[...]), rtol=1e-5, atol=1e-5)
    half = conv(2, 4, 3, LayerOptions(jnp.bfloat16, None, nnx.Rngs(0)))
    assert half(x).dtype == jnp.bfloat16
