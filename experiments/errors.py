"""Errors that the user can fix: the command line shows them as a message, without a traceback."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from errno import EDQUOT, EFBIG, ENOSPC


class ExperimentError(Exception):
    """Base of the errors whose message is all that the user needs."""


class ConfigError(ExperimentError, ValueError):
    """An option is impossible by itself, or with the other options, the data or the devices."""


class DivergedError(ExperimentError):
    """The numbers of a run are no longer finite: `what`, as noticed at a step."""

    def __init__(self, step: int, what: str):
        super().__init__(step, what)
        self.step = step
        self.what = what

    def __str__(self) -> str:
        return f"diverged: {self.what} at step {self.step}"


def unknown(what: str, name: str, known: Iterable[str], others: str = "") -> ConfigError:
    """The error for a name that does not exist, with the nearest ones that do.

    Without a near one, it has `others`, how to list them; by default, it lists all `known`.
    """
    known = list(known)
    if near := difflib.get_close_matches(name, known):
        return ConfigError(f"no {what} {name!r}; did you mean {' or '.join(near)}?")
    return ConfigError(f"no {what} {name!r}; {others or 'available: ' + ', '.join(known)}")


def full_disk(error: BaseException | None) -> str:
    """The operating system's words for a full disk or quota, where that caused an error; else "".

    TensorStore and array_record raise a ValueError and a RuntimeError with these words. TFDS, which
    looks before it writes, has its own.
    """
    while error is not None:
        for code in (ENOSPC, EDQUOT, EFBIG):
            if os.strerror(code) in str(error):
                return os.strerror(code)
        if "Not enough disk space" in str(error):
            return os.strerror(ENOSPC)
        error = error.__cause__ or error.__context__
    return ""
