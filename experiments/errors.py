"""Errors that the user can fix: the command line shows them as a message, without a traceback."""

from __future__ import annotations


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
