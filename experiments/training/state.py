"""The training state: parameters, statistics, optimiser state, objective state, step."""

from __future__ import annotations

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


def initial_state(
    model: nnx.Module,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    weights: str = "",
) -> tuple[nnx.GraphDef, TrainState]:
    """The graph of the backbone and the state at step 0.

    The backbone starts from `weights`, as `load_weights` reads them; empty: as built.

    Raises:
      WeightsError: The weights cannot be read, or do not fit.
    """
    graphdef, backbone, statistics = nnx.split(model, nnx.Param, ...)
    if weights:
        backbone, statistics = load_weights(storage_path(weights), backbone, statistics)
    head = objective.init_head(jax.random.fold_in(jax.random.key(seed), 1))
    params = {"backbone": backbone, "classifier": head}
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        statistics=statistics,
        opt_state=optimizer.init(params),
        objective_state=objective.init_state(),
    )
    return graphdef, state
