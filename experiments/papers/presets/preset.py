"""What a preset is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.core.config import TrainConfig

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


def by_option(options: Mapping[str, str]) -> dict[str, str]:
    """The source of every option, from the options of every source.

    They are written section by section, such as `model: widths pooling; steps validate_every`.
    """
    sources: dict[str, str] = {}
    for source, text in options.items():
        for part in text.split(";"):
            section, _, names = part.rpartition(":")
            prefix = f"{section.strip()}." if section else ""
            for option in (prefix + name for name in names.split()):
                if option in sources:
                    raise ValueError(f"{option} has two sources: {sources[option]} and {source}")
                sources[option] = source
    return sources
