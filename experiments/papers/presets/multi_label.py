"""Protocol D: multi-label classification with the two-way loss.

    python -m experiments train PRESET --model.weights resnet50.safetensors --loss.name two-way
    python -m experiments train kanji --loss.name two-way

Source: Kobayashi, CVPR 2023, supplement, Tables B and C, and the authors' published configuration
for MS-COCO, which VOC 2007 and NUS-WIDE take here, too. On several devices, the authors' code
computes the class-wise half over each device's share of the batch: `--loss.class-wise-over device`.
`settings PRESET` lists what differs and has no option. `--model.weights` takes torchvision's
ResNet-50 as a file *.safetensors, or a run directory; the author's weights are IMAGENET1K_V1.
Training from scratch needs `--optimizer.backbone-rate 1` and a learning rate of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.papers.multi_label import MultiLabelConfig, MultiLabelData
from experiments.papers.presets import photographs as shared
from experiments.papers.presets.preset import AUTHORS, DIFFERS, OURS, Preset, by_option

_BATCH_SIZE = 512
_EPOCHS = 40

_NETWORK = "model: backbone widths pooling"
_SHARED = {DIFFERS: "model: weights; loss: class_wise_over", OURS: "data: train_on; validate_every"}
_AUTHORS = (
    f"{shared.IMAGENET_CROP_NAMES} color_jitter lighting; sampling: batch_size; steps;"
    "loss: name positive_temperature negative_temperature; optimizer: backbone_rate"
    " kind learning_rate momentum nesterov weight_decay decay_all schedule"
)
_START = (
    "The classifier starts with deviation 1 / √d and the prior of a class as its bias; the "
    "authors', PyTorch's linear layer, starts uniform in ±1 / √d, with deviation 1 / √(3d). A "
    "constant bias changes the values of bce, asl and rml alone."
)
_DIFFERENCES = (
    _START,
    "Every epoch draws its batches anew; the authors' sampler on several devices draws the same "
    "ones in every epoch.",
    "The cosine ends at 0 after the last step; the authors' counts the last, smaller batch of an "
    "epoch, which is not trained on, and ends a little above.",
    shared.SMALLER_FILES,
    shared.ORDER_OF_COLORS,
    shared.OVER_DEVICES,
    shared.FLOAT16,
    shared.RUNNING_VARIANCES,
)

_OF_COCO = f"{AUTHORS} for MS-COCO"
_COCO = by_option(_SHARED | {"Table B": _NETWORK, AUTHORS: _AUTHORS})
_VOC2007 = by_option(_SHARED | {_OF_COCO: f"{_NETWORK};{_AUTHORS}"})
_NUS_WIDE = by_option(_SHARED | {"Table C": _NETWORK, _OF_COCO: _AUTHORS})


def _photographs(
    title: str,
    name: str,
    sources: Mapping[str, str],
    images: int,
    validate: int,
    train_on: Literal["train", "train+validation"] = "train",
    differences: tuple[str, ...] = (),
) -> Preset:
    """ResNet-50 on a data set of photographs: so many for training, epochs between checkpoints."""
    epoch = images // _BATCH_SIZE
    crops = MultiLabelData(**shared.IMAGENET_CROPS, color_jitter=0.4, lighting=0.1)
    config = MultiLabelConfig(
        data=replace(crops, name=name, train_on=train_on),
        sampling=SamplingConfig(batch_size=_BATCH_SIZE),
        model=shared.RESNET50,
        optimizer=OptimizerConfig(
            learning_rate=0.01, weight_decay=1e-4, decay_all=True, backbone_rate=0.1
        ),
        steps=_EPOCHS * epoch,
        validate_every=validate * epoch,
    )
    description = f"Multi-label classification on {title} labels, pretrained ResNet-50)."
    return Preset(description, config, sources, (*_DIFFERENCES, *differences))


PRESETS = {
    # Characters of KanjiVG, labelled with their components and split by character; needs the extra
    # `kanji`. A mirrored character has other components, hence no flips. Each loss needs a learning
    # rate of its own, here the best of 0.003 to 0.3 after 250 steps: for the two-way loss 64 %
    # (mean of mAP@class and mAP@sample), with 51 and 43 at the rates beside it. RML, whose gradient
    # is larger: 42 % at 0.0001, 49 at 0.0003, 44 at 0.001, 34 at 0.003, 15 at 0.01 to 0.1. ASL has
    # 24 % at 0.003, 37 at 0.01, 39 at 0.03, 24 at 0.1.
    #     python -m experiments sweep kanji --seeds 0 1 2 --over
    #         loss.name/optimizer.learning_rate=two-way/0.03,sample-wise/0.03,class-wise/0.3,
    #         bce/0.01,softmax/0.03,asl/0.03,warp/0.01,rml/0.0003     (on one line)
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
    # Table B: the 82,081 of 82,783 training images of 2014 that have an annotated object, tested on
    # the validation images that have one. With the 117,266 of 2017, 40 epochs are --steps 9160. No
    # images are left for validation, so the last checkpoint is evaluated; --data.holdout 0.05 holds
    # some out.
    "coco": _photographs("MS-COCO (80", "coco", _COCO, images=82081, validate=1),
    # The images for training and validation together; the last checkpoint is evaluated. To tune on
    # the validation images: --data.train-on train --steps 160 --validate-every 40
    "voc2007": _photographs(
        *("VOC 2007 (20", "voc2007", _VOC2007),
        images=5011,
        validate=10,
        train_on="train+validation",
    ),
    # Table C; images without a label are left out. No images are left for validation, so the last
    # checkpoint is evaluated; --data.holdout 0.05 holds some out. Of fewer training images, 40
    # epochs are fewer --steps.
    "nus-wide": _photographs(
        "NUS-WIDE (81",
        "nus_wide",
        _NUS_WIDE,
        images=125448,
        validate=1,
        differences=(
            "Table C has 209,346 images with a label, 125,448 of them for training. The published "
            "lists have 209,347; those without a file are left out, as many are no longer on "
            "Flickr.",
        ),
    ),
}
