"""Protocol D: multi-label classification with the two-way loss (Kobayashi, CVPR 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from jax import Array

import jaxloss
from experiments.config import Folders, NamedLoss, Positive, Share, TrainConfig, Weight
from experiments.contracts import ImageSet
from experiments.data.builders import is_multi_label, split_names
from experiments.data.pipeline import load_split, load_targets
from experiments.data.sampling import parse_strategy
from experiments.errors import ConfigError
from experiments.evaluation.multilabel import MultilabelResult, evaluate_scores
from experiments.protocols.classification import SPLITS, metrics_table
from experiments.protocols.linear_head import linear_head, linear_scores
from experiments.protocols.protocol import Outputs, Protocol
from experiments.training.objective import Loss, Objective, Problem

_HOLDOUT = 4
"""The stream of the images that are held out; those of `experiments.data.selection` come before."""


class _Method(NamedTuple):
    label: str
    loss: Callable[..., Array]
    """Of logits and targets, both [n, C]."""
    options: tuple[str, ...] = ()
    """Those of the configuration that it takes."""
    ranks_samples: bool = False
    """Whether it compares the samples of a batch with each other."""


_TEMPERATURES = ("positive_temperature", "negative_temperature")
_FOCUS = ("positive_focus", "negative_focus", "clip")
_METHODS = {
    "two-way": _Method("Two-way", jaxloss.two_way_loss, _TEMPERATURES, ranks_samples=True),
    "sample-wise": _Method("Sample-wise", jaxloss.sample_wise_loss, _TEMPERATURES),
    "class-wise": _Method("Class-wise", jaxloss.class_wise_loss, _TEMPERATURES, ranks_samples=True),
    "bce": _Method("BCE", jaxloss.sigmoid_loss),
    "softmax": _Method("Softmax", jaxloss.multilabel_softmax_loss),
    "asl": _Method("ASL", jaxloss.asymmetric_loss, _FOCUS),
    "warp": _Method("WARP", jaxloss.warp_loss),
}
_SYMBOLS = {
    "positive_temperature": "T_P",
    "negative_temperature": "T_N",
    "positive_focus": "γ₊",
    "negative_focus": "γ₋",
    "clip": "m",
}


@dataclass(frozen=True)
class MultiLabelLossConfig(NamedLoss):
    """What is minimised."""

    name: Literal["two-way", "sample-wise", "class-wise", "bce", "softmax", "asl", "warp"] = (
        "two-way"
    )
    """Two-way loss or one of its halves, binary or softmax cross-entropy, asymmetric loss, WARP."""
    positive_temperature: Positive = 4.0
    """T_P of the two-way loss and its halves."""
    negative_temperature: Positive = 1.0
    """T_N of the two-way loss and its halves."""
    positive_focus: Weight = 0.0
    """γ₊ of the asymmetric loss."""
    negative_focus: Weight = 4.0
    """γ₋ of the asymmetric loss."""
    clip: Share = 0.05
    """Probability below which a negative adds nothing to the asymmetric loss."""


@dataclass(frozen=True)
class MultiLabelConfig(TrainConfig):
    """A run of protocol D."""

    protocol: ClassVar[str] = "multi-label"

    loss: MultiLabelLossConfig = field(default_factory=MultiLabelLossConfig)
    train_on: Literal["train", "train+validation"] = "train"
    """The data set's splits that are learned from. Without validation images the latest checkpoint
    is the best; data.holdout gives some to data where there are none."""


class _Part(NamedTuple):
    """The images of a split."""

    stored: str
    """The data set's splits that they are in."""
    rows: np.ndarray | None
    """int64, ascending, which images of these; None for all."""
    targets: np.ndarray
    """int8 [n, C]."""


def _parts(config: MultiLabelConfig, folders: Folders) -> dict[str, _Part]:
    """The images for training, for validation where there are some, and for test."""
    name, share = config.data.name, config.data.holdout
    if not is_multi_label(name):
        raise ConfigError(
            f"data.name = {name} has one class an image, and multi-label classification needs "
            "images with any number of labels"
        )
    own = split_names(name)
    if config.train_on != "train" and "validation" not in own:
        raise ConfigError(
            f"train_on = {config.train_on}, but {name} has no validation images; choose train"
        )
    validated = config.train_on == "train" and "validation" in own
    if share and validated:
        raise ConfigError(
            f"data.holdout = {share}, but {name} has validation images of its own; choose 0, or "
            "train_on = train+validation"
        )

    def whole(stored: str) -> _Part:
        targets = load_targets(
            name, stored, data_dir=folders.data_dir, manual_dir=folders.manual_dir
        )
        return _Part(stored, None, targets)

    def some(part: _Part, rows: np.ndarray) -> _Part:
        rows = np.sort(rows)
        return _Part(part.stored, rows, part.targets[rows])

    parts = {"train": whole(config.train_on), "test": whole("test")}
    if validated:
        parts["validation"] = whole("validation")
    if share:
        train = parts["train"]
        size = len(train.targets)
        held_out = int(np.floor(share * size + 0.5))
        if not held_out:
            raise ConfigError(f"data.holdout = {share} of {size} images of {name} is none")
        order = np.random.Generator(np.random.Philox(key=[_HOLDOUT, 0])).permutation(size)
        parts["validation"] = some(train, order[:held_out])
        parts["train"] = some(train, order[held_out:])
    return parts


def load(config: MultiLabelConfig, folders: Folders, split: str) -> ImageSet:
    """The images for training, validation or test."""
    parts = _parts(config, folders)
    if split not in parts:
        raise ConfigError(f"no images are held out for {split}; set data.holdout")
    return load_split(
        config.data.name,
        parts[split].stored,
        rows=parts[split].rows,
        data_dir=folders.data_dir,
        manual_dir=folders.manual_dir,
    )


def counts(config: MultiLabelConfig, folders: Folders) -> Mapping[str, np.ndarray]:
    """How many images for training, validation and test have every label.

    Raises:
      ConfigError: The images are not as the configuration says, or do not fill a batch.
    """
    parts = _parts(config, folders)
    wanted, available = config.sampling.batch_size, len(parts["train"].targets)
    if wanted > available:
        raise ConfigError(
            f"sampling.batch_size = {wanted} must be at most the {available} training images of "
            f"{config.data.name}"
        )
    return {split: np.sum(part.targets > 0, axis=0) for split, part in parts.items()}


def check_options(config: MultiLabelConfig, num_features: int) -> None:
    """Raises unless the options are for multi-label data, and fit the loss and the backbone."""
    if parse_strategy(config.sampling.strategy) is not None:
        raise ConfigError(
            f"sampling.strategy = {config.sampling.strategy} needs one class an image; choose "
            "`random`"
        )
    for option in ("classes", "samples_per_class"):
        if getattr(config.data, option):
            raise ConfigError(f"multi-label classification has no data.{option}")
    if config.data.imbalance != 1:
        raise ConfigError("multi-label classification has no data.imbalance")
    if config.data.mixup and _METHODS[config.loss.name].ranks_samples:
        raise ConfigError(
            f"data.mixup = {config.data.mixup} is for losses of single samples; {config.loss.name} "
            "compares samples with each other"
        )
    if config.optimizer.backbone_rate < 1 and not config.model.weights:
        raise ConfigError(
            f"optimizer.backbone_rate = {config.optimizer.backbone_rate} is for a backbone that "
            "has learned already: give its model.weights, or set optimizer.backbone_rate = 1 to "
            "start from scratch"
        )


def check(config: MultiLabelConfig, num_features: int, counts: Mapping[str, np.ndarray]) -> None:
    """Raises unless every split has a label."""
    for split, of_split in counts.items():
        if not of_split.any():
            raise ConfigError(f"no {split} image of {config.data.name} has a label")


def objective(config: MultiLabelConfig, problem: Problem) -> Objective:
    """A linear classifier under one of the losses; it ranks by its logits."""
    method = _METHODS[config.loss.name]
    options = {option: getattr(config.loss, option) for option in method.options}
    loss_of = partial(method.loss, **options, axis_name=problem.axis_name)

    def loss(features, labels, head, memory):
        return Loss(loss_of(linear_scores(features, head, memory), labels), memory, {})

    def head(key: jax.Array):
        # Its bias is the prior of a single class: it suits images that have few of the labels.
        return linear_head(key, problem.num_features, len(problem.counts))

    return Objective(head, loss, linear_scores)


def validate(config: MultiLabelConfig, outputs: Outputs) -> float:
    """The mean of mAP@class and mAP@sample.

    Tables report both of one checkpoint, and each half of the two-way loss cares for one of them.
    """
    result = evaluate_scores(outputs.scores(), outputs.labels)
    return (result.map_class + result.map_sample) / 2


def evaluate(
    config: MultiLabelConfig, split: str, outputs: Callable[[str], Outputs]
) -> dict[str, Any]:
    """mAP@class and mAP@sample, and the average precision of every class."""
    of_split = outputs(split)
    result: MultilabelResult = evaluate_scores(of_split.scores(), of_split.labels)
    return {
        "result": result._asdict(),
        "metrics": dict(zip(metrics(config), (result.map_class, result.map_sample), strict=True)),
    }


def metrics(config: MultiLabelConfig) -> tuple[str, ...]:
    """Both means of average precisions."""
    return ("mAP@class", "mAP@sample")


def describe(config: MultiLabelConfig) -> dict[str, Any]:
    """The loss, with those of its options that are not the paper's, and the images learned from."""
    method, default = _METHODS[config.loss.name], MultiLabelLossConfig()
    changed = [
        f", {_SYMBOLS[option]} = {getattr(config.loss, option):g}"
        for option in method.options
        if getattr(config.loss, option) != getattr(default, option)
    ]
    told = {"label": method.label + "".join(changed), "train_on": config.train_on}
    return told | ({"holdout": config.data.holdout} if config.data.holdout else {})


def report(report: dict[str, Any]) -> list[str]:
    """A line on the data, and a table of the metrics."""
    result = report["result"]
    without = result["samples_without_positive"]
    absent = result["classes_without_positive"]
    return [
        f"{result['samples']} {report['split']} images"
        + (f" ({without} more have no label)" if without else "")
        + f", {result['classes']} labels"
        + (f" ({absent} more have no image)" if absent else ""),
        "",
        *metrics_table(report["metrics"]),
    ]


PROTOCOL = Protocol(
    config=MultiLabelConfig,
    splits=SPLITS,
    load=load,
    counts=counts,
    check=check,
    objective=objective,
    validate=validate,
    evaluate=evaluate,
    metrics=metrics,
    describe=describe,
    report=report,
    check_options=check_options,
)
