"""Settings that several papers share."""

from typing import Any

IMAGENET_COLOURS: dict[str, Any] = {
    "data.mean": (0.485, 0.456, 0.406),
    "data.std": (0.229, 0.224, 0.225),
}
CROPS_OF_224: dict[str, Any] = IMAGENET_COLOURS | {
    "data.pad": 0,
    "data.flip": True,
    "data.image_size": 224,
    "data.resize": 256,
    "data.crop_scale": (0.08, 1.0),
}
RESNET12: dict[str, Any] = {"model.backbone": "resnet12", "model.widths": (64, 160, 320, 640)}
RESNET50: dict[str, Any] = {
    "model.backbone": "resnet50",
    "model.widths": (64, 128, 256, 512),
    "model.pooling": "mean",
}


def sgd(rate: float, decay: float, *, nesterov: bool, decay_all: bool) -> dict[str, Any]:
    return {
        "optimizer.kind": "sgd",
        "optimizer.learning_rate": rate,
        "optimizer.momentum": 0.9,
        "optimizer.nesterov": nesterov,
        "optimizer.weight_decay": decay,
        "optimizer.decay_all": decay_all,
    }
