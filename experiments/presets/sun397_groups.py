"""Protocol B on SUN-397.

    python -m experiments train sun397-groups --loss.name softmax

Kobayashi, WACV 2021, supplement, Table B.1: 300 epochs. Not run here: the data set does not ship.
"""

from experiments.presets import groups

DESCRIPTION = "Group softmax on SUN-397 (397 classes, ResNet-50, 300 epochs)."
CONFIG = groups.on("sun397", images=19850, epochs=300, drops=(120, 240, 270))
