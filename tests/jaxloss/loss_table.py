"""One row per public loss, and one per public function of features and a classifier.

Everything in `test_contract.py` and `test_devices.py` runs over every row: a new loss is tested by
adding it here. `LOSSES` holds each public loss once with its plainest options; `VARIANTS` further
options of the same losses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references

CLASSES = 4
DIM = 7
ASSIGNMENT = np.array([4, 1, 5, 0], np.int32)
LENGTHS = np.array([0.5, 1.25, 2.0, 0.75])


def from_torch(name: str, **options: Any) -> Callable[..., Any]:
    """A function of `torch_references`, which is imported by the first call.

    A test that calls it is skipped if PyTorch is not installed, as in `make quick`.
    """

    def call(*args, **kwargs):
        pytest.importorskip("torch")
        from tests.jaxloss import torch_references

        return getattr(torch_references, name)(*args, **options, **kwargs)

    return call


Inputs = tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class FunctionRow:
    """A public function of features and a classifier, and its references."""

    name: str
    function: Callable[..., Any]
    make_inputs: Callable[..., Inputs]
    """`make_inputs(rng, n, dtype)`: the positional arguments, features or logits first."""
    reference: Callable[..., Any]
    torch_reference: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    invalid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values out of range, by hyperparameter."""


Kind = Literal["logits", "targets", "features", "classifier", "prototypes", "proxies"]


@dataclass(frozen=True, eq=False, kw_only=True)
class LossRow(FunctionRow):
    """A loss, its positional arguments, and its references."""

    kind: Kind
    """The kind of positional arguments. "targets" means logits with multi-label targets."""
    is_variant: bool = False
    multi_hot: bool = False
    terms: Literal["samples", "classes"] | None = "samples"
    """The axis of the result of `reduction="none"`; None if the loss does not support it."""
    piecewise_linear: bool = False
    needs_positives: bool = False
    """Whether the loss is undefined for a sample without another sample of its class."""
    per_class: tuple[str, ...] = ()
    """The hyperparameters that may also be arrays `[C]`."""
    constant: tuple[int, ...] = ()
    """The positions that the loss also depends on through a stop-gradient. Finite differences along
    them differ from the gradient."""

    @property
    def bounds_labels(self) -> bool:
        """Whether the loss has a number of classes, so that a label can be too large."""
        return "num_classes" in self.kwargs or (self.kind != "features" and not self.multi_hot)

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The positions of the differentiated arguments: all but the labels."""
        return {"classifier": (0, 2, 3), "prototypes": (0, 2), "proxies": (0, 2)}.get(
            self.kind, (0,)
        )

    @property
    def reductions(self) -> tuple[str, ...]:
        """Those that are tested: a variant has the sum of the plain row."""
        if self.terms is None:
            return ("mean", "sum")
        return ("mean", "none") if self.is_variant else ("mean", "sum", "none")

    @property
    def takes_logits(self) -> bool:
        return self.kind in ("logits", "targets")

    @property
    def has_tiles(self) -> bool:
        """Whether it is computed tile by tile, or block by block."""
        return "block_size" in self.kwargs

    @property
    def dtype(self) -> Any:
        """The dtype of tests that need one only. Options of the same code have float64 alone."""
        return np.float64 if self.is_variant and not self.has_tiles else np.float32


# Class 3 has one of the first twelve samples: an anchor without positives.
_PATTERN = np.array([2, 0, 1, 0, 2, 1, 0, 3, 0, 1, 2, 0])


def make_labels(rng: np.random.Generator, n: int) -> np.ndarray:
    """Unequal class sizes, in no order."""
    return rng.permutation(np.resize(_PATTERN, n)).astype(np.int32)


def make_features(rng, n, dtype, dim=DIM):
    """Columns of different scale, away from zero mean."""
    scales = np.linspace(0.3, 0.9, dim)
    return (rng.normal(0.1, 1.0, (n, dim)) * scales).astype(dtype)


def make_weights(rng, dtype, dim=DIM, classes=CLASSES):
    return (rng.normal(0.05, 0.5, (dim, classes)) * np.linspace(0.6, 1.4, classes)).astype(dtype)


def logits_and_labels(rng, n, dtype):
    logits = rng.normal(0.2, 1.5, (n, CLASSES)).astype(dtype)
    return logits, make_labels(rng, n)


def logits_and_targets(rng, n, dtype):
    logits = rng.normal(0.2, 1.5, (n, CLASSES)).astype(dtype)
    return logits, rng.choice(np.array([-1, 0, 1], np.int32), (n, CLASSES), p=[0.2, 0.5, 0.3])


def features_and_labels(rng, n, dtype):
    return make_features(rng, n, dtype), make_labels(rng, n)


def features_and_targets(rng, n, dtype):
    targets = rng.choice(np.array([-1, 0, 1], np.int32), (n, CLASSES), p=[0.1, 0.6, 0.3])
    return make_features(rng, n, dtype), targets


def unit_classifier_inputs(rng, n, dtype):
    features, *rest = classifier_inputs(rng, n, dtype)
    return features / np.linalg.norm(features, axis=1, keepdims=True), *rest


def classifier_inputs(rng, n, dtype, dim=DIM):
    features = make_features(rng, n, dtype, dim)
    bias = rng.normal(0, 0.3, CLASSES).astype(dtype)
    return features, make_labels(rng, n), make_weights(rng, dtype, dim), bias


def prototype_inputs(rng, n, dtype, num_prototypes=CLASSES):
    """Prototypes of different lengths."""
    features, labels = features_and_labels(rng, n, dtype)
    return features, labels, make_weights(rng, dtype, classes=num_prototypes)


def cosines_and_labels(rng, n, dtype):
    return rng.uniform(-0.95, 0.95, (n, CLASSES)).astype(dtype), make_labels(rng, n)


def sub_centre_inputs(rng, n, dtype):
    features, labels = features_and_labels(rng, n, dtype)
    return features, labels, make_sub_centres(rng, dtype)


def make_sub_centres(rng, dtype):
    return np.stack([make_weights(rng, dtype), make_weights(rng, dtype)], axis=2)


def features_and_sub_centres(rng, n, dtype):
    return make_features(rng, n, dtype), make_sub_centres(rng, dtype)


def features_and_weights(rng, n, dtype, dim=DIM):
    return make_features(rng, n, dtype, dim), make_weights(rng, dtype, dim)


def features_weights_and_bias(rng, n, dtype):
    return (*features_and_weights(rng, n, dtype), rng.normal(0, 0.3, CLASSES).astype(dtype))


def towers(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss with references that are made of the batch, so that a row of the table tests them.

    Classes 0 and 1 are one class of the references, and the largest class has no reference.
    """

    @wraps(loss)
    def call(features, labels, *, where=None, **options):
        if jnp.issubdtype(features.dtype, jnp.floating) and jnp.issubdtype(
            labels.dtype, jnp.integer
        ):
            options["references"] = -0.5 * features
            options["reference_labels"] = jnp.where(labels > 0, labels - 1, labels)
            options["reference_where"] = where
        return loss(features, labels, where=where, **options)

    return call


def sample_margins(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss with margins of the samples that depend on their features, as those of AdaFace."""

    @wraps(loss)
    def call(scored, *args, **options):
        options["sample_margin"] = 0.25 * scored[:, 1]
        options["sample_angular_margin"] = -0.5 * scored[:, 0]
        return loss(scored, *args, **options)

    return call


def views(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of the features and a second view that is made of them. A negative label is padding.

    The second view has the dimensions in the reverse order and in other units.
    """

    @wraps(loss)
    def call(features, labels, *, where=None, **options):
        scales = jnp.asarray(np.linspace(0.5, 1.5, features.shape[1]), features.dtype)
        where = labels >= 0 if where is None else where & (labels >= 0)
        return loss(features, features[:, ::-1] * scales[None, :], where=where, **options)

    return call


def paired(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of two towers as a loss of features and labels, so that a row of the table tests it.

    The keys are made of the queries, by numbers that round no dtype, and the labels are the ids.
    """

    @wraps(loss)
    def call(features, labels, *, where=None, further=False, **options):
        valid = labels >= 0 if where is None else where & (labels >= 0)
        keys = -0.5 * jnp.roll(features, 1, axis=1)
        if further:
            options["key_where"] = jnp.concatenate([valid, valid])
            keys = jnp.concatenate([keys, 2.0 * jnp.roll(features, 2, axis=1)])
        return loss(features, keys, ids=labels, where=valid, **options)

    return call


ADAPTERS = {"towers": towers, "sample_margins": sample_margins, "views": views, "paired": paired}
"""By the beginning of the name of a formula."""


# A basis of other weights than those of the classifier.
BASIS_WEIGHTS = make_weights(np.random.default_rng(9), np.float64)


def basis_of(weights: np.ndarray) -> jaxloss.SpectralBasis:
    """The basis by NumPy, of weights without null directions."""
    vectors, values, _ = np.linalg.svd(weights, full_matrices=False)
    return jaxloss.SpectralBasis(vectors, values)  # pyright: ignore[reportArgumentType]


INPUTS: dict[Kind, Callable[..., Inputs]] = {
    "logits": logits_and_labels,
    "targets": logits_and_targets,
    "features": features_and_labels,
    "classifier": classifier_inputs,
    "prototypes": prototype_inputs,
    "proxies": prototype_inputs,
}


def loss_row(
    loss: str,
    kind: Kind,
    *,
    name: str = "",
    formula: str = "",
    make_inputs: Callable[..., Inputs] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    numpy: Mapping[str, Any] | None = None,
    torch: Mapping[str, Any] | None = None,
    **facts: Any,
) -> LossRow:
    """The row of `jaxloss.{loss}_loss`, with `{formula}_loss` of both files of references.

    `kwargs` are hyperparameters of all three; `own`, `numpy` and `torch` of one of them.
    """
    shared, function = dict(kwargs or {}), getattr(jaxloss, f"{loss}_loss")
    for beginning, adapter in ADAPTERS.items():
        if formula.startswith(beginning):
            function = adapter(function)
    reference = f"{formula or loss}_loss"
    if kind == "targets":
        facts["multi_hot"] = True
    return LossRow(
        name=name or loss,
        is_variant=bool(name),
        function=function,
        kind=kind,
        make_inputs=make_inputs or INPUTS[kind],
        reference=partial(getattr(references, reference), **shared, **(numpy or {})),
        torch_reference=from_torch(reference, **shared, **(torch or {})),
        kwargs={key: as_jax(option) for key, option in (shared | dict(own or {})).items()},
        **facts,
    )


def as_jax(option: Any) -> Any:
    """The annotations say JAX arrays, whose numbers must be exact in float32."""
    if not isinstance(option, np.ndarray):
        return option
    return jnp.asarray(option, np.int32 if option.dtype == np.int32 else np.float32)


def in_blocks(size: int | None) -> dict[str, Any]:
    return {} if size is None else {"own": {"block_size": size}}


def classifier_row(
    name: str,
    block_size: int | None = None,
    formula: str = "",
    make_inputs: Callable[..., Inputs] | None = None,
    **options: Any,
) -> LossRow:
    """A row of `classifier_loss`. Cosines are without a bias, with the arguments of prototypes."""
    kind = "prototypes" if options.get("similarity") == "cosine" else "classifier"
    return loss_row(
        "classifier",
        kind,
        name=name,
        formula=formula,
        make_inputs=make_inputs,
        kwargs=options,
        **in_blocks(block_size),
    )


CLASS_MARGINS = np.array([0.25, -0.125, 0.0625, 0.5])
CLASS_ANGLES = np.array([0.375, 0.0, 1.25, 2.125])
MARGINS: Mapping[str, Mapping[str, Any]] = {
    "class_margins": {"margin": CLASS_MARGINS, "scale": 1.7, "label_smoothing": 0.1},
    "sample_margins": {
        "formula": "sample_margins_classifier",
        "similarity": "cosine",
        "margin": 0.2,
        "scale": 3.0,
    },
    "angles": {
        "similarity": "cosine",
        "margin": 0.1,
        "angular_margin": CLASS_ANGLES,
        "scale": 4.0,
        "label_smoothing": 0.1,
    },
    "sub_centres": {
        "make_inputs": sub_centre_inputs,
        "similarity": "cosine",
        "angular_margin": 0.3,
        "scale": 3.0,
    },
}
"""Options of `classifier_loss`, whose rows are also in blocks."""


def two_tower_row(loss: str, name: str, size: int | None = None, **options: Any) -> LossRow:
    """A row of a loss of two towers, which has no labels, and so no plain row."""
    blocks = in_blocks(size)
    formula = f"paired_{loss}"
    return loss_row(loss, "features", name=name, formula=formula, kwargs=options, **blocks)


def anchor_row(
    loss: str, suffix: str, size: int | None = None, multi_hot: bool = False, **options: Any
) -> LossRow:
    """A variant of a loss of anchors, compared with the batch or with references made of it."""
    of_references = suffix.startswith("references")
    return loss_row(
        loss,
        "features",
        name=f"{loss}_{suffix}",
        formula=f"towers_{loss}" if of_references else "",
        make_inputs=features_and_targets if multi_hot else None,
        kwargs=options,
        multi_hot=multi_hot,
        needs_positives=not (of_references or multi_hot or loss == "multi_similarity"),
        constant=(0,) if loss == "circle" else (),
        **in_blocks(size),
    )


TEMPERATURE = {"temperature": (0.0, -1.0)}
TEMPERATURES = {f"{sign}_temperature": (0.0, -1.0) for sign in ("positive", "negative")}
NUM_CLASSES: dict[str, Any] = {"num_classes": CLASSES}
NEGATIVES: dict[str, Any] = {"denominator": "negatives"}

LOSSES = (
    loss_row("softmax", "logits", invalid={"label_smoothing": (-0.1, 1.0, 1.5)}),
    loss_row("sigmoid", "logits"),
    loss_row(
        "margin_softmax",
        "logits",
        kwargs={"margin": -0.3, "scale": 1.7},
        invalid={"scale": (0.0, -1.0), "angular_margin": (-0.1,)},
        per_class=("angular_margin",),
    ),
    loss_row(
        "nca",
        "features",
        needs_positives=True,
        invalid={**TEMPERATURE, "block_size": (0, -1)},
    ),
    loss_row(
        "prototypical",
        "features",
        needs_positives=True,
        invalid={**TEMPERATURE, "num_classes": (0,), "block_size": (0,)},
    ),
    loss_row(
        "supervised_contrastive",
        "features",
        needs_positives=True,
        invalid={**TEMPERATURE, "denominator": ("positives",), "block_size": (0,)},
    ),
    loss_row(
        "multi_similarity",
        "features",
        invalid={
            "positive_scale": (0.0,),
            "negative_scale": (0.0, -1.0),
            "mining_margin": (-0.1,),
            "block_size": (0,),
        },
    ),
    loss_row(
        "circle",
        "features",
        kwargs={"margin": 0.3, "scale": 6.0},
        needs_positives=True,
        constant=(0,),
        invalid={"scale": (0.0, -1.0), "block_size": (0,)},
    ),
    loss_row(
        "triplet",
        "features",
        needs_positives=True,
        invalid={"margin": (-0.1,), "mining": ("easy", None), "block_size": (0, -1)},
    ),
    loss_row("sum", "classifier"),
    loss_row("direct_sum", "classifier", invalid={"epsilon": (-1e-3,)}),
    loss_row("spectral_sum", "classifier", invalid={"power": (-0.1,)}),
    loss_row(
        "group_softmax",
        "classifier",
        kwargs={"num_groups": 3},
        invalid={"num_groups": (0, DIM + 1), "bound": ("type-I",)},
    ),
    loss_row("prototype", "prototypes"),
    loss_row("dot_regression", "prototypes", constant=(0,)),
    loss_row("sample_wise", "targets", invalid=TEMPERATURES),
    loss_row("class_wise", "targets", terms="classes", invalid=TEMPERATURES),
    loss_row("two_way", "targets", terms=None, invalid=TEMPERATURES),
    loss_row("multilabel_softmax", "targets"),
    loss_row(
        "asymmetric",
        "targets",
        invalid={"positive_focus": (-0.1,), "negative_focus": (-0.1,), "clip": (-0.1, 1.0)},
    ),
    loss_row("warp", "targets", piecewise_linear=True),
    loss_row(
        "robust_multilabel",
        "targets",
        piecewise_linear=True,
        invalid={"ramp": (1.0,), "leak": (-0.1,), "binary_weight": (-0.1,)},
    ),
    loss_row(
        "classifier",
        "classifier",
        invalid={
            "scale": (0.0, -1.0),
            "angular_margin": (-0.1,),
            "label_smoothing": (-0.1, 1.0),
            "block_size": (0,),
            "similarity": ("l2",),
        },
        per_class=("angular_margin",),
    ),
    loss_row("proxy_anchor", "proxies", terms=None, invalid={"scale": (0.0, -1.0)}),
    loss_row("proxy_nca", "proxies", invalid=TEMPERATURE),
)

VARIANTS = (
    loss_row("softmax", "logits", name="softmax_smoothed", kwargs={"label_smoothing": 0.2}),
    loss_row(
        "sigmoid",
        "logits",
        name="sigmoid_multi_hot",
        make_inputs=logits_and_targets,
        multi_hot=True,
    ),
    # Tiles that do not divide the batch, on and below the diagonal.
    anchor_row("nca", "in_tiles", 3, temperature=1.3),
    anchor_row("nca", "references", temperature=1.3),
    anchor_row("nca", "references_in_tiles", 3, temperature=1.3),
    # Tiles of one class, and tiles that do not divide the classes.
    anchor_row("prototypical", "in_tiles", 1, temperature=1.3),
    anchor_row("prototypical", "num_classes", temperature=1.3, **NUM_CLASSES),
    anchor_row("prototypical", "num_classes_in_tiles", 3, temperature=1.3, **NUM_CLASSES),
    anchor_row("prototypical", "references", temperature=1.3),
    anchor_row("prototypical", "references_in_tiles", 2, temperature=1.3),
    anchor_row("prototypical", "references_num_classes", temperature=1.3, **NUM_CLASSES),
    anchor_row("supervised_contrastive", "in_tiles", 3),
    anchor_row("supervised_contrastive", "references_in_tiles", 3),
    anchor_row("supervised_contrastive", "negatives_in_tiles", 3, temperature=0.4, **NEGATIVES),
    anchor_row("supervised_contrastive", "references_negatives", temperature=0.4, **NEGATIVES),
    anchor_row("supervised_contrastive", "multi_hot", None, True, temperature=0.3, normalize=False),
    anchor_row(
        "supervised_contrastive",
        "multi_hot_negatives_in_tiles",
        3,
        multi_hot=True,
        temperature=0.3,
        **NEGATIVES,
    ),
    anchor_row("multi_similarity", "mined_in_tiles", 3, mining_margin=0.2),
    anchor_row(
        "multi_similarity",
        "references_mined",
        mining_margin=0.2,
        threshold=0.1,
        negative_scale=7.0,
    ),
    anchor_row("circle", "in_tiles", 3, scale=6.0),
    anchor_row("circle", "references_in_tiles", 3, scale=6.0),
    anchor_row("triplet", "in_tiles", 3, margin=0.5, squared=True),
    anchor_row("triplet", "references_in_tiles", 3, soft=True),
    anchor_row("triplet", "semihard", mining="semihard"),
    anchor_row(
        "triplet", "semihard_in_blocks", 3, mining="semihard", squared=True, normalize=False
    ),
    anchor_row("triplet", "references_semihard", mining="semihard", soft=True),
    anchor_row("triplet", "all", mining="all"),
    anchor_row("triplet", "all_in_blocks", 5, mining="all", squared=True, margin=0.6),
    anchor_row("triplet", "references_all", mining="all", normalize=False),
    anchor_row("triplet", "all_soft_in_blocks", 3, mining="all", soft=True),
    # A loss of cosines gets features that are normalised before they are projected.
    loss_row(
        "direct_sum",
        "classifier",
        name="direct_sum_supervised_contrastive",
        make_inputs=unit_classifier_inputs,
        own={"metric_loss": partial(jaxloss.supervised_contrastive_loss, normalize=False)},
        numpy={"metric": partial(references.supervised_contrastive_loss, normalize=False)},
        torch={"metric": from_torch("supervised_contrastive_loss", normalize=False)},
    ),
    two_tower_row("info_nce", "info_nce", temperature=0.3),
    two_tower_row(
        "info_nce", "info_nce_one_way_in_tiles", 3, temperature=0.3, symmetric=False, further=True
    ),
    two_tower_row("info_nce", "info_nce_in_tiles", 5, temperature=0.8, normalize=False),
    two_tower_row("sigmoid_contrastive", "sigmoid_contrastive", further=True),
    two_tower_row("sigmoid_contrastive", "sigmoid_contrastive_in_tiles", 3, scale=2.0, bias=-1.5),
    # Here the metric loss has no gradient for the classifier.
    *(
        loss_row(
            name,
            "classifier",
            name=f"{name}_stopped",
            own={"stop_gradient": True},
            torch={"stop_gradient": True},
            constant=(2,),
        )
        for name in ("direct_sum", "spectral_sum")
    ),
    # Every option of a sum away from its default, and more classes than dimensions.
    loss_row(
        "spectral_sum",
        "classifier",
        name="spectral_sum_sigmoid_prototypical",
        make_inputs=partial(classifier_inputs, dim=3),
        kwargs={"metric_weight": 0.6, "power": 0.5},
        own={
            "classification_loss": jaxloss.sigmoid_loss,
            "metric_loss": partial(jaxloss.prototypical_loss, **NUM_CLASSES),
        },
        numpy={
            "classification": references.sigmoid_loss,
            "metric": partial(references.prototypical_loss, **NUM_CLASSES),
        },
        torch={
            "classification": from_torch("sigmoid_loss"),
            "metric": from_torch("prototypical_loss"),
        },
    ),
    loss_row(
        "spectral_sum",
        "classifier",
        name="spectral_sum_of_a_basis",
        own={"basis": basis_of(BASIS_WEIGHTS)},
        numpy={"basis_weights": BASIS_WEIGHTS},
        torch={"basis_weights": BASIS_WEIGHTS},
    ),
    loss_row(
        "group_softmax",
        "classifier",
        name="group_softmax_tight",
        make_inputs=partial(classifier_inputs, dim=6),
        kwargs={"num_groups": 2, "bound": "tight"},
    ),
    loss_row(
        "prototype",
        "prototypes",
        name="prototype_assigned",
        make_inputs=partial(prototype_inputs, num_prototypes=6),
        kwargs={"assignment": ASSIGNMENT},
    ),
    loss_row(
        "dot_regression",
        "prototypes",
        name="dot_regression_assigned_lengths",
        make_inputs=partial(prototype_inputs, num_prototypes=6),
        kwargs={"assignment": ASSIGNMENT, "lengths": LENGTHS},
        constant=(0,),
    ),
    loss_row(
        "two_way",
        "targets",
        name="two_way_tempered",
        terms=None,
        kwargs={"positive_temperature": 1.7, "negative_temperature": 0.6, "margin": 0.4},
    ),
    loss_row(
        "asymmetric",
        "targets",
        name="asymmetric_unclipped",
        kwargs={"positive_focus": 1.5, "negative_focus": 0.5, "clip": 0.0},
    ),
    loss_row(
        "robust_multilabel",
        "targets",
        name="robust_multilabel_by_other_constants",
        piecewise_linear=True,
        kwargs={"ramp": 0.3, "leak": 0.4, "binary_weight": 0.7},
    ),
    # In blocks of 3 of the 4 classes, the smaller block has one class.
    classifier_row("classifier_in_blocks", 3),
    classifier_row("classifier_smoothed_in_blocks", 1, margin=-0.3, scale=1.7, label_smoothing=0.2),
    *(
        classifier_row(name, size, similarity="cosine", margin=0.2, scale=3.0, label_smoothing=0.1)
        for name, size in (("classifier_cosine", None), ("classifier_cosine_in_blocks", 3))
    ),
    *(
        classifier_row(f"classifier_{name}{'_in_blocks' if size else ''}", size, **options)
        for name, options in MARGINS.items()
        for size in (None, 3)
    ),
    loss_row(
        "margin_softmax",
        "logits",
        name="margin_softmax_angles",
        make_inputs=cosines_and_labels,
        kwargs={"margin": CLASS_MARGINS, "angular_margin": CLASS_ANGLES, "scale": 4.0},
    ),
    loss_row(
        "margin_softmax",
        "logits",
        name="margin_softmax_sample_margins",
        formula="sample_margins_margin_softmax",
        make_inputs=cosines_and_labels,
        kwargs={"angular_margin": 0.4, "scale": 4.0},
    ),
    loss_row(
        "proxy_nca",
        "proxies",
        name="proxy_nca_without_own",
        kwargs={"temperature": 0.7, "include_own": False},
    ),
    *(
        loss_row(
            name,
            "features",
            name=f"{name}_of_one_batch",
            formula=f"views_{name}",
            terms=None,
        )
        for name in ("vicreg", "barlow_twins")
    ),
)

CASES = LOSSES + VARIANTS
ONE_OF_A_KIND = tuple(
    row
    for row in LOSSES
    if row.name
    in ("softmax", "nca", "prototypical", "direct_sum", "prototype", "class_wise", "classifier")
)
"""For what the rooms below the formulas do alike for all losses."""


def function_row(name: str, make_inputs: Callable[..., Inputs], **options: Any) -> FunctionRow:
    """The row of `jaxloss.{name}`, whose references take the same options."""
    invalid, suffix = options.pop("invalid", {}), options.pop("suffix", "")
    formula = {key: value for key, value in options.items() if key != "stop_gradient"}
    return FunctionRow(
        name=name + suffix,
        function=getattr(jaxloss, name),
        make_inputs=make_inputs,
        reference=partial(getattr(references, name), **formula),
        torch_reference=from_torch(name, **options),
        kwargs=options,
        invalid=invalid,
    )


EPSILON, POWER = {"epsilon": (-1e-3,)}, {"power": (-0.1,)}
FUNCTIONS = (
    function_row("linear_logits", features_weights_and_bias),
    function_row("cosine_logits", features_and_weights),
    function_row("project_classifier", features_and_weights, invalid=EPSILON),
    function_row("project_complement", features_and_weights, invalid=EPSILON),
    function_row("project_spectral_complement", features_and_weights, invalid=POWER),
    # A constant projection, and other options, for d > C and d < C.
    *(
        function_row(
            name,
            partial(features_and_weights, dim=dim),
            suffix=f"_{'stopped' if stop_gradient else 'options'}_{dim}",
            stop_gradient=stop_gradient,
            **options,
        )
        for stop_gradient in (True, False)
        for dim in (DIM, 3)
        for name, options in (
            ("project_classifier", {"epsilon": 0.02}),
            ("project_complement", {"epsilon": 0.02}),
            ("project_spectral_complement", {"power": 0.4}),
        )
    ),
    function_row("cosine_logits", features_and_sub_centres, suffix="_sub_centres"),
)
