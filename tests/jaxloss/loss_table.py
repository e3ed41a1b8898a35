"""One row per public loss, and one per public function of features and a classifier.

Everything in `test_contract.py` and `test_devices.py` runs over every row: a new loss is tested by
adding it here. `LOSSES` holds each public loss once with its plainest options; `VARIANTS` further
options of the same losses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MappingProxyType
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
class LossRow:
    """A loss, its positional arguments, and its references."""

    name: str
    function: Callable[..., Any]
    kind: Literal["logits", "targets", "features", "classifier", "prototypes"]
    """The kind of positional arguments. "targets" means logits with multi-label targets."""
    make_inputs: Callable[..., Inputs]
    """`make_inputs(rng, n, dtype)`: the scores or features, the labels, and the third argument."""
    reference: Callable[..., Any]
    torch_reference: Callable[..., Any]
    differentiable: tuple[int, ...]
    """The positions of the differentiated arguments."""
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    bounds_labels: bool = True
    """Whether the loss has a number of classes, so that a label can be too large."""
    multi_hot: bool = False
    terms: Literal["samples", "classes"] | None = "samples"
    """The axis of the result of `reduction="none"`; None if the loss does not support it."""
    piecewise_linear: bool = False
    needs_positives: bool = False
    """Whether the loss is undefined for a sample without another sample of its class."""
    constant: tuple[int, ...] = ()
    """The positions that the loss also depends on through a stop-gradient. Finite differences along
    them differ from the gradient."""
    invalid: tuple[tuple[str, Any], ...] = ()
    """Hyperparameters out of range."""

    @property
    def reductions(self) -> tuple[str, ...]:
        return ("mean", "sum") if self.terms is None else ("mean", "sum", "none")

    @property
    def takes_logits(self) -> bool:
        return self.kind in ("logits", "targets")


@dataclass(frozen=True, eq=False)
class FunctionRow:
    """A public function other than a loss: `function(features, weights, ...)`."""

    name: str
    function: Callable[..., Any]
    make_inputs: Callable[..., Inputs]
    reference: Callable[..., Any]
    torch_reference: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    invalid: tuple[tuple[str, Any], ...] = ()


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


def classifier_inputs(rng, n, dtype, dim=DIM):
    features = make_features(rng, n, dtype, dim)
    bias = rng.normal(0, 0.3, CLASSES).astype(dtype)
    return features, make_labels(rng, n), make_weights(rng, dtype, dim), bias


def prototype_inputs(rng, n, dtype, num_prototypes=CLASSES):
    """Prototypes of different lengths."""
    features, labels = features_and_labels(rng, n, dtype)
    return features, labels, make_weights(rng, dtype, classes=num_prototypes)


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


# A basis of other weights than those of the classifier.
BASIS_WEIGHTS = make_weights(np.random.default_rng(9), np.float64)


def basis_of(weights: np.ndarray) -> jaxloss.SpectralBasis:
    """The basis by NumPy, of weights without null directions."""
    vectors, values, _ = np.linalg.svd(weights, full_matrices=False)
    return jaxloss.SpectralBasis(vectors, values)  # pyright: ignore[reportArgumentType]


def targets_row(loss: str, *, name: str | None = None, **options: Any) -> LossRow:
    """The row of a multi-label loss. Its references take the same hyperparameters."""
    kwargs = options.pop("kwargs", {})
    return LossRow(
        name=name or loss,
        function=getattr(jaxloss, f"{loss}_loss"),
        kind="targets",
        make_inputs=logits_and_targets,
        reference=partial(getattr(references, f"{loss}_loss"), **kwargs),
        torch_reference=from_torch(f"{loss}_loss", **kwargs),
        differentiable=(0,),
        kwargs=MappingProxyType(kwargs),
        bounds_labels=False,
        multi_hot=True,
        **options,
    )


def classifier_row(name: str, block_size: int | None = None, **options: Any) -> LossRow:
    """A row of `classifier_loss`. Cosines are without a bias, with the arguments of prototypes."""
    cosine = options.get("similarity") == "cosine"
    blocks = {} if block_size is None else {"block_size": block_size}
    return LossRow(
        name=name,
        function=jaxloss.classifier_loss,
        kind="prototypes" if cosine else "classifier",
        make_inputs=prototype_inputs if cosine else classifier_inputs,
        reference=partial(references.classifier_loss, **options),
        torch_reference=from_torch("classifier_loss", **options),
        differentiable=(0, 2) if cosine else (0, 2, 3),
        kwargs=MappingProxyType({**blocks, **options}),
        invalid=(
            ("scale", 0.0),
            ("scale", -1.0),
            ("label_smoothing", -0.1),
            ("label_smoothing", 1.0),
            ("block_size", 0),
            ("similarity", "l2"),
        ),
    )


TEMPERATURES_OUT_OF_RANGE = tuple(
    (f"{sign}_temperature", value) for sign in ("positive", "negative") for value in (0.0, -1.0)
)

LOSSES = (
    LossRow(
        name="softmax",
        function=jaxloss.softmax_loss,
        kind="logits",
        make_inputs=logits_and_labels,
        reference=references.softmax_loss,
        torch_reference=from_torch("softmax_loss"),
        differentiable=(0,),
        invalid=(("label_smoothing", -0.1), ("label_smoothing", 1.0), ("label_smoothing", 1.5)),
    ),
    LossRow(
        name="sigmoid",
        function=jaxloss.sigmoid_loss,
        kind="logits",
        make_inputs=logits_and_labels,
        reference=references.sigmoid_loss,
        torch_reference=from_torch("sigmoid_loss"),
        differentiable=(0,),
    ),
    LossRow(
        name="margin_softmax",
        function=jaxloss.margin_softmax_loss,
        kind="logits",
        make_inputs=logits_and_labels,
        reference=partial(references.margin_softmax_loss, margin=-0.3, scale=1.7),
        torch_reference=from_torch("margin_softmax_loss", margin=-0.3, scale=1.7),
        differentiable=(0,),
        kwargs=MappingProxyType({"margin": -0.3, "scale": 1.7}),
        invalid=(("scale", 0.0), ("scale", -1.0)),
    ),
    LossRow(
        name="nca",
        function=jaxloss.nca_loss,
        kind="features",
        make_inputs=features_and_labels,
        reference=references.nca_loss,
        torch_reference=from_torch("nca_loss"),
        differentiable=(0,),
        bounds_labels=False,
        needs_positives=True,
        invalid=(("temperature", 0.0), ("temperature", -1.0)),
    ),
    LossRow(
        name="prototypical",
        function=jaxloss.prototypical_loss,
        kind="features",
        make_inputs=features_and_labels,
        reference=references.prototypical_loss,
        torch_reference=from_torch("prototypical_loss"),
        differentiable=(0,),
        bounds_labels=False,
        needs_positives=True,
        invalid=(
            ("temperature", 0.0),
            ("temperature", -1.0),
            ("num_classes", 0),
            ("block_size", 0),
        ),
    ),
    LossRow(
        name="sum",
        function=jaxloss.sum_loss,
        kind="classifier",
        make_inputs=classifier_inputs,
        reference=references.sum_loss,
        torch_reference=from_torch("sum_loss"),
        differentiable=(0, 2, 3),
    ),
    LossRow(
        name="direct_sum",
        function=jaxloss.direct_sum_loss,
        kind="classifier",
        make_inputs=classifier_inputs,
        reference=references.direct_sum_loss,
        torch_reference=from_torch("direct_sum_loss"),
        differentiable=(0, 2, 3),
        invalid=(("epsilon", -1e-3),),
    ),
    LossRow(
        name="spectral_sum",
        function=jaxloss.spectral_sum_loss,
        kind="classifier",
        make_inputs=classifier_inputs,
        reference=references.spectral_sum_loss,
        torch_reference=from_torch("spectral_sum_loss"),
        differentiable=(0, 2, 3),
        invalid=(("power", -0.1),),
    ),
    LossRow(
        name="group_softmax",
        function=jaxloss.group_softmax_loss,
        kind="classifier",
        make_inputs=classifier_inputs,
        reference=partial(references.group_softmax_loss, num_groups=3),
        torch_reference=from_torch("group_softmax_loss", num_groups=3),
        differentiable=(0, 2, 3),
        kwargs=MappingProxyType({"num_groups": 3}),
        invalid=(("num_groups", 0), ("num_groups", DIM + 1), ("bound", "type-I")),
    ),
    LossRow(
        name="prototype",
        function=jaxloss.prototype_loss,
        kind="prototypes",
        make_inputs=prototype_inputs,
        reference=references.prototype_loss,
        torch_reference=from_torch("prototype_loss"),
        differentiable=(0, 2),
    ),
    LossRow(
        name="dot_regression",
        function=jaxloss.dot_regression_loss,
        kind="prototypes",
        make_inputs=prototype_inputs,
        reference=references.dot_regression_loss,
        torch_reference=from_torch("dot_regression_loss"),
        differentiable=(0, 2),
        constant=(0,),
    ),
    targets_row("sample_wise", invalid=TEMPERATURES_OUT_OF_RANGE),
    targets_row("class_wise", terms="classes", invalid=TEMPERATURES_OUT_OF_RANGE),
    targets_row("two_way", terms=None, invalid=TEMPERATURES_OUT_OF_RANGE),
    targets_row("multilabel_softmax"),
    targets_row(
        "asymmetric",
        invalid=(
            ("positive_focus", -0.1),
            ("negative_focus", -0.1),
            ("clip", -0.1),
            ("clip", 1.0),
        ),
    ),
    targets_row("warp", piecewise_linear=True),
    targets_row(
        "robust_multilabel",
        piecewise_linear=True,
        invalid=(("ramp", 1.0), ("leak", -0.1), ("binary_weight", -0.1)),
    ),
    classifier_row("classifier"),
)

VARIANTS = (
    LossRow(
        name="softmax_smoothed",
        function=jaxloss.softmax_loss,
        kind="logits",
        make_inputs=logits_and_labels,
        reference=partial(references.softmax_loss, label_smoothing=0.2),
        torch_reference=from_torch("softmax_loss", label_smoothing=0.2),
        differentiable=(0,),
        kwargs=MappingProxyType({"label_smoothing": 0.2}),
    ),
    LossRow(
        name="sigmoid_multi_hot",
        function=jaxloss.sigmoid_loss,
        kind="logits",
        make_inputs=logits_and_targets,
        reference=references.sigmoid_loss,
        torch_reference=from_torch("sigmoid_loss"),
        differentiable=(0,),
        bounds_labels=False,
        multi_hot=True,
    ),
    # Tiles that do not divide the batch, on and below the diagonal.
    LossRow(
        name="nca_in_tiles",
        function=jaxloss.nca_loss,
        kind="features",
        make_inputs=features_and_labels,
        reference=partial(references.nca_loss, temperature=1.3),
        torch_reference=from_torch("nca_loss", temperature=1.3),
        differentiable=(0,),
        kwargs=MappingProxyType({"block_size": 3, "temperature": 1.3}),
        bounds_labels=False,
        needs_positives=True,
    ),
    *(
        LossRow(
            name=name,
            function=towers(jaxloss.nca_loss),
            kind="features",
            make_inputs=features_and_labels,
            reference=partial(references.towers_nca_loss, temperature=1.3),
            torch_reference=from_torch("towers_nca_loss", temperature=1.3),
            differentiable=(0,),
            kwargs=MappingProxyType({"temperature": 1.3, **tiles}),
            bounds_labels=False,
        )
        for name, tiles in (("nca_references", {}), ("nca_references_in_tiles", {"block_size": 3}))
    ),
    # Tiles of one class, and tiles that do not divide the classes.
    *(
        LossRow(
            name=name,
            function=jaxloss.prototypical_loss,
            kind="features",
            make_inputs=features_and_labels,
            reference=partial(references.prototypical_loss, temperature=1.3, **classes),
            torch_reference=from_torch("prototypical_loss", temperature=1.3),
            differentiable=(0,),
            kwargs=MappingProxyType({"temperature": 1.3, **classes, **tiles}),
            bounds_labels=bool(classes),
            needs_positives=True,
        )
        for name, classes, tiles in (
            ("prototypical_in_tiles", {}, {"block_size": 1}),
            ("prototypical_num_classes", {"num_classes": CLASSES}, {}),
            ("prototypical_num_classes_in_tiles", {"num_classes": CLASSES}, {"block_size": 3}),
        )
    ),
    *(
        LossRow(
            name=name,
            function=towers(jaxloss.prototypical_loss),
            kind="features",
            make_inputs=features_and_labels,
            reference=partial(references.towers_prototypical_loss, temperature=1.3, **classes),
            torch_reference=from_torch("towers_prototypical_loss", temperature=1.3),
            differentiable=(0,),
            kwargs=MappingProxyType({"temperature": 1.3, **classes, **tiles}),
            bounds_labels=bool(classes),
        )
        for name, classes, tiles in (
            ("prototypical_references", {}, {}),
            ("prototypical_references_in_tiles", {}, {"block_size": 2}),
            ("prototypical_references_num_classes", {"num_classes": CLASSES}, {}),
        )
    ),
    # Here the metric loss has no gradient for the classifier.
    *(
        LossRow(
            name=f"{name}_stopped",
            function=getattr(jaxloss, f"{name}_loss"),
            kind="classifier",
            make_inputs=classifier_inputs,
            reference=getattr(references, f"{name}_loss"),
            torch_reference=from_torch(f"{name}_loss", stop_gradient=True),
            differentiable=(0, 2, 3),
            kwargs=MappingProxyType({"stop_gradient": True}),
            constant=(2,),
        )
        for name in ("direct_sum", "spectral_sum")
    ),
    # Every option of a sum away from its default, and more classes than dimensions.
    LossRow(
        name="spectral_sum_sigmoid_prototypical",
        function=jaxloss.spectral_sum_loss,
        kind="classifier",
        make_inputs=partial(classifier_inputs, dim=3),
        reference=partial(
            references.spectral_sum_loss,
            classification=references.sigmoid_loss,
            metric=partial(references.prototypical_loss, num_classes=CLASSES),
            metric_weight=0.6,
            power=0.5,
        ),
        torch_reference=from_torch(
            "spectral_sum_loss",
            classification=from_torch("sigmoid_loss"),
            metric=from_torch("prototypical_loss"),
            metric_weight=0.6,
            power=0.5,
        ),
        differentiable=(0, 2, 3),
        kwargs=MappingProxyType(
            {
                "classification_loss": jaxloss.sigmoid_loss,
                "metric_loss": partial(jaxloss.prototypical_loss, num_classes=CLASSES),
                "metric_weight": 0.6,
                "power": 0.5,
            }
        ),
    ),
    LossRow(
        name="spectral_sum_of_a_basis",
        function=jaxloss.spectral_sum_loss,
        kind="classifier",
        make_inputs=classifier_inputs,
        reference=partial(references.spectral_sum_loss, basis_weights=BASIS_WEIGHTS),
        torch_reference=from_torch("spectral_sum_loss", basis_weights=BASIS_WEIGHTS),
        differentiable=(0, 2, 3),
        kwargs=MappingProxyType({"basis": basis_of(BASIS_WEIGHTS)}),
    ),
    LossRow(
        name="group_softmax_tight",
        function=jaxloss.group_softmax_loss,
        kind="classifier",
        make_inputs=partial(classifier_inputs, dim=6),
        reference=partial(references.group_softmax_loss, num_groups=2, bound="tight"),
        torch_reference=from_torch("group_softmax_loss", num_groups=2, bound="tight"),
        differentiable=(0, 2, 3),
        kwargs=MappingProxyType({"num_groups": 2, "bound": "tight"}),
    ),
    LossRow(
        name="prototype_assigned",
        function=jaxloss.prototype_loss,
        kind="prototypes",
        make_inputs=partial(prototype_inputs, num_prototypes=6),
        reference=partial(references.prototype_loss, assignment=ASSIGNMENT),
        torch_reference=from_torch("prototype_loss", assignment=ASSIGNMENT),
        differentiable=(0, 2),
        kwargs=MappingProxyType({"assignment": jnp.asarray(ASSIGNMENT)}),
    ),
    LossRow(
        name="dot_regression_assigned_lengths",
        function=jaxloss.dot_regression_loss,
        kind="prototypes",
        make_inputs=partial(prototype_inputs, num_prototypes=6),
        reference=partial(references.dot_regression_loss, assignment=ASSIGNMENT, lengths=LENGTHS),
        torch_reference=from_torch("dot_regression_loss", assignment=ASSIGNMENT, lengths=LENGTHS),
        differentiable=(0, 2),
        kwargs=MappingProxyType(
            {"assignment": jnp.asarray(ASSIGNMENT), "lengths": jnp.asarray(LENGTHS, np.float32)}
        ),
        constant=(0,),
    ),
    targets_row(
        "two_way",
        name="two_way_tempered",
        terms=None,
        kwargs={"positive_temperature": 1.7, "negative_temperature": 0.6, "margin": 0.4},
    ),
    targets_row(
        "asymmetric",
        name="asymmetric_unclipped",
        kwargs={"positive_focus": 1.5, "negative_focus": 0.5, "clip": 0.0},
    ),
    targets_row(
        "robust_multilabel",
        name="robust_multilabel_by_other_constants",
        piecewise_linear=True,
        kwargs={"ramp": 0.3, "leak": 0.4, "binary_weight": 0.7},
    ),
    # In blocks of 3 of the 4 classes, the smaller block has one class.
    classifier_row("classifier_in_blocks", block_size=3),
    classifier_row(
        "classifier_smoothed_in_blocks", block_size=1, margin=-0.3, scale=1.7, label_smoothing=0.2
    ),
    *(
        classifier_row(
            f"classifier_{name}",
            block_size=block_size,
            similarity="cosine",
            margin=0.2,
            scale=3.0,
            label_smoothing=0.1,
        )
        for name, block_size in (("cosine", None), ("cosine_in_blocks", 3))
    ),
)

CASES = LOSSES + VARIANTS

FUNCTIONS = (
    FunctionRow(
        name="linear_logits",
        function=jaxloss.linear_logits,
        make_inputs=features_weights_and_bias,
        reference=references.linear_logits,
        torch_reference=from_torch("linear_logits"),
    ),
    FunctionRow(
        name="cosine_logits",
        function=jaxloss.cosine_logits,
        make_inputs=features_and_weights,
        reference=references.cosine_logits,
        torch_reference=from_torch("cosine_logits"),
    ),
    FunctionRow(
        name="project_classifier",
        function=jaxloss.project_classifier,
        make_inputs=features_and_weights,
        reference=references.project_classifier,
        torch_reference=from_torch("project_classifier"),
        invalid=(("epsilon", -1e-3),),
    ),
    FunctionRow(
        name="project_complement",
        function=jaxloss.project_complement,
        make_inputs=features_and_weights,
        reference=references.project_complement,
        torch_reference=from_torch("project_complement"),
        invalid=(("epsilon", -1e-3),),
    ),
    FunctionRow(
        name="project_spectral_complement",
        function=jaxloss.project_spectral_complement,
        make_inputs=features_and_weights,
        reference=references.project_spectral_complement,
        torch_reference=from_torch("project_spectral_complement"),
        invalid=(("power", -0.1),),
    ),
    # A constant projection, and other options, for d > C and d < C.
    *(
        FunctionRow(
            name=f"{name}_{'stopped' if stop_gradient else 'options'}_{dim}",
            function=getattr(jaxloss, name),
            make_inputs=partial(features_and_weights, dim=dim),
            reference=partial(getattr(references, name), **options),
            torch_reference=from_torch(name, stop_gradient=stop_gradient, **options),
            kwargs=MappingProxyType({"stop_gradient": stop_gradient, **options}),
        )
        for stop_gradient in (True, False)
        for dim in (DIM, 3)
        for name, options in (
            ("project_classifier", {"epsilon": 0.02}),
            ("project_complement", {"epsilon": 0.02}),
            ("project_spectral_complement", {"power": 0.4}),
        )
    ),
)
