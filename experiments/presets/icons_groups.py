"""Protocol B on the icons: all 179 classes, split within each class.

    python -m experiments train icons-groups --loss.name softmax

Tables: Kobayashi, WACV 2021, supplement, Table B.2. Plain SGD and weight decay are the paper's; the
learning rate, which it divides three times, falls to zero by a cosine here, in any `--steps`.
"""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig
from experiments.protocols.group_softmax import GroupLossConfig, GroupSoftmaxConfig

DESCRIPTION = "Group softmax on all 179 classes of the icons, split within class (32×32, Conv4)."
CONFIG = GroupSoftmaxConfig(
    data=DataConfig(holdout=0.15),
    model=ModelConfig(widths=(16, 32, 64, 64)),
    loss=GroupLossConfig(num_groups=4),
    optimizer=OptimizerConfig(learning_rate=0.1, nesterov=False, weight_decay=1e-4),
    steps=800,
)
