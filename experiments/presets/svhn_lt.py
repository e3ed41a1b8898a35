"""Protocol C on SVHN-LT: a long tail of SVHN.

    python -m experiments train svhn-lt

Saadabadi et al., CVPR 2024, supplement, section 7.2; imbalance 0.01 of its 0.005, 0.01, 0.02. An
epoch is 268 steps, at 0.005 242 and at 0.02 303: with another `data.imbalance`, set by hand
`steps` (200 epochs), `optimizer.warmup_steps` (5) and `optimizer.decay_steps` (160 and 180).
Not run here: the data set does not ship.
"""

from experiments.config import DataConfig
from experiments.presets import hyperspherical

DESCRIPTION = "Hyperspherical classification on SVHN-LT, imbalance 0.01 (ResNet-32, 200 epochs)."
CONFIG = hyperspherical.long_tailed(
    DataConfig(
        name="svhn", mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970), imbalance=0.01
    ),
    epoch=268,
)
