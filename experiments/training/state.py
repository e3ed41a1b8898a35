"""What training changes: parameters, statistics of normalisation, optimiser, step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from experiments.config import OptimizerConfig, TrainConfig
from experiments.errors import ConfigError
from experiments.models import build_backbone


class TrainState(NamedTuple):
    """Everything that a step reads and writes."""

    step: Array
    params: dict[str, Any]
    """`backbone` (the parameters of the Flax module) and `classifier` (`kernel` [d, C], `bias`)."""
    statistics: Any
    """The module's state beside its parameters: running means and variances."""
    opt_state: Any


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
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def build_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """SGD with momentum; weight decay on kernels alone, not on biases and normalisation."""

    def kernels(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=kernels),
        optax.sgd(learning_rate(config, steps), momentum=config.momentum, nesterov=config.nesterov),
    )


class Setup(NamedTuple):
    """What a configuration determines before any data is read."""

    graphdef: nnx.GraphDef
    num_features: int
    optimizer: optax.GradientTransformation
    state: TrainState


def initial_setup(
    config: TrainConfig,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    axis_name: str | None = None,
) -> Setup:
    """The model, the optimiser and the state at step 0, all functions of the configuration.

    Args:
      config: the run.
      image_shape: height, width, channels.
      num_classes: base classes C.
      axis_name: the mapped axis over which normalisation synchronises its statistics.
    """
    model = build_backbone(
        config.model, image_shape=image_shape, axis_name=axis_name, rngs=nnx.Rngs(config.seed)
    )
    optimizer = build_optimizer(config.optimizer, config.steps)
    graphdef, backbone, statistics = nnx.split(model, nnx.Param, ...)
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    shape = (model.num_features, num_classes)
    classifier = {
        "kernel": jax.nn.initializers.lecun_normal()(key, shape, jnp.float32),
        # The prior of a class. A constant bias leaves the softmax as it is; with zeros, binary
        # cross-entropy starts at C·log 2, and its first steps wreck the backbone.
        "bias": jnp.full(num_classes, -jnp.log(max(num_classes - 1, 1))),
    }
    params = {"backbone": backbone, "classifier": classifier}
    state = TrainState(jnp.zeros((), jnp.int32), params, statistics, optimizer.init(params))
    return Setup(graphdef, model.num_features, optimizer, state)
