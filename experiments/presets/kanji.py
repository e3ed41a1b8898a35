"""Protocol D on the characters of KanjiVG: 70 components, split by character.

    python -m experiments sweep kanji --seeds 0 1 2 --over loss.name/optimizer.learning_rate=RATES

Tables: Kobayashi, CVPR 2023, supplement, Tables B and C. It takes the package `kanjivg` (the extra
`kanji`). A step takes 0.1 s of one core, a run two to three minutes.

The losses differ in size (BCE, ASL and WARP are sums over classes), so that no one learning rate is
fair to all. Mean of mAP@class and mAP@sample (%) on the validation characters after

    python -m experiments train kanji --steps 250 --validate-every 250 --loss.name LOSS
        --optimizer.learning-rate RATE

    | | 0.003 | 0.01 | 0.03 | 0.1 | 0.3 |
    |---|---|---|---|---|---|
    | two-way |  | 51 | 64 | 43 |  |
    | sample-wise |  | 37 | 51 | 23 |  |
    | class-wise |  | 30 | 43 | 48 | 49 |
    | bce | 34 | 53 | 33 | 20 |  |
    | softmax |  | 35 | 47 | 16 |  |
    | asl | 25 | 38 | 27 | 17 |  |
    | warp | 52 | 56 | 41 |  |  |

So a comparison gives every loss its best rate (RATES):

    two-way/0.03,sample-wise/0.03,class-wise/0.3,bce/0.01,softmax/0.03,asl/0.01,warp/0.01

These numbers are of one seed and a fifth of the preset's steps; with all 1200, other rates have not
been tried. `experiments/RESULTS.md` has what came out.
"""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig, SamplingConfig
from experiments.protocols.multi_label import MultiLabelConfig

DESCRIPTION = "Multi-label classification of kanji by their components (70 labels, 48×48, Conv4)."
CONFIG = MultiLabelConfig(
    # A mirrored character is made of other components.
    data=DataConfig(name="kanji", mean=(0.22,), std=(0.38,), flip=False),
    sampling=SamplingConfig(batch_size=64),
    model=ModelConfig(widths=(16, 32, 64, 64)),
    # The backbone starts from scratch, so that it learns as fast as the classifier.
    optimizer=OptimizerConfig(learning_rate=0.03, weight_decay=1e-4),
    steps=1200,
)
