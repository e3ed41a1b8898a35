"""Losses as JAX's users write them: a few lines of `jax.numpy` and optax, on whole arrays.

Products have the dtype of their factors, and all else is computed in float32; in float64 they are
the reference for the errors of all forms. Each sample must have a positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import optax
from jax import Array, nn

from experiments.benchmark.cases import ANGLE, FACE_SCALE, product


def _wide(array: Array) -> Array:
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _product(a: Array, b: Array) -> Array:
    return _wide(product(a, b))


def _unit(array: Array, axis: int = 1) -> Array:
    norms = jnp.linalg.norm(_wide(array), axis=axis, keepdims=True)
    return (_wide(array) / norms).astype(array.dtype)


def _mean_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _pairs(labels: Array) -> tuple[Array, Array]:
    """Which samples are others, and which of them positives."""
    others = ~jnp.eye(len(labels), dtype=bool)
    return others, others & (labels[:, None] == labels[None, :])


def _logsumexp(logits: Array, where: Array) -> Array:
    return nn.logsumexp(logits, axis=1, where=where)


def nca(features: Array, labels: Array) -> Array:
    """`‖x_i‖²` cancels in the difference."""
    squares = jnp.sum(_wide(features) ** 2, axis=1)
    scores = (2 * _product(features, features.T) - squares) / features.shape[1]
    others, positive = _pairs(labels)
    return jnp.mean(_logsumexp(scores, others) - _logsumexp(scores, positive))


def supervised_contrastive(features: Array, labels: Array) -> Array:
    """The mean of the positives' logits, and one log-sum-exp."""
    units, (others, positive) = _unit(features), _pairs(labels)
    cosines = _product(units, units.T)
    own = jnp.sum(cosines, axis=1, where=positive) / jnp.sum(positive, axis=1)
    return jnp.mean(_logsumexp(cosines / 0.1, others) - own / 0.1)


def info_nce(queries: Array, keys: Array) -> Array:
    """As in CLIP: rows and columns of one matrix."""
    logits = _product(_unit(queries), _unit(keys).T) / 0.07
    numbers = jnp.arange(len(queries))
    return (_mean_entropy(logits, numbers) + _mean_entropy(logits.T, numbers)) / 2


def sigmoid_contrastive(queries: Array, keys: Array) -> Array:
    """As in SigLIP."""
    logits = 10 * _product(_unit(queries), _unit(keys).T) - 10
    return (jnp.sum(nn.softplus(logits)) - jnp.trace(logits)) / len(queries)


def classifier(features: Array, labels: Array, weights: Array, bias: Array) -> Array:
    """Two lines: the logits, and optax."""
    logits = _product(features, weights.astype(features.dtype)) + _wide(bias)
    return _mean_entropy(logits, labels)


def arcface(features: Array, labels: Array, weights: Array) -> Array:
    """The angle is added by cosines and sines of sums."""
    units = _unit(features)
    cosines = _product(units, _unit(weights, axis=0).astype(units.dtype))
    rows = jnp.arange(len(labels))
    own = cosines[rows, labels]
    raised = own * math.cos(ANGLE) - jnp.sqrt(jnp.maximum(1 - own**2, 1e-6)) * math.sin(ANGLE)
    raised = jnp.where(own >= -math.cos(ANGLE), raised, own + math.cos(ANGLE) - 1)
    return _mean_entropy(FACE_SCALE * cosines.at[rows, labels].set(raised), labels)


_FORMS = (nca, supervised_contrastive, info_nce, sigmoid_contrastive, classifier, arcface)
FORMS: dict[str, Callable[..., Array]] = {form.__name__: form for form in _FORMS}
"""By the name of the case."""
