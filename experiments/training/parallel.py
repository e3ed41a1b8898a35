"""Data parallelism over all devices: the one module that knows `pmap` from a sharded `jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import jax_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments.config import ParallelMode
from experiments.errors import ConfigError
from experiments.training.step import Batch, Step

AXIS = "batch"


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
    return AXIS if mode == "pmap" else None


def check_batch_size(batch_size: int, num_devices: int) -> None:
    """Checks that a batch spreads evenly over the devices."""
    if batch_size % num_devices:
        raise ConfigError(
            f"a batch of {batch_size} does not spread evenly over {num_devices} devices; "
            f"choose a multiple of {num_devices}"
        )


def data_parallel(
    mode: ParallelMode, step: Step, devices: Sequence[Any] | None = None
) -> DataParallel:
    """Runs `step` over devices.

    Args:
      mode: `pmap` maps the step over devices, each with its share of the batch; the step was
        built with `axis_name("pmap")`. `jit` compiles the single-device step for global arrays.
      step: The pure step.
      devices: All devices by default.
    """
    if mode == "pmap":
        return DataParallel(
            replicate=jax_utils.replicate,
            split=lambda batch: Batch(*(_by_local_device(rows) for rows in batch)),
            step=jax.pmap(step, axis_name=AXIS, donate_argnums=0, devices=devices),
            single=lambda tree: jax.tree.map(lambda leaf: leaf.addressable_data(0)[0], tree),
        )

    replicated, spread = _shardings(jax.devices() if devices is None else devices)

    def to_all(leaf):
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, replicated, lambda index: value[index])

    return DataParallel(
        replicate=lambda state: jax.tree.map(to_all, state),
        split=lambda batch: Batch(
            *(jax.make_array_from_process_local_data(spread, rows) for rows in batch)
        ),
        step=jax.jit(step, donate_argnums=0, out_shardings=replicated),
        single=lambda tree: jax.tree.map(lambda leaf: leaf.addressable_data(0), tree),
    )


def lower(
    mode: ParallelMode, step: Step, state: Any, batch: Batch, devices: Sequence[Any]
) -> jax.stages.Lowered:
    """The step of `data_parallel` for devices that this machine need not have.

    Args:
      mode, step: As in `data_parallel`.
      state: Shapes and types of the state, as arrays or `jax.ShapeDtypeStruct`.
      batch: Those of the batch of all devices.
      devices: Such as those of a TPU topology.
    """
    num_devices = len(devices)
    spread_step = data_parallel(mode, step, devices).step
    if mode == "pmap":

        def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_devices, *leaf.shape), leaf.dtype)

        def split(leaf: Any) -> jax.ShapeDtypeStruct:
            rows = leaf.shape[0] // num_devices
            return jax.ShapeDtypeStruct((num_devices, rows, *leaf.shape[1:]), leaf.dtype)

        return spread_step.lower(jax.tree.map(stacked, state), jax.tree.map(split, batch))

    def placed(tree: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    replicated, spread = _shardings(devices)
    traced = spread_step.trace(placed(state, replicated), placed(batch, spread))
    return traced.lower(lowering_platforms=(devices[0].platform,))


def _shardings(devices: Sequence[Any]) -> tuple[NamedSharding, NamedSharding]:
    """A copy on each device, and rows spread over the devices."""
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))


def _by_local_device(rows: np.ndarray) -> np.ndarray:
    devices = jax.local_device_count()
    return rows.reshape(devices, rows.shape[0] // devices, *rows.shape[1:])
