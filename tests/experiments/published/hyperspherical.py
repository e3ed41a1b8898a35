"""The published settings of protocol C, by preset; a copy that changes only with its source.

Saadabadi et al., CVPR 2024: supplement, sections 7.1 and 7.2, and the authors' published code.
"""

from typing import Any

from tests.experiments.published.shared import IMAGENET_COLOURS, RESNET50, sgd

# Images of the training sets, and full batches of 128 or 1024 in them.
CIFAR100, IMAGENET200, IMAGENET = 50000 // 128, 100000 // 128, 1281167 // 1024


def _tail(images: float, classes: int, imbalance: float = 0.01) -> int:
    """Full batches of 128 in a long tail n_c = n_max f^(c / (C - 1)), n_max = N / C."""
    sizes = (images / classes * imbalance ** (c / (classes - 1)) for c in range(classes))
    return sum(int(size + 1e-9) for size in sizes) // 128


def _balanced(epoch: int, dim: int, changes: dict[str, Any]) -> dict[str, Any]:
    return (
        sgd(0.01, 1e-4, nesterov=False, decay_all=True)
        | {
            "data.pad": 4,
            "data.flip": True,
            "sampling.batch_size": 128,
            "model.backbone": "resnet32",
            "model.widths": (16, 32, 64),
            "model.pooling": "mean",
            "model.shortcut": "conv3x3",
            "model.projection": "linear",
            "model.dim": dim,
            "loss.criterion": "prototype",
            "loss.reduction": "sum",
            "optimizer.schedule": "step",
            "optimizer.decay_steps": (100 * epoch, 200 * epoch),
            "steps": 250 * epoch,
            "evaluation.calibration": "cosines",
        }
        | changes
    )


def _long_tailed(
    epoch: int, changes: dict[str, Any], widths: tuple[int, ...] = (16, 32, 64)
) -> dict[str, Any]:
    return (
        sgd(0.1, 2e-4, nesterov=False, decay_all=True)
        | {
            "data.flip": True,
            "data.mixup": 1.0,
            "data.imbalance": 0.01,
            "data.tail_from": "mean",
            "sampling.batch_size": 128,
            "model.backbone": "resnet32",
            "model.widths": widths,
            "model.pooling": "mean",
            "model.shortcut": "pad",
            "model.dim": 0,
            "model.projection": "norm",
            "loss.criterion": "dot-regression",
            "loss.lengths": "batch",
            "loss.reduction": "mean",
            "optimizer.schedule": "step",
            "optimizer.warmup_steps": 5 * epoch,
            "optimizer.warmup_from": 0.02 / 0.1,
            "optimizer.decay_steps": (160 * epoch, 180 * epoch),
            "steps": 200 * epoch,
            "evaluation.calibration": "cosines",
        }
        | changes
    )


ON_IMAGENET = IMAGENET_COLOURS | {
    "data.pad": 0,
    "data.resize": 256,
    "data.crop_scale": (0.08, 1.0),
    "data.flip": True,
    "data.mixed_labels": "larger",
    "sampling.batch_size": 1024,
    "model.pooling": "mean",
    "model.dim": 512,
    "loss.criterion": "prototype",
    "optimizer.weight_decay": 2e-5,
    "optimizer.decay_all": True,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 5 * IMAGENET,
    "optimizer.warmup_from": 0.01,
    "evaluation.calibration": "cosines",
}
OF_CIFAR_LT = {
    "data.pad": 4,
    "data.mean": (0.4914, 0.4822, 0.4465),
    "data.std": (0.2023, 0.1994, 0.2010),
}
HALF = {"data.mean": (0.5, 0.5, 0.5), "data.std": (0.5, 0.5, 0.5)}

PUBLISHED: dict[str, dict[str, Any]] = {
    "cifar100-sphere": _balanced(
        CIFAR100, 64, {"data.mean": (0.507, 0.487, 0.441), "data.std": (0.267, 0.256, 0.276)}
    ),
    "imagenet200-sphere": _balanced(IMAGENET200, 50, IMAGENET_COLOURS),
    "imagenet-sphere": ON_IMAGENET
    | RESNET50
    | sgd(0.5, 2e-5, nesterov=False, decay_all=True)
    | {"data.mixup": 1.0, "steps": 100 * IMAGENET},
    "imagenet-sphere-swin": ON_IMAGENET
    | {
        "model.backbone": "swin",
        "model.widths": (96, 192, 384, 768),
        "optimizer.kind": "adamw",
        "optimizer.learning_rate": 0.001,
    },
    "cifar10-lt": _long_tailed(_tail(50000, 10), OF_CIFAR_LT),
    "cifar100-lt": _long_tailed(_tail(50000, 100), OF_CIFAR_LT, (32, 64, 128)),
    # With extra.
    "svhn-lt": _long_tailed(_tail(73257 + 531131, 10), HALF | {"data.name": "svhn_extra"}),
    "stl10-lt": _long_tailed(_tail(5000, 10), HALF),
}
