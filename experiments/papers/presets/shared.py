"""What a preset is, and what those on photographs share: normalisation, crops and backbones.

Protocols B, C, D and E differ from training with PyTorch, or with the authors' code, in this:

- The running variances of batch normalisation divide by n, PyTorch's by n − 1.
- Random crops are taken from whole images that are stored smaller, at the side to which evaluation
  resizes them (images longer than 2:1 smaller still); the authors' from the original files.
- Colour jitter changes brightness, contrast and saturation in this order; torchvision draws the
  order for each image (D and E).
- Batch normalisation takes the statistics of the whole batch; the authors' code those of each
  device's share (C on ImageNet, and D).
- The authors' code computes in float16 where PyTorch's autocast does; here it is float32, or
  --model.dtype bfloat16 (C on ImageNet, and D).
"""

from typing import Any, NamedTuple

from experiments.core.config import ModelConfig, TrainConfig


class Preset(NamedTuple):
    """A configuration by name, and a line on it for the command line."""

    description: str
    config: TrainConfig


IMAGENET_COLOURS: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

# Random resized crops of ImageNet training (B, C and D).
IMAGENET_CROPS = IMAGENET_COLOURS | {
    "pad": 0,
    "image_size": 224,
    "resize": 256,
    "crop_scale": (0.08, 1.0),
}
# The size of the icons leaves a Conv4 2×2 positions; 28 pixels leave one.
FASHION: dict[str, Any] = {
    "name": "fashion_mnist",
    "mean": (0.286,),
    "std": (0.353,),
    "image_size": 32,
}
# 1,000 of 6,000 training images a class for validation, as many as there are for test. CIFAR-10 has
# the other 5,000, too.
FASHION_HOLDOUT = 1 / 6

# A and E, 84×84.
RESNET12 = ModelConfig(
    backbone="resnet12", widths=(64, 160, 320, 640), pooling="mean", drop_block=0.1
)
# B, C on ImageNet, and D, 224×224.
RESNET50 = ModelConfig(backbone="resnet50", widths=(64, 128, 256, 512), pooling="mean")
# C, 32×32.
RESNET32 = ModelConfig(backbone="resnet32", widths=(16, 32, 64), pooling="mean")
# C on ImageNet, 224×224.
SWIN_T = ModelConfig(
    backbone="swin", widths=(96, 192, 384, 768), pooling="mean", stochastic_depth=0.2
)
