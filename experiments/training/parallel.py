"""Steps over all devices, by `pmap` or by `jit` over a mesh; the batch is spread over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import jax_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.core.config import ParallelMode
from experiments.core.errors import ConfigError
from experiments.core.protocol import BATCH_AXIS
from experiments.training.step import Batch, Step


class DataParallel(NamedTuple):
    """How a step runs over devices."""

    replicate: Callable[[Any], Any]
    """Copies a tree to all devices."""
    split: Callable[[Batch], Any]
    """Spreads this process's rows of a batch over its devices."""
    step: jax.stages.Wrapped
    """From the state and a batch to the next state and the metrics."""
    single: Callable[[Any], Any]
    """One copy of a replicated tree, on one device."""


def axis_name(mode: ParallelMode) -> str | None:
    """Name of the mapped axis, for the step and its losses; None without one."""
    return BATCH_AXIS if mode == "pmap" else None


def check_batch_size(batch_size: int, num_devices: int) -> None:
    """Checks that a batch spreads evenly over the devices."""
    if batch_size % num_devices:
        raise ConfigError(
            f"a batch of {batch_size} does not spread evenly over {num_devices} devices; "
            f"choose a multiple of {num_devices}"
        )


def device_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of all devices, or of those given, for a step by `jit`."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (BATCH_AXIS,), (AxisType.Auto,), devices=devices)


def data_parallel(mode: ParallelMode, step: Step, mesh: Mesh | None = None) -> DataParallel:
    """Runs the pure `step` over the devices of a mesh, by default all.

    `pmap` maps it, built with `axis_name("pmap")`, over devices, each with its share of the batch.
    `jit` compiles the single-device step for global arrays.
    """
    if mode == "pmap":
        devices = None if mesh is None else mesh.devices.ravel().tolist()
        return DataParallel(
            replicate=jax_utils.replicate,
            split=lambda batch: jax.tree.map(_by_local_device, batch),
            step=jax.pmap(step, axis_name=BATCH_AXIS, donate_argnums=0, devices=devices),
            single=lambda tree: jax.tree.map(lambda leaf: leaf.addressable_data(0)[0], tree),
        )
    replicated, spread = _shardings(device_mesh() if mesh is None else mesh)

    def to_all(leaf):
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, replicated, lambda index: value[index])

    return DataParallel(
        replicate=lambda state: jax.tree.map(to_all, state),
        split=lambda batch: jax.tree.map(
            lambda rows: jax.make_array_from_process_local_data(spread, rows), batch
        ),
        step=jax.jit(step, donate_argnums=0, out_shardings=replicated),
        single=lambda tree: jax.tree.map(lambda leaf: leaf.addressable_data(0), tree),
    )


def lower(
    mode: ParallelMode, step: Step, state: Any, batch: Batch, mesh: Mesh
) -> jax.stages.Lowered:
    """The step of `data_parallel` for devices that this machine need not have, such as a pod's.

    State and batch, of all devices, are arrays or `jax.ShapeDtypeStruct`.
    """
    spread_step = data_parallel(mode, step, mesh).step

    def shaped(tree: Any, shape_of: Callable[[Any], tuple[int, ...]], sharding: Any = None) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(shape_of(leaf), leaf.dtype, sharding=sharding), tree
        )

    if mode == "pmap":
        num = mesh.size
        stacked = shaped(state, lambda leaf: (num, *leaf.shape))
        split = shaped(batch, lambda rows: (num, rows.shape[0] // num, *rows.shape[1:]))
        return spread_step.lower(stacked, split)
    replicated, spread = _shardings(mesh)
    placed = [
        shaped(tree, lambda leaf: leaf.shape, own)
        for tree, own in ((state, replicated), (batch, spread))
    ]
    traced = spread_step.trace(*placed)
    return traced.lower(lowering_platforms=(mesh.devices.flat[0].platform,))


def _shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """A copy on each device, and rows spread over the devices."""
    everywhere, rows = PartitionSpec(), PartitionSpec(BATCH_AXIS)
    return NamedSharding(mesh, everywhere), NamedSharding(mesh, rows)


def _by_local_device(rows: np.ndarray) -> np.ndarray:
    devices = jax.local_device_count()
    return rows.reshape(devices, rows.shape[0] // devices, *rows.shape[1:])
