"""Protocol C on the icons: all 179 classes, split within each class.

    python -m experiments train icons-sphere --loss.name static --model.dim 10

Saadabadi et al., CVPR 2024, supplement, section 7.1 and Table 9: plain SGD, weight decay 1e-4. Its
loss is summed over the batch; here it is the mean, for which the same steps take 128 times the rate
and 1/128 of the decay. The decay stays 1e-4 for all methods here, and so counts for more.
It divides the rate twice in 250 epochs; here a cosine takes it to zero in 82, or in any `--steps`.

Prototypes take longer to learn than a classifier. Validation accuracy (%), d = 25, seed 0, after
300 steps:

    learning rate                  0.03   0.1    0.3    1      3
    dynamic                               23.6   23.7   26.4   21.5
    static                                23.2   23.4   23.0
    fixed-ce, inner products              36.8   37.9   13.3
    fixed-ce, cosines times 8             35.6
    fixed-ce, cosines times 16     27.0   25.9   15.8    7.1    5.9
    softmax                               62.4   66.1   66.3   diverged

So 1 for all but fixed-ce, for which give `--optimizer.learning-rate 0.3`. After 3200 steps at these
rates dynamic has 76.4, static 72.6, fixed-ce 70.2; `experiments/RESULTS.md` has what came out.
"""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig
from experiments.protocols.hyperspherical import HypersphericalConfig

DESCRIPTION = "Hyperspherical classification on all 179 classes of the icons (32×32 grey, Conv4)."
CONFIG = HypersphericalConfig(
    data=DataConfig(holdout=0.15),
    model=ModelConfig(widths=(16, 32, 64, 64), dim=50),
    optimizer=OptimizerConfig(learning_rate=1.0, nesterov=False, weight_decay=1e-4),
    steps=3200,
)
