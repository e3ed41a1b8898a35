"""Protocol D: multi-label classification with the two-way loss (Kobayashi, CVPR 2023)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

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
from experiments.core.protocol import Metric, Objective, Outputs, Part, Problem, Protocol, measured
from experiments.data.pipeline import load_labels, load_split
from experiments.data.selection import TEST_SHARE
from experiments.datasets import lookup
from experiments.evaluation.multilabel import evaluate_scores
from experiments.papers.classification import SPLITS
from experiments.papers.linear_head import head_logits, init_linear_head, objective_of_logits
from experiments.reporting.run import metrics_table

_log = logging.getLogger(__name__)

_STREAMS = {"test": 5, "validation": 4}
"""Random streams of the images that are split off; `experiments.data.selection` has those before
them."""

METRICS = (Metric("mAP@class"), Metric("mAP@sample"))


class _Method(NamedTuple):
    """A loss of logits and targets [n, C], and the symbols of its options, for tables."""

    label: str
    loss: Callable[..., Array]
    options: Mapping[str, str] = {}
    compares_samples: bool = False


_SOFT_GAP = {"positive_temperature": "T_P", "negative_temperature": "T_N", "margin": "ε"}
_FOCUS = {"positive_focus": "γ₊", "negative_focus": "γ₋", "clip": "m"}
_FOCUS["stop_focus_gradient"] = "full gradient"
_RAMPS = {"ramp": "s", "leak": "λ", "binary_weight": "κ"}
_METHODS = {
    "two-way": _Method("Two-way", jaxloss.two_way_loss, _SOFT_GAP, compares_samples=True),
    "sample-wise": _Method("Sample-wise", jaxloss.sample_wise_loss, _SOFT_GAP),
    "class-wise": _Method("Class-wise", jaxloss.class_wise_loss, _SOFT_GAP, compares_samples=True),
    "bce": _Method("BCE", jaxloss.sigmoid_loss),
    "softmax": _Method("Softmax", jaxloss.multilabel_softmax_loss),
    "asl": _Method("ASL", jaxloss.asymmetric_loss, _FOCUS),
    "warp": _Method("WARP", jaxloss.warp_loss),
    "rml": _Method("RML", jaxloss.robust_multilabel_loss, _RAMPS),
}


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


def build(config: MultiLabelConfig) -> Protocol:
    """The protocol of a run."""
    data, loss = config.data, config.loss
    held_out = {"holdout": data.holdout} if data.holdout else {}

    def check_options(num_features: int) -> None:
        if config.sampling.strategy != "random":
            raise ConfigError(
                f"sampling.strategy = {config.sampling.strategy} needs one class per image; choose "
                "`random`"
            )

    def check_data(num_features: int, counts: Mapping[str, np.ndarray]) -> None:
        for split, of_split in counts.items():
            if not of_split.any():
                raise ConfigError(f"no {split} image of {data.name} has a label; add some")
            missing = int((of_split == 0).sum())
            if missing and is_first():
                _log.warning("%d labels have no %s image", missing, split)

    return Protocol(
        splits=SPLITS,
        parts=partial(parts, data),
        check_options=check_options,
        compares_samples=compares_samples(loss),
        check_data=check_data,
        objective=partial(objective, loss),
        validation_metric=Metric("mean of mAP@class and mAP@sample"),
        validate=validate,
        metrics=METRICS,
        evaluate=evaluate,
        description={"label": label(loss), "train_on": data.train_on, **held_out},
        report=report,
    )


def parts(data: MultiLabelData, folders: Folders) -> dict[str, Part]:
    """The images for training, for test, and for validation where there are some."""
    dataset = lookup(data.name)
    if not dataset.multi_label:
        raise ConfigError(
            f"data.name = {data.name} has one class per image, and multi-label classification "
            "needs images with any number of labels; choose the preset folder, or list them in a "
            "CSV file with the columns file,labels"
        )
    has_validation = "validation" in dataset.classes
    if data.train_on != "train" and not has_validation:
        raise ConfigError(
            f"data.train_on = {data.train_on}, but {data.name} has no validation images; "
            "choose train"
        )
    has_test = "test" in dataset.classes  # Else it is a folder without splits.
    stored = {"train": data.train_on} | ({"test": "test"} if has_test else {})
    holdout = data.holdout
    if has_validation and data.train_on == "train":
        if dataset.own:
            holdout = 0.0
        elif holdout:
            raise ConfigError(
                f"data.holdout = {data.holdout}, but {data.name} has validation images of its own; "
                "set it to 0, or set data.train_on = train+validation"
            )
        stored["validation"] = "validation"
    targets = {part: load_labels(data.name, part, **vars(folders))[0] for part in stored.values()}
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
        order = np.random.Generator(np.random.Philox(key=[_STREAMS[split], 0])).permutation(size)
        stored[split] = stored["train"]
        chosen = np.split(rows["train"][order], [held_out])
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


def _labels_in_training(
    has_label: np.ndarray, held_out: np.ndarray, training: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a random split, with some moved so that no label is only in those held out."""
    while (lacking := has_label[held_out].any(0) & ~has_label[training].any(0)).any():
        moved = held_out[has_label[held_out, lacking.argmax()].argmax()]
        held_out, training = held_out[held_out != moved], np.append(training, moved)
    return held_out, training


def compares_samples(options: MultiLabelLoss) -> bool:
    """Whether the loss compares samples with each other."""
    return _METHODS[options.name].compares_samples


def build_loss(options: MultiLabelLoss, problem: Problem) -> Callable[[Array, Array], Array]:
    """The loss of a batch: `(logits, targets) -> scalar`, both `[n, C]`."""
    method, axis_name = _METHODS[options.name], problem.axis_name
    if problem.mesh is not None and options.class_wise_over == "device":
        raise ConfigError(
            "loss.class_wise_over = device needs --parallel pmap: with jit, a step sees the whole "
            "batch at once; choose pmap, or set loss.class_wise_over = batch"
        )
    values = {option: vars(options)[option] for option in method.options}
    if axis_name is None or options.class_wise_over == "batch" or not method.compares_samples:
        return partial(method.loss, **values, axis_name=axis_name)

    def loss(logits: Array, targets: Array) -> Array:
        value = lax.pmean(jaxloss.class_wise_loss(logits, targets, **values), axis_name)
        if options.name == "two-way":
            value += jaxloss.sample_wise_loss(logits, targets, **values, axis_name=axis_name)
        return value

    return loss


def objective(options: MultiLabelLoss, problem: Problem) -> Objective:
    """A linear classifier with one of the losses; it ranks by its logits."""
    init_head, loss_of = partial(init_linear_head, problem), build_loss(options, problem)
    return objective_of_logits(init_head, head_logits, loss_of, accuracy=False)


def validate(outputs: Outputs) -> float:
    """The mean of mAP@class and mAP@sample: each half of the two-way loss favours one of them."""
    result = evaluate_scores(outputs.logits(), outputs.labels)
    return (result.map_class + result.map_sample) / 2


def evaluate(split: str, outputs_of_split: Callable[[str], Outputs]) -> dict[str, Any]:
    """mAP@class and mAP@sample, and the average precision of every class."""
    outputs = outputs_of_split(split)
    result = evaluate_scores(outputs.logits(), outputs.labels)
    values = result.map_class, result.map_sample
    return {"result": result._asdict(), "metrics": measured(METRICS, values)}


def label(options: MultiLabelLoss) -> str:
    """The loss with those of its options that differ from the paper's, for tables."""
    method, default = _METHODS[options.name], MultiLabelLoss()
    changed = [
        f", {symbol}" if isinstance(value, bool) else f", {symbol} = {value:g}"
        for option, symbol in method.options.items()
        if (value := vars(options)[option]) != vars(default)[option]
    ]
    if method.compares_samples and options.class_wise_over == "device":
        changed.append(", by device")
    return method.label + "".join(changed)


def report(results: dict[str, Any]) -> list[str]:
    """A phrase on the data, and a table of the metrics."""
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
