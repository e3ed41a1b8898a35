"""Weights to start from: files with torchvision's names, and other runs."""

import re
import sys
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from experiments.config import ModelConfig
from experiments.models import build_backbone
from experiments.presets import photographs
from experiments.training import weights
from experiments.training.checkpoints import Checkpoints
from experiments.training.weights import WeightsError, load_weights
from tests.experiments import torch_backbones

SMALL = ModelConfig("resnet18", (4, 6, 8, 10), "mean", blocks=(2, 1, 1, 1))


def trees(config=SMALL, channels=3):
    model = nnx.eval_shape(
        lambda: build_backbone(
            config, image_shape=(32, 32, channels), axis_name=None, rngs=nnx.Rngs(0)
        )
    )
    return nnx.split(model, nnx.Param, ...)[1:]


@pytest.fixture
def file(tmp_path):
    module = torch_backbones.randomize(torch_backbones.ResNet(SMALL.widths, SMALL.blocks))
    arrays = {name: np.array(tensor) for name, tensor in module.state_dict().items()}
    path = tmp_path / "weights.safetensors"
    save_file(arrays | {"fc.weight": np.ones((5, 10), np.float32), "fc.bias": np.ones(5)}, path)
    return path


def change(path, changes):
    arrays = load_file(path)
    for name, value in changes.items():
        arrays.pop(name, None)
        if value is not None:
            arrays[name] = np.ascontiguousarray(value)
    save_file(arrays, path)


# The names of torchvision 0.20's ResNet-50 that one block of every kind has, and their shapes.
PUBLISHED = {
    "conv1.weight": (64, 3, 7, 7),
    "bn1.running_var": (64,),
    "layer1.0.conv1.weight": (64, 64, 1, 1),
    "layer1.0.downsample.0.weight": (256, 64, 1, 1),
    "layer1.0.downsample.1.running_mean": (256,),
    "layer2.0.conv2.weight": (128, 128, 3, 3),
    "layer3.5.bn3.bias": (1024,),
    "layer4.0.downsample.0.weight": (2048, 1024, 1, 1),
    "layer4.2.conv3.weight": (2048, 512, 1, 1),
}


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
def test_names_and_shapes_are_those_of_torchvision(backbone, tmp_path, monkeypatch):
    config = replace(photographs.RESNET50, backbone=backbone)
    # An empty file lacks every entry: the message lists all that is needed.
    monkeypatch.setattr(weights, "_SHOWN", 1000)
    save_file({}, path := tmp_path / "empty.safetensors")
    with pytest.raises(WeightsError) as error:
        load_weights(path, *trees(config))
    wanted = dict(re.findall(r"(\S+) \[([\d, ]+)\]: missing", str(error.value)))
    wanted = {name: tuple(map(int, shape.split(", "))) for name, shape in wanted.items()}
    module = torch_backbones.ResNet(
        config.widths,
        (2, 2, 2, 2) if backbone == "resnet18" else (3, 4, 6, 3),
        bottleneck=backbone == "resnet50",
    )
    names = {n: tuple(t.shape) for n, t in module.state_dict().items() if "tracked" not in n}
    assert wanted == names
    if backbone == "resnet50":
        assert PUBLISHED.items() <= wanted.items()
        assert len(wanted) == 53 * 5
    else:
        assert "layer1.0.downsample.0.weight" not in wanted
        assert len(wanted) == 20 * 5


def test_other_float_types_are_widened(file):
    arrays = load_file(file)
    bias = arrays["bn1.bias"].astype(ml_dtypes.bfloat16)
    change(file, {"bn1.bias": bias, "bn1.weight": arrays["bn1.weight"].astype(np.float16)})
    norm = load_weights(file, *trees())[0]["stem"]["norm"]
    chex.assert_trees_all_equal(norm["bias"][...], bias.astype(np.float32))
    assert norm["scale"][...].dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"bn1.bias": None}, ["bn1.bias [4]: missing"]),
        ({"layer1.2.bn1.bias": np.ones(4)}, ["layer1.2.bn1.bias: unexpected"]),
        (
            {"conv1.weight": np.ones((4, 1, 7, 7), np.float32)},
            ["conv1.weight: [4, 1, 7, 7] in the file, [4, 3, 7, 7] wanted"],
        ),
        (
            {f"other{i}": np.ones(1) for i in range(12)} | {"bn1.weight": None},
            ["bn1.weight [4]: missing", "other0: unexpected", "and 3 more"],
        ),
    ],
)
def test_what_does_not_fit_is_named(file, changes, messages):
    change(file, changes)
    with pytest.raises(WeightsError) as error:
        load_weights(file, *trees())
    for message in messages:
        assert message in str(error.value)


def test_damaged_and_missing_files_are_named(file, tmp_path):
    with pytest.raises(WeightsError, match=r"neither a file \*\.safetensors nor a run"):
        load_weights(tmp_path / "other.safetensors", *trees())
    with pytest.raises(WeightsError, match="no backbone can be taken from"):
        load_weights(tmp_path, *trees())
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(WeightsError, match=r"weights\.safetensors is damaged"):
        load_weights(file, *trees())


def test_files_are_for_residual_networks_alone(file):
    for config in (ModelConfig(), ModelConfig("wrn28", (16, 8, 10), "mean")):
        with pytest.raises(WeightsError, match="file of weights is for resnet18, resnet50 or swin"):
            load_weights(file, *trees(config))


def test_the_missing_package_is_named(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(WeightsError, match=r"pip install \"jaxloss\[weights\]\""):
        load_weights(file, *trees())


def save_run(folder, config, accuracies):
    """Checkpoints of a run whose values are the number of their step."""
    with Checkpoints(folder) as checkpoints:
        for step, accuracy in enumerate(accuracies, start=1):

            def value(leaf, step=step):
                return np.full(leaf.shape, step, np.float32)

            params, statistics = jax.tree.map(value, trees(config))
            state = {
                "params": {"backbone": params, "classifier": {"kernel": np.ones((7, 3))}},
                "statistics": statistics,
                "opt_state": np.ones(5),
            }
            checkpoints.save(step, state, meta={}, validation=accuracy)


@pytest.mark.parametrize(("accuracies", "step"), [([0.2, 0.9, 0.5], 2), ([None, None], 2)])
def test_a_run_gives_the_backbone_of_its_best_checkpoint(tmp_path, accuracies, step):
    config = replace(SMALL, blocks=(1, 1, 1, 1))
    save_run(tmp_path / "run" / "checkpoints", config, accuracies)
    wanted = trees(config)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        found = load_weights(path, *wanted)
        chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
        assert {float(x) for leaf in jax.tree.leaves(found) for x in leaf.ravel()} == {step}


def test_a_run_of_another_backbone_is_refused(tmp_path):
    save_run(tmp_path / "checkpoints", replace(SMALL, blocks=(1, 1, 1, 1)), [None])
    named = "params/backbone/stages/0/1/layers/0/conv/kernel.*: .absent. -> "
    with pytest.raises(WeightsError, match=named) as error:
        load_weights(tmp_path, *trees())
    assert "classifier" not in str(error.value)
