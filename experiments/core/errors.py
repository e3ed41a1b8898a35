"""Errors that the user can fix: the command line shows them as a message, without a traceback."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from types import MappingProxyType

STANDARD_OUTPUT = "standard output"


class ExperimentError(Exception):
    """Base of the errors whose message is all that the user needs."""


class ConfigError(ExperimentError, ValueError):
    """An option is impossible by itself, or with the other options, the data or the devices."""


class DivergedError(ExperimentError):
    """The numbers of a run are no longer finite: `what`, as noticed at a step."""

    def __init__(self, step: int, what: str):
        super().__init__(f"diverged: {what} at step {step}")
        self.step = step


def unknown(
    what: str,
    name: str,
    known: Iterable[str],
    others: str = "",
    prefix: str = "",
    removed: Mapping[str, str] = MappingProxyType({}),
) -> ConfigError:
    """The error for a name that does not exist, with the nearest ones that do.

    Without a near one, it has `others`, how to list them; by default, it lists all `known`. The
    message has `prefix` before every name. For a name of an earlier version, `removed` says what to
    do in place of it.
    """
    if name in removed:
        return ConfigError(f"this version has no {what} {prefix}{name}; {removed[name]}")
    known = list(known)
    all_known = ", ".join(prefix + other for other in known)
    hint = nearest(name, known, prefix) or others or f"available: {all_known}"
    return ConfigError(f"no {what} {prefix}{name}; {hint}")


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A question that has the names that are nearest to a misspelled one; empty if none is near."""
    near = [prefix + other for other in difflib.get_close_matches(name, list(known))]
    return f"did you mean {' or '.join(near)}?" if near else ""


def nearest_path(path: Path, pattern: str = "*") -> str:
    """As `nearest`, of what is beside a path: all, or the folders alone by the pattern `*/`."""
    return nearest(path.name, [p.name for p in path.parent.glob(pattern)], f"{path.parent}/")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def full_disk(error: BaseException | None) -> str:
    """The operating system's words for a full disk or quota, where that caused an error; else "".

    TensorStore and array_record raise a ValueError and a RuntimeError with these words. TFDS, which
    looks before it writes, has its own.
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
            return " ".join(str(cause).split())[:300] or type(cause).__name__
    return ""


def unwritten(error: BaseException) -> str:
    """What could not be written, by an error of `full_disk`: the path that it names, if any."""
    for cause in _chain(error):
        named = getattr(cause, "filename", None) or re.search(
            r"(?<![\w.])/[^\s\"':;,]+", str(cause)
        )
        if named:
            return named if isinstance(named, str) else named[0]
    return STANDARD_OUTPUT  # All files have a name, in their errors or by `storage.writing`.
