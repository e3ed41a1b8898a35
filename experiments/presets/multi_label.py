"""Protocol D: multi-label classification with the two-way loss.

    python -m experiments train PRESET --model.weights resnet50.safetensors --loss.name two-way
    python -m experiments train kanji --loss.name two-way

Source: Kobayashi, CVPR 2023, supplement, Tables B and C: a pretrained ResNet-50, SGD at 224 pixels,
40 epochs; the backbone learns at a tenth of the classifier's rate. `--model.weights` takes
torchvision's ResNet-50 as a file *.safetensors, or a run directory. Training from scratch needs
`--optimizer.backbone-rate 1` and a learning rate of its own. Results on kanji:
experiments/RESULTS.md. The photographs do not ship with the project and have not been run here.
"""

from __future__ import annotations

from typing import Literal

from experiments.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.presets.photographs import IMAGENET_CROPS, RESNET50
from experiments.presets.preset import Preset
from experiments.protocols.multi_label import MultiLabelConfig, MultiLabelData


def _photographs(
    name: str,
    *,
    steps: int,
    validate_every: int,
    train_on: Literal["train", "train+validation"] = "train",
) -> MultiLabelConfig:
    """ResNet-50 on a data set of photographs."""
    return MultiLabelConfig(
        data=MultiLabelData(
            name=name,
            **IMAGENET_CROPS,
            color_jitter=0.4,
            lighting=0.1,
            train_on=train_on,
        ),
        sampling=SamplingConfig(batch_size=512),
        model=RESNET50,
        optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=1e-4, backbone_rate=0.1),
        steps=steps,
        validate_every=validate_every,
    )


PRESETS = {
    # Characters of KanjiVG, labelled with their components and split by character; needs the extra
    # `kanji`. A mirrored character has other components, hence no flips. The backbone starts from
    # scratch and learns as fast as the classifier. The losses differ in size, so that each needs a
    # learning rate of its own. Mean of mAP@class and mAP@sample (%) on the validation characters,
    # 250 steps, one seed:
    #
    #     learning rate   0.003   0.01   0.03   0.1   0.3
    #     two-way                   51     64    43
    #     sample-wise               37     51    23
    #     class-wise                30     43    48    49
    #     bce                34     53     33    20
    #     softmax                   35     47    16
    #     asl                25     38     27    17
    #     warp               52     56     41
    #
    # A comparison gives every loss its best rate:
    #     python -m experiments sweep kanji --seeds 0 1 2 --over
    #         loss.name/optimizer.learning_rate=two-way/0.03,sample-wise/0.03,class-wise/0.3,
    #         bce/0.01,softmax/0.03,asl/0.01,warp/0.01     (on one line)
    "kanji": Preset(
        "Multi-label classification of kanji by their components (70 labels, 48×48, Conv4).",
        MultiLabelConfig(
            data=MultiLabelData(name="kanji", mean=(0.22,), std=(0.38,), flip=False),
            sampling=SamplingConfig(batch_size=64),
            model=ModelConfig(widths=(16, 32, 64, 64)),
            optimizer=OptimizerConfig(learning_rate=0.03, weight_decay=1e-4),
            steps=1200,
        ),
    ),
    # Table B: the 82,783 training images of 2014, tested on the validation images. With the 118,287
    # of 2017, 40 epochs are --steps 9240. No images are left for validation, so the last checkpoint
    # is evaluated; --data.holdout 0.05 holds some out.
    "coco": Preset(
        "Multi-label classification on MS-COCO (80 labels, pretrained ResNet-50).",
        _photographs("coco", steps=6440, validate_every=161),
    ),
    # 40 epochs of the 5,011 images for training and validation; the last checkpoint is evaluated.
    # To tune on the validation images: --data.train-on train --steps 160 --validate-every 40
    "voc2007": Preset(
        "Multi-label classification on VOC 2007 (20 labels, pretrained ResNet-50).",
        _photographs("voc2007", steps=360, validate_every=90, train_on="train+validation"),
    ),
    # Table C; images without a label are left out. The number of images that can still be
    # downloaded varies; 40 epochs of 125,448 are 9800 steps. No images are left for validation, so
    # the last checkpoint is evaluated; --data.holdout 0.05 holds some out.
    "nus-wide": Preset(
        "Multi-label classification on NUS-WIDE (81 labels, pretrained ResNet-50).",
        _photographs("nus_wide", steps=9800, validate_every=245),
    ),
}
