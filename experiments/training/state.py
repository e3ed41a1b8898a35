"""What training changes: parameters, statistics, optimiser, the objective's memory, step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from experiments.config import OptimizerConfig, TrainConfig
from experiments.errors import ConfigError
from experiments.models import build_backbone
from experiments.training.objective import Objective, Problem
from experiments.training.weights import load_weights


class TrainState(NamedTuple):
    """Everything that a step reads and writes."""

    step: Array
    params: dict[str, Any]
    """`backbone` (the parameters of the Flax module) and `classifier` (those of the objective)."""
    statistics: Any
    """The module's state beside its parameters: running means and variances."""
    opt_state: Any
    memory: Any = ()
    """What the objective remembers."""


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the step.

    Raises:
      ConfigError: the schedule does not fit into `steps`.
    """
    if config.warmup_steps >= steps > 0:
        raise ConfigError(
            f"optimizer.warmup_steps = {config.warmup_steps} must be below steps = {steps}"
        )
    if any(step <= config.warmup_steps or step >= steps for step in config.decay_steps):
        raise ConfigError(
            f"optimizer.decay_steps = {config.decay_steps} must lie between "
            f"optimizer.warmup_steps = {config.warmup_steps} and steps = {steps}"
        )
    if (config.schedule == "step") != bool(config.decay_steps):
        raise ConfigError(
            f"optimizer.schedule = {config.schedule} does not go with optimizer.decay_steps = "
            f"{config.decay_steps}: `step` needs them, and `cosine` has none"
        )
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(config.learning_rate, steps - config.warmup_steps)
    else:
        after = optax.piecewise_constant_schedule(
            config.learning_rate,
            {step - config.warmup_steps: 0.1 for step in config.decay_steps},
        )
    if config.warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(
        config.warmup_from * config.learning_rate, config.learning_rate, config.warmup_steps
    )
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def build_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """SGD with momentum, or Adam.

    Weight decay is added to the gradient of kernels alone, not of biases and normalisation.
    """

    def kernels(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    def backbone(params):
        return {
            part: jax.tree.map(lambda _, part=part: part == "backbone", tree)
            for part, tree in params.items()
        }

    rate = learning_rate(config, steps)
    parts = [optax.add_decayed_weights(config.weight_decay, mask=kernels)]
    if config.kind == "adam":
        parts.append(optax.adam(rate))
    else:
        parts.append(optax.sgd(rate, momentum=config.momentum, nesterov=config.nesterov))
    if config.backbone_rate != 1:
        parts.append(optax.masked(optax.scale(config.backbone_rate), backbone))
    return optax.chain(*parts)


class Setup(NamedTuple):
    """What a configuration determines before any data is read."""

    graphdef: nnx.GraphDef
    num_features: int
    objective: Objective
    optimizer: optax.GradientTransformation
    state: TrainState


def initial_setup(
    config: TrainConfig,
    build_objective: Callable[[Any, Problem], Objective],
    *,
    image_shape: tuple[int, int, int],
    counts: np.ndarray,
    axis_name: str | None = None,
    with_weights: bool = False,
) -> Setup:
    """The model, the objective, the optimiser and the state at step 0.

    Args:
      config: the run.
      build_objective: that of the run's protocol.
      image_shape: height, width, channels of the images that the model sees.
      counts: training images of every class [C].
      axis_name: the mapped axis over which the batch is spread.
      with_weights: read the weights to start from, where the configuration names some.

    Raises:
      WeightsError: they cannot be read, or do not fit.
    """
    model = build_backbone(
        config.model, image_shape=image_shape, axis_name=axis_name, rngs=nnx.Rngs(config.seed)
    )
    objective = build_objective(config, Problem(model.num_features, counts, axis_name))
    optimizer = build_optimizer(config.optimizer, config.steps)
    graphdef, backbone, statistics = nnx.split(model, nnx.Param, ...)
    if with_weights and config.model.weights:
        backbone, statistics = load_weights(Path(config.model.weights), backbone, statistics)
    head = objective.head(jax.random.fold_in(jax.random.key(config.seed), 1))
    params = {"backbone": backbone, "classifier": head}
    state = TrainState(
        jnp.zeros((), jnp.int32), params, statistics, optimizer.init(params), objective.memory()
    )
    return Setup(graphdef, model.num_features, objective, optimizer, state)
