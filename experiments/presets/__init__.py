"""The papers' protocols, one short file each."""

from typing import NamedTuple

from experiments.config import TrainConfig
from experiments.presets import (
    caltech256_groups,
    cifar10_lt,
    cifar100_lt,
    cifar100_sphere,
    cifar_fs,
    coco,
    cub_fewshot,
    cub_margin,
    food101_groups,
    icons,
    icons_groups,
    icons_longtail,
    icons_margin,
    icons_sphere,
    imagenet200_sphere,
    imagenet_groups,
    imagenet_sphere,
    inat2017_fewshot,
    kanji,
    mini_imagenet,
    mini_imagenet_cub,
    mini_imagenet_margin,
    nus_wide,
    stl10_lt,
    sun397_groups,
    svhn_lt,
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
        # A. Few-shot transfer with integrated losses.
        "icons": icons,
        "mini-imagenet": mini_imagenet,
        "tiered-imagenet": tiered_imagenet,
        "cub": cub_fewshot,
        "cifar-fs": cifar_fs,
        "inat2017": inat2017_fewshot,
        # B. Group softmax.
        "icons-groups": icons_groups,
        "imagenet-groups": imagenet_groups,
        "food101-groups": food101_groups,
        "caltech256-groups": caltech256_groups,
        "sun397-groups": sun397_groups,
        # C. Hyperspherical classification, balanced and long-tailed.
        "icons-sphere": icons_sphere,
        "cifar100-sphere": cifar100_sphere,
        "imagenet200-sphere": imagenet200_sphere,
        "imagenet-sphere": imagenet_sphere,
        "icons-longtail": icons_longtail,
        "cifar10-lt": cifar10_lt,
        "cifar100-lt": cifar100_lt,
        "svhn-lt": svhn_lt,
        "stl10-lt": stl10_lt,
        # D. Multi-label classification.
        "kanji": kanji,
        "coco": coco,
        "voc2007": voc2007,
        "nus-wide": nus_wide,
        # E. Negative margin.
        "icons-margin": icons_margin,
        "mini-imagenet-margin": mini_imagenet_margin,
        "cub-margin": cub_margin,
        "mini-imagenet-cub": mini_imagenet_cub,
    }.items()
}
