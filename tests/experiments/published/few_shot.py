"""The published settings of protocol A, by preset; a copy that changes only with its source.

Kobayashi, BMVC 2024: supplement, Tables A and D; backbone and evaluation in section 3. The paper
leaves optimiser and epochs open.
"""

from typing import Any

_EVERYWHERE: dict[str, Any] = {
    "model.backbone": "resnet12",
    "model.widths": (64, 160, 320, 640),
    "evaluation.ways": 5,
    "evaluation.shots": (1, 5),
    "evaluation.queries": 15,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "mini-imagenet": _EVERYWHERE | {"sampling.batch_size": 512},
    "tiered-imagenet": _EVERYWHERE | {"sampling.batch_size": 512},
    "cub": _EVERYWHERE | {"sampling.batch_size": 128},
    "cifar-fs": _EVERYWHERE | {"sampling.batch_size": 512},
    "inat2017": _EVERYWHERE
    | {"sampling.batch_size": 512, "loss.name": "spectral:sce+nca", "loss.power": 0.5},
}
