"""Protocol B on ImageNet-1K and its subsets.

    python -m experiments train imagenet-groups --loss.name tight
    python -m experiments train imagenet-groups --data.classes 100 \
        --steps 89280 --optimizer.decay-steps 29760 59520 74400

Kobayashi, WACV 2021, supplement, Table B.1: 120 epochs, drops at 30, 60, 90. Its subsets:

    option                           epochs, drops            --steps   --optimizer.decay-steps
    --data.classes 100               180, at 60, 120, 150      89280     29760  59520  74400
    --data.classes 200               180, at 60, 120, 150     181260     60420 120840 151050
    --data.classes 500               120, at 30, 60, 90       299520     74880 149760 224640
    --data.samples-per-class 100     240, at 90, 180, 210      93600     35100  70200  81900
    --data.samples-per-class 200     240, at 90, 180, 210     187440     70290 140580 164010
    --data.samples-per-class 500     180, at 60, 120, 150     351540    117180 234360 292950

So the first column of Table B.2 is

    python -m experiments sweep imagenet-groups --over loss.name=softmax,tight,loose \
        data.classes/steps/optimizer.decay_steps=100/89280/29760+59520+74400

Its classes are its own choice, ours those of `experiments.data.selection`.
The validation images are for test, and no images are held out: the last checkpoint is evaluated.
Not run here: the data set does not ship.
"""

from experiments.presets import groups

DESCRIPTION = "Group softmax on ImageNet-1K (ResNet-50, 120 epochs); --data.classes for subsets."
CONFIG = groups.on("imagenet", images=1281167, epochs=120, drops=(30, 60, 90))
