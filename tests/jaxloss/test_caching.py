"""Gradients of encoders in chunks equal those of all rows at once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss.harness import P, assert_close, over_mesh, raises
from tests.tolerances import FLOAT32

N, WIDTH = 16, 64
CACHED = partial(jaxloss.cached_value_and_grad, chunks=4)


def encode(params, inputs, key=None):
    """Features as a pytree; with a key, it drops a half of the hidden ones."""
    hidden = jnp.tanh(inputs["x"] @ params["hidden"])
    if key is not None:
        hidden = jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0)
    return {"z": hidden @ params["out"]}


def contrast(queries, keys, axis_name=None):
    return jaxloss.info_nce_loss(queries["z"], keys["z"], axis_name=axis_name)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


PARAMS = tuple({"hidden": normal(k, 5, WIDTH), "out": normal(k + 2, WIDTH, 8)} for k in (0, 1))
INPUTS: Any = ({"x": normal(4, N, 5)}, {"x": normal(5, N, 5)})
BOTH = CACHED(contrast, (encode, encode))


@jax.jit
def expected(params):
    return jax.value_and_grad(lambda params: contrast(*map(encode, params, INPUTS)))(params)


def test_two_encoders_as_at_once():
    assert_close(jax.jit(BOTH)(PARAMS, INPUTS), expected(PARAMS), 4 * FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_two_encoders_over_devices(check_vma):
    def step(params, inputs):
        loss = partial(contrast, axis_name="batch")
        value, gradients = CACHED(loss, (encode, encode))(params, inputs)
        return value, jax.lax.pmean(gradients, "batch")

    spread = over_mesh(step, (P(), P("batch")), P(), check_vma=check_vma)
    assert_close(jax.jit(spread)(PARAMS, INPUTS), expected(PARAMS), 4 * FLOAT32)


def test_one_encoder_with_dropout_and_an_output_beside_the_loss():
    """The features are the same both times, of a chunk with a key of its own; so are gradients."""
    key = jax.random.key(3)

    def loss(features):
        return jaxloss.koleo_loss(features["z"]), features["z"]

    def at_once(params):
        parts = zip(INPUTS[0]["x"].reshape(4, 4, 5), jax.random.split(key, 4), strict=True)
        features = [encode(params, {"x": x}, k)["z"] for x, k in parts]
        return loss({"z": jnp.concatenate(features)})

    got = jax.jit(CACHED(loss, encode, has_aux=True))(PARAMS[0], INPUTS[0], key)
    assert_close(got, jax.jit(jax.value_and_grad(at_once, has_aux=True))(PARAMS[0]), 4 * FLOAT32)
    # One key for several encoders gives each its own.
    apart = jax.jit(BOTH)((PARAMS[0],) * 2, (INPUTS[0],) * 2, jax.random.PRNGKey(3))
    assert apart[0] > jax.jit(BOTH)((PARAMS[0],) * 2, (INPUTS[0],) * 2)[0] + 0.1


def test_the_memory_falls_with_the_chunks():
    shapes = jax.eval_shape(lambda: ({"hidden": jnp.ones((5, 512)), "out": jnp.ones((512, 8))}, 0))
    inputs = {"x": jax.ShapeDtypeStruct((4096, 5), np.float32)}

    def temporaries(chunks):
        def loss(features):
            return jnp.sum(features["z"] ** 2)

        run = jaxloss.cached_value_and_grad(loss, encode, chunks=chunks)
        memory = jax.jit(run).lower(shapes[0], inputs).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporaries(16) < temporaries(1) / 8


def test_wrong_arguments_are_named():
    for chunks, error in ((0, ValueError), (2.0, TypeError)):
        with raises(error, "`chunks` must be"):
            jaxloss.cached_value_and_grad(contrast, encode, chunks=chunks)  # pyright: ignore
    with raises(ValueError, r"`inputs` must have rows that `chunks` = 4 divides, got \(6, 5\)"):
        BOTH(PARAMS, ({"x": jnp.ones((6, 5))}, INPUTS[1]))
    with raises(ValueError, "`keys` must be a tuple of 2, one for each encoder, got 1"):
        BOTH(PARAMS, INPUTS, (jax.random.key(0),))
