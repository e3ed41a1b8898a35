"""Checkpoints that survive a kill at any moment, and the directory of a run.

A checkpoint holds the leaves of a state as host arrays, named by their path in the tree, and a
header with the caller's metadata, the name, type and shape of every leaf, and two checksums. Orbax
notices a file that is missing or torn, but restores a flipped bit and casts a changed type without
a word; the header is there to notice those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from experiments.errors import ExperimentError
from experiments.files import write_atomically

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
CHECKPOINTS_FOLDER = "checkpoints"

_FORMAT = 1
_TRASH = ".trash"
# Orbax ranks by a finite number: a NaN would win, and a missing one keeps its checkpoint for ever.
_UNRANKED = -1e30


class CheckpointError(ExperimentError):
    """A checkpoint that is missing, damaged, or does not fit what was asked of it."""


class ConfigMismatchError(ExperimentError):
    """A directory that belongs to another run, or whose configuration cannot be read."""


def checkpoints_folder(path: Path) -> Path:
    """Where the checkpoints lie of a run, which is named by its directory or by this folder."""
    path = Path(path)
    inside = path / CHECKPOINTS_FOLDER
    return inside if inside.is_dir() else path


class Restored(NamedTuple):
    """What `Checkpoints.restore` gives back."""

    step: int
    state: Any
    meta: dict


class _DamagedError(Exception):
    """Why a checkpoint cannot be trusted; never leaves this module."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A named leaf as it is stored: a host array, or the data of a typed PRNG key."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Checkpoints:
    """The checkpoints of one run, written in the background.

    The newest `keep_latest` and the one of the highest accuracy are kept; of equal accuracies the
    newer counts as the best, and a checkpoint without a finite accuracy is never the best. Every
    question about what is stored waits for a save in progress.

    With several processes, all of them call every method with the same arguments and share the
    directory.

    Args:
      directory: Where the checkpoints lie, one folder a step.
      keep_latest: How many of the newest to keep.
      read_only: Change nothing, for reading beside or after the run that writes.

    Raises:
      CheckpointError: `read_only`, and the directory holds no checkpoint.
    """

    def __init__(self, directory: Path, *, keep_latest: int = 1, read_only: bool = False):
        if keep_latest < 1:
            raise ValueError(f"keep_latest must be at least 1, got {keep_latest}")
        self._directory = Path(directory).absolute()
        self._reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
        self._manager = None
        if read_only:
            if not self._directory.is_dir():
                raise CheckpointError(f"there is no directory {self._directory}")
            if not self.steps():
                raise CheckpointError(f"{self._directory} holds no checkpoint")
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            self._empty_trash()
            for step in self.steps():
                try:
                    self._check_ranking(step)
                except _DamagedError as error:
                    self._set_aside(step, error)
        _synchronize("checkpoints: opened")

        def accuracy(metrics) -> float:
            return metrics["accuracy"]

        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                best_fn=accuracy,  # Without it Orbax does not write the metrics.
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(
                    [
                        checkpoint_managers.LatestN(keep_latest),
                        checkpoint_managers.BestN(get_metric_fn=accuracy, n=1),
                    ]
                ),
                cleanup_tmp_directories=True,
                # Deleting takes many steps, renaming one: a kill leaves no half-deleted checkpoint.
                todelete_subdir=_TRASH,
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self, step: int, state: Any, *, meta: dict, accuracy: SupportsFloat | None = None
    ) -> None:
        """Begin to write a checkpoint; the state is copied before this returns.

        Args:
          step: Number of training steps done; above every step saved so far.
          state: Pytree of arrays and numbers: NumPy, JAX (sharded over processes or not), or typed
            PRNG keys.
          meta: JSON types and NumPy scalars, given back by `restore`.
          accuracy: What the best checkpoint is chosen by. None and NaN rank below every number.

        Raises:
          CheckpointError: The step is not above the newest one, the state holds a leaf that cannot
            be stored, or the previous save failed.
        """
        if self._manager is None:
            raise CheckpointError(f"{self._directory} was opened for reading only")
        self.wait()
        newest = self.latest_step()
        if newest is not None and step <= newest:
            raise CheckpointError(
                f"cannot save step {step}: {self._directory} holds step {newest} already"
            )
        leaves, values = _to_host(state)
        score = _finite(accuracy)
        header = {
            "format": _FORMAT,
            "step": int(step),
            "accuracy": score,
            "meta": _to_json(meta),
            "leaves": [dataclasses.asdict(leaf) | {"shape": list(leaf.shape)} for leaf in leaves],
            "state_sha256": _state_digest(leaves, values),
        }
        header["sha256"] = _header_digest(header)
        try:
            self._manager.save(
                int(step),
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_by_number(values)),
                    meta=ocp.args.JsonSave(header),
                ),
                metrics={"accuracy": _UNRANKED if score is None else score},
                force=True,
            )
        except Exception as error:
            raise CheckpointError(f"saving step {step} failed: {error}") from error

    def steps(self) -> list[int]:
        """The steps of the checkpoints on disk, in order."""
        self.wait()
        if not self._directory.is_dir():
            return []
        return sorted(
            int(p.name) for p in self._directory.iterdir() if p.name.isdecimal() and p.is_dir()
        )

    def latest_step(self) -> int | None:
        """The newest step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step of the highest accuracy, the newest of equals; None where none was measured."""
        ranked = []
        for step in self.steps():
            with contextlib.suppress(_DamagedError):
                accuracy = self._header(step)["accuracy"]
                if accuracy is not None:
                    ranked.append((accuracy, step))
        return max(ranked)[1] if ranked else None

    def accuracy(self, step: int) -> float | None:
        """What `best_step` ranks a step by; None where it was not measured.

        Raises:
          CheckpointError: There is no such step, or its header is damaged.
        """
        self._require(step)
        try:
            return self._header(step)["accuracy"]
        except _DamagedError as error:
            raise CheckpointError(f"checkpoint {self._path(step)} is damaged: {error}") from error

    def meta(self, step: int) -> dict:
        """The metadata saved with a step.

        Raises:
          CheckpointError: There is no such step, or its header is damaged.
        """
        self._require(step)
        try:
            return self._header(step)["meta"]
        except _DamagedError as error:
            raise CheckpointError(f"checkpoint {self._path(step)} is damaged: {error}") from error

    def restore(
        self, target: Any, step: int | None = None, *, parts: tuple[str, ...] = ()
    ) -> Restored:
        """Read a checkpoint back into the structure of `target`.

        Without a step, the newest intact checkpoint is taken. A damaged one is reported as a
        warning and, unless reading only, renamed to `damaged-STEP`, so that training can go on from
        an older one and save that step again.

        Args:
          target: Pytree of arrays or `jax.ShapeDtypeStruct` with the names, shapes and types that
            the checkpoint must have; its values are not used.
          step: Which checkpoint; None for the newest intact one.
          parts: Paths such as `params/backbone`. If any are given, the checkpoint may hold more
            than `target` does, outside of these.

        Returns:
          The step, the state and the metadata. Leaves are NumPy arrays; where the target is a
          `ShapeDtypeStruct` with a sharding, arrays placed so; PRNG keys where it is one.

        Raises:
          CheckpointError: There is no checkpoint, the one asked for is damaged, or its leaves are
            not those of `target`.
        """
        if step is not None:
            self._require(step)
            restored = self._read(step, target, parts)
            if isinstance(restored, _DamagedError):
                raise CheckpointError(f"checkpoint {self._path(step)} is damaged: {restored}")
            return restored
        tried: list[int] = []
        # Listed anew each time: the run that writes may replace a checkpoint while this one reads.
        while remaining := [s for s in self.steps() if s not in tried]:
            newest = remaining[-1]
            restored = self._read(newest, target, parts)
            if not isinstance(restored, _DamagedError):
                return restored
            tried.append(newest)
            self._drop(newest, restored)
        if tried:
            raise CheckpointError(
                f"{self._directory} holds no intact checkpoint; damaged: "
                + ", ".join(map(str, tried))
            )
        raise CheckpointError(f"{self._directory} holds no checkpoint")

    def asked_to_stop(self, step: int) -> bool:
        """Whether one of several processes was told to stop (SIGTERM); every one asks, each step.

        All of them get the same answer at the same step.
        """
        return self._manager is not None and self._manager.reached_preemption(step)

    def wait(self) -> None:
        """Block until the save in progress is on disk.

        Raises:
          CheckpointError: It failed.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise CheckpointError(f"saving to {self._directory} failed: {error}") from error
        if jax.process_index() == 0:
            self._empty_trash()

    def close(self) -> None:
        """Finish the save in progress and release the background threads.

        Raises:
          CheckpointError: The save failed.
        """
        manager = self._manager
        try:
            self.wait()
        finally:
            self._manager = None
            self._reader.close()
            if manager is not None:
                with contextlib.suppress(Exception):  # What `wait` has reported.
                    manager.close()

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _require(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"{self._directory} holds no checkpoint of step {step} (there are: {there})"
            )

    def _header(self, step: int) -> dict:
        try:
            args = ocp.args.Composite(meta=ocp.args.JsonRestore())
            header = self._reader.restore(self._path(step), args=args)["meta"]
            intact = header["sha256"] == _header_digest(header) and header["step"] == step
        except Exception as error:  # Orbax raises what it likes, a bare Exception among it.
            raise _DamagedError(_reason(error)) from error
        if not intact:
            raise _DamagedError("the header does not match its checksum")
        if header["format"] != _FORMAT:
            raise CheckpointError(
                f"{self._path(step)} has format {header['format']}; this version reads {_FORMAT}"
            )
        return header

    def _check_ranking(self, step: int) -> None:
        """Check the file that Orbax ranks by: it cannot open a directory with a torn one."""
        score = self._header(step)["accuracy"]
        try:
            metrics = json.loads((self._path(step) / "metrics" / "metrics").read_text())
            ranked = metrics["accuracy"]
        except Exception as error:
            raise _DamagedError(_reason(error)) from error
        if ranked != (_UNRANKED if score is None else score):
            raise _DamagedError("the accuracy that ranks it is not the one in its header")

    def _read(self, step: int, target: Any, parts: tuple[str, ...]) -> Restored | _DamagedError:
        try:
            header = self._header(step)
            stored = [_Leaf(**leaf | {"shape": tuple(leaf["shape"])}) for leaf in header["leaves"]]
            asked = [leaf for leaf in stored if _is_within(leaf.name, parts)]
            _compare(asked, _describe(target), self._path(step))
            values = self._values(step, stored)
            if _state_digest(stored, values) != header["state_sha256"]:
                raise _DamagedError("the arrays do not match their checksum")
            result = Restored(step, _fill(target, stored, values), header["meta"])
        except _DamagedError as error:
            result = error
        # One process that reads a torn file while another reads a good one must not go its own way.
        if jax.process_count() > 1:
            verdict = np.array(isinstance(result, Restored))
            if not np.all(multihost_utils.process_allgather(verdict)):
                return result if isinstance(result, _DamagedError) else _DamagedError("elsewhere")
        return result

    def _values(self, step: int, stored: list[_Leaf]) -> list[np.ndarray]:
        try:
            templates = [np.empty(_data_shape(leaf), _data_dtype(leaf)) for leaf in stored]
            args = ocp.args.Composite(state=ocp.args.StandardRestore(_by_number(templates)))
            read = self._reader.restore(self._path(step), args=args)["state"]
            return [
                np.asarray(read[number]) if (number := str(i)) in read else template
                for i, template in enumerate(templates)
            ]
        except Exception as error:
            raise _DamagedError(_reason(error)) from error

    def _drop(self, step: int, error: Exception) -> None:
        if self._manager is None:
            logger.warning("checkpoint %s is damaged (%s): trying an older one", step, error)
            return
        if jax.process_index() == 0:
            self._set_aside(step, error)
        _synchronize("checkpoints: set aside")
        self._manager.reload()

    def _set_aside(self, step: int, error: Exception) -> None:
        aside = self._directory / f"damaged-{step}"
        count = 1
        while aside.exists():
            count += 1
            aside = self._directory / f"damaged-{step}-{count}"
        os.rename(self._path(step), aside)
        logger.warning(
            "checkpoint %s of %s is damaged (%s): moved to %s",
            *(step, self._directory, error, aside.name),
        )

    def _empty_trash(self) -> None:
        shutil.rmtree(self._directory / _TRASH, ignore_errors=True)


def claim_run_directory(directory: Path, config: dict) -> bool:
    """Make a directory the home of a run, or recognise it as that already.

    Args:
      directory: The run's directory; made if it does not exist.
      config: The run's configuration, in JSON types.

    Returns:
      True if the directory belongs to this very configuration, so the run goes on where it stopped;
      False if it is new.

    Raises:
      ConfigMismatchError: The directory belongs to another configuration (the message shows every
        difference), its configuration is damaged, or it holds other files. Nothing is changed.
    """
    directory = Path(directory)
    if check_run_directory(directory, config):
        return True
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_to_json(config), indent=2, ensure_ascii=False) + "\n"
    write_atomically(directory / CONFIG_FILE, text)
    return False


def check_run_directory(directory: Path, config: dict) -> bool:
    """What `claim_run_directory` returns or raises; nothing is written."""
    if (directory / CONFIG_FILE).exists():
        lines = list(_differences(read_config(directory), _to_json(config)))
        if lines:
            raise ConfigMismatchError(
                f"{directory} holds a run of another configuration:\n"
                + "\n".join(f"  {line}" for line in lines)
                + "\n(left: the run there, right: this one). "
                "Choose another directory, or remove this one."
            )
        return True
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise ConfigMismatchError(f"{directory} is a file; choose another directory")
    others = sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
    if others:
        shown = ", ".join(others[:5]) + (", …" if len(others) > 5 else "")
        raise ConfigMismatchError(
            f"{directory} is not a run directory: it holds {shown} but no {CONFIG_FILE}. "
            "Choose another directory."
        )
    return False


def read_config(directory: Path) -> dict:
    """The configuration of the run in a directory.

    Raises:
      ConfigMismatchError: There is none, or it cannot be read.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigMismatchError(
            f"{directory} is not a run directory: it has no {CONFIG_FILE}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigMismatchError(
            f"{path} is damaged ({error}). Mend it, or choose another directory."
        ) from error
    if not isinstance(config, dict):
        raise ConfigMismatchError(f"{path} is damaged: it does not hold a JSON object")
    return config


def _differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            inner = f"{name}.{key}" if name else key
            if key not in new:
                yield f"{inner}: {old[key]!r} -> (absent)"
            elif key not in old:
                yield f"{inner}: (absent) -> {new[key]!r}"
            else:
                yield from _differences(old[key], new[key], inner)
    elif old != new:
        yield f"{name}: {old!r} -> {new!r}"


def _to_json(value: Any) -> Any:
    """JSON types as they come back from a file: lists for tuples, Python for NumPy scalars."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, np.generic | np.ndarray | jax.Array) and np.ndim(leaf) == 0:
            return np.asarray(leaf).item()
        raise TypeError(f"metadata takes JSON types and scalars, got {type(leaf).__name__}")

    return json.loads(json.dumps(value, default=plain))


def _finite(accuracy: SupportsFloat | None) -> float | None:
    value = math.nan if accuracy is None else float(accuracy)
    return value if math.isfinite(value) else None


def _leaf_names(tree: Any) -> list[tuple[str, Any]]:
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"several leaves of the state are named {', '.join(twice)}")
    return named


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _describe(tree: Any) -> list[_Leaf]:
    described = []
    for name, leaf in _leaf_names(tree):
        if not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        typed_key = isinstance(leaf, jax.Array) and _is_key(leaf)
        impl = str(jax.random.key_impl(leaf)) if typed_key else None
        described.append(_Leaf(name, str(leaf.dtype), tuple(leaf.shape), impl))
    return sorted(described, key=lambda leaf: leaf.name)


def _to_host(tree: Any) -> tuple[list[_Leaf], list[np.ndarray]]:
    """The leaves in the order of their names, and a copy of each one's data."""
    leaves = _describe(tree)
    by_name = dict(_leaf_names(tree))
    values = []
    for leaf in leaves:
        value = by_name[leaf.name]
        if _is_key(value):
            value = jax.random.key_data(value)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if value.is_fully_replicated:
                value = value.addressable_data(0)
            else:
                value = multihost_utils.process_allgather(value, tiled=True)
        # A copy: the next training step may reuse the memory while the file is being written.
        value = np.array(value, order="C", copy=True)
        if value.dtype.kind in "OSUMm":
            raise CheckpointError(f"leaf {leaf.name} of the state is {value.dtype}, not numbers")
        values.append(value)
    if not any(value.size for value in values):
        raise CheckpointError("the state holds no values")
    return leaves, values


def _by_number(values: list[np.ndarray]) -> dict[str, np.ndarray]:
    # Names of leaves may hold what a path must not; and Orbax stores no array of size zero.
    return {str(i): value for i, value in enumerate(values) if value.size}


def _data_shape(leaf: _Leaf) -> tuple[int, ...]:
    if leaf.key_impl is None:
        return leaf.shape
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf.key_impl)))
    return leaf.shape + key.shape


def _data_dtype(leaf: _Leaf) -> np.dtype:
    return np.dtype(jax.numpy.dtype(leaf.dtype if leaf.key_impl is None else "uint32"))


def _compare(stored: list[_Leaf], wanted: list[_Leaf], path: Path) -> None:
    there = {leaf.name: leaf for leaf in stored}
    asked = {leaf.name: leaf for leaf in wanted}
    problems = [f"{name}: in the checkpoint only" for name in there if name not in asked]
    problems += [f"{name}: not in the checkpoint" for name in asked if name not in there]
    for name in asked:
        if name in there and str(there[name]) != str(asked[name]):
            problems.append(f"{name}: {there[name]} in the checkpoint, {asked[name]} wanted")
    if problems:
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(
            f"checkpoint {path} does not fit:\n  " + "\n  ".join(problems[:10]) + more
        )


def _is_within(name: str, parts: tuple[str, ...]) -> bool:
    return not parts or any(name == part or name.startswith(f"{part}/") for part in parts)


def _fill(target: Any, stored: list[_Leaf], values: list[np.ndarray]) -> Any:
    by_name = {leaf.name: (leaf, data) for leaf, data in zip(stored, values, strict=True)}

    def value(path: Any, wanted: Any) -> Any:
        leaf, data = by_name[jax.tree_util.keystr(path, simple=True, separator="/")]
        sharding = wanted.sharding if isinstance(wanted, jax.ShapeDtypeStruct) else None
        if leaf.key_impl is not None:
            key = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=leaf.key_impl)
            return key if sharding is None else jax.device_put(key, sharding)
        if sharding is None:
            return data
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: data[index])

    return jax.tree_util.tree_map_with_path(value, target)


def _state_digest(leaves: list[_Leaf], values: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for leaf, value in zip(leaves, values, strict=True):
        digest.update(json.dumps([leaf.name, leaf.dtype, leaf.shape, leaf.key_impl]).encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _header_digest(header: dict) -> str:
    covered = {key: value for key, value in header.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"


def _synchronize(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
