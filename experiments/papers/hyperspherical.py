"""Protocol C: dynamic assignment of labels to prototypes (Saadabadi et al., CVPR 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jaxloss
from experiments.core.config import NamedLoss, Positive, Share, TrainConfig
from experiments.core.errors import ConfigError
from experiments.core.processes import from_first
from experiments.core.protocol import Loss, Objective, Outputs, OutputsOf, Problem
from experiments.data.selection import labels_of
from experiments.papers.classification import (
    Classification,
    ClassificationData,
    head_logits,
    init_kernel,
    init_linear_head,
    objective_of_logits,
    train_accuracy,
)

_LABELS = {
    "dynamic": "Dynamic assignment",
    "static": "Static assignment",
    "fixed-ce": "Fixed W + CE",
    "softmax": "Softmax",
    "cosine-softmax": "Cosine softmax, no scale",
}


@dataclass(frozen=True)
class HypersphericalLoss(NamedLoss):
    """What is minimised."""

    name: Literal["dynamic", "static", "fixed-ce", "softmax", "cosine-softmax"] = "dynamic"
    """Distance to prototypes, assigned to the classes after every epoch (dynamic) or once at random
    (static); cross-entropy with these as a fixed classifier (fixed-ce), with a trained linear one
    (softmax), or with a trained one of cosines without a scale (cosine-softmax)."""
    criterion: Literal["prototype", "dot-regression"] = "prototype"
    """Squared cosine distance (balanced classes), or dot regression with prototypes whose length
    grows with the rarity of their class (long tails)."""
    lengths: Literal["batch", "training-set"] = "training-set"
    """What these lengths balance: the classes of a batch, before mixup, or of the training set."""
    reduction: Literal["mean", "sum"] = "mean"
    """Reduction of the distances over the batch; cross-entropy is always a mean."""
    decay: Share = 0.9
    """Decay of the moving class means, from which prototypes are assigned."""
    logits: Literal["linear", "cosine"] = "linear"
    """Logits of fixed-ce: inner products (supplement, eq. 10), or SCALE times the cosines."""
    scale: Positive = 16.0
    """Factor of cosines as logits: for fixed-ce, and the calibration of dynamic and static."""


@dataclass(frozen=True)
class HypersphericalEvaluation:
    """How a run is evaluated."""

    calibration: Literal["logits", "cosines"] = "logits"
    """Confidences: softmax of the logits, or of plain cosines as the authors (not of softmax)."""


@dataclass(frozen=True)
class HypersphericalConfig(TrainConfig):
    """A run of protocol C."""

    protocol: ClassVar[str] = "hyperspherical"
    data: ClassificationData = field(default_factory=ClassificationData)
    loss: HypersphericalLoss = field(default_factory=HypersphericalLoss)
    evaluation: HypersphericalEvaluation = field(default_factory=HypersphericalEvaluation)

    def fixed_steps(self) -> str:
        """As in `TrainConfig`; the dynamic assignment logs a number for every epoch."""
        if self.loss.name == "dynamic":
            return "the state of loss.name = dynamic has their number"
        return super().fixed_steps()


class Hyperspherical(Classification):
    """Classification by prototypes, or by a trained layer."""

    def __init__(self, config: HypersphericalConfig):
        super().__init__(config.data, label(config.loss))
        self.config, self.options = config, config.loss
        self.dynamic = config.loss.name == "dynamic"

    def check_options(self, num_features: int) -> None:
        if num_features < 2:
            raise ConfigError(
                f"model.dim = {num_features} must be at least 2: one dimension has two directions"
            )

    def objective(self, problem: Problem) -> Objective:
        """Cross-entropy with a trained classifier, or the objective of prototypes.

        Of plain cosines, it is at least log(1 + (C − 1) / e²) for C classes.
        """
        loss_of = partial(jaxloss.softmax_loss, axis_name=problem.axis_name)
        if self.options.name == "softmax":
            return objective_of_logits(partial(init_linear_head, problem), head_logits, loss_of)
        if self.options.name == "cosine-softmax":

            def cosines(features, head, objective_state):
                return jaxloss.cosine_logits(features, head["kernel"])

            return objective_of_logits(partial(init_kernel, problem), cosines, loss_of)
        return self._with_prototypes(problem)

    def _with_prototypes(self, problem: Problem) -> Objective:
        """Fixed prototypes as targets of the features, or as the classifier of cross-entropy.

        The objective state has `prototypes` [d, C] and `assignment` [C], the prototype of each
        class. The dynamic assignment adds `class_means` [d, C] and, for every epoch of the run, the
        number of classes `reassigned` after it (−1 before), and their `alignment`: the cosine
        between a class mean and its new prototype, averaged over the classes.
        """
        options, axis_name = self.options, problem.axis_name
        num_classes, dim = len(problem.class_counts), problem.num_features
        linear = options.name == "fixed-ce" and options.logits == "linear"
        balanced = partial(jaxloss.class_balanced_lengths, num_classes=num_classes)
        lengths = None
        if options.criterion == "dot-regression" and options.lengths == "training-set":
            lengths = balanced(jnp.asarray(labels_of(problem.class_counts)))

        def init_state():
            key = jax.random.fold_in(jax.random.key(problem.seed), 3)
            state = {
                "prototypes": jnp.asarray(spread_prototypes(num_classes, dim)),
                "assignment": jax.random.permutation(key, jnp.arange(num_classes, dtype=jnp.int32)),
            }
            if self.dynamic:
                epochs = max(problem.num_epochs, 1)
                state |= {
                    "class_means": jnp.zeros((dim, num_classes)),
                    "reassigned": jnp.full(epochs, -1, jnp.int32),
                    "alignment": jnp.zeros(epochs),
                }
            return state

        def logits_of(features, head, state):
            if linear:
                return jaxloss.linear_logits(features, _assigned(state))
            return options.scale * jaxloss.cosine_logits(features, _assigned(state))

        def distance(features, labels, state):
            prototypes = state["prototypes"]
            how: Any = {"assignment": state["assignment"], "reduction": options.reduction}
            how["axis_name"] = axis_name
            if options.criterion == "prototype":
                return jaxloss.prototype_loss(features, labels, prototypes, **how)
            features /= optax.safe_norm(features, 1e-12, axis=1, keepdims=True)
            # Mixup's second labels are those of the whole batch in another order, so that both
            # terms of its loss get the lengths of the batch before mixup.
            own = balanced(labels, axis_name=axis_name) if lengths is None else lengths
            return jaxloss.dot_regression_loss(features, labels, prototypes, lengths=own, **how)

        def loss(features, labels, head, state):
            logits = logits_of(features, head, state)
            if options.name == "fixed-ce":
                value = jaxloss.softmax_loss(logits, labels, axis_name=axis_name)
            else:
                value = distance(features, labels, state)
            if self.dynamic:
                how: Any = {"decay": options.decay, "axis_name": axis_name}
                moved = jaxloss.update_class_means(state["class_means"], features, labels, **how)
                state = state | {"class_means": moved}
            return Loss(value, state, train_accuracy(logits, labels))

        return Objective(
            init_head=lambda key: {},
            loss=loss,
            logits=logits_of,
            init_state=init_state,
            after_epoch=reassign if self.dynamic else None,
            classifier_state=("prototypes", "assignment", *["class_means"] * self.dynamic),
        )

    def calibrated(self, outputs: Outputs) -> np.ndarray:
        return calibrated_logits(self.config, outputs)

    def evaluate(self, split: str, outputs_of_split: OutputsOf) -> dict[str, Any]:
        """Of the dynamic assignment also how it changed, by epoch, up to the checkpoint."""
        outputs = outputs_of_split(split)
        results = super().evaluate(split, lambda split: outputs)
        if self.dynamic:
            state = outputs.objective_state
            done = np.asarray(state["reassigned"]) >= 0
            names = "reassigned", "alignment"
            results["assignment"] = {name: np.asarray(state[name])[done].tolist() for name in names}
        return results

    def report(self, results: dict[str, Any]) -> list[str]:
        lines = super().report(results)
        if self.config.evaluation.calibration == "cosines" and self.options.name != "softmax":
            lines += ["", "The calibration error is that of cosines without a scale."]
        return lines


def _assigned(state: dict[str, Array]) -> Array:
    """The prototype of each class, [d, C]."""
    return state["prototypes"][:, state["assignment"]]


@cache
def spread_prototypes(num_prototypes: int, dim: int) -> np.ndarray:
    """Maximally separated prototypes, float32 [d, M]: a simplex for M ≤ d + 1, else uniform.

    They do not depend on the run's seed. With several processes, all of them call this, and use the
    prototypes of the first one: those of two hosts may differ in the last bits.
    """
    if num_prototypes <= dim + 1:
        found = jaxloss.simplex_prototypes(num_prototypes, dim)
    else:
        found = jaxloss.uniform_prototypes(jax.random.key(0), num_prototypes, dim)
    return from_first(np.asarray(found))


def reassign(state: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Assigns the prototypes anew by the class means, and counts the classes that change."""
    prototypes, class_means = state["prototypes"], state["class_means"]
    assignment = jaxloss.assign_prototypes(class_means, prototypes)
    numbers = {
        "reassigned": jnp.sum(assignment != state["assignment"]),
        "alignment": jnp.mean(jnp.sum(class_means * prototypes[:, assignment], axis=0)),
    }
    epoch = jnp.sum(state["reassigned"] >= 0)
    logged = {name: state[name].at[epoch].set(numbers[name]) for name in numbers}
    return state | logged | {"assignment": assignment}, numbers


def calibrated_logits(config: HypersphericalConfig, outputs: Outputs) -> np.ndarray:
    """The logits [n, C] whose softmax is the confidence, by `evaluation.calibration`."""
    plain = config.loss.name in ("softmax", "cosine-softmax")
    if config.evaluation.calibration == "logits" or plain:
        return outputs.logits()
    assigned = _assigned(outputs.objective_state)
    return np.asarray(jaxloss.cosine_logits(jnp.asarray(outputs.features), assigned))


def label(options: HypersphericalLoss) -> str:
    """The loss, for tables."""
    name = _LABELS[options.name]
    if options.name in ("dynamic", "static") and options.criterion == "dot-regression":
        return f"{name}, dot regression"
    if options.name == "fixed-ce" and options.logits == "cosine":
        return f"{name}, cosine logits"
    return name
