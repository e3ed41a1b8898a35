"""Protocol A: few-shot transfer with integrated losses.

    python -m experiments sweep PRESET --over loss.name=sce,nca,sce+nca,direct:sce+nca
        sampling.strategy=random,64x8,32x16,16x32,8x64,4x128

Source: Kobayashi, BMVC 2024, and its supplement: data, batch size and samplings from Table A (and
Da), results in Tables B to D. There is no published code.
"""

from experiments.core.config import ModelConfig, SamplingConfig
from experiments.papers.few_shot import FewShotConfig
from experiments.papers.few_shot_data import FewShotData
from experiments.papers.integration import IntegratedLoss
from experiments.papers.presets.shared import FASHION, IMAGENET_COLOURS, RESNET12, Preset

# Eq. (i) divides squared distances by no temperature: T = 1. The option is in units of d, so this
# is --loss.temperature 0.0015625 (1/640) for a ResNet-12. At T = 1 the exponentials saturate.
_TEMPERATURE = 1 / 8
_LOSS = IntegratedLoss(temperature=_TEMPERATURE)
_CONV4 = ModelConfig(widths=(16, 32, 64, 64))


def _photographs(
    title: str,
    name: str,
    images: int,
    epochs: int,
    validate_every: int,
    *,
    batch_size: int = 512,
    pad: int = 8,
    loss: IntegratedLoss = _LOSS,
) -> Preset:
    """A preset of base classes with so many `images`.

    Batch size: Table A. Shots: Tables B to D. ResNet-12, its widths, ways and queries: main text.
    No stopped gradient: the formulas have none. The rest is ours: classifiers start with deviation
    1 / √d and the prior of a class as their bias; images are seen as the square in their centre,
    which a random crop shifts by `pad` pixels, and what lies beyond is not seen.
    """
    config = FewShotConfig(
        data=FewShotData(name=name, **IMAGENET_COLOURS, color_jitter=0.4, pad=pad),
        sampling=SamplingConfig(batch_size=batch_size),
        model=RESNET12,
        loss=loss,
        steps=epochs * (images // batch_size),
        validate_every=validate_every,
    )
    return Preset(f"Few-shot transfer on {title} classes, ResNet-12).", config)


PRESETS = {
    # Samplings: random 32x4 16x8.
    "icons": Preset(
        "Few-shot transfer on the shipped icons (100 / 29 / 50 classes, 32×32 grey, Conv4).",
        FewShotConfig(model=_CONV4, loss=_LOSS, steps=800),
    ),
    # No class is left for validation, so the last checkpoint is evaluated. Another split of the
    # classes: --data.subset-seed. Samplings: random 5x25.
    "fashion": Preset(
        "Few-shot transfer on Fashion-MNIST (5 / – / 5 classes, 32×32 grey, Conv4).",
        FewShotConfig(
            data=FewShotData(**FASHION, base_classes=5),
            model=_CONV4,
            loss=_LOSS,
            steps=800,
            validate_every=400,
        ),
    ),
    # Tables A, B.
    "mini-imagenet": _photographs("mini-ImageNet (64 / 16 / 20", "mini_imagenet", 38400, 100, 200),
    "tiered-imagenet": _photographs(
        "tiered-ImageNet (351 / 97 / 160", "tiered_imagenet", 448695, 60, 1100
    ),
    # Tables A, C. Samplings: random 64x2 32x4 16x8 8x16 4x32.
    "cub": _photographs(
        "CUB few-shot (100 / 50 / 50", "cub_fewshot", 5885, 150, 100, batch_size=128
    ),
    # Tables A, C.
    "cifar-fs": _photographs("CIFAR-FS (64 / 16 / 20", "cifar_fs", 38400, 100, 200, pad=4),
    # Table D. It has 908 classes and 640 features, which leave a direct sum no subspace. No classes
    # are left for validation, so the last checkpoint is evaluated. Its table:
    #     python -m experiments sweep inat2017 --over sampling.strategy=random,256x2,128x4,64x8
    #         loss.name=sce,nca,proto,sce+nca,sce+proto,spectral:sce+nca,spectral:sce+proto
    # The powers of Table 6, in 128-way 4-shot batches for NCA and random ones for Proto:
    #     python -m experiments sweep inat2017 --over loss.power=0.1,0.2,0.3,0.4,0.5
    #         loss.name/sampling.strategy=spectral:sce+nca/128x4,spectral:sce+proto/random
    "inat2017": _photographs(
        "iNaturalist2017 with spectral sums (908 / – / 227",
        "inat2017_fewshot",
        197612,
        100,
        800,
        loss=IntegratedLoss(name="spectral:sce+nca", temperature=_TEMPERATURE, power=0.5),
    ),
}
