"""Protocol B on ImageNet-1K and its subsets.

    python -m experiments train imagenet-groups --loss.name tight
    python -m experiments train imagenet-groups --data.classes 100 \
        --steps 89280 --optimizer.decay-steps 29760 59520 74400
    python -m experiments train imagenet-groups --data.samples-per-class 100 \
        --steps 93600 --optimizer.decay-steps 35100 70200 81900

Kobayashi, WACV 2021, supplement, Table B.1: 120 epochs, drops at 30, 60, 90; 100 classes (496 steps
an epoch) 180 epochs, drops at 60, 120, 150; 100 images a class (390 steps an epoch) 240 epochs,
drops at 90, 180, 210. Its classes are its own choice, ours those of `experiments.data.selection`.
The validation images are for test, and no images are held out: the last checkpoint is evaluated.
Not run here: the data set does not ship.
"""

from experiments.presets import groups

DESCRIPTION = "Group softmax on ImageNet-1K (ResNet-50, 120 epochs); --data.classes for subsets."
CONFIG = groups.on("imagenet", images=1281167, epochs=120, drops=(30, 60, 90))
