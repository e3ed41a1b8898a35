"""What is computed from a training state: the next one, and what it makes of images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.core.config import DataConfig, OptimizerConfig
from experiments.core.errors import ConfigError, DivergedError
from experiments.core.processes import gather_rows
from experiments.core.protocol import ImageSet, ImageTable, Objective, Outputs, Photographs
from experiments.data.augment import augment, center_crops, mix_batch, normalize, sample_keys


class TrainState(NamedTuple):
    """Everything that a step reads and writes."""

    step: Array
    params: dict[str, Any]
    """`backbone` (the parameters of the Flax module) and `classifier` (the objective's head)."""
    statistics: Any  # The module's state beside its parameters: running means and variances.
    opt_state: Any
    objective_state: Any = ()  # See `Objective.init_state`.


class Batch(NamedTuple):
    """Stored images and their labels."""

    images: Any  # uint8 [n, h, w, c], or `Photographs`.
    labels: Any  # Integers [n], or [n, C] for a multi-label set.


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the step; a `ConfigError` unless it fits into `steps`."""
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
            f"{config.decay_steps}: only the schedule `step` has decay steps"
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

    def backbone(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "backbone", params)

    rate = learning_rate(config, steps)
    kernels: Any = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    how: Any = {"weight_decay": config.weight_decay, "mask": None if config.decay_all else kernels}
    if config.kind == "adamw":
        parts = [optax.adamw(rate, **how)]
    elif config.kind == "adam":
        parts = [optax.add_decayed_weights(**how), optax.adam(rate)]
    else:
        sgd = optax.sgd(rate, momentum=config.momentum, nesterov=config.nesterov)
        parts = [optax.add_decayed_weights(**how), sgd]
    if config.backbone_rate != 1:
        parts.append(optax.masked(optax.scale(config.backbone_rate), backbone))
    return optax.chain(*parts)


Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]


def build_step(
    graphdef: nnx.GraphDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    data: DataConfig,
    *,
    key: Array,
    axis_name: str | None,
) -> Step:
    """The step for one device's share of the batch, or with `axis_name` over all devices.

    The random numbers of a sample depend on `key` and on its position in the global batch, not on
    the device.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        keys = sample_keys(key, state.step, batch.labels.shape[0], axis_name)
        augment_keys, model_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
        images, labels = augment(batch.images, augment_keys, data), batch.labels
        mixed = None
        if data.mixup:
            # In place of a sample's position, the largest number: the key of the whole batch.
            whole = jax.random.fold_in(jax.random.fold_in(key, state.step), 2**32 - 1)
            mixed = mix_batch(images, labels, whole, data.mixup, axis_name=axis_name)
            images, labels = mixed.images, mixed.labels

        def loss_of(params):
            model = nnx.merge(graphdef, params["backbone"], state.statistics, copy=True)
            forward: Any = model
            features = forward(images, train=True, keys=model_keys, step=state.step)
            head = params["classifier"]
            loss = objective.loss(features, labels, head, state.objective_state)
            value = loss.value
            if mixed is not None and data.mixed_labels == "both":
                other = objective.loss(features, mixed.other_labels, head, state.objective_state)
                value = mixed.share * value + (1 - mixed.share) * other.value
            return value, (nnx.state(model, nnx.Not(nnx.Param)), loss.objective_state, loss.means)

        (loss, (statistics, objective_state, means)), gradients = jax.value_and_grad(
            loss_of, has_aux=True
        )(state.params)
        if axis_name is not None:
            gradients, means = mean_over_devices((gradients, means), axis_name)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, **means, "gradient_norm": optax.global_norm(gradients)}
        return TrainState(state.step + 1, params, statistics, opt_state, objective_state), metrics

    return step


def mean_over_devices(tree: Any, axis_name: str) -> Any:
    """`lax.pmean` of arrays of floating-point numbers.

    Compilers for GPUs and TPUs join small transfers; the one for CPUs sends every array by itself,
    which takes 0.2 to 2 ms between processes. There, the arrays travel as one vector.
    """

    def together(tree):
        vector, split = ravel_pytree(tree)
        return split(lax.pmean(vector, axis_name))

    return lax.platform_dependent(
        tree, cpu=together, default=lambda tree: lax.pmean(tree, axis_name)
    )


_EMBEDDED = 256  # Images of a device at a time.


def build_features(
    graphdef: Any, data: DataConfig
) -> Callable[[TrainState, ImageTable], np.ndarray]:
    """The features float32 [n, d] of images as a function of the state; it compiles once.

    With several processes, all of them call the function, each embeds its share of the images, and
    all receive all features. The last batch is filled up with copies of the last image. Raises a
    `DivergedError` where a feature is not finite.
    """
    devices = jax.local_devices()
    mesh = jax.make_mesh((len(devices),), ("batch",), (AxisType.Auto,), devices=devices)
    everywhere, spread = (NamedSharding(mesh, spec) for spec in (P(), P("batch")))
    of_all = len(devices) * jax.process_count()

    @jax.jit
    def embed(params, statistics, images):
        model = nnx.merge(graphdef, params, statistics, copy=True)
        return model(normalize(images, data), train=False)  # pyright: ignore[reportCallIssue]

    def features(state: TrainState, images: ImageTable) -> np.ndarray:
        backbone = jax.device_put((state.params["backbone"], state.statistics), everywhere)
        count, parts = len(images), []
        # A single device has batches of one size, so that it compiles once for all splits.
        rows = _EMBEDDED if of_all == 1 else min(_EMBEDDED, -(-count // of_all))
        share = rows * len(devices)
        for start in range(0, count, rows * of_all):
            first = start + share * jax.process_index()
            indices = np.minimum(np.arange(first, first + share), count - 1)
            part = embed(*backbone, jax.device_put(images[indices], spread))
            parts.append(gather_rows(np.asarray(part, np.float32))[: count - start])
        found = np.concatenate(parts)
        _check_finite(state, "feature", found)
        return found

    return features


def build_outputs(
    graphdef: Any, objective: Objective, data: DataConfig, class_counts: np.ndarray
) -> Callable[[TrainState, ImageSet], Outputs]:
    """The outputs of images as a function of the state, with features of `build_features`."""
    features_of, logits_of = build_features(graphdef, data), jax.jit(objective.logits)

    def outputs(state: TrainState, images: ImageSet) -> Outputs:
        features = features_of(state, images.images)
        head = state.params["classifier"]

        def logits() -> np.ndarray:
            values = np.asarray(logits_of(features, head, state.objective_state))
            _check_finite(state, "logit", values)
            return values

        def read(rows: Any) -> np.ndarray:
            found = images.images[np.asarray(rows)]
            if isinstance(found, Photographs):
                found = np.asarray(jnp.round(center_crops(found, data)).astype(jnp.uint8))
            return found

        own = class_counts, state.objective_state, head
        names = images.class_names, read, images.files
        return Outputs(features, images.labels, logits, *own, *names)

    return outputs


def _check_finite(state: TrainState, what: str, values: np.ndarray) -> None:
    """Raises a `DivergedError` unless all values are finite."""
    if not np.isfinite(values).all():
        raise DivergedError(int(state.step), f"a {what} of an image is not finite")
