"""Two towers: a drawing and the name of its class, as neighbours in one space.

Sources: Radford et al., Learning Transferable Visual Models From Natural Language Supervision
(CLIP), ICML 2021; Zhai et al., Sigmoid Loss for Language Image Pre-Training (SigLIP), ICCV 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxloss
from experiments.config import Count, Folders, NamedLoss, Positive, TrainConfig
from experiments.contracts import ImageSet, Loss, Metric, Objective, Outputs, Problem, Protocol
from experiments.contracts import measured as measured_metrics
from experiments.data.builders.icons.builder import class_names
from experiments.data.pipeline import class_counts as stored_class_counts
from experiments.data.pipeline import load_split
from experiments.errors import ConfigError
from experiments.models.characters import character_codes, embed_characters, init_characters
from experiments.protocols.linear_head import over_devices
from experiments.reporting.markdown import format_value, table

SPLITS = ("base", "validation", "novel")
NEW_DRAWINGS = "new-drawings"
"""Drawings of the base classes that the run does not train on: every fifth of a class."""
_EVERY = 5
_KS = (1, 5)
_DIRECTIONS = ("image to name", "name to image")
METRICS = [Metric(f"{direction} recall@{k}") for direction in _DIRECTIONS for k in _KS]
"""Of the names of a split, and its drawings: of held-out classes, names that are new, too."""


@dataclass(frozen=True)
class TwoTowersLoss(NamedLoss):
    """What is minimised."""

    name: Literal["info-nce", "sigmoid"] = "info-nce"
    """Softmax over the batch in both directions (CLIP), or a sigmoid for every pair (SigLIP)."""
    temperature: Positive = 0.07
    """First temperature of info-nce, which is learned."""
    scale: Positive = 10.0
    """First scale of sigmoid, which is learned."""
    bias: float = -10.0
    """First bias of sigmoid, which is learned."""
    dim: Count = 64
    """Dimensions of the space that both towers map to."""
    characters: Count = 64
    """Features of a character inside the encoder of names."""


@dataclass(frozen=True)
class TwoTowersConfig(TrainConfig):
    """A run of two towers."""

    protocol: ClassVar[str] = "two-towers"

    loss: TwoTowersLoss = field(default_factory=TwoTowersLoss)


def build(config: TwoTowersConfig) -> Protocol:
    """The protocol of a run."""
    name, loss = config.data.name, config.loss
    return Protocol(
        splits=SPLITS,
        load=partial(load, name),
        class_counts=partial(class_counts, name),
        check_data=lambda num_features, counts: None,
        check_options=lambda num_features: _check_data_set(name),
        objective=partial(objective, loss),
        validation=METRICS[1],
        validate=lambda outputs: retrieval(outputs, "validation")[1],
        metrics=[*METRICS, *map(_of_base, METRICS)],
        evaluate=evaluate,
        description={"label": {"info-nce": "InfoNCE", "sigmoid": "Sigmoid"}[loss.name]},
        report=report,
        compares_samples=True,
    )


def _check_data_set(name: str) -> None:
    if name != "icons":
        raise ConfigError(f"data.name must be icons, whose classes have names, got {name}")


def _of_base(metric: Metric) -> Metric:
    return metric._replace(name=f"{metric.name} (base classes)")


def load(name: str, folders: Folders, split: str) -> ImageSet:
    """The drawings of a split, of `base` only those to train on; or `NEW_DRAWINGS`."""
    images = load_split(name, "base" if split == NEW_DRAWINGS else split, **vars(folders))
    if split not in ("base", NEW_DRAWINGS):
        return images
    rows = _is_new(images.labels) == (split == NEW_DRAWINGS)
    return dataclasses.replace(images, images=images.images[rows], labels=images.labels[rows])


def _is_new(labels: np.ndarray) -> np.ndarray:
    """Whether a drawing is left out of the training, from the ascending labels of all: bool [n]."""
    within = np.arange(len(labels)) - np.searchsorted(labels, labels)
    return within % _EVERY == _EVERY - 1


def class_counts(name: str, folders: Folders) -> Mapping[str, np.ndarray]:
    """The number of drawings of every class in the splits, of `base` of those to train on."""
    counts = stored_class_counts(name, **vars(folders))
    return {**counts, "base": counts["base"] - counts["base"] // _EVERY}


def objective(options: TwoTowersLoss, problem: Problem) -> Objective:
    """A projection of features, an encoder of names, and a learned temperature, or scale and bias.

    Pairs of different drawings and equal names are neither positive nor negative.
    """
    codes = character_codes(class_names("base"))

    def init_head(key: Array) -> dict[str, Any]:
        of_images, of_names = jax.random.split(key)
        shape = (problem.num_features, options.dim)
        first = 1 / options.temperature if options.name == "info-nce" else options.scale
        bias = {} if options.name == "info-nce" else {"bias": jnp.float32(options.bias)}
        return bias | {
            "images": jax.nn.initializers.lecun_normal()(of_images, shape),
            "names": init_characters(of_names, width=options.characters, dim=options.dim),
            "log_scale": jnp.float32(np.log(first)),
        }

    def pair_loss(
        features: Array, labels: Array, head: dict[str, Any], *, axis_name: Any = None
    ) -> Array:
        images = features @ head["images"]
        names = embed_characters(head["names"], jnp.asarray(codes))[labels]
        scale = jnp.exp(head["log_scale"])
        common: dict[str, Any] = {"ids": labels, "axis_name": axis_name}
        if options.name == "info-nce":
            return jaxloss.info_nce_loss(images, names, temperature=1 / scale, **common)
        return jaxloss.sigmoid_contrastive_loss(
            images, names, scale=scale, bias=head["bias"], **common
        )

    loss_of = over_devices(pair_loss, problem)

    def loss(features, labels, head, objective_state):
        learned = {"scale": jnp.exp(head["log_scale"])}
        return Loss(loss_of(features, labels, head), objective_state, learned)

    def logits(features, head, objective_state):
        names = embed_characters(head["names"], jnp.asarray(codes))
        cosines = jaxloss.cosine_logits(features @ head["images"], names.T)
        return jnp.exp(head["log_scale"]) * cosines + head.get("bias", 0)

    return Objective(init_head, loss, logits)


def retrieval(outputs: Outputs, names_of: str) -> list[float]:
    """The values of `METRICS`: from the drawings to the names of a split's classes, and back."""
    names, head = character_codes(class_names(names_of)), outputs.head
    found = _recall(outputs.features, outputs.labels, head["images"], head["names"], names)
    return np.concatenate(found).tolist()


@jax.jit
def _recall(features, labels, projection, encoder, codes):
    images, names = features @ projection, embed_characters(encoder, codes)
    of_names = jnp.arange(len(codes))
    both = (images, labels), (names, of_names)
    return [
        jaxloss.retrieval_metrics(
            *queries, ks=_KS, references=references[0], reference_labels=references[1]
        ).recall
        for queries, references in (both, both[::-1])
    ]


def chance(labels: np.ndarray) -> list[float]:
    """What `METRICS` are for a random order, from the labels of all drawings."""
    counts = np.bincount(labels)
    of_names = [min(k / len(counts), 1.0) for k in _KS]
    missed = [(len(labels) - counts - j) / (len(labels) - j) for j in range(max(_KS))]
    of_images = [float(np.mean(1 - np.prod(np.maximum(missed[:k], 0), axis=0))) for k in _KS]
    return [*of_names, *of_images]


def evaluate(split: str, outputs_of: Callable[[str], Outputs]) -> dict[str, Any]:
    """Retrieval in both directions on a split, and on new drawings of the base classes."""
    metrics, rows = [], []
    for part, names_of in ((split, split), (NEW_DRAWINGS, "base")):
        outputs = outputs_of(part)
        own = METRICS if part == split else [*map(_of_base, METRICS)]
        values = retrieval(outputs, names_of)
        metrics += measured_metrics(own, values)
        classes = f"{len(class_names(names_of))} {names_of}"
        drawings = len(outputs.labels)
        rows.append([classes, drawings, values, chance(outputs.labels)])
    return {"metrics": metrics, "retrieval": rows}


def report(results: dict[str, Any]) -> list[str]:
    """A phrase on the evaluation, and a table of both directions with the level of chance."""
    rows = [
        [classes, drawings, *(f"{_percent(v)} ({_percent(c)})" for v, c in zip(*both, strict=True))]
        for classes, drawings, *both in results["retrieval"]
    ]
    return [
        "retrieval between drawings and the names of their classes",
        "",
        *table(["classes", "drawings", *(f"{metric.name} (%)" for metric in METRICS)], rows),
        "",
        "In brackets: the value for a random order. The drawings of the base classes are new, and "
        "their names are those of the training; the names of the other classes are new, too.",
    ]


def _percent(value: float) -> str:
    return format_value(value, "%", digits=1)
