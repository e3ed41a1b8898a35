"""Protocol C on the icons: all 179 classes, split within each class."""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig
from experiments.protocols.hyperspherical import HypersphericalConfig

DESCRIPTION = "Hyperspherical classification on all 179 classes of the icons (32×32 grey, Conv4)."
CONFIG = HypersphericalConfig(
    data=DataConfig(holdout=0.15),
    model=ModelConfig(widths=(16, 32, 64, 64), dim=50),
    optimizer=OptimizerConfig(learning_rate=1.0, nesterov=False, weight_decay=1e-4),
    steps=800,
)
