"""Protocol B on Food-101, from scratch.

    python -m experiments train food101-groups --loss.name softmax

Kobayashi, WACV 2021, supplement, Table B.1: 180 epochs. Not run here: the data set does not ship.
"""

from experiments.presets import groups

DESCRIPTION = "Group softmax on Food-101 (101 classes, ResNet-50, 180 epochs)."
CONFIG = groups.on("food101", images=75750, epochs=180, drops=(60, 120, 150))
