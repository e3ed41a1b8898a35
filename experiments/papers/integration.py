"""Protocol A's losses: from a name to a function of features, labels and classifier."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Float, Integer

import jaxloss
from experiments.core.config import CountOrZero, NamedLoss, Positive, Weight
from experiments.core.protocol import BATCH_AXIS, Outputs, Problem
from experiments.evaluation.feature_space import span

_CLASSIFICATION = {"sce": jaxloss.softmax_loss, "bce": jaxloss.sigmoid_loss}
_OF_THE_PAPER = ("nca", "proto")
_OF_UNIT_VECTORS = (
    *("supcon", "multi-similarity", "circle", "triplet-hard", "triplet-semihard", "triplet-all"),
)
"""Metric losses of features that are divided by their length."""
WITH_PROXIES = ("proxy-anchor", "proxy-nca")
"""Their proxies are the kernel of the classifier, so that they are in no sum."""


def _sums(classifications: Iterable[str], metrics: Iterable[str]) -> tuple[str, ...]:
    """All sums, direct sums and spectral sums of a classification and a metric loss."""
    operators = ("", "direct:", "spectral:")
    parts = itertools.product(operators, classifications, metrics)
    return tuple(f"{operator}{one}+{metric}" for operator, one, metric in parts)


METRIC_NAMES = (*_OF_THE_PAPER, *_OF_UNIT_VECTORS, *WITH_PROXIES)
"""The single metric losses."""
PAPER_NAMES = (*_CLASSIFICATION, *_OF_THE_PAPER, *_sums(_CLASSIFICATION, _OF_THE_PAPER))
"""The losses of the paper in the order of its tables."""
NAMES = (*PAPER_NAMES, *_OF_UNIT_VECTORS, *_sums(["sce"], _OF_UNIT_VECTORS), *WITH_PROXIES)
"""Every loss."""

_LABELS = {
    "sce": "SCE",
    "bce": "BCE",
    "nca": "NCA",
    "proto": "Proto",
    "supcon": "SupCon",
    "multi-similarity": "MS",
    "circle": "Circle",
    "triplet-hard": "Triplet-hard",
    "triplet-semihard": "Triplet-semihard",
    "triplet-all": "Triplet-all",
    "proxy-anchor": "ProxyAnchor",
    "proxy-nca": "ProxyNCA",
}
"""The label of every single loss."""
_OPERATORS = {"sum": "+", "direct": "⊕", "spectral": "⊕̃"}


@dataclass(frozen=True)
class IntegratedLoss(NamedLoss):
    """What is minimised."""

    name: Literal[NAMES] = "direct:sce+nca"  # pyright: ignore
    """One loss, a sum, a direct sum or a spectral sum. All metric losses but nca and proto get
    features of length 1, which a direct or spectral sum projects afterwards."""
    metric_weight: Weight = 1.0
    """Weight of the metric loss in a sum, direct sum or spectral sum."""
    temperature: Positive = 1.0
    """nca and proto divide squared distances by this number times d, the number of features."""
    epsilon: Weight = 1e-4
    """Regulariser of the projection onto the classifier subspace (direct sum)."""
    power: Weight = 0.3
    """Exponent p of the spectral sum."""
    stop_gradient: bool = False
    """The metric loss of a direct or spectral sum has no gradient for the classifier."""
    sharpness: Positive = 1.0
    """Multiplies the scales of every metric loss, and divides its temperature (triplets: its
    margin); one number to tune them all with. At 1, they are those of Khosla et al., NeurIPS 2020
    (supcon), Wang et al., CVPR 2019 (multi-similarity), Sun et al., CVPR 2020 (circle, fine-grained
    retrieval), Schroff et al., CVPR 2015 (triplets), Kim et al., CVPR 2020 (proxy-anchor), and Teh
    et al., ECCV 2020 (proxy-nca)."""
    queue: CountOrZero = 0
    """Images of earlier batches that the metric loss compares each image with, too; 0: none."""


class Terms(NamedTuple):
    """The parts of a loss name; empty if it has none."""

    integration: str
    """`sum`, `direct` or `spectral`."""
    classification: str
    metric: str


def terms(name: str) -> Terms:
    """The parts of a loss name."""
    integration, _, parts = name.rpartition(":")
    first, plus, second = parts.partition("+")
    if plus:
        return Terms(integration or "sum", first, second)
    return Terms("", first, "") if first in _CLASSIFICATION else Terms("", "", first)


def label(name: str) -> str:
    """The loss as the paper writes it, such as SCE⊕NCA."""
    integration, *parts = terms(name)
    return _OPERATORS.get(integration, "").join(_LABELS[part] for part in parts if part)


def build_loss(options: IntegratedLoss, problem: Problem) -> Callable[..., Array]:
    """The loss of a batch: `(features, labels, weights, bias) -> scalar`.

    With the keywords `references` and `reference_labels`, of features as `metric_features` returns
    them, each image is compared with these, too, in a second metric loss.

    `jaxloss.direct_sum_loss` and `spectral_sum_loss` have the same values for `nca` and `proto`,
    but pass no features of length 1 to the metric loss, and project no references.
    """
    name = terms(options.name)
    classification, metric = _parts(options, problem.num_features, len(problem.class_counts))
    project = {
        "direct": partial(jaxloss.project_complement, epsilon=options.epsilon),
        "spectral": partial(
            jaxloss.project_spectral_complement,
            power=options.power,
            stop_gradient=options.stop_gradient,
        ),
    }.get(name.integration, lambda rows, weights: rows)

    def loss(
        features: Float[Array, "n d"],
        labels: Integer[Array, " n"],
        weights: Float[Array, "d C"],
        bias: Float[Array, " C"],
        *,
        references: Float[Array, "m d"] | None = None,
        reference_labels: Integer[Array, " m"] | None = None,
        axis_name: Any = None,
    ) -> Array:
        value = jnp.zeros(())
        if classification is not None:
            logits = jaxloss.linear_logits(features, weights, bias)
            value += classification(logits, labels, axis_name=axis_name)
        if metric is None:
            return value
        if name.metric in WITH_PROXIES:
            return metric(features, labels, weights, axis_name=axis_name)
        spanned = lax.stop_gradient(weights) if options.stop_gradient else weights
        # Normalised first: to normalise an almost empty complement amplifies its noise.
        compared = project(metric_features(options, features), spanned)
        found = metric(compared, labels, axis_name=axis_name)
        if references is not None:
            references = project(references, spanned)
            given = {"references": references, "reference_labels": reference_labels}
            found += metric(compared, labels, **given, axis_name=axis_name)
        return value + (options.metric_weight if classification is not None else 1) * found

    if problem.mesh is None:
        return partial(loss, axis_name=problem.axis_name)
    return jaxloss.sharded_loss(loss, problem.mesh, BATCH_AXIS)


def metric_features(options: IntegratedLoss, features: Array) -> Array:
    """The features [n, d] that the metric loss gets, before a projection."""
    if terms(options.name).metric not in _OF_UNIT_VECTORS:
        return features
    return features / optax.safe_norm(features, 1e-12, axis=1, keepdims=True)


def takes_queue(name: str) -> bool:
    """Whether the loss of a name can compare with features of earlier batches."""
    return terms(name).metric in (*_OF_THE_PAPER, *_OF_UNIT_VECTORS)


def _parts(
    options: IntegratedLoss, num_features: int, num_classes: int
) -> tuple[Callable[..., Array] | None, Callable[..., Array] | None]:
    """The loss of logits and labels, and that of features and labels; None where there is none.

    The second gets what `metric_features` returns; with proxies, features, labels and proxies.
    """
    _, classification, metric = terms(options.name)
    sharp = options.sharpness
    temperature = options.temperature * num_features / sharp
    unit: dict[str, Any] = {"similarity": "inner"}
    # Temperatures, scales and margins are those of the papers that `sharpness` names.
    triplet = partial(jaxloss.triplet_loss, margin=0.2 / sharp, normalize=False)
    metric_losses = {
        "nca": partial(jaxloss.nca_loss, temperature=temperature),
        "proto": partial(
            jaxloss.prototypical_loss, temperature=temperature, num_classes=num_classes
        ),
        "supcon": partial(jaxloss.supervised_contrastive_loss, temperature=0.1 / sharp, **unit),
        "multi-similarity": partial(
            jaxloss.multi_similarity_loss,
            positive_scale=2.0 * sharp,
            negative_scale=50.0 * sharp,
            **unit,
        ),
        "circle": partial(jaxloss.circle_loss, margin=0.4, scale=80.0 * sharp, **unit),
        "triplet-hard": partial(triplet, mining="hard"),
        "triplet-semihard": partial(triplet, mining="semihard"),
        "triplet-all": partial(triplet, mining="all"),
        "proxy-anchor": partial(jaxloss.proxy_anchor_loss, scale=32.0 * sharp),
        "proxy-nca": partial(jaxloss.proxy_nca_loss, temperature=1 / 9 / sharp),
    }
    return _CLASSIFICATION.get(classification), metric_losses.get(metric)


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
            jax.grad(lambda x: metric(metric_features(options, x), y))(x),
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
