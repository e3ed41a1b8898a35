"""Protocol E on mini-ImageNet.

    python -m experiments train mini-imagenet-margin --loss.margin -0.02

5 % of each base class, 30 images, are held out for the episodes of the base classes; the paper
takes other images of ImageNet for them. Epochs: Liu et al., ECCV 2020, supplement. Not run here:
the data set does not ship.
"""

import dataclasses

from experiments.presets import margin

DESCRIPTION = "Negative margin on mini-ImageNet (64 / 16 / 20 classes, ResNet-12)."
CONFIG = margin.for_epochs(
    dataclasses.replace(
        margin.CONFIG,
        data=dataclasses.replace(margin.CONFIG.data, name="mini_imagenet", holdout=0.05),
    ),
    images=36480,
    warmup=50,
    after=200,
)
