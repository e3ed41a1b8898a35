"""What a trained state computes for images: features, and logits on request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from experiments.config import DataConfig
from experiments.contracts import ImageSet, ImageTable, Objective, Outputs
from experiments.errors import DivergedError
from experiments.training.state import TrainState
from experiments.training.step import build_embed


def extract_features(
    embed: Callable[[Any], Array], images: ImageTable, *, batch_size: int = 256
) -> np.ndarray:
    """The features of every image.

    The last batch is filled up with copies of the last image, so that `embed` compiles once.

    Args:
      embed: Maps uint8 [batch_size, h, w, c] to features [batch_size, d]; jitted by the caller.
      images: uint8 [n, h, w, c].
      batch_size: Images per call.

    Returns:
      float32 [n, d].

    Raises:
      ValueError: There is no image, or `embed` does not return a row per image.
    """
    count = len(images)
    if count == 0:
        raise ValueError("there is no image to extract features from")
    parts = []
    for start in range(0, count, batch_size):
        indices = np.minimum(np.arange(start, start + batch_size), count - 1)
        part = np.asarray(embed(np.asarray(images[indices])), np.float32)
        if part.ndim != 2 or len(part) != batch_size:
            raise ValueError(f"embed must return [{batch_size}, d], got {list(part.shape)}")
        parts.append(part[: count - start])
    return np.concatenate(parts)


def build_outputs(
    graphdef: Any, objective: Objective, data: DataConfig, class_counts: np.ndarray
) -> Callable[[TrainState, ImageSet], Outputs]:
    """The outputs of images as a function of the state; it compiles once.

    The function raises a `DivergedError` where a feature or a logit is not finite.
    """
    embed = build_embed(graphdef, data)
    logits_of = jax.jit(objective.logits)

    def outputs(state: TrainState, images: ImageSet) -> Outputs:
        features = extract_features(partial(embed, state), images.images)
        check_finite(state, "feature", features)

        head = state.params["classifier"]

        def logits() -> np.ndarray:
            values = np.asarray(logits_of(features, head, state.objective_state))
            check_finite(state, "logit", values)
            return values

        return Outputs(features, images.labels, logits, class_counts, state.objective_state, head)

    return outputs


def check_finite(state: TrainState, what: str, values: np.ndarray) -> None:
    """Raises a `DivergedError` unless all values are finite."""
    if not np.isfinite(values).all():
        raise DivergedError(int(state.step), f"a {what} of an image is not finite")
