"""Protocol A on the icons that ship with the experiments.

    python -m experiments compare icons --sampling random 32x4 16x8

Table: Kobayashi, BMVC 2024, supplement, Tables B and C; results: experiments/RESULTS.md.

Squared distances between features of d = 256 numbers are in the hundreds, and the exponentials of
the metric losses saturate. Validation 1-shot accuracy after 250 steps of a Conv4 of widths 32, 32,
64, 64 (NCA / Proto / SCE+NCA), for temperatures in units of d: 1/256 (T = 1) 62 / 62 / 64 %,
1/32 75 / 74 / 75 %, 1/8 77 / 75 / 79 %, 1/2 76 / 75 / 77 %. So T = d/8, for every method that has
a metric loss. A learning rate of 0.3 lost 8 points (SCE+NCA) against 0.1.

Validation 1-shot accuracy rises up to about 800 steps (in runs of 1000, SCE+NCA: 78.7 at 300, 80.6
at 800, 80.4 at the end; SCE⊕NCA 77.8, 80.0, 80.3).
"""

from experiments.config import FewShotConfig, LossConfig, ModelConfig

DESCRIPTION = "Few-shot transfer on the shipped icons (100 / 29 / 50 classes, 32×32 grey, Conv4)."
CONFIG = FewShotConfig(
    model=ModelConfig(widths=(16, 32, 64, 64)),
    loss=LossConfig(temperature=1 / 8),
    steps=800,
)
