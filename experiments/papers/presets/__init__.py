"""The papers' experiments as configurations, one file a protocol.

Results on the icons and kanji are in experiments/RESULTS.md. Photographs do not ship with the
project; of them, only Fashion-MNIST has been run here, for a short time.
"""

from __future__ import annotations

import dataclasses

from experiments.core.errors import unknown
from experiments.papers.presets import (
    few_shot,
    folder,
    group_softmax,
    hyperspherical,
    multi_label,
    negative_margin,
    two_way,
)
from experiments.papers.presets.preset import Preset

MODULES = (
    few_shot,
    group_softmax,
    hyperspherical,
    multi_label,
    two_way,
    negative_margin,
    folder,
)

PRESETS: dict[str, Preset] = {
    name: preset._replace(config=dataclasses.replace(preset.config, preset=name))
    for module in MODULES
    for name, preset in module.PRESETS.items()
}
"""Every preset by its name, protocol by protocol."""


def find_preset(name: str) -> Preset:
    """The preset of a name; a `ConfigError` if there is none."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]
