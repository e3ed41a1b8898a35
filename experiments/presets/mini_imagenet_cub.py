"""Protocol E from mini-ImageNet to CUB: base classes of the one, novel classes of the other.

    python -m experiments train mini-imagenet-cub --loss.margin -0.02

All 100 classes of mini-ImageNet are base classes. Epochs: as on mini-ImageNet. Not run here: the
data sets do not ship.
"""

import dataclasses

from experiments.presets import margin

DESCRIPTION = "Negative margin from mini-ImageNet to CUB (100 / 50 / 50 classes, ResNet-12)."
CONFIG = margin.for_epochs(
    dataclasses.replace(
        margin.CONFIG,
        data=dataclasses.replace(margin.CONFIG.data, name="mini_imagenet", holdout=0.05),
        novel_data="cub_fewshot",
    ),
    images=57000,
    warmup=50,
    after=200,
)
