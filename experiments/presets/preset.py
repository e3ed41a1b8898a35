"""What a preset is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.config import TrainConfig

AUTHORS = "authors' configuration"
"""Source of a setting that the paper leaves open and its authors' published code fixes."""
OURS = "our choice"
"""Source of a setting that neither the paper nor its authors' code fixes."""
MAIN_TEXT = "the paper's main text, not at hand"
"""Source of a setting that is known from the paper's main text. Of the papers, only the supplements
are at hand."""
DIFFERS = "differs from the published one: see the comment of the preset"
"""Source of a setting that the paper or its authors' code fixes, and the preset changes."""


class Preset(NamedTuple):
    """A configuration by name."""

    description: str
    """One line, for the command line."""
    config: TrainConfig
    sources: Mapping[str, str] = {}
    """Where each setting comes from, by option: a table or section of the paper's supplement,
    `MAIN_TEXT`, `AUTHORS`, `OURS` or `DIFFERS`. Complete for the presets on the papers' data
    sets."""
    differences: Sequence[str] = ()
    """Sentences on what differs from the published training and has no option."""


def of(section: str, options: str) -> list[str]:
    """The names of options of one section, from a text such as `kind momentum`."""
    return [f"{section}.{option}" for option in options.split()]


def by_option(options: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The source of every option, from the options of every source.

    Raises:
      ValueError: An option has two sources.
    """
    sources: dict[str, str] = {}
    for source, names in options.items():
        for name in names:
            if name in sources:
                raise ValueError(f"{name} has two sources: {sources[name]} and {source}")
            sources[name] = source
    return sources
