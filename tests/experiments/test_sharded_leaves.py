"""A classifier whose classes are spread over devices: the same numbers, never whole, never lost."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from experiments.config import ModelConfig, OptimizerConfig
from experiments.protocols.few_shot import FewShotEvaluation
from experiments.protocols.instance import InstanceConfig
from experiments.assembly import plan_run
from experiments.restored import restore_run
from experiments.runs import train_run
from experiments.training import sharded_leaves
from experiments.training.checkpoints import Checkpoints
from experiments.training.sharded_leaves import ShardsError, StoredLeaf
from tests.experiments.test_processes import finish, saved_steps, two_processes, wait_for_step
from tests.experiments.tiny_runs import TINY, config_of, final_state, metrics_without_clock

KERNEL = "params/classifier/kernel"
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


def test_no_file_and_no_array_has_all_classes(tmp_path, train, monkeypatch):
    read, written = [], []

    def spy(name, log, shape_of):
        real = getattr(sharded_leaves, name)

        def call(*args):
            result = real(*args)
            log.append(shape_of(args, result))
            return result

        monkeypatch.setattr(sharded_leaves, name, call)

    spy("_write", written, lambda args, result: args[2].shape)
    spy("_classes", read, lambda args, result: args[0].shape)
    train(tmp_path, "1x4", dataclasses.replace(CONFIG, steps=2))
    train(tmp_path, "1x4", dataclasses.replace(CONFIG, steps=2))
    assert set(written) == {(32, 1163), (32, 1161)}
    assert set(read) <= set(written)
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert sorted(checkpoints._header(2)["shards"]) == [
            "opt_state/1/0/trace/classifier/kernel",
            KERNEL,
        ]
        assert not any("classifier" in name for name in checkpoints._header(2)["leaves"])


def shard_files(directory: Path, step: int) -> list[Path]:
    folder = directory / "checkpoints" / f"{step}.shards"
    return sorted(path for path in folder.iterdir() if path.suffix != ".json")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_shards_are_found_and_the_checkpoint_before_is_used(tmp_path, train, whole, damage):
    train(tmp_path, "1x4")
    for path in shard_files(tmp_path, 4)[-1:]:
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        if damage == "flip":
            path.write_bytes(content)
        elif damage == "truncate":
            path.write_bytes(content[:-1])
        else:
            path.unlink()
    assert restore_run(tmp_path, "latest").step == 2
    train(tmp_path, "1x4")
    checkpoints = tmp_path / "checkpoints"
    assert {path.name for path in checkpoints.glob("damaged-*")} == {
        "damaged-4",
        "damaged-4.shards",
    }
    chex.assert_trees_all_equal(final_state(tmp_path), final_state(whole / "1x4"))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", ["write_shards", "collect_shards"])
def test_a_kill_while_shards_are_written_leaves_the_checkpoints_before(
    tmp_path, train, whole, monkeypatch, at
):
    from experiments.training import recorder

    real = getattr(recorder, at)

    def dies(path, *args):
        found = real(path, *args)
        if path.name == "4":
            raise Killed
        return found

    with monkeypatch.context() as patch:
        patch.setattr(recorder, at, dies)
        with pytest.raises(Killed):
            train(tmp_path, "1x4")
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / "4.shards").exists()
    assert restore_run(tmp_path, "latest").step == 2
    train(tmp_path, "1x4")
    assert sorted(p.name for p in checkpoints.iterdir()) == ["2", "2.shards", "4", "4.shards"]
    chex.assert_trees_all_equal(final_state(tmp_path), final_state(whole / "1x4"))


def test_shards_of_checkpoints_that_are_no_longer_kept_are_removed(tmp_path, train):
    train(tmp_path, "1x4", dataclasses.replace(CONFIG, steps=5, validate_every=1))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    steps = {name for name in names if name.isdecimal()}
    assert {"4", "5"} <= steps
    assert len(steps) <= 3
    assert names == steps | {f"{step}.shards" for step in steps}


def test_shards_that_another_process_has_not_written(tmp_path, train, monkeypatch):
    train(tmp_path, "1x4")
    checkpoint = tmp_path / "checkpoints" / "4"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ShardsError, match="process 1 has not written its shards"):
        sharded_leaves.collect_shards(checkpoint)
    monkeypatch.undo()
    listed = checkpoint.with_name("4.shards") / "process-0.json"
    leaves = json.loads(listed.read_text())
    del leaves[KERNEL]["shards"][1]
    listed.write_text(json.dumps(leaves))
    with pytest.raises(ShardsError, match=f"do not cover the classes of {KERNEL}"):
        sharded_leaves.collect_shards(checkpoint)


def test_a_stored_leaf_is_read_when_it_is_used(whole):
    kernel = restore_run(whole / "1x4", "latest").state.params["classifier"]["kernel"]
    assert isinstance(kernel, StoredLeaf)
    np.testing.assert_array_equal(kernel.read(1000, 1200), np.asarray(kernel)[:, 1000:1200])


@pytest.mark.slow
def test_killed_processes_resume_with_the_classes_on_both(tmp_path, folders, compilation_cache):
    command = [
        *("-m", "experiments", "train", "icons-instances", "--distributed"),
        *("--parallel", "jit", "--mesh", "1x4", "--data-dir", str(folders.data_dir)),
        *("--sampling.batch-size", "16", "--model.widths", "4", "4", "4", "8"),
        *("--steps", "30", "--validate-every", "5", "--log-every", "1"),
        *("--evaluation.validation-episodes", "20", "--evaluation.episodes", "20"),
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with two_processes([*command, "--directory", str(whole)], compilation_cache) as processes:
        finish(processes, 0)
    lists = [
        json.loads((whole / "checkpoints" / "30.shards" / f"process-{rank}.json").read_text())
        for rank in (0, 1)
    ]
    starts = [[shard["start"] for shard in found[KERNEL]["shards"]] for found in lists]
    assert starts == [[0, 1163], [2326, 3489]]

    with two_processes([*command, "--directory", str(cut)], compilation_cache) as processes:
        wait_for_step(cut, 7, processes[0])
        for process in processes:
            process.send_signal(signal.SIGKILL)
        finish(processes, -signal.SIGKILL)
    assert 5 <= saved_steps(cut)[-1] < 30
    with two_processes([*command, "--directory", str(cut)], compilation_cache) as processes:
        finish(processes, 0)
    chex.assert_trees_all_equal(*map(loss_and_state, (cut, whole)))

    # One process reads what two have written.
    one = tmp_path / "one"
    shutil.copytree(whole, one)
    shutil.rmtree(one / "checkpoints" / "30")
    assert saved_steps(one)[-1] == 25
    train_run(plan_run(config_of(one)), one, folders, mode="jit", mesh_shape="2x2")
    chex.assert_trees_all_close(final_state(one), final_state(whole), atol=1e-3)
