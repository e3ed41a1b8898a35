"""Protocol D on images of one class: backbones whose features are evaluated by `linear`.

    python -m experiments sweep PRESET --over loss.name=softmax,bce,two-way
    python -m experiments linear RUN --data DATA
    python -m experiments linear RUN RUN ... --data DATA --baseline Two-way

Source: Kobayashi, CVPR 2023, supplement B: a ResNet-50 trained on ImageNet with each of the losses,
then linear classifiers on nine data sets (Table 8 of the main text, which is not at hand). The
supplement does not state the training on ImageNet; its settings are ours.
"""

from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.papers.classification import ClassificationData
from experiments.papers.multi_label import TwoWayConfig
from experiments.papers.presets.photographs import IMAGENET_CROPS, RESNET50
from experiments.papers.presets.preset import Preset

_SGD = OptimizerConfig(learning_rate=0.1, weight_decay=1e-4)
_IMAGENET_EPOCH = 1281167 // 256

PRESETS = {
    # The losses differ in size, so that each needs a learning rate of its own. As in the paper, the
    # classes of the linear classifiers can be others than those of training: --data.class-split
    # base, then `linear` with --split novel.
    "icons-two-way": Preset(
        "Two-way loss on all 179 classes of the icons, split within class (32×32, Conv4).",
        TwoWayConfig(
            data=ClassificationData(holdout=0.15),
            model=ModelConfig(widths=(16, 32, 64, 64)),
            optimizer=_SGD,
            steps=800,
        ),
    ),
    # Loss and ResNet-50: section B. Temperatures: the authors', for MS-COCO. The rest is ours. On
    # several devices, the authors' code for MS-COCO computes the class-wise half over each device's
    # share of the batch: --loss.class-wise-over device
    "imagenet-two-way": Preset(
        "Two-way loss on ImageNet-1K (ResNet-50, 90 epochs), for linear evaluation.",
        TwoWayConfig(
            data=ClassificationData(name="imagenet", **IMAGENET_CROPS),
            sampling=SamplingConfig(batch_size=256),
            model=RESNET50,
            optimizer=_SGD,
            steps=90 * _IMAGENET_EPOCH,
            validate_every=5 * _IMAGENET_EPOCH,
            log_every=_IMAGENET_EPOCH // 10,
        ),
    ),
}
