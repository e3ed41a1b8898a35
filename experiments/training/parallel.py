"""Steps over all devices, by `pmap` or by `jit` over a mesh; the batch is spread over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import jax_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.core.config import ParallelMode
from experiments.core.protocol import BATCH_AXIS
from experiments.training.step import Batch, Step


class DataParallel(NamedTuple):
    """How a step runs over devices."""

    replicate: Callable[[Any], Any]  # Copies a tree to all devices.
    split: Callable[[Batch], Any]  # Spreads this process's rows of a batch over its devices.
    step: jax.stages.Wrapped  # From the state and a batch to the next state and the metrics.
    single: Callable[[Any], Any]  # One copy of a replicated tree, on one device.


def axis_name(mode: ParallelMode) -> str | None:
    """Name of the mapped axis, for the step and its losses; None without one."""
    return BATCH_AXIS if mode == "pmap" else None


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
        local = jax.local_device_count()
        devices = None if mesh is None else mesh.devices.ravel().tolist()
        return DataParallel(
            replicate=jax_utils.replicate,
            split=partial(jax.tree.map, lambda rows: rows.reshape(local, -1, *rows.shape[1:])),
            step=jax.pmap(step, axis_name=BATCH_AXIS, donate_argnums=0, devices=devices),
            single=partial(jax.tree.map, lambda leaf: leaf.addressable_data(0)[0]),
        )
    replicated, spread = _shardings(device_mesh() if mesh is None else mesh)

    def place(sharding: NamedSharding, tree: Any) -> Any:
        make = jax.make_array_from_process_local_data
        return jax.tree.map(lambda leaf: make(sharding, np.asarray(leaf)), tree)

    return DataParallel(
        replicate=partial(place, replicated),
        split=partial(place, spread),
        step=jax.jit(step, donate_argnums=0, out_shardings=replicated),
        single=partial(jax.tree.map, lambda leaf: leaf.addressable_data(0)),
    )


def lower(
    mode: ParallelMode, step: Step, state: Any, batch: Batch, mesh: Mesh
) -> jax.stages.Lowered:
    """The step of `data_parallel` for devices that this machine need not have, such as a pod's.

    State and batch, of all devices, are arrays or `jax.ShapeDtypeStruct`.
    """
    spread_step, num = data_parallel(mode, step, mesh).step, mesh.size

    def shaped(leaf: Any, *shape: int, sharding: Any = None) -> Any:
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    if mode == "pmap":
        state = jax.tree.map(lambda x: shaped(x, num, *x.shape), state)
        batch = jax.tree.map(lambda x: shaped(x, num, x.shape[0] // num, *x.shape[1:]), batch)
        return spread_step.lower(state, batch)
    everywhere, spread = _shardings(mesh)
    state = jax.tree.map(lambda x: shaped(x, *x.shape, sharding=everywhere), state)
    batch = jax.tree.map(lambda x: shaped(x, *x.shape, sharding=spread), batch)
    platforms = (mesh.devices.flat[0].platform,)
    return spread_step.trace(state, batch).lower(lowering_platforms=platforms)


def _shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """A copy on each device, and rows spread over the devices."""
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(BATCH_AXIS))
