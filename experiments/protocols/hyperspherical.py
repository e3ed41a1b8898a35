"""Protocol C: hyperspherical classification with dynamic label-to-prototype assignment.

Saadabadi et al., CVPR 2024: balanced classes, and long tails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jaxloss
from experiments.config import NamedLoss, Positive, Seed, Share, TrainConfig
from experiments.data.sampling import batch_size_of
from experiments.errors import ConfigError
from experiments.protocols import classification
from experiments.protocols.linear_head import linear_head, linear_scores
from experiments.protocols.protocol import Outputs, Protocol
from experiments.protocols.prototypes import spread_prototypes
from experiments.training.objective import Loss, Objective, Problem, train_accuracy

_LABELS = {
    "dynamic": "Dynamic assignment",
    "static": "Static assignment",
    "fixed-ce": "Fixed W + CE",
    "softmax": "Softmax",
}
_COLUMNS = 10
"""Columns of the report's table on the assignment, at most."""


@dataclass(frozen=True)
class HypersphericalLossConfig(NamedLoss):
    """What is minimised."""

    name: Literal["dynamic", "static", "fixed-ce", "softmax"] = "dynamic"
    """Distance to prototypes that are assigned to the classes anew after every epoch, or at random
    once; cross-entropy with the prototypes, assigned at random, as a fixed classifier; or
    cross-entropy with a linear classifier that learns."""
    criterion: Literal["prototype", "dot-regression"] = "prototype"
    """The distance: the squared cosine distance (balanced classes), or dot regression of features
    of length 1 with prototypes that are the longer, the rarer their class is (long tails)."""
    reduction: Literal["mean", "sum"] = "mean"
    """Of the losses in a batch. The sum over n samples moves SGD as the mean does with n times the
    learning rate and a weight decay n times smaller."""
    decay: Share = 0.9
    """Decay of the moving class means, from which prototypes are assigned."""
    logits: Literal["linear", "cosine"] = "linear"
    """Logits of fixed-ce: the inner product, as in the supplement's eq. (10), where features can
    grow as cross-entropy wants; or SCALE times the cosine."""
    scale: Positive = 16.0
    """Cosines are multiplied by it to be logits: for the calibration error of dynamic and static,
    whose training has no such scale, and wherever fixed-ce has cosines."""
    prototypes_seed: Seed = 0
    """Seed of the prototypes, which do not depend on the run's."""


@dataclass(frozen=True)
class HypersphericalConfig(TrainConfig):
    """A run of protocol C."""

    protocol: ClassVar[str] = "hyperspherical"

    loss: HypersphericalLossConfig = field(default_factory=HypersphericalLossConfig)


def check_options(config: HypersphericalConfig, num_features: int) -> None:
    """Raises unless there is room for prototypes that differ."""
    if num_features < 2:
        raise ConfigError(
            f"model.dim = {num_features} must be at least 2: in one, there are but two prototypes"
        )


def objective(config: HypersphericalConfig, problem: Problem) -> Objective:
    """Features are drawn to prototypes, or a linear classifier learns.

    What a run remembers is, except for softmax, `prototypes` [d, C] and `assignment` [C], the
    prototype of each class. With the dynamic assignment it is also `class_means` [d, C] and, for
    every epoch of the run, how many classes were `reassigned` after it (−1 before), and their
    `alignment`: the cosine between a class mean and its new prototype, averaged over the classes.
    """
    if config.loss.name == "softmax":
        return _softmax(config, problem)
    return _with_prototypes(config, problem)


def _softmax(config: HypersphericalConfig, problem: Problem) -> Objective:
    wanted, axis_name = config.loss, problem.axis_name

    def loss(features, labels, head, memory):
        logits = linear_scores(features, head, memory)
        value = jaxloss.softmax_loss(
            logits, labels, reduction=wanted.reduction, axis_name=axis_name
        )
        return Loss(value, memory, train_accuracy(logits, labels))

    def head(key: Array):
        return linear_head(key, problem.num_features, len(problem.counts))

    return Objective(head, loss, linear_scores)


def _with_prototypes(config: HypersphericalConfig, problem: Problem) -> Objective:
    wanted, axis_name = config.loss, problem.axis_name
    num_classes, dim = len(problem.counts), problem.num_features
    dynamic = wanted.name == "dynamic"
    linear = wanted.name == "fixed-ce" and wanted.logits == "linear"

    def scores(features, head, memory):
        assigned = memory["prototypes"][:, memory["assignment"]]
        if linear:
            return jaxloss.linear_logits(features, assigned)
        return wanted.scale * jaxloss.cosine_logits(features, assigned)

    distance = _distance(config, problem)

    def loss(features, labels, head, memory):
        logits = scores(features, head, memory)
        if wanted.name == "fixed-ce":
            value = jaxloss.softmax_loss(
                logits, labels, reduction=wanted.reduction, axis_name=axis_name
            )
        else:
            value = distance(features, labels, memory)
        means = train_accuracy(logits, labels)
        if dynamic:
            class_means = jaxloss.update_class_means(
                memory["class_means"], features, labels, decay=wanted.decay, axis_name=axis_name
            )
            memory = memory | {"class_means": class_means}
        return Loss(value, memory, means)

    def memory():
        key = jax.random.fold_in(jax.random.key(config.seed), 3)
        first = {
            "prototypes": jnp.asarray(spread_prototypes(num_classes, dim, wanted.prototypes_seed)),
            "assignment": jax.random.permutation(key, jnp.arange(num_classes, dtype=jnp.int32)),
        }
        if dynamic:
            epochs = max(_epochs(config, problem.counts), 1)
            first |= {
                "class_means": jnp.zeros((dim, num_classes)),
                "reassigned": jnp.full(epochs, -1, jnp.int32),
                "alignment": jnp.zeros(epochs),
            }
        return first

    return Objective(
        head=lambda key: {},
        loss=loss,
        scores=scores,
        memory=memory,
        after_epoch=reassign if dynamic else None,
    )


def reassign(memory: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """The memory with prototypes assigned by the class means, and how far that moved them."""
    prototypes, class_means = memory["prototypes"], memory["class_means"]
    assignment = jaxloss.assign_prototypes(class_means, prototypes)
    reassigned = jnp.sum(assignment != memory["assignment"])
    alignment = jnp.mean(jnp.sum(class_means * prototypes[:, assignment], axis=0))
    epoch = jnp.sum(memory["reassigned"] >= 0)
    changed = {
        "assignment": assignment,
        "reassigned": memory["reassigned"].at[epoch].set(reassigned),
        "alignment": memory["alignment"].at[epoch].set(alignment),
    }
    return memory | changed, {"reassigned": reassigned, "alignment": alignment}


def _distance(
    config: HypersphericalConfig, problem: Problem
) -> Callable[[Array, Array, dict[str, Array]], Array]:
    """The distance of features [n, d] from the prototypes of their labels [n], by the memory."""
    wanted = config.loss
    common: Any = {"reduction": wanted.reduction, "axis_name": problem.axis_name}

    def prototype(features, labels, memory):
        return jaxloss.prototype_loss(
            features, labels, memory["prototypes"], assignment=memory["assignment"], **common
        )

    def dot_regression(features, labels, memory):
        lengths_of_features = optax.safe_norm(features, 1e-12, axis=1, keepdims=True)
        return jaxloss.dot_regression_loss(
            features / lengths_of_features,
            labels,
            memory["prototypes"],
            assignment=memory["assignment"],
            lengths=lengths,
            **common,
        )

    if wanted.criterion == "prototype":
        return prototype
    labels = np.repeat(np.arange(len(problem.counts)), problem.counts)
    lengths = jaxloss.class_balanced_lengths(jnp.asarray(labels), len(problem.counts))
    return dot_regression


def _epochs(config: HypersphericalConfig, counts: np.ndarray) -> int:
    """How many epochs end within the run."""
    batch_size = batch_size_of(config.sampling.strategy, config.sampling.batch_size)
    return config.steps // (int(counts.sum()) // batch_size)


def evaluate(
    config: HypersphericalConfig, split: str, outputs: Callable[[str], Outputs]
) -> dict[str, Any]:
    """As all classification; and how the assignment moved, epoch by epoch, up to the checkpoint."""
    of_split = outputs(split)
    result = classification.evaluate(config, split, lambda _: of_split)
    if config.loss.name != "dynamic":
        return result
    reassigned = np.asarray(of_split.memory["reassigned"])
    done = reassigned >= 0
    return result | {
        "assignment": {
            "reassigned": reassigned[done].tolist(),
            "alignment": np.asarray(of_split.memory["alignment"])[done].tolist(),
        }
    }


def describe(config: HypersphericalConfig) -> dict[str, Any]:
    """The loss, and the subset of the data."""
    label = _LABELS[config.loss.name]
    if config.loss.name in ("dynamic", "static") and config.loss.criterion == "dot-regression":
        label += ", dot regression"
    if config.loss.name == "fixed-ce" and config.loss.logits == "cosine":
        label += ", cosine logits"
    return {"label": label} | classification.describe_data(config)


def report(report: dict[str, Any]) -> list[str]:
    """As all classification; and a table of how the assignment moved."""
    lines = classification.report(report)
    if "assignment" not in report:
        return lines
    reassigned, alignment = (report["assignment"][name] for name in ("reassigned", "alignment"))
    if not reassigned:
        return [*lines, "", "No epoch had ended: the assignment is the first one, at random."]
    groups = _columns(len(reassigned))
    names = [f"{g[0] + 1}" + (f"–{g[-1] + 1}" if len(g) > 1 else "") for g in groups]
    return [
        *lines,
        "",
        "Classes that changed their prototype after an epoch, and the cosine between class means "
        "and their prototypes (means over the epochs):",
        "",
        f"| epochs | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        f"| reassigned | {' | '.join(f'{np.mean(np.take(reassigned, g)):.1f}' for g in groups)} |",
        f"| cosine | {' | '.join(f'{np.mean(np.take(alignment, g)):.3f}' for g in groups)} |",
    ]


def _columns(epochs: int) -> list[np.ndarray]:
    """The epochs from 0 in groups that grow: the assignment moves most at first."""
    edges = np.geomspace(1, epochs + 1, _COLUMNS + 1).round().astype(int) - 1
    return np.split(np.arange(epochs), np.unique(edges)[1:-1])


PROTOCOL = Protocol(
    config=HypersphericalConfig,
    splits=classification.SPLITS,
    load=classification.load,
    counts=classification.counts,
    check=classification.check,
    objective=objective,
    validate=classification.validate,
    evaluate=evaluate,
    metrics=classification.metrics,
    describe=describe,
    report=report,
    check_options=check_options,
)
