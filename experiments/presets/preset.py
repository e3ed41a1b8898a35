"""What a preset is."""

from __future__ import annotations

from typing import NamedTuple

from experiments.config import TrainConfig


class Preset(NamedTuple):
    """A configuration by name."""

    description: str
    """One line, for the command line."""
    config: TrainConfig
