"""The checkpoints of a run. A kill at any moment leaves all finished ones intact.

A checkpoint is a folder that Orbax writes in the background and renames into place; on an object
store, its last object marks it as complete (see `experiments.storage`). It holds the leaves of a
state as NumPy arrays, and a header with the caller's metadata, the type and shape of every leaf,
and two SHA-256 digests. Orbax reports a file that is missing or truncated, but restores a flipped
bit without an error. The digests detect it. Leaves whose classes are spread over devices are beside
it, as `sharded_leaves` writes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.errors import ExperimentError, StorageError
from experiments.storage import (
    complete_folders,
    remove_folder,
    remove_incomplete,
    rename_folder,
)
from experiments.training.sharded_leaves import (
    empty_shards_folder,
    remove_orphans,
    remove_shards,
    rename_shards,
    stored_leaves,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"

_FORMAT = 2
_KEPT = 2
"""How many of the newest checkpoints stay: one damaged file must not cost the run."""


class CheckpointError(ExperimentError):
    """A checkpoint that is missing, that is damaged, or that does not fit."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose content is not what was saved."""

    def __init__(self, step: int, message: str):
        super().__init__(step, message)
        self.step = step

    def __str__(self) -> str:
        return self.args[1]


class Restored(NamedTuple):
    """What `Checkpoints.restore` returns."""

    step: int
    state: Any
    meta: dict[str, Any]


def checkpoints_folder(path: Path) -> Path:
    """The folder of a run's checkpoints, from the run's directory or from this folder itself."""
    inside = path / CHECKPOINTS_FOLDER
    return inside if inside.is_dir() else path


class Checkpoints:
    """The checkpoints of one run: the newest two, and the one of the highest accuracy.

    With several processes, the first one alone opens them for writing, and the caller broadcasts
    the results; any process may open them for reading. No method waits for another process, and
    every question about what is stored waits for a save in progress. What reads a checkpoint raises
    `DamagedCheckpointError` where it is damaged, and `CheckpointError` where it is missing or does
    not fit.

    Args:
      directory: Folder of the checkpoints; made if it is missing, unless `read_only`.
      read_only: Change no file, for reading beside the process that writes.

    Raises:
      CheckpointError: `read_only`, and the folder is missing or holds no checkpoint.
    """

    def __init__(self, directory: Path, *, read_only: bool = False):
        self._directory = directory.absolute()
        self._read_only = read_only
        self._saving = False
        if read_only:
            if not self._directory.is_dir():
                raise CheckpointError(f"there is no directory {self._directory}")
            if not self.steps():
                raise CheckpointError(f"{self._directory} holds no checkpoint; train the run first")
        elif jax.process_index() != 0:
            raise ValueError("only the first process may open checkpoints for writing")
        else:
            self._directory.mkdir(parents=True, exist_ok=True)
            remove_incomplete(self._directory)
            remove_orphans(self._directory)
        self._orbax = _orbax_of_this_process()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        step: int,
        state: Any,
        *,
        meta: Mapping[str, Any],
        accuracy: SupportsFloat | None = None,
        shards: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to write a checkpoint. The state is copied before this returns.

        Args:
          step: Number of training steps done; above that of every checkpoint.
          state: Pytree of NumPy arrays, fully addressable JAX arrays and numbers.
          meta: JSON types, which `restore` and `meta` return.
          accuracy: Ranks the checkpoint. None, NaN and infinities rank below every number.
          shards: Further leaves, of which `collect_shards` has found the files.

        Raises:
          CheckpointError: Step or state cannot be saved, or the previous save failed.
        """
        if self._read_only:
            raise CheckpointError(f"{self._directory} is open for reading only")
        newest = self.latest_step()
        if newest is not None and step <= newest:
            raise CheckpointError(
                f"cannot save step {step}: {self._directory} already holds step {newest}"
            )
        values = {name: _copy(name, leaf) for name, leaf in sorted(_by_name(state).items())}
        score = math.nan if accuracy is None else float(accuracy)
        header = {
            "format": _FORMAT,
            "step": int(step),
            "accuracy": score if math.isfinite(score) else None,
            "meta": json.loads(json.dumps(meta)),
            "leaves": {name: _describe(value) for name, value in values.items()},
            "state_sha256": _state_digest(values),
        }
        if shards:
            header["shards"] = json.loads(json.dumps(shards))
        # Orbax stores no empty arrays, and a leaf's name may not be a valid file name.
        numbered = {str(i): value for i, value in enumerate(values.values()) if value.size}
        try:
            self._orbax.save(
                self._path(step),
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(numbered),
                    meta=ocp.args.JsonSave(header | {"sha256": _json_digest(header)}),
                ),
            )
        except Exception as error:
            raise CheckpointError(f"saving step {step} failed: {error}") from error
        self._saving = True

    def wait(self) -> None:
        """Waits until the save in progress is on disk, then removes checkpoints no longer kept.

        Raises:
          CheckpointError: The save failed.
        """
        if not self._saving:
            return
        self._saving = False
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise CheckpointError(f"saving to {self._directory} failed: {error}") from error
        best = self.best_step()  # Before the newest: it sets damaged checkpoints aside.
        kept = {*self.steps()[-_KEPT:], best}
        for step in self.steps():
            if step not in kept:
                remove_folder(self._path(step))
                remove_shards(self._path(step))

    def close(self) -> None:
        """Waits for the save in progress and stops the background threads.

        Raises:
          CheckpointError: The save failed.
        """
        try:
            self.wait()
        finally:
            self._orbax.close()

    def steps(self) -> list[int]:
        """The steps of the checkpoints, in ascending order, damaged ones included."""
        self.wait()
        return sorted(int(name) for name in complete_folders(self._directory) if name.isdecimal())

    def latest_step(self) -> int | None:
        """The newest step; None where there is no checkpoint."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step of the highest accuracy, the newest of equal ones; None without accuracies.

        Checkpoints with a damaged header are set aside as in `read_intact`.
        """
        measured = []
        for step in self.steps():
            try:
                accuracy = self.accuracy(step)
            except DamagedCheckpointError as error:
                self._set_aside(error)
                continue
            if accuracy is not None:
                measured.append((accuracy, step))
        return max(measured)[1] if measured else None

    def accuracy(self, step: int) -> float | None:
        """The accuracy saved with a step; None where it was not measured."""
        return self._header(step)["accuracy"]

    def meta(self, step: int) -> dict[str, Any]:
        """The metadata saved with a step."""
        return self._header(step)["meta"]

    def restore(
        self, target: Any, step: int | None = None, *, parts: tuple[str, ...] = ()
    ) -> Restored:
        """Reads a checkpoint into the structure of `target`.

        Args:
          target: Pytree of arrays, `jax.ShapeDtypeStruct` and numbers. The checkpoint must have
            leaves of the same names, types and shapes; the values are not used.
          step: The step of the checkpoint; None for the newest intact one (see `read_intact`).
          parts: Paths such as `params/backbone`. If given, leaves of the checkpoint outside these
            paths are ignored.

        Returns:
          The step, the state with NumPy arrays as leaves, and the metadata. Leaves that are stored
          in shards are `StoredLeaf`s.
        """
        if step is None:
            return self.read_intact(lambda newest: self.restore(target, newest, parts=parts))[0]
        header = self._header(step)
        wanted = _by_name(target)
        shards = stored_leaves(self._path(step), header.get("shards", {}))
        leaves = header["leaves"] | {name: _describe(leaf) for name, leaf in shards.items()}
        _check_fit(
            {name: leaf for name, leaf in leaves.items() if _is_within(name, parts)},
            {name: _describe(leaf) for name, leaf in wanted.items()},
            self._path(step),
        )

        def read() -> dict[str, Any]:
            args = ocp.args.Composite(state=ocp.args.StandardRestore())
            read = self._orbax.restore(self._path(step), args=args)["state"]
            stored = {
                name: read[n] for i, name in enumerate(header["leaves"]) if (n := str(i)) in read
            }
            if _state_digest(stored) != header["state_sha256"]:
                raise self._damaged(step, "the arrays do not match their checksum")
            for name, leaf in shards.items():
                if name in wanted:
                    leaf.verify()
            return stored

        stored = self._reading(step, read) | shards
        state = [
            stored[name] if name in stored else np.empty(leaf.shape, leaf.dtype)
            for name, leaf in wanted.items()
        ]
        return Restored(step, jax.tree.unflatten(jax.tree.structure(target), state), header["meta"])

    def read_intact(
        self, read: Callable[[int], T], *, best: bool = False
    ) -> tuple[T, list[DamagedCheckpointError]]:
        """Reads the newest or the best checkpoint that is intact.

        A damaged checkpoint is reported as a warning, which names the one that is used instead.
        Unless `read_only`, it is also renamed to `damaged-STEP`, so that training can save the step
        again.

        Args:
          read: Called with a step; raises `DamagedCheckpointError` where this one is damaged.
          best: Take checkpoints in the order of their accuracy, not of their step.

        Returns:
          `read(step)` of the intact checkpoint, and the damage of those that come before it.

        Raises:
          CheckpointError: No checkpoint is intact.
        """
        damaged: list[DamagedCheckpointError] = []
        # Listed anew each time: the process that writes may have removed checkpoints since.
        while left := set(self.steps()) - {error.step for error in damaged}:
            step = max(left, key=lambda step: (self._score(step) if best else 0, step))
            try:
                result = read(step)
            except DamagedCheckpointError as error:
                damaged.append(error)
                self._set_aside(error)
                continue
            if damaged:
                logger.warning("using step %d in place of step %d", step, damaged[0].step)
            return result, damaged
        if not damaged:
            raise CheckpointError(f"{self._directory} holds no checkpoint")
        steps = ", ".join(str(error.step) for error in damaged)
        raise CheckpointError(f"{self._directory} holds no intact checkpoint (damaged: {steps})")

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _score(self, step: int) -> float:
        try:
            accuracy = self.accuracy(step)
        except DamagedCheckpointError:
            return math.inf  # Perhaps the best: to be tried first, and reported.
        return -math.inf if accuracy is None else accuracy

    def _header(self, step: int) -> dict[str, Any]:
        steps = self.steps()
        if step not in steps:
            raise CheckpointError(
                f"{self._directory} holds no checkpoint of step {step}; "
                f"it holds: {', '.join(map(str, steps)) or 'none'}"
            )

        def read() -> dict[str, Any]:
            header = json.loads((self._path(step) / "meta" / "metadata").read_bytes())
            if header.pop("sha256") != _json_digest(header) or header["step"] != step:
                raise self._damaged(step, "the header does not match its checksum")
            return header

        header = self._reading(step, read)
        if header["format"] != _FORMAT:
            raise CheckpointError(
                f"{self._path(step)} has format {header['format']}, and this version reads format "
                f"{_FORMAT}; use the version of jaxloss that wrote it"
            )
        return header

    def prepare_shards(self, step: int) -> Path:
        """An empty folder for the shards of a step; returns the checkpoint's path."""
        self.wait()
        empty_shards_folder(self._path(step))
        return self._path(step)

    def _reading(self, step: int, read: Callable[[], T]) -> T:
        """The result of `read`. A failure that is repeated is damage, if the files can be read."""
        try:
            return read()
        except (StorageError, MemoryError):
            raise
        except Exception as error:  # Orbax raises a bare Exception, among others.
            for path in self._path(step).rglob("*"):
                try:
                    if path.is_file():
                        path.read_bytes()
                except FileNotFoundError:
                    pass
                except OSError as cause:
                    raise CheckpointError(f"cannot read {path}: {cause}") from error
        try:
            return read()
        except (DamagedCheckpointError, StorageError, MemoryError):
            raise
        except Exception as error:
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
            raise self._damaged(step, reason) from error

    def _damaged(self, step: int, reason: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(step, f"checkpoint {self._path(step)} is damaged ({reason})")

    def _set_aside(self, error: DamagedCheckpointError) -> None:
        if self._read_only:
            logger.warning("%s", error)
            return
        aside, count = self._directory / f"damaged-{error.step}", 1
        while aside.exists():
            count += 1
            aside = self._directory / f"damaged-{error.step}-{count}"
        rename_folder(self._path(error.step), aside)
        rename_shards(self._path(error.step), aside)
        logger.warning("%s: renamed to %s", error, aside.name)


def _orbax_of_this_process() -> ocp.AsyncCheckpointer:
    """Orbax, limited to this process. By default, it waits in barriers for all processes."""
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process-{index}"
    )
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.StandardCheckpointHandler(multiprocessing_options=alone),
        meta=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
    )
    return ocp.AsyncCheckpointer(handler, multiprocessing_options=alone)


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, such as `params/backbone/kernel`."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise CheckpointError(f"two leaves of the state are named {name}; rename one")
        named[name] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return named


def _copy(name: str, leaf: Any) -> np.ndarray:
    # A copy: the next training step may reuse the memory while the file is being written.
    value = np.array(leaf, order="C", copy=True)
    if value.dtype.kind in "OSUMm":
        raise CheckpointError(f"leaf {name} of the state must hold numbers, got {value.dtype}")
    return value


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _check_fit(stored: Mapping[str, str], wanted: Mapping[str, str], path: Path) -> None:
    problems = [
        f"{name}: {stored.get(name, 'not')} in the checkpoint, {wanted.get(name, 'not')} expected"
        for name in {**stored, **wanted}
        if stored.get(name) != wanted.get(name)
    ]
    if problems:
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(
            f"checkpoint {path} does not fit:\n  " + "\n  ".join(problems[:10]) + more
        )


def _is_within(name: str, parts: tuple[str, ...]) -> bool:
    return not parts or any(name == part or name.startswith(f"{part}/") for part in parts)


def _state_digest(values: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, value in values.items():
        if value.size:
            digest.update(json.dumps([name, _describe(value)]).encode())
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _json_digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
