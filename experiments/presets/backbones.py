"""The backbones that presets share, as the papers have them."""

from experiments.config import ModelConfig

RESNET12 = ModelConfig(backbone="resnet12", widths=(64, 160, 320, 640), pooling="mean")
"""ResNet-12 (protocols A and E, 84×84)."""
RESNET50 = ModelConfig(backbone="resnet50", widths=(64, 128, 256, 512), pooling="mean")
"""ResNet-50 (protocols B, C on ImageNet, D and F, 224×224)."""
RESNET32 = ModelConfig(backbone="resnet32", widths=(16, 32, 64), pooling="mean")
"""ResNet-32 (protocol C, 32×32)."""
