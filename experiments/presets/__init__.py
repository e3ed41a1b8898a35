"""The papers' protocols, one short file each."""

from typing import NamedTuple

from experiments.config import TrainConfig
from experiments.presets import (
    cifar_fs,
    coco,
    cub_fewshot,
    icons,
    icons_groups,
    inat2017_fewshot,
    kanji,
    mini_imagenet,
    nus_wide,
    tiered_imagenet,
    voc2007,
)


class NamedPreset(NamedTuple):
    """A configuration and the line that the command line shows for it."""

    description: str
    config: TrainConfig


PRESETS = {
    name: NamedPreset(module.DESCRIPTION, module.CONFIG)
    for name, module in {
        "icons": icons,
        "icons-groups": icons_groups,
        "kanji": kanji,
        "mini-imagenet": mini_imagenet,
        "tiered-imagenet": tiered_imagenet,
        "cub": cub_fewshot,
        "cifar-fs": cifar_fs,
        "inat2017": inat2017_fewshot,
        "coco": coco,
        "voc2007": voc2007,
        "nus-wide": nus_wide,
    }.items()
}
