"""Protocol E on CUB few-shot.

    python -m experiments train cub-margin --loss.margin -0.02

Classes have 60 images at most, so that none are held out: the episodes of the base classes have
images of the training. Epochs: Liu et al., ECCV 2020, supplement. Not run here: the data set does
not ship.
"""

import dataclasses

from experiments.presets import margin

DESCRIPTION = "Negative margin on CUB few-shot (100 / 50 / 50 classes, ResNet-12)."
CONFIG = margin.for_epochs(
    dataclasses.replace(
        margin.CONFIG,
        data=dataclasses.replace(margin.CONFIG.data, name="cub_fewshot"),
    ),
    images=5885,
    warmup=100,
    after=400,
)
