"""The training state: parameters, statistics, optimiser state, objective state, step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from experiments.contracts import Objective
from experiments.storage import storage_path
from experiments.training.weights import load_weights


class TrainState(NamedTuple):
    """Everything that a step reads and writes."""

    step: Array
    params: dict[str, Any]
    """`backbone` (the parameters of the Flax module) and `classifier` (the objective's head)."""
    statistics: Any
    """The module's state beside its parameters: running means and variances."""
    opt_state: Any
    objective_state: Any = ()
    """See `Objective.init_state`."""


Build = Callable[..., TrainState]
"""Calls a function, its first argument, with the others, and returns the state that it builds."""


def initial_state(
    model: nnx.Module,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    weights: str = "",
    build: Build = lambda start, *arguments: start(*arguments),
) -> tuple[nnx.GraphDef, TrainState]:
    """The graph of the backbone and the state at step 0.

    The backbone starts from `weights`, as `load_weights` reads them; empty: as built.

    Args:
      model, objective, optimizer: What is trained.
      seed: Seed of the head.
      weights: See above.
      build: Calls the function that builds the head and the state, such as `jax.eval_shape`.

    Raises:
      WeightsError: The weights cannot be read, or do not fit.
    """
    graphdef, backbone, statistics = nnx.split(model, nnx.Param, ...)
    if weights:
        backbone, statistics = load_weights(storage_path(weights), backbone, statistics)

    def start(backbone: Any, statistics: Any, objective_state: Any) -> TrainState:
        head = objective.init_head(jax.random.fold_in(jax.random.key(seed), 1))
        params = {"backbone": backbone, "classifier": head}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            statistics=statistics,
            opt_state=optimizer.init(params),
            objective_state=objective_state,
        )

    return graphdef, build(start, backbone, statistics, objective.init_state())
