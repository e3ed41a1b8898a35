"""Protocol C on ImageNet-200: its images at 64×64.

    python -m experiments train imagenet200-sphere

Saadabadi et al., CVPR 2024, supplement, section 7.1. An epoch is 781 steps. Not run here: the data
set does not ship.
"""

from dataclasses import replace

from experiments.presets import hyperspherical
from experiments.presets.normalisation import IMAGENET_MEAN, IMAGENET_STD

_EPOCH = 781
DESCRIPTION = "Hyperspherical classification on ImageNet-200 (ResNet-32, 64×64, 250 epochs)."
CONFIG = replace(
    hyperspherical.BALANCED,
    data=replace(
        hyperspherical.BALANCED.data,
        name="imagenet200",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        pad=8,
    ),
    model=replace(hyperspherical.BALANCED.model, dim=50),
    optimizer=replace(hyperspherical.BALANCED.optimizer, decay_steps=(100 * _EPOCH, 200 * _EPOCH)),
    steps=250 * _EPOCH,
    validate_every=10 * _EPOCH,
)
