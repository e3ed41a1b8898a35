"""Protocol A: few-shot transfer with integrated losses (Kobayashi, BMVC 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxloss
from experiments.core.config import TrainConfig, to_dict
from experiments.core.errors import ConfigError
from experiments.core.protocol import (
    ClassCounts,
    Loss,
    Metric,
    Objective,
    Outputs,
    OutputsOf,
    Problem,
    measured,
)
from experiments.data.sampling import batch_size_of
from experiments.evaluation.feature_space import (
    ClassifierSubspace,
    classifier_subspace,
    split_by_span,
)
from experiments.evaluation.few_shot import (
    Distance,
    EpisodeConfig,
    evaluate_prototypes,
    notes_on_classes,
)
from experiments.papers import integration
from experiments.papers.classification import head_logits, init_linear_head, train_accuracy
from experiments.papers.few_shot_data import FewShotData, NovelClasses
from experiments.papers.integration import IntegratedLoss, terms
from experiments.reporting.markdown import format_value
from experiments.reporting.run import episodes_table

RETRIEVAL = [Metric("recall@1"), Metric("MAP@R")]
"""Of every image among all others of its split, by the cosine of their features."""
_retrieval = jax.jit(partial(jaxloss.retrieval_metrics, ks=(1,)))


@dataclass(frozen=True)
class IntegrationEvaluation(EpisodeConfig):
    """Evaluation by the nearest prototype; validations are 1-shot."""

    distances: tuple[Distance, ...] = ("euclidean", "cosine")
    """Distances of a query from a prototype; one evaluation for each."""
    span: bool = False
    """Add metrics of the classifier's span: accuracies, cosine of gradients, variance and rank."""


@dataclass(frozen=True)
class FewShotConfig(TrainConfig):
    """A run of protocol A."""

    protocol: ClassVar[str] = "few-shot"
    data: FewShotData = field(default_factory=FewShotData)
    loss: IntegratedLoss = field(default_factory=IntegratedLoss)
    evaluation: IntegrationEvaluation = field(default_factory=IntegrationEvaluation)


class FewShot(NovelClasses):
    """A linear classifier and a metric loss, evaluated by the nearest prototype."""

    validation_metric = Metric("1-shot accuracy")

    def __init__(self, config: FewShotConfig):
        self.config, self.loss, evaluation = config, config.loss, config.evaluation
        super().__init__(config.data, evaluation)
        _, self.classification, self.metric = terms(self.loss.name)
        self.compares_samples = bool(self.metric)
        distances = dict.fromkeys(evaluation.distances)
        accuracies = [_accuracy(k, distance) for distance in distances for k in evaluation.shots]
        self.span_metrics = _span_metrics(evaluation.shots) if evaluation.span else []
        self.metrics = [*accuracies, *RETRIEVAL, *self.span_metrics]
        self.description = {
            "label": integration.label(self.loss.name),
            "evaluation": to_dict(evaluation),
            "base_classes": config.data.base_classes,
            "subset_seed": config.data.subset_seed,
        }

    def check_options(self, num_features: int) -> None:
        super().check_options(num_features)
        if self.loss.queue and not integration.takes_queue(self.loss.name):
            raise ConfigError(
                f"loss.queue = {self.loss.queue} needs a metric loss that compares images, and "
                f"{self.loss.name} has none; set loss.queue = 0"
            )

    def check_data(self, num_features: int, counts: ClassCounts) -> None:
        """Checks that classes give the episodes, and features leave the metric loss a subspace."""
        for split, shots in (("validation", (1,)), ("novel", self.evaluation.shots)):
            if split in counts:
                self.check_classes(counts[split], f"{split} classes of {self.data.name}", shots)
        name, num_classes = self.loss.name, len(counts["base"])
        if terms(name).integration == "direct" and num_features <= num_classes:
            raise ConfigError(
                f"{name} leaves the metric loss no subspace: the classifier of {num_classes} "
                f"classes spans all {num_features} dimensions of the features. Choose "
                f"spectral:{name.rpartition(':')[2]}, or a wider model"
            )

    def objective(self, problem: Problem) -> Objective:
        options, axis_name = self.loss, problem.axis_name
        loss_of = integration.build_loss(options, problem)

        def loss(features, labels, head, queue):
            earlier, means = {}, {}
            if options.queue:
                earlier = _own_share(queue, axis_name)
                rows = integration.metric_features(options, features)
                queue = jaxloss.push(queue, rows, labels, axis_name=axis_name)
            value = loss_of(features, labels, head["kernel"], head["bias"], **earlier)
            if self.classification:
                means = train_accuracy(head_logits(features, head, queue), labels)
            return Loss(value, queue, means)

        def init_state():
            return jaxloss.make_queue(options.queue, problem.num_features) if options.queue else ()

        trains_head = self.classification or self.metric in integration.WITH_PROXIES
        init_head = partial(init_linear_head, problem)
        own = () if trains_head else None
        return Objective(init_head, loss, head_logits, init_state, classifier_state=own)

    def validate(self, outputs: Outputs) -> float:
        return self.accuracy_in_episodes(outputs, shots=1)

    def diagnose(self, outputs: Outputs) -> dict[str, float]:
        """The classifier's effective rank, and the shares of the features' variance in its span."""
        if (found := self._subspace(outputs)) is None:
            return {}
        return {
            "classifier_rank": found.effective_rank,
            "variance_in_span": found.variance_share,
            "class_variance_in_span": found.class_variance_share,
        }

    def _subspace(self, outputs: Outputs) -> ClassifierSubspace | None:
        if not self.classification:
            return None
        kernel = np.asarray(outputs.head["kernel"])
        return classifier_subspace(outputs.features, outputs.labels, kernel)

    def evaluate(self, split: str, outputs_of_split: OutputsOf) -> dict[str, Any]:
        evaluation, outputs = self.config.evaluation, outputs_of_split(split)
        results, metrics, episodes = [], [], {}
        for distance in dict.fromkeys(evaluation.distances):
            for result, accuracies in evaluate_prototypes(
                outputs.features, outputs.labels, config=evaluation, distance=distance
            ):
                own = _accuracy(result.shots, distance)
                results.append(result._asdict())
                metrics.append(own.measured(result.accuracy, result.interval))
                episodes[own.name] = accuracies.tolist()
        found = _retrieval(jnp.asarray(outputs.features), jnp.asarray(outputs.labels))
        metrics += measured(RETRIEVAL, [float(found.recall[0]), float(found.map_at_r)])
        subspace = self._subspace(outputs)
        if evaluation.span:
            values: list[float | None] = [None] * len(self.span_metrics)
            if subspace is not None:
                accuracies = [
                    result.accuracy
                    for part in split_by_span(outputs.features, np.asarray(outputs.head["kernel"]))
                    for result, _ in evaluate_prototypes(
                        part, outputs.labels, config=evaluation, distance="euclidean"
                    )
                ]
                sampling, training = self.config.sampling, outputs_of_split("base")
                size = batch_size_of(sampling.strategy, sampling.batch_size)
                cosine = integration.gradient_cosine(self.loss, training, size)
                values = [*accuracies, subspace.variance_share, subspace.effective_rank, cosine]
            metrics += measured(self.span_metrics, values)
        return {
            "evaluation": to_dict(evaluation),
            "results": results,
            "notes": notes_on_classes(results),
            "metrics": metrics,
            "episodes": episodes,
            "subspace": None if subspace is None else subspace._asdict(),
        }

    def report(self, results: dict[str, Any]) -> list[str]:
        evaluation = results["evaluation"]
        values = {found["name"]: found["value"] for found in results["metrics"]}
        retrieval = (f"{m.name} {format_value(values[m.name], '%', digits=2)} %" for m in RETRIEVAL)
        lines = [
            f"{evaluation['ways']}-way (chance: {100 / evaluation['ways']:.0f} %), "
            f"{evaluation['queries']} queries per class, nearest "
            f"prototype ({' and '.join(dict.fromkeys(evaluation['distances']))})",
            "",
            *episodes_table(results["results"]),
            "",
            "Retrieval of every image among all others of the split (cosine): "
            f"{', '.join(retrieval)}.",
        ]
        if number := results.get("base_classes"):
            chosen = f"{number} of {results['data']}, chosen by the seed {results['subset_seed']}"
            lines += ["", f"Base classes: {chosen}."]
        if subspace := results.get("subspace"):
            shares = subspace["variance_share"], subspace["class_variance_share"]
            inside, classes = (format_value(share, "%") for share in shares)
            lines += [
                "",
                f"Span of the classifier ({len(subspace['singular_values'])} singular values, "
                f"effective rank {subspace['effective_rank']:.1f}): it contains {inside} % of the "
                f"variance of the features, and {classes} % of the variance between their classes.",
            ]
        return lines


def _accuracy(shots: int, distance: Distance) -> Metric:
    return Metric(f"{shots}-shot accuracy" + ("" if distance == "euclidean" else f" ({distance})"))


def _span_metrics(shots: tuple[int, ...]) -> list[Metric]:
    sides = [(k, side) for side in ("inside", "outside") for k in shots]
    return [
        *(Metric(f"{k}-shot accuracy {side} the span") for k, side in sides),
        Metric("variance inside the span", higher_is_better=None),
        Metric("effective rank of the classifier", "", higher_is_better=None),
        Metric("cosine of the gradients inside the span", "", higher_is_better=None),
    ]


def _own_share(queue: jaxloss.Queue, axis_name: str | None) -> dict[str, Array]:
    """The references of a loss: of a queue that every device has, the device's share of rows."""
    features, labels = queue.features, queue.labels
    if axis_name is not None:
        devices = lax.axis_size(axis_name)
        if len(labels) % devices:
            raise ConfigError(
                f"loss.queue = {len(labels)} must be a multiple of the {devices} devices"
            )
        features, labels = (
            rows.reshape(devices, -1, *rows.shape[1:])[lax.axis_index(axis_name)]
            for rows in (features, labels)
        )
    return {"references": features, "reference_labels": labels}
