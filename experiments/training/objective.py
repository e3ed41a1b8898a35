"""What a protocol gives the trainer: a head, what is minimised, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


class Problem(NamedTuple):
    """What an objective is built for."""

    num_features: int
    """Features d that the backbone gives."""
    counts: np.ndarray
    """int64 [C], training images of every class."""
    axis_name: str | None
    """The mapped axis over which the batch is spread, or None."""


class Loss(NamedTuple):
    """The loss of a batch."""

    value: Array
    """float []: over all devices."""
    memory: Any
    """The new memory: the same on all devices."""
    means: dict[str, Array]
    """float [], for the metrics: means over the own rows of the batch."""


class Objective(NamedTuple):
    """What a run minimises. All functions are pure and can be compiled."""

    head: Callable[[Array], Any]
    """From a key, the first parameters beside the backbone's."""
    loss: Callable[[Array, Array, Any, Any], Loss]
    """Of features [n, d], labels [n] or [n, C], the head, and the memory."""
    scores: Callable[[Array, Any, Any], Array]
    """Of features [n, d], the head and the memory: logits [n, C], the largest for the class that is
    told."""
    memory: Callable[[], Any] = tuple
    """What the run remembers beside its parameters, at first; part of its checkpoints."""
    after_epoch: Callable[[Any], tuple[Any, dict[str, Array]]] | None = None
    """From the memory after an epoch: the new memory, and numbers for the metrics."""


def train_accuracy(logits: Array, labels: Array) -> dict[str, Array]:
    """For the metrics: how many of the batch have their largest logit [n, C] at their label [n]."""
    right = jnp.argmax(logits, axis=1) == labels
    return {"train_accuracy": jnp.mean(right.astype(jnp.float32))}
