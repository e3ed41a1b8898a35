"""The published settings of protocol B, by preset; a copy that changes only with its source.

Kobayashi, WACV 2021: supplement, section B.1 and Table B.1. The backbone is from the paper's main
text, which is not at hand.
"""

from typing import Any


def _row(images: int, epochs: int, drops: tuple[int, ...]) -> dict[str, Any]:
    """A row of Table B.1: training images, epochs T, and those at which the rate is divided."""
    epoch = images // 256
    return {
        "data.mean": (0.485, 0.456, 0.406),
        "data.std": (0.229, 0.224, 0.225),
        "data.pad": 0,
        "data.flip": True,
        "data.image_size": 224,
        "data.resize": 256,
        "data.crop_scale": (0.08, 1.0),
        "sampling.batch_size": 256,
        "model.backbone": "resnet50",
        "model.widths": (64, 128, 256, 512),
        "model.pooling": "mean",
        "optimizer.kind": "sgd",
        "optimizer.learning_rate": 0.1,
        "optimizer.momentum": 0.9,
        "optimizer.nesterov": False,
        "optimizer.weight_decay": 1e-4,
        "optimizer.decay_all": True,
        "optimizer.schedule": "step",
        "optimizer.decay_steps": tuple(drop * epoch for drop in drops),
        "optimizer.warmup_steps": 0,
        "steps": epochs * epoch,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "imagenet-groups": _row(1281167, 120, (30, 60, 90)),
    "food101-groups": _row(75750, 180, (60, 120, 150)),
    "caltech256-groups": _row(256 * 60, 300, (120, 240, 270)),
    "sun397-groups": _row(397 * 50, 300, (120, 240, 270)),
}

_GROUPS = {"loss.num_groups": 4, "loss.grouping": "discriminative"}
CHOSEN: dict[str, dict[str, Any]] = dict.fromkeys(PUBLISHED, _GROUPS)
"""By preset and option: what the paper does not fix."""
