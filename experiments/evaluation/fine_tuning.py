"""Few-shot evaluation by fine-tuning: a new classifier on the support features of every episode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxloss
from experiments.core.config import Count, Positive, Share, Signed, Weight
from experiments.data.sampling import support_orders
from experiments.evaluation.few_shot import (
    EPISODES_AT_ONCE,
    EpisodeConfig,
    EpisodeResult,
    evaluate_episodes,
)
from jaxloss.core.products import wide_product as product
from jaxloss.sampling import Episodes

Classifier = Literal["cosine", "linear"]
"""Logits are cosines, or inner products without a bias."""

LOGITS = {"cosine": jaxloss.cosine_logits, "linear": jaxloss.linear_logits}
"""The logits of each form, of features and weights."""


@dataclass(frozen=True)
class FineTuning:
    """How the classifier of an episode is trained; the defaults are those of Liu et al."""

    scale: Positive = 5.0
    """Factor of the logits."""
    margin: Signed = 0.0
    """Margin of the target's logit."""
    passes: Count = 100
    """Passes over the support samples, each in a new order."""
    batch_size: Count = 4
    """Samples per step; the last step of a pass takes the remaining ones."""
    learning_rate: Positive = 0.01
    """Learning rate."""
    momentum: Share = 0.9
    """Momentum of SGD."""
    dampening: Share = 0.9
    """Each step adds 1 − dampening of its gradient to the momentum; the first step adds all."""
    weight_decay: Weight = 1e-3
    """L2 decay, added to the gradient before the momentum."""


def fine_tune(
    features: Array,
    labels: Array,
    weights: Array,
    orders: Array,
    *,
    classifier: Classifier,
    settings: FineTuning,
) -> Array:
    """Train a classifier on frozen features by SGD, as `torch.optim.SGD` computes it.

    Every gradient is a combination of the features and the weights, so the weights never leave the
    space that the features and the first weights span. Training happens in coordinates of that
    space, S + N of them instead of d, and its result is exact.

    Features are float32 [S, d] with labels [S] below N; training starts from `weights` [d, N], and
    each pass takes the samples in one of the `orders` [passes, S]. Returns the trained weights.
    """
    filled = ((0, 0), (0, -orders.shape[1] % settings.batch_size))
    batches = jnp.pad(orders, filled, constant_values=-1).reshape(-1, settings.batch_size)
    basis = jnp.linalg.qr(jnp.concatenate([features.T, weights], axis=1))[0]
    features, weights = product(features, basis), product(basis.T, weights)
    # Without momentum there is nothing to dampen.
    damped = 1 - settings.dampening if settings.momentum else 1.0

    def loss(weights, batch):
        logits, where = LOGITS[classifier](features[batch], weights), batch >= 0
        how: Any = {"margin": settings.margin, "scale": settings.scale}
        return jaxloss.margin_softmax_loss(logits, labels[batch], **how, where=where)

    def step(carry, batch):
        weights, momentum, is_first = carry
        gradient = jax.grad(loss)(weights, batch) + settings.weight_decay * weights
        momentum = settings.momentum * momentum + jnp.where(is_first, 1, damped) * gradient
        return (weights - settings.learning_rate * momentum, momentum, jnp.array(False)), None

    start = (weights, jnp.zeros_like(weights), jnp.array(True))
    (weights, _, _), _ = lax.scan(step, start, batches)
    return product(basis, weights)


def fine_tuned_predictions(
    features: np.ndarray | Array,
    episodes: Episodes,
    *,
    classifier: Classifier = "cosine",
    settings: FineTuning = FineTuning(),
    seed: int = 0,
) -> np.ndarray:
    """The classes that fine-tuned classifiers predict, as `prototype_predictions`: int32 [E, N, Q].

    First weights and orders depend on the seed and on the number of the episode (Liu et al.,
    Negative Margin Matters, ECCV 2020, supplement B, and the authors' published code).
    """
    support, query = episodes
    numbers, samples = np.arange(len(support)), support.shape[1] * support.shape[2]
    orders = [support_orders(samples, settings.passes, seed=seed, episode=int(e)) for e in numbers]
    each = (numbers, support, query, np.stack(orders))
    features = np.asarray(features, np.float32)
    return np.asarray(_tuned(features, each, seed, classifier=classifier, settings=settings))


def evaluate_fine_tuning(
    features: np.ndarray,
    labels: np.ndarray,
    *,
    config: EpisodeConfig,
    classifier: Classifier = "cosine",
    settings: FineTuning = FineTuning(),
) -> list[tuple[EpisodeResult, np.ndarray]]:
    """Fine-tunes a classifier in every episode; the rest is as in `evaluate_episodes`."""
    predict = partial(fine_tuned_predictions, classifier=classifier, settings=settings)
    return evaluate_episodes(predict, features, labels, config=config, classifier=classifier)


@partial(jax.jit, static_argnames=("classifier", "settings"))
def _tuned(
    features: Array,
    each: tuple[Any, ...],
    seed: int | Array,
    *,
    classifier: Classifier,
    settings: FineTuning,
) -> Array:
    def predict(episode: tuple[Array, ...]) -> Array:
        number, support, query, orders = episode
        (ways, shots), dim = support.shape, features.shape[1]
        key, bound = jax.random.fold_in(jax.random.key(seed), number), dim**-0.5
        weights = fine_tune(
            features[support.ravel()],
            jnp.repeat(jnp.arange(ways), shots),
            # As `torch.nn.Linear` starts.
            jax.random.uniform(key, (dim, ways), jnp.float32, minval=-bound, maxval=bound),
            orders,
            classifier=classifier,
            settings=settings,
        )
        logits = LOGITS[classifier](features[query.ravel()], weights)
        return logits.argmax(-1).reshape(query.shape)

    # Groups of one size, where they divide the episodes: a smaller last one is compiled again.
    count = len(each[0])
    groups = -(-count // EPISODES_AT_ONCE)
    return lax.map(predict, each, batch_size=-(-count // groups))
