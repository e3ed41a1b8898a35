"""What the presets of protocol C on photographs share: augmentation, SGD, ResNet-32.

Saadabadi et al., CVPR 2024, supplement, section 7: SGD with momentum 0.9 in its plain form, batches
of 128, random crops and flips; learning rates fall by ten at two epochs. An epoch is as many full
batches as the training images give. None of these runs was done here: the data sets do not ship.

The loss of the balanced setting is summed over the batch, and so it is here
(`loss.reduction = sum`). For the same steps of plain SGD, the mean takes 128 times the learning
rate, 1.28 in place of 0.01, and 1/128 of the weight decay. Cross-entropy (`fixed-ce`, `softmax`) is
a mean in the supplement's eq. (10): give `--loss.reduction mean` with these.
Dot regression of the long-tailed setting is a mean.
"""

from dataclasses import replace

from experiments.config import DataConfig, OptimizerConfig, SamplingConfig
from experiments.presets.backbones import RESNET32
from experiments.presets.normalisation import CIFAR100_MEAN, CIFAR100_STD
from experiments.protocols.hyperspherical import HypersphericalConfig, HypersphericalLossConfig

BALANCED = HypersphericalConfig(
    data=DataConfig(name="cifar100", mean=CIFAR100_MEAN, std=CIFAR100_STD, pad=4),
    sampling=SamplingConfig(batch_size=128),
    model=replace(RESNET32, dim=64),
    loss=HypersphericalLossConfig(reduction="sum"),
    optimizer=OptimizerConfig(
        learning_rate=0.01,
        nesterov=False,
        weight_decay=1e-4,
        schedule="step",
        decay_steps=(100 * 390, 200 * 390),
    ),
    steps=250 * 390,
    validate_every=10 * 390,
    log_every=130,
)
"""CIFAR-100: 390 steps an epoch."""


def long_tailed(data: DataConfig, epoch: int) -> HypersphericalConfig:
    """A long tail: 200 epochs, 5 of them warm-up, mixup, dot regression.

    Args:
      data: the data set, its imbalance, its normalisation.
      epoch: steps of an epoch.
    """
    return replace(
        BALANCED,
        data=replace(data, pad=4, mixup=1.0),
        loss=HypersphericalLossConfig(criterion="dot-regression"),
        optimizer=replace(
            BALANCED.optimizer,
            learning_rate=0.1,
            weight_decay=2e-4,
            warmup_steps=5 * epoch,
            decay_steps=(160 * epoch, 180 * epoch),
        ),
        steps=200 * epoch,
        validate_every=10 * epoch,
        log_every=epoch,
    )
