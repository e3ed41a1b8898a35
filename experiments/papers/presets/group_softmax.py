"""Protocol B: classification with group softmax.

    python -m experiments train PRESET --loss.name softmax
    python -m experiments sweep PRESET --over loss.name=softmax,tight,loose --seeds 0 1 2

Source: Kobayashi, WACV 2021, supplement: training in B.1, epochs in Table B.1, results in Table
B.2. B.1 trains with PyTorch and takes "the standard" augmentation of ImageNet, citing He et al.,
CVPR 2016, who also vary scale and colours; here it is that of PyTorch's example. There is no
published code. An epoch is the number of full batches.
"""

from dataclasses import replace

from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.papers.classification import ClassificationData
from experiments.papers.group_softmax import GroupLoss, GroupSoftmaxConfig
from experiments.papers.presets.shared import (
    FASHION,
    FASHION_HOLDOUT,
    IMAGENET_CROPS,
    RESNET50,
    Preset,
)

_SGD = OptimizerConfig(learning_rate=0.1, nesterov=False, weight_decay=1e-4)


def _photographs(title: str, name: str, images: int, epochs: int, drops: tuple[int, ...]) -> Preset:
    """ResNet-50 with a row of Table B.1: the rate is divided by ten at the epochs `drops`.

    What differs, beside `shared.py`: the classifier starts with deviation 0.1 / √d and a
    constant bias, PyTorch's uniform in ±1 / √d, with deviation 1 / √(3d).
    """
    batch_size = 256  # Section B.1.
    epoch = images // batch_size
    config = GroupSoftmaxConfig(
        data=ClassificationData(name=name, **IMAGENET_CROPS),  # Section B.1, as PyTorch's example.
        sampling=SamplingConfig(batch_size=batch_size),
        model=RESNET50,  # Main text.
        loss=GroupLoss(num_groups=4),  # Ours, as the grouping.
        # Section B.1, and PyTorch's defaults for Nesterov and what decays.
        optimizer=replace(
            _SGD, decay_all=True, schedule="step", decay_steps=tuple(drop * epoch for drop in drops)
        ),
        steps=epochs * epoch,
        validate_every=5 * epoch,  # Ours.
        log_every=max(1, epoch // 10),
    )
    return Preset(f"Group softmax on {title}ResNet-50, {epochs} epochs).", config)


PRESETS = {
    # The paper's SGD and weight decay, with a cosine schedule, so that --steps can be any number.
    # Group softmax needs few groups for many classes.
    "icons-groups": Preset(
        "Group softmax on all 179 classes of the icons, split within class (32×32, Conv4).",
        GroupSoftmaxConfig(
            data=ClassificationData(holdout=0.15),
            model=ModelConfig(widths=(16, 32, 64, 64)),
            loss=GroupLoss(num_groups=2),
            optimizer=_SGD,
            steps=800,
        ),
    ),
    # Few images of a class, and 1,024 averaged features: 256 in each of 4 groups, far more than
    # there are classes.
    "fashion-groups": Preset(
        "Group softmax on 100 images a class of Fashion-MNIST (32×32 grey, Conv4, D = 1,024).",
        GroupSoftmaxConfig(
            data=ClassificationData(**FASHION, samples_per_class=100, holdout=FASHION_HOLDOUT),
            model=ModelConfig(widths=(16, 32, 64, 1024), pooling="mean"),
            loss=GroupLoss(num_groups=4),
            optimizer=_SGD,
            steps=800,
            validate_every=200,
        ),
    ),
    # The validation images serve as test images; none are held out, so the last checkpoint is
    # evaluated. The rows of Table B.1 for subsets of ImageNet (other classes than the paper's; each
    # --data.subset-seed draws its own):
    #
    #     option                           epochs, drops         --steps  --optimizer.decay-steps
    #     --data.classes 100               180, at 60, 120, 150    89280   29760  59520  74400
    #     --data.classes 200               180, at 60, 120, 150   181260   60420 120840 151050
    #     --data.classes 500               120, at 30, 60, 90     299520   74880 149760 224640
    #     --data.samples-per-class 100     240, at 90, 180, 210    93600   35100  70200  81900
    #     --data.samples-per-class 200     240, at 90, 180, 210   187440   70290 140580 164010
    #     --data.samples-per-class 500     180, at 60, 120, 150   351540  117180 234360 292950
    #
    # The first column of Table B.2, and the groupings on three subsets:
    #     python -m experiments sweep imagenet-groups --over loss.name=softmax,tight,loose
    #         data.classes/steps/optimizer.decay_steps=100/89280/29760+59520+74400
    #     python -m experiments sweep imagenet-groups --over loss.num_groups=2,4,8
    #         loss.grouping=discriminative,random,contiguous data.subset_seed=0,1,2
    #         data.classes/steps/optimizer.decay_steps=100/89280/29760+59520+74400
    "imagenet-groups": _photographs(
        "ImageNet-1K (--data.classes for subsets, ", "imagenet", 1281167, 120, (30, 60, 90)
    ),
    # Fine-tuning takes 120 epochs of 295 steps with drops at 30, 60, 90: --model.weights WEIGHTS
    # --optimizer.learning-rate 0.0045 --steps 35400 --optimizer.decay-steps 8850 17700 26550
    "food101-groups": _photographs(
        "Food-101 (101 classes, ", "food101", 75750, 180, (60, 120, 150)
    ),
    # Table B.1 has 15K images. The supplement does not list them; here they are 60 of each class.
    "caltech256-groups": _photographs(
        "Caltech-256 (256 classes, ", "caltech256", 15360, 300, (120, 240, 270)
    ),
    # Table B.1 has 19K images. The supplement names no partition; here it is the first of SUN-397.
    "sun397-groups": _photographs("SUN-397 (397 classes, ", "sun397", 19850, 300, (120, 240, 270)),
}
