"""The papers' protocols, one short file each."""

from typing import NamedTuple

from experiments.config import TrainConfig
from experiments.presets import (
    cifar10_lt,
    cifar100_lt,
    cifar100_sphere,
    cifar_fs,
    coco,
    cub_fewshot,
    icons,
    icons_groups,
    icons_longtail,
    icons_sphere,
    imagenet200_sphere,
    imagenet_sphere,
    inat2017_fewshot,
    kanji,
    mini_imagenet,
    stl10_lt,
    svhn_lt,
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
        "icons-sphere": icons_sphere,
        "icons-longtail": icons_longtail,
        "kanji": kanji,
        "mini-imagenet": mini_imagenet,
        "tiered-imagenet": tiered_imagenet,
        "cub": cub_fewshot,
        "cifar-fs": cifar_fs,
        "inat2017": inat2017_fewshot,
        "cifar100-sphere": cifar100_sphere,
        "imagenet200-sphere": imagenet200_sphere,
        "imagenet-sphere": imagenet_sphere,
        "cifar10-lt": cifar10_lt,
        "cifar100-lt": cifar100_lt,
        "svhn-lt": svhn_lt,
        "stl10-lt": stl10_lt,
        "coco": coco,
        "voc2007": voc2007,
        "nus-wide": nus_wide,
    }.items()
}
