"""A step compiled ahead of its machine: what it needs, and what it says where it cannot be."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from experiments.cli.main import main
from experiments.compilation import (
    Collective,
    CompiledStep,
    LargeArray,
    collectives,
    compilation_lines,
    compile_step,
    largest_arrays,
    tpu_devices,
)
from experiments.errors import ConfigError
from experiments.presets import PRESETS

PROGRAM = """\
HloModule jit_step

%fused_computation.1 (p: f32[512]) -> f32[512] {
  ROOT %exp.1 = f32[9000]{0} exponential(%p), metadata={op_name="hidden"}
}

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %permuted = (f32[16]{0}, f32[32]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  ROOT %t = (s32[], f32[8]{0}) tuple(%a, %b)
}

ENTRY %main (p0: f32[256,640]) -> f32[] {
  %p0 = f32[256,640]{1,0} parameter(0)
  %sum = f32[100]{0} all-reduce(%p0), replica_groups={{0,1}}
  %sums = (f32[10]{0}, bf16[20]{0}) all-reduce(%a, %b), replica_groups={{0,1}}
  %all = f32[4,640]{1,0:T(8,128)} all-gather(%p0), metadata={op_name="jit(step)/all_gather"}
  %big = pred[300,100]{1,0} compare(%p0, %p0), direction=EQ
  %wide = bf16[64,1000]{1,0} fusion(%p0), metadata={op_name="jit(f)/mul"}
  ROOT %out = f32[] constant(0)
}
"""


def test_transfers_of_a_program():
    assert collectives(PROGRAM) == [
        Collective("all-gather", 1, 4 * 640 * 4),
        Collective("all-reduce", 2, 400 + 40 + 40),
        Collective("collective-permute", 1, 32 * 4),
    ]


def test_largest_arrays_of_a_program():
    assert largest_arrays(PROGRAM, 3) == [
        LargeArray("bf16[64,1000]", 128_000, "jit(f)/mul"),
        LargeArray("pred[300,100]", 30_000, "compare"),
        LargeArray("f32[4,640]", 10_240, "jit(step)/all_gather"),
    ]


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
    assert (step.num_devices, step.batch_size, step.num_classes) == (len(devices), 128, 179)
    share = 128 // len(devices) * (32 * 32 + 4)
    assert share < step.argument_bytes < 1e6
    assert step.temporary_bytes > 0
    assert step.flops > 1e6
    assert "all-reduce" in {transfer.kind for transfer in step.collectives}
    assert len(step.largest) == 5
    assert step.memory_bytes is step.fits is None
    report = "\n".join(compilation_lines(step))
    assert "How much memory a cpu has is not known here." in report
    assert "| all-reduce" in report


def test_a_batch_that_does_not_spread_is_refused(config):
    with pytest.raises(ConfigError, match="a batch of 128 does not spread evenly over 3 devices"):
        compile_step(config, jax.devices()[:1] * 3)


def step_of(kind: str, temporary_bytes: int) -> CompiledStep:
    sizes = {"argument_bytes": 2**30, "output_bytes": 0, "program_bytes": 0}
    return CompiledStep(
        kind, 4, 128, 100, temporary_bytes=temporary_bytes, flops=1e9, bytes_accessed=1e6,
        collectives=[], largest=[], seconds=1.0, **sizes,
    )  # fmt: skip


def test_what_fits():
    assert step_of("TPU v5 lite", 15 * 2**30).fits
    larger = step_of("TPU v5 lite", 15 * 2**30 + 1)
    assert larger.fits is False
    assert "The step does not fit." in compilation_lines(larger)
    assert "transfers" not in "\n".join(compilation_lines(larger))


def test_a_topology_that_cannot_be_described(capsys):
    with pytest.raises(ConfigError, match=r"TPU topology 'v99:1x1' cannot be described"):
        tpu_devices("v99:1x1")
    assert main(["compile", "icons", "--topology", "v99:1x1"]) == 2
    assert 'pip install -e ".[tpu]"' in capsys.readouterr().err


@pytest.mark.slow
def test_a_tpu_topology(capsys):
    pytest.importorskip("libtpu")
    assert main(["compile", "icons", "--model.widths", "2", "2", "2", "32"]) == 0
    assert "4 × TPU v5 lite, batch 128, 100 classes" in capsys.readouterr().out
