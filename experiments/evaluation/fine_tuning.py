"""Few-shot evaluation by fine-tuning: a new classifier on the support features of every episode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxloss
from experiments.config import (
    Count,
    EvaluationConfig,
    Number,
    Positive,
    Share,
    Weight,
    check_config,
)
from experiments.data.sampling import Episodes, support_orders
from experiments.errors import ConfigError
from experiments.evaluation.few_shot import prepare_episodes, summarize_episodes
from jaxloss._linear import exact_product as product

# Episodes tuned at once: bounds their features to about 16 MB at 105 × 640.
_EPISODES_AT_ONCE = 64

_LOGITS = {"cosine": jaxloss.cosine_logits, "linear": jaxloss.linear_logits}


@dataclass(frozen=True)
class FineTuning:
    """How the classifier of an episode is trained: by default as Liu et al. do it."""

    classifier: Literal["cosine", "linear", "same"] = "cosine"
    """Logits are cosines, or inner products without a bias; same: what the run was trained with."""
    scale: Positive = 5.0
    """Factor of the logits."""
    margin: Number = 0.0
    """Margin of the target's logit."""
    passes: Count = 100
    """Passes through the support samples, each in a new order."""
    batch_size: Count = 4
    """Samples of a step; the last step of a pass takes what is left."""
    learning_rate: Positive = 0.01
    """Learning rate."""
    momentum: Share = 0.9
    """Momentum of SGD."""
    dampening: Share = 0.9
    """A step adds 1 − dampening of its gradient to the momentum; the first adds all of it."""
    weight_decay: Weight = 1e-3
    """Added to the gradient before the momentum."""


class FineTuningResult(NamedTuple):
    """The outcome of one list of episodes."""

    ways: int
    shots: int
    queries: int
    episodes: int
    classifier: str
    accuracy: float
    """Mean over the episodes of the part of the queries that were right, in [0, 1]."""
    interval: float
    """Half the width of the 95 % confidence interval of the mean, 1.96·σ/√E."""
    hash: str
    """Names the list of episodes: results with the same hash compare episode by episode."""


def fine_tune(
    features: np.ndarray | Array,
    labels: np.ndarray | Array,
    weights: np.ndarray | Array,
    orders: np.ndarray | Array,
    *,
    settings: FineTuning,
) -> Array:
    """Train a classifier on frozen features by SGD, as `torch.optim.SGD` computes it.

    Every gradient is a combination of the features and the weights, so the weights never leave the
    space that the features and the first weights span. Training happens in coordinates of that
    space, S + N of them instead of d, and its result is exact.

    Args:
        features: Floats [S, d].
        labels: Integers [S] below N.
        weights: Floats [d, N], where the training starts.
        orders: Integers [passes, S], the order of the samples in each pass.
        settings: The classifier and its optimiser; `passes` is that of `orders`.

    Returns:
        The trained weights, float32 [d, N].
    """
    features, weights = jnp.asarray(features, jnp.float32), jnp.asarray(weights, jnp.float32)
    labels, orders = jnp.asarray(labels), jnp.asarray(orders)
    steps = -(-orders.shape[1] // settings.batch_size)
    filled = ((0, 0), (0, steps * settings.batch_size - orders.shape[1]))
    batches = jnp.pad(orders, filled, constant_values=-1).reshape(-1, settings.batch_size)
    basis = jnp.linalg.qr(jnp.concatenate([features.T, weights], axis=1))[0]
    features, weights = product(features, basis), product(basis.T, weights)
    logits_of = _LOGITS[settings.classifier]
    # Without momentum there is nothing to dampen.
    damped = 1 - settings.dampening if settings.momentum else 1.0

    def loss(weights, batch):
        return jaxloss.margin_softmax_loss(
            logits_of(features[batch], weights),
            labels[batch],
            margin=settings.margin,
            scale=settings.scale,
            where=batch >= 0,
        )

    def step(carry, batch):
        weights, momentum, is_first = carry
        gradient = jax.grad(loss)(weights, batch) + settings.weight_decay * weights
        momentum = settings.momentum * momentum + jnp.where(is_first, 1, damped) * gradient
        return (weights - settings.learning_rate * momentum, momentum, jnp.array(False)), None

    start = (weights, jnp.zeros_like(weights), jnp.array(True))
    (weights, _, _), _ = lax.scan(step, start, batches)
    return product(basis, weights)


def first_weights(key: Array, dim: int, ways: int) -> Array:
    """Where the classifier of an episode starts, as `torch.nn.Linear` does.

    Args:
        key: The episode's key, that of the seed with the episode's number folded in.
        dim: Features d.
        ways: Classes N.

    Returns:
        float32 [d, N], uniform between ±1/√d.
    """
    bound = dim**-0.5
    return jax.random.uniform(key, (dim, ways), jnp.float32, minval=-bound, maxval=bound)


def fine_tuned_accuracies(
    features: np.ndarray | Array,
    episodes: Episodes,
    *,
    settings: FineTuning = FineTuning(),
    seed: int = 0,
) -> np.ndarray:
    """The accuracy of a fine-tuned classifier in every episode.

    Args:
        features: Float [n, d], finite.
        episodes: Support int32 [E, N, K] and query int32 [E, N, Q], indices below n.
        settings: The classifier and its optimiser.
        seed: Seed of first weights and orders.

    Returns:
        float32 [E], in [0, 1]. Of equal logits the first class is taken.

    Raises:
        ConfigError: If a setting is out of its bounds.
        ValueError: If shapes do not fit, an index is out of range, or a feature is not finite.

    References:
        Liu et al., Negative Margin Matters, ECCV 2020, Sec. 3.5 and 4.1.
    """
    check_config(settings)
    if settings.classifier not in _LOGITS:
        raise ConfigError(
            f"classifier must be one of {', '.join(_LOGITS)}, got {settings.classifier!r}"
        )
    features, (support, query) = prepare_episodes(features, episodes)
    count, ways, shots = support.shape
    draw = partial(support_orders, ways * shots, settings.passes, seed=seed)
    orders = np.stack([draw(episode=e) for e in range(count)])
    return np.asarray(_accuracies(features, support, query, orders, seed, settings=settings))


def evaluate_fine_tuning(
    features: np.ndarray,
    labels: np.ndarray,
    *,
    config: EvaluationConfig,
    settings: FineTuning = FineTuning(),
) -> list[FineTuningResult]:
    """Fine-tune on the episodes of every shot count of a configuration.

    Args:
        features: Float [n, d].
        labels: Integers [n].
        config: Ways, shot counts, queries, number and seed of the episodes.
        settings: The classifier and its optimiser.

    Returns:
        A result for each shot count, in the order of `config.shots`.

    Raises:
        ConfigError: If a setting is out of its bounds.
        ValueError: If the labels do not fit the features, or do not have the episodes asked for.
    """
    accuracies_of = partial(fine_tuned_accuracies, features, settings=settings, seed=config.seed)
    return [
        FineTuningResult(classifier=settings.classifier, **summary)
        for summary in summarize_episodes(accuracies_of, features, labels, config)
    ]


@partial(jax.jit, static_argnames="settings")
def _accuracies(
    features: Array,
    support: Array,
    query: Array,
    orders: Array,
    seed: int | Array,
    *,
    settings: FineTuning,
) -> Array:
    count, ways, shots = support.shape
    labels = jnp.repeat(jnp.arange(ways), shots)
    truth = jnp.repeat(jnp.arange(ways), query.shape[2])

    def accuracy(episode: tuple[Array, Array, Array, Array]) -> Array:
        number, support, query, orders = episode
        key = jax.random.fold_in(jax.random.key(seed), number)
        weights = first_weights(key, features.shape[1], ways)
        weights = fine_tune(features[support.ravel()], labels, weights, orders, settings=settings)
        logits = _LOGITS[settings.classifier](features[query.ravel()], weights)
        return (logits.argmax(-1) == truth).mean(dtype=jnp.float32)

    # Groups of one size, where they divide the episodes: a smaller last one is compiled again.
    groups = -(-count // _EPISODES_AT_ONCE)
    each = (jnp.arange(count), support, query, orders)
    return lax.map(accuracy, each, batch_size=-(-count // groups))
