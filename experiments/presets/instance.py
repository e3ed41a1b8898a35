"""Instance discrimination: every training image is a class of its own.

    python -m experiments train icons-instances

Many classes can be spread over devices, and compiled for a TPU pod without data:

    python -m experiments train icons-instances --parallel jit --mesh 1x1
    python -m experiments compile icons-instances --topology v5e:4x4 --parallel jit --mesh 4x4
        --classes 1000000
"""

from __future__ import annotations

from experiments.config import ModelConfig, OptimizerConfig
from experiments.presets.preset import Preset
from experiments.protocols.few_shot import FewShotEvaluation
from experiments.protocols.few_shot_data import FewShotData
from experiments.protocols.instance import InstanceConfig

PRESETS = {
    # Novel accuracy by the nearest prototype (cosine), 1-shot / 5-shot, seed 0: 55.6 / 73.1 %; with
    # random weights 48.2 / 68.3, with labels of the 100 base classes (`icons`, SCE) 75.9 / 89.8.
    "icons-instances": Preset(
        "Instance discrimination on the shipped icons (4,650 images, 32×32 grey, Conv4).",
        InstanceConfig(
            data=FewShotData(crop_scale=(0.3, 1.0), pad=0),
            model=ModelConfig(widths=(16, 32, 64, 64)),
            optimizer=OptimizerConfig(kind="adam", learning_rate=3e-3, weight_decay=1e-5),
            evaluation=FewShotEvaluation(validation_distance="cosine"),
            steps=800,
            validate_every=400,
        ),
    )
}
