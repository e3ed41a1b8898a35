"""The checkpoints of a run, by Orbax, with a digest of every leaf.

Orbax writes in the background, and a kill at any moment leaves all finished checkpoints. It reports
a file that is missing or truncated, but restores a flipped bit without an error: the header of a
checkpoint therefore holds the sum of all bytes of each leaf, modulo 2^32, and a digest of itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from experiments.core.config import CONFIG_FILE
from experiments.core.errors import ExperimentError, full_disk, nearest_path
from experiments.core.processes import all_true, is_first, on_first
from experiments.core.storage import check_json, is_remote, regular, writing

T = TypeVar("T")
logger = logging.getLogger(__name__)
_ORBAX_LOG = logging.getLogger("absl")

CHECKPOINTS_FOLDER = "checkpoints"

_FORMAT = 4
# As kinds of `check_json`.
_HEADER: Any = {"format": int, "step": int, "validation": float | None, "leaves": {}, "meta": {}}
_NEWEST = 2
"""How many of the newest checkpoints stay: one damaged file must not cost the run."""


class CheckpointError(ExperimentError):
    """A checkpoint that is missing, that is damaged, or that does not fit."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose content is not what was saved."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


class Restored(NamedTuple):
    """What `Checkpoints.restore` returns."""

    step: int
    state: Any
    meta: dict[str, Any]


def checkpoints_folder(path: Path) -> Path:
    """The folder of a run's checkpoints, from the run's directory or from this folder itself."""
    inside = path / CHECKPOINTS_FOLDER
    return inside if inside.is_dir() else path


def run_folder(path: Path) -> Path:
    """The directory of the run that a path names: the run directory, or its checkpoints folder."""
    inside = path.resolve().name == CHECKPOINTS_FOLDER and checkpoints_folder(path) == path
    return path.resolve().parent if inside else path


def _no_checkpoint(path: Path) -> str:
    """What there is in place of checkpoints, and what to do."""
    if not path.is_dir():
        return f"there is no directory {path}; {nearest_path(path, '*/') or 'name that of a run'}"
    run = path.parent if path.name == CHECKPOINTS_FOLDER else path
    if (run / CONFIG_FILE).exists():
        return f"{run} holds a run without a checkpoint; run the same `train` again"
    for depth in range(1, 5):  # The runs of a sweep are below a folder for each of its options.
        if runs := sorted(file.parent for file in path.glob("*/" * depth + CONFIG_FILE)):
            return f"{path} is no run; name a run in it: it holds {len(runs)}, such as {runs[0]}"
    names = sorted(file.name for file in path.iterdir())
    shown = ", ".join(names[:5]) + ", …" * (len(names) > 5) or "nothing"
    return f"{path} is no run: it holds {shown}; name a directory that `train` has written"


def _meet(*, key: str, timeout_ms: int) -> None:
    """Waits for all processes, unless a save has failed here: Orbax would wait for 20 minutes."""
    if (failure := sys.exception()) is not None:
        raise failure
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


@contextlib.contextmanager
def _late_work_is_silent() -> Iterator[None]:
    """Orbax does not wait for all leaves after one has failed: TensorStore would print errors."""
    usual = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            usual(unraisable)

    sys.unraisablehook = report
    yield
    sys.unraisablehook = usual  # Not after a failure, because that work ends later.


class Checkpoints(managers.PreservationPolicy):
    """The checkpoints of one run: the newest two, and the best by validation.

    Of equal validations, the latest is the best, as for Orbax's `BestN`.

    With several processes, all of them open the folder, which all of them see, and call every
    method. What reads a checkpoint raises `DamagedCheckpointError` where it is damaged, and
    `CheckpointError` where it is missing or does not fit. With `read_only`, for reading beside the
    processes that write, no file is changed, and there must be a checkpoint.
    """

    def __init__(self, directory: Path, *, read_only: bool = False):
        self._directory = directory if is_remote(directory) else directory.absolute()
        self._read_only = read_only
        self._headers: dict[int, dict[str, Any]] = {}
        self._saving: Path | None = None
        self._while_saving = contextlib.ExitStack()
        self._failures: list[BaseException | None] = []
        if read_only and not self._directory.is_dir():
            raise CheckpointError(_no_checkpoint(directory))
        # A kill while Orbax removes a folder would leave a damaged checkpoint; renaming is atomic.
        trash = None if read_only or is_remote(directory) else ".trash"
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            preservation_policy=self,
            cleanup_tmp_directories=not read_only,
            todelete_subdir=trash,
            async_options=ocp.AsyncOptions(barrier_sync_fn=_meet),
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._trash = None if trash is None else self._directory / trash
        self._empty_trash()
        if read_only and not self.steps():
            raise CheckpointError(_no_checkpoint(directory))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.wait()
        # Orbax raises again what `wait` has reported.
        with contextlib.nullcontext() if failure is None else contextlib.suppress(Exception):
            self._manager.close()
        _ORBAX_LOG.removeFilter(self._keep_failure)
        # After a failure, Orbax does not wait for the threads of all leaves: these, and no others,
        # remain silent.
        late = set(threading.enumerate()) - {threading.current_thread()}
        if self._failures and late:
            _ORBAX_LOG.addFilter(lambda _: threading.current_thread() not in late)
        self._empty_trash()

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
        """Begins to write a checkpoint of a pytree, which is copied before this returns.

        `step` is the number of training steps done, above that of every checkpoint. `meta`, JSON
        types, is returned by `restore` and `meta`. `validation` ranks the checkpoint; None, NaN and
        infinities rank below every number.
        """
        # Copies: the next training step may reuse the memory while the file is being written.
        values = {
            name: np.array(leaf, order="C", copy=True) for name, leaf in _by_name(state).items()
        }
        value = math.nan if validation is None else float(validation)
        header = {
            "format": _FORMAT,
            "step": step,
            "validation": value if math.isfinite(value) else None,
            "leaves": {n: [_describe(x), _byte_sum(x)] for n, x in values.items()},
            "meta": dict(meta),
        }
        header = json.loads(json.dumps(header))
        stored = {name: value for name, value in values.items() if value.size}
        self.wait()
        self._empty_trash()
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(stored),
            header=ocp.args.JsonSave({**header, "sha256": _json_digest(header)}),
        )
        if (newest := max(self.steps(), default=-1)) >= step:
            raise CheckpointError(f"cannot save step {step}: {self._directory} holds step {newest}")
        self._headers[step], self._saving = header, self._path(step)
        self._while_saving.enter_context(_late_work_is_silent())
        _ORBAX_LOG.addFilter(self._keep_failure)
        with writing(self._saving):
            self._manager.save(step, args=args)

    def wait(self) -> None:
        """Waits until the last save is on disk; a `CheckpointError` if it failed."""
        saved, self._saving = self._saving, None
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:  # Raised or not, depending on when it happened.
            self._failures.insert(0, error)
        if saved is None:
            return
        if not (saved.exists() and ocp.utils.is_checkpoint_finalized(saved)):
            self._while_saving.pop_all()
            cause = next(filter(None, self._failures), None)
            reason = next(filter(None, map(full_disk, self._failures)), "")
            # With several processes, because another one has ended, as a rule.
            own = jax.process_count() == 1 or reason
            gone = "" if self._directory.exists() else "its folder does not exist any more"
            text = gone if cause is None else f"{type(cause).__name__}: {cause}"
            reason = reason or textwrap.shorten(text, 300, placeholder=" …") or "unknown reason"
            raise (CheckpointError if own else RuntimeError)(f"cannot write {saved}: {reason}")
        self._while_saving.close()

    def _keep_failure(self, record: logging.LogRecord) -> bool:
        """Keeps what Orbax logs of a failure in the background for `wait`, in place of printing."""
        if record.levelno < logging.ERROR or not record.exc_info:
            return True
        self._failures.append(record.exc_info[1])
        return False

    def validation(self, step: int) -> float | None:
        """The value of the validation saved with a step; None where there was none."""
        return self._header(step)["validation"]

    def meta(self, step: int) -> dict[str, Any]:
        """The metadata saved with a step."""
        return self._header(step)["meta"]

    def restore(self, target: Any, step: int, *, parts: tuple[str, ...] = ()) -> Restored:
        """Reads a checkpoint into the structure of `target`, a pytree whose values are not used.

        The checkpoint must have leaves of the same names, types and shapes; with `parts`, paths
        such as `params/backbone`, only at and below these. The leaves of the result are
        NumPy arrays.
        """
        header, wanted = self._header(step), _by_name(target)
        stored = {name: leaf for name, (leaf, _) in header["leaves"].items()}
        if parts:
            within = tuple(f"{part}/" for part in parts)
            stored = {n: leaf for n, leaf in stored.items() if f"{n}/".startswith(within)}
        expected = {name: _describe(leaf) for name, leaf in wanted.items()}
        problems = [
            f"{n}: {stored.get(n, 'not')} in the checkpoint, {expected.get(n, 'not')} expected"
            for n in {**stored, **expected}
            if stored.get(n) != expected.get(n)
        ]
        if problems:
            raise CheckpointError(
                f"checkpoint {self._path(step)} does not fit:{some_lines(problems)}"
            )
        found = self._reading(step, lambda: self._read_leaves(step, wanted, header))
        state = jax.tree.unflatten(jax.tree.structure(target), [found[name] for name in wanted])
        return Restored(step, state, header["meta"])

    def _read_leaves(
        self, step: int, wanted: Mapping[str, Any], header: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The leaves by name, after a comparison with the sums of their bytes."""
        filled = {name: leaf for name, leaf in wanted.items() if math.prod(leaf.shape)}
        item = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for n, leaf in filled.items()}
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in filled}
        args = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
        with _late_work_is_silent():
            found = self._manager.restore(step, args=ocp.args.Composite(state=args))["state"]
        for name in filled:
            if _byte_sum(found[name]) != header["leaves"][name][1]:
                raise self.damaged(step, f"{name} does not match its digest")
        empty = {n: np.empty(x.shape, x.dtype) for n, x in wanted.items() if n not in filled}
        return found | empty

    def read_intact(
        self, read: Callable[[int], T], *, best: bool = False
    ) -> tuple[T, list[DamagedCheckpointError]]:
        """`read(step)` of the newest or `best` intact checkpoint, and the damage of earlier ones.

        A damaged checkpoint, for which `read` raises `DamagedCheckpointError`, is reported as a
        warning, which names the one that is used instead. Unless `read_only`, it is also renamed to
        `damaged-STEP`, so that training can save the step again.
        """
        damaged: list[DamagedCheckpointError] = []
        # Listed anew each time: the processes that write may have removed checkpoints since.
        while left := set(self.steps()) - {error.step for error in damaged}:
            step = max(left, key=lambda step: (self._rank(step) if best else 0, step))
            result, failure = None, None
            try:
                result = read(step)
            except DamagedCheckpointError as error:
                failure = error
            if not all_true(failure is None):
                if self._path(step).exists():
                    damaged.append(failure or self.damaged(step, "in another process"))
                    self._set_aside(damaged[-1])
                self._manager.reload()
                continue
            if damaged:
                logger.warning("using step %d in place of step %d", step, damaged[0].step)
            return result, damaged  # pyright: ignore[reportReturnType]
        if not damaged:
            raise CheckpointError(f"{self._directory} holds no checkpoint")
        steps = ", ".join(str(error.step) for error in damaged)
        raise CheckpointError(f"{self._directory} holds no intact checkpoint (damaged: {steps})")

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _rank(self, step: int) -> float:
        try:
            value = self.validation(step)
        except DamagedCheckpointError:
            return math.inf  # Perhaps the best: it is tried first, and reported.
        return -math.inf if value is None else value

    def _header(self, step: int) -> dict[str, Any]:
        if step in self._headers:
            return self._headers[step]
        if step not in (steps := self.steps()):
            raise CheckpointError(
                f"{self._directory} holds no checkpoint of step {step}; "
                f"it holds: {', '.join(map(str, steps)) or 'none'}"
            )

        def read() -> dict[str, Any]:
            args = ocp.args.Composite(header=ocp.args.JsonRestore())
            for path in _files(self._path(step)) if not is_remote(self._directory) else ():
                regular(path)
            header = self._manager.restore(step, args=args)["header"]
            if header.pop("sha256") != _json_digest(header) or header["step"] != step:
                raise self.damaged(step, "the header does not match its digest")
            if header.get("format") == _FORMAT:
                check_json(header, _HEADER, "header")
                for name, leaf in header["leaves"].items():
                    if not (isinstance(leaf, list) and [*map(type, leaf)] == [str, int]):
                        raise ValueError(f"the header has no dtype and sum of {name[:80]!r}")
            return header

        header = self._reading(step, read)
        if header.get("format") != _FORMAT:
            found = f"{header.get('format')!r:.20}"
            raise CheckpointError(
                f"{self._path(step)} has format {found}, and this version reads format {_FORMAT}; "
                "use the version of jaxloss that wrote it"
            )
        self._headers[step] = header
        return header

    def _reading(self, step: int, read: Callable[[], T]) -> T:
        """The result of `read`. A failure is damage, unless a file cannot be read at all."""
        try:
            return read()
        except (ExperimentError, MemoryError):
            raise
        except Exception as error:  # Orbax raises a bare Exception, among others.
            for path in _files(self._path(step)):
                try:
                    regular(path).read_bytes()
                except FileNotFoundError:
                    pass
                except OSError as cause:
                    raise CheckpointError(f"cannot read {path}: {cause}") from error
            reason = f"{type(error).__name__}: {error}"
            raise self.damaged(step, textwrap.shorten(reason, 200, placeholder=" …")) from error

    def damaged(self, step: int, reason: str) -> DamagedCheckpointError:
        """The error for a checkpoint whose content is not what was saved."""
        return DamagedCheckpointError(step, f"checkpoint {self._path(step)} is damaged ({reason})")

    def _set_aside(self, error: DamagedCheckpointError) -> None:
        def rename() -> None:
            first = f"damaged-{error.step}"
            names = itertools.chain([first], (f"{first}-{n}" for n in itertools.count(2)))
            path = next(path for name in names if not (path := self._directory / name).exists())
            self._path(error.step).rename(path)
            logger.warning("%s: renamed to %s", error, path.name)

        self._headers.pop(error.step, None)
        if self._read_only:
            logger.warning("%s", error)
        else:
            on_first(rename)

    def should_preserve(self, checkpoints: Any, *, context: Any) -> Sequence[bool]:
        """For Orbax: the newest ones and the best, by the validations in their headers."""
        ranks = {checkpoint.step: self._rank(checkpoint.step) for checkpoint in checkpoints}
        # One with a damaged header may be the best; it does not take the place of an intact one.
        intact = [step for step, rank in ranks.items() if rank < math.inf]
        best = max(intact, key=lambda step: (ranks[step], step), default=None)
        newest = sorted(ranks)[-_NEWEST:]
        return [step == best or step in newest or step not in intact for step in ranks]

    def _empty_trash(self) -> None:
        if self._trash is not None and is_first():
            shutil.rmtree(self._trash, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    """All files in a folder; on an object store, epath has no `rglob`."""
    for path in folder.iterdir() if folder.is_dir() else ():
        yield from _files(path) if path.is_dir() else [path]


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, such as `params/backbone/kernel`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _describe(leaf: Any) -> str:
    """The dtype and the shape of a leaf."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def _byte_sum(leaf: np.ndarray) -> int:
    """The sum of all bytes of a leaf, modulo 2^32. One flipped bit changes it."""
    return int(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).sum(dtype=np.uint32))


def some_lines(problems: Sequence[str], most: int = 10) -> str:
    """A line for each of the first problems, and the number of the others."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "".join(f"\n  {line[:600]}" for line in [*problems[:most], *more])


def _json_digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
