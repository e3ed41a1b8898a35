"""Protocol B on the icons: all 179 classes, split within each class.

    python -m experiments train icons-groups --loss.name softmax

Tables: Kobayashi, WACV 2021, supplement, Table B.2. Plain SGD and weight decay are the paper's; the
learning rate, which it divides three times, falls to zero by a cosine here, in any `--steps`.

Validation accuracy (%), all classes, 800 steps, seed 0:

    learning rate, start of the classifier   softmax   tight, G=2   G=4   loose, G=2   G=4
    0.3, deviation 1 / √d                       76.7                34.4                68.5
    0.1, deviation 1 / √d                       80.2         63.1    9.0         72.8   66.2
    0.1, a tenth of it                          80.4         73.4   62.8         76.4   67.2
    0.1, a hundredth of it                                                       75.7

So 0.1, a small start and two groups. Group softmax takes longer to learn, the more so the more
classes there are: 800 steps are 20 epochs of all classes, and 160 of 25 classes.
"""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig
from experiments.protocols.group_softmax import GroupLossConfig, GroupSoftmaxConfig

DESCRIPTION = "Group softmax on all 179 classes of the icons, split within class (32×32, Conv4)."
CONFIG = GroupSoftmaxConfig(
    data=DataConfig(holdout=0.15),
    model=ModelConfig(widths=(16, 32, 64, 64)),
    loss=GroupLossConfig(num_groups=2),
    optimizer=OptimizerConfig(learning_rate=0.1, nesterov=False, weight_decay=1e-4),
    steps=800,
)
