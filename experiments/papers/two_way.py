"""Protocol D on images of one class: backbones for linear evaluation (Kobayashi, CVPR 2023)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from experiments.core.config import TrainConfig
from experiments.core.protocol import Objective, Outputs, Problem, Protocol
from experiments.papers import classification, multi_label
from experiments.papers.classification import ClassificationData
from experiments.papers.linear_head import head_logits, init_linear_head, objective_of_logits
from experiments.papers.multi_label import MultiLabelLoss


@dataclass(frozen=True)
class TwoWayConfig(TrainConfig):
    """A run of protocol D on images of one class."""

    protocol: ClassVar[str] = "two-way"

    data: ClassificationData = field(default_factory=ClassificationData)
    loss: MultiLabelLoss = field(default_factory=MultiLabelLoss)


def build(config: TwoWayConfig) -> Protocol:
    """The protocol of a run: that of classification, with the metrics of multi-label runs too."""
    protocol = classification.build(
        config.data, label=multi_label.label(config.loss), objective=partial(objective, config.loss)
    )

    def evaluate(split: str, outputs_of_split: Callable[[str], Outputs]) -> dict[str, Any]:
        """The results of classification; mAP@class and mAP@sample of one-hot targets."""
        outputs = outputs_of_split(split)
        results = protocol.evaluate(split, lambda split: outputs)
        targets = outputs.labels[:, None] == np.arange(len(outputs.class_counts))
        found = multi_label.evaluate(split, lambda split: outputs._replace(labels=targets))
        return results | {"metrics": [*results["metrics"], *found["metrics"]]}

    return protocol._replace(
        compares_samples=multi_label.compares_samples(config.loss),
        metrics=[*protocol.metrics, *multi_label.METRICS],
        evaluate=evaluate,
    )


def objective(options: MultiLabelLoss, problem: Problem) -> Objective:
    """A linear classifier with one of the losses on one-hot targets; it predicts the largest logit.

    Softmax is then softmax cross-entropy.
    """
    loss_of = multi_label.build_loss(options, problem)
    num_classes = len(problem.class_counts)
    return objective_of_logits(
        partial(init_linear_head, problem),
        head_logits,
        lambda logits, labels: loss_of(logits, jax.nn.one_hot(labels, num_classes, dtype=jnp.int8)),
    )
