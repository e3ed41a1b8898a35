"""Protocol C on ImageNet-1K.

    python -m experiments train imagenet-sphere

Saadabadi et al., CVPR 2024, supplement, section 7.1: ResNet-50, batches of 1024, learning rate 0.5
after 5 epochs of warm-up, then cosine, weight decay 2e-5, 100 epochs, mixup with β = 1. An epoch is
1,251 steps. Random resized crops of 224 pixels and flips are our choice: the supplement names
mixup alone. So is the mean over the batch: summed over 1,024 images, a rate of 0.5 would be that of
a mean at 512. The supplement's other backbone, Swin-T with AdamW, is not here. Not run here: the
data set does not ship.
"""

from dataclasses import replace

from experiments.config import DataConfig, OptimizerConfig, SamplingConfig
from experiments.presets import hyperspherical
from experiments.presets.backbones import RESNET50
from experiments.presets.normalisation import IMAGENET_MEAN, IMAGENET_STD
from experiments.protocols.hyperspherical import HypersphericalLossConfig

_EPOCH = 1251
DESCRIPTION = "Hyperspherical classification on ImageNet-1K (ResNet-50, mixup, 100 epochs)."
CONFIG = replace(
    hyperspherical.BALANCED,
    data=DataConfig(
        name="imagenet",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        pad=0,
        image_size=224,
        resize=256,
        crop_scale=(0.08, 1.0),
        mixup=1.0,
    ),
    sampling=SamplingConfig(batch_size=1024),
    model=replace(RESNET50, dim=512),
    loss=HypersphericalLossConfig(),
    optimizer=OptimizerConfig(
        learning_rate=0.5, nesterov=False, weight_decay=2e-5, warmup_steps=5 * _EPOCH
    ),
    steps=100 * _EPOCH,
    validate_every=_EPOCH,
    log_every=100,
)
