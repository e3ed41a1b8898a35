"""Devices: a run by `pmap` and `jit`, and a step compiled for machines that are not there."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import chex
import jax
import numpy as np
import pytest

from experiments.benchmark.compilation import compilation_lines, compile_step, transfers
from experiments.cli.main import main
from experiments.papers.presets import PRESETS
from experiments.run import plan_run, train_run
from experiments.training.parallel import data_parallel
from experiments.training.step import Batch
from tests.experiments.tiny_runs import TINY, final_state, metrics_without_clock
from tests.tolerances import FLOAT32


@pytest.mark.long
def test_a_run_by_pmap_goes_on_by_jit_and_ends_as_one_by_jit(tmp_path, folders):
    """Sums of float32 numbers in another order, over four steps."""
    config = dataclasses.replace(TINY, loss=dataclasses.replace(TINY.loss, name="sce"))
    runs = [tmp_path / name for name in ("jit", "both")]
    for run, mode in zip(runs, ("jit", "pmap"), strict=True):
        train_run(plan_run(config), run, folders, mode=mode)
    shutil.rmtree(runs[1] / "checkpoints" / "4")
    train_run(plan_run(config), runs[1], folders, mode="jit")
    chex.assert_trees_all_close(*map(metrics_without_clock, runs), rtol=32 * FLOAT32)
    both = {"rtol": 32 * FLOAT32, "atol": 32 * FLOAT32}
    chex.assert_trees_all_close(*map(final_state, runs), **both)


def test_the_step_of_jit_has_a_share_of_the_batch_and_the_whole_state():
    def add(state: Any, batch: Any) -> Any:
        return state + batch.sum(), batch * 2

    run, rows = data_parallel("jit", add), np.arange(24, dtype=np.float32).reshape(8, 3)
    state, batch = run.replicate(np.float32(1)), run.split(Batch(rows, ())).images
    assert [shard.data.shape for shard in batch.addressable_shards] == [(2, 3)] * 4
    assert state.sharding.is_fully_replicated
    state, doubled = run.step(state, batch)
    assert run.single(state) == 1 + rows.sum()
    np.testing.assert_array_equal(run.single(doubled), 2 * rows)


PROGRAM = """\
  %permuted = (f32[16]{0}, f32[32]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %done = f32[32]{0} collective-permute-done(%permuted)
  %sum = f32[100]{0} all-reduce(%p0), replica_groups={{0,1}}
  %sums = (f32[10]{0}, bf16[20]{0}) all-reduce(%a, %b), replica_groups={{0,1}}
  %begun = (f32[10]{0}, f32[20]{0}) all-reduce-start(%a, %b), replica_groups={{0,1}}
  %all = f32[4,640]{1,0:T(8,128)} all-gather(%p0), metadata={op_name="jit(step)/all_gather"}
  %flags = pred[300]{0} all-to-all(%p0)
  ROOT %out = f32[] constant(0)
"""


def test_transfers_of_a_program():
    assert transfers(PROGRAM) == {
        "all-gather": [4 * 640 * 4],
        "all-reduce": [400, 40 + 40, 40 + 80],
        "all-to-all": [300],
        "collective-permute": [32 * 4],
    }


@pytest.mark.parametrize(
    ("mode", "classes"), [pytest.param("pmap", 0, marks=pytest.mark.long), ("jit", 7)]
)
def test_the_step_of_a_run(mode, classes):
    preset = PRESETS["icons-sphere"].config
    softmax = dataclasses.replace(preset.loss, name="softmax")
    model = dataclasses.replace(preset.model, widths=(2, 2, 2, 8))
    sphere = dataclasses.replace(preset, loss=softmax, model=model)
    devices = jax.devices()
    step = compile_step(sphere, devices, mode=mode, classes=classes)
    assert (step.kind, step.batch_size, step.num_classes) == ("cpu", 128, classes or 179)
    arguments, temporaries, *_ = step.memory.values()
    assert 128 // len(devices) * (32 * 32 + 4) < arguments < 1e6
    assert temporaries > 0
    assert step.flops > 1e6
    report = "\n".join(compilation_lines(step))
    assert "How much memory a cpu has is not known here." in report
    assert "| all-reduce" in report
    # A byte more than a chip has does not fit.
    memory = {"arguments": 2**30, "temporary arrays": 15 * 2**30}
    for more, verdict in enumerate(("The step fits.", "The step does not fit.")):
        known = step._replace(kind="TPU v5 lite", memory=memory | {"the program": more})
        assert verdict in compilation_lines(known)


@pytest.mark.slow
def test_a_tpu_topology(capsys):
    pytest.importorskip("libtpu")
    assert main(["compile", "icons", "--model.widths", "2", "2", "2", "32"]) == 0
    assert "TPU v5 lite, batch 128, 100 classes" in capsys.readouterr().out
