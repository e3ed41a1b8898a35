"""Protocol A on the icons that ship with the experiments."""

from experiments.config import LossConfig, ModelConfig, TrainConfig

DESCRIPTION = "Few-shot transfer on the shipped icons (100 / 29 / 50 classes, 32×32 grey, Conv4)."
CONFIG = TrainConfig(
    model=ModelConfig(widths=(16, 32, 64, 64)),
    loss=LossConfig(temperature=1 / 8),
    steps=300,
)
