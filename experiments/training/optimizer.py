"""The optimiser and its schedule."""

from __future__ import annotations

import jax
import optax

from experiments.config import OptimizerConfig
from experiments.errors import ConfigError


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the step, in a run of `steps`.

    Raises:
      ConfigError: The schedule does not fit into `steps`.
    """
    if config.warmup_steps >= steps:
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
            f"optimizer.schedule = {config.schedule} does not fit optimizer.decay_steps = "
            f"{config.decay_steps}: the schedule `step` needs decay steps, `cosine` takes none"
        )
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(config.learning_rate, steps - config.warmup_steps)
    else:
        after = optax.piecewise_constant_schedule(
            config.learning_rate, {step - config.warmup_steps: 0.1 for step in config.decay_steps}
        )
    if config.warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(
        config.warmup_from * config.learning_rate, config.learning_rate, config.warmup_steps
    )
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def build_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """SGD with momentum or Adam, with weight decay in the gradient; or AdamW."""

    def kernels(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    def backbone(params):
        return {
            part: jax.tree.map(lambda _, part=part: part == "backbone", tree)
            for part, tree in params.items()
        }

    rate = learning_rate(config, steps)
    decayed = None if config.decay_all else kernels
    decay = optax.add_decayed_weights(config.weight_decay, mask=decayed)
    if config.kind == "adamw":
        parts = [optax.adamw(rate, weight_decay=config.weight_decay, mask=decayed)]
    elif config.kind == "adam":
        parts = [decay, optax.adam(rate)]
    else:
        sgd = optax.sgd(rate, momentum=config.momentum, nesterov=config.nesterov)
        parts = [decay, sgd]
    if config.backbone_rate != 1:
        parts.append(optax.masked(optax.scale(config.backbone_rate), backbone))
    return optax.chain(*parts)
