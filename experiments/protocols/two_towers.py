"""Two towers: a drawing and the name of its class, as neighbours in one space.

Sources: Radford et al., Learning Transferable Visual Models From Natural Language Supervision
(CLIP), ICML 2021; Zhai et al., Sigmoid Loss for Language Image Pre-Training (SigLIP), ICCV 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Integer

import jaxloss
from experiments.config import Folders, NamedLoss, Positive, Signed, TrainConfig, Width
from experiments.contracts import (
    Loss,
    Metric,
    Objective,
    Outputs,
    Part,
    Problem,
    Protocol,
    measured,
)
from experiments.data.pipeline import load_split, stored_counts
from experiments.data.selection import labels_of
from experiments.datasets.icons import class_names
from experiments.errors import ConfigError
from experiments.models.characters import character_codes, embed_characters, init_characters
from experiments.protocols.linear_head import over_devices
from experiments.reporting.markdown import format_value, table

SPLITS = ("base", "validation", "novel")
"""Drawings of the base classes to train on, others of them for validation; the novel classes."""
NEW_DRAWINGS = "new-drawings"
"""More drawings of the base classes that the run does not train on."""
_EVERY = 10
_PLACES = {"validation": 4, NEW_DRAWINGS: 9}
"""Which ones of `_EVERY` drawings of a base class are held out."""
_KS = (1, 5)
_DIRECTIONS = ("image to name", "name to image")
METRICS = [Metric(f"{direction} recall@{k}") for direction in _DIRECTIONS for k in _KS]
"""Of the drawings of a split and the names of its classes."""


@dataclass(frozen=True)
class TwoTowersLoss(NamedLoss):
    """What is minimised."""

    name: Literal["info-nce", "sigmoid"] = "info-nce"
    """Softmax over the batch in both directions (CLIP), or a sigmoid for every pair (SigLIP)."""
    temperature: Positive = 0.07
    """First temperature of info-nce, which is learned."""
    scale: Positive = 10.0
    """First scale of sigmoid, which is learned."""
    bias: Signed = -10.0
    """First bias of sigmoid, which is learned."""
    dim: Width = 64
    """Dimensions of the space that both towers map to."""
    characters: Width = 64
    """Features of a character inside the encoder of names."""


@dataclass(frozen=True)
class TwoTowersConfig(TrainConfig):
    """A run of two towers."""

    protocol: ClassVar[str] = "two-towers"

    loss: TwoTowersLoss = field(default_factory=TwoTowersLoss)


def build(config: TwoTowersConfig) -> Protocol:
    """The protocol of a run."""
    name, loss = config.data.name, config.loss

    def check_options(num_features: int) -> None:
        if name != "icons":
            raise ConfigError(f"data.name must be icons, whose classes have names, got {name}")

    return Protocol(
        splits=SPLITS,
        parts=partial(parts, name),
        check_data=lambda num_features, counts: None,
        check_options=check_options,
        objective=partial(objective, loss),
        validation_metric=METRICS[0],
        validate=lambda outputs: retrieval(outputs, "base")[0],
        metrics=[*METRICS, *map(_of_base, METRICS)],
        evaluate=evaluate,
        description={"label": {"info-nce": "InfoNCE", "sigmoid": "Sigmoid"}[loss.name]},
        report=report,
        compares_samples=True,
    )


def _of_base(metric: Metric) -> Metric:
    return metric._replace(name=f"{metric.name} (base classes)")


def parts(name: str, folders: Folders) -> dict[str, Part]:
    """The drawings of every split, and `NEW_DRAWINGS`."""
    counts = stored_counts(name, **vars(folders))
    labels = labels_of(counts["base"])
    place = (np.arange(len(labels)) - np.searchsorted(labels, labels)) % _EVERY
    rows = {split: np.flatnonzero(place == number) for split, number in _PLACES.items()}
    rows["base"] = np.flatnonzero(~np.isin(place, [*_PLACES.values()]))
    read = partial(load_split, name, **vars(folders))
    novel = Part(lambda: counts["novel"], partial(read, "novel"))
    return {"novel": novel} | {
        split: Part(partial(np.bincount, labels[own]), partial(read, "base", rows=own))
        for split, own in rows.items()
    }


def objective(options: TwoTowersLoss, problem: Problem) -> Objective:
    """A projection of features, an encoder of names, and a learned temperature, or scale and bias.

    Pairs of different drawings and equal names are neither positive nor negative.
    """
    codes = character_codes(class_names("base"))

    is_info_nce = options.name == "info-nce"

    def init_head(key: Array) -> dict[str, Any]:
        of_images, of_names = jax.random.split(key)
        shape = (problem.num_features, options.dim)
        first = 1 / options.temperature if is_info_nce else options.scale
        return ({} if is_info_nce else {"bias": jnp.float32(options.bias)}) | {
            "images": jax.nn.initializers.lecun_normal()(of_images, shape),
            "names": init_characters(of_names, width=options.characters, dim=options.dim),
            "log_scale": jnp.float32(np.log(first)),
        }

    def pair_loss(
        features: Float[Array, "n d"],
        labels: Integer[Array, " n"],
        head: dict[str, Any],
        *,
        axis_name: Any = None,
    ) -> Array:
        images = features @ head["images"]
        names = embed_characters(head["names"], jnp.asarray(codes))[labels]
        scale = jnp.exp(head["log_scale"])
        common: dict[str, Any] = {"ids": labels, "axis_name": axis_name}
        if is_info_nce:
            return jaxloss.info_nce_loss(images, names, temperature=1 / scale, **common)
        common |= {"scale": scale, "bias": head["bias"]}
        return jaxloss.sigmoid_contrastive_loss(images, names, **common)

    loss_of = over_devices(pair_loss, problem)

    def loss(features, labels, head, objective_state):
        learned = {"scale": jnp.exp(head["log_scale"])}
        return Loss(loss_of(features, labels, head), objective_state, learned)

    def logits(features, head, objective_state):
        names = embed_characters(head["names"], jnp.asarray(codes))
        cosines = jaxloss.cosine_logits(features @ head["images"], names.T)
        return jnp.exp(head["log_scale"]) * cosines + head.get("bias", 0)

    return Objective(init_head, loss, logits)


def retrieval(outputs: Outputs, classes: str) -> list[float]:
    """The values of `METRICS`: drawings of the `base` or `novel` classes, and their names."""
    names, head = character_codes(class_names(classes)), outputs.head
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


def evaluate(split: str, outputs_of_split: Callable[[str], Outputs]) -> dict[str, Any]:
    """Retrieval in both directions on a split, and on new drawings of the base classes."""
    metrics, rows = [], []
    for part, own in ((split, METRICS), (NEW_DRAWINGS, [*map(_of_base, METRICS)])):
        outputs, classes = outputs_of_split(part), "novel" if part == "novel" else "base"
        values = retrieval(outputs, classes)
        metrics += measured(own, values)
        names = f"{len(class_names(classes))} {classes}"
        rows.append([names, len(outputs.labels), values, chance(outputs.labels)])
    return {"metrics": metrics, "retrieval": rows}


def report(results: dict[str, Any]) -> list[str]:
    """A phrase on the evaluation, and a table of both directions with the level of chance."""
    percent = partial(format_value, unit="%", digits=1)
    rows = [
        [classes, drawings, *(f"{percent(v)} ({percent(c)})" for v, c in zip(*both, strict=True))]
        for classes, drawings, *both in results["retrieval"]
    ]
    return [
        "retrieval between drawings and the names of their classes",
        "",
        *table(["classes", "drawings", *(f"{metric.name} (%)" for metric in METRICS)], rows),
        "",
        "In brackets: the value for a random order. All drawings of novel classes are new, and so "
        "are their names. Of the base classes, the training has other drawings and the names.",
    ]
