"""Protocol A's losses: from a name to a function of features, labels and classifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array, lax

import jaxloss
from experiments.config import Count, NamedLoss, Positive, Weight
from experiments.contracts import Problem

Name = Literal[
    "sce",
    "bce",
    "nca",
    "proto",
    "sce+nca",
    "sce+proto",
    "bce+nca",
    "bce+proto",
    "direct:sce+nca",
    "direct:sce+proto",
    "direct:bce+nca",
    "direct:bce+proto",
    "spectral:sce+nca",
    "spectral:sce+proto",
    "spectral:bce+nca",
    "spectral:bce+proto",
]

NAMES: tuple[str, ...] = get_args(Name)
"""Every loss in the order of the paper's tables."""

_CLASSIFICATION = {"sce": jaxloss.softmax_loss, "bce": jaxloss.sigmoid_loss}
_LABELS = {"sce": "SCE", "bce": "BCE", "nca": "NCA", "proto": "Proto"}
_OPERATORS = {"sum": "+", "direct": "⊕", "spectral": "⊕̃"}

LossOfBatch = Callable[..., Array]


@dataclass(frozen=True)
class IntegratedLoss(NamedLoss):
    """What is minimised."""

    name: Name = "direct:sce+nca"
    """One loss, a sum `sce+nca`, a direct sum `direct:sce+nca` or a spectral sum
    `spectral:sce+nca`."""
    metric_weight: Weight = 1.0
    """Weight of the metric loss within a sum."""
    temperature: Positive = 1.0
    """Temperature T/d of the metric losses, which divide squared distances by T; d is the number of
    features."""
    epsilon: Weight = 1e-4
    """Regulariser of the projection onto the classifier subspace (direct sum)."""
    power: Weight = 0.3
    """Exponent p of the spectral sum."""
    stop_gradient: bool = False
    """Treat the projection of a direct or spectral sum as a constant, so that the metric loss has no
    gradient for the classifier."""
    basis_every: Count = 1
    """Decompose the classifier of a spectral sum anew every this many steps; 1 is exact. Above 1, the
    projection is a constant, as with stop_gradient."""


class Terms(NamedTuple):
    """The parts of a loss name."""

    integration: Literal["sum", "direct", "spectral"] | None
    """None: a single loss."""
    classification: str | None
    metric: str | None


def terms(name: str) -> Terms:
    """The parts of a loss name."""
    integration, _, parts = name.rpartition(":")
    first, plus, second = parts.partition("+")
    if plus:
        return Terms(integration or "sum", first, second)  # pyright: ignore[reportArgumentType]
    return Terms(None, first, None) if first in _CLASSIFICATION else Terms(None, None, first)


def label(name: str) -> str:
    """The loss as the paper writes it, such as SCE⊕NCA."""
    integration, classification, metric = terms(name)
    names = [_LABELS[part] for part in (classification, metric) if part]
    return _OPERATORS[integration].join(names) if integration else names[0]


def notation(names: Sequence[str], options: IntegratedLoss) -> list[str]:
    """Sentences that explain the labels of some losses."""
    used = {part for name in names for part in terms(name)}
    sentences = {
        "sce": "SCE: softmax cross-entropy.",
        "bce": "BCE: sigmoid cross-entropy.",
        "nca": "NCA: neighbourhood component analysis.",
        "proto": "Proto: prototypical loss.",
        "sum": "A+B: sum of two losses on the same features.",
        "direct": "A⊕B: direct sum; B acts on the complement of the subspace that A's classifier "
        "spans.",
        "spectral": f"A⊕̃B: spectral sum, a soft form of the direct sum with p = {options.power:g}.",
    }
    return [sentence for part, sentence in sentences.items() if part in used]


def build_loss(options: IntegratedLoss, problem: Problem) -> LossOfBatch:
    """The loss of a batch: `(features, labels, kernel, bias) -> scalar`.

    That of a spectral sum also takes `basis`, as `jaxloss.spectral_sum_loss`.

    Args:
      options: Which loss, and its hyperparameters.
      problem: Number of features, which scales the temperature; classes; the mapped axis.
    """
    integration, classification_name, metric_name = terms(options.name)
    axis_name = problem.axis_name
    temperature = options.temperature * problem.num_features
    metric_losses = {
        "nca": partial(jaxloss.nca_loss, temperature=temperature),
        "proto": partial(
            jaxloss.prototypical_loss,
            temperature=temperature,
            num_classes=len(problem.class_counts),
        ),
    }
    if metric_name is None:
        return partial(_classify, _CLASSIFICATION[classification_name or ""], axis_name)
    metric = metric_losses[metric_name]
    if classification_name is None:
        return lambda features, labels, kernel, bias: metric(features, labels, axis_name=axis_name)
    integrate = {
        "sum": jaxloss.sum_loss,
        "direct": partial(
            jaxloss.direct_sum_loss, epsilon=options.epsilon, stop_gradient=options.stop_gradient
        ),
        "spectral": partial(
            jaxloss.spectral_sum_loss, power=options.power, stop_gradient=options.stop_gradient
        ),
    }[integration or ""]
    return partial(
        integrate,
        classification_loss=_CLASSIFICATION[classification_name],
        metric_loss=metric,
        metric_weight=options.metric_weight,
        axis_name=axis_name,
    )


def init_basis(options: IntegratedLoss, problem: Problem) -> Any:
    """The first objective state: the `basis` of a spectral sum that keeps it, and its `age`.

    The age is the number of steps since the decomposition, modulo `basis_every`. Losses that keep
    no basis have an empty state.
    """
    if terms(options.name).integration != "spectral" or options.basis_every == 1:
        return ()
    dim, num_classes = problem.num_features, len(problem.class_counts)
    rank = min(dim, num_classes)
    basis = jaxloss.SpectralBasis(jnp.zeros((dim, rank)), jnp.zeros(rank))
    return {"basis": basis, "age": jnp.zeros((), jnp.int32)}


def renew_basis(options: IntegratedLoss, kernel: Array, objective_state: Any) -> Any:
    """The objective state with the basis of this step, a new one every `basis_every` steps."""
    if not objective_state:
        return objective_state
    basis, age = objective_state["basis"], objective_state["age"]
    basis = lax.cond(age == 0, jaxloss.spectral_basis, lambda _: basis, lax.stop_gradient(kernel))
    return {"basis": basis, "age": (age + 1) % options.basis_every}


def _classify(
    loss: Callable[..., Array],
    axis_name: str | None,
    features: Array,
    labels: Array,
    kernel: Array,
    bias: Array,
) -> Array:
    return loss(jaxloss.linear_logits(features, kernel, bias), labels, axis_name=axis_name)
