"""Protocol B on the icons: all 179 classes, split within each class."""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig
from experiments.protocols.group_softmax import GroupLossConfig, GroupSoftmaxConfig

DESCRIPTION = "Group softmax on all 179 classes of the icons, split within class (32×32, Conv4)."
CONFIG = GroupSoftmaxConfig(
    data=DataConfig(holdout=0.15),
    model=ModelConfig(widths=(16, 32, 64, 64)),
    loss=GroupLossConfig(num_groups=4),
    optimizer=OptimizerConfig(
        learning_rate=0.1,
        nesterov=False,
        weight_decay=1e-4,
        schedule="step",
        # At 120, 240 and 270 of 300 epochs in Table B.1.
        decay_steps=(320, 640, 720),
    ),
    steps=800,
)
