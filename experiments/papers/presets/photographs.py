"""What presets on photographs share: normalisation, augmentation, backbones, and differences."""

from typing import Any

from experiments.core.config import ModelConfig

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

IMAGENET_CROPS: dict[str, Any] = {
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
    "pad": 0,
    "image_size": 224,
    "resize": 256,
    "crop_scale": (0.08, 1.0),
}
"""Data options of ImageNet training: random resized crops of 224 pixels (protocols B, C and D)."""
IMAGENET_CROP_NAMES = "data: mean std pad image_size resize crop_scale flip"
"""Their names and that of the flips that go with them, for the sources of a preset."""
FASHION: dict[str, Any] = {
    "name": "fashion_mnist",
    "mean": (0.286,),
    "std": (0.353,),
    "image_size": 32,
}
"""Data options of Fashion-MNIST: its mean and deviation, and the size of the icons, which leaves a
Conv4 2×2 positions; 28 pixels leave one."""
FASHION_HOLDOUT = 1 / 6
"""Share of its training images for validation: 1,000 of 6,000 a class, as many as there are for
test. CIFAR-10 has the other 5,000, too."""
JITTERED: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "color_jitter": 0.4}
"""Data options of few-shot training (protocol A)."""

RESNET12 = ModelConfig(
    backbone="resnet12", widths=(64, 160, 320, 640), pooling="mean", drop_block=0.1
)
"""ResNet-12 (protocols A and E, 84×84)."""
RESNET50 = ModelConfig(backbone="resnet50", widths=(64, 128, 256, 512), pooling="mean")
"""ResNet-50 (protocols B, C on ImageNet, and D, 224×224)."""
RESNET32 = ModelConfig(backbone="resnet32", widths=(16, 32, 64), pooling="mean")
"""ResNet-32 (protocol C, 32×32)."""
SWIN_T = ModelConfig(
    backbone="swin", widths=(96, 192, 384, 768), pooling="mean", stochastic_depth=0.2
)
"""Swin-T (protocol C on ImageNet, 224×224)."""

RUNNING_VARIANCES = (
    "The running variances of batch normalisation divide by n; PyTorch's divide by n − 1."
)
"""A difference from training with PyTorch, as those below (protocols B, C, D and E)."""
OVER_DEVICES = (
    "Batch normalisation takes the statistics of the whole batch; the authors' code takes those of "
    "each device's share."
)
FLOAT16 = (
    "The authors' code computes in float16 where PyTorch's autocast does; here it is float32, or "
    "--model.dtype bfloat16."
)
SMALLER_FILES = (
    "Random crops are taken from whole images that are stored smaller, here at the side to which "
    "evaluation resizes them (images longer than 2:1 smaller still); the authors take theirs from "
    "the original files."
)
ORDER_OF_COLORS = (
    "Colour jitter changes brightness, contrast and saturation in this order; torchvision draws "
    "the order for each image."
)
