"""The published settings of protocol E, by preset; a copy that changes only with its source.

The source is the configuration that the authors published. Its last batch of an epoch is smaller:
5,885 images give 23 batches of 256, and 60,000 give 235.
"""

from typing import Any

from tests.experiments.published import shared

COMMON: dict[str, Any] = {
    "data.holdout": 0.0,
    "data.mean": (0.507, 0.487, 0.441),
    "data.std": (0.267, 0.257, 0.276),
    "data.pad": 0,
    "data.flip": True,
    "data.color_jitter": 0.4,
    "data.resize_to_square": True,
    "data.crop_scale": (0.08, 1.0),
    "data.crop_ratio": (3 / 4, 4 / 3),
    "data.lighting": 0.0,
    "data.mixup": 0.0,
    "sampling.batch_size": 256,
    "sampling.strategy": "random",
    "model.pooling": "mean",
    "loss.scale": 0.0,
    "loss.label_smoothing": 0.0,
    "optimizer.kind": "adam",
    "optimizer.learning_rate": 3e-3,
    "optimizer.decay_all": True,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_from": 1 / 16,
    "optimizer.decay_steps": (),
    "optimizer.backbone_rate": 1.0,
    "report_last": True,
    "evaluation.ways": 5,
    "evaluation.shots": (1, 5),
    "evaluation.queries": 16,
    "evaluation.episodes": 600,
    "evaluation.classifier": "same",
    "evaluation.selection": "fine-tuned",
    "evaluation.validation_shots": 5,
    "evaluation.validation_episodes": 100,
    "fine_tuning.scale": 5.0,
    "fine_tuning.margin": 0.0,
    "fine_tuning.passes": 100,
    "fine_tuning.batch_size": 4,
    "fine_tuning.learning_rate": 0.01,
    "fine_tuning.momentum": 0.9,
    "fine_tuning.dampening": 0.9,
    "fine_tuning.weight_decay": 1e-3,
}
RESNET12: dict[str, Any] = shared.RESNET12 | {"data.image_size": 84, "data.resize": int(84 * 1.15)}
RESNET18: dict[str, Any] = {
    "model.backbone": "resnet18",
    "model.widths": (64, 128, 256, 512),
    "data.image_size": 224,
    "data.resize": int(224 * 1.15),
}
MINI: dict[str, Any] = {
    "data.novel": "",
    "steps": 400 * (38400 // 256),
    "optimizer.warmup_steps": 100 * (38400 // 256),
    "validate_every": 20 * (38400 // 256),
}
CUB: dict[str, Any] = {
    "data.novel": "",
    "steps": 200 * 23,
    "optimizer.warmup_steps": 50 * 23,
    "validate_every": 20 * 23,
}
CROSS: dict[str, Any] = {
    "data.novel": "cub_fewshot@257",
    "steps": 400 * 235,
    "optimizer.warmup_steps": 100 * 235,
    "validate_every": 20 * 235,
}
NO_DROPS = {"model.drop_block": 0.0, "model.dropout": 0.0}


def drops(rate: float, size: int) -> dict[str, Any]:
    """DropBlock in the last two stages, and dropout of the same rate in the first two."""
    return {
        "model.drop_block": rate,
        "model.dropout": rate,
        "model.drop_block_size": size,
        "model.drop_block_steps": 20 * 2000,
    }


def pair(loss: str, weight_decay: float, margin: float) -> dict[str, Any]:
    """What the authors chose for each loss and number of shots."""
    return {"loss.name": loss, "optimizer.weight_decay": weight_decay, "loss.margin": margin}


_MINI18 = COMMON | MINI | RESNET18
_MINI12 = COMMON | MINI | RESNET12 | drops(0.1, 5)
_CUB = COMMON | CUB | RESNET18
_CROSS = COMMON | CROSS | RESNET18 | NO_DROPS

PUBLISHED: dict[str, dict[str, Any]] = {
    "mini-imagenet-margin": _MINI18 | drops(0.2, 3) | pair("cosine", 5e-5, -0.05),
    "mini-imagenet-margin-5shot": _MINI18 | drops(0.2, 3) | pair("cosine", 1e-4, -0.02),
    "mini-imagenet-margin-softmax": _MINI18 | NO_DROPS | pair("softmax", 1e-4, -0.3),
    "mini-imagenet-margin-softmax-5shot": _MINI18 | NO_DROPS | pair("softmax", 5e-5, -0.3),
    "mini-imagenet-margin-resnet12": _MINI12 | pair("cosine", 1e-4, -0.02),
    "mini-imagenet-margin-resnet12-5shot": _MINI12 | pair("cosine", 1e-4, -0.01),
    "mini-imagenet-margin-resnet12-softmax": _MINI12 | pair("softmax", 3e-4, -0.01),
    "mini-imagenet-margin-resnet12-softmax-5shot": _MINI12 | pair("softmax", 1e-5, -0.1),
    "cub-margin": _CUB | drops(0.1, 5) | pair("cosine", 5e-4, -0.01),
    "cub-margin-5shot": _CUB | drops(0.1, 5) | pair("cosine", 1e-3, -0.01),
    "cub-margin-softmax": _CUB | NO_DROPS | pair("softmax", 5e-3, -0.05),
    "cub-margin-softmax-5shot": _CUB | NO_DROPS | pair("softmax", 3e-3, -0.005),
    "mini-imagenet-cub": _CROSS | pair("cosine", 5e-5, -0.05),
    "mini-imagenet-cub-softmax": _CROSS | pair("softmax", 1e-6, -0.005),
}
