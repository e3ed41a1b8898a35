"""Protocol C: hyperspherical classification, balanced and long-tailed.

    python -m experiments train PRESET --loss.name static

Sources: Saadabadi et al., CVPR 2024, supplement, sections 7.1 (balanced) and 7.2 (long tails), with
results in Table 9; what it leaves open is taken from the authors' published code
(msed-Ebrahimi/DL2PA_CVPR24). Where the two differ, the preset follows the paper, and its comment
states the difference. Where no comment names another source, values are the authors', but for
`validate_every`, which is ours.

What differs from their code in all presets on photographs, beside `shared.py`:

- It reports the epoch that is best on the test images, and its calibration error; here no image is
  held out, and the last checkpoint is evaluated.
- It evaluates an epoch before it assigns the prototypes anew; here the checkpoint at its end has
  the new assignment.
- It moves the mean of a class by one image of the batch, because its indexed += keeps one of a
  class; here by the mean of all its images. The decay of these means, 0.9, is the number in the
  code, which adds to them in place, so that the number amounts to 0.95. The first means are random;
  here 0, so that the first batch sets them.
- Its prototypes minimise the uniformity objective at t = 2 by SGD; here by Adam, with t rising to
  100, which separates the closest pairs further, or a simplex where the classes are at most d + 1.
- An epoch is the number of full batches; the authors' also has the last, smaller batch.

The code sums the distances of the balanced setting over the batch: with plain SGD, the mean takes
128 times the learning rate and 1/128 of the weight decay for the same steps. The authors' baseline
is `--loss.name cosine-softmax`, with which the published code does not run; `softmax` is the linear
classifier that people use.
"""

from dataclasses import replace
from typing import Any

from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.papers.classification import ClassificationData
from experiments.papers.hyperspherical import (
    HypersphericalConfig,
    HypersphericalEvaluation,
    HypersphericalLoss,
)
from experiments.papers.presets import shared
from experiments.papers.presets.shared import Preset

_COSINES = HypersphericalEvaluation(calibration="cosines")
_SGD = OptimizerConfig(nesterov=False, decay_all=True, schedule="step")


def _balanced(title: str, name: str, colours: dict[str, Any], *, dim: int, epoch: int) -> Preset:
    """ResNet-32 with a linear layer, and an epoch of so many steps.

    Optimiser, batch size, epochs and flips: section 7.1, but for Nesterov and what decays.
    """
    config = HypersphericalConfig(
        data=ClassificationData(name=name, **colours),
        model=replace(shared.RESNET32, shortcut="conv3x3", dim=dim, projection="linear"),
        loss=HypersphericalLoss(reduction="sum"),
        evaluation=_COSINES,
        optimizer=replace(
            _SGD, learning_rate=0.01, weight_decay=1e-4, decay_steps=(100 * epoch, 200 * epoch)
        ),
        steps=250 * epoch,
        validate_every=10 * epoch,
        log_every=130,
    )
    return Preset(f"Hyperspherical classification on {title}250 epochs).", config)


def _long_tail(
    title: str,
    name: str,
    colours: dict[str, Any],
    widths: tuple[int, ...] = (16, 32, 64),
    *,
    epoch: int,
) -> Preset:
    """ResNet-32 with mixup and dot regression, and an epoch of so many steps at imbalance 0.01.

    Optimiser, batch size, epochs, flips and mixup: section 7.2, but for Nesterov, what decays and
    the warm-up. The code pads the images of CIFAR alone. What differs from it: the images of a tail
    are another random choice. Convolutions start with variance 2 / fan-out; the authors' with
    2 / fan-in. The learning rate of the warm-up rises at every step; the authors' is constant in an
    epoch. With mixup, the authors move the class mean of an image's own label, even where the other
    image has the larger share; here that of the larger share.
    """
    config = HypersphericalConfig(
        data=ClassificationData(name=name, **colours, imbalance=0.01, tail_from="mean", mixup=1.0),
        model=replace(shared.RESNET32, widths=widths, projection="norm"),
        loss=HypersphericalLoss(criterion="dot-regression", lengths="batch"),
        evaluation=_COSINES,
        optimizer=replace(
            _SGD,
            weight_decay=2e-4,
            warmup_steps=5 * epoch,
            warmup_from=0.2,
            decay_steps=(160 * epoch, 180 * epoch),
        ),
        steps=200 * epoch,
        validate_every=10 * epoch,
        log_every=epoch,
    )
    title = f"Hyperspherical classification on {title}, imbalance 0.01 (ResNet-32, 200 epochs)."
    return Preset(title, config)


# The supplement's SGD and weight decay 1e-4, for all methods, with the mean of the loss and a
# cosine schedule (3200 steps are 82 epochs). The rate is that of dynamic and static; fixed-ce takes
# --optimizer.learning-rate 0.3.
_ICONS = HypersphericalConfig(
    data=ClassificationData(holdout=0.15),
    model=ModelConfig(widths=(16, 32, 64, 64), dim=50),
    optimizer=OptimizerConfig(learning_rate=1.0, nesterov=False, weight_decay=1e-4),
    steps=3200,
)

_IMAGENET_EPOCH = 1251
# Means and standard deviations of the long-tailed sets, in the code.
_CIFAR_LT = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
_HALVES = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}

# Section 7.1: batch size, weight decay, mixup, the cosine, its warm-up and epochs. The schedule of
# the code counts epochs, but moves at every step; here it takes all steps.
_ON_IMAGENET = HypersphericalConfig(
    data=ClassificationData(
        name="imagenet", **shared.IMAGENET_CROPS, mixup=1.0, mixed_labels="larger"
    ),
    sampling=SamplingConfig(batch_size=1024),
    evaluation=_COSINES,
    optimizer=OptimizerConfig(
        weight_decay=2e-5, decay_all=True, warmup_steps=5 * _IMAGENET_EPOCH, warmup_from=0.01
    ),
    steps=100 * _IMAGENET_EPOCH,
    validate_every=_IMAGENET_EPOCH,
    log_every=100,
)

PRESETS = {
    "icons-sphere": Preset(
        "Hyperspherical classification on all 179 classes of the icons (32×32 grey, Conv4).", _ICONS
    ),
    # Network and d: Table 9 (d = 16, 32, 64; the code also has 25 and 50). Its "Fixed W + CE":
    # --loss.name fixed-ce; the authors' configuration of it has a learning rate of 0.1, batches of
    # 1024 and a weight decay of 2e-4, here it has those of the others. Section 7.1 draws the test
    # images at random; here they are those of CIFAR-100, as in the code.
    "cifar100-sphere": _balanced(
        "CIFAR-100 (ResNet-32, ",
        "cifar100",
        {"mean": (0.507, 0.487, 0.441), "std": (0.267, 0.256, 0.276)},
        dim=64,
        epoch=390,
    ),
    # The code has images of 64×64 and d = 25 or 50. Tables of the supplement have no backbone for
    # it; the code has the same ResNet-32. Section 7.1 holds out 10,000 random images for the test
    # and does not list them; here they are the validation images of Tiny ImageNet.
    "imagenet200-sphere": _balanced(
        "ImageNet-200 (ResNet-32, 64×64, ",
        "imagenet200",
        shared.IMAGENET_COLOURS,
        dim=50,
        epoch=781,
    ),
    # Network and rate: section 7.1. With mixup, the code's loss takes the label of the larger share
    # alone. The code differs from the paper: it has batches of 128, 105 epochs, mixup with β = 0.2
    # or CutMix, TrivialAugment and random erasing, and it crops 244 pixels in training and sees 256
    # in evaluation. The file of its network is missing; the linear layer, that of the balanced
    # setting, is ours. The code sums the loss over the batch, and over the wrong axis. Here it is
    # the mean: with a rate of 512, as the sum of 1024 images has at 0.5, Conv4 does not learn the
    # icons (1 % after 200 steps, 21 % at rate 1).
    "imagenet-sphere": Preset(
        "Hyperspherical classification on ImageNet-1K (ResNet-50, mixup, 100 epochs).",
        replace(
            _ON_IMAGENET,
            model=replace(shared.RESNET50, dim=512, projection="linear"),
            optimizer=replace(_ON_IMAGENET.optimizer, learning_rate=0.5, nesterov=False),
        ),
    ),
    # Network and AdamW: section 7.1, with a learning rate of 0.001; the code has 0.5. Epochs and
    # mixup, which it does not name, are those of ResNet-50, schedule and warm-up the code's;
    # stochastic depth is that of the authors of Swin-T.
    "imagenet-sphere-swin": Preset(
        "Hyperspherical classification on ImageNet-1K (Swin-T, AdamW, mixup, 100 epochs).",
        replace(
            _ON_IMAGENET,
            model=replace(shared.SWIN_T, dim=512, projection="linear"),
            optimizer=replace(_ON_IMAGENET.optimizer, kind="adamw", learning_rate=0.001),
        ),
    ),
    # Section 7.2. Of the largest class's 56 training images, the authors' factors 0.01 and 0.02
    # leave the rarest class one or none, 0.05 leaves 2. 3200 steps are 133 epochs. Softmax takes
    # --optimizer.learning-rate 0.3.
    "icons-longtail": Preset(
        "Hyperspherical classification on a long tail of the icons (56 to 2 images per class).",
        replace(
            _ICONS,
            data=replace(_ICONS.data, imbalance=0.05, mixup=1.0),
            optimizer=replace(_ICONS.optimizer, weight_decay=2e-4),
            loss=HypersphericalLoss(criterion="dot-regression", lengths="batch"),
        ),
    ),
    # Section 7.2, with images that anyone can have: the class sizes are those of CIFAR-10-LT (5,000
    # to 50), and validation and test images are balanced. In 9 dimensions or more, the prototypes
    # of 10 classes are a simplex, of which every assignment is as good as any other; hence 5.
    "fashion-longtail": Preset(
        "Hyperspherical classification on a long tail of Fashion-MNIST, imbalance 0.01 (Conv4).",
        replace(
            _ICONS,
            data=ClassificationData(
                **shared.FASHION, holdout=shared.FASHION_HOLDOUT, imbalance=0.01, mixup=1.0
            ),
            model=replace(_ICONS.model, dim=5),
            optimizer=replace(_ICONS.optimizer, weight_decay=2e-4),
            loss=HypersphericalLoss(criterion="dot-regression", lengths="batch"),
            validate_every=400,
        ),
    ),
    # Section 7.2. The code's imbalances are 0.005, 0.01 and 0.02. Another --data.imbalance changes
    # the steps of an epoch; set --steps (200 epochs), --optimizer.warmup-steps (5) and
    # --optimizer.decay-steps (160 and 180) accordingly:
    #
    #     steps of an epoch   0.005   0.01   0.02
    #     cifar10-lt             87     96    109
    #     cifar100-lt            74     84     98
    #     svhn-lt              1058   1171   1322
    #     stl10-lt                8      9     10
    #
    # The learnable baselines have neither mixup nor the batch normalisation of the features in the
    # code: --data.mixup 0 --model.projection linear-norm. The paper has mixup for all methods, and
    # the presets have both, so that methods differ in the loss alone.
    "cifar10-lt": _long_tail("CIFAR-10-LT", "cifar10", _CIFAR_LT, epoch=96),
    "cifar100-lt": _long_tail("CIFAR-100-LT", "cifar100", _CIFAR_LT, (32, 64, 128), epoch=84),
    # The largest class has N / 10 of all images of train and extra. The code neither crops nor
    # flips SVHN and STL-10; section 7.2 does, by a number of pixels that it does not name (4 is
    # ours): --data.pad 0 --data.no-flip for the code. The authors cut a tail out of train and one
    # out of extra, class by class from digit 0; here it is cut out of both together and begins with
    # the largest class, the ones, so that no class has fewer images than its place.
    "svhn-lt": _long_tail("SVHN-LT", "svhn_extra", _HALVES, epoch=1171),
    "stl10-lt": _long_tail("STL10-LT", "stl10", _HALVES, epoch=9),
}
