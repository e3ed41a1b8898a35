"""Protocol E on the icons that ship with the experiments.

    python -m experiments train icons-margin --loss.margin -0.02

Of every base class 35 % of the images are held out, since a classifier that has seen an image says
nothing of its class: the paper takes other images, too. The classes with enough of them give the
episodes of the base classes: 46 of the 100 in 1-shot (17 images), 29 in 5-shot episodes (21).

Learning rate and weight decay are the paper's. Fine-tuned accuracy on validation classes, 1-shot /
5-shot, seed 0: 75.9 / 91.3 % at m = 0, 75.7 / 91.0 % at -0.02, 73.1 / 89.0 % at -0.1; on base
classes 80.1 / 92.6, 79.2 / 92.2, 75.7 / 90.4 %. To repeat one of these: the command above with
another margin and `--directory RUN`, then `python -m experiments evaluate RUN --split validation`
(or `base`). After 3200 steps m = 0 has 77.1 / 92.0 % and 83.6 / 94.1 %, m = -0.05 has 77.0 / 91.8 %
and 82.5 / 94.0 %.
"""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig, SamplingConfig
from experiments.protocols.negative_margin import MarginLossConfig, NegativeMarginConfig

DESCRIPTION = "Negative margin on the shipped icons (100 / 29 / 50 classes, 32×32 grey, Conv4)."
CONFIG = NegativeMarginConfig(
    data=DataConfig(holdout=0.35),
    sampling=SamplingConfig(batch_size=128),
    model=ModelConfig(widths=(16, 32, 64, 64)),
    loss=MarginLossConfig(name="cosine", margin=-0.02),
    optimizer=OptimizerConfig(
        kind="adam",
        learning_rate=3e-3,
        weight_decay=1e-5,
        warmup_steps=200,
        warmup_from=1 / 16,
    ),
    steps=800,
    validate_every=200,
)
