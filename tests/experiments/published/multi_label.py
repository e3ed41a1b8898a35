"""The published settings of protocol D, by preset; a copy that changes only with its source.

Kobayashi, CVPR 2023: supplement, Tables B and C and section B; the authors' published configuration
for MS-COCO. Table 8 trains on ImageNet; the training is not published.
"""

from typing import Any

_TEMPERATURES: dict[str, Any] = {
    "loss.name": "two-way",
    "loss.positive_temperature": 4.0,
    "loss.negative_temperature": 1.0,
}
_RESNET50: dict[str, Any] = {
    "model.backbone": "resnet50",
    "model.widths": (64, 128, 256, 512),
    "model.pooling": "mean",
}
_AUTHORS: dict[str, Any] = (
    _TEMPERATURES
    | _RESNET50
    | {
        "data.pad": 0,
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
        "optimizer.kind": "sgd",
        "optimizer.learning_rate": 0.01,
        "optimizer.momentum": 0.9,
        "optimizer.nesterov": True,
        "optimizer.weight_decay": 1e-4,
        "optimizer.decay_all": True,
        "optimizer.schedule": "cosine",
        "optimizer.backbone_rate": 0.1,
    }
)

PUBLISHED: dict[str, dict[str, Any]] = {
    "coco": _AUTHORS | {"steps": 40 * (82081 // 512)},
    "voc2007": _AUTHORS | {"steps": 40 * (5011 // 512)},
    "nus-wide": _AUTHORS | {"steps": 40 * (125448 // 512)},
    "imagenet-two-way": _TEMPERATURES | _RESNET50 | {"data.name": "imagenet"},
}

_DEVIATIONS = {"loss.class_wise_over": ("device", "batch")}
DEVIATIONS: dict[str, dict[str, tuple[Any, Any]]] = dict.fromkeys(PUBLISHED, _DEVIATIONS)
"""By preset and option: the published value, and the one of the preset."""
CHOSEN: dict[str, dict[str, Any]] = {
    "imagenet-two-way": {
        "data.mean": (0.485, 0.456, 0.406),
        "data.std": (0.229, 0.224, 0.225),
        "data.pad": 0,
        "data.flip": True,
        "data.image_size": 224,
        "data.resize": 256,
        "data.crop_scale": (0.08, 1.0),
        "sampling.batch_size": 256,
        "optimizer.kind": "sgd",
        "optimizer.learning_rate": 0.1,
        "optimizer.momentum": 0.9,
        "optimizer.nesterov": True,
        "optimizer.weight_decay": 1e-4,
        "optimizer.decay_all": False,
        "optimizer.schedule": "cosine",
        "steps": 90 * (1281167 // 256),
    },
    "voc2007": {"data.train_on": "train+validation"},
}
"""By preset and option: what the paper does not fix."""
