"""What the presets of protocol A on photographs share: ResNet-12 and SGD."""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig

CONFIG = TrainConfig(
    data=DataConfig(
        # Mean and deviation of ImageNet's channels.
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        pad=8,
        color_jitter=0.4,
    ),
    model=ModelConfig(
        backbone="resnet12", widths=(64, 160, 320, 640), pooling="mean", drop_block=0.1
    ),
    optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=5e-4),
)
