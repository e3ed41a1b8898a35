"""Meshes: what is refused, what no device holds, the same numbers; and a compiled step."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxloss
from experiments.assembly import build_learner, plan_run
from experiments.cli.main import main
from experiments.compilation import (
    CompiledStep,
    compilation_lines,
    compile_step,
    transfers,
)
from experiments.config import ModelConfig, OptimizerConfig
from experiments.contracts import CLASS_AXIS, Problem
from experiments.errors import ConfigError
from experiments.presets import PRESETS
from experiments.protocols import instance
from experiments.protocols.few_shot import FewShotEvaluation
from experiments.protocols.instance import InstanceConfig, InstanceLoss
from experiments.runs import evaluate, load_run, train_run
from experiments.topologies import tpu_devices
from experiments.training.checkpoints import class_sharding
from experiments.training.parallel import device_mesh
from tests.experiments.tiny_runs import (
    TINY,
    assert_equal_runs,
    final_state,
    flip_bits,
    metrics_without_clock,
)
from tests.tolerances import FLOAT32


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


@pytest.mark.parametrize(
    ("shape", "classes"),
    [
        ("2x2", 13),
        pytest.param("2x2", 5, marks=pytest.mark.long),
        pytest.param("1x4", 13, marks=pytest.mark.long),
        ("1x4", 5),
    ],
)
def test_the_loss_of_classes_on_devices_is_that_of_one(shape, classes):
    """Five classes on four devices: the last device has none."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        features, kernel = rng.normal(size=(8, 6)), rng.normal(size=(6, classes))
        labels = jnp.asarray(rng.integers(0, classes, 8), jnp.int32)
        options = InstanceLoss(margin=0.2, scale=6.0)
        mesh = device_mesh("jit", shape)
        fill = -classes % mesh.shape[CLASS_AXIS]

        def spread(features, kernel):
            objective = instance.objective(options, Problem(6, np.ones(classes), mesh=mesh))
            head = {"kernel": jnp.pad(kernel, [(0, 0), (0, fill)])}
            return objective.loss(features, labels, head, ())[::2]

        def whole(features, kernel):
            objective = instance.objective(options, Problem(6, np.ones(classes)))
            return objective.loss(features, labels, {"kernel": kernel}, ())[::2]

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
    (*_, state), (*_, alone) = build(mesh=mesh), build()
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
    np.testing.assert_allclose(kernel[:, :5], alone.params["classifier"]["kernel"], rtol=FLOAT32)
    assert not kernel[:, 5:].any()
    shapes = build(mesh=mesh, abstract=True)[-1]
    assert class_sharding(shapes.params["classifier"]["kernel"]) == expected


@pytest.mark.long
def test_no_device_gathers_the_classifier(config):
    classes = 60_001
    whole, *others = (
        compile_step(config, jax.devices(), mode="jit", mesh_shape=mesh, classes=classes)
        for mesh in ("4x1", "2x2", "1x4")
    )
    own = 4 * 32 * classes
    for spread, columns in zip(others, (2, 4), strict=True):
        assert sum(spread.transfers.get("all-gather", [])) < 0.01 * own
        # The gradient of a device's own classes is added up over the rows; nothing else is large.
        assert sum(map(sum, spread.transfers.values())) < 1.05 * own / columns
        name = "arguments: the state and a share of the batch"
        arguments = whole.memory[name] - spread.memory[name]
        assert arguments == pytest.approx(3 * own * (1 - 1 / columns), rel=0.01)  # Adam has two.


@pytest.mark.long
def test_compile_asks_for_the_number_of_classes_where_images_are_classes(config):
    with pytest.raises(ConfigError, match="give their number, such as --classes 1000000"):
        compile_step(config, jax.devices(), mode="jit")
    other = dataclasses.replace(TINY, loss=dataclasses.replace(TINY.loss, name="sce"))
    assert compile_step(other, jax.devices(), classes=7).num_classes == 7


CLASSES = 4650
"""Training images of the icons: even, and no multiple of four."""

CONFIG = InstanceConfig(
    preset="icons-instances",
    sampling=TINY.sampling,
    model=ModelConfig(widths=(4, 4, 4, 8)),
    evaluation=FewShotEvaluation(episodes=50, validation_episodes=20),
    optimizer=OptimizerConfig(weight_decay=1e-2),
    steps=4,
    validate_every=2,
    log_every=1,
)


@pytest.fixture
def resumed(tmp_path, folders, whole):
    """Continues a copy of a run without its last checkpoint, on a mesh."""

    def resumed(before: str, mesh: str, end: Callable[[Path], object]) -> Path:
        run = shutil.copytree(whole / before, tmp_path / "run")
        end(run / "checkpoints" / "4")
        train_run(plan_run(CONFIG), run, folders, mode="jit", mesh_shape=mesh)
        return run

    return resumed


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """Runs without a stop: on one device a row, and on meshes."""
    root = tmp_path_factory.mktemp("whole")
    for mesh in ("4x1", "2x2", "1x4"):
        train_run(plan_run(CONFIG), root / mesh, folders, mode="jit", mesh_shape=mesh)
    return root


def assert_close(one: Path, other: Path) -> None:
    """Sums of float32 numbers in another order: of 16 images and 4,650 classes, over four steps."""
    chex.assert_trees_all_close(*map(metrics_without_clock, (one, other)), rtol=32 * FLOAT32)
    chex.assert_trees_all_close(
        *map(final_state, (one, other)), atol=32 * FLOAT32, rtol=32 * FLOAT32
    )


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["2x2", pytest.param("1x4", marks=pytest.mark.long)])
def test_a_mesh_trains_as_replicated_devices(whole, mesh):
    assert_close(whole / mesh, whole / "4x1")
    state = final_state(whole / mesh)
    assert state.params["classifier"]["kernel"].shape == (32, CLASSES)
    # The first step has a margin on untrained cosines: none of the classes that fill up counts.
    assert np.abs(state.params["classifier"]["kernel"]).min() > 0


@pytest.mark.long
def test_a_run_of_classes_that_are_images_is_evaluated_on_novel_classes(whole, folders):
    report = evaluate(load_run(whole / "2x2"), folders=folders)
    assert report["label"] == "Instances, cosine softmax"
    assert report["metrics"][0]["name"] == "1-shot accuracy"
    with pytest.raises(ConfigError, match="5 ways, 1 shots and 15 queries"):
        evaluate(load_run(whole / "2x2"), split="base", folders=folders)


@pytest.mark.long
@pytest.mark.parametrize(("before", "mesh"), [("1x4", "1x4"), ("1x4", "2x2"), ("4x1", "1x4")])
def test_a_run_resumes_on_any_mesh(whole, resumed, before, mesh):
    run = resumed(before, mesh, shutil.rmtree)
    assert_close(run, whole / "1x4")
    if before == mesh:
        assert_equal_runs(run, whole / mesh)


@pytest.mark.long
def test_a_flipped_bit_of_a_spread_leaf_is_found_and_the_checkpoint_before_is_used(whole, resumed):
    run = resumed("1x4", "1x4", flip_bits)
    assert [path.name for path in (run / "checkpoints").glob("damaged-*")] == ["damaged-4"]
    chex.assert_trees_all_equal(final_state(run), final_state(whole / "1x4"))


PROGRAM = """\
  %permuted = (f32[16]{0}, f32[32]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %done = f32[32]{0} collective-permute-done(%permuted)
  %sum = f32[100]{0} all-reduce(%p0), replica_groups={{0,1}}
  %sums = (f32[10]{0}, bf16[20]{0}) all-reduce(%a, %b), replica_groups={{0,1}}
  %all = f32[4,640]{1,0:T(8,128)} all-gather(%p0), metadata={op_name="jit(step)/all_gather"}
  %flags = pred[300]{0} all-to-all(%p0)
  ROOT %out = f32[] constant(0)
"""


def test_transfers_of_a_program():
    assert transfers(PROGRAM) == {
        "all-gather": [4 * 640 * 4],
        "all-reduce": [400, 40 + 40],
        "all-to-all": [300],
        "collective-permute": [32 * 4],
    }


@pytest.mark.parametrize("mode", [pytest.param("pmap", marks=pytest.mark.long), "jit"])
def test_the_step_of_a_run(mode):
    preset = PRESETS["icons-sphere"].config
    softmax = dataclasses.replace(preset.loss, name="softmax")
    model = dataclasses.replace(preset.model, widths=(2, 2, 2, 8))
    sphere = dataclasses.replace(preset, loss=softmax, model=model)
    devices = jax.devices()
    step = compile_step(sphere, devices, mode=mode)
    assert (step.kind, step.batch_size, step.num_classes) == ("cpu", 128, 179)
    arguments, temporaries, *_ = step.memory.values()
    assert 128 // len(devices) * (32 * 32 + 4) < arguments < 1e6
    assert temporaries > 0
    assert step.flops > 1e6
    assert step.fits is None
    report = "\n".join(compilation_lines(step))
    assert "How much memory a cpu has is not known here." in report
    assert "| all-reduce" in report


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_what_fits(more, fits):
    memory = {"arguments": 2**30, "temporary arrays": 15 * 2**30 + more}
    step = CompiledStep("TPU v5 lite", 128, 100, memory, 1e9, {})
    assert step.fits is fits
    assert ("The step does not fit." in compilation_lines(step)) is not fits


def test_a_topology_that_cannot_be_described(capsys):
    with pytest.raises(ConfigError, match=r"TPU topology 'v99:1x1' cannot be described"):
        tpu_devices("v99:1x1")
    assert main(["compile", "icons", "--topology", "v99:1x1"]) == 2
    assert 'pip install -e ".[tpu]"' in capsys.readouterr().err


@pytest.mark.slow
def test_a_tpu_topology(capsys):
    pytest.importorskip("libtpu")
    assert main(["compile", "icons", "--model.widths", "2", "2", "2", "32"]) == 0
    assert "TPU v5 lite, batch 128, 100 classes" in capsys.readouterr().out
