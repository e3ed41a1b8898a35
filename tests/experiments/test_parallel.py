"""Meshes of a batch and of classes: what is refused, and what no device holds."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxloss
from experiments.assembly import build_learner, plan_run
from experiments.cli.main import main
from experiments.compilation import compile_step
from experiments.contracts import CLASS_AXIS, Problem
from experiments.errors import ConfigError
from experiments.presets import PRESETS
from experiments.protocols.linear_head import build_classifier_loss
from experiments.training.checkpoints import class_sharding
from experiments.training.parallel import device_mesh
from tests.experiments.tiny_runs import TINY


@pytest.fixture
def config():
    preset = PRESETS["icons-instances"].config
    model = dataclasses.replace(preset.model, widths=(2, 2, 2, 8))
    return dataclasses.replace(preset, model=model)


@pytest.mark.parametrize(
    ("mode", "shape", "message"),
    [
        ("jit", "4", "--mesh must be BATCHxCLASSES, such as 2x4 for eight devices; got '4'"),
        ("jit", "0x4", "must be BATCHxCLASSES"),
        ("jit", "2x4", "--mesh 2x4 needs 8 devices, but JAX has 4"),
        ("pmap", "2x2", "--mesh 2x2 needs --parallel jit"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mode, shape, message):
    with pytest.raises(ConfigError, match=message):
        device_mesh(mode, shape)


def test_a_loss_that_needs_the_whole_classifier_is_refused(tmp_path, folders, capsys):
    command = ["train", "icons", "--data-dir", str(folders.data_dir), "--parallel", "jit"]
    command += ["--directory", str(tmp_path / "run"), "--mesh", "2x2"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "protocol few-shot with loss.name = direct:sce+nca needs the whole classifier" in error
    assert "choose --mesh 4x1" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("classes", [13, 5])
@pytest.mark.parametrize("shape", ["2x2", "1x4"])
def test_the_loss_of_classes_on_devices_is_that_of_one(shape, classes):
    """Five classes on four devices: the last device has none."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        features, kernel = rng.normal(size=(8, 6)), rng.normal(size=(6, classes))
        labels = jnp.asarray(rng.integers(0, classes, 8), jnp.int32)
        options = {"similarity": "cosine", "margin": 0.2, "scale": 6.0, "block_size": 2}
        mesh = device_mesh("jit", shape)
        fill = -classes % mesh.shape[CLASS_AXIS]

        def spread(features, kernel):
            problem = Problem(6, np.ones(classes, np.int64), mesh=mesh)
            loss_of = build_classifier_loss(problem, **options)
            return loss_of(features, labels, jnp.pad(kernel, [(0, 0), (0, fill)]))

        def whole(features, kernel):
            problem = Problem(6, np.ones(classes, np.int64))
            return build_classifier_loss(problem, **options)(features, labels, kernel)

        run = partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        got, expected = (jax.jit(run(loss))(features, kernel) for loss in (spread, whole))
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
        logits = jaxloss.cosine_logits(jnp.asarray(features), jnp.asarray(kernel))
        by_hand = jaxloss.margin_softmax_loss(logits, labels, margin=0.2, scale=6.0)
        np.testing.assert_allclose(got[0][0], by_hand, rtol=1e-12)


def test_the_first_state_is_spread_with_the_optimizers_state_of_it(config):
    plan, mesh = plan_run(config), device_mesh("jit", "1x4")
    build = partial(build_learner, plan, np.ones(5, np.int64), 1)
    state, alone = build(mesh=mesh).state, build().state
    expected = NamedSharding(mesh, PartitionSpec(None, CLASS_AXIS))
    spread = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if class_sharding(leaf) is not None
    }
    assert set(spread) == {
        "params/classifier/kernel",
        "opt_state/1/0/mu/classifier/kernel",
        "opt_state/1/0/nu/classifier/kernel",
    }
    for leaf in spread.values():
        assert leaf.sharding == expected
        assert [shard.data.shape for shard in leaf.addressable_shards] == [(32, 2)] * 4
    kernel = np.asarray(state.params["classifier"]["kernel"])
    np.testing.assert_allclose(kernel[:, :5], alone.params["classifier"]["kernel"], rtol=1e-6)
    assert not kernel[:, 5:].any()
    shapes = build(mesh=mesh, abstract=True).state
    assert class_sharding(shapes.params["classifier"]["kernel"]) == expected


@pytest.mark.parametrize("shape", ["2x2", "1x4"])
def test_no_device_gathers_the_classifier(config, shape):
    classes, sizes = 60_001, {}
    for mesh in ("4x1", shape):
        step = compile_step(config, jax.devices(), mode="jit", mesh_shape=mesh, classes=classes)
        sizes[mesh] = step
    own = 4 * 32 * classes
    assert sum(sizes[shape].transfers.get("all-gather", [])) < 0.01 * own
    # The gradient of a device's own classes is added up over the rows, and nothing else is large.
    columns = int(shape[-1])
    assert sum(map(sum, sizes[shape].transfers.values())) < 1.05 * own / columns
    name = "arguments: the state and a share of the batch"
    arguments = sizes["4x1"].memory[name] - sizes[shape].memory[name]
    assert arguments == pytest.approx(3 * own * (1 - 1 / columns), rel=0.01)  # Adam has two.


def test_compile_asks_for_the_number_of_classes_where_images_are_classes(config):
    with pytest.raises(ConfigError, match="give their number, such as --classes 1000000"):
        compile_step(config, jax.devices(), mode="jit")
    other = dataclasses.replace(TINY, loss=dataclasses.replace(TINY.loss, name="sce"))
    assert compile_step(other, jax.devices(), classes=7).num_classes == 7
