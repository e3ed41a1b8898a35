"""Protocol A: few-shot transfer with integrated losses (Kobayashi, BMVC 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from experiments.config import DataConfig, EvaluationConfig, FewShotConfig, Folders, to_dict
from experiments.contracts import ImageSet
from experiments.data.builders import split_names
from experiments.data.pipeline import class_counts, load_split
from experiments.data.sampling import check_episodes, evaluation_episodes, index_classes
from experiments.errors import ConfigError
from experiments.evaluation.few_shot import episode_accuracies, evaluate_features
from experiments.loss_names import parse_loss
from experiments.protocols.integration import build_loss
from experiments.protocols.linear_head import linear_head, linear_scores
from experiments.protocols.protocol import Outputs, Protocol
from experiments.training.objective import Loss, Objective, Problem, train_accuracy


def load(config: FewShotConfig, folders: Folders, split: str) -> ImageSet:
    """The images of the base, validation or novel classes."""
    return load_split(
        config.data.name, split, data_dir=folders.data_dir, manual_dir=folders.manual_dir
    )


def counts(config: FewShotConfig, folders: Folders) -> Mapping[str, np.ndarray]:
    """The images of every class of the base, validation and novel classes."""
    return held_out_counts(config.data.name, folders)


def held_out_counts(name: str, folders: Folders) -> Mapping[str, np.ndarray]:
    """The images of every class of the splits of a data set that holds classes out.

    Raises:
      ConfigError: it holds none out.
    """
    splits = split_names(name)
    if not {"base", "novel"} <= set(splits):
        raise ConfigError(
            f"data.name = {name} holds no classes out (its splits are "
            f"{', '.join(splits)}), and few-shot evaluation needs base and novel classes"
        )
    return class_counts(name, data_dir=folders.data_dir, manual_dir=folders.manual_dir)


def check_options(config: FewShotConfig, num_features: int) -> None:
    """Raises unless the options of the data are for few-shot learning, and for the loss."""
    check_data(config.data)
    if config.data.mixup and parse_loss(config.loss.name).metric:
        raise ConfigError(
            f"data.mixup = {config.data.mixup} is for losses of single samples; {config.loss.name} "
            "compares samples with each other"
        )


def check(config: FewShotConfig, num_features: int, counts: Mapping[str, np.ndarray]) -> None:
    """Raises unless the classes give the episodes, and the features leave the metric loss room."""
    wanted = config.evaluation
    for split, shots in (("validation", (1,)), ("novel", wanted.shots)):
        if split in counts:
            told = f"{split} classes of {config.data.name}"
            check_class_counts(counts[split], told, wanted, shots)
    num_classes = len(counts["base"])
    if parse_loss(config.loss.name).family == "direct" and num_features <= num_classes:
        raise ConfigError(
            f"{config.loss.name} leaves the metric loss nothing: the classifier of {num_classes} "
            f"classes spans all {num_features} dimensions of the features. Choose "
            f"spectral:{config.loss.name.rpartition(':')[2]}, or a wider model"
        )


def check_data(data: DataConfig, *, allowed: str = "") -> None:
    """Raises if the data has an option that few-shot evaluation has no use for, but one."""
    for option in ("classes", "samples_per_class", "holdout"):
        if getattr(data, option) and option != allowed:
            raise ConfigError(f"few-shot evaluation has no data.{option}: classes are held out")
    if data.imbalance != 1:
        raise ConfigError("few-shot evaluation has no data.imbalance")


def check_class_counts(
    counts: np.ndarray, told: str, wanted: EvaluationConfig, shots: Iterable[int]
) -> None:
    """Raises unless classes of so many images give the episodes.

    Args:
      counts: integers [C], images of every class.
      told: what the classes are, in a message.
      wanted: ways and queries of an episode.
      shots: its shots, each of these numbers in turn.

    Raises:
      ConfigError: fewer than N classes have K + Q images.
    """
    index = index_classes(np.repeat(np.arange(len(counts)), counts))
    for number in shots:
        try:
            check_episodes(index, ways=wanted.ways, shots=number, queries=wanted.queries)
        except ConfigError as error:
            raise ConfigError(f"the {told} cannot give the evaluation: {error}") from error


def objective(config: FewShotConfig, problem: Problem) -> Objective:
    """A linear classifier, and the loss that the configuration names."""
    num_classes = len(problem.counts)
    loss_of = build_loss(
        config.loss,
        num_features=problem.num_features,
        num_classes=num_classes,
        axis_name=problem.axis_name,
    )
    has_classifier = parse_loss(config.loss.name).classification is not None

    def loss(features, labels, head, memory):
        value = loss_of(features, labels, head["kernel"], head["bias"])
        means = {}
        if has_classifier:
            means = train_accuracy(linear_scores(features, head, memory), labels)
        return Loss(value, memory, means)

    def head(key: jax.Array):
        return linear_head(key, problem.num_features, num_classes)

    return Objective(head, loss, linear_scores)


def validate(config: FewShotConfig, outputs: Outputs) -> float:
    """1-shot accuracy on the validation classes."""
    episodes = evaluation_episodes(
        outputs.labels,
        num_episodes=config.validation_episodes,
        ways=config.evaluation.ways,
        shots=1,
        queries=config.evaluation.queries,
        seed=config.evaluation.seed,
    )
    accuracies = episode_accuracies(outputs.features, episodes, distance=config.evaluation.distance)
    return float(np.mean(accuracies))


def evaluate(
    config: FewShotConfig, split: str, outputs: Callable[[str], Outputs]
) -> dict[str, Any]:
    """Few-shot accuracy; `results` has one entry for each number of shots.

    Raises:
      ConfigError: the split cannot give such episodes.
    """
    wanted = config.evaluation
    features, labels = outputs(split)[:2]
    for shots in wanted.shots:
        check_episodes(labels, ways=wanted.ways, shots=shots, queries=wanted.queries)
    results = evaluate_features(features, labels, config=wanted)
    return {
        "evaluation": to_dict(wanted),
        "results": [result._asdict() for result in results],
        "metrics": dict(zip(metrics(config), (result.accuracy for result in results), strict=True)),
    }


def metrics(config: FewShotConfig) -> tuple[str, ...]:
    """Accuracy for each number of shots."""
    return tuple(f"{shots}-shot accuracy" for shots in config.evaluation.shots)


def describe(config: FewShotConfig) -> dict[str, Any]:
    """The loss and the evaluation."""
    return {
        "label": parse_loss(config.loss.name).label,
        "power": config.loss.power,
        "evaluation": to_dict(config.evaluation),
    }


def report(report: dict[str, Any]) -> list[str]:
    """A line on the evaluation, and a table of shots."""
    evaluation = report["evaluation"]
    lines = [
        f"{evaluation['ways']}-way, {evaluation['queries']} queries a class, "
        f"nearest prototype ({evaluation['distance']})",
        "",
        "| shots | accuracy (%) | 95 % interval | episodes | episode list |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {result['shots']} | {100 * result['accuracy']:.2f} "
        f"| ± {100 * result['interval']:.2f} | {result['episodes']} | {result['hash']} |"
        for result in report["results"]
    ]
    return lines


PROTOCOL = Protocol(
    config=FewShotConfig,
    splits=("base", "validation", "novel"),
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
