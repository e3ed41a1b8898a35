"""Protocol C on CIFAR-100.

    python -m experiments train cifar100-sphere --loss.name static --model.dim 16

Saadabadi et al., CVPR 2024, supplement, section 7.1 and Table 9 (d = 16, 32, 64); for its
"Fixed W + CE": `--loss.name fixed-ce --loss.reduction mean`. Not run here: the data set does not
ship.
"""

from experiments.presets import hyperspherical

DESCRIPTION = "Hyperspherical classification on CIFAR-100 (ResNet-32, 250 epochs)."
CONFIG = hyperspherical.BALANCED
