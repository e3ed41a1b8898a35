"""Two towers: a drawing and the name of its class, as neighbours in one space.

    python -m experiments train icons-names
    python -m experiments train icons-names --loss.name sigmoid

Flips are left out: they turn `rewind` into `fast-forward`.
"""

from __future__ import annotations

from experiments.config import DataConfig, ModelConfig, OptimizerConfig
from experiments.presets.preset import Preset
from experiments.protocols.two_towers import TwoTowersConfig

PRESETS = {
    "icons-names": Preset(
        "Icons and their names (an image and a character encoder), retrieval in both directions.",
        TwoTowersConfig(
            data=DataConfig(crop_scale=(0.3, 1.0), pad=0, flip=False),
            model=ModelConfig(widths=(16, 32, 64, 64)),
            optimizer=OptimizerConfig(kind="adam", learning_rate=3e-3, weight_decay=1e-5),
            steps=1200,
            validate_every=400,
        ),
    )
}
