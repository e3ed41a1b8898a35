"""Protocol A on CUB few-shot.

    python -m experiments compare cub --sampling random 64x2 32x4 16x8 8x16 4x32

Data, batch size and samplings: Kobayashi, BMVC 2024, supplement, Table A; its results:
Table C. The supplement names no optimiser: SGD with momentum, 150 epochs and a cosine
schedule are our choice. Not run here: the data set does not ship.
"""

import dataclasses

from experiments.presets import few_shot

DESCRIPTION = "Few-shot transfer on CUB few-shot (100 / 50 / 50 classes, ResNet-12)."
CONFIG = dataclasses.replace(
    few_shot.CONFIG,
    data=dataclasses.replace(few_shot.CONFIG.data, name="cub_fewshot"),
    sampling=dataclasses.replace(few_shot.CONFIG.sampling, batch_size=128),
    steps=6900,
    validate_every=100,
)
