"""Protocol D on VOC 2007.

    python -m experiments train voc2007 --model.weights resnet50.safetensors --loss.name two-way

Setting: Kobayashi, CVPR 2023; 40 epochs of the 5,011 images for training and validation, of which
the last checkpoint is tested. Tune with `--train-on train --steps 160 --validate-every 40`, which
validates on the validation images, with 4 steps an epoch in place of 9. Not run here: the data set
does not ship.
"""

import dataclasses

from experiments.presets import multi_label

DESCRIPTION = "Multi-label classification on VOC 2007 (20 labels, pretrained ResNet-50)."
CONFIG = dataclasses.replace(
    multi_label.CONFIG,
    data=dataclasses.replace(multi_label.CONFIG.data, name="voc2007"),
    train_on="train+validation",
    steps=360,
    validate_every=90,
)
