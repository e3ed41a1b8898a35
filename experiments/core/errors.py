"""Errors that the user can fix: the command line shows them as a message, without a traceback."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path


class ExperimentError(Exception):
    """Base of the errors whose message is all that the user needs."""


class ConfigError(ExperimentError, ValueError):
    """An option is impossible by itself, or with the other options, the data or the devices."""


class DivergedError(ExperimentError):
    """The numbers of a run are no longer finite: `what`, as noticed at a step."""

    def __init__(self, step: int, what: str):
        super().__init__(f"diverged: {what} at step {step}")
        self.step = step


def unknown(what: str, name: str, known: Iterable[str], others: str = "") -> ConfigError:
    """The error for a name that does not exist, with the nearest ones that do.

    Without a near one, it has `others`, how to list them; by default, it lists all `known`.
    """
    known = list(known)
    hint = nearest(name, known) or others or f"available: {', '.join(known)}"
    return ConfigError(f"no {what} {name}; {hint}")


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A question that has the names that are nearest to a misspelled one; empty if none is near."""
    near = [prefix + other for other in difflib.get_close_matches(name, list(known))]
    return f"did you mean {' or '.join(near)}?" if near else ""


def nearest_path(path: Path) -> str:
    """As `nearest`, of what is beside a path."""
    return nearest(path.name, [p.name for p in path.parent.glob("*")], f"{path.parent}/")


def reason_of(error: BaseException) -> str:
    """The message, in a line, of an error that the user can fix; empty for any other error."""
    if isinstance(error, ExperimentError):
        return str(error)
    if reason := full_disk(error):
        return f"cannot write {_unwritten(error)}: {reason}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if reason := unreachable(error):
        return f"cannot reach Google Cloud Storage: {reason}"
    if "Unable to initialize backend" in str(error):
        return f"JAX finds no device; unset JAX_PLATFORMS, or set it to cpu ({_in_a_line(error)})"
    # XLA has these words, in a JaxRuntimeError.
    if isinstance(error, MemoryError) or re.search("RESOURCE_EXHAUSTED|Out of memory", str(error)):
        hint = "choose a smaller batch, network or image size"
        return f"there is not enough memory; {hint}: {_in_a_line(error)}"
    return ""


def full_disk(error: BaseException) -> str:
    """The operating system's words for a full disk or quota, where that caused an error; else "".

    TensorStore and array_record raise other errors with these words; TFDS has its own.
    """
    for cause in _chain(error):
        for code in (ENOSPC, EDQUOT, EFBIG):
            if os.strerror(code) in str(cause):
                return os.strerror(code)
        if "Not enough disk space" in str(cause):
            return os.strerror(ENOSPC)
    return ""


def unreachable(error: BaseException) -> str:
    """The words of gcsfs, or of the libraries below it, where the network caused an error."""
    for cause in _chain(error):
        if type(cause).__module__.startswith(("gcsfs", "aiohttp", "google.auth", "requests")):
            return _in_a_line(cause) or type(cause).__name__
    return ""


def _unwritten(error: BaseException) -> str:
    """The path in an error of `full_disk`; `storage.writing` adds it where there is none."""
    for cause in _chain(error):
        if name := getattr(cause, "filename", None):
            return name
        if path := re.search(r"(?<![\w.])/[^\s\"':;,]+", str(cause)):
            return path[0]
    return "standard output"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
