"""A run's training step, compiled for devices that this machine need not have."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.core.config import ParallelMode, TrainConfig
from experiments.core.protocol import Photographs
from experiments.data.sampling import batch_size_of
from experiments.datasets import lookup
from experiments.reporting.markdown import table
from experiments.run import Plan, build_learner, plan_run
from experiments.training import parallel
from experiments.training.step import Batch, build_step

MEMORY = {
    **{"TPU v2": 8, "TPU v3": 16, "TPU v4": 16},
    **{"TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32},
}
"""GiB of memory of a device, by the kind that JAX calls it. A chip of v2 to v4 has two devices."""


class CompiledStep(NamedTuple):
    """What one device computes and holds in one training step."""

    kind: str  # Of device.
    batch_size: int  # Of all devices.
    num_classes: int
    memory: dict[str, int]  # Bytes, by what needs them. The next state replaces the state.
    flops: float
    transfers: dict[str, list[int]]  # The bytes of every transfer between devices, by kind.

    @property
    def fits(self) -> bool | None:
        """Whether a step fits into the memory of a device; None where that is not known."""
        known = MEMORY.get(self.kind)
        return None if known is None else sum(self.memory.values()) <= known * 2**30


def compile_step(
    config: TrainConfig,
    devices: Sequence[Any],
    *,
    mode: ParallelMode = "pmap",
    classes: int = 0,
) -> CompiledStep:
    """Compiles the training step of a run for devices such as `tpu_devices(...)`; reads no data.

    The mode is as in `train_run`; classes are by default those of the data set. A
    `JaxRuntimeError` of RESOURCE_EXHAUSTED says that memory is too small.
    """
    plan = plan_run(config, num_devices=len(devices))
    axis_name, mesh = parallel.axis_name(mode), parallel.device_mesh(devices)
    classes = classes or num_classes(plan)
    # The compiled step depends neither on the images of a class nor on the epochs.
    graphdef, objective, optimizer, state = build_learner(
        plan,
        np.full(classes, 500),
        steps_per_epoch=max(config.steps // 50, 1),
        axis_name=axis_name,
        mesh=mesh if mode == "jit" else None,
        abstract=True,
    )
    config, key = plan.config, jax.random.key(config.seed)
    step = build_step(graphdef, objective, optimizer, config.data, key=key, axis_name=axis_name)
    batch_size = batch_size_of(config.sampling.strategy, config.sampling.batch_size)
    dataset = lookup(config.data.name)
    images: Any = jax.ShapeDtypeStruct((batch_size, *dataset.array_shape), np.uint8)
    if dataset.whole:
        images = Photographs(images, jax.ShapeDtypeStruct((batch_size, 2), np.int32))
    labels: Any = jax.ShapeDtypeStruct((batch_size,), np.int32)
    if dataset.multi_label:
        labels = jax.ShapeDtypeStruct((batch_size, classes), np.int8)
    # The losses choose the sizes of their tiles for the default device.
    with jax.default_device(devices[0]):
        compiled = parallel.lower(mode, step, state, Batch(images, labels), mesh).compile()
    sizes: Any = compiled.memory_analysis()
    memory = {
        "arguments: the state and a share of the batch": sizes.argument_size_in_bytes,
        "temporary arrays": sizes.temp_size_in_bytes,
        "results beside the next state": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "the program": sizes.generated_code_size_in_bytes,
    }
    flops = (compiled.cost_analysis() or {}).get("flops", math.nan)
    moved = transfers(compiled.as_text() or "")
    return CompiledStep(devices[0].device_kind, batch_size, classes, memory, flops, moved)


def num_classes(plan: Plan) -> int:
    """Classes to train on, as the data set declares them."""
    classes = lookup(plan.config.data.name).classes
    split, data = plan.protocol.splits[0], vars(plan.config.data)
    # Classification uses all classes of a few-shot set, protocol E if novel ones are of another.
    every = split not in classes or data.get("novel")
    chosen = data.get("classes") or data.get("base_classes")
    return chosen or (sum(classes.values()) if every else classes[split])


_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_TRANSFER = re.compile(rf" = (\(.*?\)|\S+) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


def transfers(program: str) -> dict[str, list[int]]:
    """The bytes of every transfer in the text of a compiled program, by kind."""
    found = defaultdict(list)
    for results, kind, start in _TRANSFER.findall(program):
        sizes = [
            math.prod(int(size) for size in shape.split(",") if size) * int(bits or 8) // 8
            for bits, shape in _ARRAY.findall(results)
        ]
        # What starts a transfer has its operands beside its results, except for all-reduce.
        found[kind].append(max(sizes) if start and kind != "all-reduce" else sum(sizes))
    return dict(sorted(found.items()))


def compilation_lines(step: CompiledStep) -> list[str]:
    """The report, in Markdown."""
    known, unknown = MEMORY.get(step.kind), f"How much memory a {step.kind} has is not known here."
    verdict = {True: "The step fits.", False: "The step does not fit.", None: unknown}[step.fits]
    rows = [
        ("memory of a chip", known and _megabytes(known * 2**30)),
        ("needed", _megabytes(sum(step.memory.values()))),
        *((name, _megabytes(size)) for name, size in step.memory.items()),
        ("floating-point operations", f"{step.flops / 1e9:,.1f} GFLOP"),
    ]
    moved = [(kind, len(each), _megabytes(sum(each))) for kind, each in step.transfers.items()]
    return [
        f"{step.kind}, batch {step.batch_size:,}, {step.num_classes:,} classes.",
        verdict,
        "",
        *table(["one chip, one step", "value"], rows),
        "",
        *table(["transfers between chips, in loops counted once", "number", "size"], moved),
    ]


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.2f} MB" if size < 1e7 else f"{size / 1e6:,.0f} MB"
