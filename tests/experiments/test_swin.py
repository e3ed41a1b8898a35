"""Swin Transformer: sizes, equality with PyTorch, shifted windows, stochastic depth."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import save_file

from experiments.config import ModelConfig
from experiments.models import build_backbone
from experiments.models.swin import drop_branch
from experiments.training.weights import load_weights
from tests.experiments import torch_backbones

SMALL = ModelConfig("swin", (32, 64, 64, 96), "mean", blocks=(2, 1, 1, 1))


def abstract(config, image_shape=(32, 32, 3)):
    return nnx.eval_shape(
        lambda: build_backbone(config, image_shape=image_shape, axis_name=None, rngs=nnx.Rngs(0))
    )


def filled(config, image_shape):
    """A backbone with values of NumPy: nothing of it is compiled."""
    graphdef, state = nnx.split(abstract(config, image_shape))
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), state)
    return graphdef, values


def test_values_and_gradients_equal_pytorch(tmp_path):
    """15×10 patches: padded to three by two windows, then to one; with torchvision's names."""
    images = np.random.default_rng(0).normal(0.3, 1, (3, 60, 43, 3)).astype(np.float32)
    there = torch_backbones.randomize(torch_backbones.Swin(SMALL.widths, SMALL.blocks))
    graphdef, params, rest = nnx.split(abstract(SMALL, images.shape[1:]), nnx.Param, ...)

    def copied(tensors):
        file = tmp_path / "weights.safetensors"
        extra = {"head.weight": torch.ones(5, 96), "head.bias": torch.ones(5)}
        extra["features.1.0.attn.relative_position_index"] = torch.ones(49)
        save_file({name: t.contiguous() for name, t in (tensors | extra).items()}, file)
        return load_weights(file, params, rest)

    start, _ = copied(there.state_dict())
    direction = np.random.default_rng(1).normal(size=(3, 96)).astype(np.float32)

    @jax.jit
    def run(params, images):
        def projected(params, images):
            features = nnx.merge(graphdef, params, rest, copy=True)(images, train=True)
            return (features * direction).sum(), features

        return jax.grad(projected, (0, 1), has_aux=True)(params, images)

    (in_params, in_images), features = run(start, images)
    inputs = torch.from_numpy(images.transpose(0, 3, 1, 2)).contiguous().requires_grad_()
    expected = there(inputs)
    (expected * torch.from_numpy(direction)).sum().backward()
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in there.named_parameters()
    }
    wanted, _ = copied(gradients)
    np.testing.assert_allclose(features, expected.detach(), rtol=1e-4, atol=1e-4)
    assert inputs.grad is not None
    close_by_norm(in_images, inputs.grad.permute(0, 2, 3, 1).numpy())
    jax.tree.map(close_by_norm, in_params, wanted)


def close_by_norm(found, expected):
    """Sums of many terms of both signs: exact in proportion to the whole, not to each entry."""
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * max(scale, 1e-3))


def test_stochastic_depth_drops_whole_branches_by_the_key_of_the_image():
    x = jnp.ones((2000, 3, 2))
    keys = jax.random.split(jax.random.key(0), 2000)
    y = np.asarray(drop_branch(x, keys, rate=0.3))
    assert set(np.unique(y).tolist()) == {0.0, np.float32(1 / 0.7)}
    kept = (y > 0).reshape(2000, -1)
    assert (kept.all(1) == kept.any(1)).all()
    assert kept[:, 0].mean() == pytest.approx(0.7, abs=0.04)
    np.testing.assert_array_equal(drop_branch(x[3:5], keys[3:5], rate=0.3), y[3:5])

    config = replace(SMALL, widths=(32,) * 4, blocks=(1,) * 4, stochastic_depth=0.9)
    graphdef, state = filled(config, (16, 16, 1))
    images = jnp.asarray(np.random.default_rng(1).normal(size=(4, 16, 16, 1)), jnp.float32)

    def run(keys, train):
        return nnx.merge(graphdef, state, copy=True)(images, train=train, keys=keys)

    compiled = jax.jit(run, static_argnames="train")
    keys = jax.random.split(jax.random.key(1), 4)
    first = compiled(keys, train=True)
    chex.assert_trees_all_equal(compiled(keys, train=True), first)
    assert bool((compiled(keys[::-1], train=True) != first).any())
    chex.assert_trees_all_equal(compiled(keys[::-1], train=False), compiled(keys, train=False))
    with pytest.raises(ValueError, match="needs keys, one per image"):
        run(None, train=True)


def test_bfloat16_is_the_type_of_products_alone():
    model = abstract(replace(SMALL, dtype="bfloat16"))
    graphdef, state = nnx.split(model)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)

    def run(state, images):
        return nnx.merge(graphdef, state, copy=True)(images, train=False)

    assert jax.eval_shape(run, state, images).dtype == jnp.float32
    lines = str(jax.make_jaxpr(run)(state, images)).splitlines()
    products = [line for line in lines if "= dot_general[" in line]
    assert len(products) == 5 * 6 + 3
    logits = [line for line in products if "f32[" in line]
    assert len(logits) == 5
