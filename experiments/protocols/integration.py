"""Protocol A's losses: from a name to a function of features, labels and classifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxloss
from experiments.config import NamedLoss, Positive, Weight
from experiments.contracts import Outputs, Problem
from experiments.evaluation.subspace import span
from experiments.protocols.linear_head import over_devices

_Single = Literal["sce", "bce", "nca", "proto"]
_Sum = Literal["sce+nca", "sce+proto", "bce+nca", "bce+proto"]
_Direct = Literal["direct:sce+nca", "direct:sce+proto", "direct:bce+nca", "direct:bce+proto"]
_Spectral = Literal[
    "spectral:sce+nca", "spectral:sce+proto", "spectral:bce+nca", "spectral:bce+proto"
]
Name = Literal[_Single, _Sum, _Direct, _Spectral]

NAMES: tuple[str, ...] = get_args(Name)
"""Every loss in the order of the paper's tables."""

_CLASSIFICATION = {"sce": jaxloss.softmax_loss, "bce": jaxloss.sigmoid_loss}
_LABELS = {"sce": "SCE", "bce": "BCE", "nca": "NCA", "proto": "Proto"}
_OPERATORS = {"sum": "+", "direct": "⊕", "spectral": "⊕̃"}


@dataclass(frozen=True)
class IntegratedLoss(NamedLoss):
    """What is minimised."""

    name: Name = "direct:sce+nca"
    """One loss, a sum, a direct sum or a spectral sum."""
    metric_weight: Weight = 1.0
    """Weight of the metric loss in a sum, direct sum or spectral sum."""
    temperature: Positive = 1.0
    """The metric losses divide squared distances by this number times d, the number of features."""
    epsilon: Weight = 1e-4
    """Regulariser of the projection onto the classifier subspace (direct sum)."""
    power: Weight = 0.3
    """Exponent p of the spectral sum."""
    stop_gradient: bool = False
    """The metric loss of a direct or spectral sum has no gradient for the classifier."""


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


def build_loss(options: IntegratedLoss, problem: Problem) -> Callable[..., Array]:
    """The loss of a batch: `(features, labels, kernel, bias) -> scalar`."""
    classification, metric = _parts(options, problem.num_features, len(problem.class_counts))

    def single(
        features: Array, labels: Array, weights: Array, bias: Array, *, axis_name: Any = None
    ) -> Array:
        if classification is None:
            assert metric is not None
            return metric(features, labels, axis_name=axis_name)
        logits = jaxloss.linear_logits(features, weights, bias)
        return classification(logits, labels, axis_name=axis_name)

    if classification is None or metric is None:
        return over_devices(single, problem)
    projection: dict[str, Any] = {"stop_gradient": options.stop_gradient}
    integrate = {
        "sum": jaxloss.sum_loss,
        "direct": partial(jaxloss.direct_sum_loss, epsilon=options.epsilon, **projection),
        "spectral": partial(jaxloss.spectral_sum_loss, power=options.power, **projection),
    }[terms(options.name).integration or ""]
    parts = {"classification_loss": classification, "metric_loss": metric}
    loss = partial(integrate, **parts, metric_weight=options.metric_weight)
    return over_devices(loss, problem)


def _parts(
    options: IntegratedLoss, num_features: int, num_classes: int
) -> tuple[Callable[..., Array] | None, Callable[..., Array] | None]:
    """The loss of logits and labels, and that of features and labels; None where there is none."""
    _, classification, metric = terms(options.name)
    temperature = options.temperature * num_features
    metric_losses = {
        "nca": partial(jaxloss.nca_loss, temperature=temperature),
        "proto": partial(
            jaxloss.prototypical_loss, temperature=temperature, num_classes=num_classes
        ),
    }
    return _CLASSIFICATION.get(classification or ""), metric_losses.get(metric or "")


def gradient_cosine(options: IntegratedLoss, outputs: Outputs, batch_size: int) -> float | None:
    """The cosine between the gradients of the two losses inside the span of the classifier.

    The gradients are those of the features of training images in a batch, which both losses get as
    they are; the mean is over batches in a fixed random order. Below 0, the losses pull features of
    the span in opposite directions. None for a single loss, and for gradients of zero.
    """
    features, labels = outputs[:2]
    kernel, bias = (jnp.asarray(outputs.head[name]) for name in ("kernel", "bias"))
    classification, metric = _parts(options, features.shape[1], kernel.shape[1])
    if classification is None or metric is None:
        return None

    @jax.jit
    def gradients(x: Array, y: Array) -> tuple[Array, Array]:
        return (
            jax.grad(lambda x: classification(jaxloss.linear_logits(x, kernel, bias), y))(x),
            jax.grad(lambda x: metric(x, y))(x),
        )

    basis, _ = span(np.asarray(kernel))
    order = np.random.default_rng(0).permutation(len(labels))
    cosines = []
    for start in range(0, len(order) - batch_size + 1, batch_size):
        rows = order[start : start + batch_size]
        pair = gradients(features[rows], labels[rows])
        first, second = (np.asarray(gradient, np.float64) @ basis for gradient in pair)
        lengths = np.linalg.norm(first) * np.linalg.norm(second)
        if lengths > 0:
            cosines.append(np.sum(first * second) / lengths)
    return float(np.mean(cosines)) if cosines else None
