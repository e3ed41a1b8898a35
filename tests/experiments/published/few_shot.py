"""The published settings of protocol A, by preset; a copy that changes only with its source.

Kobayashi, BMVC 2024: supplement, Tables A to D. Backbone, ways and queries are from the paper's
main text, which is not at hand. Optimiser and epochs are not known. Eq. (vi) and (viii) stop no
gradient.
"""

from typing import Any

from tests.experiments.published.shared import RESNET12, sgd

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


def _chosen(steps: int, validate_every: int, pad: int = 8) -> dict[str, Any]:
    return sgd(0.1, 5e-4, nesterov=True, decay_all=False) | {
        "data.pad": pad,
        "data.flip": True,
        "data.color_jitter": 0.4,
        "model.pooling": "mean",
        "model.drop_block": 0.1,
        "loss.metric_weight": 1.0,
        "optimizer.schedule": "cosine",
        "steps": steps,
        "validate_every": validate_every,
        "evaluation.distances": ("euclidean", "cosine"),
        "evaluation.episodes": 2000,
    }


_DEVIATIONS = {"loss.temperature": (1 / 640, 1 / 8)}
DEVIATIONS: dict[str, dict[str, tuple[Any, Any]]] = dict.fromkeys(PUBLISHED, _DEVIATIONS)
"""By preset and option: the published value, and the one of the preset. T = 1 is 1/640 of d."""
CHOSEN: dict[str, dict[str, Any]] = {
    "mini-imagenet": _chosen(100 * (38400 // 512), 200),
    "tiered-imagenet": _chosen(60 * (448695 // 512), 1100),
    "cub": _chosen(150 * (5885 // 128), 100),
    "cifar-fs": _chosen(100 * (38400 // 512), 200, pad=4),
    "inat2017": _chosen(100 * (197612 // 512), 800),
}
"""By preset and option: what the paper does not fix."""
