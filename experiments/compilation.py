"""A run's training step, compiled for devices that this machine need not have."""

from __future__ import annotations

import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from experiments.config import ParallelMode, TrainConfig, batch_size_of
from experiments.contracts import Photographs
from experiments.data.builders import builder_class, is_multi_label
from experiments.errors import ConfigError
from experiments.reporting.markdown import table
from experiments.runs import Plan, build_network, plan_run
from experiments.training import parallel
from experiments.training.step import Batch, build_step

MEMORY = {
    "TPU v2": 8,
    "TPU v3": 16,
    "TPU v4": 16,
    "TPU v5 lite": 16,
    "TPU v5": 95,
    "TPU v6 lite": 32,
}
"""GiB of memory of a device, by the kind that JAX calls it. A chip of v2 to v4 has two devices."""

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s4": 1, "u4": 1, "bf16": 2, "c64": 8, "c128": 16}
_IMAGES_PER_CLASS = 500
"""Of a data set that is not at hand. The compiled step does not depend on it."""
_EPOCHS = 50
"""Of the run, for the same reason."""


class Collective(NamedTuple):
    """Transfers of one kind between devices, in one step of one device."""

    kind: str
    number: int
    bytes: int


class LargeArray(NamedTuple):
    """An array of the compiled program."""

    shape: str
    bytes: int
    operation: str
    """What computes it, by the names of JAX's functions."""


class CompiledStep(NamedTuple):
    """What one device computes and holds in one training step."""

    kind: str
    """The kind of device."""
    num_devices: int
    batch_size: int
    """Of all devices."""
    num_classes: int
    argument_bytes: int
    """The state and the device's share of the batch. The next state replaces the state."""
    temporary_bytes: int
    output_bytes: int
    """Results that replace no argument."""
    program_bytes: int
    flops: float
    bytes_accessed: float
    collectives: list[Collective]
    """In loops, they are counted once."""
    largest: list[LargeArray]
    seconds: float
    """Of compilation."""

    @property
    def total_bytes(self) -> int:
        """Memory that a step needs."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes + self.program_bytes

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a device; None where it is not known."""
        gibibytes = MEMORY.get(self.kind)
        return None if gibibytes is None else gibibytes * 2**30

    @property
    def fits(self) -> bool | None:
        """Whether a step fits into the memory of a device; None where that is not known."""
        memory = self.memory_bytes
        return None if memory is None else self.total_bytes <= memory


class DoesNotFitError(Exception):
    """The compiler found that the program needs more memory than a device has."""


def tpu_devices(topology: str) -> Sequence[Any]:
    """The devices of a TPU topology, which this machine need not have.

    Args:
      topology: Such as v5e:16x16, which has 256 chips.

    Raises:
      ConfigError: libtpu is not installed, or knows no such topology.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # No TPU is used, so several commands may compile at once.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # Several, from JAX and from libtpu.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"TPU topology {topology!r} cannot be described ({text}); it needs "
            'pip install -e ".[tpu]", and a name such as v5e:2x2 or v5e:16x16'
        ) from error


def compile_step(
    config: TrainConfig,
    devices: Sequence[Any],
    *,
    mode: ParallelMode = "pmap",
    mesh_shape: str = "",
    classes: int = 0,
) -> CompiledStep:
    """Compiles the training step of a run; needs no data.

    Args:
      config: The run.
      devices: Such as `tpu_devices(...)`, or `jax.devices()`.
      mode, mesh_shape: As in `train_run`.
      classes: Number of classes to assume; 0: that of the data set.

    Raises:
      ConfigError: The options do not fit each other or the devices.
      DoesNotFitError: The compiler found too little memory.
    """
    plan = plan_run(config, num_devices=len(devices))
    plan.protocol.check_mode(mode)
    axis_name = parallel.axis_name(mode)
    mesh = parallel.device_mesh(mode, mesh_shape, devices)
    if not classes and plan.protocol.classes_are_images:
        raise ConfigError(
            f"every training image is a class of protocol {config.protocol}, and no data is read "
            "here; give their number, such as --classes 1000000"
        )
    classes = classes or num_classes(plan)
    network = build_network(
        plan,
        np.full(classes, _IMAGES_PER_CLASS),
        steps_per_epoch=max(config.steps // _EPOCHS, 1),
        axis_name=axis_name,
        mesh=mesh if mode == "jit" else None,
        abstract=True,
    )
    step = build_step(
        network.graphdef,
        network.objective,
        network.optimizer,
        config.data,
        key=jax.random.key(config.seed),
        axis_name=axis_name,
    )
    batch_size = batch_size_of(config.sampling.strategy, config.sampling.batch_size)
    started = time.monotonic()
    # The losses choose the sizes of their tiles for the default device.
    with jax.default_device(devices[0]):
        batch = _batch(plan, batch_size, classes)
        lowered = parallel.lower(mode, step, network.state, batch, mesh)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise DoesNotFitError(str(error)) from error
        raise
    seconds = time.monotonic() - started
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    if memory is None:
        raise ConfigError(f"the compiler for {devices[0].device_kind} states no memory")
    program = compiled.as_text() or ""
    return CompiledStep(
        kind=devices[0].device_kind,
        num_devices=len(devices),
        batch_size=batch_size,
        num_classes=classes,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        program_bytes=memory.generated_code_size_in_bytes,
        flops=cost.get("flops", math.nan),
        bytes_accessed=cost.get("bytes accessed", math.nan),
        collectives=collectives(program),
        largest=largest_arrays(program, 5),
        seconds=seconds,
    )


def num_classes(plan: Plan) -> int:
    """Classes to train on, as the data set's builder declares them."""
    classes = builder_class(plan.config.data.name).SPEC.classes
    split, data = plan.protocol.splits[0], vars(plan.config.data)
    # Classification uses all classes of a few-shot set, protocol E if novel ones are of another.
    every = split not in classes or data.get("novel")
    chosen = data.get("classes") or data.get("base_classes")
    return chosen or (sum(classes.values()) if every else classes[split])


def _batch(plan: Plan, batch_size: int, classes: int) -> Batch:
    name = plan.config.data.name
    spec = builder_class(name).SPEC
    images = jax.ShapeDtypeStruct((batch_size, *spec.array_shape), jnp.uint8)
    if spec.whole:
        images = Photographs(images, jax.ShapeDtypeStruct((batch_size, 2), jnp.int32))
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    if is_multi_label(name):
        labels = jax.ShapeDtypeStruct((batch_size, classes), jnp.int8)
    return Batch(images, labels)


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?P<type>\(.*?\)|\S+) (?P<name>[\w-]+)\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<shape>[\d,]*)\]")


def collectives(program: str) -> list[Collective]:
    """The transfers in the text of a compiled program, by kind."""
    found: dict[str, list[int]] = defaultdict(list)
    for line in program.splitlines():
        if (instruction := _INSTRUCTION.match(line)) is None:
            continue
        kind = instruction["name"].removesuffix("-start")
        if kind in _COLLECTIVES:
            sizes = _sizes(instruction["type"])
            # What begins a transfer has its operands beside its results.
            begins = instruction["name"] != kind and kind != "all-reduce"
            found[kind].append(max(sizes, default=0) if begins else sum(sizes))
    return [Collective(kind, len(sizes), sum(sizes)) for kind, sizes in sorted(found.items())]


def largest_arrays(program: str, count: int) -> list[LargeArray]:
    """The largest different arrays in the text of a compiled program, outside of fusions."""
    found: dict[tuple[str, str], int] = {}
    inside_fusion = False
    for line in program.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            inside_fusion = "fused_computation" in line.split("(")[0]
        instruction = _INSTRUCTION.match(line)
        if inside_fusion or instruction is None or instruction["type"].startswith("("):
            continue
        if instruction["name"] in ("parameter", "get-tuple-element", "bitcast", "constant"):
            continue
        if array := _ARRAY.match(instruction["type"]):
            named = re.search(r'op_name="([^"]*)"', line)
            shape = f"{array['dtype']}[{array['shape']}]"
            operation = named[1] if named else instruction["name"]
            found[shape, operation] = _sizes(instruction["type"])[0]
    order = sorted(found.items(), key=lambda item: -item[1])
    return [LargeArray(shape, size, name) for (shape, name), size in order[:count]]


def _sizes(of_type: str) -> list[int]:
    return [
        math.prod(int(size) for size in array["shape"].split(",") if size)
        * _dtype_bytes(array["dtype"])
        for array in _ARRAY.finditer(of_type)
    ]


def _dtype_bytes(name: str) -> int:
    if name in _BYTES:
        return _BYTES[name]
    bits = re.match(r"[a-z]+(\d+)", name)
    return max(int(bits[1]) // 8, 1) if bits else 0


def compilation_lines(step: CompiledStep) -> list[str]:
    """The report, in Markdown."""
    memory = step.memory_bytes
    rows = [
        ("memory of a chip", None if memory is None else _megabytes(memory)),
        ("needed", _megabytes(step.total_bytes)),
        ("arguments: the state and a share of the batch", _megabytes(step.argument_bytes)),
        ("temporary arrays", _megabytes(step.temporary_bytes)),
        ("results beside the next state", _megabytes(step.output_bytes)),
        ("the program", _megabytes(step.program_bytes)),
        ("floating-point operations", f"{step.flops / 1e9:,.1f} GFLOP"),
        ("bytes read and written", _megabytes(step.bytes_accessed)),
    ]
    verdict = {
        True: "The step fits.",
        False: "The step does not fit.",
        None: f"How much memory a {step.kind} has is not known here.",
    }[step.fits]
    lines = [
        f"{step.num_devices} × {step.kind}, batch {step.batch_size:,}, {step.num_classes:,} "
        f"classes; compiled in {step.seconds:.0f} s.",
        verdict,
        "",
        *table(["one chip, one step", ""], rows),
        "",
    ]
    if step.collectives:
        lines += table(
            ["transfers between chips", "number", "size"],
            [(kind, number, _megabytes(size)) for kind, number, size in step.collectives],
        )
        lines += ["", "Transfers in loops are counted once.", ""]
    return lines + table(
        ["largest arrays", "size", "computed by"],
        [(shape, _megabytes(size), name) for shape, size, name in step.largest],
    )


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.2f} MB" if size < 1e7 else f"{size / 1e6:,.0f} MB"
