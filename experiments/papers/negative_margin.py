"""Protocol E: few-shot transfer with a negative margin (Liu et al., ECCV 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import numpy as np

import jaxloss
from experiments.core.config import (
    Count,
    NamedLoss,
    Several,
    Share,
    Signed,
    TrainConfig,
    Weight,
    to_dict,
)
from experiments.core.errors import ConfigError
from experiments.core.protocol import (
    ClassCounts,
    Metric,
    Objective,
    OutputsOf,
    PairMetrics,
    Problem,
    Protocol,
)
from experiments.evaluation.classification import shared_predictions
from experiments.evaluation.feature_space import unit_features
from experiments.evaluation.few_shot import (
    Distance,
    EpisodeConfig,
    notes_on_classes,
    prototype_predictions,
)
from experiments.evaluation.fine_tuning import (
    Classifier,
    FineTuning,
    evaluate_fine_tuning,
    fine_tuned_predictions,
)
from experiments.papers import few_shot, few_shot_data
from experiments.papers.few_shot_data import MarginData
from experiments.papers.linear_head import init_kernel, objective_of_logits
from experiments.reporting.markdown import table
from experiments.reporting.run import episodes_table
from jaxloss.sampling import Episodes

_LABELS = {"cosine": "Cosine softmax", "softmax": "Softmax"}


@dataclass(frozen=True)
class MarginLoss(NamedLoss):
    """What is minimised."""

    name: Literal["cosine", "softmax"] = "cosine"
    """Softmax cross-entropy of cosines, or of inner products without a bias."""
    margin: Signed = -0.02
    """Margin m, subtracted from the target's logit before scaling."""
    scale: Weight = 0.0
    """Factor β of the logits; 0: 30 for cosines, 10 for inner products of a ResNet-12, else 5."""
    label_smoothing: Share = 0.0
    """Fraction ε of the target that is spread over all classes; needs margin 0."""


@dataclass(frozen=True)
class MarginEvaluation(EpisodeConfig):
    """Few-shot evaluation by a classifier that is fine-tuned in every episode."""

    queries: Count = 16
    """Query images per class."""
    episodes: Several = 600
    """Episodes of each evaluation."""
    classifier: Literal["same", "cosine", "linear"] = "same"
    """Logits are cosines, or inner products without a bias; same: as in training."""
    selection: Literal["nearest", "fine-tuned"] = "nearest"
    """Validations classify by the nearest prototype, or fine-tune as the evaluation does."""
    validation_shots: Count = 1
    """Support images per class in a validation."""
    validation_episodes: Count = 500
    """Episodes of a validation."""
    validation_distance: Distance = "cosine"
    """Distance of a query from the nearest prototype in a validation."""


@dataclass(frozen=True)
class NegativeMarginConfig(TrainConfig):
    """A run of protocol E."""

    protocol: ClassVar[str] = "negative-margin"

    data: MarginData = field(default_factory=MarginData)
    loss: MarginLoss = field(default_factory=MarginLoss)
    evaluation: MarginEvaluation = field(default_factory=MarginEvaluation)
    fine_tuning: FineTuning = field(default_factory=FineTuning)


def build(config: NegativeMarginConfig) -> Protocol:
    """The protocol of a run."""
    data, loss, evaluation = config.data, config.loss, config.evaluation
    parts, is_resnet12 = few_shot_data.parts_of(data, "novel"), config.model.backbone == "resnet12"
    scale = loss.scale or (30.0 if loss.name == "cosine" else 10.0 if is_resnet12 else 5.0)
    smoothing = f", ε = {loss.label_smoothing:g}" if loss.label_smoothing else ""
    classifier, fine_tuned = fine_tuned_classifier(config)
    nearest = partial(prototype_predictions, distance=evaluation.validation_distance)
    return Protocol(
        splits=few_shot.SPLITS,
        parts=partial(few_shot_data.parts, data),
        absent=partial(few_shot_data.absent, data.name),
        check_options=partial(check_options, config),
        check_data=partial(check_data, config),
        objective=partial(objective, loss, scale),
        validation_metric=Metric(f"{evaluation.validation_shots}-shot accuracy"),
        validate=partial(
            few_shot.accuracy_in_episodes,
            evaluation,
            evaluation.validation_episodes,
            evaluation.validation_shots,
            {"nearest": nearest, "fine-tuned": fine_tuned}[evaluation.selection],
        ),
        metrics=metrics(config, parts),
        evaluate=partial(evaluate, config),
        description={
            "label": f"{_LABELS[loss.name]}, m = {loss.margin:g}{smoothing}",
            "margin": loss.margin,
            "scale": scale,
            "label_smoothing": loss.label_smoothing,
            "evaluation": to_dict(evaluation) | {"classifier": classifier},
            "fine_tuning": to_dict(config.fine_tuning),
            "novel_data": data.novel or data.name,
            **{option: vars(data)[option] for option in ("holdout", "base_test", "base_classes")},
        },
        report=report,
        pair_metrics=PairMetrics(
            [_share_bound(part) for part in parts if part != "base"], measure_bounds
        ),
    )


def fine_tuned_classifier(
    config: NegativeMarginConfig,
) -> tuple[Classifier, Callable[[np.ndarray, Episodes], np.ndarray]]:
    """The form of the classifier of an episode, and its predictions from features and episodes."""
    form = config.evaluation.classifier
    if form == "same":
        form = "cosine" if config.loss.name == "cosine" else "linear"
    return form, partial(fine_tuned_predictions, classifier=form, settings=config.fine_tuning)


def check_options(config: NegativeMarginConfig, num_features: int) -> None:
    """Checks that the options of the loss and of the data fit together."""
    loss = config.loss
    if loss.margin and loss.label_smoothing:
        raise ConfigError(
            f"loss.margin = {loss.margin} and loss.label_smoothing = {loss.label_smoothing} "
            "exclude each other; set one of them to 0"
        )
    few_shot_data.check_sets(config.data)


def check_data(config: NegativeMarginConfig, num_features: int, counts: ClassCounts) -> None:
    """Checks that the classes give the episodes, and all images have one shape."""
    data, evaluation = config.data, config.evaluation
    for split, of_split in counts.items():
        if split == "base" and few_shot_data.has_held_out(data):
            continue
        shots = evaluation.shots
        if split == "validation":  # Validations during training have shots of their own.
            shots = (evaluation.validation_shots, *shots)
        name = data.novel if data.novel and split in ("validation", "novel") else data.name
        few_shot.check_class_counts(of_split, f"{split} classes of {name}", evaluation, shots)
    few_shot_data.check_shapes(data)


def objective(options: MarginLoss, scale: float, problem: Problem) -> Objective:
    """A classifier of cosines or inner products, and softmax cross-entropy with a margin.

    The authors shift the inner products of every sample so that the least of them is 0. The shift
    is not computed here: it is the same for all logits of a sample, and cancels in the softmax.
    """
    smoothing, axis_name = options.label_smoothing, problem.axis_name
    logits_of = jaxloss.cosine_logits if options.name == "cosine" else jaxloss.linear_logits
    with_margin = partial(jaxloss.margin_softmax_loss, margin=options.margin, scale=scale)

    def loss_of(logits, labels):
        if not smoothing:
            return with_margin(logits, labels, axis_name=axis_name)
        smooth = {"label_smoothing": smoothing, "axis_name": axis_name}
        return jaxloss.softmax_loss(scale * logits, labels, **smooth)

    def logits(features, head, objective_state):
        return logits_of(features, head["kernel"])

    unscaled = objective_of_logits(partial(init_kernel, problem), logits, loss_of)
    return unscaled._replace(logits=lambda *inputs: scale * logits(*inputs))


def evaluate(
    config: NegativeMarginConfig, split: str, outputs_of_split: OutputsOf
) -> dict[str, Any]:
    """Accuracy of classifiers fine-tuned in episodes, discriminability of the features, and P^s.

    P^s is counted: the share of the pairs of images of a class that the trained classifier gives to
    the same base class. Its chance level is the share of all pairs of images of the split, which is
    the mean of P^s over permutations of the labels.

    The split `novel` stands for all classes: novel, validation and base. The images of the base
    classes are those that are not for training, if there are any. Where logits are inner products,
    a classifier is fine-tuned on normalised features, too.
    """
    data, evaluation, classifier = config.data, config.evaluation, fine_tuned_classifier(config)[0]
    results, discriminability, counted, episodes = [], {}, {}, {}
    values: dict[str, tuple[float | None, ...]] = {}
    parts = few_shot_data.parts_of(data, split)
    for part in parts:
        held_out = part == "base" and few_shot_data.has_held_out(data)
        outputs = outputs_of_split("held-out" if held_out else part)
        features, labels = outputs[:2]
        for form in _forms(classifier):
            for result, of_episodes in evaluate_fine_tuning(
                unit_features(features) if form else features,
                labels,
                config=evaluation,
                classifier=classifier,
                settings=config.fine_tuning,
            ):
                name = _accuracy(part, result.shots, form).name
                results.append(result._asdict() | {"split": part, "classifier": classifier + form})
                values[name] = (result.accuracy, result.interval)
                episodes[name] = of_episodes.tolist()
        scatter = _discriminability(features, labels)._asdict()
        discriminability[part] = {field: float(value) for field, value in scatter.items()}
        counted[part] = shared_predictions(outputs.logits().argmax(1), labels)._asdict()
        titles = {column: title for column, (title, _) in _SCATTER.items()} | _COUNTED
        for column, value in (discriminability[part] | counted[part]).items():
            values[f"{part} {titles[column]}"] = (value,)
    shares = shares_of_eq_10(discriminability)
    values |= {f"{part} {_SHARE_OF_EQ_10}": (share,) for part, share in shares.items()}
    named = {metric.name: metric for metric in metrics(config, parts)}
    return {
        "evaluation": to_dict(evaluation) | {"classifier": classifier},
        "results": results,
        "notes": notes_on_classes(results),
        "discriminability": discriminability,
        "shared_predictions": counted,
        "shares_of_eq_10": shares,
        "metrics": [metric.measured(*values[name]) for name, metric in named.items()],
        "episodes": episodes,
    }


def _forms(classifier: Classifier) -> list[str]:
    """How the features of the episodes are changed, as the names of metrics end."""
    # Cosines do not depend on the lengths of the features.
    return ["", " (normalised features)"] if classifier == "linear" else [""]


_discriminability = jax.jit(jaxloss.discriminability)
_SCATTER = {
    "ratio": ("discriminability", True),
    "intra": ("D_intra", False),
    "inter": ("D_inter", True),
}
"""Of every field of `jaxloss.discriminability`: its name, and whether higher is better."""

_COUNTED = {"share": "P^s", "chance": "P^s by chance"}
"""Of every field of `SharedPredictions`: its name."""
_SHARE_OF_EQ_10 = "share of eq. (10)"

_LEAST_GAP = 1e-6
"""D_inter − D_intra of base classes from which on a share of eq. (10) is more than rounding."""

_Scatters = dict[str, dict[str, float]]
"""For each split, the fields of `jaxloss.discriminability`."""


def shares_of_eq_10(scatters: _Scatters) -> dict[str, float | None]:
    r"""The share s with which eq. (10) gives the D_intra that each split other than base has.

    .. math:: s = \frac{D_{inter}(base) - D_{intra}(split)}{D_{inter}(base) - D_{intra}(base)}

    In eq. (10) of the paper (Liu et al., ECCV 2020), a share P^s of the pairs of a class are as
    close as pairs of a base class, and the others as far apart as two base classes. Where s differs
    from the P^s that is counted, eq. (10) does not hold. s is above 1 where the classes are more
    compact than base classes, lower where the images of base classes are those of training, and
    None where base classes are not apart. Without `base` there is none.
    """
    if "base" not in scatters:
        return {}
    base = scatters["base"]
    gap = base["inter"] - base["intra"]
    return {
        part: (base["inter"] - values["intra"]) / gap if gap > _LEAST_GAP else None
        for part, values in scatters.items()
        if part != "base"
    }


def share_bounds(scatters: _Scatters, baseline: _Scatters) -> dict[str, float | None]:
    r"""The bound of eq. (12) on P^s for each split other than base.

    .. math:: P^s < \frac{ψ_1 - ψ_2}{ψ_1 (1 - φ_2^{-1}) - ψ_2 (1 - φ_1^{-1})}, \quad
       ψ = \frac{D_{inter}(split)}{D_{inter}(base)}, \quad
       φ = \frac{D_{inter}(base)}{D_{intra}(base)}

    With a P^s below it, and the same for both margins, eq. (11) gives the split a higher
    discriminability with margin 1 (`scatters`) than with margin 2 (`baseline`), in the paper the
    larger one. None where base classes are not apart with one of the margins, or where the
    denominator is not positive: then eq. (12) sets no upper bound.
    """
    if "base" not in scatters:
        return {}
    bounds: dict[str, float | None] = dict.fromkeys(part for part in scatters if part != "base")
    runs, bases = (scatters, baseline), (scatters["base"], baseline["base"])
    if any(base["inter"] - base["intra"] <= _LEAST_GAP for base in bases):
        return bounds
    apart, apart_baseline = (1 - base["intra"] / base["inter"] for base in bases)
    for part in bounds:
        psi, psi_baseline = (run[part]["inter"] / run["base"]["inter"] for run in runs)
        denominator = psi * apart_baseline - psi_baseline * apart
        if denominator > _LEAST_GAP:
            bounds[part] = (psi - psi_baseline) / denominator
    return bounds


def measure_bounds(report: dict[str, Any], baseline: dict[str, Any]) -> list[dict[str, Any]]:
    """The bounds on P^s of a run, compared with the run of the baseline."""
    bounds = share_bounds(report["discriminability"], baseline["discriminability"])
    return [_share_bound(part).measured(bound) for part, bound in bounds.items()]


def metrics(config: NegativeMarginConfig, parts: list[str]) -> list[Metric]:
    """Accuracy for each split and number of shots; discriminability, its parts, P^s and shares."""
    forms, shots = _forms(fine_tuned_classifier(config)[0]), config.evaluation.shots
    others = [part for part in parts if part != "base"] if "base" in parts else []
    return [
        *(_accuracy(part, k, form) for part in parts for form in forms for k in shots),
        *(Metric(f"{p} {title}", "", higher) for title, higher in _SCATTER.values() for p in parts),
        *(Metric(f"{p} {title}", "", None) for title in _COUNTED.values() for p in parts),
        *(Metric(f"{part} {_SHARE_OF_EQ_10}", "") for part in others),
    ]


def _accuracy(part: str, shots: int, form: str = "") -> Metric:
    return Metric(f"{part} {shots}-shot{form}")


def _share_bound(part: str) -> Metric:
    return Metric(f"{part} P^s bound", "", higher_is_better=None)


def report(results: dict[str, Any]) -> list[str]:
    """A phrase on the evaluation, a table of classes and shots, and one of discriminability."""
    evaluation, tuning = results["evaluation"], results["fine_tuning"]
    base = "test images" if few_shot_data.test_split(results["data"]) else "training images"
    if results["holdout"]:
        base = "held out from training"
    if results["base_test"]:
        base = f"test images of {results['base_test']}"
    counted, shares = results["shared_predictions"], results["shares_of_eq_10"]
    number = f"{results['base_classes']} " if results["base_classes"] else ""

    def cells(split: str) -> list[str]:
        values = [counted[split][field] for field in _COUNTED]
        values += [shares.get(split)] * bool(shares)
        return ["–" if value is None else f"{value:.3f}" for value in values]

    rows = [
        [split, *(f"{scatter[name]:.4f}" for name in ("intra", "inter", "ratio")), *cells(split)]
        for split, scatter in results["discriminability"].items()
    ]
    columns = ["classes", "D_intra", "D_inter", "D_inter / D_intra"]
    columns += [*_COUNTED.values(), *[_SHARE_OF_EQ_10] * bool(shares)]
    inverted = f"; {_SHARE_OF_EQ_10}: the share with which it gives D_intra" if shares else ""
    lines = [
        f"{evaluation['ways']}-way, {evaluation['queries']} queries per class, {tuning['passes']} "
        f"passes of fine-tuning a {evaluation['classifier']} classifier",
        "",
        *episodes_table(results["results"]),
        "",
        *table(columns, rows),
        "",
        "P^s: share of the pairs of images of a class that the trained classifier gives to the "
        f"same base class, averaged over classes; by chance: of all pairs of images{inverted}.",
        "",
        f"Images of the {number}base classes ({results['data']}): {base}.",
    ]
    if results["novel_data"] != results["data"]:
        lines.append(f"Validation and novel classes: those of {results['novel_data']}.")
    return lines
