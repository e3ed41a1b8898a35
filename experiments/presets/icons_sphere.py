"""Protocol C on the icons: all 179 classes, split within each class.

    python -m experiments train icons-sphere --loss.name static --model.dim 10

Tables: Saadabadi et al., CVPR 2024, supplement, Table 9. Its loss is summed over the batch; here it
is the mean, whose learning rate is 128 times that of the sum.

Validation accuracy (%) after 300 steps with d = 25, seed 0, for learning rates 0.1 / 0.3 / 1:
dynamic 23.6 / 23.7 / 26.4, static 23.2 / 23.4 / 23.0, softmax 62.4 / 66.1 / 66.3, fixed-ce with
cosines times 16 25.9 / 15.8 / 7.1, with inner products 36.8 / 37.9 / LINEAR1. At 3, dynamic has 21.5 and
softmax diverges; fixed-ce has 35.6 with cosines times 8 at 0.1. So 1 for all but fixed-ce, which
takes inner products and 0.3 (`--optimizer.learning-rate 0.3`). Prototypes take longer to learn than
a classifier: after 800 steps with d = 50, validation accuracy is 64.3 % (dynamic) and 64.5 %
(static) at a learning rate of 1.
"""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig
from experiments.protocols.hyperspherical import HypersphericalConfig

DESCRIPTION = "Hyperspherical classification on all 179 classes of the icons (32×32 grey, Conv4)."
CONFIG = HypersphericalConfig(
    data=DataConfig(holdout=0.15),
    model=ModelConfig(widths=(16, 32, 64, 64), dim=50),
    optimizer=OptimizerConfig(learning_rate=1.0, nesterov=False, weight_decay=1e-4),
    steps=800,
)
