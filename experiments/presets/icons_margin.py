"""Protocol E on the icons that ship with the experiments."""

from experiments.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.protocols.negative_margin import MarginLossConfig, NegativeMarginConfig

DESCRIPTION = "Negative margin on the shipped icons (100 / 29 / 50 classes, 32×32 grey, Conv4)."
CONFIG = NegativeMarginConfig(
    sampling=SamplingConfig(batch_size=128),
    model=ModelConfig(widths=(16, 32, 64, 64)),
    loss=MarginLossConfig(margin=-0.1),
    optimizer=OptimizerConfig(
        kind="adam",
        learning_rate=3e-3,
        weight_decay=1e-5,
        warmup_steps=200,
        warmup_from=1 / 16,
    ),
    steps=800,
)
