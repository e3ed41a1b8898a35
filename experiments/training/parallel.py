"""Steps over all devices, by `pmap` or by `jit` over a mesh.

A mesh has rows of devices. The batch is spread over all of them, for the backbone. The classes of a
head are spread over the devices of a row, so that each has the classes of its column. The
classifier's loss therefore gathers the features of a row (n/rows · d numbers), and no device holds
the whole head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.config import ParallelMode
from experiments.contracts import BATCH_AXIS, CLASS_AXIS
from experiments.data.sampling import parse_product
from experiments.errors import ConfigError
from experiments.training.checkpoints import class_sharding
from experiments.training.step import Batch, Build, Step


class DataParallel(NamedTuple):
    """How a step runs over devices."""

    replicate: Callable[[Any], Any]
    """Copies a tree to all devices; leaves whose classes are spread over them stay as they are."""
    split: Callable[[Batch], Any]
    """Spreads this process's rows of a batch over its devices."""
    step: jax.stages.Wrapped
    """From the state and a batch to the next state and the metrics."""
    single: Callable[[Any], Any]
    """One copy of a replicated tree, on one device. Leaves whose classes are spread over devices
    stay as they are."""


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


def device_mesh(mode: ParallelMode, shape: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of all devices, or of those given.

    The shape is such as 2x4, two rows of four devices, which needs `jit`; empty: one device a row.
    Raises a `ConfigError` where it does not fit the mode or the devices.
    """
    devices = jax.devices() if devices is None else devices
    rows, columns = len(devices), 1
    if shape:
        if (factors := parse_product(shape)) is None:
            raise ConfigError(
                f"--mesh must be BATCHxCLASSES, such as 2x4 for eight devices; got {shape!r}"
            )
        if mode == "pmap":
            raise ConfigError(f"--mesh {shape} needs --parallel jit")
        rows, columns = factors
        if rows * columns != len(devices):
            raise ConfigError(
                f"--mesh {shape} needs {rows * columns} devices, but JAX has {len(devices)}; "
                f"choose two numbers whose product is {len(devices)}"
            )
    names, axes = (BATCH_AXIS, CLASS_AXIS), (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((rows, columns), names, axis_types=axes, devices=devices)


def spreads_classes(mesh: Mesh) -> bool:
    """Whether the classes of a head are spread over the devices of a mesh."""
    return mesh.shape[CLASS_AXIS] > 1


def spread_over(mesh: Mesh, class_axes: Mapping[str, int], *, abstract: bool = False) -> Build:
    """A `Build` of a state of which no device, and no host, holds all classes.

    The classes are filled up with zeros to a multiple of the devices of a row, in the head and in
    the optimiser's state of it. With `abstract`, there are only shapes, types and shardings. For
    `class_axes` see `Objective`.
    """

    def build(start: Callable, *arguments: Any) -> Any:
        def filled(*arguments: Any) -> Any:
            return jax.tree_util.tree_map_with_path(fill, start(*arguments))

        def fill(path: Any, leaf: Any) -> Any:
            axis = _class_axis(path, class_axes)
            if axis is None:
                return leaf
            width = [(0, 0)] * leaf.ndim
            width[axis] = (0, -leaf.shape[axis] % mesh.shape[CLASS_AXIS])
            return jnp.pad(leaf, width)

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            axis = _class_axis(path, class_axes)
            spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, CLASS_AXIS)
            return NamedSharding(mesh, spec)

        arguments = jax.tree.map(np.asarray, arguments)
        shapes = jax.eval_shape(filled, *arguments)
        shardings = jax.tree_util.tree_map_with_path(sharding, shapes)
        if abstract:
            return jax.tree.map(lambda leaf, own: leaf.update(sharding=own), shapes, shardings)
        return jax.jit(filled, out_shardings=shardings)(*arguments)

    return build


def _class_axis(path: Any, class_axes: Mapping[str, int]) -> int | None:
    """The axis of the classes in a leaf of the head, or of the optimiser's state of it."""
    name = f"/{jax.tree_util.keystr(path, simple=True, separator='/')}"
    for leaf, axis in class_axes.items():
        if name.endswith(f"/classifier/{leaf}"):
            return axis
    return None


def data_parallel(
    mode: ParallelMode, step: Step, state: Any = None, mesh: Mesh | None = None
) -> DataParallel:
    """Runs the pure `step` over devices, by default all, one a row.

    `pmap` maps it, built with `axis_name("pmap")`, over devices, each with its share of the batch.
    `jit` compiles the single-device step for global arrays; where classes are spread, `state` has
    the shapes, types and shardings of the first one.
    """
    if mode == "pmap":
        devices = None if mesh is None else mesh.devices.ravel().tolist()
        return DataParallel(
            replicate=jax_utils.replicate,
            split=lambda batch: jax.tree.map(_by_local_device, batch),
            step=jax.pmap(step, axis_name=BATCH_AXIS, donate_argnums=0, devices=devices),
            single=lambda tree: jax.tree.map(lambda leaf: leaf.addressable_data(0)[0], tree),
        )

    mesh = device_mesh(mode, "") if mesh is None else mesh
    replicated, spread = _shardings(mesh)

    def to_all(leaf):
        if class_sharding(leaf) is not None:
            return leaf
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, replicated, lambda index: value[index])

    def one_copy(leaf):
        return leaf if class_sharding(leaf) is not None else leaf.addressable_data(0)

    shardings: Any = replicated
    if spreads_classes(mesh):
        of_state = jax.tree.map(lambda leaf: class_sharding(leaf) or replicated, state)
        shardings = (of_state, replicated)
    return DataParallel(
        replicate=lambda state: jax.tree.map(to_all, state),
        split=lambda batch: jax.tree.map(
            lambda rows: jax.make_array_from_process_local_data(spread, rows), batch
        ),
        step=jax.jit(step, donate_argnums=0, out_shardings=shardings),
        single=lambda tree: jax.tree.map(one_copy, tree),
    )


def lower(
    mode: ParallelMode, step: Step, state: Any, batch: Batch, mesh: Mesh
) -> jax.stages.Lowered:
    """The step of `data_parallel` for devices that this machine need not have, such as a pod's.

    State and batch, of all devices, are arrays or `jax.ShapeDtypeStruct`; leaves of the state whose
    classes are spread have their shardings.
    """
    num_devices = mesh.size
    spread_step = data_parallel(mode, step, state, mesh).step
    if mode == "pmap":

        def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_devices, *leaf.shape), leaf.dtype)

        def split(leaf: Any) -> jax.ShapeDtypeStruct:
            rows = leaf.shape[0] // num_devices
            return jax.ShapeDtypeStruct((num_devices, rows, *leaf.shape[1:]), leaf.dtype)

        return spread_step.lower(jax.tree.map(stacked, state), jax.tree.map(split, batch))

    def placed(tree: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=class_sharding(leaf) or sharding
            ),
            tree,
        )

    replicated, spread = _shardings(mesh)
    traced = spread_step.trace(placed(state, replicated), placed(batch, spread))
    return traced.lower(lowering_platforms=(mesh.devices.flat[0].platform,))


def _shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """A copy on each device, and rows spread over the devices."""
    rows = PartitionSpec((BATCH_AXIS, CLASS_AXIS))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, rows)


def _by_local_device(rows: np.ndarray) -> np.ndarray:
    devices = jax.local_device_count()
    return rows.reshape(devices, rows.shape[0] // devices, *rows.shape[1:])
