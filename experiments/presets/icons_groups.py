"""Protocol B on the icons: all 179 classes, split within each class.

    python -m experiments train icons-groups --loss.name softmax

Tables: Kobayashi, WACV 2021, supplement, Table B.2. Plain SGD and weight decay are the paper's; the
learning rate, which it divides three times, falls to zero by a cosine here, in any `--steps`.

Validation accuracy (%), seed 0:

    classes   steps   learning rate   softmax   tight   loose
    179         800   0.3                76.7    34.4    68.5
    179         800   1                  55.9    42.4    45.7
    179        3200   0.1                83.3            77.4
    25          800   0.1                87.0    82.4    90.1

Group softmax takes longer to learn, the more so the more classes there are: 800 steps are 20 epochs
of all classes, and 160 of 25.
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
