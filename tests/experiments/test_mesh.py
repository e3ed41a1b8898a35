"""A classifier whose classes are spread over devices: the same numbers, never whole, never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from experiments.assembly import plan_run
from experiments.config import ModelConfig, OptimizerConfig
from experiments.protocols.few_shot import FewShotEvaluation
from experiments.protocols.instance import InstanceConfig
from experiments.runs import restore_run, train_run
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
def train(folders):
    def train(directory: Path, mesh: str, config: InstanceConfig = CONFIG) -> Path:
        train_run(plan_run(config), directory, folders, mode="jit", mesh_shape=mesh)
        return directory

    return train


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


@pytest.mark.parametrize("mesh", ["2x2", "1x4", "4x1"])
def test_a_run_resumes_on_any_mesh(tmp_path, train, whole, killed_after, mesh):
    killed_after(3, lambda: train(tmp_path, "1x4"))
    train(tmp_path, mesh)
    assert_close(tmp_path, whole / "1x4")
    if mesh == "1x4":
        chex.assert_trees_all_equal(*map(loss_and_state, (tmp_path, whole / mesh)))


def test_a_run_of_replicated_devices_resumes_with_its_classes_spread(
    tmp_path, train, whole, killed_after
):
    killed_after(3, lambda: train(tmp_path, "4x1"))
    train(tmp_path, "1x4")
    assert_close(tmp_path, whole / "1x4")


def test_a_flipped_bit_of_a_spread_leaf_is_found_and_the_checkpoint_before_is_used(
    tmp_path, train, whole
):
    train(tmp_path, "1x4")
    checkpoints = tmp_path / "checkpoints"
    files = [path for path in (checkpoints / "4" / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert restore_run(tmp_path, "latest").step == 2
    train(tmp_path, "1x4")
    assert [path.name for path in checkpoints.glob("damaged-*")] == ["damaged-4"]
    chex.assert_trees_all_equal(final_state(tmp_path), final_state(whole / "1x4"))
