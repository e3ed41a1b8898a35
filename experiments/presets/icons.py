"""Protocol A on the icons that ship with the experiments."""

from experiments.config import TrainConfig

DESCRIPTION = "Few-shot transfer on the shipped icons (100 / 29 / 50 classes, 32×32 grey)."
CONFIG = TrainConfig()
