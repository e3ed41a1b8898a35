"""From the name of a loss to the function that a training step minimises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, cast

from jax import Array

import jaxloss
from experiments.config import LossConfig

Family = Literal["classification", "metric", "sum", "direct", "spectral"]
Objective = Callable[[Array, Array, Array, Array], Array]

CLASSIFICATION_LOSSES = {"sce": jaxloss.softmax_loss, "bce": jaxloss.sigmoid_loss}
METRIC_LOSSES = ("nca", "proto")
INTEGRATIONS = ("sum", "direct", "spectral")
_NAMES = {"sce": "SCE", "bce": "BCE", "nca": "NCA", "proto": "Proto"}
_OPERATORS = {"sum": "+", "direct": "⊕", "spectral": "⊕̃"}


class LossName(NamedTuple):
    """A parsed loss name: its family and its parts."""

    family: Family
    classification: str | None
    metric: str | None

    @property
    def label(self) -> str:
        """The name as the paper writes it."""
        first, second = self.classification, self.metric
        if first is None or second is None:
            return _NAMES[first or second or ""]
        return f"{_NAMES[first]}{_OPERATORS[self.family]}{_NAMES[second]}"


def parse_loss(name: str) -> LossName:
    """Reads `sce`, `nca`, `sce+nca` (a sum), `direct:sce+nca`, `spectral:sce+nca`.

    Raises:
      ValueError: the name is none of these.
    """
    integration, colon, parts = name.rpartition(":")
    classification, plus, metric = parts.partition("+")
    if not plus and not colon:
        if parts in CLASSIFICATION_LOSSES:
            return LossName("classification", parts, None)
        if parts in METRIC_LOSSES:
            return LossName("metric", None, parts)
    integration = integration if colon else "sum"
    known = classification in CLASSIFICATION_LOSSES and metric in METRIC_LOSSES
    if plus and known and integration in INTEGRATIONS:
        return LossName(cast(Family, integration), classification, metric)
    raise ValueError(
        f"loss {name!r} is not known; single losses are "
        f"{', '.join([*CLASSIFICATION_LOSSES, *METRIC_LOSSES])}; "
        "joined ones are written sce+nca (sum), direct:sce+nca and spectral:sce+nca"
    )


def build_objective(
    config: LossConfig, *, num_features: int, num_classes: int, axis_name: str | None
) -> Objective:
    """The loss of a batch: `(features, labels, kernel, bias) -> scalar`.

    Args:
      config: which loss, and its hyperparameters.
      num_features: d, which scales the temperature.
      num_classes: C.
      axis_name: the mapped axis over which the batch is spread, or None.

    Raises:
      ValueError: the loss is not known.
    """
    name = parse_loss(config.name)
    temperature = config.temperature * num_features
    metric = {
        "nca": partial(jaxloss.nca_loss, temperature=temperature),
        "proto": partial(
            jaxloss.prototypical_loss, temperature=temperature, num_classes=num_classes
        ),
    }.get(name.metric or "")
    classification = CLASSIFICATION_LOSSES.get(name.classification or "")

    if name.family == "classification":
        assert classification is not None

        def objective(features, labels, kernel, bias):
            logits = jaxloss.linear_logits(features, kernel, bias)
            return classification(logits, labels, axis_name=axis_name)

        return objective
    if name.family == "metric":
        assert metric is not None
        return lambda features, labels, kernel, bias: metric(features, labels, axis_name=axis_name)

    assert classification is not None
    assert metric is not None
    integrate = {
        "sum": jaxloss.sum_loss,
        "direct": partial(jaxloss.direct_sum_loss, epsilon=config.epsilon),
        "spectral": partial(jaxloss.spectral_sum_loss, power=config.power),
    }[name.family]
    return partial(
        integrate,
        classification_loss=classification,
        metric_loss=metric,
        metric_weight=config.metric_weight,
        axis_name=axis_name,
    )
