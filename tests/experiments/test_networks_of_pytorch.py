"""Networks against PyTorch, and weights to start from: torchvision's files, and other runs."""

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

from experiments.models.layers import LayerOptions, conv
from experiments.papers.presets import shared
from experiments.training.checkpoints import Checkpoints
from experiments.training.step import TrainState
from experiments.training.weights import WeightsError, load_weights
from tests.experiments import torch_backbones
from tests.experiments.test_models import SMALL, build
from tests.tolerances import FLOAT32


def torch_backbone(config):
    shortcut = {"pad": 0, "conv3x3": 3}[config.shortcut]
    build = {
        "conv4": partial(torch_backbones.pooled, "layers", torch_backbones.Conv4Block),
        "resnet12": partial(torch_backbones.pooled, "blocks", torch_backbones.PooledBlock),
        "resnet18": torch_backbones.resnet,
        "resnet50": partial(torch_backbones.resnet, bottleneck=True),
        "resnet32": partial(torch_backbones.resnet, small_stem=True, shortcut=shortcut),
        "wrn28": torch_backbones.wide_resnet,
        "swin": torch_backbones.Swin,
    }
    return torch_backbones.randomize(build[config.backbone](config.widths, config.blocks))


def abstract(config, image_shape=(32, 32, 3)):
    return nnx.eval_shape(lambda: build(config, image_shape))


assert_close = partial(np.testing.assert_allclose, rtol=32 * FLOAT32, atol=32 * FLOAT32)


def load_backbone(path, params, statistics):
    state, _ = load_weights(path, TrainState(jnp.zeros(()), {"backbone": params}, statistics, ()))
    return state.params["backbone"], state.statistics


def copied(tensors, params, statistics, folder):
    """PyTorch's tensors, by name, in the trees of our module."""
    if "conv1.weight" in tensors or "features.0.0.weight" in tensors:
        if "features.0.0.weight" in tensors:  # What a file of Swin has besides its backbone.
            extra = {"head.weight": torch.ones(5, 96), "head.bias": torch.ones(5)}
            extra["features.1.0.attn.relative_position_index"] = torch.ones(49)
            tensors = tensors | extra
        file = folder / "weights.safetensors"
        save_file({name: t.contiguous().numpy() for name, t in tensors.items()}, file)
        return load_backbone(file, params, statistics)
    names = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}

    def value(place, leaf):
        name = jax.tree_util.keystr(place, simple=True, separator=".").removesuffix(".value")
        path, _, last = name.rpartition(".")
        # A copy: JAX would share PyTorch's memory, which changes.
        array = tensors[f"{path}.{names.get(last, last)}"].numpy().copy()
        return jnp.asarray(array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T)

    return tuple(jax.tree_util.tree_map_with_path(value, tree) for tree in (params, statistics))


@pytest.mark.parametrize(
    "backbone",
    [
        pytest.param(name, marks=[] if name in ("conv4", "resnet50") else pytest.mark.long)
        for name in SMALL
    ],
)
def test_values_and_gradients_equal_pytorch(backbone, tmp_path):
    config, swin = SMALL[backbone], backbone == "swin"
    # An even and an odd side: they differ in what a stride of 2 sees at the border. Swin has 15×10
    # patches: padded to three by two windows, then to one.
    shape = (3, 60, 43, 3) if swin else (5, 36, 51, 3)
    modes = (True,) if swin else (True, False)
    close = partial(close_by_norm, share=(64 if swin else 32) * FLOAT32)
    images = np.random.default_rng(0).normal(0.3, 1, shape).astype(np.float32)
    there = torch_backbone(config)
    graphdef, params, statistics = nnx.split(abstract(config, images.shape[1:]), nnx.Param, ...)
    start = copied(there.state_dict(), params, statistics, tmp_path)
    size = (shape[0], config.widths[-1] * 4)
    direction = np.random.default_rng(1).normal(size=size).astype(np.float32)

    @jax.jit
    def run(params, statistics, images):
        def projected(params, images, train):
            model = nnx.merge(graphdef, params, statistics, copy=True)
            features = model(images, train=train)
            loss = (features * direction[:, : features.shape[1]]).sum()
            return loss, (features, nnx.state(model, nnx.Not(nnx.Param)))

        gradient = jax.grad(projected, argnums=(0, 1), has_aux=True)
        return [gradient(params, images, train) for train in modes]

    for train, found in zip(modes, run(*start, images), strict=True):
        (in_params, in_images), (features, after) = found
        there.train(train)
        # Contiguous: torch 2.13 crashes now and then in gradients of strided images on the CPU.
        inputs = torch.from_numpy(images.transpose(0, 3, 1, 2)).contiguous().requires_grad_()
        expected = there(inputs)
        weights = torch.from_numpy(direction[:, : expected.shape[1]])
        there.zero_grad()
        (expected * weights).sum().backward()
        gradients = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in there.named_parameters()
        }
        tensors = there.state_dict() | gradients
        wanted, moved = copied(tensors, params, statistics, tmp_path)

        assert_close(features, expected.detach())
        assert inputs.grad is not None
        close(in_images, inputs.grad.permute(0, 2, 3, 1).numpy())
        jax.tree.map(close, in_params, wanted)
        for (place, leaf), other in zip(
            jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(moved), strict=True
        ):
            # Of the variances, PyTorch's has n − 1 in place of n, with n at least 5·2·2.
            rtol = 0.05 if "var" in jax.tree_util.keystr(place) else 32 * FLOAT32
            assert_close(leaf, other, rtol=rtol)
        torch_backbones.randomize(there)  # Training has moved its statistics.


@pytest.mark.parametrize(("projection", "dim"), [("linear-norm", 3), ("linear", 3), ("norm", 0)])
def test_what_follows_the_backbone_equals_pytorch(projection, dim):
    """With the running statistics, and with those of the batch."""
    config = replace(SMALL["conv4"], dim=dim, projection=projection)
    images = np.random.default_rng(0).normal(size=(6, 16, 16, 1)).astype(np.float32)
    layers = {}
    if projection != "norm":
        layers["linear"] = torch.nn.Linear(10, dim, bias=projection == "linear")
    if projection != "linear":
        layers["norm"] = torch.nn.BatchNorm1d(dim or 10)
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
        # standard deviations, this costs float32 a factor of 256.
        assert_close(model(images, train=train), expected)


def test_a_projection_without_normalisation_starts_as_pytorch():
    config = replace(SMALL["conv4"], widths=(4, 4, 4, 60), dim=50, projection="linear")
    model: Any = build(config, (16, 16, 1))
    for values in (model.linear.kernel[...], model.linear.bias[...]):
        # Uniform in ±1/√60.
        assert 0.9 * 60**-0.5 < np.abs(values).max() <= 60**-0.5
    np.testing.assert_allclose(model.linear.kernel[...].std(), 180**-0.5, rtol=0.03)


def close_by_norm(found, expected, share):
    """Sums of many terms of both signs: exact in proportion to the whole, not to each entry."""
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=share * max(scale, 1e-3))


def test_the_initial_kernel_has_variance_2_by_fan_out():
    kernel = conv(16, 64, 3, LayerOptions("float32", None, nnx.Rngs(0)), stride=2).kernel[...]
    assert float(kernel.std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)


def trees(config=SMALL["resnet18"]):
    return nnx.split(abstract(config), nnx.Param, ...)[1:]


@pytest.fixture
def file(tmp_path):
    tensors = torch_backbone(SMALL["resnet18"]).state_dict()
    arrays = {name: np.array(tensor) for name, tensor in tensors.items()}
    path = tmp_path / "weights.safetensors"
    save_file(arrays | {"fc.weight": np.ones((5, 10), np.float32), "fc.bias": np.ones(5)}, path)
    return path


def change(path, changes):
    arrays = load_file(path) | changes
    save_file({name: value for name, value in arrays.items() if value is not None}, path)


def test_names_and_shapes_are_those_of_torchvision():
    """Names of version 0.20's ResNet-50 in the network that files are compared with above."""
    published = replace(shared.RESNET50, blocks=(3, 4, 6, 3))
    tensors = torch_backbone(published).state_dict()
    names = {n: tuple(t.shape) for n, t in tensors.items() if "tracked" not in n}
    assert {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.running_mean": (256,),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer3.5.bn3.bias": (1024,),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
    }.items() <= names.items()
    assert len(names) == sum(map(len, map(jax.tree.leaves, trees(published)))) == 53 * 5


def test_other_float_types_are_widened(file):
    arrays = load_file(file)
    bias = arrays["bn1.bias"].astype(ml_dtypes.bfloat16)
    change(file, {"bn1.bias": bias, "bn1.weight": arrays["bn1.weight"].astype(np.float16)})
    norm = load_backbone(file, *trees())[0]["stem"]["norm"]
    chex.assert_trees_all_equal(norm["bias"][...], bias.astype(np.float32))
    assert norm["scale"][...].dtype == jnp.float32


def test_files_that_cannot_be_taken_are_named(file, tmp_path):
    def refused(words, path=file, config=SMALL["resnet18"]):
        with pytest.raises(WeightsError, match=words):
            load_backbone(path, *trees(config))

    for config in (SMALL["conv4"], SMALL["wrn28"]):
        refused("file of weights is for resnet18, resnet50 or swin", config=config)
    refused(r"neither a file \*\.safetensors nor a run", tmp_path / "other.safetensors")
    refused("no backbone can be taken from", tmp_path)
    change(file, {"conv1.weight": np.ones((4, 1, 7, 7), np.float32)})
    refused(r"conv1.weight: '\[4, 1, 7, 7\]' -> '\[4, 3, 7, 7\]'")
    change(file, {f"other{i}": np.ones(1) for i in range(12)} | {"bn1.weight": None})
    refused(r"(?s)bn1.weight: \(absent\) -> '\[4\]'|and 4 more")
    file.write_bytes(file.read_bytes()[:-5])
    refused(r"weights\.safetensors is damaged")


def save_run(folder, config, accuracies):
    """Checkpoints of a run whose values are the number of their step."""
    with Checkpoints(folder) as checkpoints:
        for step, accuracy in enumerate(accuracies, start=1):
            params, statistics = jax.tree.map(
                lambda leaf, step=step: np.full(leaf.shape, step, np.float32), trees(config)
            )
            state = {
                "params": {"backbone": params, "classifier": {"kernel": np.ones((7, 3))}},
                "statistics": statistics,
                "opt_state": np.ones(5),
            }
            meta = {"config": {"data": {"name": "icons"}}}
            checkpoints.save(step, state, meta=meta, validation=accuracy)


@pytest.mark.parametrize(
    ("accuracies", "step"),
    [([0.2, 0.9, 0.5], 2), pytest.param([None, None], 2, marks=pytest.mark.long)],
)
def test_a_run_gives_the_backbone_of_its_best_checkpoint(tmp_path, accuracies, step):
    config = replace(SMALL["resnet18"], blocks=(1, 1, 1, 1))
    save_run(tmp_path / "run" / "checkpoints", config, accuracies)
    wanted = trees(config)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        found = load_backbone(path, *wanted)
        chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
        assert {float(x) for leaf in jax.tree.leaves(found) for x in leaf.ravel()} == {step}


def test_a_run_of_another_backbone_is_refused(tmp_path):
    save_run(tmp_path / "checkpoints", replace(SMALL["resnet18"], blocks=(1, 1, 1, 1)), [None])
    named = "params/backbone/stages/0/1/layers/0/conv/kernel.*: \\(absent\\) -> "
    with pytest.raises(WeightsError, match=named):
        load_backbone(tmp_path, *trees())
