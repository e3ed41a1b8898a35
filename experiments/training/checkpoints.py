"""The checkpoints of a run, by Orbax: the newest two, and the best by validation.

A kill at any moment leaves all finished checkpoints. Orbax reports a file that is missing or cut,
but restores a flipped bit without an error: a header has a digest of itself and a checksum of the
arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import shutil
import sys
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from experiments.core.config import differences
from experiments.core.errors import ExperimentError, full_disk, unreachable
from experiments.core.processes import all_true, is_first, on_first
from experiments.core.storage import is_remote

logger = logging.getLogger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"

_FORMAT = 6
_TRASH = ".trash"


class CheckpointError(ExperimentError):
    """A checkpoint that is missing, that is damaged, or that does not fit."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose content is not what was saved."""


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    path: Path
    step: int
    validation: float | None  # What `Checkpoints.save` received; None where it was not finite.
    meta: dict[str, Any]
    leaves: dict[str, np.ndarray]  # By their path in the state, as `params/backbone/kernel`.

    def fill(self, target: Any, parts: tuple[str, ...] = ("",)) -> Any:
        """The state in the structure of `target`, a pytree whose values are not used.

        The names, types and shapes of the leaves must be the same, or this raises a
        `CheckpointError`; with `parts`, such as `params/backbone`, only at and below these paths.
        """
        wanted = _by_name(target)
        leaves = {n: leaf for n, leaf in self.leaves.items() if f"{n}/".startswith(parts)}
        leaves |= {n: np.empty(x.shape, x.dtype) for n, x in wanted.items() if not x.size}
        kinds = ({n: f"{x.dtype}{list(x.shape)}" for n, x in t.items()} for t in (leaves, wanted))
        if lines := differences(*kinds):
            raise CheckpointError(
                f"checkpoint {self.path} does not fit (left: what it holds):{some_lines(lines)}"
            )
        return jax.tree.unflatten(jax.tree.structure(target), [leaves[name] for name in wanted])


def run_folder(path: Path) -> Path:
    """The directory of the run that a path names: the run directory, or its checkpoints folder."""
    inside = path.resolve().name == CHECKPOINTS_FOLDER and not (path / CHECKPOINTS_FOLDER).is_dir()
    return path.resolve().parent if inside else path


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Orbax raises one error of a file, and its threads report others, some of them later."""
    usual, log = sys.unraisablehook, logging.getLogger("absl")

    def report(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            usual(unraisable)

    sys.unraisablehook, log.disabled = report, True
    try:
        yield
        sys.unraisablehook = usual  # Not after an error, which others may follow.
    finally:
        log.disabled = False


class Checkpoints(managers.PreservationPolicy):
    """The checkpoints of one run. Of equal validations, the latest is the best.

    With several processes, all of them open the folder and call every method. With `read_only`, for
    reading beside the processes that write, no file is changed, and there must be a checkpoint.
    """

    def __init__(self, directory: Path, *, read_only: bool = False):
        self._directory = directory if is_remote(directory) else directory.absolute()
        self._read_only = read_only
        self._header = cache(self._read_header)
        # A kill while Orbax removes a folder would leave a damaged checkpoint; renaming is atomic.
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(2), self]),
            cleanup_tmp_directories=not read_only,
            todelete_subdir=None if read_only or is_remote(directory) else _TRASH,
            enable_async_checkpointing=False,
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        if read_only and not self.steps():
            raise CheckpointError(
                f"there is no checkpoint in {directory}; name the directory of a run, or run the "
                "same `train` again if it was stopped before its first one"
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(
        self,
        step: int,
        state: Any,
        *,
        meta: Mapping[str, Any],
        validation: SupportsFloat | None = None,
    ) -> None:
        """Writes a checkpoint of a pytree of arrays, and removes those that are not kept.

        `step` is the number of training steps done. `meta` has JSON types. `validation` ranks the
        checkpoint; None, NaN and infinities rank below every number.
        """
        leaves = {name: leaf for name, leaf in _by_name(state).items() if leaf.size}
        value = math.nan if validation is None else float(validation)
        header = {
            "format": _FORMAT,
            "validation": value if math.isfinite(value) else None,
            "checksum": _checksum(leaves),
            "meta": json.loads(json.dumps(meta)),
        }
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves),
            header=ocp.args.JsonSave({**header, "digest": _digest(header)}),
        )
        try:
            with _silent():
                self._manager.save(step, args=args, force=True)
        except (OSError, ValueError) as error:  # Perhaps of another array than the first to fail.
            reason = full_disk(error) or f"is the disk full? {_in_short(error)}"
            path = self._directory / str(step)
            raise CheckpointError(f"cannot write {path}: {reason}") from error
        if is_first() and not is_remote(self._directory):
            shutil.rmtree(self._directory / _TRASH, ignore_errors=True)

    def newest_meta(self) -> dict[str, Any]:
        """What the newest checkpoint with an intact header stores of the run; reads no arrays."""
        for step in reversed(self.steps()):
            if self._rank(step) < math.inf:
                return self._header(step)["meta"]
        raise CheckpointError(f"{self._directory} holds no intact checkpoint")

    def read(self, step: int) -> Checkpoint:
        """Reads a checkpoint.

        Raises a `DamagedCheckpointError` if its content is not what was saved, and a
        `CheckpointError` if it is missing, cannot be read, or is of another version.
        """
        if step not in (steps := self.steps()):
            held = f"it holds: {', '.join(map(str, steps))}"
            raise CheckpointError(f"{self._directory} holds no checkpoint of step {step}; {held}")
        header = self._header(step)
        leaves = self._restore(step, "state", ocp.args.PyTreeRestore())
        if _checksum(leaves) != header["checksum"]:
            raise self._damaged(step, "the arrays do not match their checksum")
        path = self._directory / str(step)
        return Checkpoint(path, step, header["validation"], header["meta"], leaves)

    def read_intact(self, *, best: bool = False) -> tuple[Checkpoint, list[CheckpointError]]:
        """Reads the newest or `best` intact checkpoint; second, the damage of those before it.

        Damage is reported as a warning. Unless `read_only`, a damaged checkpoint is also renamed to
        `damaged-STEP`, so that training can save the step again.
        """
        damaged: dict[int, CheckpointError] = {}
        # Listed anew each time: the processes that write may have removed checkpoints since.
        while left := set(self.steps()) - {*damaged}:
            step = max(left, key=lambda step: (self._rank(step) if best else 0, step))
            found, failure = None, self._damaged(step, "in another process")
            try:
                found = self.read(step)
            except DamagedCheckpointError as error:
                failure = error
            if all_true(found is not None) and found is not None:
                if damaged:
                    logger.warning("using step %d in place of step %d", step, min(damaged))
                return found, [*damaged.values()]
            if (self._directory / str(step)).exists():
                damaged[step] = failure
                logger.warning("%s", failure)
                if not self._read_only:
                    on_first(partial(self._set_aside, step))
                    self._header.cache_clear()
            self._manager.reload()
        steps = ", ".join(map(str, damaged))
        raise CheckpointError(f"{self._directory} holds no intact checkpoint (damaged: {steps})")

    def should_preserve(self, checkpoints: Any, *, context: Any) -> Sequence[bool]:
        """For Orbax: the best one, by the validations in the headers, and damaged ones."""
        ranks = {checkpoint.step: self._rank(checkpoint.step) for checkpoint in checkpoints}
        intact = [step for step, rank in ranks.items() if rank < math.inf]
        best = max(intact, key=lambda step: (ranks[step], step), default=None)
        return [step == best or step not in intact for step in ranks]

    def _rank(self, step: int) -> float:
        try:
            value = self._header(step)["validation"]
        except DamagedCheckpointError:
            return math.inf  # Perhaps the best: it is tried first, and reported.
        return -math.inf if value is None else value

    def _read_header(self, step: int) -> dict[str, Any]:
        header = self._restore(step, "header", ocp.args.JsonRestore())
        digest, known = header.pop("digest", None), header.get("format", _FORMAT) == _FORMAT
        if (known or digest) and digest != _digest(header):
            raise self._damaged(step, "the header does not match its digest")
        if not known:
            raise CheckpointError(
                f"{self._directory / str(step)} is of another version of jaxloss; train the run "
                "again, or use the version that wrote it"
            )
        return header

    def _restore(self, step: int, item: str, args: Any) -> dict[str, Any]:
        try:
            with _silent():
                found = self._manager.restore(step, args=ocp.args.Composite(**{item: args}))
                return dict(found[item])
        except MemoryError:
            raise
        except Exception as error:  # Orbax raises a bare Exception, among others.
            if unreachable(error) or self._is_unreadable(step, error):
                raise CheckpointError(f"cannot read checkpoint {step}: {error}") from error
            raise self._damaged(step, _in_short(error)) from error

    def _is_unreadable(self, step: int, error: Exception) -> bool:
        """Whether the system refuses files of a checkpoint: TensorStore raises other errors."""

        def read(path: Path) -> None:
            for inside in path.iterdir():
                read(inside) if inside.is_dir() else inside.read_bytes()

        known = FileNotFoundError, IsADirectoryError, NotADirectoryError
        try:
            read(self._directory / str(step))
        except OSError as found:
            error = found
        return isinstance(error, OSError) and not isinstance(error, known)

    def _damaged(self, step: int, reason: str) -> DamagedCheckpointError:
        path = self._directory / str(step)
        return DamagedCheckpointError(f"checkpoint {path} is damaged ({reason})")

    def _set_aside(self, step: int) -> None:
        path = self._directory / f"damaged-{step}"
        while path.exists():
            path = path.with_name(f"{path.name}-again")
        (self._directory / str(step)).rename(path)
        logger.warning("renamed to %s", path)


def _in_short(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path; those without a type and shape become arrays."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            leaf if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _checksum(leaves: Mapping[str, np.ndarray]) -> int:
    """CRC-32 of the names, types, shapes and bytes of arrays."""
    total = 0
    for name, leaf in sorted(leaves.items()):
        total = zlib.crc32(f"{name} {leaf.dtype} {leaf.shape}".encode(), total)
        total = zlib.crc32(leaf.tobytes(), total)
    return total


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def some_lines(problems: Sequence[str], most: int = 10) -> str:
    """A line for each of the first problems, and the number of the others."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "".join(f"\n  {line[:600]}" for line in [*problems[:most], *more])
