"""Protocol C: hyperspherical classification, balanced and long-tailed.

    python -m experiments train PRESET --loss.name static --model.dim 16

Source: Saadabadi et al., CVPR 2024, supplement, section 7 (7.1 balanced, 7.2 long tails), results
in Table 9: SGD with momentum 0.9, batches of 128, random crops and flips. An epoch is the number of
full batches. Results on the icons: experiments/RESULTS.md. The photographs do not ship with the
project and have not been run here.

The loss of the balanced setting is summed over the batch. With plain SGD the mean takes 128 times
the learning rate and 1/128 of the weight decay for the same steps. Cross-entropy (`fixed-ce`,
`softmax`) is a mean in the supplement's eq. (10): set `--loss.reduction mean` for these. Dot
regression of the long-tailed setting is a mean, and balances the classes of each batch.
The baseline that the authors compare with is `--loss.name cosine-softmax`, a trained classifier on
cosines without a scale; `softmax` is the linear classifier that people use.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.presets.photographs import (
    CIFAR100_MEAN,
    CIFAR100_STD,
    IMAGENET_CROPS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    RESNET32,
    RESNET50,
)
from experiments.presets.preset import Preset
from experiments.protocols.classification import ClassificationData
from experiments.protocols.hyperspherical import HypersphericalConfig, HypersphericalLoss


def _balanced(data: ClassificationData, *, dim: int, epoch: int, log_every: int):
    """ResNet-32 for 250 epochs.

    Args:
      data: The data set, its normalisation and padding.
      dim: Features.
      epoch: Steps of an epoch.
      log_every: Steps between two lines of the metrics file.
    """
    return HypersphericalConfig(
        data=data,
        sampling=SamplingConfig(batch_size=128),
        model=replace(RESNET32, dim=dim),
        loss=HypersphericalLoss(reduction="sum"),
        optimizer=OptimizerConfig(
            learning_rate=0.01,
            nesterov=False,
            weight_decay=1e-4,
            schedule="step",
            decay_steps=(100 * epoch, 200 * epoch),
        ),
        steps=250 * epoch,
        validate_every=10 * epoch,
        log_every=log_every,
    )


def _long_tailed(name: str, mean: tuple[float, ...], std: tuple[float, ...], *, epoch: int):
    """ResNet-32 for 200 epochs, 5 of them warm-up, with mixup and dot regression.

    Args:
      name: The data set.
      mean: Mean of its channels.
      std: Standard deviation of its channels.
      epoch: Steps of an epoch at imbalance 0.01.
    """
    return HypersphericalConfig(
        data=ClassificationData(name=name, mean=mean, std=std, pad=4, imbalance=0.01, mixup=1.0),
        sampling=SamplingConfig(batch_size=128),
        model=replace(RESNET32, dim=64),
        loss=HypersphericalLoss(criterion="dot-regression", lengths="batch"),
        optimizer=OptimizerConfig(
            learning_rate=0.1,
            nesterov=False,
            weight_decay=2e-4,
            schedule="step",
            warmup_steps=5 * epoch,
            decay_steps=(160 * epoch, 180 * epoch),
        ),
        steps=200 * epoch,
        validate_every=10 * epoch,
        log_every=epoch,
    )


# The supplement's SGD and weight decay 1e-4, for all methods. Its loss is summed over the batch and
# its learning rate falls twice in 250 epochs. Here the loss is the mean, and a cosine schedule lets
# --steps be any number (3200 are 82 epochs). Prototypes take longer to learn than a classifier.
# Validation accuracy (%), d = 25, seed 0, 300 steps:
#
#     learning rate                  0.03   0.1    0.3    1      3
#     dynamic                               23.6   23.7   26.4   21.5
#     static                                23.2   23.4   23.0
#     fixed-ce, inner products              36.8   37.9   13.3
#     fixed-ce, cosines times 8             35.6
#     fixed-ce, cosines times 16     27.0   25.9   15.8    7.1    5.9
#     softmax                               62.4   66.1   66.3   diverged
#
# Hence 1; fixed-ce takes --optimizer.learning-rate 0.3. At these rates and 3200 steps, dynamic has
# 76.4, static 72.6 and fixed-ce 70.2.
_ICONS = HypersphericalConfig(
    data=ClassificationData(holdout=0.15),
    model=ModelConfig(widths=(16, 32, 64, 64), dim=50),
    optimizer=OptimizerConfig(learning_rate=1.0, nesterov=False, weight_decay=1e-4),
    steps=3200,
)

_IMAGENET_EPOCH = 1251

PRESETS = {
    "icons-sphere": Preset(
        "Hyperspherical classification on all 179 classes of the icons (32×32 grey, Conv4).",
        _ICONS,
    ),
    # Section 7.1, Table 9 (d = 16, 32, 64). Its "Fixed W + CE":
    # --loss.name fixed-ce --loss.reduction mean
    "cifar100-sphere": Preset(
        "Hyperspherical classification on CIFAR-100 (ResNet-32, 250 epochs).",
        _balanced(
            ClassificationData(name="cifar100", mean=CIFAR100_MEAN, std=CIFAR100_STD, pad=4),
            dim=64,
            epoch=390,
            log_every=130,
        ),
    ),
    # Section 7.1: the images at 64×64.
    "imagenet200-sphere": Preset(
        "Hyperspherical classification on ImageNet-200 (ResNet-32, 64×64, 250 epochs).",
        _balanced(
            ClassificationData(name="imagenet200", mean=IMAGENET_MEAN, std=IMAGENET_STD, pad=8),
            dim=50,
            epoch=781,
            log_every=130,
        ),
    ),
    # Section 7.1: batches of 1024, learning rate 0.5 after 5 epochs of warm-up, then cosine, weight
    # decay 2e-5, 100 epochs, mixup with β = 1. Random resized crops at 224 and flips are our
    # choice. So is the mean over the batch: a rate of 0.5 for the sum over 1024 images would be one
    # of 512 for the mean. Swin-T with AdamW, the supplement's other backbone, is not available.
    "imagenet-sphere": Preset(
        "Hyperspherical classification on ImageNet-1K (ResNet-50, mixup, 100 epochs).",
        HypersphericalConfig(
            data=ClassificationData(name="imagenet", **IMAGENET_CROPS, mixup=1.0),
            sampling=SamplingConfig(batch_size=1024),
            model=replace(RESNET50, dim=512),
            optimizer=OptimizerConfig(
                learning_rate=0.5,
                nesterov=False,
                weight_decay=2e-5,
                warmup_steps=5 * _IMAGENET_EPOCH,
            ),
            steps=100 * _IMAGENET_EPOCH,
            validate_every=_IMAGENET_EPOCH,
            log_every=100,
        ),
    ),
    # Section 7.2: SGD, weight decay 2e-4, mixup with β = 1. The largest class has 56 training
    # images; a factor of 0.04 or more leaves every class at least 2. Here 0.05, with 3,090 images;
    # the paper's 0.01 and 0.02 leave classes with one image or none. Validation accuracy (%),
    # seed 0:
    #
    #     learning rate            0.1    0.3    1      3      10
    #     1200 steps   dynamic    37.8   47.1   54.8   57.6   46.4
    #                  static     32.1   45.1   51.5
    #                  fixed-ce   61.7   60.9   63.2   62.3
    #                  softmax    68.9   70.4   69.9
    #     3200 steps   dynamic                  69.0   67.8
    #                  static                   67.6   64.6
    #                  fixed-ce          68.4   70.1
    #                  softmax           75.1   73.1
    #
    # Hence 3200 steps (133 epochs) and 1; softmax takes --optimizer.learning-rate 0.3.
    "icons-longtail": Preset(
        "Hyperspherical classification on a long tail of the icons (56 to 2 images per class).",
        replace(
            _ICONS,
            data=replace(_ICONS.data, imbalance=0.05, mixup=1.0),
            optimizer=replace(_ICONS.optimizer, weight_decay=2e-4),
            loss=HypersphericalLoss(criterion="dot-regression", lengths="batch"),
        ),
    ),
    # Section 7.2 names imbalance 0.005, 0.01 and 0.02. Another --data.imbalance changes the steps
    # of an epoch; set --steps (200 epochs), --optimizer.warmup-steps (5) and
    # --optimizer.decay-steps (160 and 180) accordingly:
    #
    #     steps of an epoch   0.005   0.01   0.02
    #     cifar10-lt             87     96    109
    #     cifar100-lt            74     84     98
    #     svhn-lt               242    268    303
    #     stl10-lt                8      9     10
    "cifar10-lt": Preset(
        "Hyperspherical classification on CIFAR-10-LT, imbalance 0.01 (ResNet-32, 200 epochs).",
        _long_tailed("cifar10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), epoch=96),
    ),
    "cifar100-lt": Preset(
        "Hyperspherical classification on CIFAR-100-LT, imbalance 0.01 (ResNet-32, 200 epochs).",
        _long_tailed("cifar100", CIFAR100_MEAN, CIFAR100_STD, epoch=84),
    ),
    "svhn-lt": Preset(
        "Hyperspherical classification on SVHN-LT, imbalance 0.01 (ResNet-32, 200 epochs).",
        _long_tailed("svhn", (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), epoch=268),
    ),
    "stl10-lt": Preset(
        "Hyperspherical classification on STL10-LT, imbalance 0.01 (ResNet-32, 200 epochs).",
        _long_tailed("stl10", (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713), epoch=9),
    ),
}
