"""Protocol C on STL10-LT: a long tail of STL-10.

    python -m experiments train stl10-lt

Saadabadi et al., CVPR 2024, supplement, section 7.2; imbalance 0.01 of its 0.005, 0.01, 0.02. An
epoch is 9 steps, at 0.005 8 and at 0.02 10: with another `data.imbalance`, set by hand
`steps` (200 epochs), `optimizer.warmup_steps` (5) and `optimizer.decay_steps` (160 and 180).
Not run here: the data set does not ship.
"""

from experiments.config import DataConfig
from experiments.presets import hyperspherical

DESCRIPTION = "Hyperspherical classification on STL10-LT, imbalance 0.01 (ResNet-32, 200 epochs)."
CONFIG = hyperspherical.long_tailed(
    DataConfig(
        name="stl10", mean=(0.4467, 0.4398, 0.4066), std=(0.2603, 0.2566, 0.2713), imbalance=0.01
    ),
    epoch=9,
)
