"""Protocol D on NUS-WIDE.

    python -m experiments train nus-wide --model.weights resnet50.safetensors --loss.name two-way

Setting and results: Kobayashi, CVPR 2023, supplement, Table C: images without a label are left
out. How many images can still be had differs; 40 epochs of 125,448 are 9800 steps. No images are
left for validation, so the last checkpoint is evaluated: `--data.holdout 0.05` gives some. Not run
here: the data set does not ship.
"""

import dataclasses

from experiments.presets import multi_label

DESCRIPTION = "Multi-label classification on NUS-WIDE (81 labels, pretrained ResNet-50)."
CONFIG = dataclasses.replace(
    multi_label.CONFIG,
    data=dataclasses.replace(multi_label.CONFIG.data, name="nus_wide"),
    steps=9800,
    validate_every=245,
)
