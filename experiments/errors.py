"""What a person can mend: the command line shows these errors as a message, without a traceback."""

from __future__ import annotations


class ExperimentError(Exception):
    """The base of the errors whose message is all that the user needs."""


class ConfigError(ExperimentError, ValueError):
    """A setting that cannot be, by itself or with the other settings, the data or the devices."""


class DivergedError(ExperimentError):
    """The numbers of a run are no longer finite, so that going on is pointless.

    Args:
      step: The training step at which that was seen.
      what: What is not finite.
    """

    def __init__(self, step: int, what: str):
        super().__init__(step, what)
        self.step = step
        self.what = what

    def __str__(self) -> str:
        return f"diverged: {self.what} at step {self.step}"
