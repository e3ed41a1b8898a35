"""The papers' protocols, one short file each."""

from typing import NamedTuple

from experiments.config import TrainConfig
from experiments.presets import (
    cifar_fs,
    cub_fewshot,
    cub_margin,
    icons,
    icons_groups,
    icons_margin,
    inat2017_fewshot,
    mini_imagenet,
    mini_imagenet_cub,
    mini_imagenet_margin,
    tiered_imagenet,
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
        "icons-margin": icons_margin,
        "mini-imagenet": mini_imagenet,
        "tiered-imagenet": tiered_imagenet,
        "cub": cub_fewshot,
        "cifar-fs": cifar_fs,
        "inat2017": inat2017_fewshot,
        "mini-imagenet-margin": mini_imagenet_margin,
        "cub-margin": cub_margin,
        "mini-imagenet-cub": mini_imagenet_cub,
    }.items()
}
