"""The published settings of protocol D, by preset; a copy that changes only with its source.

Kobayashi, CVPR 2023: supplement, Tables B and C and section B; the authors' published configuration
for MS-COCO.
"""

from typing import Any

_TEMPERATURES: dict[str, Any] = {
    "loss.name": "two-way",
    "loss.positive_temperature": 4.0,
    "loss.negative_temperature": 1.0,
}
_AUTHORS: dict[str, Any] = _TEMPERATURES | {
    "data.mean": (0.485, 0.456, 0.406),
    "data.std": (0.229, 0.224, 0.225),
    "data.flip": True,
    "data.image_size": 224,
    "data.resize": 256,
    "data.crop_scale": (0.08, 1.0),
    "data.crop_ratio": (3 / 4, 4 / 3),
    "data.color_jitter": 0.4,
    "data.lighting": 0.1,
    "sampling.batch_size": 512,
    "model.backbone": "resnet50",
    "optimizer.kind": "sgd",
    "optimizer.learning_rate": 0.01,
    "optimizer.momentum": 0.9,
    "optimizer.nesterov": True,
    "optimizer.weight_decay": 1e-4,
    "optimizer.decay_all": True,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 0,
    "optimizer.backbone_rate": 0.1,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "coco": _AUTHORS | {"steps": 40 * (82081 // 512)},
    "voc2007": _AUTHORS | {"steps": 40 * (5011 // 512)},
    "nus-wide": _AUTHORS | {"steps": 40 * (125448 // 512)},
    "imagenet-two-way": _TEMPERATURES | {"data.name": "imagenet", "model.backbone": "resnet50"},
}
