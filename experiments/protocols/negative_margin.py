"""Protocol E: few-shot transfer with a negative margin (Liu et al., ECCV 2020)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import jax
import numpy as np
from annotated_types import Ge

import jaxloss
from experiments.config import (
    Count,
    DataConfig,
    Folders,
    NamedLoss,
    Pixels,
    Seed,
    Share,
    TrainConfig,
    Weight,
    to_dict,
)
from experiments.contracts import (
    ImageSet,
    Loss,
    Metric,
    Objective,
    Outputs,
    PairMetrics,
    Problem,
    Protocol,
)
from experiments.data.augment import seen_shape
from experiments.data.builders import builder_class, image_shape, share_images, split_names
from experiments.data.pipeline import class_counts as stored_class_counts
from experiments.data.pipeline import class_names, load_split
from experiments.data.selection import Selection, select
from experiments.errors import ConfigError
from experiments.evaluation.feature_space import unit_features
from experiments.evaluation.few_shot import Distance, EpisodeConfig, episode_accuracies
from experiments.evaluation.fine_tuning import (
    Classifier,
    FineTuning,
    evaluate_fine_tuning,
    fine_tuned_accuracies,
    fine_tuned_predictions,
)
from experiments.evaluation.hard_episodes import episode_classifier
from experiments.protocols import few_shot
from experiments.protocols.linear_head import init_kernel, train_accuracy
from experiments.reporting.markdown import table
from experiments.reporting.run import episodes_table

_LOGITS = {"cosine": jaxloss.cosine_logits, "softmax": jaxloss.linear_logits}
_LABELS = {"cosine": "Cosine softmax", "softmax": "Softmax"}
_OTHER_IMAGES = {"mini_imagenet": "imagenet", "tiered_imagenet": "imagenet"}
"""Few-shot sets made from training images alone of another set, whose test images are new to it."""
_SELECTION = {"base": "train", "held-out": "validation"}
"""The splits of the base classes, and their names in `select`."""


@dataclass(frozen=True)
class MarginData(DataConfig):
    """Which images of a few-shot data set, and how they are augmented."""

    holdout: Share = 0.0
    """Fraction of each base class's images that is held out for the episodes of base classes."""
    base_test: str = ""
    """Data set whose test images the episodes of base classes take, such as imagenet for
    mini_imagenet: other images of the same classes, by their names. Empty: held-out images, or
    those of training if none are held out."""
    novel: str = ""
    """Few-shot data set of the validation and novel classes; the base classes are then all classes
    of NAME. Empty: all three are those of NAME."""
    base_classes: Pixels = 0
    """Number of base classes, a subset that does not depend on the seed of the run; 0: all."""
    subset_seed: Seed = 0
    """Seed that chooses these classes; 0 if all are used."""


@dataclass(frozen=True)
class MarginLoss(NamedLoss):
    """What is minimised."""

    name: Literal["cosine", "softmax"] = "cosine"
    """Softmax cross-entropy of cosines, or of inner products without a bias."""
    margin: float = -0.02
    """Margin m that is subtracted from the target's logit before scaling; a negative margin makes
    the task easier."""
    scale: Weight = 0.0
    """Factor β of the logits; 0: the authors', which is 30 for cosines, 10 for inner products of
    a ResNet-12, and 5 for other inner products."""
    label_smoothing: Share = 0.0
    """Fraction ε of the target that is spread over all classes; needs margin 0."""


@dataclass(frozen=True)
class MarginEvaluation(EpisodeConfig):
    """Few-shot evaluation by a classifier that is fine-tuned in every episode."""

    queries: Count = 16
    """Query images per class."""
    episodes: Annotated[int, Ge(2)] = 600
    """Episodes of each evaluation."""
    classifier: Literal["same", "cosine", "linear"] = "same"
    """Logits are cosines, or inner products without a bias; same: as in training."""
    selection: Literal["nearest", "fine-tuned"] = "nearest"
    """Validations, which choose the best checkpoint, classify by the nearest prototype, or by a
    fine-tuned classifier as the evaluation does."""
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
    data, evaluation = config.data, config.evaluation
    scale = _scale(config.loss, config.model.backbone)
    classifier = _classifier(config.loss, evaluation)
    tuned: Any = {
        "classifier": classifier,
        "settings": config.fine_tuning,
        "seed": evaluation.seed,
    }
    validation_accuracies = {
        "nearest": partial(episode_accuracies, distance=evaluation.validation_distance),
        "fine-tuned": partial(fine_tuned_accuracies, **tuned),
    }
    return Protocol(
        splits=few_shot.SPLITS,
        load=partial(load, data),
        class_counts=partial(class_counts, data),
        check_options=lambda num_features: check_options(config.loss, data),
        check_data=partial(check_data, data, evaluation),
        objective=partial(objective, config.loss, scale),
        validation=Metric(f"{evaluation.validation_shots}-shot accuracy"),
        validate=partial(
            few_shot.validate,
            evaluation,
            evaluation.validation_episodes,
            evaluation.validation_shots,
            validation_accuracies[evaluation.selection],
        ),
        metrics=metrics(data, evaluation, classifier),
        evaluate=partial(evaluate, data, evaluation, classifier, config.fine_tuning),
        description={
            "label": label(config.loss),
            "margin": config.loss.margin,
            "scale": scale,
            "label_smoothing": config.loss.label_smoothing,
            "evaluation": to_dict(evaluation) | {"classifier": classifier},
            "fine_tuning": to_dict(config.fine_tuning),
            "novel_data": _novel_name(data),
            "holdout": data.holdout,
            "base_test": data.base_test,
            "base_classes": data.base_classes,
        },
        report=report,
        pair_metrics=PairMetrics(
            [_share_bound(part) for part in _parts(data, "novel") if part != "base"],
            measure_bounds,
        ),
        episode_classifier=episode_classifier(
            evaluation,
            name=f"a fine-tuned {classifier} classifier",
            metric=partial(_accuracy, "novel"),
            accuracies=partial(fine_tuned_accuracies, **tuned),
            predictions=partial(fine_tuned_predictions, **tuned),
        ),
    )


def load(
    data: MarginData, folders: Folders, split: str, *, memory_limit: int | None = None
) -> ImageSet:
    """The images of the base, validation or novel classes, or the untrained images of base ones."""
    read = partial(
        load_split,
        data_dir=folders.data_dir,
        manual_dir=folders.manual_dir,
        memory_limit=memory_limit,
    )
    if split not in _SELECTION:
        return read(_novel_name(data), split)
    if split == "held-out" and data.base_test:
        names, rows, labels = _other_images(data, folders)
        images = read(data.base_test, "test", rows=rows)
        return dataclasses.replace(images, labels=labels, class_names=names)
    chosen = _select_base(data, _base_labels(data, folders))
    rows = chosen.rows[_SELECTION[split]] if data.holdout or data.base_classes else None
    images = read(data.name, _base_splits(data), rows=rows)
    return dataclasses.replace(
        images,
        labels=np.searchsorted(chosen.classes, images.labels).astype(np.int32),
        class_names=tuple(images.class_names[label] for label in chosen.classes),
    )


def class_counts(data: MarginData, folders: Folders) -> Mapping[str, np.ndarray]:
    """The number of images of every base, validation and novel class.

    `held-out` has the images of base classes that are not for training, if there are any.
    """
    labels = _base_labels(data, folders)
    novel = few_shot.held_out_class_counts(_novel_name(data), folders)
    chosen = _select_base(data, labels)
    base = {
        split: np.bincount(
            np.searchsorted(chosen.classes, labels[chosen.rows[part]]),
            minlength=len(chosen.classes),
        )
        for split, part in _SELECTION.items()
        if part in chosen.rows
    }
    if data.base_test:
        names, _, labels = _other_images(data, folders)
        base["held-out"] = np.bincount(labels, minlength=len(names))
    return {**novel, **base}


def _novel_name(data: MarginData) -> str:
    return data.novel or data.name


def _base_splits(data: MarginData) -> str:
    return "+".join(split_names(data.name)) if data.novel else "base"


def _base_labels(data: MarginData, folders: Folders) -> np.ndarray:
    """The labels of the base classes' images in the order of `load_split`; reads no image."""
    own = few_shot.held_out_class_counts(data.name, folders)
    base = np.concatenate([own[split] for split in _base_splits(data).split("+")])
    return np.repeat(np.arange(len(base)), base)


def _other_images(
    data: MarginData, folders: Folders
) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """The names of the base classes; rows and labels of their test images in `data.base_test`."""
    where = {"data_dir": folders.data_dir, "manual_dir": folders.manual_dir}
    own = class_names(data.name, _base_splits(data), **where)
    names = tuple(own[label] for label in _select_base(data, _base_labels(data, folders)).classes)
    stored = class_names(data.base_test, "test", **where)
    if missing := set(names) - set(stored):
        raise ConfigError(
            f"data.base_test = {data.base_test} lacks {len(missing)} of the {len(names)} base "
            f"classes of {data.name}, such as {min(missing)}; prepare both from archives that name "
            "classes alike, or set data.holdout instead"
        )
    numbers = {name: number for number, name in enumerate(names)}
    positions = np.array([numbers.get(name, -1) for name in stored], np.int32)
    labels = np.repeat(positions, stored_class_counts(data.base_test, **where)["test"])
    rows = np.flatnonzero(labels >= 0)
    return names, rows, labels[rows]


def _select_base(data: MarginData, labels: np.ndarray) -> Selection:
    return select(
        labels,
        test_labels=np.zeros(0, labels.dtype),
        classes=data.base_classes,
        subset_seed=data.subset_seed,
        holdout=data.holdout,
        option="data.base_classes",
    )


def check_options(loss: MarginLoss, data: MarginData) -> None:
    """Checks that the options of the loss and of the data fit together."""
    if loss.margin and loss.label_smoothing:
        raise ConfigError(
            f"loss.margin = {loss.margin} and loss.label_smoothing = {loss.label_smoothing} "
            "exclude each other; set one of them to 0"
        )
    if data.novel and share_images(data.name, data.novel):
        raise ConfigError(
            f"data.novel = {data.novel} shares images with data.name = {data.name}, all of which "
            "are for training; choose another set, or leave data.novel empty to use the "
            "validation and novel classes of data.name"
        )
    if data.base_test:
        _check_base_test(data)
    _check_base_classes(data)


def _check_base_test(data: MarginData) -> None:
    if data.holdout:
        raise ConfigError(
            f"data.holdout = {data.holdout} and data.base_test = {data.base_test} exclude each "
            "other: the episodes of base classes take the images of one of them; set the other to "
            "its default"
        )
    other = _OTHER_IMAGES.get(data.name.partition("@")[0])
    if data.base_test.partition("@")[0] != other:
        instead = f"{other}, or " if other else ""
        raise ConfigError(
            f"data.base_test = {data.base_test} is not known to have images of the classes of "
            f"{data.name} that are not in it; set it to {instead}empty and use data.holdout"
        )


def _check_base_classes(data: MarginData) -> None:
    published = builder_class(data.name).SPEC.classes
    # A set without base classes is refused where its splits are read.
    available = sum(published.get(split, 0) for split in _base_splits(data).split("+"))
    if data.base_classes == 1 or 0 < available < data.base_classes:
        raise ConfigError(
            f"data.base_classes = {data.base_classes} must be from 2 to {available}, or 0 for all"
        )


def check_data(
    data: MarginData,
    evaluation: MarginEvaluation,
    num_features: int,
    class_counts: Mapping[str, np.ndarray],
) -> None:
    """Checks that the classes give the episodes, and all images have one shape."""
    novel = _novel_name(data)
    # Validations during training have shots of their own.
    shots: dict[str, tuple[int, ...]] = {
        "validation": (evaluation.validation_shots, *evaluation.shots)
    }
    if _has_held_out(data):
        shots["base"] = ()
    for split, counts in class_counts.items():
        classes = f"{split} classes of {data.name if split in _SELECTION else novel}"
        few_shot.check_class_counts(counts, classes, evaluation, shots.get(split, evaluation.shots))
    base_shape = seen_shape(image_shape(data.name), data)
    for option, name in {"novel": novel, "base_test": data.base_test or data.name}.items():
        shape = seen_shape(image_shape(name), data)
        if base_shape != shape:
            raise ConfigError(
                f"images of {data.name} are {_sizes(base_shape)}, those of data.{option} = {name} "
                f"are {_sizes(shape)}; set data.image_size to resize both, and choose sets with "
                "the same channels"
            )


def _has_held_out(data: MarginData) -> bool:
    """Whether there are images of base classes that are not for training."""
    return bool(data.holdout or data.base_test)


def _sizes(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def objective(options: MarginLoss, scale: float, problem: Problem) -> Objective:
    """A classifier of cosines or inner products, and softmax cross-entropy with a margin.

    The authors shift the inner products of every sample so that the least of them is 0. The shift
    is not computed here: the margin is subtracted from one of the shifted logits, so that all
    logits of a sample have the same constant added, which cancels in the softmax. Neither the loss
    nor its gradient depends on it.
    """
    logits_of = _LOGITS[options.name]
    if options.label_smoothing:
        loss_of = partial(jaxloss.softmax_loss, label_smoothing=options.label_smoothing)
        factor = scale
    else:
        loss_of = partial(jaxloss.margin_softmax_loss, margin=options.margin, scale=scale)
        factor = 1

    def loss(features, labels, head, objective_state):
        logits = logits_of(features, head["kernel"])
        value = loss_of(factor * logits, labels, axis_name=problem.axis_name)
        return Loss(value, objective_state, train_accuracy(logits, labels))

    def scaled_logits(features, head, objective_state):
        return scale * logits_of(features, head["kernel"])

    def init_head(key: jax.Array):
        return init_kernel(key, problem.num_features, len(problem.class_counts))

    return Objective(init_head, loss, scaled_logits)


def _scale(options: MarginLoss, backbone: str) -> float:
    if options.scale:
        return options.scale
    if options.name == "cosine":
        return 30.0
    return 10.0 if backbone == "resnet12" else 5.0


def _classifier(options: MarginLoss, evaluation: MarginEvaluation) -> Classifier:
    if evaluation.classifier != "same":
        return evaluation.classifier
    return "cosine" if options.name == "cosine" else "linear"


def evaluate(
    data: MarginData,
    evaluation: MarginEvaluation,
    classifier: Classifier,
    fine_tuning: FineTuning,
    split: str,
    outputs_of: Callable[[str], Outputs],
) -> dict[str, Any]:
    """Accuracy of classifiers fine-tuned in episodes, and discriminability of the features.

    The split `novel` stands for all classes: novel, validation and base. The images of the base
    classes are the held-out ones (`data.holdout`) or those of `data.base_test` if there are any,
    else the training images. Where logits are inner products, a classifier is fine-tuned on
    normalised features, too.

    Returns:
      `results`: an entry for each split, form of the features and number of shots;
      `discriminability`: `intra`, `inter` and `ratio` of all features of each split;
      `same_class_share`: what `same_class_shares` returns; `metrics`; `episodes`: for each accuracy
      among them, its value in every episode.

    Raises:
      ConfigError: A split cannot give such episodes.
    """
    results, discriminability, accuracies, episodes = [], {}, [], {}
    for part in _parts(data, split):
        held_out = part == "base" and _has_held_out(data)
        features, labels = outputs_of("held-out" if held_out else part)[:2]
        for form in _forms(classifier):
            for result, of_episodes in evaluate_fine_tuning(
                unit_features(features) if form else features,
                labels,
                config=evaluation,
                classifier=classifier,
                settings=fine_tuning,
            ):
                metric = _accuracy(part, result.shots, form)
                named = {"split": part, "classifier": classifier + form}
                results.append(result._asdict() | named)
                accuracies.append(metric.measured(result.accuracy, result.interval))
                episodes[metric.name] = of_episodes.tolist()
        scatter = _discriminability(features, labels)
        discriminability[part] = {name: float(value) for name, value in scatter._asdict().items()}
    scatters = [
        _scatter(part, name).measured(values[name])
        for name in _SCATTER
        for part, values in discriminability.items()
    ]
    shares = same_class_shares(discriminability)
    measured = [_same_class_share(part).measured(share) for part, share in shares.items()]
    return {
        "evaluation": to_dict(evaluation) | {"classifier": classifier},
        "results": results,
        "discriminability": discriminability,
        "same_class_share": shares,
        "metrics": accuracies + scatters + measured,
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

_LEAST_GAP = 1e-6
"""D_inter − D_intra of base classes from which on P^s is more than rounding."""


def same_class_shares(
    discriminability: dict[str, dict[str, float]],
) -> dict[str, float | None]:
    r"""The P^s with which eq. (10) gives D_intra of each split other than base.

    .. math:: P^s = \frac{D_{inter}(base) - D_{intra}(split)}{D_{inter}(base) - D_{intra}(base)}

    The paper assumes that this share of the pairs of a class are as close as pairs of a base class,
    and the others as far apart as two base classes. It is above 1 where the classes are more
    compact than base classes, and None where base classes are not apart. If no images of the base
    classes are held out, those of training take their place; they are closer together, so that P^s
    is lower. Without `base` there is none.

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (10).
    """
    if "base" not in discriminability:
        return {}
    base = discriminability["base"]
    gap = base["inter"] - base["intra"]
    return {
        part: (base["inter"] - values["intra"]) / gap if gap > _LEAST_GAP else None
        for part, values in discriminability.items()
        if part != "base"
    }


def share_bounds(
    discriminability: dict[str, dict[str, float]], baseline: dict[str, dict[str, float]]
) -> dict[str, float | None]:
    r"""The bound of eq. (12) on P^s for each split other than base.

    .. math:: P^s < \frac{ψ_1 - ψ_2}{ψ_1 (1 - φ_2^{-1}) - ψ_2 (1 - φ_1^{-1})}, \quad
       ψ = \frac{D_{inter}(split)}{D_{inter}(base)}, \quad
       φ = \frac{D_{inter}(base)}{D_{intra}(base)}

    With a P^s below it, and the same for both margins, eq. (11) gives the split a higher
    discriminability with margin 1 than with margin 2. None where base classes are not apart with
    one of the margins, or where the denominator is not positive: then eq. (12) sets no upper bound.
    Small differences decide it, so that it varies much more between runs than P^s.

    Args:
      discriminability: `intra` and `inter` of each split, from a run with margin 1.
      baseline: The same from a run with margin 2, in the paper the larger one.

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (12).
    """
    if "base" not in discriminability:
        return {}
    runs = discriminability, baseline
    bases = [run["base"] for run in runs]
    are_apart = all(base["inter"] - base["intra"] > _LEAST_GAP for base in bases)

    def bound(part: str) -> float | None:
        if not are_apart:
            return None
        psi, psi_baseline = (run[part]["inter"] / run["base"]["inter"] for run in runs)
        apart, apart_baseline = (1 - base["intra"] / base["inter"] for base in bases)
        denominator = psi * apart_baseline - psi_baseline * apart
        return (psi - psi_baseline) / denominator if denominator > _LEAST_GAP else None

    return {part: bound(part) for part in discriminability if part != "base"}


def measure_bounds(report: dict[str, Any], baseline: dict[str, Any]) -> list[dict[str, Any]]:
    """The bounds on P^s of a run, compared with the run of the baseline."""
    bounds = share_bounds(report["discriminability"], baseline["discriminability"])
    return [_share_bound(part).measured(bound) for part, bound in bounds.items()]


def metrics(data: MarginData, evaluation: MarginEvaluation, classifier: Classifier) -> list[Metric]:
    """Accuracy for each split and number of shots; discriminability, its parts, and P^s."""
    parts = _parts(data, "novel")
    accuracies = [
        _accuracy(part, shots, form)
        for part in parts
        for form in _forms(classifier)
        for shots in evaluation.shots
    ]
    scatters = [_scatter(part, name) for name in _SCATTER for part in parts]
    return accuracies + scatters + [_same_class_share(part) for part in parts if part != "base"]


def _accuracy(part: str, shots: int, form: str = "") -> Metric:
    return Metric(f"{part} {shots}-shot{form}")


def _scatter(part: str, name: str) -> Metric:
    title, higher_is_better = _SCATTER[name]
    return Metric(f"{part} {title}", "", higher_is_better)


def _same_class_share(part: str) -> Metric:
    return Metric(f"{part} P^s", "", higher_is_better=True)


def _share_bound(part: str) -> Metric:
    return Metric(f"{part} P^s bound", "", higher_is_better=None)


def _parts(data: MarginData, split: str) -> list[str]:
    available = ("base", *split_names(_novel_name(data)))
    requested = ("novel", "validation", "base") if split == "novel" else (split,)
    return [part for part in requested if part in available]


def label(options: MarginLoss) -> str:
    """The loss, for tables."""
    smoothing = f", ε = {options.label_smoothing:g}" if options.label_smoothing else ""
    return f"{_LABELS[options.name]}, m = {options.margin:g}{smoothing}"


def report(results: dict[str, Any]) -> list[str]:
    """A phrase on the evaluation, a table of classes and shots, and one of discriminability."""
    evaluation, tuning = results["evaluation"], results["fine_tuning"]
    base = "held out from training" if results["holdout"] else "training images"
    if results["base_test"]:
        base = f"test images of {results['base_test']}"
    shares = results["same_class_share"]
    number = f"{results['base_classes']} " if results["base_classes"] else ""
    lines = [
        f"{evaluation['ways']}-way, {evaluation['queries']} queries per class, {tuning['passes']} "
        f"passes of fine-tuning a {evaluation['classifier']} classifier",
        "",
        *episodes_table(results["results"]),
        "",
        *table(
            ["classes", "D_intra", "D_inter", "D_inter / D_intra", *["P^s"] * bool(shares)],
            [
                [split, *(f"{scatter[name]:.4f}" for name in ("intra", "inter", "ratio"))]
                + ["–" if shares.get(split) is None else f"{shares[split]:.3f}"] * bool(shares)
                for split, scatter in results["discriminability"].items()
            ],
        ),
        "",
        f"Images of the {number}base classes ({results['data']}): {base}.",
    ]
    if results["novel_data"] != results["data"]:
        lines.append(f"Validation and novel classes: those of {results['novel_data']}.")
    return lines
