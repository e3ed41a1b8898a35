"""Protocol D on the characters of KanjiVG: 70 components, split by character.

python -m experiments train kanji --loss.name two-way
"""

from experiments.config import DataConfig, ModelConfig, OptimizerConfig, SamplingConfig
from experiments.protocols.multi_label import MultiLabelConfig

DESCRIPTION = "Multi-label classification of kanji by their components (70 labels, 48×48, Conv4)."
CONFIG = MultiLabelConfig(
    # A mirrored character is made of other components.
    data=DataConfig(name="kanji", mean=(0.22,), std=(0.38,), flip=False),
    sampling=SamplingConfig(batch_size=64),
    model=ModelConfig(widths=(16, 32, 64, 64)),
    optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=1e-4),
    steps=1200,
)
