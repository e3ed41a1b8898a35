"""A folder of images of one's own, with settings for some hundred photographs on a CPU.

    python -m experiments train folder --data.name folder:PATH
    python -m experiments train folder-few-shot --data.name folder:PATH
    python -m experiments train folder-labels --data.name folder:PATH

Images are seen at 64×64 pixels. Of thousands of images, train longer (`--steps 3000`) at a higher
resolution (`--data.name folder:PATH@256 --data.image-size 128`). The README has measurements.
"""

from typing import Any

from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.datasets.folder import PREFIX
from experiments.papers.classification import ClassificationData
from experiments.papers.few_shot import FewShotConfig
from experiments.papers.few_shot_data import FewShotData
from experiments.papers.group_softmax import GroupLoss, GroupSoftmaxConfig
from experiments.papers.integration import IntegratedLoss
from experiments.papers.multi_label import MultiLabelConfig, MultiLabelData
from experiments.papers.presets.shared import Preset

_DATA: dict[str, Any] = {
    "name": PREFIX,
    "image_size": 64,
    "resize": 72,
    "pad": 0,
    "crop_scale": (0.5, 1.0),
    "color_jitter": 0.3,
}
_COMMON: dict[str, Any] = {
    "sampling": SamplingConfig(batch_size=32),
    "model": ModelConfig(widths=(16, 32, 64, 128)),
    "optimizer": OptimizerConfig(kind="adam", learning_rate=2e-3, weight_decay=1e-5),
    "steps": 600,
}

PRESETS = {
    "folder": Preset(
        "Classification of your own images (--data.name folder:PATH; 64×64, Conv4).",
        GroupSoftmaxConfig(
            data=ClassificationData(**_DATA, holdout=0.15),
            loss=GroupLoss(name="softmax"),
            **_COMMON,
        ),
    ),
    "folder-few-shot": Preset(
        "Few-shot transfer between classes of your own images (--data.name folder:PATH).",
        FewShotConfig(data=FewShotData(**_DATA), loss=IntegratedLoss(temperature=1 / 8), **_COMMON),
    ),
    "folder-labels": Preset(
        "Multi-label classification of your own images (--data.name folder:PATH).",
        MultiLabelConfig(data=MultiLabelData(**_DATA, holdout=0.15), **_COMMON),
    ),
}
