"""What the presets of protocol E on photographs share: ResNet-12, Adam, batches of 256.

The supplement gives ranges, not pairs, for the margin (-0.005 to -0.3) and the weight decay (1e-6
to 5e-3); what stands here is our choice of them, as are ResNet-12 among its backbones and the
augmentation, which is that of protocol A. The other backbones take `--model.drop-block 0` and, with
images of 84, 224 or 80 pixels (`--data.name mini_imagenet@224`),

    --model.backbone conv4 --model.widths 64 64 64 64 --model.pooling flatten
    --model.backbone resnet18 --model.widths 64 128 256 512
    --model.backbone wrn28 --model.widths 160 320 640
"""

import dataclasses

from experiments.config import OptimizerConfig, SamplingConfig
from experiments.presets import few_shot
from experiments.presets.backbones import RESNET12
from experiments.protocols.negative_margin import MarginLossConfig, NegativeMarginConfig

CONFIG = NegativeMarginConfig(
    data=few_shot.CONFIG.data,
    sampling=SamplingConfig(batch_size=256),
    model=dataclasses.replace(RESNET12, drop_block=0.1),
    loss=MarginLossConfig(name="cosine", margin=-0.02),
    optimizer=OptimizerConfig(
        kind="adam", learning_rate=3e-3, weight_decay=1e-5, warmup_from=1 / 16
    ),
)


def for_epochs(
    config: NegativeMarginConfig, *, images: int, warmup: int, after: int
) -> NegativeMarginConfig:
    """The configuration with so many epochs of warm-up and of cosine decay after it.

    Args:
      config: the run.
      images: training images.
      warmup: epochs.
      after: epochs.
    """
    epoch = images // config.sampling.batch_size
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup * epoch),
        steps=(warmup + after) * epoch,
        validate_every=5 * epoch,
    )
