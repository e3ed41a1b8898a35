"""Retrieval: how many of the most similar images are of the same class."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxloss
from experiments.contracts import Metric

RETRIEVAL = [Metric("recall@1"), Metric("MAP@R")]
"""Of every image among all others of its split, by the cosine of their features."""


def retrieval(features: np.ndarray, labels: np.ndarray) -> list[float]:
    """The values of `RETRIEVAL` for features [n, d] and labels [n]."""
    found = _metrics(jnp.asarray(features), jnp.asarray(labels))
    return [float(found.recall[0]), float(found.map_at_r)]


@jax.jit
def _metrics(features, labels):
    return jaxloss.retrieval_metrics(features, labels, ks=(1,))
