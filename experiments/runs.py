"""One run: assembled from its configuration, trained, evaluated and reported.

Every part, such as data, sampler, model, optimiser and protocol, is built from its own section.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jaxloss
from experiments.config import (
    Folders,
    ParallelMode,
    TrainConfig,
    batch_size_of,
    by_name,
    check_config,
    check_data_options,
    evaluation_sections,
    option_types,
    replace_option,
)
from experiments.contracts import ImageSet, Objective, Outputs, Problem, Protocol
from experiments.data.augment import seen_shape
from experiments.data.builders import image_shape, is_multi_label
from experiments.data.pipeline import KeptImages, RecordImages, batches, default_memory_limit
from experiments.data.sampling import draw_batch, index_classes
from experiments.errors import ConfigError, DivergedError
from experiments.models import build_backbone
from experiments.processes import agree, is_first, on_first
from experiments.protocols import build_protocol, config_from_dict, config_to_dict
from experiments.reporting.run import EPISODES, write_run_report
from experiments.storage import is_remote, storage_path
from experiments.training import parallel
from experiments.training.checkpoints import (
    CHECKPOINTS_FOLDER,
    Checkpoints,
    checkpoints_folder,
)
from experiments.training.loop import Intervals, Parts, train
from experiments.training.optimizer import build_optimizer, learning_rate
from experiments.training.outputs import build_outputs
from experiments.training.recorder import Validation
from experiments.training.run_directory import claim_run_directory
from experiments.training.state import TrainState, initial_state
from experiments.training.step import Batch, build_step

logger = logging.getLogger(__name__)


class Plan(NamedTuple):
    """A run before any data is read."""

    config: TrainConfig
    protocol: Protocol
    image_shape: tuple[int, int, int]
    """Height, width and channels of the images that the model receives."""
    num_features: int


def plan_run(config: TrainConfig, *, num_devices: int | None = None) -> Plan:
    """Plans a run whose options fit each other and the devices; touches no data.

    Args:
      config: The options.
      num_devices: Of the machines that will train it. None: those of all processes.

    Raises:
      ConfigError: A value is out of bounds, or does not fit the others or the devices.
    """
    check_config(config)
    sampling, model = config.sampling, config.model
    batch_size = batch_size_of(sampling.strategy, sampling.batch_size)
    check_data_options(config.data, image_shape(config.data.name)[-1])
    parallel.check_batch_size(batch_size, num_devices or jax.device_count())
    learning_rate(config.optimizer, config.steps)
    if model.weights and not storage_path(model.weights, "model.weights").exists():
        raise ConfigError(
            f"model.weights = {model.weights} does not exist; set a file *.safetensors or a run "
            "directory"
        )
    if model.weights and (model.dim or model.projection != "linear-norm"):
        raise ConfigError(
            f"model.weights are those of a backbone alone, and model.dim = {model.dim} with "
            f"model.projection = {model.projection} adds a layer; set model.dim = 0 and "
            "model.projection = linear-norm"
        )
    plan = _plan(config)
    plan.protocol.check_options(plan.num_features)
    return plan


def _plan(config: TrainConfig) -> Plan:
    seen = seen_shape(image_shape(config.data.name), config.data)
    num_features = nnx.eval_shape(
        lambda: build_backbone(config.model, image_shape=seen, axis_name=None, rngs=nnx.Rngs(0))
    ).num_features
    return Plan(config, _protocol(config), seen, num_features)


def _protocol(config: TrainConfig) -> Protocol:
    """The protocol of a run, with the metrics of its last checkpoint where they are reported."""
    protocol = build_protocol(config)
    if not config.report_last:
        return protocol
    last = [metric._replace(name=_of_last(metric.name)) for metric in protocol.metrics]
    return protocol._replace(metrics=[*protocol.metrics, *last])


def _of_last(name: str) -> str:
    return f"{name} (last)"


def check_data(plan: Plan, folders: Folders) -> Mapping[str, np.ndarray]:
    """Checks that the data fits a run; prepares the data set if needed and reads no image.

    Returns:
      For every available split, the number of images of every class.

    Raises:
      ConfigError: The configuration does not fit the data.
      MissingArchiveError: The data set's archives are missing.
    """
    config, protocol = plan.config, plan.protocol
    class_counts = protocol.class_counts(folders)
    of_training = class_counts[protocol.splits[0]]
    # The images of a multi-label set cannot be counted by class: the protocol checks the batch.
    if not is_multi_label(config.data.name):
        index = index_classes(np.repeat(np.arange(len(of_training)), of_training))
        draw_batch(
            index, config.sampling.strategy, config.sampling.batch_size, seed=config.seed, step=0
        )
    protocol.check_data(plan.num_features, class_counts)
    return class_counts


class Network(NamedTuple):
    """The model, the objective and the optimiser of a run, with the state at step 0."""

    graphdef: nnx.GraphDef
    objective: Objective
    optimizer: optax.GradientTransformation
    state: TrainState


def build_network(
    plan: Plan,
    class_counts: np.ndarray,
    steps_per_epoch: int,
    *,
    axis_name: str | None = None,
    mesh: Mesh | None = None,
    pretrained: bool = False,
    abstract: bool = False,
) -> Network:
    """Builds what a run trains.

    Args:
      plan: The run.
      class_counts: int64 [C], training images of every class.
      steps_per_epoch: For the number of epochs.
      axis_name: See `Problem.axis_name`.
      mesh: The devices of a sharded jit.
      pretrained: The backbone starts from the weights that the configuration names.
      abstract: The state is `jax.ShapeDtypeStruct`s, so that it takes no memory.

    Raises:
      ConfigError: The loss needs the whole head on every device, and the mesh spreads it.
      WeightsError: The weights cannot be read, or do not fit.
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
    build = {}
    if mesh is not None and parallel.spreads_classes(mesh):
        if not objective.class_axes:
            raise ConfigError(
                f"protocol {config.protocol} with loss.name = {config.loss.name} needs the whole "
                f"classifier on every device; choose --mesh {mesh.size}x1, or the preset "
                "icons-instances"
            )
        build = {"build": parallel.spread_over(mesh, objective.class_axes, abstract=abstract)}
    elif abstract:
        build = {"build": jax.eval_shape}
    graphdef, state = initial_state(
        model,
        objective,
        optimizer,
        seed=config.seed,
        weights=config.model.weights if pretrained else "",
        **build,
    )
    return Network(graphdef, objective, optimizer, state)


def train_run(
    plan: Plan,
    directory: Path,
    folders: Folders,
    *,
    mode: ParallelMode = "pmap",
    mesh_shape: str = "",
    stuck_after: float = 0,
) -> float:
    """Trains a run to its end, from its newest checkpoint if there is one.

    The plan and the machine determine every bit of the result. With several processes, all of them
    call this with the same arguments, and each reads its shard of every batch. The first one alone
    reads and writes the directory.

    Args:
      plan: The run.
      directory: The run directory.
      folders: Where data is stored.
      mode: How the batch is spread over devices.
      mesh_shape: How the devices are arranged, as in `parallel.device_mesh`.
      stuck_after: Minutes without a step after which the process ends; 0: never.

    Returns:
      Seconds spent on the run, over all calls that trained it.

    Raises:
      ConfigError: The configuration does not fit the data or the mode; nothing is written.
      ConfigMismatchError: The directory belongs to a run of another configuration.
      DivergedError, Interrupted: See `experiments.training.loop.train`.
    """
    config, protocol = plan.config, plan.protocol
    protocol.check_mode(mode)
    mesh = parallel.device_mesh(mode, mesh_shape) if mode == "jit" or mesh_shape else None
    if mesh is not None and parallel.spreads_classes(mesh) and is_remote(directory):
        raise ConfigError(
            f"--mesh {mesh_shape} writes the classes of each device by itself, and cannot write to "
            f"{directory}; choose a directory on a disk that all processes see"
        )
    class_counts = check_data(plan, folders)
    images = protocol.load(folders, protocol.splits[0])
    of_training = class_counts[protocol.splits[0]]
    batch_size = batch_size_of(config.sampling.strategy, config.sampling.batch_size)
    steps_per_epoch = len(images.labels) // batch_size
    axis_name = parallel.axis_name(mode)
    network = build_network(
        plan, of_training, steps_per_epoch, axis_name=axis_name, mesh=mesh, pretrained=True
    )
    step = build_step(
        network.graphdef,
        network.objective,
        network.optimizer,
        config.data,
        key=jax.random.fold_in(jax.random.key(config.seed), 2),
        axis_name=axis_name,
    )
    parts = Parts(
        initial=network.state,
        parallel=parallel.data_parallel(mode, step, network.state, mesh),
        batches=_batches(images, config, batch_size),
        images_per_step=batch_size,
        steps_per_epoch=steps_per_epoch,
        after_epoch=network.objective.after_epoch,
        validate=_validation(plan, folders, network, class_counts),
        num_classes=len(of_training),
    )
    on_first(lambda: claim_run_directory(directory, config_to_dict(config)))
    if is_first() and config.optimizer.decay_steps:
        print(_schedule_in_epochs(config, steps_per_epoch))
    return train(
        parts,
        directory,
        Intervals(config.steps, config.validate_every, config.log_every),
        name=config.loss.name,
        meta={
            "config": config_to_dict(config),
            "class_counts": of_training.tolist(),
            "steps_per_epoch": steps_per_epoch,
            "code": code_version(),
        },
        stuck_after=stuck_after,
    )


def _batches(
    images: ImageSet, config: TrainConfig, batch_size: int
) -> Callable[[int], Iterator[Batch]]:
    """This process's batches from a step on: functions of seed and step alone."""
    multi_label = images.labels.ndim == 2
    index = len(images.labels) if multi_label else index_classes(images.labels)

    def read(step: int) -> Batch:
        drawn = draw_batch(index, config.sampling.strategy, batch_size, seed=config.seed, step=step)
        rows = np.split(drawn, jax.process_count())[jax.process_index()]
        return Batch(images.images[rows], images.labels[rows])

    ahead = isinstance(images.images, RecordImages)
    return lambda first: batches(read, first, config.steps, ahead=ahead)


def _validation(
    plan: Plan, folders: Folders, network: Network, class_counts: Mapping[str, np.ndarray]
) -> Callable[[TrainState], Validation] | None:
    trained_on, held_out, _ = plan.protocol.splits
    if held_out not in class_counts:
        return None
    images = _load_for_evaluation(plan.protocol, folders, held_out)
    outputs = build_outputs(
        network.graphdef, network.objective, plan.config.data, class_counts[trained_on]
    )

    def validate(state: TrainState) -> Validation:
        found = outputs(state, images)
        return Validation(plan.protocol.validate(found), plan.protocol.diagnose(found))

    return validate


def _load_for_evaluation(protocol: Protocol, folders: Folders, split: str) -> ImageSet:
    """The images of a split. Each of several processes reads its share of them only."""
    if jax.process_count() == 1:
        return protocol.load(folders, split)
    images = protocol.load(folders, split, memory_limit=0)
    if np.prod(images.images.shape) // jax.process_count() > default_memory_limit():
        return images
    return dataclasses.replace(images, images=KeptImages(images.images))


def _schedule_in_epochs(config: TrainConfig, steps_per_epoch: int) -> str:
    """The schedule in the units of papers: steps that fit a data set do not fit a subset of it."""
    drops = ", ".join(f"{step / steps_per_epoch:.4g}" for step in config.optimizer.decay_steps)
    return (
        f"An epoch is {steps_per_epoch:,} steps: the run has {config.steps / steps_per_epoch:.4g} "
        f"epochs, and its learning rate is divided by ten after epochs {drops}."
    )


class RestoredRun(NamedTuple):
    """A checkpoint with all that is needed to use it."""

    plan: Plan
    network: Network
    state: TrainState
    step: int
    class_counts: np.ndarray
    """int64 [C], training images of every class."""
    validation: float | None
    """What the best checkpoint is chosen by."""
    notes: list[str]
    """Sentences for the report."""


class _Stored(NamedTuple):
    """What is read from a checkpoint."""

    step: int
    meta: dict[str, Any]
    leaves: list[np.ndarray]
    validation: float | None


def restore_run(path: Path, which: str = "best") -> RestoredRun:
    """A checkpoint of a run, with the configuration that the checkpoint stores.

    With several processes, all of them call this, and the first one reads the files.

    Args:
      path: A run directory, or its folder of checkpoints.
      which: `best` by validation (the latest where there was none), `latest`, or the number of a
        step. Where the best or the latest is damaged, the next one is taken, and a note says
        so.

    Raises:
      CheckpointError: There is no such checkpoint, or none is intact.
      ConfigError: `which` is none of these.
    """
    built: list[tuple[Plan, Network, np.ndarray]] = []

    def read() -> tuple[_Stored, list[str]]:
        with Checkpoints(checkpoints_folder(path), read_only=True) as checkpoints:

            def read_step(step: int) -> _Stored:
                meta = checkpoints.meta(step)
                built[:] = [_build_stored(meta)]
                restored = checkpoints.restore(built[0][1].state, step)
                leaves = jax.tree.leaves(restored.state)
                return _Stored(step, meta, leaves, checkpoints.accuracy(step))

            if which.isdecimal():
                return read_step(int(which)), []
            stored, damaged = checkpoints.read_intact(read_step, best=which == "best")
        return stored, [
            f"{error}; the checkpoint of step {stored.step} is used instead." for error in damaged
        ]

    if not which.isdecimal() and which not in ("best", "latest"):
        raise ConfigError(f"checkpoint must be best, latest or the number of a step, got {which!r}")
    stored, notes = on_first(read)
    plan, network, class_counts = built[0] if built else _build_stored(stored.meta)
    state = jax.tree.unflatten(jax.tree.structure(network.state), stored.leaves)
    code = stored.meta["code"]
    if code != code_version():
        notes.append(f"Trained with jaxloss {code['version']}, commit {code['commit']}.")
    return RestoredRun(plan, network, state, stored.step, class_counts, stored.validation, notes)


def _build_stored(meta: Mapping[str, Any]) -> tuple[Plan, Network, np.ndarray]:
    plan = _plan(config_from_dict(meta["config"]))
    class_counts = np.array(meta["class_counts"], np.int64)
    network = build_network(plan, class_counts, meta["steps_per_epoch"], abstract=True)
    return plan, network, class_counts


def config_of_run(path: Path) -> TrainConfig:
    """The configuration that the newest intact checkpoint of a run stores.

    Raises:
      CheckpointError: There is no run at the path, or no checkpoint is intact.
      ConfigError: The configuration is not one of this version.
    """
    with Checkpoints(checkpoints_folder(path), read_only=True) as checkpoints:
        meta, _ = checkpoints.read_intact(checkpoints.meta)
    return config_from_dict(meta["config"])


def evaluate_run(
    path: Path,
    folders: Folders,
    *,
    split: str | None = None,
    which: str = "best",
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Protocol, dict[str, Any]]:
    """Evaluates a checkpoint as its protocol does.

    Args:
      path, which: The run and its checkpoint, as in `restore_run`.
      folders, split, overrides: As in `evaluation_of`, the function that it returns.

    Returns:
      The protocol, and the report as JSON types: that of `describe_run`, and `num_features`,
      `split`, `step`, `validation`, `notes` and the results of the protocol.

    Raises:
      CheckpointError: There is no such checkpoint, or none is intact.
      ConfigError: There is no such split, or it cannot be evaluated so.
      DivergedError: The features are not finite.
    """
    return evaluation_of(restore_run(path, which), folders)(split, overrides or {})


Evaluation = Callable[[str | None, Mapping[str, Any]], tuple[Protocol, dict[str, Any]]]
"""From a split, and values of evaluation options by name, what `evaluate_run` returns."""


def evaluation_of(run: RestoredRun, folders: Folders) -> Evaluation:
    """Evaluates a checkpoint, any number of times; the features of a split are computed once.

    Args:
      run: The checkpoint.
      folders: Where data is stored.

    Returns:
      A function of a split (None: the protocol's split for evaluation), and of values that replace
      those of the run, by option, such as `evaluation.episodes`.
    """
    outputs_of = build_outputs(
        run.network.graphdef, run.network.objective, run.plan.config.data, run.class_counts
    )

    @cache
    def outputs(split: str) -> Outputs:
        return outputs_of(run.state, _load_for_evaluation(run.plan.protocol, folders, split))

    def evaluate(
        split: str | None, overrides: Mapping[str, Any]
    ) -> tuple[Protocol, dict[str, Any]]:
        config = with_evaluation(run.plan.config, overrides)
        protocol = build_protocol(config)
        split = split or protocol.splits[-1]
        if split not in protocol.splits:
            raise ConfigError(
                f"protocol {config.protocol} has no split {split!r}; it has "
                f"{', '.join(protocol.splits)}"
            )
        validation = run.plan.protocol.validation.measured(run.validation)
        return protocol, {
            **describe_run(config, protocol),
            "num_features": run.plan.num_features,
            "split": split,
            "step": run.step,
            "validation": None if run.validation is None else validation,
            "notes": run.notes,
            **protocol.evaluate(split, outputs),
        }

    return evaluate


def with_evaluation(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """A configuration with other values of evaluation options.

    Raises:
      ConfigError: An option is not one of the evaluation, or a value is out of bounds.
    """
    sections = evaluation_sections(config)
    known = [
        f"{name}.{option}" for name, section in sections.items() for option in option_types(section)
    ]
    if unknown := sorted(overrides.keys() - {*known}):
        raise ConfigError(
            f"the evaluation of protocol {config.protocol} has no {', '.join(unknown)}; "
            f"it has {', '.join(known) or 'no options'}"
        )
    for option, value in overrides.items():
        config = replace_option(config, option, value)
    check_config(config)
    return config


def run_directory(path: Path) -> Path:
    """The directory of the run that a path names: the run directory, or its checkpoints folder."""
    inside = path.resolve().name == CHECKPOINTS_FOLDER and checkpoints_folder(path) == path
    return path.resolve().parent if inside else path


def describe_run(config: TrainConfig, protocol: Protocol) -> dict[str, Any]:
    """What a report states of a run beside its results, as JSON types."""
    return {
        "protocol": config.protocol,
        "preset": config.preset,
        "loss": config.loss.name,
        "sampling": config.sampling.strategy,
        "seed": config.seed,
        "data": config.data.name,
        "weights": config.model.weights,
        **code_version(),
        **protocol.description,
    }


def written_by_this_code(description: dict[str, Any]) -> bool:
    """Whether the code that described a run is the one that runs."""
    return code_version().items() <= description.items()


@cache
def code_version() -> dict[str, str | None]:
    """The version of the code, and its git commit if it runs from a checkout."""
    git = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    try:
        output = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        output = ""
    return {"version": jaxloss.__version__, "commit": output or None}


def complete_run(
    plan: Plan,
    directory: Path,
    folders: Folders,
    *,
    command: str,
    mode: ParallelMode = "pmap",
    mesh_shape: str = "",
    stuck_after: float = 0,
) -> dict[str, Any]:
    """Trains one run to its end, evaluates it and writes its report.

    The report of a finished run is read instead. A run that diverges is finished, too: its report
    has no metrics, and states under `diverged` what happened. With several processes, all of them
    call this, and the first one alone reads and writes the directory.

    Raises:
      ConfigError: Another process of the run has another configuration, mode or version.
      ConfigMismatchError: The directory belongs to a run of another configuration.
    """
    config = plan.config
    agree("options or versions", _identity(config, mode, mesh_shape))

    def finished() -> dict[str, Any] | None:
        path = directory / "report.json"
        if path.exists() and claim_run_directory(directory, config_to_dict(config)):
            return read_report(path)
        return None

    if (report := on_first(finished)) is not None:
        return report
    protocol = plan.protocol
    try:
        seconds = train_run(
            plan,
            directory,
            folders,
            mode=mode,
            mesh_shape=mesh_shape,
            stuck_after=stuck_after,
        )
        protocol, report = evaluate_run(directory, folders)
        report |= {"seconds": seconds}
        if config.report_last:
            report = _with_last(report, directory, folders)
    except DivergedError as error:
        report = describe_run(config, protocol) | {
            "split": protocol.splits[-1],
            "step": error.step,
            "metrics": [],
            "validation": None,
            "diverged": str(error),
        }
    report["command"] = command
    on_first(partial(write_report, directory, protocol, report))
    # As a finished run is read: `read_episodes` has the accuracies of single episodes.
    report.pop("episodes", None)
    return report


def _identity(config: TrainConfig, mode: ParallelMode, mesh_shape: str) -> dict[str, Any]:
    """What the processes of a run must have in common, by name."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        **by_name(config_to_dict(config)),
        "parallel": mode,
        "mesh": mesh_shape,
        "local devices": f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}",
        **{f"version of {name}": metadata.version(name) for name in packages},
        **{f"jaxloss {key}": value for key, value in code_version().items()},
    }


def _with_last(report: dict[str, Any], directory: Path, folders: Folders) -> dict[str, Any]:
    """The report of the best checkpoint, with the results of the last one under `last`.

    The metrics of the last checkpoint follow those of the best, with names of their own.
    """
    run = restore_run(directory, "latest")
    last = report if run.step == report["step"] else evaluation_of(run, folders)(None, {})[1]
    metrics = [metric | {"name": _of_last(metric["name"])} for metric in last["metrics"]]
    with_last = report | {"metrics": [*report["metrics"], *metrics], "last": dict(last)}
    if (episodes := with_last["last"].pop("episodes", None)) is not None:
        of_last = {_of_last(name): accuracies for name, accuracies in episodes.items()}
        with_last["episodes"] = report["episodes"] | of_last
    return with_last


def write_report(
    directory: Path, protocol: Protocol, report: dict[str, Any], name: str = "report"
) -> list[Path]:
    """Writes the files of `write_run_report` into the run directory; returns their paths."""
    return write_run_report(directory, report, report_lines(protocol, report), name)


def report_lines(protocol: Protocol, report: dict[str, Any]) -> list[str]:
    """The results in Markdown, as the protocol writes them; none for a run that diverged."""
    if "diverged" in report:
        return []
    lines = protocol.report(report)
    if "last" not in report:
        return lines
    if report["last"]["step"] == report["step"]:
        return [*lines, "", "The best checkpoint is the last one."]
    of_last = protocol.report(report["last"])[1:]
    return [*lines, "", f"Of the last checkpoint, that of step {report['last']['step']}:", *of_last]


def read_report(path: Path) -> dict[str, Any] | None:
    """The report of a finished run; None, with a warning, where it is damaged."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(report["metrics"], list):
            raise TypeError(f"metrics are {report['metrics']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s: %s)", path, type(error).__name__, error)
        return None
    return report


def read_episodes(directory: Path) -> dict[str, np.ndarray]:
    """The accuracies of single episodes of a finished run, by metric.

    Empty if the run has none, or, with a warning, if the file is damaged.
    """
    path = directory / EPISODES
    if not path.exists():
        return {}
    try:
        with np.load(io.BytesIO(path.read_bytes())) as stored:
            return dict(stored)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        logger.warning("%s cannot be read (%s: %s)", path, type(error).__name__, error)
        return {}
