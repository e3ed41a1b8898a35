"""What the presets of protocol A on photographs share: ResNet-12 and SGD."""

from dataclasses import replace

from experiments.config import DataConfig, OptimizerConfig, TrainConfig
from experiments.presets.backbones import RESNET12

CONFIG = TrainConfig(
    data=DataConfig(
        # Mean and deviation of ImageNet's channels.
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        pad=8,
        color_jitter=0.4,
    ),
    model=replace(RESNET12, drop_block=0.1),
    optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=5e-4),
)
