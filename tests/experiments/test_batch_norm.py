"""Batch normalisation against `nnx.BatchNorm`, and over devices against one device."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from experiments.models.batch_norm import BatchNorm


def build(kind, axis_name=None):
    norm = kind(
        3, momentum=0.9, epsilon=1e-5, dtype=jnp.float32, axis_name=axis_name, rngs=nnx.Rngs(0)
    )
    norm.scale[...] = jnp.array([0.5, -2.0, 1.0])
    norm.bias[...] = jnp.array([1.0, 0.0, -3.0])
    return norm


def values_and_gradients(kind, x, weights, axis_name=None):
    """The weighted sum of the outputs over all devices: gradients, and the running statistics."""
    graphdef, params, rest = nnx.split(build(kind, axis_name), nnx.Param, ...)

    def loss(params, x):
        norm = nnx.merge(graphdef, params, rest, copy=True)
        y = norm(x, use_running_average=False)
        total = jnp.sum(jnp.sin(y) * weights)
        if axis_name is not None:
            total = lax.psum(total, axis_name)
        return total, (y, norm.mean[...], norm.var[...])

    (_, outputs), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return outputs, gradients


@pytest.mark.parametrize("shape", [(6, 3), (4, 5, 2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_statistics_and_gradients_are_those_of_nnx(shape, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(2 + 3 * rng.normal(size=shape), dtype)
    weights = jnp.asarray(rng.normal(size=shape), jnp.float32)
    expected = jax.jit(partial(values_and_gradients, nnx.BatchNorm))(x, weights)
    found = jax.jit(partial(values_and_gradients, BatchNorm))(x, weights)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    chex.assert_trees_all_close(found, expected, rtol=tolerance, atol=tolerance)
    chex.assert_trees_all_equal_dtypes(found, expected)


def test_a_channel_without_variance_has_finite_gradients():
    x = jnp.ones((4, 2, 2, 3))
    _, gradients = values_and_gradients(BatchNorm, x, jnp.ones_like(x))
    chex.assert_tree_all_finite(gradients)


def test_running_statistics_are_used_for_evaluation():
    norm = build(BatchNorm)
    norm.mean[...], norm.var[...] = jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 1.0, 0.25])
    x = jnp.arange(6.0).reshape(2, 3)
    same = build(nnx.BatchNorm)
    same.mean[...], same.var[...] = norm.mean[...], norm.var[...]
    chex.assert_trees_all_equal(
        norm(x, use_running_average=True), same(x, use_running_average=True)
    )


def test_over_devices_the_batch_is_one():
    rng = np.random.default_rng(1)
    x = jnp.asarray(
        rng.normal(size=(4, 5, 3)) * [1, 2, 3] + [[[0]], [[1]], [[2]], [[3]]], jnp.float32
    )
    weights = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    (y, mean, var), (params, of_x) = values_and_gradients(
        BatchNorm, x.reshape(-1, 3), weights.reshape(-1, 3)
    )
    over_devices = jax.pmap(
        partial(values_and_gradients, BatchNorm, axis_name="batch"),
        axis_name="batch",
        devices=jax.devices()[:4],
    )
    (ys, means, variances), (shares, of_xs) = over_devices(x, weights)
    chex.assert_trees_all_close(ys.reshape(-1, 3), y, rtol=1e-5, atol=1e-5)
    for device in range(4):
        chex.assert_trees_all_close((means[device], variances[device]), (mean, var), rtol=1e-5)
    # The loss is summed inside, so that the mean of the devices' gradients is that of the batch.
    chex.assert_trees_all_close(
        jax.tree.map(lambda leaf: leaf.mean(0), shares), params, rtol=1e-4, atol=1e-5
    )
    chex.assert_trees_all_close(of_xs.reshape(-1, 3) / 4, of_x, rtol=1e-4, atol=1e-5)
