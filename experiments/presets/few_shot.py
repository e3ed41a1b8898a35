"""Protocol A: few-shot transfer with integrated losses.

    python -m experiments compare PRESET --sampling random 64x8 32x16 16x32 8x64 4x128

Source: Kobayashi, BMVC 2024, supplement: data, batch size and samplings from Table A, results in
Tables B to D. The supplement names no optimiser; SGD with momentum and a cosine schedule are our
choice. Results on the icons: experiments/RESULTS.md. The photographs do not ship with the project
and have not been run here.
"""

from __future__ import annotations

from experiments.config import DataConfig, ModelConfig, OptimizerConfig, SamplingConfig
from experiments.presets.photographs import JITTERED, RESNET12
from experiments.presets.preset import Preset
from experiments.protocols.few_shot import FewShotConfig
from experiments.protocols.integration import IntegratedLoss

# Squared distances between features of d = 256 numbers are in the hundreds, where the exponentials
# of the metric losses saturate. Validation 1-shot accuracy (%) on the icons, after 250 steps of a
# Conv4 of widths 32, 32, 64, 64, against the temperature in units of d:
#
#     temperature   1/256   1/32   1/8   1/2
#     NCA              62     75    77    76
#     Proto            62     74    75    75
#     SCE+NCA          64     75    79    77
#
# A narrow ResNet-12 with mean pooling also has its best 5-shot accuracy at 1/8 (NCA, 120 steps).
_LOSS = IntegratedLoss(temperature=1 / 8)


def _photographs(
    name: str, *, batch_size: int, steps: int, validate_every: int, pad: int = 8
) -> FewShotConfig:
    """ResNet-12 on a data set of photographs."""
    return FewShotConfig(
        data=DataConfig(name=name, **JITTERED, pad=pad),
        sampling=SamplingConfig(batch_size=batch_size),
        model=RESNET12,
        loss=_LOSS,
        optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=5e-4),
        steps=steps,
        validate_every=validate_every,
    )


PRESETS = {
    # Samplings: random 32x4 16x8. A learning rate of 0.3 costs SCE+NCA 8 points against 0.1.
    # Validation accuracy rises up to about 800 steps.
    "icons": Preset(
        "Few-shot transfer on the shipped icons (100 / 29 / 50 classes, 32×32 grey, Conv4).",
        FewShotConfig(model=ModelConfig(widths=(16, 32, 64, 64)), loss=_LOSS, steps=800),
    ),
    # Tables A, B; 100 epochs.
    "mini-imagenet": Preset(
        "Few-shot transfer on mini-ImageNet (64 / 16 / 20 classes, ResNet-12).",
        _photographs("mini_imagenet", batch_size=512, steps=7500, validate_every=200),
    ),
    # Tables A, B; 60 epochs.
    "tiered-imagenet": Preset(
        "Few-shot transfer on tiered-ImageNet (351 / 97 / 160 classes, ResNet-12).",
        _photographs("tiered_imagenet", batch_size=512, steps=52600, validate_every=1100),
    ),
    # Tables A, C; 150 epochs. Samplings: random 64x2 32x4 16x8 8x16 4x32.
    "cub": Preset(
        "Few-shot transfer on CUB few-shot (100 / 50 / 50 classes, ResNet-12).",
        _photographs("cub_fewshot", batch_size=128, steps=6900, validate_every=100),
    ),
    # Tables A, C; 100 epochs.
    "cifar-fs": Preset(
        "Few-shot transfer on CIFAR-FS (64 / 16 / 20 classes, ResNet-12).",
        _photographs("cifar_fs", batch_size=512, steps=7500, validate_every=200, pad=4),
    ),
    # Table D; 100 epochs. Samplings: random 256x2 128x4 64x8.
    "inat2017": Preset(
        "Few-shot transfer on iNaturalist2017 (908 / – / 227 classes, ResNet-12).",
        _photographs("inat2017_fewshot", batch_size=512, steps=38500, validate_every=800),
    ),
}
