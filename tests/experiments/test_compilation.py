"""A step compiled ahead of its machine: what it needs, and what it says where it cannot be."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from experiments.cli.main import main
from experiments.compilation import (
    CompiledStep,
    compilation_lines,
    compile_step,
    tpu_devices,
    transfers,
)
from experiments.errors import ConfigError
from experiments.presets import PRESETS

PROGRAM = """\
%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %permuted = (f32[16]{0}, f32[32]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %done = f32[32]{0} collective-permute-done(%permuted)
  ROOT %t = (s32[], f32[8]{0}) tuple(%a, %b)
}

ENTRY %main (p0: f32[256,640]) -> f32[] {
  %sum = f32[100]{0} all-reduce(%p0), replica_groups={{0,1}}
  %sums = (f32[10]{0}, bf16[20]{0}) all-reduce(%a, %b), replica_groups={{0,1}}
  %all = f32[4,640]{1,0:T(8,128)} all-gather(%p0), metadata={op_name="jit(step)/all_gather"}
  %flags = pred[300]{0} all-to-all(%p0)
  ROOT %out = f32[] constant(0)
}
"""


def test_transfers_of_a_program():
    assert transfers(PROGRAM) == {
        "all-gather": [4 * 640 * 4],
        "all-reduce": [400, 40 + 40],
        "all-to-all": [300],
        "collective-permute": [32 * 4],
    }


@pytest.fixture
def config():
    preset = PRESETS["icons-sphere"].config
    softmax = dataclasses.replace(preset.loss, name="softmax")
    model = dataclasses.replace(preset.model, widths=(2, 2, 2, 8))
    return dataclasses.replace(preset, loss=softmax, model=model)


@pytest.mark.parametrize("mode", ["pmap", "jit"])
def test_the_step_of_a_run(config, mode):
    devices = jax.devices()
    step = compile_step(config, devices, mode=mode)
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
