"""Protocol D: the two-way loss, on images of any number of labels or of one (Kobayashi, CVPR 2023).

Backbones that are trained on images of one class are for linear evaluation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Lt
from jax import Array, lax

import jaxloss
from experiments.core.config import (
    DataConfig,
    Folders,
    NamedLoss,
    Positive,
    Share,
    Signed,
    TrainConfig,
    Weight,
)
from experiments.core.errors import ConfigError
from experiments.core.processes import is_first
from experiments.core.protocol import (
    ClassCounts,
    Metric,
    Objective,
    Outputs,
    OutputsOf,
    Part,
    Problem,
    Protocol,
    measured,
)
from experiments.data.pipeline import load_labels, load_split
from experiments.data.selection import TEST_SHARE
from experiments.datasets import lookup
from experiments.evaluation.classification import evaluate_scores
from experiments.papers.classification import (
    SPLITS,
    Classification,
    ClassificationData,
    head_logits,
    init_linear_head,
    objective_of_logits,
)
from experiments.reporting.run import metrics_table

_log = logging.getLogger(__name__)

_STREAMS = {"test": 5, "validation": 4}
"""Random streams of the images that are split off; `experiments.data.selection` has those before
them."""

METRICS = (Metric("mAP@class"), Metric("mAP@sample"))

_SOFT_GAP = {"positive_temperature": "T_P", "negative_temperature": "T_N", "margin": "ε"}
_FOCUS = {"positive_focus": "γ₊", "negative_focus": "γ₋", "clip": "m"}
_FOCUS["stop_focus_gradient"] = "full gradient"
_RAMPS = {"ramp": "s", "leak": "λ", "binary_weight": "κ"}
_METHODS: dict[str, tuple[str, Callable[..., Array], Mapping[str, str]]] = {
    "two-way": ("Two-way", jaxloss.two_way_loss, _SOFT_GAP),
    "sample-wise": ("Sample-wise", jaxloss.sample_wise_loss, _SOFT_GAP),
    "class-wise": ("Class-wise", jaxloss.class_wise_loss, _SOFT_GAP),
    "bce": ("BCE", jaxloss.sigmoid_loss, {}),
    "softmax": ("Softmax", jaxloss.multilabel_softmax_loss, {}),
    "asl": ("ASL", jaxloss.asymmetric_loss, _FOCUS),
    "warp": ("WARP", jaxloss.warp_loss, {}),
    "rml": ("RML", jaxloss.robust_multilabel_loss, _RAMPS),
}
"""Label, loss of logits and targets [n, C], and the symbols of its options, for tables."""
_COMPARE_SAMPLES = "two-way", "class-wise"


@dataclass(frozen=True)
class MultiLabelLoss(NamedLoss):
    """What is minimised."""

    name: Literal[
        "two-way", "sample-wise", "class-wise", "bce", "softmax", "asl", "warp", "rml"
    ] = "two-way"
    """Two-way loss or a half of it, or another loss; asl: asymmetric, rml: robust multi-label."""
    positive_temperature: Positive = 4.0
    """T_P of the two-way loss and its halves."""
    negative_temperature: Positive = 1.0
    """T_N of the two-way loss and its halves."""
    margin: Signed = 0.0
    """Margin ε between negative and positive logits, of the two-way loss and its halves."""
    class_wise_over: Literal["batch", "device"] = "batch"
    """Images that the class-wise half compares; device: a device's share, with --parallel pmap."""
    positive_focus: Weight = 0.0
    """γ₊ of the asymmetric loss."""
    negative_focus: Weight = 4.0
    """γ₋ of the asymmetric loss."""
    clip: Share = 0.05
    """Probability below which a negative does not contribute to the asymmetric loss."""
    stop_focus_gradient: bool = True
    """Focus weights of the asymmetric loss are constants for the gradient, as its authors train."""
    ramp: Annotated[float, Ge(-(10**6)), Lt(1)] = -0.8
    """Margin s below 1 at which the ramps of the robust multi-label loss end."""
    leak: Weight = 0.1
    """Slope λ of these ramps beyond."""
    binary_weight: Weight = 5.0
    """Weight κ of the terms of single classes in the robust multi-label loss."""


@dataclass(frozen=True)
class MultiLabelData(DataConfig):
    """Which images of a multi-label data set, and how they are augmented."""

    train_on: Literal["train", "train+validation"] = "train"
    """Stored splits to train on; without images for validation, the last checkpoint is the best."""
    holdout: Share = 0.0
    """Fraction of the training images that is held out for validation. Of a folder with validation
    images of its own, these validate, whatever the fraction."""


@dataclass(frozen=True)
class MultiLabelConfig(TrainConfig):
    """A run of protocol D."""

    protocol: ClassVar[str] = "multi-label"
    data: MultiLabelData = field(default_factory=MultiLabelData)
    loss: MultiLabelLoss = field(default_factory=MultiLabelLoss)


@dataclass(frozen=True)
class TwoWayConfig(TrainConfig):
    """A run of protocol D on images of one class."""

    protocol: ClassVar[str] = "two-way"
    data: ClassificationData = field(default_factory=ClassificationData)
    loss: MultiLabelLoss = field(default_factory=MultiLabelLoss)


class MultiLabel(Protocol):
    """Classification of images with any number of labels, which are ranked."""

    splits = SPLITS
    metrics = METRICS
    validation_metric = Metric("mean of mAP@class and mAP@sample")

    def __init__(self, config: MultiLabelConfig):
        self.config, self.data = config, config.data
        self.compares_samples = config.loss.name in _COMPARE_SAMPLES
        self.description = {"label": label(config.loss), "train_on": self.data.train_on}
        if self.data.holdout:
            self.description["holdout"] = self.data.holdout

    def parts(self, folders: Folders) -> dict[str, Part]:
        data, dataset, holdout = self.data, lookup(self.data.name), self.data.holdout
        if not dataset.multi_label:
            raise ConfigError(
                f"data.name = {data.name} has one class per image, and this preset needs images "
                "with any number of labels; choose the preset folder (new classes: "
                "folder-few-shot), or list them in a CSV file with the columns file,labels"
            )
        has_validation = "validation" in dataset.classes
        if data.train_on != "train" and not has_validation:
            raise ConfigError(
                f"data.train_on = {data.train_on}, but {data.name} has no validation images; "
                "choose train"
            )
        has_test = "test" in dataset.classes  # Else it is a folder without splits.
        stored = {"train": data.train_on} | ({"test": "test"} if has_test else {})
        if has_validation and data.train_on == "train":
            if dataset.own:
                holdout = 0.0
            elif holdout:
                raise ConfigError(
                    f"data.holdout = {holdout}, but {data.name} has validation images of its own; "
                    "set it to 0, or set data.train_on = train+validation"
                )
            stored["validation"] = "validation"
        targets = {
            part: load_labels(data.name, part, **vars(folders))[0] for part in stored.values()
        }
        rows = {split: np.arange(len(targets[part])) for split, part in stored.items()}
        # Random fractions of the images, the same in every run.
        for split, share in {"test": 0 if has_test else TEST_SHARE, "validation": holdout}.items():
            if not share:
                continue
            size = len(rows["train"])
            held_out = int(np.floor(share * size + 0.5))
            if not held_out:
                option = "data.holdout" if split == "validation" else "the share for test"
                raise ConfigError(f"{option} = {share} of {size} images of {data.name} is none")
            random = np.random.Generator(np.random.Philox(key=[_STREAMS[split], 0]))
            chosen = np.split(rows["train"][random.permutation(size)], [held_out])
            stored[split] = stored["train"]
            chosen = _labels_in_training(targets[stored[split]] == 1, *chosen)
            rows[split], rows["train"] = map(np.sort, chosen)
        return {
            split: Part(
                partial(np.sum, targets[part][rows[split]] > 0, axis=0),
                partial(load_split, data.name, part, rows=rows[split], **vars(folders)),
                len(rows[split]),
            )
            for split, part in stored.items()
        }

    def check_options(self, num_features: int) -> None:
        strategy = self.config.sampling.strategy
        if strategy != "random":
            raise ConfigError(
                f"sampling.strategy = {strategy} needs one class per image; choose `random`"
            )

    def check_data(self, num_features: int, counts: ClassCounts) -> None:
        for split, of_split in counts.items():
            if not of_split.any():
                raise ConfigError(f"no {split} image of {self.data.name} has a label; add some")
            missing = int((of_split == 0).sum())
            if missing and is_first():
                _log.warning("%d labels have no %s image", missing, split)

    def objective(self, problem: Problem) -> Objective:
        loss_of = build_loss(self.config.loss, problem)
        init_head = partial(init_linear_head, problem)
        return objective_of_logits(init_head, head_logits, loss_of, accuracy=False)

    def validate(self, outputs: Outputs) -> float:
        """The mean of the two: each half of the two-way loss favours one of them."""
        return sum(_maps(evaluate_scores(outputs.logits(), outputs.labels))) / 2

    def evaluate(self, split: str, outputs_of_split: OutputsOf) -> dict[str, Any]:
        outputs = outputs_of_split(split)
        result = evaluate_scores(outputs.logits(), outputs.labels)
        return {"result": result, "metrics": measured(METRICS, _maps(result))}

    def report(self, results: dict[str, Any]) -> list[str]:
        result = results["result"]
        unlabelled = result["samples_without_positive"]
        absent = result["classes_without_positive"]
        return [
            f"{result['samples']} {results['split']} images"
            + (f" ({unlabelled} more have no label)" if unlabelled else "")
            + f", {result['classes']} labels"
            + (f" ({absent} more have no image)" if absent else ""),
            "",
            *metrics_table(results["metrics"]),
        ]


class TwoWay(Classification):
    """Classification, with the losses and the metrics of multi-label runs on one-hot targets."""

    def __init__(self, config: TwoWayConfig):
        super().__init__(config.data, label(config.loss))
        self.loss = config.loss
        self.compares_samples = self.loss.name in _COMPARE_SAMPLES
        self.metrics = [*self.metrics, *METRICS]

    def objective(self, problem: Problem) -> Objective:
        """A linear classifier, which predicts the largest logit; softmax is cross-entropy."""
        loss_of = build_loss(self.loss, problem)
        one_hot = partial(jax.nn.one_hot, num_classes=len(problem.class_counts), dtype=jnp.int8)
        return objective_of_logits(
            partial(init_linear_head, problem),
            head_logits,
            lambda logits, labels: loss_of(logits, one_hot(labels)),
        )

    def evaluate(self, split: str, outputs_of_split: OutputsOf) -> dict[str, Any]:
        outputs = outputs_of_split(split)
        results = super().evaluate(split, lambda split: outputs)
        targets = outputs.labels[:, None] == np.arange(len(outputs.class_counts))
        found = evaluate_scores(outputs.logits(), targets)
        results["metrics"] += measured(METRICS, _maps(found))
        return results


def _maps(result: dict[str, Any]) -> tuple[float, float]:
    """The values of `METRICS`."""
    return result["map_class"], result["map_sample"]


def _labels_in_training(
    has_label: np.ndarray, held_out: np.ndarray, training: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a random split, with some moved so that no label is only in those held out."""
    while (lacking := has_label[held_out].any(0) & ~has_label[training].any(0)).any():
        moved = held_out[has_label[held_out, lacking.argmax()].argmax()]
        held_out, training = held_out[held_out != moved], np.append(training, moved)
    return held_out, training


def build_loss(options: MultiLabelLoss, problem: Problem) -> Callable[[Array, Array], Array]:
    """The loss of a batch: `(logits, targets) -> scalar`, both `[n, C]`."""
    axis_name, by_device = problem.axis_name, options.class_wise_over == "device"
    if problem.mesh is not None and by_device:
        raise ConfigError(
            "loss.class_wise_over = device needs --parallel pmap: with jit, a step sees the whole "
            "batch at once; choose pmap, or set loss.class_wise_over = batch"
        )
    _, loss, symbols = _METHODS[options.name]
    values = {option: vars(options)[option] for option in symbols}
    if axis_name is None or not by_device or options.name not in _COMPARE_SAMPLES:
        return partial(loss, **values, axis_name=axis_name)

    def loss_by_device(logits: Array, targets: Array) -> Array:
        value = lax.pmean(jaxloss.class_wise_loss(logits, targets, **values), axis_name)
        if options.name == "two-way":
            value += jaxloss.sample_wise_loss(logits, targets, **values, axis_name=axis_name)
        return value

    return loss_by_device


def label(options: MultiLabelLoss) -> str:
    """The loss with those of its options that differ from the paper's, for tables."""
    name, _, symbols = _METHODS[options.name]
    default = vars(MultiLabelLoss())
    for option, symbol in symbols.items():
        if (value := vars(options)[option]) != default[option]:
            name += f", {symbol}" if isinstance(value, bool) else f", {symbol} = {value:g}"
    by_device = options.name in _COMPARE_SAMPLES and options.class_wise_over == "device"
    return name + ", by device" * by_device
