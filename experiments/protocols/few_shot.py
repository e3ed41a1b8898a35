"""Protocol A: few-shot transfer with integrated losses (Kobayashi, BMVC 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from experiments.config import Count, Folders, TrainConfig, check_mixing, to_dict
from experiments.contracts import (
    EpisodeClassifier,
    ImageSet,
    Loss,
    Metric,
    Objective,
    Outputs,
    Problem,
    Protocol,
)
from experiments.data.builders import split_names
from experiments.data.pipeline import class_counts as stored_class_counts
from experiments.data.pipeline import load_split
from experiments.data.sampling import Episodes, check_episodes, index_classes
from experiments.data.selection import labels_of
from experiments.errors import ConfigError
from experiments.evaluation.few_shot import (
    Distance,
    EpisodeConfig,
    configured_episodes,
    episode_accuracies,
    evaluate_prototypes,
    prototype_predictions,
)
from experiments.evaluation.hard_episodes import episode_classifier
from experiments.evaluation.subspace import (
    ClassifierSubspace,
    classifier_subspace,
    split_by_span,
)
from experiments.protocols.integration import (
    IntegratedLoss,
    build_loss,
    gradient_cosine,
    label,
    terms,
)
from experiments.protocols.linear_head import head_logits, init_linear_head, train_accuracy
from experiments.reporting.markdown import format_value
from experiments.reporting.run import episodes_table

SPLITS = ("base", "validation", "novel")


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
    """The same, beside the subspace of the classifier."""

    span: bool = False
    """Also measure the span of the classifier: its rank, the variance and the accuracy of the
    features inside and outside of it, and for two losses the cosine between their gradients."""


@dataclass(frozen=True)
class FewShotConfig(TrainConfig):
    """A run of protocol A."""

    protocol: ClassVar[str] = "few-shot"

    loss: IntegratedLoss = field(default_factory=IntegratedLoss)
    evaluation: IntegrationEvaluation = field(default_factory=IntegrationEvaluation)


def build(config: FewShotConfig) -> Protocol:
    """The protocol of a run."""
    loss, evaluation, name = config.loss, config.evaluation, config.data.name
    parts = terms(loss.name)
    return Protocol(
        splits=SPLITS,
        load=partial(load, name),
        class_counts=partial(held_out_class_counts, name),
        check_options=lambda num_features: check_mixing(
            config.data, loss.name, compares_samples=parts.metric is not None
        ),
        check_data=partial(check_data, name, loss, evaluation),
        objective=partial(objective, loss),
        validation=Metric("1-shot accuracy"),
        validate=partial(validate_prototypes, evaluation),
        metrics=metrics(evaluation) + (_span_metrics(evaluation) if evaluation.span else []),
        evaluate=partial(evaluate, loss, evaluation, config.sampling.batch_size),
        description={
            "label": label(loss.name),
            "power": loss.power,
            "stop_gradient": loss.stop_gradient,
            "evaluation": to_dict(evaluation),
        },
        report=report,
        diagnose=partial(diagnose, loss),
        episode_classifier=nearest_prototype(evaluation),
    )


def load(name: str, folders: Folders, split: str, *, memory_limit: int | None = None) -> ImageSet:
    """The images of the base, validation or novel classes."""
    return load_split(name, split, memory_limit=memory_limit, **vars(folders))


def held_out_class_counts(name: str, folders: Folders) -> Mapping[str, np.ndarray]:
    """The number of images of every class, for the splits of a data set that holds classes out.

    Raises:
      ConfigError: The data set holds no classes out.
    """
    splits = split_names(name)
    if not {"base", "novel"} <= set(splits):
        raise ConfigError(
            f"data.name = {name} has the splits {', '.join(splits)}, and few-shot evaluation "
            "needs base and novel classes"
        )
    return stored_class_counts(name, **vars(folders))


def check_held_out(
    name: str, evaluation: FewShotEvaluation, class_counts: Mapping[str, np.ndarray]
) -> None:
    """Checks that the validation and novel classes give the episodes."""
    for split, shots in (("validation", (1,)), ("novel", evaluation.shots)):
        if split in class_counts:
            classes = f"{split} classes of {name}"
            check_class_counts(class_counts[split], classes, evaluation, shots)


def check_data(
    name: str,
    options: IntegratedLoss,
    evaluation: FewShotEvaluation,
    num_features: int,
    class_counts: Mapping[str, np.ndarray],
) -> None:
    """Checks that the classes give the episodes, and features leave the metric loss a subspace."""
    check_held_out(name, evaluation, class_counts)
    num_classes = len(class_counts["base"])
    if terms(options.name).integration == "direct" and num_features <= num_classes:
        raise ConfigError(
            f"{options.name} leaves the metric loss no subspace: the classifier of {num_classes} "
            f"classes spans all {num_features} dimensions of the features. Choose "
            f"spectral:{options.name.rpartition(':')[2]}, or a wider model"
        )


def check_class_counts(
    counts: np.ndarray, classes: str, evaluation: EpisodeConfig, shots: Iterable[int]
) -> None:
    """Checks that classes of these sizes give the episodes, with each number of shots.

    Args:
      counts: Integers [C], images of every class.
      classes: What the classes are, for messages.
      evaluation: Ways and queries of an episode.
      shots: Its shots, each of these numbers in turn.

    Raises:
      ConfigError: Fewer than N classes have K + Q images.
    """
    index = index_classes(labels_of(counts))
    for number in shots:
        try:
            check_episodes(index, ways=evaluation.ways, shots=number, queries=evaluation.queries)
        except ConfigError as error:
            raise ConfigError(f"the {classes} do not give the evaluation: {error}") from error


def objective(options: IntegratedLoss, problem: Problem) -> Objective:
    """A linear classifier, and the loss that the options name."""
    loss_of = build_loss(options, problem)
    has_classifier = terms(options.name).classification is not None

    def loss(features, labels, head, objective_state):
        value = loss_of(features, labels, head["kernel"], head["bias"])
        means = {}
        if has_classifier:
            means = train_accuracy(head_logits(features, head, objective_state), labels)
        return Loss(value, objective_state, means)

    return Objective(partial(init_linear_head, problem), loss, head_logits)


def validate(
    evaluation: EpisodeConfig,
    num_episodes: int,
    shots: int,
    accuracies_of: Callable[[np.ndarray, Episodes], np.ndarray],
    outputs: Outputs,
) -> float:
    """Mean of the accuracies in episodes of the validation classes."""
    episodes = configured_episodes(
        evaluation, outputs.labels, shots=shots, num_episodes=num_episodes
    )
    return float(np.mean(accuracies_of(outputs.features, episodes)))


def validate_prototypes(evaluation: FewShotEvaluation, outputs: Outputs) -> float:
    """1-shot accuracy by the nearest prototype in episodes of the validation classes."""
    accuracies = partial(episode_accuracies, distance=evaluation.validation_distance)
    return validate(evaluation, evaluation.validation_episodes, 1, accuracies, outputs)


def nearest_prototype(evaluation: FewShotEvaluation) -> EpisodeClassifier:
    """How the evaluation classifies, by the first of its distances."""
    distance = evaluation.distances[0]
    return episode_classifier(
        evaluation,
        name=f"the nearest prototype ({distance})",
        metric=lambda shots: metric(shots, distance),
        accuracies=partial(episode_accuracies, distance=distance),
        predictions=partial(prototype_predictions, distance=distance),
    )


def metrics(evaluation: FewShotEvaluation) -> list[Metric]:
    """The accuracies for each distance and number of shots."""
    distances = dict.fromkeys(evaluation.distances)
    return [metric(shots, distance) for distance in distances for shots in evaluation.shots]


def _span_metrics(evaluation: FewShotEvaluation) -> list[Metric]:
    return [
        *(
            Metric(f"{shots}-shot accuracy {part} the span")
            for part in ("inside", "outside")
            for shots in evaluation.shots
        ),
        Metric("variance inside the span", higher_is_better=None),
        Metric("effective rank of the classifier", "", higher_is_better=None),
        Metric("cosine of the gradients inside the span", "", higher_is_better=None),
    ]


def metric(shots: int, distance: Distance = "euclidean") -> Metric:
    """The accuracy with a number of shots."""
    return Metric(f"{shots}-shot accuracy" + ("" if distance == "euclidean" else f" ({distance})"))


def evaluate(
    loss: IntegratedLoss,
    evaluation: IntegrationEvaluation,
    batch_size: int,
    split: str,
    outputs_of: Callable[[str], Outputs],
) -> dict[str, Any]:
    """The results of `evaluate_episodes`, and `subspace`, where the loss trains a classifier.

    With `evaluation.span`, also the accuracies and the gradients inside its span.
    """
    outputs = outputs_of(split)
    found = _subspace(loss, outputs)
    results = evaluate_episodes(evaluation, outputs)
    if evaluation.span:
        base = outputs_of("base")
        cosine = gradient_cosine(loss, base.features, base.labels, base.head, batch_size)
        values = [*_span_values(evaluation, outputs, found), cosine]
        results["metrics"] += [
            own.measured(value)
            for own, value in zip(_span_metrics(evaluation), values, strict=True)
        ]
    return results | {"subspace": None if found is None else found._asdict()}


def _span_values(
    evaluation: FewShotEvaluation, outputs: Outputs, found: ClassifierSubspace | None
) -> list[float | None]:
    """The values of the metrics of the span but the last; None where no classifier is trained."""
    if found is None:
        return [None] * (2 * len(evaluation.shots) + 2)
    parts = split_by_span(outputs.features, np.asarray(outputs.head["kernel"]))
    by_prototypes = partial(evaluate_prototypes, config=evaluation, distance="euclidean")
    accuracies = [
        result.accuracy for part in parts for result, _ in by_prototypes(part, outputs.labels)
    ]
    return [*accuracies, found.variance_share, found.effective_rank]


def evaluate_episodes(evaluation: FewShotEvaluation, outputs: Outputs) -> dict[str, Any]:
    """Few-shot accuracy for each distance and number of shots.

    Returns:
      `results`: an entry for each of them; `metrics`; `episodes`: the accuracy in every episode by
      the name of the metric; `evaluation`: the options.

    Raises:
      ConfigError: The split cannot give such episodes.
    """
    results, measured, episodes = [], [], {}
    for distance in dict.fromkeys(evaluation.distances):
        for result, accuracies in evaluate_prototypes(
            outputs.features, outputs.labels, config=evaluation, distance=distance
        ):
            own = metric(result.shots, distance)
            results.append(result._asdict())
            measured.append(own.measured(result.accuracy, result.interval))
            episodes[own.name] = accuracies.tolist()
    return {
        "evaluation": to_dict(evaluation),
        "results": results,
        "metrics": measured,
        "episodes": episodes,
    }


def diagnose(loss: IntegratedLoss, outputs: Outputs) -> dict[str, float]:
    """The rank of the classifier, and the shares of the features' variance in its span."""
    found = _subspace(loss, outputs)
    if found is None:
        return {}
    return {
        "classifier_rank": found.effective_rank,
        "variance_in_span": found.variance_share,
        "class_variance_in_span": found.class_variance_share,
    }


def _subspace(loss: IntegratedLoss, outputs: Outputs) -> ClassifierSubspace | None:
    if terms(loss.name).classification is None:
        return None
    return classifier_subspace(outputs.features, outputs.labels, np.asarray(outputs.head["kernel"]))


def report(results: dict[str, Any]) -> list[str]:
    """A phrase on the evaluation, a table of distances and shots, and the classifier's span."""
    evaluation = results["evaluation"]
    lines = [
        f"{evaluation['ways']}-way, {evaluation['queries']} queries per class, nearest prototype "
        f"({' and '.join(dict.fromkeys(evaluation['distances']))})",
        "",
        *episodes_table(results["results"]),
    ]
    if subspace := results.get("subspace"):
        inside, classes = (
            format_value(subspace[name], "%") for name in ("variance_share", "class_variance_share")
        )
        lines += [
            "",
            f"Span of the classifier ({len(subspace['singular_values'])} singular values, "
            f"effective rank {subspace['effective_rank']:.1f}): it has {inside} % of the variance "
            f"of the features, and {classes} % of the variance between their classes.",
        ]
    return lines
