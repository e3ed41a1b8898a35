"""Protocol C on CIFAR-100-LT: a long tail of CIFAR-100.

    python -m experiments train cifar100-lt

Saadabadi et al., CVPR 2024, supplement, section 7.2; imbalance 0.01 of its 0.005, 0.01, 0.02. An
epoch is 84 steps, at 0.005 74 and at 0.02 98: with another `data.imbalance`, set by hand
`steps` (200 epochs), `optimizer.warmup_steps` (5) and `optimizer.decay_steps` (160 and 180).
Not run here: the data set does not ship.
"""

from experiments.config import DataConfig
from experiments.presets import hyperspherical
from experiments.presets.normalisation import CIFAR100_MEAN, CIFAR100_STD

DESCRIPTION = (
    "Hyperspherical classification on CIFAR-100-LT, imbalance 0.01 (ResNet-32, 200 epochs)."
)
CONFIG = hyperspherical.long_tailed(
    DataConfig(name="cifar100", mean=CIFAR100_MEAN, std=CIFAR100_STD, imbalance=0.01),
    epoch=84,
)
