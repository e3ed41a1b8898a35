"""The same losses by the classes of pytorch-metric-learning."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from pytorch_metric_learning import losses, miners, reducers
from torch import Tensor

from experiments.benchmark.cases import ANGLE, FACE_SCALE


def _with_weights(loss: type[torch.nn.Module], **options: float) -> Callable[..., Any]:
    """A loss that owns its proxies or its classifier: it is given those of the benchmark."""

    @cache
    def module(dim: int, num_classes: int) -> torch.nn.Module:
        return loss(num_classes=num_classes, embedding_size=dim, **options)

    def run(features: Tensor, labels: Tensor, weights: Tensor) -> Any:
        own = module(*weights.shape)
        ((name, _),) = own.named_parameters()
        given = {name: weights if name == "W" else weights.T}
        return torch.func.functional_call(own, given, (features, labels))

    return run


def _hard_triplets(features: Tensor, labels: Tensor) -> Any:
    return _OF_MINED_TRIPLETS(features, labels, _HARDEST(features, labels))


_HARDEST = miners.BatchHardMiner()
_OF_MINED_TRIPLETS = losses.TripletMarginLoss(0.2, reducer=reducers.MeanReducer())
PACKAGE: dict[str, Callable[..., Any]] = {
    "supervised_contrastive": losses.SupConLoss(),
    "multi_similarity": losses.MultiSimilarityLoss(),
    "circle": losses.CircleLoss(),
    "triplet_hard": _hard_triplets,
    "triplet_all": losses.TripletMarginLoss(0.2),
    "proxy_anchor": _with_weights(losses.ProxyAnchorLoss),
    "proxy_nca": _with_weights(losses.ProxyNCALoss, softmax_scale=9),
    "arcface": _with_weights(losses.ArcFaceLoss, margin=math.degrees(ANGLE), scale=FACE_SCALE),
    # It halves the terms of the variance.
    "vicreg": lambda first, second: losses.VICRegLoss(variance_mu=50)(first, ref_emb=second),
}
"""By the name of the loss, the classes of pytorch-metric-learning."""
