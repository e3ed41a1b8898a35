"""Protocol B on the icons: all 179 classes, split within each class.

    python -m experiments train icons-groups --loss.name softmax

Tables: Kobayashi, WACV 2021, supplement, Table B.2. Plain SGD and weight decay are the paper's; the
learning rate, which it divides three times, falls to zero by a cosine here, in any `--steps`.

Validation accuracy (%), all classes, 800 steps, seed 0:

    deviation of the      softmax   tight         loose
    first classifier                G = 2     4       2     4
    1 / √d                   80.2    63.1   9.0    72.8  66.2
    0.1 / √d                 80.4    73.4  62.8    76.4  67.2
    0.01 / √d                                      75.7

So the small start, and two groups. With a rate of 0.3, from 1 / √d, softmax has 76.7, tight and
loose with four groups 34.4 and 68.5.

Of 25 classes, with 131 validation images, four groups are the better for loose. From 1 / √d:

    learning rate   softmax   tight         loose
                              G = 2     4       2     4
    0.03               87.8    81.7  78.6    85.5  90.1
    0.1                87.0    87.0  82.4    85.5  90.1
    0.3                82.4          78.6          85.5

From 0.1 / √d, at a rate of 0.1 and with two groups, the three have 88.5, 88.5 and 89.3.

Group softmax takes longer to learn, the more so the more classes there are; 800 steps are 20 epochs
of all classes, and 160 of 25 classes. With 5 images a class, 800 and 3200 steps have 58.4 and 61.1
(softmax), 54.9 and 57.4 (tight), 55.7 and 58.6 (loose).
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
