"""Protocol E: few-shot transfer with a negative margin (Liu et al., ECCV 2020)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import jax

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
    Outputs,
    OutputsOf,
    PairMetrics,
    Problem,
)
from experiments.evaluation.classification import shared_predictions
from experiments.evaluation.feature_space import unit_features
from experiments.evaluation.few_shot import (
    Distance,
    EpisodeConfig,
    notes_on_classes,
)
from experiments.evaluation.fine_tuning import (
    Classifier,
    FineTuning,
    evaluate_fine_tuning,
    fine_tuned_predictions,
)
from experiments.papers.classification import init_kernel, objective_of_logits
from experiments.papers.few_shot_data import MarginData, NovelClasses, Predict, test_split
from experiments.reporting.markdown import table
from experiments.reporting.run import episodes_table

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


class NegativeMargin(NovelClasses):
    """A classifier of cosines or inner products with a margin, fine-tuned in every episode.

    The split `novel` stands for all classes: novel, validation and base. The images of the base
    classes are those that are not for training, if there are any.
    """

    classifier: Classifier

    def __init__(self, config: NegativeMarginConfig):
        super().__init__(config.data, config.evaluation)
        self.config, self.loss = config, config.loss
        data, loss, evaluation = self.data, config.loss, config.evaluation
        of_inner_products = 10.0 if config.model.backbone == "resnet12" else 5.0
        self.scale = loss.scale or (30.0 if loss.name == "cosine" else of_inner_products)
        self.classifier, self.fine_tuned = fine_tuned_classifier(config)
        # Features of episodes, as metrics name them: cosines do not depend on their lengths.
        self.forms = [""] + [" (normalised features)"] * (self.classifier == "linear")
        parts = self.parts_of("novel")
        self.metrics = self._metrics(parts)
        self.validation_metric = Metric(f"{evaluation.validation_shots}-shot accuracy")
        bounds = [_share_bound(part) for part in parts if part != "base"]
        self.pair_metrics = PairMetrics(bounds, share_bounds)
        smoothing = f", ε = {loss.label_smoothing:g}" if loss.label_smoothing else ""
        self.description = {
            "label": f"{_LABELS[loss.name]}, m = {loss.margin:g}{smoothing}",
            "margin": loss.margin,
            "scale": self.scale,
            "label_smoothing": loss.label_smoothing,
            "evaluation": to_dict(evaluation) | {"classifier": self.classifier},
            "fine_tuning": to_dict(config.fine_tuning),
            "novel_data": data.novel or data.name,
            **{option: vars(data)[option] for option in ("holdout", "base_test", "base_classes")},
        }

    def _metrics(self, parts: list[str]) -> list[Metric]:
        """Accuracy for each part and number of shots; discriminability, its parts, P^s, shares."""
        shots = self.config.evaluation.shots
        others = [part for part in parts if part != "base"] if "base" in parts else []
        return [
            *(_accuracy(part, k, form) for part in parts for form in self.forms for k in shots),
            *(Metric(f"{p} {name}", "", up) for name, up in _MEASURES.values() for p in parts),
            *(Metric(f"{part} {_SHARE_OF_EQ_10}", "") for part in others),
        ]

    def check_options(self, num_features: int) -> None:
        super().check_options(num_features)
        if self.loss.margin and self.loss.label_smoothing:
            raise ConfigError(
                f"loss.margin = {self.loss.margin} and loss.label_smoothing = "
                f"{self.loss.label_smoothing} exclude each other; set one of them to 0"
            )

    def check_data(self, num_features: int, counts: ClassCounts) -> None:
        """Checks that the classes give the episodes, and all images have one shape."""
        data, evaluation = self.data, self.config.evaluation
        for split, of_split in counts.items():
            if split == "base" and self.has_held_out():
                continue
            shots = evaluation.shots
            if split == "validation":  # Validations during training have shots of their own.
                shots = (evaluation.validation_shots, *shots)
            name = data.novel if data.novel and split in ("validation", "novel") else data.name
            self.check_classes(of_split, f"{split} classes of {name}", shots)
        self.check_shapes()

    def objective(self, problem: Problem) -> Objective:
        """Softmax cross-entropy with a margin.

        The authors shift the inner products of every sample so that the least of them is 0. The
        shift is not computed here: it is the same for all logits of a sample, and cancels.
        """
        options, scale, axis_name = self.loss, self.scale, problem.axis_name
        logits_of = jaxloss.cosine_logits if options.name == "cosine" else jaxloss.linear_logits

        def loss_of(logits, labels):
            if options.label_smoothing:
                smooth = {"label_smoothing": options.label_smoothing, "axis_name": axis_name}
                return jaxloss.softmax_loss(scale * logits, labels, **smooth)
            how: Any = {"margin": options.margin, "scale": scale, "axis_name": axis_name}
            return jaxloss.margin_softmax_loss(logits, labels, **how)

        def logits(features, head, objective_state):
            return logits_of(features, head["kernel"])

        unscaled = objective_of_logits(partial(init_kernel, problem), logits, loss_of)
        return unscaled._replace(logits=lambda *inputs: scale * logits(*inputs))

    def validate(self, outputs: Outputs) -> float:
        evaluation = self.config.evaluation
        predict = self.fine_tuned if evaluation.selection == "fine-tuned" else None
        return self.accuracy_in_episodes(outputs, evaluation.validation_shots, predict)

    def evaluate(self, split: str, outputs_of_split: OutputsOf) -> dict[str, Any]:
        """Accuracy of classifiers fine-tuned in episodes, discriminability of features, and P^s.

        P^s is counted: the share of the pairs of images of a class that the trained classifier
        gives to the same base class. By chance it is the share of all pairs of the split. Where
        logits are inner products, a classifier is fine-tuned on normalised features, too.
        """
        results, discriminability, counted, episodes = [], {}, {}, {}
        values: dict[str, tuple[float | None, ...]] = {}
        parts = self.parts_of(split)
        for part in parts:
            held_out = part == "base" and self.has_held_out()
            outputs = outputs_of_split("held-out" if held_out else part)
            features, labels = outputs[:2]
            for form in self.forms:
                for result, accuracies in evaluate_fine_tuning(
                    unit_features(features) if form else features,
                    labels,
                    config=self.evaluation,
                    classifier=self.classifier,
                    settings=self.config.fine_tuning,
                ):
                    name, used = _accuracy(part, result.shots, form).name, self.classifier + form
                    results.append(result._asdict() | {"split": part, "classifier": used})
                    values[name] = (result.accuracy, result.interval)
                    episodes[name] = accuracies.tolist()
            scatter = _discriminability(features, labels)._asdict()
            discriminability[part] = {column: float(value) for column, value in scatter.items()}
            counted[part] = shared_predictions(outputs.logits().argmax(1), labels)
            for column, value in (discriminability[part] | counted[part]).items():
                values[f"{part} {_MEASURES[column][0]}"] = (value,)
        shares = shares_of_eq_10(discriminability)
        values |= {f"{part} {_SHARE_OF_EQ_10}": (share,) for part, share in shares.items()}
        return {
            "evaluation": self.description["evaluation"],
            "results": results,
            "notes": notes_on_classes(results),
            "discriminability": discriminability,
            "shared_predictions": counted,
            "shares_of_eq_10": shares,
            "metrics": [metric.measured(*values[metric.name]) for metric in self._metrics(parts)],
            "episodes": episodes,
        }

    def report(self, results: dict[str, Any]) -> list[str]:
        evaluation, tuning = results["evaluation"], results["fine_tuning"]
        base = "test images" if test_split(results["data"]) else "training images"
        if results["holdout"]:
            base = "held out from training"
        if results["base_test"]:
            base = f"test images of {results['base_test']}"
        shares, rows = results["shares_of_eq_10"], []
        number = f"{results['base_classes']} " if results["base_classes"] else ""
        for split, scatter in results["discriminability"].items():
            counted = results["shared_predictions"][split]
            values = [counted["share"], counted["chance"], *[shares.get(split)] * bool(shares)]
            cells = ["–" if value is None else f"{value:.3f}" for value in values]
            scatters = (f"{scatter[name]:.4f}" for name in ("intra", "inter", "ratio"))
            rows.append([split, *scatters, *cells])
        columns = ["classes", "D_intra", "D_inter", "D_inter / D_intra", "P^s", "P^s by chance"]
        columns += [_SHARE_OF_EQ_10] * bool(shares)
        inverted = f"; {_SHARE_OF_EQ_10}: the share with which it gives D_intra" if shares else ""
        lines = [
            f"{evaluation['ways']}-way (chance: {100 / evaluation['ways']:.0f} %), "
            f"{evaluation['queries']} queries per class, "
            f"{tuning['passes']} passes of fine-tuning a {evaluation['classifier']} classifier",
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


def fine_tuned_classifier(config: NegativeMarginConfig) -> tuple[Classifier, Predict]:
    """The form of the classifier of an episode, and its predictions from features and episodes."""
    form = config.evaluation.classifier
    if form == "same":
        form = "cosine" if config.loss.name == "cosine" else "linear"
    return form, partial(fine_tuned_predictions, classifier=form, settings=config.fine_tuning)


_discriminability = jax.jit(jaxloss.discriminability)
# Of every field of `jaxloss.discriminability` and `shared_predictions`: its name in metrics, and
# whether higher is better.
_MEASURES = {
    "ratio": ("discriminability", True),
    "intra": ("D_intra", False),
    "inter": ("D_inter", True),
    "share": ("P^s", None),
    "chance": ("P^s by chance", None),
}
_SHARE_OF_EQ_10 = "share of eq. (10)"

_LEAST_GAP = 1e-6
"""D_inter − D_intra of base classes from which on a share of eq. (10) is more than rounding."""


def shares_of_eq_10(scatters: dict[str, dict[str, float]]) -> dict[str, float | None]:
    r"""The share s with which eq. (10) gives the D_intra that each split other than base has.

    .. math:: s = \frac{D_{inter}(base) - D_{intra}(split)}{D_{inter}(base) - D_{intra}(base)}

    In eq. (10) of the paper, a share P^s of the pairs of a class are as close as pairs of a base
    class, and the others as far apart as two base classes. Where s differs from the P^s that is
    counted, eq. (10) does not hold. s is above 1 where the classes are more compact than base
    classes, and None where base classes are not apart. `scatters` has the fields of
    `jaxloss.discriminability` for each split.
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


def share_bounds(report: dict[str, Any], baseline: dict[str, Any]) -> list[dict[str, Any]]:
    r"""The bound of eq. (12) on P^s for each split other than base, from two reports.

    .. math:: P^s < \frac{ψ_1 - ψ_2}{ψ_1 (1 - φ_2^{-1}) - ψ_2 (1 - φ_1^{-1})}, \quad
       ψ = \frac{D_{inter}(split)}{D_{inter}(base)}, \quad
       φ = \frac{D_{inter}(base)}{D_{intra}(base)}

    With a P^s below it, and the same for both margins, eq. (11) gives the split a higher
    discriminability with margin 1 (`report`) than with margin 2 (`baseline`), in the paper the
    larger one. None where base classes are not apart with one of the margins, or where the
    denominator is not positive: then eq. (12) sets no upper bound.
    """
    runs = report["discriminability"], baseline["discriminability"]
    if "base" not in runs[0]:
        return []
    bases = [run["base"] for run in runs]
    bounds: dict[str, float | None] = dict.fromkeys(part for part in runs[0] if part != "base")
    if all(base["inter"] - base["intra"] > _LEAST_GAP for base in bases):
        apart, apart_baseline = (1 - base["intra"] / base["inter"] for base in bases)
        for part in bounds:
            psi, psi_baseline = (run[part]["inter"] / run["base"]["inter"] for run in runs)
            denominator = psi * apart_baseline - psi_baseline * apart
            if denominator > _LEAST_GAP:
                bounds[part] = (psi - psi_baseline) / denominator
    return [_share_bound(part).measured(bound) for part, bound in bounds.items()]


def _accuracy(part: str, shots: int, form: str) -> Metric:
    return Metric(f"{part} {shots}-shot{form}")


def _share_bound(part: str) -> Metric:
    return Metric(f"{part} P^s bound", "", higher_is_better=None)
