"""What a preset is."""

from typing import NamedTuple

from experiments.core.config import TrainConfig


class Preset(NamedTuple):
    """A configuration by name."""

    description: str
    """One line, for the command line."""
    config: TrainConfig
