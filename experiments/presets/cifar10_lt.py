"""Protocol C on CIFAR-10-LT: a long tail of CIFAR-10.

    python -m experiments train cifar10-lt

Saadabadi et al., CVPR 2024, supplement, section 7.2; imbalance 0.01 of its 0.005, 0.01, 0.02. An
epoch is 96 steps, at 0.005 87 and at 0.02 109: with another `data.imbalance`, set by hand
`steps` (200 epochs), `optimizer.warmup_steps` (5) and `optimizer.decay_steps` (160 and 180).
Not run here: the data set does not ship.
"""

from experiments.config import DataConfig
from experiments.presets import hyperspherical

DESCRIPTION = (
    "Hyperspherical classification on CIFAR-10-LT, imbalance 0.01 (ResNet-32, 200 epochs)."
)
CONFIG = hyperspherical.long_tailed(
    DataConfig(
        name="cifar10", mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), imbalance=0.01
    ),
    epoch=96,
)
