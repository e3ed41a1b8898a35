"""The backbones of the protocols, as their papers have them."""

from experiments.config import ModelConfig

CONV4 = ModelConfig()
"""Conv4-64 (protocol E, images of 84×84)."""
RESNET12 = ModelConfig(backbone="resnet12", widths=(64, 160, 320, 640), pooling="mean")
"""ResNet-12 (protocols A and E, 84×84)."""
RESNET18 = ModelConfig(backbone="resnet18", widths=(64, 128, 256, 512), pooling="mean")
"""ResNet-18 (protocols B and E, 224×224)."""
RESNET50 = ModelConfig(backbone="resnet50", widths=(64, 128, 256, 512), pooling="mean")
"""ResNet-50 (protocols B, C on ImageNet, D and F, 224×224)."""
RESNET32 = ModelConfig(backbone="resnet32", widths=(16, 32, 64), pooling="mean")
"""ResNet-32 (protocol C, 32×32)."""
WRN_28_10 = ModelConfig(backbone="wrn28", widths=(160, 320, 640), pooling="mean")
"""WRN-28-10 (protocol E, 80×80)."""
