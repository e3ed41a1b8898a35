"""What the presets of protocol B on photographs share: ResNet-50, SGD, ImageNet's augmentation.

Kobayashi, WACV 2021, supplement, B.1 and Table B.1: batches of 256, learning rate 0.1, divided by
ten at three epochs that depend on the number of classes and images. G = 4 groups are our choice.
"""

import dataclasses

from experiments.config import DataConfig, OptimizerConfig, SamplingConfig
from experiments.presets.backbones import RESNET50
from experiments.presets.normalisation import IMAGENET_MEAN, IMAGENET_STD
from experiments.protocols.group_softmax import GroupLossConfig, GroupSoftmaxConfig

CONFIG = GroupSoftmaxConfig(
    data=DataConfig(
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        pad=0,
        image_size=224,
        resize=256,
        crop_scale=(0.08, 1.0),
    ),
    sampling=SamplingConfig(batch_size=256),
    model=RESNET50,
    loss=GroupLossConfig(num_groups=4),
    optimizer=OptimizerConfig(
        learning_rate=0.1, nesterov=False, weight_decay=1e-4, schedule="step", decay_steps=(1,)
    ),
)


def on(
    name: str, *, images: int, epochs: int, drops: tuple[int, ...], validate: int = 5
) -> GroupSoftmaxConfig:
    """The configuration on a data set, with a row of Table B.1.

    Args:
      name: the data set.
      images: training images.
      epochs: of the run.
      drops: the epochs at which the learning rate is divided by ten.
      validate: epochs between two checkpoints.
    """
    epoch = images // CONFIG.sampling.batch_size
    return dataclasses.replace(
        CONFIG,
        data=dataclasses.replace(CONFIG.data, name=name),
        optimizer=dataclasses.replace(
            CONFIG.optimizer, decay_steps=tuple(drop * epoch for drop in drops)
        ),
        steps=epochs * epoch,
        validate_every=validate * epoch,
        log_every=max(1, epoch // 10),
    )
