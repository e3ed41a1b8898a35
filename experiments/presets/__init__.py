"""The papers' protocols, one short file each."""

from typing import NamedTuple

from experiments.config import TrainConfig
from experiments.presets import (
    cifar10_lt,
    cifar100_lt,
    cifar100_sphere,
    cifar_fs,
    cub_fewshot,
    icons,
    icons_groups,
    icons_longtail,
    icons_sphere,
    imagenet200_sphere,
    imagenet_sphere,
    inat2017_fewshot,
    mini_imagenet,
    stl10_lt,
    svhn_lt,
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
        "icons-sphere": icons_sphere,
        "icons-longtail": icons_longtail,
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
    }.items()
}
