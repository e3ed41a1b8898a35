"""Protocol B on Food-101, from scratch; the second command fine-tunes a backbone.

    python -m experiments train food101-groups --loss.name softmax

    python -m experiments train food101-groups --model.weights WEIGHTS \
        --optimizer.learning-rate 0.0045 --steps 35400 --optimizer.decay-steps 8850 17700 26550

Kobayashi, WACV 2021, supplement, Table B.1: 180 epochs from scratch, or 120 of fine-tuning with
drops at 30, 60, 90; an epoch is 295 steps. Not run here: the data set does not ship.
"""

from experiments.presets import groups

DESCRIPTION = "Group softmax on Food-101 (101 classes, ResNet-50, 180 epochs)."
CONFIG = groups.on("food101", images=75750, epochs=180, drops=(60, 120, 150))
