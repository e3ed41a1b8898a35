"""The published settings of protocol A, by preset; a copy that changes only with its source.

Kobayashi, BMVC 2024: supplement, Tables A to D. Backbone, ways and queries are from the paper's
main text, which is not at hand. Optimiser and epochs are not known. Eq. (vi) and (viii) stop no
gradient.
"""

from typing import Any

from tests.experiments.published.shared import RESNET12

_EVERYWHERE: dict[str, Any] = RESNET12 | {
    "evaluation.ways": 5,
    "evaluation.shots": (1, 5),
    "evaluation.queries": 15,
    "loss.stop_gradient": False,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "mini-imagenet": _EVERYWHERE | {"sampling.batch_size": 512},
    "tiered-imagenet": _EVERYWHERE | {"sampling.batch_size": 512},
    "cub": _EVERYWHERE | {"sampling.batch_size": 128},
    "cifar-fs": _EVERYWHERE | {"sampling.batch_size": 512},
    "inat2017": _EVERYWHERE
    | {"sampling.batch_size": 512, "loss.name": "spectral:sce+nca", "loss.power": 0.5},
}
