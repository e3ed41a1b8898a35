"""Protocol E: few-shot transfer with a negative margin (Liu et al., ECCV 2020)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxloss
from experiments.config import (
    Count,
    EvaluationConfig,
    Folders,
    NamedLoss,
    Number,
    Share,
    TrainConfig,
    Weight,
    to_dict,
)
from experiments.contracts import ImageSet
from experiments.data.augment import seen_shape
from experiments.data.builders import image_shape, share_images, split_names
from experiments.data.pipeline import load_split
from experiments.data.selection import select
from experiments.errors import ConfigError
from experiments.evaluation.fine_tuning import FineTuning, evaluate_fine_tuning
from experiments.protocols import few_shot
from experiments.protocols.protocol import Outputs, Protocol
from experiments.training.objective import Loss, Objective, Problem, train_accuracy

_LOGITS = {"cosine": jaxloss.cosine_logits, "softmax": jaxloss.linear_logits}
_LABELS = {"cosine": "Cosine softmax", "softmax": "Softmax"}
_ROWS = {"base": "train", "held-out": "validation"}
"""The splits of the base classes, and how `select` calls them."""


@dataclass(frozen=True)
class MarginLossConfig(NamedLoss):
    """What is minimised."""

    name: Literal["cosine", "softmax"] = "cosine"
    """Softmax cross-entropy of cosines, or of inner products without a bias."""
    margin: Number = -0.02
    """Margin m of the target's logit, before the scale; below 0 it makes the task easier."""
    scale: Weight = 0.0
    """Factor β of the logits; 0: the paper's, 30 for cosines, 5 for inner products or 10 where a
    ResNet-12 gives the features."""
    label_smoothing: Share = 0.0
    """Share ε of the target that is spread over all classes; it goes with margin 0 only."""


@dataclass(frozen=True)
class NegativeMarginConfig(TrainConfig):
    """A run of protocol E."""

    protocol: ClassVar[str] = "negative-margin"

    loss: MarginLossConfig = field(default_factory=MarginLossConfig)
    novel_data: str = ""
    """Few-shot data set of the validation and novel classes; the base classes are then all classes
    of data.name. None: the three are those of data.name."""
    evaluation: EvaluationConfig = field(
        default_factory=lambda: EvaluationConfig(queries=16, episodes=600, distance="cosine")
    )
    """The episodes; `distance` is for the validations alone, which take the nearest prototype."""
    fine_tuning: FineTuning = field(default_factory=lambda: FineTuning(classifier="same"))
    """The classifier of an episode of the evaluation."""
    validation_episodes: Count = 500
    """1-shot episodes of a validation, otherwise like those of the evaluation."""


def load(config: NegativeMarginConfig, folders: Folders, split: str) -> ImageSet:
    """The images of the base, validation or novel classes, or those held out of the base ones."""
    name, stored, rows = _novel_name(config), split, None
    if split in _ROWS:
        name, stored = config.data.name, _base_splits(config)
        if config.data.holdout:
            rows = _base_rows(config, _base_labels(config, folders))[_ROWS[split]]
    return load_split(
        name, stored, rows=rows, data_dir=folders.data_dir, manual_dir=folders.manual_dir
    )


def counts(config: NegativeMarginConfig, folders: Folders) -> Mapping[str, np.ndarray]:
    """The images of every class of the base, validation and novel classes.

    `held-out` are images of the base classes, where some are held out of the training.
    """
    labels = _base_labels(config, folders)
    novel = few_shot.held_out_counts(_novel_name(config), folders)
    if not config.data.holdout:
        return {**novel, "base": np.bincount(labels)}
    rows = _base_rows(config, labels)
    num_classes = int(labels.max()) + 1
    of_base = {
        split: np.bincount(labels[rows[part]], minlength=num_classes)
        for split, part in _ROWS.items()
    }
    return {**novel, **of_base}


def _novel_name(config: NegativeMarginConfig) -> str:
    return config.novel_data or config.data.name


def _base_splits(config: NegativeMarginConfig) -> str:
    return "+".join(split_names(config.data.name)) if config.novel_data else "base"


def _base_labels(config: NegativeMarginConfig, folders: Folders) -> np.ndarray:
    """The labels of the base classes' images, in the order of `load_split`, no image being read."""
    own = few_shot.held_out_counts(config.data.name, folders)
    base = np.concatenate([own[split] for split in _base_splits(config).split("+")])
    return np.repeat(np.arange(len(base)), base)


def _base_rows(config: NegativeMarginConfig, labels: np.ndarray) -> Mapping[str, np.ndarray]:
    return select(labels, config.data, test_labels=np.zeros(0, labels.dtype)).rows


def check_options(config: NegativeMarginConfig, num_features: int) -> None:
    """Raises unless the options of the loss fit together, and those of the data the protocol."""
    if config.loss.margin and config.loss.label_smoothing:
        raise ConfigError(
            f"loss.margin = {config.loss.margin} and loss.label_smoothing = "
            f"{config.loss.label_smoothing} are compared with each other; set one of them to 0"
        )
    if config.novel_data and share_images(config.data.name, config.novel_data):
        raise ConfigError(
            f"novel_data = {config.novel_data} has images of data.name = {config.data.name}, all "
            "of which are for training; choose another set, or leave novel_data empty: the base, "
            "validation and novel classes are then those of data.name"
        )
    few_shot.check_data(config.data, allowed="holdout")


def check(
    config: NegativeMarginConfig, num_features: int, counts: Mapping[str, np.ndarray]
) -> None:
    """Raises unless the classes give the episodes, and all images are of one shape."""
    wanted, novel = config.evaluation, _novel_name(config)
    # Validation is 1-shot while a run is trained.
    shots: dict[str, tuple[int, ...]] = {"validation": (1, *wanted.shots)}
    if config.data.holdout:
        shots["base"] = ()
    for split, of_classes in counts.items():
        told = f"{split} classes of {config.data.name if split in _ROWS else novel}"
        few_shot.check_class_counts(of_classes, told, wanted, shots.get(split, wanted.shots))
    seen = [seen_shape(image_shape(name), config.data) for name in (config.data.name, novel)]
    if seen[0] != seen[1]:
        raise ConfigError(
            f"images of {config.data.name} are {_sizes(seen[0])}, those of novel_data = {novel} "
            f"{_sizes(seen[1])}; set data.image_size, which brings both to one size, and choose "
            "sets of the same channels"
        )


def _sizes(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def objective(config: NegativeMarginConfig, problem: Problem) -> Objective:
    """A classifier of cosines or inner products, and softmax cross-entropy with a margin."""
    wanted, logits_of = config.loss, _LOGITS[config.loss.name]
    scale = _scale(config)

    def loss(features, labels, head, memory):
        logits = logits_of(features, head["kernel"])
        if wanted.label_smoothing:
            value = jaxloss.softmax_loss(
                scale * logits,
                labels,
                label_smoothing=wanted.label_smoothing,
                axis_name=problem.axis_name,
            )
        else:
            value = jaxloss.margin_softmax_loss(
                logits, labels, margin=wanted.margin, scale=scale, axis_name=problem.axis_name
            )
        return Loss(value, memory, train_accuracy(logits, labels))

    def scores(features, head, memory):
        return scale * logits_of(features, head["kernel"])

    def head(key: jax.Array):
        shape = problem.num_features, len(problem.counts)
        return {"kernel": jax.nn.initializers.lecun_normal()(key, shape, jnp.float32)}

    return Objective(head, loss, scores)


def _scale(config: NegativeMarginConfig) -> float:
    if config.loss.scale:
        return config.loss.scale
    if config.loss.name == "cosine":
        return 30.0
    return 10.0 if config.model.backbone == "resnet12" else 5.0


def evaluate(
    config: NegativeMarginConfig, split: str, outputs: Callable[[str], Outputs]
) -> dict[str, Any]:
    """Accuracy of classifiers fine-tuned in episodes, and how well features tell classes apart.

    The split `novel` stands for all classes: novel, validation and base. The images of the base
    classes are those held out (`data.holdout`), or, where there are none, those of the training.

    Returns:
      `results`: an entry for each split and number of shots; `discriminability`: `intra`, `inter`
      and `ratio` of all features of each split.

    Raises:
      ConfigError: a split cannot give such episodes.
    """
    results, discriminability = [], {}
    for part in _parts(config, split):
        held_out = part == "base" and config.data.holdout
        features, labels = outputs("held-out" if held_out else part)[:2]
        results += [
            {"split": part} | result._asdict()
            for result in evaluate_fine_tuning(
                features, labels, config=config.evaluation, settings=_fine_tuning(config)
            )
        ]
        scatter = _discriminability(features, labels)
        discriminability[part] = {name: float(value) for name, value in scatter._asdict().items()}
    values = [result["accuracy"] for result in results]
    values += [scatter["ratio"] for scatter in discriminability.values()]
    return {
        "evaluation": to_dict(config.evaluation),
        "results": results,
        "discriminability": discriminability,
        "metrics": dict(zip(_metrics(config, split), values, strict=True)),
    }


def metrics(config: NegativeMarginConfig) -> tuple[str, ...]:
    """Accuracy for each split and number of shots, and the discriminability of each split."""
    return _metrics(config, "novel")


def _fine_tuning(config: NegativeMarginConfig) -> FineTuning:
    if config.fine_tuning.classifier != "same":
        return config.fine_tuning
    classifier = "cosine" if config.loss.name == "cosine" else "linear"
    return replace(config.fine_tuning, classifier=classifier)


def _metrics(config: NegativeMarginConfig, split: str) -> tuple[str, ...]:
    parts = _parts(config, split)
    accuracies = [f"{part} {shots}-shot" for part in parts for shots in config.evaluation.shots]
    return (*accuracies, *(f"{part} discriminability" for part in parts))


def _parts(config: NegativeMarginConfig, split: str) -> list[str]:
    there = ("base", *split_names(_novel_name(config)))
    told = ("novel", "validation", "base") if split == "novel" else (split,)
    return [part for part in told if part in there]


_discriminability = jax.jit(jaxloss.discriminability)


def describe(config: NegativeMarginConfig) -> dict[str, Any]:
    """The loss and the evaluation."""
    wanted = config.loss
    extra = f", ε = {wanted.label_smoothing:g}" if wanted.label_smoothing else ""
    return {
        "label": f"{_LABELS[wanted.name]}, m = {wanted.margin:g}{extra}",
        "margin": wanted.margin,
        "scale": _scale(config),
        "label_smoothing": wanted.label_smoothing,
        "evaluation": to_dict(config.evaluation),
        "fine_tuning": to_dict(_fine_tuning(config)),
        "novel_data": _novel_name(config),
        "holdout": config.data.holdout,
    }


def report(report: dict[str, Any]) -> list[str]:
    """A line on the evaluation, a table of classes and shots, and one of discriminability."""
    evaluation, tuning = report["evaluation"], report["fine_tuning"]
    lines = [
        f"{evaluation['ways']}-way, {evaluation['queries']} queries a class, {tuning['passes']} "
        f"passes of fine-tuning a {tuning['classifier']} classifier",
        "",
        "| classes | shots | accuracy (%) | 95 % interval | episodes | episode list |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {result['split']} | {result['shots']} | {100 * result['accuracy']:.2f} "
        f"| ± {100 * result['interval']:.2f} | {result['episodes']} | {result['hash']} |"
        for result in report["results"]
    ]
    lines += ["", "| classes | D_intra | D_inter | D_inter / D_intra |", "|---|---|---|---|"]
    lines += [
        f"| {split} | {scatter['intra']:.4f} | {scatter['inter']:.4f} | {scatter['ratio']:.4f} |"
        for split, scatter in report["discriminability"].items()
    ]
    base = "held out of the training" if report["holdout"] else "of the training"
    lines += ["", f"Images of the base classes ({report['data']}): those {base}."]
    if report["novel_data"] != report["data"]:
        lines.append(f"Validation and novel classes: those of {report['novel_data']}.")
    return lines


PROTOCOL = Protocol(
    config=NegativeMarginConfig,
    splits=("base", "validation", "novel"),
    load=load,
    counts=counts,
    check=check,
    objective=objective,
    validate=few_shot.validate,
    evaluate=evaluate,
    metrics=metrics,
    describe=describe,
    report=report,
    check_options=check_options,
    for_validation=("distance",),
)
