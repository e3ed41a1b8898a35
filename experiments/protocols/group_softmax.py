"""Protocol B: classification with group softmax (Kobayashi, WACV 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax

import jaxloss
from experiments.config import Count, NamedLoss, TrainConfig
from experiments.errors import ConfigError
from experiments.protocols import classification
from experiments.protocols.linear_head import linear_head, linear_scores
from experiments.protocols.protocol import Protocol
from experiments.training.objective import Loss, Objective, Problem, train_accuracy

_LABELS = {"softmax": "Softmax", "tight": "Type I", "loose": "Type II"}


@dataclass(frozen=True)
class GroupLossConfig(NamedLoss):
    """What is minimised."""

    name: Literal["softmax", "tight", "loose"] = "loose"
    """Softmax cross-entropy, or group softmax in its tight (type I) or loose (type II) form."""
    num_groups: Count = 4
    """Groups G of features."""
    grouping: Literal["discriminative", "contiguous"] = "discriminative"
    """How features are grouped: by what they say of the sample's class, or as they stand."""


@dataclass(frozen=True)
class GroupSoftmaxConfig(TrainConfig):
    """A run of protocol B."""

    protocol: ClassVar[str] = "group-softmax"

    loss: GroupLossConfig = field(default_factory=GroupLossConfig)


def check_options(config: GroupSoftmaxConfig, num_features: int) -> None:
    """Raises unless there are features for every group."""
    if config.loss.num_groups > num_features:
        raise ConfigError(
            f"loss.num_groups = {config.loss.num_groups} must be at most the {num_features} "
            "features of the backbone"
        )


def objective(config: GroupSoftmaxConfig, problem: Problem) -> Objective:
    """A linear classifier under softmax or group softmax; it predicts the largest logit."""
    wanted = config.loss

    def loss_of(features, labels, kernel, bias):
        if wanted.name == "softmax":
            logits = jaxloss.linear_logits(features, kernel, bias)
            return jaxloss.softmax_loss(logits, labels, axis_name=problem.axis_name)
        groups = None
        if wanted.grouping == "contiguous":
            groups = jaxloss.contiguous_groups(
                features.shape[0], features.shape[1], wanted.num_groups
            )
        return jaxloss.group_softmax_loss(
            features,
            labels,
            kernel,
            bias,
            num_groups=wanted.num_groups,
            bound=wanted.name,
            groups=groups,
            axis_name=problem.axis_name,
        )

    def loss(features, labels, head, memory):
        value = loss_of(features, labels, head["kernel"], head["bias"])
        logits = linear_scores(features, head, memory)
        return Loss(value, memory, train_accuracy(logits, labels))

    def head(key: jax.Array):
        # Sorted groups of a classifier that knows nothing oppose each other, with large logits at
        # the usual deviation 1 / √d; from there type I hardly learns (`presets/icons_groups.py`).
        return linear_head(key, problem.num_features, len(problem.counts), scale=0.1)

    return Objective(head, loss, linear_scores)


def describe(config: GroupSoftmaxConfig) -> dict[str, Any]:
    """The loss, its groups, and the subset of the data."""
    groups = "" if config.loss.name == "softmax" else f", G = {config.loss.num_groups}"
    contiguous = groups and config.loss.grouping == "contiguous"
    label = _LABELS[config.loss.name] + groups + (", contiguous" if contiguous else "")
    return {"label": label} | classification.describe_data(config)


PROTOCOL = Protocol(
    config=GroupSoftmaxConfig,
    splits=classification.SPLITS,
    load=classification.load,
    counts=classification.counts,
    check=classification.check,
    objective=objective,
    validate=classification.validate,
    evaluate=classification.evaluate,
    metrics=classification.metrics,
    describe=describe,
    report=classification.report,
    check_options=check_options,
)
