"""The published settings of protocol D, by preset; a copy that changes only with its source.

Kobayashi, CVPR 2023: supplement, Tables B and C and section B; the authors' published configuration
for MS-COCO. Table 8 trains on ImageNet; the training is not published.
"""

from typing import Any

from tests.experiments.published.shared import CROPS_OF_224, RESNET50, sgd

_TEMPERATURES: dict[str, Any] = {
    "loss.name": "two-way",
    "loss.positive_temperature": 4.0,
    "loss.negative_temperature": 1.0,
}
_AUTHORS: dict[str, Any] = (
    _TEMPERATURES
    | RESNET50
    | CROPS_OF_224
    | sgd(0.01, 1e-4, nesterov=True, decay_all=True)
    | {
        "data.crop_ratio": (3 / 4, 4 / 3),
        "data.color_jitter": 0.4,
        "data.lighting": 0.1,
        "sampling.batch_size": 512,
        "optimizer.schedule": "cosine",
        "optimizer.backbone_rate": 0.1,
    }
)

PUBLISHED: dict[str, dict[str, Any]] = {
    "coco": _AUTHORS | {"steps": 40 * (82081 // 512)},
    "voc2007": _AUTHORS | {"steps": 40 * (5011 // 512)},
    "nus-wide": _AUTHORS | {"steps": 40 * (125448 // 512)},
    "imagenet-two-way": _TEMPERATURES | RESNET50 | {"data.name": "imagenet"},
}
