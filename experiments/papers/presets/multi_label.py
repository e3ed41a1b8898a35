"""Protocol D: multi-label classification with the two-way loss, also on images of one class.

    python -m experiments train coco --model.weights resnet50.safetensors --loss.name two-way
    python -m experiments train kanji --loss.name two-way
    python -m experiments sweep imagenet-two-way --over loss.name=softmax,bce,two-way
    python -m experiments linear RUN --data DATA
    python -m experiments linear RUN RUN ... --data DATA --baseline Two-way

Source: Kobayashi, CVPR 2023, supplement, Tables B and C, and the authors' published configuration
for MS-COCO, which VOC 2007 and NUS-WIDE take here, too. `--model.weights` takes torchvision's
ResNet-50 as a file *.safetensors, or a run directory; the author's weights are IMAGENET1K_V1.
Training from scratch needs `--optimizer.backbone-rate 1` and a learning rate of its own.

Section B of the supplement evaluates a ResNet-50 that is trained on ImageNet with each of the
losses, by linear classifiers on nine data sets (Table 8 of the main text, which is not at hand). It
does not state the training on ImageNet; its settings are ours.
"""

from typing import Literal

from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.papers.classification import ClassificationData
from experiments.papers.multi_label import MultiLabelConfig, MultiLabelData, TwoWayConfig
from experiments.papers.presets.shared import IMAGENET_CROPS, RESNET50, Preset

_SGD = OptimizerConfig(learning_rate=0.1, weight_decay=1e-4)
_IMAGENET_EPOCH = 1281167 // 256


def _photographs(
    title: str,
    name: str,
    images: int,
    validate_epochs: int,
    train_on: Literal["train", "train+validation"] = "train",
) -> Preset:
    """ResNet-50 with the authors' configuration for MS-COCO; `images` are those for training.

    The network is also in Table B (MS-COCO) and Table C (NUS-WIDE). What is trained on, and how
    often is validated, is ours. What differs, beside `shared.py`:

    - Weights are given by the user. On several devices, the authors compute the class-wise half
      over each device's share of the batch: --loss.class-wise-over device.
    - The classifier starts with deviation 1 / √d and the prior of a class as its bias; PyTorch's
      uniform in ±1 / √d, with deviation 1 / √(3d). A constant bias changes bce, asl and rml alone.
    - Every epoch draws its batches anew; the authors' sampler on several devices draws the same
      ones in every epoch.
    - The cosine ends at 0 after the last step; the authors' counts the last, smaller batch of an
      epoch, which is not trained on, and ends a little above.
    """
    batch_size, epochs = 512, 40
    epoch = images // batch_size
    config = MultiLabelConfig(
        data=MultiLabelData(
            name=name, train_on=train_on, **IMAGENET_CROPS, color_jitter=0.4, lighting=0.1
        ),
        sampling=SamplingConfig(batch_size=batch_size),
        model=RESNET50,
        optimizer=OptimizerConfig(
            learning_rate=0.01, weight_decay=1e-4, decay_all=True, backbone_rate=0.1
        ),
        steps=epochs * epoch,
        validate_every=validate_epochs * epoch,
    )
    title = f"Multi-label classification on {title} labels, pretrained ResNet-50)."
    return Preset(title, config)


PRESETS = {
    # Characters of KanjiVG, labelled with their components and split by character; needs the extra
    # `kanji`. A mirrored character has other components, hence no flips. Each loss needs a learning
    # rate of its own:
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
    "coco": _photographs("MS-COCO (80", "coco", 82081, 1),
    # The images for training and validation together; the last checkpoint is evaluated. To tune on
    # the validation images: --data.train-on train --steps 160 --validate-every 40
    "voc2007": _photographs("VOC 2007 (20", "voc2007", 5011, 10, "train+validation"),
    # Table C: 209,346 images with a label, 125,448 of them for training; those without a label are
    # left out. The published lists have 209,347; those without a file are left out, as many are no
    # longer on Flickr. No images are left for validation, so the last checkpoint is evaluated;
    # --data.holdout 0.05 holds some out. Of fewer training images, 40 epochs are fewer --steps.
    "nus-wide": _photographs("NUS-WIDE (81", "nus_wide", 125448, 1),
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
