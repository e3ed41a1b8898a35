"""The papers' experiments as configurations, one table for each protocol.

Comments beside the values name their source: a table or section of the paper's supplement; the
paper's main text, which is not at hand; the configuration or code that its authors published; or
"ours", for what none of them fixes. They also say what differs from the published training.

Results on the icons, kanji and Fashion-MNIST are in experiments/RESULTS.md; its appendix has their
commands, and how settings were chosen. Other photographs have not been run here.
"""

import dataclasses

from experiments.core.errors import unknown
from experiments.papers.presets import (
    few_shot,
    folder,
    group_softmax,
    hyperspherical,
    multi_label,
    negative_margin,
)
from experiments.papers.presets.shared import Preset

MODULES = few_shot, group_softmax, hyperspherical, multi_label, negative_margin, folder

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
