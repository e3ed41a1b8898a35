"""Instance discrimination: every training image is a class of its own, of its augmented views.

Sources: Dosovitskiy et al., Discriminative Unsupervised Feature Learning with Exemplar CNNs, 2014;
Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, CVPR 2018; Wang
et al., CosFace, CVPR 2018 (the margin).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxloss
from experiments.config import Folders, NamedLoss, Positive, Signed, TrainConfig, to_dict
from experiments.contracts import (
    BATCH_AXIS,
    CLASS_AXIS,
    ImageSet,
    Loss,
    Metric,
    Objective,
    Part,
    Problem,
    Protocol,
)
from experiments.protocols import few_shot, few_shot_data
from experiments.protocols.few_shot import FewShotEvaluation
from experiments.protocols.few_shot_data import FewShotData
from experiments.protocols.linear_head import init_kernel


@dataclass(frozen=True)
class InstanceLoss(NamedLoss):
    """What is minimised."""

    name: Literal["cosine"] = "cosine"
    """Softmax cross-entropy of cosines."""
    margin: Signed = 0.2
    """Margin m that is subtracted from the target's cosine before scaling."""
    scale: Positive = 16.0
    """Factor β of the cosines."""


@dataclass(frozen=True)
class InstanceConfig(TrainConfig):
    """A run of instance discrimination."""

    protocol: ClassVar[str] = "instance"

    data: FewShotData = field(default_factory=FewShotData)
    loss: InstanceLoss = field(default_factory=InstanceLoss)
    evaluation: FewShotEvaluation = field(default_factory=FewShotEvaluation)


def build(config: InstanceConfig) -> Protocol:
    """The protocol of a run."""
    evaluation, name = config.evaluation, config.data.name
    return Protocol(
        splits=few_shot.SPLITS,
        parts=partial(parts, config.data),
        absent=partial(few_shot_data.absent, name),
        check_data=lambda num_features, counts: few_shot.check_episodes(name, evaluation, counts),
        objective=partial(objective, config.loss),
        validation_metric=Metric("1-shot accuracy"),
        validate=partial(few_shot.validate_prototypes, evaluation),
        metrics=few_shot.accuracy_metrics(evaluation),
        evaluate=lambda split, outputs_of_split: few_shot.evaluate_distances(
            evaluation, outputs_of_split(split)
        ),
        description={
            "label": "Instances, cosine softmax",
            "margin": config.loss.margin,
            "scale": config.loss.scale,
            "evaluation": to_dict(evaluation),
        },
        report=few_shot.report,
        classes_are_images=True,
    )


def parts(data: FewShotData, folders: Folders) -> dict[str, Part]:
    """As `few_shot_data.parts`, but each of the base images has a label of its own."""
    found = few_shot_data.parts(data, folders)
    base = found["base"]

    def load() -> ImageSet:
        images = base.load()
        names = [f"{images.class_names[label]} {i}" for i, label in enumerate(images.labels)]
        own = np.arange(len(names), dtype=np.int32)
        return dataclasses.replace(images, labels=own, class_names=tuple(names))

    return found | {"base": Part(lambda: np.ones(base.counts().sum(), np.int64), load)}


def objective(options: InstanceLoss, problem: Problem) -> Objective:
    """A classifier of cosines, whose classes a mesh may spread over devices.

    The loss never holds all logits.
    """
    mesh, axis_name = problem.mesh, problem.axis_name
    how: Any = {"similarity": "cosine", "margin": options.margin, "scale": options.scale}
    losses = partial(jaxloss.classifier_loss, reduction="none", **how)

    def loss(features, labels, head, objective_state):
        kernel = head["kernel"]
        if mesh is None:
            values = losses(features, labels, kernel)
        else:
            # Classes that fill up the last devices do not count.
            real = jnp.arange(kernel.shape[1]) < len(problem.class_counts)
            bias = jnp.where(real, 0, -jnp.inf).astype(kernel.dtype)
            spread = jaxloss.sharded_loss(losses, mesh, BATCH_AXIS)
            values = spread(features, labels, kernel, bias, class_axis_name=CLASS_AXIS)
        value = jnp.mean(values)
        value = value if axis_name is None else lax.pmean(value, axis_name)
        return Loss(value, objective_state, {"target_probability": jnp.mean(jnp.exp(-values))})

    def logits(features, head, objective_state):
        return options.scale * jaxloss.cosine_logits(features, head["kernel"])

    init_head = partial(init_kernel, problem, scale=1.0)
    return Objective(init_head, loss, logits, class_axes={"kernel": 1})
