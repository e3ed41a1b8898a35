"""A run assembled from its configuration: data, model, objective and optimiser, ready to train.

Every part is built from its own section: the trainer gets parts, not the configuration. A run is a
`Plan` before any data is read, and `Parts` when it is ready to train.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from experiments.config import MOST, Folders, ParallelMode, TrainConfig, check_config
from experiments.contracts import ClassCounts, Objective, Problem, Protocol
from experiments.data.augment import check_augmentation, seen_shape
from experiments.data.pipeline import RecordImages
from experiments.data.sampling import batch_size_of, draw_batch, parse_strategy
from experiments.data.selection import labels_of
from experiments.datasets import lookup, pinned
from experiments.errors import ConfigError, nearest_path
from experiments.models import build_backbone
from experiments.processes import is_first
from experiments.protocols import build_protocol
from experiments.protocols.classification import SPLITS
from experiments.storage import check_local, storage_path
from experiments.trained_on import seen_in_training
from experiments.training import parallel
from experiments.training.loop import Parts
from experiments.training.run_directory import Validation
from experiments.training.step import (
    Batch,
    TrainState,
    build_optimizer,
    build_outputs,
    build_step,
    initial_state,
    learning_rate,
)
from experiments.training.weights import load_weights
from jaxloss.sampling import index_classes

_log = logging.getLogger(__name__)


class Plan(NamedTuple):
    """A run before any data is read."""

    config: TrainConfig
    protocol: Protocol
    image_shape: tuple[int, int, int]
    """Height, width and channels of the images that the model receives."""
    num_features: int


def plan_run(config: TrainConfig, *, num_devices: int | None = None, check: bool = True) -> Plan:
    """Plans a run for so many devices, by default those of all processes; touches no data.

    Raises a `ConfigError` where options are out of bounds or do not fit each other and the devices.
    Without `check`, as for a checkpoint, they are not checked.
    """
    if check:
        config = _with_data(config)
        check_config(config)
    protocol = build_protocol(config)
    if check:
        _check_options(config, protocol, num_devices)
    seen = seen_shape(lookup(config.data.name).image_shape, config.data)
    if config.report_last:
        last = [metric._replace(name=of_last(metric.name)) for metric in protocol.metrics]
        protocol = protocol._replace(metrics=[*protocol.metrics, *last])
    num_features = nnx.eval_shape(
        lambda: build_backbone(config.model, image_shape=seen, axis_name=None, rngs=nnx.Rngs(0))
    ).num_features
    if check:
        protocol.check_options(num_features)
    return Plan(config, protocol, seen, num_features)


def _with_data(config: TrainConfig) -> TrainConfig:
    """The configuration with what depends on the content of a folder of one's own."""
    data, spec = config.data, lookup(config.data.name)
    names = {option: vars(data).get(option) for option in ("name", "novel", "base_test")}
    changed: dict[str, Any] = {option: pinned(name) for option, name in names.items() if name}
    measured = {"mean": spec.mean, "std": spec.std}
    changed |= {option: value for option, value in measured.items() if not vars(data)[option]}
    return dataclasses.replace(config, data=dataclasses.replace(data, **changed))


def _check_options(config: TrainConfig, protocol: Protocol, num_devices: int | None) -> None:
    """Checks what needs no network. Arguments as in `plan_run`."""
    data, sampling, model = config.data, config.sampling, config.model
    if data.mixup and protocol.compares_samples:
        raise ConfigError(
            f"data.mixup = {data.mixup} needs a loss of single samples, and {config.loss.name} "
            "compares samples with each other; set data.mixup = 0"
        )
    learning_rate(config.optimizer, config.steps)  # Raises if the schedule does not fit.
    batch_size = batch_size_of(sampling.strategy, sampling.batch_size)
    if batch_size > MOST:
        raise ConfigError(f"sampling.strategy must have at most {MOST} images in a batch")
    parallel.check_batch_size(batch_size, num_devices or jax.device_count())
    if not model.weights and config.optimizer.backbone_rate < 1:
        raise ConfigError(
            f"optimizer.backbone_rate = {config.optimizer.backbone_rate} is for a pretrained "
            "backbone: set model.weights, or set optimizer.backbone_rate = 1 to train from scratch"
        )
    if model.weights:
        path = storage_path(model.weights, "model.weights")
        if not path.exists():
            hint = nearest_path(path) or "set a file *.safetensors or a folder of a run"
            raise ConfigError(f"model.weights = {path} does not exist; {hint}")
        if path.is_file():
            check_local(path, "model.weights, a file,")
            if model.dim or model.projection != "linear-norm":
                raise ConfigError(
                    f"the file of model.weights has a backbone alone, and model.dim = {model.dim} "
                    f"with model.projection = {model.projection} adds a layer; set model.dim = 0 "
                    "and model.projection = linear-norm"
                )
    check_augmentation(data, lookup(data.name).image_shape[-1])


def of_last(name: str) -> str:
    """The name of a metric of the last checkpoint, beside that of the best."""
    return f"{name} (last)"


def prepare_and_count(plan: Plan, folders: Folders) -> ClassCounts:
    """The number of images of every class, for every available split; prepares the data if needed.

    Reads no image of prepared data. Raises a `ConfigError` where the data does not fit the run.
    """
    config, protocol = plan.config, plan.protocol
    parts, batch_size = protocol.parts(folders), config.sampling.batch_size
    counts_by_split = {split: part.counts() for split, part in parts.items()}
    training_counts = counts_by_split[protocol.splits[0]]
    multi_label = lookup(config.data.name).multi_label
    size = parts[protocol.splits[0]].size if multi_label else int(training_counts.sum())
    if batch_size > size and parse_strategy(config.sampling.strategy) is None:
        raise ConfigError(
            f"sampling.batch_size = {batch_size} must be at most {size}, the number of training "
            f"images of {config.data.name}; set --sampling.batch-size {size}, or add images"
        )
    if not multi_label:  # Else, images are not drawn by class.
        index = index_classes(labels_of(training_counts))
        draw_batch(  # Raises if the data cannot give a batch.
            index, config.sampling.strategy, batch_size, seed=config.seed, step=0
        )
        if ways_shots := parse_strategy(config.sampling.strategy):
            ways, shots = ways_shots
            large = int((training_counts >= shots).sum())
            if large < len(training_counts) and is_first():
                _log.warning(
                    "batches of %dx%d draw from %d of %d training classes, those with at least %d "
                    "images",
                    *(ways, shots, large, len(training_counts), shots),
                )
    protocol.check_data(plan.num_features, counts_by_split)
    return counts_by_split


def build_learner(
    plan: Plan,
    class_counts: np.ndarray,
    steps_per_epoch: int,
    *,
    axis_name: str | None = None,
    mesh: Mesh | None = None,
    abstract: bool = False,
) -> tuple[nnx.GraphDef, Objective, optax.GradientTransformation, TrainState]:
    """What a run trains on classes with so many training images, int64 [C], and its first state.

    For `axis_name` and `mesh` see `Problem`. If `abstract`, the state has `jax.ShapeDtypeStruct`s
    in place of arrays, for a checkpoint to fill; the backbone is initialised all the same.
    """
    config = plan.config
    model = build_backbone(
        config.model, image_shape=plan.image_shape, axis_name=axis_name, rngs=nnx.Rngs(config.seed)
    )
    problem = Problem(
        num_features=plan.num_features,
        class_counts=class_counts,
        axis_name=axis_name,
        mesh=mesh,
        num_epochs=config.steps // steps_per_epoch,
        seed=config.seed,
    )
    objective = plan.protocol.objective(problem)
    optimizer = build_optimizer(config.optimizer, config.steps)
    graphdef, state = initial_state(
        model, objective, optimizer, seed=config.seed, abstract=abstract
    )
    return graphdef, objective, optimizer, state


def assemble(plan: Plan, folders: Folders, *, mode: ParallelMode = "pmap") -> Parts:
    """Builds what the training loop runs, spread over all devices."""
    config, protocol, sampling = plan.config, plan.protocol, plan.config.sampling
    mesh = parallel.device_mesh() if mode == "jit" else None
    axis_name = parallel.axis_name(mode)
    if is_first():  # Before the checks of the data, which it may explain.
        for line in lookup(config.data.name).remarks:
            _log.warning("data: %s", line)
    counts_by_split = prepare_and_count(plan, folders)
    trained_on, held_out, _ = protocol.splits
    training_counts, images = counts_by_split[trained_on], protocol.load(folders, trained_on)
    batch_size = batch_size_of(sampling.strategy, sampling.batch_size)
    steps_per_epoch = len(images.labels) // batch_size
    graphdef, objective, optimizer, state = build_learner(
        plan, training_counts, steps_per_epoch, axis_name=axis_name, mesh=mesh
    )
    own, names = objective.classifier_state, "\n".join(images.class_names)
    classes = hashlib.sha256(names.encode()).hexdigest()[:24]
    origins: list[str] = []
    if config.model.weights:
        path = storage_path(config.model.weights)
        state, origins = load_weights(path, state, own, classes, config.data.name)
        if line := _test_images_seen(plan):
            origins += [] if line in origins else [line]
            if is_first():
                _log.warning("%s", line)
    train_step = build_step(
        graphdef,
        objective,
        optimizer,
        config.data,
        key=jax.random.fold_in(jax.random.key(config.seed), 2),
        axis_name=axis_name,
    )
    multi_label = images.labels.ndim == 2
    index = len(images.labels) if multi_label else index_classes(images.labels)

    def read(step: int) -> Batch:
        drawn = draw_batch(index, sampling.strategy, batch_size, seed=config.seed, step=step)
        rows = np.split(drawn, jax.process_count())[jax.process_index()]
        return Batch(images.images[rows], images.labels[rows])

    outputs_of = build_outputs(graphdef, objective, config.data, training_counts)
    images_held_out = protocol.load(folders, held_out) if held_out in counts_by_split else None

    def validate(state: TrainState) -> Validation:
        assert images_held_out is not None
        outputs = outputs_of(state, images_held_out)
        return Validation(protocol.validate(outputs), protocol.diagnose(outputs))

    return Parts(
        initial=state,
        parallel=parallel.data_parallel(mode, train_step, mesh),
        read=read,
        ahead=isinstance(images.images, RecordImages),
        images_per_step=batch_size,
        steps_per_epoch=steps_per_epoch,
        after_epoch=objective.after_epoch,
        validate=validate if images_held_out is not None else None,
        class_counts=training_counts,
        classes=classes,
        classifier=own is not None,
        origins=origins,
    )


def _test_images_seen(plan: Plan) -> str:
    """A sentence where the runs behind the weights may have been trained on test images."""
    data, split = plan.config.data, vars(plan.config.data).get("class_split", "all")
    tests = plan.protocol.splits == SPLITS
    if not tests or not (seen := seen_in_training(plan.config, data.name, split)):
        return ""
    return f"Weights: trained on {seen}; accuracy on test images may be too high."
