"""ResNet-18, -50 and -32 and WRN: sizes, initial values, and equality with PyTorch."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

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
from experiments.models.layers import ConvNorm, LayerOptions
from experiments.training.weights import load_weights
from tests.experiments import torch_backbones

SMALL = {
    "resnet18": ModelConfig("resnet18", (4, 6, 8, 10), "mean", blocks=(2, 1, 1, 1)),
    "resnet50": ModelConfig("resnet50", (4, 4, 6, 8), "mean", blocks=(1, 2, 1, 1)),
    "resnet32": ModelConfig("resnet32", (4, 8, 12), "mean", blocks=(1, 2, 1)),
    "resnet32, 3x3": ModelConfig(
        "resnet32", (4, 8, 12), "mean", blocks=(1, 2, 1), shortcut="conv3x3"
    ),
    "wrn28": ModelConfig("wrn28", (16, 8, 10), "mean", blocks=(1, 2, 1)),
}


def torch_backbone(config):
    if config.backbone == "wrn28":
        return torch_backbones.WideResNet(config.widths, config.blocks)
    of_cifar = config.backbone == "resnet32"
    return torch_backbones.ResNet(
        config.widths,
        config.blocks,
        bottleneck=config.backbone == "resnet50",
        small_stem=of_cifar,
        shortcut={"pad": 0, "conv3x3": 3}[config.shortcut] if of_cifar else 1,
    )


def build(config, image_shape=(32, 32, 3), axis_name=None, seed=0):
    return build_backbone(config, image_shape=image_shape, axis_name=axis_name, rngs=nnx.Rngs(seed))


def abstract(config, image_shape=(32, 32, 3)):
    return nnx.eval_shape(lambda: build(config, image_shape))


def copied(tensors, params, statistics, folder):
    """PyTorch's tensors, by name, in the trees of our module."""
    if "conv1.weight" in tensors:
        file = folder / "weights.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        return load_weights(file, params, statistics)
    names = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}

    def value(place, leaf):
        name = jax.tree_util.keystr(place, simple=True, separator=".").removesuffix(".value")
        path, _, last = name.rpartition(".")
        # A copy: JAX would share PyTorch's memory, which changes.
        array = tensors[f"{path}.{names.get(last, last)}"].numpy().copy()
        return jnp.asarray(array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T)

    return tuple(jax.tree_util.tree_map_with_path(value, tree) for tree in (params, statistics))


@pytest.mark.parametrize("backbone", SMALL)
def test_values_and_gradients_equal_pytorch(backbone, tmp_path):
    config = SMALL[backbone]
    # An even and an odd side: they differ in what a stride of 2 sees at the border.
    images = np.random.default_rng(0).normal(0.3, 1, (5, 36, 51, 3)).astype(np.float32)
    there = torch_backbones.randomize(torch_backbone(config))
    graphdef, params, statistics = nnx.split(abstract(config, images.shape[1:]), nnx.Param, ...)
    start = copied(there.state_dict(), params, statistics, tmp_path)
    direction = np.random.default_rng(1).normal(size=(5, config.widths[-1] * 4)).astype(np.float32)

    @jax.jit
    def run(params, statistics, images):
        def projected(params, images, train):
            model = nnx.merge(graphdef, params, statistics, copy=True)
            features = model(images, train=train)
            loss = (features * direction[:, : features.shape[1]]).sum()
            return loss, (features, nnx.state(model, nnx.Not(nnx.Param)))

        gradient = jax.grad(projected, argnums=(0, 1), has_aux=True)
        return gradient(params, images, True), gradient(params, images, False)

    for train, found in zip((True, False), run(*start, images), strict=True):
        (in_params, in_images), (features, after) = found
        there.train(train)
        # Contiguous: torch 2.13 crashes now and then in gradients of strided images on the CPU.
        inputs = torch.from_numpy(images.transpose(0, 3, 1, 2)).contiguous().requires_grad_()
        expected = there(inputs)
        weights = torch.from_numpy(direction[:, : expected.shape[1]])
        there.zero_grad()
        (expected * weights).sum().backward()
        gradients = {name: leaf.grad for name, leaf in there.named_parameters()}
        tensors = there.state_dict() | gradients
        wanted, moved = copied(tensors, params, statistics, tmp_path)

        np.testing.assert_allclose(features, expected.detach(), rtol=1e-4, atol=1e-4)
        assert inputs.grad is not None
        close_by_norm(in_images, inputs.grad.permute(0, 2, 3, 1).numpy())
        jax.tree.map(close_by_norm, in_params, wanted)
        # Of the variances, PyTorch's has n − 1 in place of n, with n at least 5·2·2.
        for (place, leaf), other in zip(
            jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(moved), strict=True
        ):
            rtol = 0.05 if "var" in jax.tree_util.keystr(place) else 1e-4
            np.testing.assert_allclose(leaf, other, rtol=rtol, atol=1e-5)
        torch_backbones.randomize(there)  # Training has moved its statistics.


@pytest.mark.parametrize(("projection", "dim"), [("linear-norm", 3), ("linear", 3), ("norm", 0)])
def test_what_follows_the_backbone_equals_pytorch(projection, dim):
    """With the running statistics, and with those of the batch."""
    config = replace(SMALL["resnet32"], dim=dim, projection=projection)
    images = np.random.default_rng(0).normal(size=(6, 16, 16, 1)).astype(np.float32)
    layers = {}
    if projection != "norm":
        layers["linear"] = torch.nn.Linear(12, dim, bias=projection == "linear")
    if projection != "linear":
        layers["norm"] = torch.nn.BatchNorm1d(dim or 12)
    there = torch_backbones.randomize(torch.nn.Sequential(OrderedDict(layers)))
    model: Any = build(config, images.shape[1:])
    for name in layers:
        own = nnx.Dict({name: getattr(model, name)})
        graphdef, params, rest = nnx.split(own, nnx.Param, ...)
        filled = copied(there.state_dict(), params, rest, None)
        setattr(model, name, nnx.merge(graphdef, *filled)[name])
    for train in (False, True):
        there.train(train)
        inner = model.backbone(images, train=train)
        expected = there(torch.from_numpy(np.array(inner))).detach()
        # The variance of a batch is a difference of two means. With features whose mean is 16
        # standard deviations, this costs float32 a factor of 256: on a CPU with AVX-512, 1.4e-5
        # from float64.
        atol = 4e-5 if train else 1e-5
        np.testing.assert_allclose(model(images, train=train), expected, rtol=1e-4, atol=atol)


def test_a_projection_without_normalisation_starts_as_pytorch():
    dim = 50
    config = replace(SMALL["resnet32"], widths=(4, 8, 60), dim=dim, projection="linear")
    model: Any = build(config, (16, 16, 1))
    kernel, bias = (np.asarray(leaf[...]) for leaf in (model.linear.kernel, model.linear.bias))
    for values in (kernel, bias):
        # Uniform in ±1/√60, so that a deviation is 1/√180.
        assert np.abs(values).max() <= 60**-0.5
        assert np.abs(values).max() > 0.9 * 60**-0.5
    np.testing.assert_allclose(kernel.std(), 180**-0.5, rtol=0.03)


def close_by_norm(found, expected):
    """Sums of many terms of both signs: exact in proportion to the whole, not to each entry."""
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=3e-5 * max(scale, 1e-3))


def test_initial_values():
    def layer():
        rngs = nnx.Rngs(0)
        return nnx.state(ConvNorm(16, 64, 3, LayerOptions("float32", None, rngs), stride=2))

    for place, leaf in jax.tree_util.tree_leaves_with_path(jax.jit(layer)()):
        name = jax.tree_util.keystr(place)
        if "kernel" in name:
            assert float(leaf.std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
            assert abs(float(leaf.mean())) < 2e-3
        else:
            value = 1.0 if "scale" in name or "var" in name else 0.0
            chex.assert_trees_all_equal(leaf, jnp.full(leaf.shape, value))
