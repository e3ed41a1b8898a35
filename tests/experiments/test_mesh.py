"""A classifier whose classes are spread over devices: the same numbers, never whole, never lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from experiments.assembly import plan_run
from experiments.config import ModelConfig, OptimizerConfig
from experiments.errors import ConfigError
from experiments.protocols.few_shot import FewShotEvaluation
from experiments.protocols.instance import InstanceConfig
from experiments.runs import evaluate_run, train_run
from tests.experiments.tiny_runs import TINY, final_state, metrics_without_clock

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


def loss_and_state(directory: Path) -> tuple[Any, Any]:
    return metrics_without_clock(directory), final_state(directory)


def assert_close(one: Path, other: Path) -> None:
    """Sums of float32 numbers in another order: of 16 images and 4,650 classes, over four steps."""
    (metrics, state), (other_metrics, other_state) = map(loss_and_state, (one, other))
    chex.assert_trees_all_close(metrics, other_metrics, rtol=1e-4)
    chex.assert_trees_all_close(state, other_state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mesh", ["2x2", "1x4"])
def test_a_mesh_trains_as_replicated_devices(whole, mesh):
    assert_close(whole / mesh, whole / "4x1")
    state = final_state(whole / mesh)
    assert state.params["classifier"]["kernel"].shape == (32, CLASSES)
    # The first step has a margin on untrained cosines: none of the classes that fill up counts.
    assert np.abs(state.params["classifier"]["kernel"]).min() > 0


def test_a_run_of_classes_that_are_images_is_evaluated_on_novel_classes(whole, folders):
    _, report = evaluate_run(whole / "2x2", folders)
    assert report["label"] == "Instances, cosine softmax"
    assert report["metrics"][0]["name"] == "1-shot accuracy"
    with pytest.raises(ConfigError, match="5 ways, 1 shots and 15 queries"):
        evaluate_run(whole / "2x2", folders, split="base")


@pytest.mark.parametrize(("before", "mesh"), [("1x4", "1x4"), ("1x4", "2x2"), ("4x1", "1x4")])
def test_a_run_resumes_on_any_mesh(whole, resumed, before, mesh):
    run = resumed(before, mesh, shutil.rmtree)
    assert_close(run, whole / "1x4")
    if before == mesh:
        chex.assert_trees_all_equal(*map(loss_and_state, (run, whole / mesh)))


def test_a_flipped_bit_of_a_spread_leaf_is_found_and_the_checkpoint_before_is_used(whole, resumed):
    def flip(checkpoint: Path) -> None:
        files = [path for path in (checkpoint / "state").rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)

    run = resumed("1x4", "1x4", flip)
    assert [path.name for path in (run / "checkpoints").glob("damaged-*")] == ["damaged-4"]
    chex.assert_trees_all_equal(final_state(run), final_state(whole / "1x4"))
