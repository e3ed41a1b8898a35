"""The same losses as JAX's users write them: a few lines of `jax.numpy` and optax, on whole arrays.

Products have the dtype of their factors, and all else is computed in float32; in float64 they are
the reference for the errors of all forms. Each sample must have a positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import Array, nn

from experiments.benchmark.cases import ANGLE, BASE_CLASSES, FACE_SCALE


def _wide(array: Array) -> Array:
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _product(a: Array, b: Array) -> Array:
    return _wide(a @ b)


def _unit(array: Array, axis: int = 1) -> Array:
    norms = jnp.linalg.norm(_wide(array), axis=axis, keepdims=True)
    return (_wide(array) / norms).astype(array.dtype)


def _mean_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _cosines(features: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Of all pairs, and which of them are positives and negatives."""
    units, same = _unit(features), labels[:, None] == labels[None, :]
    return _product(units, units.T), same & ~jnp.eye(len(labels), dtype=bool), ~same


_logsumexp = partial(nn.logsumexp, axis=1)


def nca(features: Array, labels: Array) -> Array:
    """`‖x_i‖²` cancels in the difference."""
    squares = jnp.sum(_wide(features) ** 2, axis=1)
    scores = (2 * _product(features, features.T) - squares) / features.shape[1]
    others = ~jnp.eye(len(labels), dtype=bool)
    same = others & (labels[:, None] == labels[None, :])
    return jnp.mean(_logsumexp(scores, where=others) - _logsumexp(scores, where=same))


def supervised_contrastive(features: Array, labels: Array) -> Array:
    """The mean of the positives' logits, and one log-sum-exp."""
    cosines, positive, negative = _cosines(features, labels)
    own = jnp.sum(cosines, axis=1, where=positive) / jnp.sum(positive, axis=1)
    return jnp.mean(_logsumexp(cosines / 0.1, where=positive | negative) - own / 0.1)


def multi_similarity(features: Array, labels: Array) -> Array:
    """Two masked log-sum-exps."""
    cosines, positive, negative = _cosines(features, labels)
    pull = nn.softplus(_logsumexp(-2 * (cosines - 0.5), where=positive)) / 2
    push = nn.softplus(_logsumexp(50 * (cosines - 0.5), where=negative)) / 50
    return jnp.mean(pull + push)


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


def proxy_anchor(features: Array, labels: Array, proxies: Array) -> Array:
    """Log-sum-exps over the batch."""
    cosines = _product(_unit(features), _unit(proxies, axis=0))
    own = nn.one_hot(labels, proxies.shape[1], dtype=bool)
    present = jnp.any(own, axis=0)
    # The gradient of a log-sum-exp of nothing is NaN.
    pull = nn.softplus(_logsumexp(-32 * (cosines - 0.1), where=own | ~present, axis=0))
    push = nn.softplus(_logsumexp(32 * (cosines + 0.1), where=~own, axis=0))
    return jnp.mean(pull, where=present) + jnp.mean(push)


def proxy_nca(features: Array, labels: Array, proxies: Array) -> Array:
    """On cosines: the norms of 1 cancel in the softmax."""
    return _mean_entropy(18 * _product(_unit(features), _unit(proxies, axis=0)), labels)


def prototypical(features: Array, labels: Array) -> Array:
    """Distances to the class means; the anchor's own mean leaves the anchor out."""
    membership = nn.one_hot(labels, BASE_CLASSES, dtype=features.dtype)
    sizes = jnp.maximum(jnp.sum(_wide(membership), axis=0), 1)
    means = _product(membership.T, features) / sizes[:, None]
    squares = jnp.sum(_wide(features) ** 2, axis=1)[:, None] + jnp.sum(means**2, axis=1)
    products = _product(features, means.T.astype(features.dtype))
    logits = (2 * products - squares) / features.shape[1]
    logits = jnp.where(jnp.any(membership > 0, axis=0), logits, -jnp.inf)
    rows = jnp.arange(len(labels))
    factors = (sizes / jnp.maximum(sizes - 1, 1))[labels] ** 2
    return _mean_entropy(logits.at[rows, labels].multiply(factors), labels)


_OF_PAIRS = (nca, supervised_contrastive, multi_similarity, prototypical)
_OF_TOWERS = (info_nce, sigmoid_contrastive)
_OF_WEIGHTS = (classifier, arcface, proxy_anchor, proxy_nca)
FORMS: dict[str, Callable[..., Array]] = {
    form.__name__: form for form in (*_OF_PAIRS, *_OF_TOWERS, *_OF_WEIGHTS)
}
"""By the name of the case."""


def in_full_precision(function: Callable[..., Array]) -> Callable[..., Array]:
    """float32 products without TF32, as PyTorch has them by default."""

    def run(*arrays: Array) -> Array:
        with jax.default_matmul_precision("highest"):
            return function(*arrays)

    return run
