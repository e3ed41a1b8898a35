"""Leaves whose classes are spread over devices, in files: no process holds such a leaf.

Each process writes the shards of its own devices into the folder STEP.shards, a file each, and a
list of them with the SHA-256 digest of every file. The header of the checkpoint STEP, which is
written after all of them, has the lists. So a checkpoint exists with all of its files, or not at
all. Classes that only fill up the devices are not written, so that the files fit every mesh. The
folder is on a disk that all processes see, not on an object store.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from experiments.contracts import CLASS_AXIS
from experiments.errors import ExperimentError
from experiments.files import write_json
from experiments.storage import is_remote

_FOLDER = ".shards"


class ShardsError(ExperimentError):
    """Shards that are missing or damaged."""


@dataclass(frozen=True)
class Shard:
    """A file with some of the classes of a leaf."""

    file: str
    start: int
    """The first class."""
    stop: int
    """The class after the last one."""
    sha256: str


@dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A leaf in files. `np.asarray` reads all of it, `read` some of its classes."""

    folder: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    axis: int
    """The axis of the classes."""
    shards: tuple[Shard, ...]

    def read(self, start: int, stop: int) -> np.ndarray:
        """The classes from `start` to `stop`."""
        parts = []
        for shard in self.shards:
            first, last = max(start, shard.start), min(stop, shard.stop)
            if first < last:
                shape = _with(self.shape, self.axis, shard.stop - shard.start)
                content = np.memmap(self.folder / shard.file, self.dtype, mode="r", shape=shape)
                parts.append(_classes(content, self.axis, first - shard.start, last - shard.start))
        return np.concatenate(parts, axis=self.axis)

    def verify(self) -> None:
        """Reads every file once, without keeping it.

        Raises:
          ShardsError: A file is missing, or is not what was written.
        """
        for shard in self.shards:
            path = self.folder / shard.file
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except FileNotFoundError as error:
                raise ShardsError(f"{path} is missing") from error
            if found != shard.sha256:
                raise ShardsError(f"{path} does not match its checksum")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read(0, self.shape[self.axis]).astype(dtype or self.dtype, copy=False)


def class_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding of a leaf whose classes are spread over devices; None for any other leaf."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and CLASS_AXIS in sharding.spec else None


def shards_folder(checkpoint: Path) -> Path:
    """The folder of the shards of a checkpoint."""
    return checkpoint.with_name(checkpoint.name + _FOLDER)


def empty_shards_folder(checkpoint: Path) -> None:
    """Makes the folder of the shards of a checkpoint, without what a killed save left in it."""
    remove_shards(checkpoint)
    shards_folder(checkpoint).mkdir()


def remove_shards(checkpoint: Path) -> None:
    """Removes the shards of a checkpoint that has been removed."""
    if not is_remote(checkpoint):
        shutil.rmtree(shards_folder(checkpoint), ignore_errors=True)


def rename_shards(checkpoint: Path, target: Path) -> None:
    """Renames the shards of a checkpoint that has been renamed, if it has any."""
    if not is_remote(checkpoint) and shards_folder(checkpoint).exists():
        os.rename(shards_folder(checkpoint), shards_folder(target))


def remove_orphans(directory: Path) -> None:
    """Removes the shards of checkpoints that do not exist: of a save that was killed."""
    if is_remote(directory):
        return
    for folder in directory.glob(f"*{_FOLDER}"):
        if not folder.with_name(folder.name.removesuffix(_FOLDER)).exists():
            shutil.rmtree(folder, ignore_errors=True)


def without_spread(state: Any) -> tuple[Any, dict[str, jax.Array]]:
    """A state with None in place of leaves whose classes are spread, and these leaves by name."""
    spread = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if class_sharding(leaf) is not None
    }
    return jax.tree.map(lambda leaf: None if class_sharding(leaf) else leaf, state), spread


def write_shards(checkpoint: Path, leaves: Mapping[str, jax.Array], num_classes: int) -> None:
    """Writes the shards of this process's devices, and their list.

    Of shards that several devices have, one of them is written.

    Args:
      checkpoint: The checkpoint that will have them.
      leaves: Leaves whose classes are spread, by name.
      num_classes: Classes without those that fill up the devices.
    """
    folder = shards_folder(checkpoint)
    listed: dict[str, Any] = {}
    for number, (name, leaf) in enumerate(sorted(leaves.items())):
        axis, shards = _class_axis(leaf), []
        for part in leaf.addressable_shards:
            start, stop, _ = part.index[axis].indices(num_classes)
            if part.replica_id == 0 and start < stop:
                own = _classes(np.asarray(part.data), axis, 0, stop - start)
                shards.append(_write(folder, f"{number}-{start}", own, start, stop))
        shape = _with(leaf.shape, axis, num_classes)
        listed[name] = {"dtype": leaf.dtype.name, "shape": shape, "axis": axis, "shards": shards}
    write_json(folder / f"process-{jax.process_index()}.json", listed)


def collect_shards(checkpoint: Path) -> dict[str, Any]:
    """The lists of all processes in one, as JSON types.

    Raises:
      ShardsError: A process has written no list, or the shards do not cover a leaf.
    """
    folder, merged = shards_folder(checkpoint), {}
    for process in range(jax.process_count()):
        path = folder / f"process-{process}.json"
        if not path.exists():
            raise ShardsError(
                f"process {process} has not written its shards to {folder}; with --mesh, the run "
                "directory must be one that all processes see, with enough space"
            )
        for name, leaf in json.loads(path.read_text(encoding="utf-8")).items():
            merged.setdefault(name, leaf | {"shards": []})["shards"] += leaf["shards"]
    for name, leaf in merged.items():
        leaf["shards"].sort(key=lambda shard: shard["start"])
        edges = [0, *(shard["stop"] for shard in leaf["shards"])]
        starts = [*(shard["start"] for shard in leaf["shards"]), leaf["shape"][leaf["axis"]]]
        if edges != starts:
            raise ShardsError(f"the shards in {folder} do not cover the classes of {name}")
    return merged


def stored_leaves(checkpoint: Path, collected: Mapping[str, Any]) -> dict[str, StoredLeaf]:
    """The leaves of `collect_shards`, to be read."""
    return {
        name: StoredLeaf(
            shards_folder(checkpoint),
            jnp.dtype(leaf["dtype"]),
            tuple(leaf["shape"]),
            leaf["axis"],
            tuple(Shard(**shard) for shard in leaf["shards"]),
        )
        for name, leaf in collected.items()
    }


def unfilled(state: Any, num_classes: int) -> Any:
    """Shapes and types of a state without the classes that fill up the devices."""

    def shape(leaf: Any) -> Any:
        if class_sharding(leaf) is None:
            return leaf
        return jax.ShapeDtypeStruct(_with(leaf.shape, _class_axis(leaf), num_classes), leaf.dtype)

    return jax.tree.map(shape, state)


def place(stored: Any, target: Any) -> Any:
    """A leaf of a checkpoint, a NumPy array or in files, on the devices of `target`.

    Each process reads the classes of its own devices. Where `target` is on every device, or is a
    NumPy array, the result is a NumPy array.
    """
    sharding = class_sharding(target)
    if sharding is None:
        return np.asarray(stored) if isinstance(stored, StoredLeaf) else stored
    axis = _class_axis(target)
    num_classes = stored.shape[axis]

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[axis].indices(target.shape[axis])
        own = np.zeros(_with(target.shape, axis, stop - start), target.dtype)
        first, last = min(start, num_classes), min(stop, num_classes)
        if first < last:
            in_files = isinstance(stored, StoredLeaf)
            part = stored.read(first, last) if in_files else _classes(stored, axis, first, last)
            _classes(own, axis, 0, last - first)[...] = part
        return own

    return jax.make_array_from_callback(target.shape, sharding, cast(Any, shard))


def _class_axis(leaf: Any) -> int:
    return leaf.sharding.spec.index(CLASS_AXIS)


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _classes(array: np.ndarray, axis: int, start: int, stop: int) -> np.ndarray:
    return array[(slice(None),) * axis + (slice(start, stop),)]


def _write(folder: Path, name: str, content: np.ndarray, start: int, stop: int) -> dict[str, Any]:
    data = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
    with (folder / name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return dataclasses.asdict(Shard(name, start, stop, hashlib.sha256(data).hexdigest()))
