"""Protocol B on the icons: all 179 classes, split within each class."""

from experiments.config import DataConfig, ModelConfig
from experiments.protocols.group_softmax import GroupLossConfig, GroupSoftmaxConfig

DESCRIPTION = "Group softmax on all 179 classes of the icons, split within class (32×32, Conv4)."
CONFIG = GroupSoftmaxConfig(
    data=DataConfig(holdout=0.15),
    model=ModelConfig(widths=(16, 32, 64, 64)),
    loss=GroupLossConfig(num_groups=4),
    steps=800,
)
