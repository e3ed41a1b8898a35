"""Protocol D on images of one class: backbones whose features are evaluated by `linear`.

    python -m experiments sweep PRESET --over loss.name=softmax,bce,two-way
    python -m experiments linear RUN --data DATA
    python -m experiments linear RUN RUN ... --data DATA --baseline Two-way

Source: Kobayashi, CVPR 2023, supplement B: a ResNet-50 trained on ImageNet with each of the losses,
then linear classifiers on nine data sets (Table 8 of the main text, which is not at hand). The
supplement does not state the training on ImageNet; its settings are our choice.
"""

from __future__ import annotations

from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.papers.classification import ClassificationData
from experiments.papers.presets.photographs import IMAGENET_CROP_NAMES, IMAGENET_CROPS, RESNET50
from experiments.papers.presets.preset import AUTHORS, DIFFERS, OURS, Preset, by_option
from experiments.papers.two_way import TwoWayConfig

_IMAGENET_EPOCH = 1281167 // 256

PRESETS = {
    # Of rates from 0.01 to 0.3, 0.1 is best for the two-way loss: validation accuracy is 69 % after
    # 200 steps, seed 0. The losses differ in size, so that each needs a learning rate of its own:
    #     python -m experiments sweep icons-two-way --over loss.name=softmax,bce,two-way
    #         optimizer.learning_rate=0.03,0.1,0.3
    #
    # As in the paper, the classes of the linear classifiers can be others than those of training.
    # Then no image of a novel class is seen before, also not to choose a rate or a checkpoint.
    # Rates first, then five pairs at the rates that the first command chooses:
    #     python -m experiments sweep icons-two-way --data.class-split base --steps 2400 --seeds 0
    #         --over loss.name=two-way,bce,softmax optimizer.learning_rate=0.01,0.03,0.1,0.3
    #         --choose optimizer.learning_rate --metrics validation --directory runs/base-choice
    #     python -m experiments sweep icons-two-way --data.class-split base --steps 2400
    #         --seeds 1 2 3 4 5 --baseline loss.name=two-way --directory runs/base
    #         --over loss.name/optimizer.learning_rate=two-way/0.03,bce/0.1,softmax/0.1
    #     python -m experiments linear runs/base/*/seed-* --data icons --split novel
    #         --baseline Two-way
    "icons-two-way": Preset(
        "Two-way loss on all 179 classes of the icons, split within class (32×32, Conv4).",
        TwoWayConfig(
            data=ClassificationData(holdout=0.15),
            model=ModelConfig(widths=(16, 32, 64, 64)),
            optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=1e-4),
            steps=800,
        ),
    ),
    # On several devices, the authors' code for MS-COCO computes the class-wise half over each
    # device's share of the batch: --loss.class-wise-over device
    "imagenet-two-way": Preset(
        "Two-way loss on ImageNet-1K (ResNet-50, 90 epochs), for linear evaluation.",
        TwoWayConfig(
            data=ClassificationData(name="imagenet", **IMAGENET_CROPS),
            sampling=SamplingConfig(batch_size=256),
            model=RESNET50,
            optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=1e-4),
            steps=90 * _IMAGENET_EPOCH,
            validate_every=5 * _IMAGENET_EPOCH,
            log_every=_IMAGENET_EPOCH // 10,
        ),
        by_option(
            {
                "section B": "loss: name; model: backbone widths pooling",
                AUTHORS: "loss: positive_temperature negative_temperature",
                DIFFERS: "loss: class_wise_over",
                OURS: f"{IMAGENET_CROP_NAMES}; sampling: batch_size; steps validate_every;"
                "optimizer: kind learning_rate momentum nesterov weight_decay decay_all schedule",
            }
        ),
    ),
}
