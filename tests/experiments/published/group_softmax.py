"""The published settings of protocol B, by preset; a copy that changes only with its source.

Kobayashi, WACV 2021: supplement, section B.1 and Table B.1. The backbone is from the paper's main
text, which is not at hand.
"""

from typing import Any

from tests.experiments.published.shared import CROPS_OF_224, RESNET50, sgd


def _row(images: int, epochs: int, drops: tuple[int, ...]) -> dict[str, Any]:
    """A row of Table B.1: training images, epochs T, and those at which the rate is divided."""
    epoch = images // 256
    optimizer = sgd(0.1, 1e-4, nesterov=False, decay_all=True)
    return (
        CROPS_OF_224
        | RESNET50
        | optimizer
        | {
            "sampling.batch_size": 256,
            "optimizer.schedule": "step",
            "optimizer.decay_steps": tuple(drop * epoch for drop in drops),
            "optimizer.warmup_steps": 0,
            "steps": epochs * epoch,
        }
    )


PUBLISHED: dict[str, dict[str, Any]] = {
    "imagenet-groups": _row(1281167, 120, (30, 60, 90)),
    "food101-groups": _row(75750, 180, (60, 120, 150)),
    "caltech256-groups": _row(256 * 60, 300, (120, 240, 270)),
    "sun397-groups": _row(397 * 50, 300, (120, 240, 270)),
}
