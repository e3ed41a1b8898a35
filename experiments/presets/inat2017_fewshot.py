"""Protocol A on iNaturalist2017.

    python -m experiments compare inat2017 --sampling random 256x2 128x4 64x8

Data, batch size and samplings: Kobayashi, BMVC 2024, supplement, Table D; its results:
Table D. The supplement names no optimiser: SGD with momentum, 100 epochs and a cosine
schedule are our choice. Not run here: the data set does not ship.
"""

import dataclasses

from experiments.presets import few_shot

DESCRIPTION = "Few-shot transfer on iNaturalist2017 (908 / – / 227 classes, ResNet-12)."
CONFIG = dataclasses.replace(
    few_shot.CONFIG,
    data=dataclasses.replace(few_shot.CONFIG.data, name="inat2017_fewshot"),
    sampling=dataclasses.replace(few_shot.CONFIG.sampling, batch_size=512),
    steps=38500,
    validate_every=800,
)
