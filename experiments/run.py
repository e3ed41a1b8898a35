"""One run: planned, trained from its newest checkpoint, restored, evaluated and reported."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from experiments.core.config import (
    MOST,
    Folders,
    ParallelMode,
    TrainConfig,
    check_config,
    set_options,
    to_dict,
)
from experiments.core.errors import ConfigError, DivergedError, ExperimentError
from experiments.core.processes import agree, check_shared, is_first, on_first
from experiments.core.protocol import ClassCounts, Metric, Objective, Outputs, Problem, Protocol
from experiments.core.storage import check_local, storage_path
from experiments.data.augment import check_augmentation, describe_augmentation, seen_shape
from experiments.data.pipeline import RecordImages, new_images
from experiments.data.sampling import batch_size_of, draw_batch, parse_strategy
from experiments.data.selection import labels_of, part_of
from experiments.datasets import lookup, pinned, plain_name, share_images
from experiments.evaluation.feature_space import unit_features
from experiments.models import build_backbone
from experiments.papers import build_protocol, config_from_dict, config_to_dict
from experiments.papers.classification import SPLITS, ClassSplit
from experiments.papers.few_shot_data import test_split
from experiments.papers.presets import find_preset
from experiments.reporting.run import (
    code_version,
    describe_run,
    read_report,
    report_text,
    write_report,
)
from experiments.training import loop, parallel
from experiments.training.checkpoints import CHECKPOINTS_FOLDER, Checkpoints, run_folder
from experiments.training.loop import Parts
from experiments.training.run_directory import check_run_directory, read_config
from experiments.training.step import (
    Batch,
    TrainState,
    build_optimizer,
    build_outputs,
    build_step,
    learning_rate,
)
from experiments.training.weights import load_weights
from jaxloss.sampling import index_classes

_log = logging.getLogger(__name__)


def _warn(line: str) -> None:
    if is_first():
        _log.warning("%s", line)


class Plan(NamedTuple):
    """A run before any data is read."""

    config: TrainConfig
    protocol: Protocol
    image_shape: tuple[int, int, int]  # Height, width, channels: what the model receives.
    num_features: int

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of the report: those of the protocol, and of the last checkpoint, too."""
        last = [metric._replace(name=_of_last(metric.name)) for metric in self.protocol.metrics]
        return [*self.protocol.metrics, *(last if self.config.report_last else ())]


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
        _check_options(config, protocol, num_devices or jax.device_count())
    seen = seen_shape(lookup(config.data.name).image_shape, config.data)
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
    return replace(config, data=replace(data, **changed))


def _check_options(config: TrainConfig, protocol: Protocol, num_devices: int) -> None:
    """Checks what needs no network. Errors as in `plan_run`."""
    data, sampling, model, optimizer = config.data, config.sampling, config.model, config.optimizer
    if data.mixup and protocol.compares_samples:
        raise ConfigError(
            f"data.mixup = {data.mixup} needs a loss of single samples, and {config.loss.name} "
            "compares samples with each other; set data.mixup = 0"
        )
    learning_rate(optimizer, config.steps)  # Raises if the schedule does not fit.
    batch_size = batch_size_of(sampling.strategy, sampling.batch_size)
    if batch_size > MOST or batch_size % num_devices:
        raise ConfigError(
            f"a batch of {batch_size} does not spread evenly over {num_devices} devices; choose a "
            f"multiple of {num_devices} up to {MOST}"
        )
    if not model.weights and optimizer.backbone_rate < 1:
        raise ConfigError(
            f"optimizer.backbone_rate = {optimizer.backbone_rate} is for a pretrained backbone: "
            "set model.weights, or set optimizer.backbone_rate = 1 to train from scratch"
        )
    if model.weights:
        path = storage_path(model.weights, "model.weights")
        if not path.exists():
            raise ConfigError(f"model.weights = {path} does not exist")
        if path.is_file():
            check_local(path, "model.weights, a file,")
            if model.dim or model.projection != "linear-norm":
                raise ConfigError(
                    "the file of model.weights has a backbone alone; set model.dim = 0 and "
                    f"model.projection = linear-norm, got {model.dim} and {model.projection}"
                )
    check_augmentation(data, lookup(data.name).image_shape[-1])


def _of_last(name: str) -> str:
    """The name of a metric of the last checkpoint, beside that of the best."""
    return f"{name} (last)"


def prepare_and_count(plan: Plan, folders: Folders) -> ClassCounts:
    """The number of images of every class, for every available split; prepares the data if needed.

    Reads no image of prepared data. Raises a `ConfigError` where the data does not fit the run.
    """
    config, protocol, sampling = plan.config, plan.protocol, plan.config.sampling
    parts = protocol.parts(folders)
    counts_by_split = {split: part.counts() for split, part in parts.items()}
    counts = counts_by_split[protocol.splits[0]]
    multi_label = lookup(config.data.name).multi_label
    size = parts[protocol.splits[0]].size if multi_label else int(counts.sum())
    ways_shots, batch_size = parse_strategy(sampling.strategy), _batch_size(plan, size)
    if batch_size > size and ways_shots is None:
        raise ConfigError(
            f"sampling.batch_size = {sampling.batch_size} must be at most {size}, the training "
            f"images of {config.data.name}; set --sampling.batch-size {size}, or add images"
        )
    if not multi_label:  # Else, images are not drawn by class.
        index = index_classes(labels_of(counts))
        # Raises if the data cannot give a batch.
        draw_batch(index, sampling.strategy, batch_size, seed=config.seed, step=0)
        if ways_shots and (large := (counts >= ways_shots[1]).sum()) < len(counts):
            _warn(
                f"batches of {sampling.strategy} draw from {large} of {len(counts)} training "
                f"classes, those with at least {ways_shots[1]} images"
            )
    protocol.check_data(plan.num_features, counts_by_split)
    return counts_by_split


def _batch_size(plan: Plan, size: int) -> int:
    """The images in a batch: of a small folder of one's own, at most its `size` images."""
    strategy, wanted = plan.config.sampling.strategy, plan.config.sampling.batch_size
    if strategy == "random" and wanted > size and lookup(plan.config.data.name).own:
        return max(size // jax.device_count(), 1) * jax.device_count()
    return batch_size_of(strategy, wanted)


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
    in place of arrays, for a checkpoint to fill.
    """
    config, seed, epochs = plan.config, plan.config.seed, plan.config.steps // steps_per_epoch
    problem = Problem(plan.num_features, class_counts, axis_name, mesh, epochs, seed)
    objective = plan.protocol.objective(problem)
    optimizer = build_optimizer(config.optimizer, config.steps)

    def model() -> nnx.Module:
        how: Any = {"image_shape": plan.image_shape, "axis_name": axis_name}
        return build_backbone(config.model, rngs=nnx.Rngs(seed), **how)

    def start(backbone: Any, statistics: Any, objective_state: Any) -> TrainState:
        head = objective.init_head(jax.random.fold_in(jax.random.key(seed), 1))
        params, step = {"backbone": backbone, "classifier": head}, jnp.zeros((), jnp.int32)
        return TrainState(step, params, statistics, optimizer.init(params), objective_state)

    built = nnx.eval_shape(model) if abstract else model()
    graphdef, *network = nnx.split(built, nnx.Param, ...)
    parts: Any = (*network, objective.init_state())
    state = jax.eval_shape(start, *parts) if abstract else start(*parts)
    return graphdef, objective, optimizer, state


def assemble(plan: Plan, folders: Folders, *, mode: ParallelMode = "pmap") -> Parts:
    """Builds what the training loop runs, spread over all devices."""
    config, protocol, sampling = plan.config, plan.protocol, plan.config.sampling
    mesh = parallel.device_mesh() if mode == "jit" else None
    axis_name = parallel.axis_name(mode)
    for line in lookup(config.data.name).remarks:  # First: it may explain errors of the data.
        _warn(f"data: {line}")
    counts_by_split = prepare_and_count(plan, folders)
    trained_on, held_out, _ = protocol.splits
    class_counts, images = counts_by_split[trained_on], protocol.load(folders, trained_on)
    batch_size = _batch_size(plan, len(images.labels))
    steps_per_epoch = len(images.labels) // batch_size
    graphdef, objective, optimizer, state = build_learner(
        plan, class_counts, steps_per_epoch, axis_name=axis_name, mesh=mesh
    )
    own, classes = objective.classifier_state, list(images.class_names)
    origins: list[str] = []
    if sampling.strategy == "random" and batch_size < (wanted := sampling.batch_size):
        origins.append(f"Batches have {batch_size} images, not {wanted}: there are no more.")
        _warn(origins[0])
    if config.model.weights:
        path = storage_path(config.model.weights)
        state, lines = load_weights(path, state, own, classes, config.data.name)
        origins += lines
        split = vars(config.data).get("class_split", "all")
        seen = protocol.splits == SPLITS and seen_in_training(config, config.data.name, split)
        if seen:
            line = f"Weights: trained on {seen}; accuracy on test images may be too high."
            origins += [] if line in origins else [line]
            _warn(line)
    key = jax.random.fold_in(jax.random.key(config.seed), 2)
    step = build_step(graphdef, objective, optimizer, config.data, key=key, axis_name=axis_name)
    index = len(images.labels) if images.labels.ndim == 2 else index_classes(images.labels)

    def read(step: int) -> Batch:
        drawn = draw_batch(index, sampling.strategy, batch_size, seed=config.seed, step=step)
        rows = np.split(drawn, jax.process_count())[jax.process_index()]
        return Batch(images.images[rows], images.labels[rows])

    outputs_of = build_outputs(graphdef, objective, config.data, class_counts)
    validated: Any = protocol.load(folders, held_out) if held_out in counts_by_split else None

    def validate(state: TrainState) -> tuple[float, dict[str, float]]:
        outputs = outputs_of(state, validated)
        return protocol.validate(outputs), protocol.diagnose(outputs)

    return Parts(
        initial=state,
        parallel=parallel.data_parallel(mode, step, mesh),
        read=read,
        ahead=isinstance(images.images, RecordImages),
        images_per_step=batch_size,
        steps_per_epoch=steps_per_epoch,
        after_epoch=objective.after_epoch,
        validate=None if validated is None else validate,
        meta={
            "config": config_to_dict(config),
            "class_counts": class_counts.tolist(),
            "classes": classes,
            "classifier": own is not None,
            "origins": origins,
            "steps_per_epoch": steps_per_epoch,
            "code": code_version(),
        },
    )


def train_run(
    plan: Plan,
    directory: Path,
    folders: Folders,
    *,
    mode: ParallelMode = "pmap",
    stuck_after: float = 0,
) -> float:
    """Trains a run to its end, as `loop.train` does; returns the seconds of all calls.

    The plan and the machine determine every bit of the result.
    """
    parts = assemble(plan, folders, mode=mode)
    if is_first():
        print(f"augmentation: {describe_augmentation(plan.config.data)}", flush=True)
    name = plan.protocol.description["label"]
    return loop.train(parts, directory, plan.config, name=name, stuck_after=stuck_after)


def train(
    preset: str | TrainConfig,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    directory: str | Path,
    folders: Folders = Folders(),
    command: str = "",
    **how: Any,
) -> dict[str, Any]:
    """Trains a preset, evaluates it and writes its report, as the command `train` does.

    Called again with the same arguments, it continues a run that was stopped, and returns the
    report of a finished one. Raises a `ConfigError` for an unknown or impossible option, a
    `ConfigMismatchError` where the directory belongs to another run, and `Interrupted` at Ctrl-C,
    when the state is saved.

    Args:
      preset: The name of a preset, or a configuration.
      options: Values that replace those of the preset, by the names of the command line, such as
        `{"loss.name": "direct:sce+nca", "model.widths": (16, 32, 64, 64), "steps": 500}`.
      directory: Run directory, which `load_run` reads.
      folders: Where the data is.
      command: What the report names as its origin. Default: this call.
      how: `mode` and `stuck_after`, as `complete_run` takes them.

    Returns:
      The report, as `evaluate` gives it. If the run diverged, it has no metrics, and states under
      `diverged` what happened.
    """
    if not isinstance(preset, str | TrainConfig) or not isinstance(directory, str | os.PathLike):
        raise ConfigError("preset must be a name or a TrainConfig, and directory a path")
    start = find_preset(preset).config if isinstance(preset, str) else preset
    path = storage_path(str(directory), "directory")
    call = f"experiments.train({start.preset!r}, {dict(options)}, directory={str(path)!r})"
    plan = plan_run(set_options(start, options))
    return complete_run(plan, path, folders, command=command or call, **how)


def complete_run(
    plan: Plan,
    directory: Path,
    folders: Folders,
    *,
    command: str,
    mode: ParallelMode = "pmap",
    stuck_after: float = 0,
) -> dict[str, Any]:
    """Trains one run to its end, evaluates it, writes its report, and returns it.

    The report of a finished run is read instead. A run that diverges is finished, too: its report
    has no metrics, and states under `diverged` what happened. With several processes, all of them
    call this and see the directory; a `ConfigError` if they differ in options, mode, devices or
    version.
    """
    config, protocol = plan.config, plan.protocol
    values = config_to_dict(config)
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    common = {f"version of {name}": metadata.version(name) for name in packages}
    common |= {f"jaxloss {key}": value for key, value in code_version().items()}
    common["local devices"] = f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}"
    agree("options or versions", common | flatten_dict(values, sep=".") | {"parallel": mode})
    check_shared(directory)
    # Before any data is loaded; training checks again, when it locks the directory.
    there = check_run_directory(directory, values, fixed_steps=config.fixed_steps())
    stored, text = directory / "report.json", partial(report_text, protocol)
    if there == values and (report := read_report(stored, text)):  # Not one of fewer steps.
        return report
    try:
        seconds = train_run(plan, directory, folders, mode=mode, stuck_after=stuck_after)
        report = evaluate(_restore(directory, "best", plan), folders=folders)
        report["seconds"] = seconds
        if config.report_last:
            report = _with_last(report, _restore(directory, "latest", plan), folders)
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
    # A finished run that is read has none: `read_episodes` has the accuracies of single episodes.
    report.pop("episodes", None)
    return report


def _with_last(report: dict[str, Any], run: RestoredRun, folders: Folders) -> dict[str, Any]:
    """The report of the best checkpoint, with the results of the last one, `run`, under `last`.

    The metrics of the last checkpoint follow those of the best, with names of their own.
    """
    last = dict(report if run.step == report["step"] else evaluate(run, folders=folders))
    metrics = [metric | {"name": _of_last(metric["name"])} for metric in last["metrics"]]
    if episodes := last.pop("episodes", None):
        report["episodes"] |= {_of_last(name): values for name, values in episodes.items()}
    return report | {"metrics": [*report["metrics"], *metrics], "last": last}


@dataclass(frozen=True, eq=False, repr=False)
class RestoredRun:
    """A checkpoint with all that is needed to use it."""

    directory: Path
    plan: Plan
    graphdef: nnx.GraphDef  # The backbone without its arrays.
    objective: Objective
    state: TrainState
    step: int
    class_counts: np.ndarray  # int64 [C], training images of every class.
    validation: float | None  # What the best checkpoint is chosen by.
    notes: list[str]
    """Sentences for the report, on checkpoints that `load_run` found damaged, on initial weights,
    and on another version that trained the run."""
    class_names: tuple[str, ...] = ()
    """Of the classes or labels of training."""

    def __repr__(self) -> str:
        of, loss = f"{len(self.class_counts)} training classes", self.plan.config.loss.name
        return f"RestoredRun({self.directory}, step {self.step}, {loss}, {of})"

    @cached_property
    def outputs_of(self) -> Callable[..., Outputs]:
        """The outputs of an `ImageSet`."""
        parts = self.graphdef, self.objective, self.plan.config.data, self.class_counts
        return partial(build_outputs(*parts), self.state)

    @cached_property
    def outputs(self) -> Callable[..., Outputs]:
        """`outputs(split, folders, most)`, as `features_of`; computed once and then kept."""
        load = self.plan.protocol.load

        @cache
        def outputs(split: str, folders: Folders, most: int | None = None) -> Outputs:
            images = load(folders, split)
            found = self.outputs_of(part_of(images, most) if most else images)
            found.features.flags.writeable = False  # Later evaluations use them, too.
            return found

        return outputs


def load_run(folder: str | Path, checkpoint: str | int = "best") -> RestoredRun:
    """A checkpoint of a run, with the configuration that the checkpoint stores.

    With several processes, all of them call this.

    Args:
      folder: A run directory, which may be that of an unfinished run, or its folder of checkpoints.
      checkpoint: `best` by validation (the latest of equal ones, or where there was none),
        `latest`, or the number of a step. Where the best or the latest is damaged, the next one is
        taken, and a note says so.
    """
    which = str(checkpoint)
    if not re.fullmatch(r"best|latest|\d{1,15}", which, re.ASCII):
        shown = repr(which[:40])
        raise ConfigError(f"checkpoint must be best, latest or the number of a step, got {shown}")
    return _restore(storage_path(str(folder)), which)


def _restore(path: Path, which: str, plan: Plan | None = None) -> RestoredRun:
    """As `load_run`; for a run that was planned in this process, with its plan."""
    with Checkpoints(run_folder(path) / CHECKPOINTS_FOLDER, read_only=True) as checkpoints:
        if which.isdecimal():
            found, damaged = checkpoints.read(int(which)), []
        else:
            found, damaged = checkpoints.read_intact(best=which == "best")
    meta = found.meta
    plan = plan or plan_run(config_from_dict(meta["config"]), check=False)
    class_counts = np.array(meta["class_counts"], np.int64)
    graphdef, objective, _, shapes = build_learner(
        plan, class_counts, meta["steps_per_epoch"], abstract=True
    )
    code, used = meta["code"], f"the checkpoint of step {found.step} is used instead."
    notes = [*(f"{error}; {used}" for error in damaged), *meta["origins"]]
    if code != code_version():
        notes += [f"Trained with jaxloss {code['version']}, commit {code['commit']}."]
    state, value, directory = found.fill(shapes), found.validation, run_folder(path)
    parts = graphdef, objective, state, found.step, class_counts, value, notes
    return RestoredRun(directory, plan, *parts, tuple(meta["classes"]))


def config_of_run(path: Path) -> TrainConfig:
    """The configuration that a run stores with its checkpoints; reads no arrays."""
    with Checkpoints(run_folder(path) / CHECKPOINTS_FOLDER, read_only=True) as checkpoints:
        return config_from_dict(checkpoints.newest_meta()["config"])


def evaluation_of_run(path: Path) -> dict[str, str]:
    """The options of the evaluation of a run, and their values."""
    values = flatten_dict(to_dict(config_of_run(path)), sep=".")
    own = {n: v for n, v in values.items() if n.startswith(("evaluation.", "fine_tuning."))}
    return {n: "+".join(map(str, v)) if isinstance(v, list) else f"{v}" for n, v in own.items()}


def features_of(
    run: RestoredRun,
    split: Any = None,
    *,
    folders: Folders = Folders(),
    most: int | None = None,
) -> Outputs:
    """What a run computes for the images of a split, or for new ones, as NumPy arrays.

    Images are cropped and normalised as in training, and not augmented. With several processes, all
    of them call this. Raises a `DivergedError` where a feature is not finite, and an
    `ExperimentError` that names the file where a new image cannot be read.

    Args:
      split: One of the run's protocol, such as `base`, `validation` and `novel`, or `train`,
        `validation` and `test`. Default: the one for evaluation. Or new images: paths of files or
        folders, one or a list, or uint8 `[n, h, w, 1 or 3]`. They are resized as the images of the
        data set; their labels are −1, and their class names those of training.
      folders: Where the data is.
      most: Of more images, a random part, always the same. Default: all images.
    """
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"most must be a whole number from 1, or None for all images, got {most}")
    plan, is_name = run.plan, split is None or isinstance(split, str)
    if is_name and (split in (None, *plan.protocol.splits) or not os.path.exists(str(split))):
        return run.outputs(split_of(plan, split), folders, most)
    images = new_images(plan.config.data.name, split, run.class_names)
    return run.outputs_of(part_of(images, most) if most else images)


def predict(run: RestoredRun, images: Any, *, folders: Folders = Folders()) -> Iterator[str]:
    """A line for each new image of `features_of`: the three most probable classes.

    Of several labels, those of the largest logits. Without a classifier: the three training images
    of the largest cosine; of a run for other classes than those of training, those of both. The
    log has a line for each image that cannot be read.
    """
    from scipy.special import softmax  # Slow to import.

    protocol: Any = run.plan.protocol
    names = run.class_names
    found = run.outputs_of(new_images(run.plan.config.data.name, images, names, skip=_warn))
    if run.objective.classifier_state is None or protocol.splits != SPLITS:
        splits = protocol.splits[:1] if protocol.splits == SPLITS else protocol.splits[::2]
        every = [features_of(run, of, folders=folders, most=10_000) for of in splits]
        known = np.concatenate([unit_features(of.features) for of in every])
        scores, names, shown = unit_features(found.features) @ known.T, [], "{1} {0:.2f}"
        for of in every:
            places = range(len(of.labels)) if of.files is None else of.files
            own = zip(of.labels, places, strict=True)
            names = [*names, *(f"{of.class_names[c]} ({at})" for c, at in own)]
    elif found.labels.ndim == 2:
        scores, shown = found.logits(), "{1} {0:.1f}"
    else:
        scores, shown = softmax(protocol.calibrated(found), axis=1), "{1} {0:.1%}"
    for row, values in enumerate(scores):
        best = np.argsort(-values, kind="stable")[:3]
        words = ", ".join(shown.format(values[c], names[c]) for c in best)
        yield f"{row if found.files is None else found.files[row]}: {words}"


def evaluate(
    run: RestoredRun,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    split: str | None = None,
    folders: Folders = Folders(),
) -> dict[str, Any]:
    """Evaluates a run by its protocol, as the command `evaluate` does; writes nothing.

    Features are computed once for each split, and kept with the run.

    Args:
      options: Values of evaluation options that replace those of the run, such as
        `{"evaluation.ways": 10}`.
      split: Default: the one for evaluation.
      folders: Where the data is.

    Returns:
      The report as JSON types: that of `describe_run`, and `num_features`, `split`, `step`,
      `validation`, `notes` and the results of the protocol, `metrics` among them.
    """
    plan = run.plan
    config = with_evaluation(plan.config, options)
    # The run's own protocol loads the images and names the validation.
    protocol, split = build_protocol(config), split_of(plan, split)
    results = protocol.evaluate(split, lambda name: run.outputs(name, folders))
    validation = plan.protocol.validation_metric.measured(run.validation)
    return {
        **describe_run(config, protocol),
        "num_features": plan.num_features,
        "split": split,
        "step": run.step,
        "validation": None if run.validation is None else validation,
        **results,
        "notes": [*data_notes(run.plan.config.data.name), *run.notes, *results.get("notes", ())],
    }


def data_notes(name: str) -> list[str]:
    """What is odd in a data set, as notes of a report."""
    return [f"Data: {line}." for line in lookup(name).remarks]


def split_of(plan: Plan, split: str | None) -> str:
    """A split of a protocol, by default the one for evaluation; raises a `ConfigError`."""
    splits = plan.protocol.splits
    name, split = plan.config.preset or plan.config.protocol, split or splits[-1]
    if split not in splits:
        raise ConfigError(f"{name} has no split {split!r}; it has {', '.join(splits)}")
    return split


def with_evaluation(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """A configuration with other values of evaluation options; a `ConfigError` for any other."""
    # They do not change the training.
    sections = [name for name in ("evaluation", "fine_tuning") if name in vars(config)]
    for name in overrides:
        if name.replace("-", "_").partition(".")[0] not in sections:
            there = f"the options of {', '.join(sections)}" if sections else "no options"
            of = config.preset or config.protocol
            raise ConfigError(f"the evaluation of {of} has no {name}; it has {there}")
    config = set_options(config, overrides)
    check_config(config)
    return config


def seen_in_training(config: TrainConfig, data: str, split: ClassSplit = "all") -> str:
    """What the backbone was trained on if test images may be among it, as a phrase; else empty.

    Protocols that hold images out leave out the test images of a classification of `data`; those
    that hold classes out train on all images of the others. Two sets that share images count as
    seen. So do the images of the runs whose weights this one started from, as far as they exist;
    what a file of weights has seen is unknown.
    """
    for _ in range(100):  # Edited runs may name each other.
        trained_on = config.data.name
        if plain_name(trained_on) == plain_name(data):
            all_are_base = vars(config.data).get("novel") or split in ("all", "base")
            # Where classes are chosen, test images are not for training.
            of_classes = "base" in build_protocol(config).splits and not test_split(trained_on)
            if all_are_base and of_classes:
                return f"base classes of {trained_on}, which include test images"
        elif share_images(trained_on, data):
            return f"{trained_on}, which shares images with {data}"
        try:  # Without weights, or with a file of them, there is no configuration.
            config = config_from_dict(read_config(run_folder(storage_path(config.model.weights))))
        except ExperimentError:
            break
    return ""
