"""Protocol B: classification with group softmax (Kobayashi, WACV 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import jax
from jax import Array

import jaxloss
from experiments.config import Count, NamedLoss, TrainConfig
from experiments.contracts import Loss, Objective, Problem, Protocol
from experiments.errors import ConfigError
from experiments.protocols import classification
from experiments.protocols.classification import ClassificationData
from experiments.protocols.linear_head import head_logits, init_linear_head, train_accuracy

_LABELS = {"softmax": "Softmax", "tight": "Type I", "loose": "Type II"}


@dataclass(frozen=True)
class GroupLoss(NamedLoss):
    """What is minimised."""

    name: Literal["softmax", "tight", "loose"] = "loose"
    """Softmax cross-entropy, or group softmax in its tight (type I) or loose (type II) form."""
    num_groups: Count = 4
    """Groups G of features."""
    grouping: Literal["discriminative", "contiguous"] = "discriminative"
    """Groups of features by how much they favour the sample's class, or by index."""


@dataclass(frozen=True)
class GroupSoftmaxConfig(TrainConfig):
    """A run of protocol B."""

    protocol: ClassVar[str] = "group-softmax"

    data: ClassificationData = field(default_factory=ClassificationData)
    loss: GroupLoss = field(default_factory=GroupLoss)


def build(config: GroupSoftmaxConfig) -> Protocol:
    """The protocol of a run."""
    return classification.build(
        config.data,
        label=label(config.loss),
        objective=partial(objective, config.loss),
        check_options=partial(check_options, config.loss),
    )


def check_options(options: GroupLoss, num_features: int) -> None:
    """Checks that there are features for every group."""
    if options.num_groups > num_features:
        raise ConfigError(
            f"loss.num_groups = {options.num_groups} must be at most {num_features}, the number "
            "of features of the backbone"
        )


def objective(options: GroupLoss, problem: Problem) -> Objective:
    """A linear classifier with softmax or group softmax; it predicts the largest logit."""

    def loss_of(features: Array, labels: Array, kernel: Array, bias: Array) -> Array:
        if options.name == "softmax":
            logits = jaxloss.linear_logits(features, kernel, bias)
            return jaxloss.softmax_loss(logits, labels, axis_name=problem.axis_name)
        groups = None
        if options.grouping == "contiguous":
            groups = jaxloss.contiguous_groups(
                features.shape[0], features.shape[1], options.num_groups
            )
        return jaxloss.group_softmax_loss(
            features,
            labels,
            kernel,
            bias,
            num_groups=options.num_groups,
            bound=options.name,
            groups=groups,
            axis_name=problem.axis_name,
        )

    def loss(features, labels, head, objective_state):
        value = loss_of(features, labels, head["kernel"], head["bias"])
        logits = head_logits(features, head, objective_state)
        return Loss(value, objective_state, train_accuracy(logits, labels))

    def init_head(key: jax.Array):
        # Discriminative groups of an untrained classifier have large logits of opposite signs at
        # the usual deviation 1 / √d, from which type I hardly learns (see the preset icons-groups).
        return init_linear_head(key, problem.num_features, len(problem.class_counts), scale=0.1)

    return Objective(init_head, loss, head_logits)


def label(options: GroupLoss) -> str:
    """The loss and its groups, for tables."""
    if options.name == "softmax":
        return _LABELS["softmax"]
    grouping = ", contiguous" if options.grouping == "contiguous" else ""
    return f"{_LABELS[options.name]}, G = {options.num_groups}{grouping}"
