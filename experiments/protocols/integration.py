"""Protocol A's losses: from a name to a function of features, labels and classifier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jax import Array

import jaxloss
from experiments.config import LossConfig
from experiments.loss_names import parse_loss

LossOfBatch = Callable[[Array, Array, Array, Array], Array]

_CLASSIFICATION = {"sce": jaxloss.softmax_loss, "bce": jaxloss.sigmoid_loss}


def build_loss(
    config: LossConfig, *, num_features: int, num_classes: int, axis_name: str | None
) -> LossOfBatch:
    """The loss of a batch: `(features, labels, kernel, bias) -> scalar`.

    Args:
      config: which loss, and its hyperparameters.
      num_features: d, which scales the temperature.
      num_classes: C.
      axis_name: the mapped axis over which the batch is spread, or None.

    Raises:
      ConfigError: the loss is not known.
    """
    name = parse_loss(config.name)
    temperature = config.temperature * num_features
    metric = {
        "nca": partial(jaxloss.nca_loss, temperature=temperature),
        "proto": partial(
            jaxloss.prototypical_loss, temperature=temperature, num_classes=num_classes
        ),
    }.get(name.metric or "")
    classification = _CLASSIFICATION.get(name.classification or "")

    if name.family == "classification":
        assert classification is not None

        def loss(features, labels, kernel, bias):
            logits = jaxloss.linear_logits(features, kernel, bias)
            return classification(logits, labels, axis_name=axis_name)

        return loss
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
