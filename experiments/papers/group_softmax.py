"""Protocol B: classification with group softmax (Kobayashi, WACV 2021), and with other losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxloss
from experiments.core.config import Count, NamedLoss, TrainConfig
from experiments.core.errors import ConfigError
from experiments.core.protocol import Loss, Objective, Outputs, Problem
from experiments.data.augment import sample_keys
from experiments.evaluation.feature_space import gradient_directions
from experiments.papers.classification import (
    Classification,
    ClassificationData,
    head_logits,
    init_kernel,
    init_linear_head,
    objective_of_logits,
    train_accuracy,
)
from experiments.papers.integration import METRIC_NAMES, WITH_PROXIES, IntegratedLoss, build_loss
from experiments.papers.integration import label as integrated_label

_RANDOM_GROUPS = 4
"""Stream of the run's seed that random groups are drawn from."""

_GROUPED = {"softmax": "Softmax", "tight": "Tight", "loose": "Loose"}
_MARGINS = {"arcface": {"angular_margin": 0.5}, "cosface": {"margin": 0.35}}
_SCALE = 64.0
"""Of the cosines of `_MARGINS`, whose values are those of ArcFace and CosFace (CVPR 2019, 2018)."""


@dataclass(frozen=True)
class GroupLoss(NamedLoss):
    """What is minimised."""

    name: Literal[(*_GROUPED, *_MARGINS, *METRIC_NAMES)] = "loose"  # pyright: ignore
    """Softmax cross-entropy, group softmax in its tight (type I) or loose (type II) form, softmax
    of cosines with a margin, or a metric loss, as in protocol A, beside a linear classifier whose
    gradient does not reach the features. Sums of losses: preset folder-few-shot."""
    num_groups: Count = 4
    """Groups G of features, of tight and loose."""
    grouping: Literal["discriminative", "contiguous", "random"] = "discriminative"
    """Features grouped by how much they favour the class, by index, or at random in every step."""


@dataclass(frozen=True)
class GroupSoftmaxConfig(TrainConfig):
    """A run of protocol B."""

    protocol: ClassVar[str] = "group-softmax"
    data: ClassificationData = field(default_factory=ClassificationData)
    loss: GroupLoss = field(default_factory=GroupLoss)


class GroupSoftmax(Classification):
    """Classification by a linear classifier with softmax or group softmax."""

    def __init__(self, config: GroupSoftmaxConfig):
        super().__init__(config.data, label(config.loss))
        self.options = config.loss
        self.compares_samples = self.options.name in METRIC_NAMES

        @jax.jit
        @jax.grad
        def gradient(features: Array, labels: Array, head: Any, step: Any) -> Array:
            problem = Problem(features.shape[1], np.empty(0))  # The head is there.
            return self.objective(problem).loss(features, labels, head, step).value

        self.gradient = gradient

    def check_options(self, num_features: int) -> None:
        if self.options.name in ("tight", "loose") and self.options.num_groups > num_features:
            raise ConfigError(
                f"loss.num_groups = {self.options.num_groups} must be at most {num_features}, the "
                "number of features of the backbone"
            )

    def diagnose(self, outputs: Outputs) -> dict[str, float]:
        """The directions of the gradient, for at most twice as many images as features."""
        num_samples, dim = outputs.features.shape
        rows = np.linspace(0, num_samples - 1, min(num_samples, 2 * dim)).astype(int)
        batch = outputs.features[rows], outputs.labels[rows]
        gradients = np.asarray(self.gradient(*batch, outputs.head, outputs.objective_state))
        found = gradient_directions(gradients, np.asarray(outputs.head["kernel"]))
        return {f"gradient_{name}": float(value) for name, value in found._asdict().items()}

    def objective(self, problem: Problem) -> Objective:
        options, axis_name = self.options, problem.axis_name
        if options.name in _MARGINS:
            return _with_margin(problem, _MARGINS[options.name])
        if options.name in METRIC_NAMES:
            return _beside_a_classifier(problem, options.name)
        # Discriminative groups of an untrained classifier have large logits of opposite signs at
        # the usual deviation 1 / √d. From there `tight` hardly learns (RESULTS_APPENDIX.md).
        init_head = partial(init_linear_head, problem, scale=0.1)
        if options.name == "softmax":
            loss_of = partial(jaxloss.softmax_loss, axis_name=axis_name)
            return objective_of_logits(init_head, head_logits, loss_of)
        is_random, num_groups = options.grouping == "random", options.num_groups
        key = jax.random.fold_in(jax.random.key(problem.seed), _RANDOM_GROUPS)

        def groups_of(features: Array, step: Any) -> Array | None:
            """The groups [n, d]; None: `group_softmax_loss` finds the discriminative ones."""
            num_samples, dim = features.shape
            if is_random:
                keys = sample_keys(key, step, num_samples, axis_name)
                how = {"num_samples": 1, "dim": dim, "num_groups": num_groups}
                return jax.vmap(partial(jaxloss.random_groups, **how))(keys)[:, 0]
            if options.grouping == "contiguous":
                return jaxloss.contiguous_groups(num_samples, dim, num_groups)
            return None

        def loss(features, labels, head, step):
            how: Any = {"num_groups": num_groups, "bound": options.name, "axis_name": axis_name}
            classifier, groups = (head["kernel"], head["bias"]), groups_of(features, step)
            value = jaxloss.group_softmax_loss(features, labels, *classifier, groups=groups, **how)
            means = train_accuracy(head_logits(features, head, step), labels)
            return Loss(value, step + 1 if is_random else step, means)

        # The objective state of random groups is the step, so that every step draws other ones.
        init_state = partial(jnp.zeros, (), jnp.int32) if is_random else tuple
        return Objective(init_head, loss, head_logits, init_state)


def _with_margin(problem: Problem, margins: Mapping[str, float]) -> Objective:
    def logits(features, head, objective_state):
        return _SCALE * jaxloss.cosine_logits(features, head["kernel"])

    def loss_of(logits: Array, labels: Array) -> Array:
        how: Any = {"scale": _SCALE, "axis_name": problem.axis_name, **margins}
        return jaxloss.margin_softmax_loss(logits / _SCALE, labels, **how)

    return objective_of_logits(partial(init_kernel, problem), logits, loss_of)


def _beside_a_classifier(problem: Problem, name: str) -> Objective:
    """A metric loss; proxies are parameters of their own."""
    metric = build_loss(IntegratedLoss(name=name, temperature=1 / 8), problem)

    def init_head(key):
        proxies = {"proxies": init_kernel(problem, key)["kernel"]} if name in WITH_PROXIES else {}
        return init_linear_head(problem, key) | proxies

    def loss(features, labels, head, objective_state):
        logits = head_logits(lax.stop_gradient(features), head, objective_state)
        value = metric(features, labels, head.get("proxies", head["kernel"]), head["bias"])
        value += jaxloss.softmax_loss(logits, labels, axis_name=problem.axis_name)
        return Loss(value, objective_state, train_accuracy(logits, labels))

    return Objective(init_head, loss, head_logits)


def label(options: GroupLoss) -> str:
    """The loss and its groups, for tables."""
    names = {**_GROUPED, "arcface": "ArcFace", "cosface": "CosFace"}
    if options.name not in ("tight", "loose"):
        return names.get(options.name) or integrated_label(options.name)
    grouping = "" if options.grouping == "discriminative" else f", {options.grouping}"
    return f"{_GROUPED[options.name]}, G = {options.num_groups}{grouping}"
