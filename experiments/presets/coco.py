"""Protocol D on MS-COCO.

    python -m experiments train coco --model.weights resnet50.safetensors --loss.name two-way

Setting: Kobayashi, CVPR 2023; its losses: supplement, Table B. 40 epochs of the 82,783 training
images of 2014, tested on the validation images; with those of 2017 (118,287) 40 epochs are
`--steps 9240`. No images are left for validation, so the last checkpoint is evaluated:
`--data.holdout 0.05` gives some. Not run here: the data set does not ship.
"""

import dataclasses

from experiments.presets import multi_label

DESCRIPTION = "Multi-label classification on MS-COCO (80 labels, pretrained ResNet-50)."
CONFIG = dataclasses.replace(
    multi_label.CONFIG,
    data=dataclasses.replace(multi_label.CONFIG.data, name="coco"),
    steps=6440,
    validate_every=161,
)
