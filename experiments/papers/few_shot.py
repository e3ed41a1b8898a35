"""Protocol A: few-shot transfer with integrated losses (Kobayashi, BMVC 2024)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxloss
from experiments.core.config import Count, TrainConfig, to_dict
from experiments.core.errors import ConfigError
from experiments.core.processes import is_first
from experiments.core.protocol import (
    ClassCounts,
    Loss,
    Metric,
    Objective,
    Outputs,
    OutputsOf,
    Problem,
    Protocol,
    measured,
)
from experiments.data.sampling import batch_size_of, episode_classes
from experiments.evaluation.few_shot import (
    Distance,
    EpisodeConfig,
    accuracies_of,
    configured_episodes,
    evaluate_prototypes,
    notes_on_classes,
    prototype_predictions,
)
from experiments.evaluation.subspace import ClassifierSubspace, classifier_subspace, split_by_span
from experiments.papers import few_shot_data, integration
from experiments.papers.few_shot_data import FewShotData
from experiments.papers.integration import IntegratedLoss, terms
from experiments.papers.linear_head import head_logits, init_linear_head, train_accuracy
from experiments.reporting.markdown import format_value
from experiments.reporting.run import episodes_table
from jaxloss.sampling import Episodes

_log = logging.getLogger(__name__)

SPLITS = ("base", "validation", "novel")
RETRIEVAL = [Metric("recall@1"), Metric("MAP@R")]
"""Of every image among all others of its split, by the cosine of their features."""


@dataclass(frozen=True)
class FewShotEvaluation(EpisodeConfig):
    """Few-shot evaluation by the nearest prototype."""

    distances: tuple[Distance, ...] = ("euclidean", "cosine")
    """Distances of a query from a prototype; one evaluation for each."""
    validation_distance: Distance = "euclidean"
    """The distance in a validation."""
    validation_episodes: Count = 500
    """Episodes of a validation, which are 1-shot and otherwise as above."""


@dataclass(frozen=True)
class IntegrationEvaluation(FewShotEvaluation):
    """Few-shot evaluation by the nearest prototype, and measures of the classifier's span."""

    span: bool = False
    """Add metrics of the classifier's span: accuracies, cosine of gradients, variance and rank."""


@dataclass(frozen=True)
class FewShotConfig(TrainConfig):
    """A run of protocol A."""

    protocol: ClassVar[str] = "few-shot"

    data: FewShotData = field(default_factory=FewShotData)
    loss: IntegratedLoss = field(default_factory=IntegratedLoss)
    evaluation: IntegrationEvaluation = field(default_factory=IntegrationEvaluation)


def build(config: FewShotConfig) -> Protocol:
    """The protocol of a run."""
    data, loss, evaluation = config.data, config.loss, config.evaluation
    return Protocol(
        splits=SPLITS,
        parts=partial(few_shot_data.parts, data),
        absent=partial(few_shot_data.absent, data.name),
        check_data=partial(check_data, config),
        objective=partial(objective, loss),
        validation_metric=Metric("1-shot accuracy"),
        validate=partial(validate_prototypes, evaluation),
        metrics=accuracy_metrics(evaluation)
        + (_span_metrics(evaluation) if evaluation.span else []),
        evaluate=partial(evaluate, config),
        check_options=partial(check_options, config),
        description={
            "label": integration.label(loss.name),
            "evaluation": to_dict(evaluation),
            "base_classes": data.base_classes,
            "subset_seed": data.subset_seed,
        },
        report=report,
        compares_samples=bool(terms(loss.name).metric),
        diagnose=partial(diagnose, loss),
    )


def check_episodes(name: str, evaluation: FewShotEvaluation, counts: ClassCounts) -> None:
    """Checks that the validation and novel classes give the episodes."""
    for split, shots in (("validation", (1,)), ("novel", evaluation.shots)):
        if split in counts:
            check_class_counts(counts[split], f"{split} classes of {name}", evaluation, shots)


def check_data(config: FewShotConfig, num_features: int, counts: ClassCounts) -> None:
    """Checks that the classes give the episodes, and features leave the metric loss a subspace."""
    check_episodes(config.data.name, config.evaluation, counts)
    name, num_classes = config.loss.name, len(counts["base"])
    if terms(name).integration == "direct" and num_features <= num_classes:
        raise ConfigError(
            f"{name} leaves the metric loss no subspace: the classifier of {num_classes} classes "
            f"spans all {num_features} dimensions of the features. Choose "
            f"spectral:{name.rpartition(':')[2]}, or a wider model"
        )


def check_options(config: FewShotConfig, num_features: int) -> None:
    """Checks that a queue has a loss that uses it, and that there are enough classes."""
    few_shot_data.check_base_classes(config.data)
    if config.loss.queue and not integration.takes_queue(config.loss.name):
        raise ConfigError(
            f"loss.queue = {config.loss.queue} needs a metric loss that compares images, and "
            f"{config.loss.name} has none; set loss.queue = 0"
        )


def check_class_counts(
    counts: np.ndarray, classes: str, evaluation: EpisodeConfig, shots: Iterable[int]
) -> None:
    """Checks that classes of these sizes [C] give the episodes, with each number of shots.

    Logs how many classes are large enough, where some are not.
    """
    for number in dict.fromkeys(shots):
        try:
            found = episode_classes(counts, evaluation.ways, number, evaluation.queries)
        except ConfigError as error:
            reason = str(error).removeprefix("evaluation: ")
            raise ConfigError(
                f"the {classes} do not give the evaluation: {reason}; lower evaluation.ways, "
                "evaluation.shots or evaluation.queries"
            ) from error
        if len(found) < len(counts) and is_first():
            _log.warning(
                "%d-shot episodes draw from %d of %d %s, those with at least %d images",
                *(number, len(found), len(counts), classes, number + evaluation.queries),
            )


def objective(options: IntegratedLoss, problem: Problem) -> Objective:
    """A linear classifier, and the loss that the options name."""
    loss_of = integration.build_loss(options, problem)

    def loss(features, labels, head, objective_state):
        earlier, means = {}, {}
        if options.queue:
            earlier = _own_share(objective_state, problem.axis_name)
            rows = integration.metric_features(options, features)
            objective_state = jaxloss.push(
                objective_state, rows, labels, axis_name=problem.axis_name
            )
        value = loss_of(features, labels, head["kernel"], head["bias"], **earlier)
        if terms(options.name).classification:
            means = train_accuracy(head_logits(features, head, objective_state), labels)
        return Loss(value, objective_state, means)

    def init_state():
        return jaxloss.make_queue(options.queue, problem.num_features) if options.queue else ()

    _, classification, metric = terms(options.name)
    own = () if classification or metric in integration.WITH_PROXIES else None
    init_head = partial(init_linear_head, problem)
    return Objective(init_head, loss, head_logits, init_state, classifier_state=own)


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


def accuracy_in_episodes(
    evaluation: EpisodeConfig,
    num_episodes: int,
    shots: int,
    predict: Callable[[np.ndarray, Episodes], np.ndarray],
    outputs: Outputs,
) -> float:
    """Mean of the accuracies in episodes of the validation classes."""
    episodes = configured_episodes(
        evaluation, outputs.labels, shots=shots, num_episodes=num_episodes
    )
    return float(np.mean(accuracies_of(predict(outputs.features, episodes))))


def validate_prototypes(evaluation: FewShotEvaluation, outputs: Outputs) -> float:
    """1-shot accuracy by the nearest prototype in episodes of the validation classes."""
    predict = partial(prototype_predictions, distance=evaluation.validation_distance)
    return accuracy_in_episodes(evaluation, evaluation.validation_episodes, 1, predict, outputs)


def accuracy_metrics(evaluation: FewShotEvaluation) -> list[Metric]:
    """The accuracies for each distance and number of shots, and those of retrieval."""
    distances = dict.fromkeys(evaluation.distances)
    accuracies = [metric(shots, distance) for distance in distances for shots in evaluation.shots]
    return [*accuracies, *RETRIEVAL]


def _span_metrics(evaluation: FewShotEvaluation) -> list[Metric]:
    parts = [(part, shots) for part in ("inside", "outside") for shots in evaluation.shots]
    return [
        *(Metric(f"{shots}-shot accuracy {part} the span") for part, shots in parts),
        Metric("variance inside the span", higher_is_better=None),
        Metric("effective rank of the classifier", "", higher_is_better=None),
        Metric("cosine of the gradients inside the span", "", higher_is_better=None),
    ]


def metric(shots: int, distance: Distance = "euclidean") -> Metric:
    """The accuracy with a number of shots."""
    return Metric(f"{shots}-shot accuracy" + ("" if distance == "euclidean" else f" ({distance})"))


def evaluate(config: FewShotConfig, split: str, outputs_of_split: OutputsOf) -> dict[str, Any]:
    """The results of `evaluate_distances`, and of the classifier's subspace if there is one."""
    loss, evaluation = config.loss, config.evaluation
    outputs = outputs_of_split(split)
    results = evaluate_distances(evaluation, outputs)
    found = _subspace(loss, outputs)
    if evaluation.span:
        metrics = _span_metrics(evaluation)
        values: list[float | None] = [None] * len(metrics)  # Where no classifier is trained.
        if found is not None:
            accuracies = [
                result.accuracy
                for part in split_by_span(outputs.features, np.asarray(outputs.head["kernel"]))
                for result, _ in evaluate_prototypes(
                    part, outputs.labels, config=evaluation, distance="euclidean"
                )
            ]
            training = outputs_of_split("base")
            size = batch_size_of(config.sampling.strategy, config.sampling.batch_size)
            cosine = integration.gradient_cosine(loss, training, size)
            values = [*accuracies, found.variance_share, found.effective_rank, cosine]
        results["metrics"] += measured(metrics, values)
    return results | {"subspace": None if found is None else found._asdict()}


def evaluate_distances(evaluation: FewShotEvaluation, outputs: Outputs) -> dict[str, Any]:
    """Few-shot accuracy for each distance and number of shots, in the mean and in every episode.

    `metrics` also has those of retrieval, of every image among all others of the split.
    """
    results, metrics, episodes = [], [], {}
    for distance in dict.fromkeys(evaluation.distances):
        for result, accuracies in evaluate_prototypes(
            outputs.features, outputs.labels, config=evaluation, distance=distance
        ):
            own = metric(result.shots, distance)
            results.append(result._asdict())
            metrics.append(own.measured(result.accuracy, result.interval))
            episodes[own.name] = accuracies.tolist()
    found = _retrieval(jnp.asarray(outputs.features), jnp.asarray(outputs.labels))
    metrics += measured(RETRIEVAL, [float(found.recall[0]), float(found.map_at_r)])
    return {
        "evaluation": to_dict(evaluation),
        "results": results,
        "notes": notes_on_classes(results),
        "metrics": metrics,
        "episodes": episodes,
    }


_retrieval = jax.jit(partial(jaxloss.retrieval_metrics, ks=(1,)))


def diagnose(loss: IntegratedLoss, outputs: Outputs) -> dict[str, float]:
    """The classifier's effective rank, and the shares of the features' variance in its span."""
    if (found := _subspace(loss, outputs)) is None:
        return {}
    return {
        "classifier_rank": found.effective_rank,
        "variance_in_span": found.variance_share,
        "class_variance_in_span": found.class_variance_share,
    }


def _subspace(loss: IntegratedLoss, outputs: Outputs) -> ClassifierSubspace | None:
    if not terms(loss.name).classification:
        return None
    return classifier_subspace(outputs.features, outputs.labels, np.asarray(outputs.head["kernel"]))


def report(results: dict[str, Any]) -> list[str]:
    """A phrase on the evaluation, a table of distances and shots, and the classifier's span."""
    evaluation = results["evaluation"]
    values = {found["name"]: found["value"] for found in results["metrics"]}
    retrieval = (f"{m.name} {format_value(values[m.name], '%', digits=2)} %" for m in RETRIEVAL)
    lines = [
        f"{evaluation['ways']}-way, {evaluation['queries']} queries per class, nearest prototype "
        f"({' and '.join(dict.fromkeys(evaluation['distances']))})",
        "",
        *episodes_table(results["results"]),
        "",
        f"Retrieval of every image among all others of the split (cosine): {', '.join(retrieval)}.",
    ]
    if number := results.get("base_classes"):
        seed = results["subset_seed"]
        lines += ["", f"Base classes: {number} of {results['data']}, chosen by the seed {seed}."]
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
