"""Instance discrimination: every training image is a class of its own.

    python -m experiments train icons-instances

Many classes can be spread over devices, and compiled for a TPU pod without data:

    python -m experiments train icons-instances --parallel jit --mesh 1x1
    python -m experiments compile icons-instances --topology v5e:4x4 --parallel jit --mesh 4x4
        --classes 1000000
"""

from __future__ import annotations

from experiments.config import DataConfig, ModelConfig
from experiments.presets.preset import Preset
from experiments.protocols.instance import InstanceConfig

PRESETS = {
    "icons-instances": Preset(
        "Instance discrimination on the shipped icons (4,650 images, 32×32 grey, Conv4).",
        InstanceConfig(
            data=DataConfig(crop_scale=(0.3, 1.0), pad=0),
            model=ModelConfig(widths=(16, 32, 64, 64)),
            steps=1600,
            validate_every=400,
        ),
    ),
}
