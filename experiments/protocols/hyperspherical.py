"""Protocol C: hyperspherical classification with dynamic label-to-prototype assignment.

Saadabadi et al., CVPR 2024: balanced classes and long tails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jaxloss
from experiments.config import NamedLoss, Positive, Seed, Share, TrainConfig
from experiments.contracts import Loss, Objective, Outputs, Problem, Protocol
from experiments.errors import ConfigError
from experiments.processes import from_first
from experiments.protocols import classification
from experiments.protocols.classification import ClassificationData
from experiments.protocols.linear_head import (
    head_logits,
    init_kernel,
    init_linear_head,
    objective_of_logits,
    train_accuracy,
)
from experiments.reporting.markdown import table

_LABELS = {
    "dynamic": "Dynamic assignment",
    "static": "Static assignment",
    "fixed-ce": "Fixed W + CE",
    "softmax": "Softmax",
    "cosine-softmax": "Cosine softmax, no scale",
}
_COLUMNS = 10
"""Largest number of columns in the report's table on the assignment."""


@dataclass(frozen=True)
class HypersphericalLoss(NamedLoss):
    """What is minimised."""

    name: Literal["dynamic", "static", "fixed-ce", "softmax", "cosine-softmax"] = "dynamic"
    """dynamic and static: distance to prototypes that are assigned to the classes anew after every
    epoch, or once at random. fixed-ce: cross-entropy with randomly assigned prototypes as a fixed
    classifier. softmax: cross-entropy with a trained linear classifier. cosine-softmax: the
    authors' baseline, cross-entropy of cosines with a trained classifier, without a scale."""
    criterion: Literal["prototype", "dot-regression"] = "prototype"
    """Distance: squared cosine distance (balanced classes), or dot regression of unit-length
    features with prototypes whose length grows with the rarity of their class (long tails)."""
    lengths: Literal["batch", "training-set"] = "training-set"
    """What the lengths of dot regression balance: the classes of the batch (of all devices), anew
    in every step and before mixup, or the classes of the training set."""
    reduction: Literal["mean", "sum"] = "mean"
    """Reduction of the distances of dynamic and static over the batch. With SGD, the sum over n
    samples equals the mean with n times the learning rate and 1/n of the weight decay.
    Cross-entropy is always a mean, as in the supplement's eq. (10)."""
    decay: Share = 0.9
    """Decay of the moving class means, from which prototypes are assigned."""
    logits: Literal["linear", "cosine"] = "linear"
    """Logits of fixed-ce: the inner product, as in the supplement's eq. (10), or SCALE times the
    cosine."""
    scale: Positive = 16.0
    """Factor that turns cosines into logits: for the calibration error of dynamic and static,
    which are trained without a scale, and for fixed-ce with cosine logits."""
    prototypes_seed: Seed = 0
    """Seed of the prototypes, independent of the run's seed."""


@dataclass(frozen=True)
class HypersphericalEvaluation:
    """How a run is evaluated."""

    calibration: Literal["logits", "cosines"] = "logits"
    """Confidences of the calibration error. logits: softmax of the run's logits (for prototypes:
    --loss.scale times the cosine). cosines: softmax of the plain cosines, as in the authors' code;
    the loss softmax has none and always takes its logits."""


@dataclass(frozen=True)
class HypersphericalConfig(TrainConfig):
    """A run of protocol C."""

    protocol: ClassVar[str] = "hyperspherical"

    data: ClassificationData = field(default_factory=ClassificationData)
    loss: HypersphericalLoss = field(default_factory=HypersphericalLoss)
    evaluation: HypersphericalEvaluation = field(default_factory=HypersphericalEvaluation)


def build(config: HypersphericalConfig) -> Protocol:
    """The protocol of a run."""
    loss = config.loss
    moves = loss.name == "dynamic"
    of_cosines = config.evaluation.calibration == "cosines" and loss.name != "softmax"

    def extra_report(results: dict[str, Any]) -> list[str]:
        calibration = ["", "The calibration error is that of cosines without a scale."]
        return [
            *(calibration if of_cosines else []),
            *(report_assignment(results) if moves else []),
        ]

    return classification.build(
        config.data,
        label=label(loss),
        objective=partial(_OBJECTIVES[loss.name], loss),
        check_options=check_options,
        calibrated=partial(cosines, loss) if of_cosines else lambda outputs: None,
        extra_results=assignment_results if moves else lambda outputs: {},
        extra_report=extra_report,
    )


def check_options(num_features: int) -> None:
    """Checks that there is room for different prototypes."""
    if num_features < 2:
        raise ConfigError(
            f"model.dim = {num_features} must be at least 2: one dimension has two directions only"
        )


def _softmax(options: HypersphericalLoss, problem: Problem) -> Objective:
    """Cross-entropy with a trained linear classifier."""
    loss_of = partial(jaxloss.softmax_loss, axis_name=problem.axis_name)
    return objective_of_logits(partial(init_linear_head, problem), head_logits, loss_of)


def _cosine_softmax(options: HypersphericalLoss, problem: Problem) -> Objective:
    """Cross-entropy of cosines with a trained classifier.

    The logits lie in [−1, 1], which bounds the loss from below: for C classes by
    log(1 + (C − 1) / e²).
    """
    return objective_of_logits(
        partial(init_kernel, problem),
        lambda features, head, _: jaxloss.cosine_logits(features, head["kernel"]),
        partial(jaxloss.softmax_loss, axis_name=problem.axis_name),
    )


def _with_prototypes(options: HypersphericalLoss, problem: Problem) -> Objective:
    """Fixed prototypes as targets of the features, or as the classifier of cross-entropy.

    The objective state has `prototypes` [d, C] and `assignment` [C], the prototype of each class.
    The dynamic assignment adds `class_means` [d, C] and, for every epoch of the run, the number of
    classes `reassigned` after it (−1 before), and their `alignment`: the cosine between a class
    mean and its new prototype, averaged over the classes.
    """
    axis_name = problem.axis_name
    dynamic = options.name == "dynamic"
    linear = options.name == "fixed-ce" and options.logits == "linear"
    distance = _distance(options, problem)

    def logits_of(features, head, objective_state):
        assigned = objective_state["prototypes"][:, objective_state["assignment"]]
        if linear:
            return jaxloss.linear_logits(features, assigned)
        return options.scale * jaxloss.cosine_logits(features, assigned)

    def loss(features, labels, head, objective_state):
        logits = logits_of(features, head, objective_state)
        if options.name == "fixed-ce":
            value = jaxloss.softmax_loss(logits, labels, axis_name=axis_name)
        else:
            value = distance(features, labels, objective_state)
        means = train_accuracy(logits, labels)
        if dynamic:
            class_means = jaxloss.update_class_means(
                objective_state["class_means"],
                features,
                labels,
                decay=options.decay,
                axis_name=axis_name,
            )
            objective_state = objective_state | {"class_means": class_means}
        return Loss(value, objective_state, means)

    return Objective(
        init_head=lambda key: {},
        loss=loss,
        logits=logits_of,
        init_state=partial(_init_state, options, problem),
        after_epoch=reassign if dynamic else None,
    )


_OBJECTIVES: dict[str, Callable[[HypersphericalLoss, Problem], Objective]] = {
    "dynamic": _with_prototypes,
    "static": _with_prototypes,
    "fixed-ce": _with_prototypes,
    "softmax": _softmax,
    "cosine-softmax": _cosine_softmax,
}


def _init_state(options: HypersphericalLoss, problem: Problem) -> dict[str, Array]:
    num_classes, dim = len(problem.class_counts), problem.num_features
    key = jax.random.fold_in(jax.random.key(problem.seed), 3)
    state = {
        "prototypes": jnp.asarray(spread_prototypes(num_classes, dim, options.prototypes_seed)),
        "assignment": jax.random.permutation(key, jnp.arange(num_classes, dtype=jnp.int32)),
    }
    if options.name == "dynamic":
        epochs = max(problem.num_epochs, 1)
        state |= {
            "class_means": jnp.zeros((dim, num_classes)),
            "reassigned": jnp.full(epochs, -1, jnp.int32),
            "alignment": jnp.zeros(epochs),
        }
    return state


@cache
def spread_prototypes(num_prototypes: int, dim: int, seed: int) -> np.ndarray:
    """Maximally separated prototypes, float32 [d, M]: a simplex for M ≤ d + 1, else uniform.

    With several processes, all of them call this, and use the prototypes of the first one: those of
    two hosts may differ in the last bits.
    """

    def compute() -> np.ndarray:
        if num_prototypes <= dim + 1:
            return np.asarray(jaxloss.simplex_prototypes(num_prototypes, dim))
        return np.asarray(jaxloss.uniform_prototypes(jax.random.key(seed), num_prototypes, dim))

    return from_first(compute())


def reassign(objective_state: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Assigns the prototypes anew by the class means, and counts the classes that change."""
    prototypes, class_means = objective_state["prototypes"], objective_state["class_means"]
    assignment = jaxloss.assign_prototypes(class_means, prototypes)
    reassigned = jnp.sum(assignment != objective_state["assignment"])
    alignment = jnp.mean(jnp.sum(class_means * prototypes[:, assignment], axis=0))
    epoch = jnp.sum(objective_state["reassigned"] >= 0)
    changed = {
        "assignment": assignment,
        "reassigned": objective_state["reassigned"].at[epoch].set(reassigned),
        "alignment": objective_state["alignment"].at[epoch].set(alignment),
    }
    return objective_state | changed, {"reassigned": reassigned, "alignment": alignment}


def _distance(
    options: HypersphericalLoss, problem: Problem
) -> Callable[[Array, Array, dict[str, Array]], Array]:
    """The distance of features [n, d] to the prototypes of their labels [n]."""
    common: Any = {"reduction": options.reduction, "axis_name": problem.axis_name}

    def prototype(features, labels, objective_state):
        return jaxloss.prototype_loss(
            features,
            labels,
            objective_state["prototypes"],
            assignment=objective_state["assignment"],
            **common,
        )

    def dot_regression(lengths_of, features, labels, objective_state):
        norms = optax.safe_norm(features, 1e-12, axis=1, keepdims=True)
        return jaxloss.dot_regression_loss(
            features / norms,
            labels,
            objective_state["prototypes"],
            assignment=objective_state["assignment"],
            lengths=lengths_of(labels),
            **common,
        )

    if options.criterion == "prototype":
        return prototype
    num_classes = len(problem.class_counts)
    if options.lengths == "training-set":
        of_training = jnp.asarray(np.repeat(np.arange(num_classes), problem.class_counts))
        fixed = jaxloss.class_balanced_lengths(of_training, num_classes)
        return partial(dot_regression, lambda labels: fixed)
    # Mixup's second labels are those of the whole batch in another order, so that both terms of
    # its loss get the lengths of the batch before mixup.
    of_batch = partial(
        jaxloss.class_balanced_lengths, num_classes=num_classes, axis_name=problem.axis_name
    )
    return partial(dot_regression, of_batch)


def cosines(options: HypersphericalLoss, outputs: Outputs) -> np.ndarray:
    """The cosines [n, C] of the features and the prototypes, or the weights, of the classes."""
    if options.name == "cosine-softmax":
        return outputs.logits()
    state = outputs.objective_state
    assigned = state["prototypes"][:, state["assignment"]]
    return np.asarray(jaxloss.cosine_logits(jnp.asarray(outputs.features), assigned))


def assignment_results(outputs: Outputs) -> dict[str, Any]:
    """How the assignment changed, epoch by epoch, up to the checkpoint."""
    reassigned = np.asarray(outputs.objective_state["reassigned"])
    done = reassigned >= 0
    alignment = np.asarray(outputs.objective_state["alignment"])
    return {
        "assignment": {
            "reassigned": reassigned[done].tolist(),
            "alignment": alignment[done].tolist(),
        }
    }


def label(options: HypersphericalLoss) -> str:
    """The loss, for tables."""
    name = _LABELS[options.name]
    if options.name in ("dynamic", "static") and options.criterion == "dot-regression":
        return f"{name}, dot regression"
    if options.name == "fixed-ce" and options.logits == "cosine":
        return f"{name}, cosine logits"
    return name


def report_assignment(results: dict[str, Any]) -> list[str]:
    """A table of how the assignment changed."""
    reassigned, alignment = (results["assignment"][name] for name in ("reassigned", "alignment"))
    if not reassigned:
        return ["", "No epoch has ended: the assignment is the random one of the start."]
    groups = _columns(len(reassigned))
    epochs = [f"{g[0] + 1}" + (f"–{g[-1] + 1}" if len(g) > 1 else "") for g in groups]
    return [
        "",
        "Classes whose prototype changed after an epoch, and the cosine between class means and "
        "their prototypes (means over the epochs):",
        "",
        *table(
            ["epochs", *epochs],
            [
                ["reassigned", *(f"{np.mean(np.take(reassigned, g)):.1f}" for g in groups)],
                ["cosine", *(f"{np.mean(np.take(alignment, g)):.3f}" for g in groups)],
            ],
        ),
    ]


def _columns(epochs: int) -> list[np.ndarray]:
    """The epochs from 0 in groups of growing size: the assignment changes most at first."""
    edges = np.geomspace(1, epochs + 1, _COLUMNS + 1).round().astype(int) - 1
    return np.split(np.arange(epochs), np.unique(edges)[1:-1])
