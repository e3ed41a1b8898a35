"""What a trained state makes of images: features once, scores where they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from experiments.config import DataConfig
from experiments.contracts import ImageSet
from experiments.errors import DivergedError
from experiments.evaluation.few_shot import extract_features
from experiments.protocols.protocol import Outputs
from experiments.training.state import Setup, TrainState
from experiments.training.step import build_embed


def build_outputs(
    setup: Setup, data: DataConfig, counts: np.ndarray
) -> Callable[[TrainState, ImageSet], Outputs]:
    """The outputs of images, as a function of the state; it compiles once.

    Args:
      setup: the model and the objective.
      data: how images are normalised.
      counts: training images of every class.

    Returns:
      The function; it raises a `DivergedError` where a feature or a score is not finite.
    """
    embed = build_embed(setup.graphdef, data)
    score = jax.jit(setup.objective.scores)

    def outputs(state: TrainState, images: ImageSet) -> Outputs:
        features = extract_features(partial(embed, state), images.images)
        _check_finite(state, "feature", features)

        def scores() -> np.ndarray:
            values = np.asarray(score(features, state.params["classifier"], state.memory))
            _check_finite(state, "score", values)
            return values

        return Outputs(features, images.labels, scores, counts, state.memory)

    return outputs


def _check_finite(state: TrainState, what: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise DivergedError(int(state.step), f"a {what} of an image is not finite")
