"""Protocol B on Caltech-256.

    python -m experiments train caltech256-groups --loss.name softmax

Kobayashi, WACV 2021, supplement, Table B.1: 300 epochs. Not run here: the data set does not ship.
"""

from experiments.presets import groups

DESCRIPTION = "Group softmax on Caltech-256 (256 classes, ResNet-50, 300 epochs)."
CONFIG = groups.on("caltech256", images=15360, epochs=300, drops=(120, 240, 270))
