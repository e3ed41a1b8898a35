"""Protocol A on mini-ImageNet.

    python -m experiments compare mini-imagenet --sampling random 64x8 32x16 16x32 8x64 4x128

Data, batch size and samplings: Kobayashi, BMVC 2024, supplement, Table A; its results:
Table B. The supplement names no optimiser: SGD with momentum, 100 epochs and a cosine
schedule are our choice. Not run here: the data set does not ship.
"""

import dataclasses

from experiments.presets import few_shot

DESCRIPTION = "Few-shot transfer on mini-ImageNet (64 / 16 / 20 classes, ResNet-12)."
CONFIG = dataclasses.replace(
    few_shot.CONFIG,
    data=dataclasses.replace(few_shot.CONFIG.data, name="mini_imagenet"),
    sampling=dataclasses.replace(few_shot.CONFIG.sampling, batch_size=512),
    steps=7500,
    validate_every=200,
)
