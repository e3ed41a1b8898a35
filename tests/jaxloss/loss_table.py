"""One row per public loss, and one per public function of features and a classifier.

Everything in `test_contract.py` and `test_devices.py` runs over every row: a new loss is tested by
adding it here. `EVERY_LOSS` holds each public loss once with its plainest options: `LOSSES` those
of labels, and `WITHOUT_LABELS` those of two towers or views. `VARIANTS` has further options of
them. What a test must know of a loss is a field of its row.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.references import NORMALS

CLASSES = 4
DIM = 7
ASSIGNMENT = np.array([4, 1, 5, 0], np.int32)
LENGTHS = np.array([0.5, 1.25, 2.0, 0.75])


def formula(module: Any, file: str, name: str) -> Any:
    """A function of a module of references."""
    if not hasattr(module, name):
        raise LookupError(
            f"tests/jaxloss/{file}.py has no `{name}`: add the formula there, as "
            "docs/adding_a_loss.md shows"
        )
    return getattr(module, name)


def from_torch(name: str, adapt: Callable[..., Any] | None = None, **fixed: Any) -> Any:
    """A function of `torch_references`, which is imported by the first call.

    A test that calls it is skipped if PyTorch is not installed, as in `make quick`.
    """

    def call(*args, **options):
        torch = pytest.importorskip("torch")
        from tests.jaxloss import torch_references

        function = formula(torch_references, "torch_references", name)
        function = function if adapt is None else adapt(function, torch)
        return function(*args, **{**fixed, **options})

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
    adapt: Callable[..., Any] | None = None
    """Makes it a loss of features and labels, if it has other arguments."""
    is_variant: bool = False
    multi_hot: bool = False
    terms: Literal["samples", "classes"] | None = "samples"
    """The axis of the result of `reduction="none"`; None if the loss does not support it."""
    weighs_terms: bool = False
    """Whether its mean is not that of the terms of `reduction="none"`, weighted by the samples."""
    weighs_inside: bool = False
    """Whether the weights are inside of the logarithms of its terms."""
    constant: tuple[int | str, ...] = ()
    """The positions and names of arguments that the loss also depends on through a stop-gradient.
    Finite differences along them differ from the gradient."""
    one_of_a_kind: bool = False
    """Whether it is an example for what the rooms below the formulas do alike for all losses."""
    rare: bool = False
    """Whether it differs from another variant in one option: `make long` tests it."""

    @property
    def bounds_labels(self) -> bool:
        """Whether the loss has a number of classes, so that a label can be too large."""
        return "num_classes" in self.kwargs or (self.kind != "features" and not self.multi_hot)

    @property
    def compares_rows(self) -> bool:
        """Whether a sample without weight is still a reference of the others."""
        of_features = self.kind == "features" and self.terms is not None
        return of_features or "metric_weight" in self.parameters

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The positions of the differentiated arguments: all but the labels."""
        return {"classifier": (0, 2, 3), "prototypes": (0, 2), "proxies": (0, 2)}.get(
            self.kind, (0,)
        )

    @property
    def reductions(self) -> tuple[str, ...]:
        """Those that are tested: most variants have the sum and the terms of the plain row."""
        if self.is_variant and not self.has_own_reduction:
            return ("mean",)
        return ("mean", "sum") if self.terms is None else ("mean", "sum", "none")

    @property
    def has_own_reduction(self) -> bool:
        """Whether the rows are not simply weighted and added; then every dtype is tested."""
        return self.weighs_terms or self.terms != "samples"

    @property
    def takes_logits(self) -> bool:
        return self.kind in ("logits", "targets")

    @property
    def has_tiles(self) -> bool:
        """Whether it is computed tile by tile, or block by block."""
        return "block_size" in self.kwargs


# Class 1 has one of the first twelve samples: an anchor without positives. The last class has more,
# so that a mistake at the end of the classes shows.
_PATTERN = np.array([2, 0, 3, 0, 2, 3, 0, 1, 0, 3, 2, 0])


def make_labels(rng: np.random.Generator, n: int) -> np.ndarray:
    """Unequal class sizes, in no order."""
    return rng.permutation(np.resize(_PATTERN, n)).astype(np.int32)


def make_features(rng, n, dtype, dim=DIM):
    """Columns of different scale, away from zero mean."""
    scales = np.linspace(0.3, 0.9, dim)
    return (rng.normal(0.1, 1.0, (n, dim)) * scales).astype(dtype)


def make_weights(rng, dtype, dim=DIM, classes=CLASSES):
    return (rng.normal(0.05, 0.5, (dim, classes)) * np.linspace(0.6, 1.4, classes)).astype(dtype)


def make_targets(rng, n, p):
    return rng.choice(np.array([-1, 0, 1], np.int32), (n, CLASSES), p=p)


def logits_and_labels(rng, n, dtype):
    return rng.normal(0.2, 1.5, (n, CLASSES)).astype(dtype), make_labels(rng, n)


def logits_and_targets(rng, n, dtype):
    logits = rng.normal(0.2, 1.5, (n, CLASSES)).astype(dtype)
    return logits, make_targets(rng, n, [0.2, 0.5, 0.3])


def cosines_and_labels(rng, n, dtype):
    return rng.uniform(-0.95, 0.95, (n, CLASSES)).astype(dtype), make_labels(rng, n)


def features_and_labels(rng, n, dtype):
    return make_features(rng, n, dtype), make_labels(rng, n)


def features_and_targets(rng, n, dtype):
    targets = make_targets(rng, n, [0.1, 0.6, 0.3])
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


def sub_centre_inputs(rng, n, dtype):
    return *features_and_labels(rng, n, dtype), make_sub_centres(rng, dtype)


def make_sub_centres(rng, dtype):
    return np.stack([make_weights(rng, dtype), make_weights(rng, dtype)], axis=2)


def features_and_sub_centres(rng, n, dtype):
    return make_features(rng, n, dtype), make_sub_centres(rng, dtype)


def features_and_weights(rng, n, dtype, dim=DIM):
    return make_features(rng, n, dtype, dim), make_weights(rng, dtype, dim)


def features_weights_and_bias(rng, n, dtype):
    return (*features_and_weights(rng, n, dtype), rng.normal(0, 0.3, CLASSES).astype(dtype))


# Adapters: a loss of other arguments, of `jaxloss` or of the references, as one of features and
# labels, so that a row of the table tests it. `xp` is the module of its arrays. ----


def towers(loss: Callable[..., Any], xp: Any = jnp) -> Callable[..., Any]:
    """With references that are made of the batch.

    Classes 0 and 1 are one class of the references, and the largest class has no reference.
    """

    @wraps(loss)
    def call(features, labels, *, where=None, **options):
        options["references"] = -0.5 * features
        options["reference_labels"] = xp.where(labels > 0, labels - 1, labels)
        options["reference_where"] = where
        return loss(features, labels, where=where, **options)

    return call


def sample_margins(loss: Callable[..., Any], xp: Any = jnp) -> Callable[..., Any]:
    """With margins of the samples that depend on their features, as those of AdaFace."""
    del xp

    @wraps(loss)
    def call(scored, *args, **options):
        options["sample_margin"] = 0.25 * scored[:, 1]
        options["sample_angular_margin"] = -0.5 * scored[:, 0]
        return loss(scored, *args, **options)

    return call


def soft(loss: Callable[..., Any], xp: Any = jnp) -> Callable[..., Any]:
    """With targets that depend on the labels and on what is scored, whose rows sum to 1 or less."""

    @wraps(loss)
    def call(scored, labels, *args, where=None, **options):
        valid = labels >= 0 if where is None else where & (labels >= 0)
        options["where"], scored_or_0 = valid, xp.where(valid[:, None], scored, 0.0)
        own = labels[:, None] == xp.arange(CLASSES, dtype=labels.dtype)[None, :]
        shares = xp.where(own, 0.5, 0.0) + xp.where(xp.roll(own, 1, 1), 0.25, 0.0)
        targets = shares + 0.0625 * xp.tanh(scored_or_0[:, :CLASSES]) ** 2
        if xp is not jnp:  # References get them beside the labels.
            return loss(scored, labels, *args, targets=targets, **options)
        targets = xp.where(labels[:, None] < CLASSES, targets, jnp.nan)
        return loss(scored, targets, *args, **options)

    return call


def views(loss: Callable[..., Any], xp: Any = jnp) -> Callable[..., Any]:
    """Of the features and a second view that is made of them. A negative label is padding.

    The second view has the dimensions in the reverse order and in other units, by numbers that
    round no dtype.
    """

    @wraps(loss)
    def call(features, labels, *, where=None, **options):
        scales = xp.asarray(2.0 ** (np.arange(features.shape[1]) % 3 - 1), dtype=features.dtype)
        where = labels >= 0 if where is None else where & (labels >= 0)
        return loss(features, xp.flip(features, (1,)) * scales[None, :], where=where, **options)

    return call


def alone(loss: Callable[..., Any], xp: Any = jnp) -> Callable[..., Any]:
    """Of the features. A negative label is padding."""
    del xp

    @wraps(loss)
    def call(features, labels, *, where=None, **options):
        where = labels >= 0 if where is None else where & (labels >= 0)
        return loss(features, where=where, **options)

    return call


def taught(loss: Callable[..., Any], xp: Any = jnp) -> Callable[..., Any]:
    """Of the features and those of a teacher, which are made of the labels."""

    @wraps(loss)
    def call(features, labels, *, where=None, **options):
        where = labels >= 0 if where is None else where & (labels >= 0)
        factors = xp.asarray([[1, 2, 3]], dtype=labels.dtype)
        teacher = xp.asarray(labels[:, None] * factors % 5 + 1, dtype=features.dtype)
        return loss(features, teacher=teacher, where=where, **options)

    return call


def sketched(loss: Callable[..., Any], xp: Any = jnp) -> Callable[..., Any]:
    """Of the features, and directions that are the same in every dtype. The sum is as of views."""

    @wraps(loss)
    def call(features, labels, *, where=None, sample_weights=None, reduction="mean", **options):
        if reduction == "none":
            raise ValueError("`reduction` must be mean or sum")
        where = labels >= 0 if where is None else where & (labels >= 0)
        given = {"where": where, "sample_weights": sample_weights, **options}
        if xp is not jnp:
            return loss(features, features, reduction=reduction, **given)
        with mock.patch.object(jax.random, "normal", lambda *args: jnp.asarray(NORMALS, args[2])):
            value = loss(features, jnp.zeros(2, np.uint32), **given)
        if reduction == "mean":
            return value
        weights = 1 if sample_weights is None else sample_weights
        total = jnp.sum(jnp.where(where, weights, 0), dtype=value.dtype)
        axes = options.get("axis_name")
        return value * (total if axes is None else lax.psum(total, axes))

    own, reduction = inspect.signature(loss), inspect.signature(jaxloss.koleo_loss).parameters
    parameters: Any = {**own.parameters, "reduction": reduction["reduction"]}
    call.__signature__ = own.replace(parameters=[*parameters.values()])  # pyright: ignore
    return call


def rescored(loss: Callable[..., Any], xp: Any = jnp) -> Callable[..., Any]:
    """Of scores, and of a teacher's that are made of the labels. Some candidates are padding."""

    @wraps(loss)
    def call(scores, labels, *, where=None, **options):
        where = labels >= 0 if where is None else where & (labels >= 0)
        keys = xp.asarray(np.arange(scores.shape[1])[None, :], dtype=labels.dtype)
        seen = (labels[:, None] + keys + 1) % 3  # The positive of class 2 is padding.
        teacher = xp.asarray(seen * (keys % 4), dtype=scores.dtype)
        options["key_where"] = (seen > 0) & (labels[:, None] != 3)
        return loss(scores, teacher, where=where, **options)

    return call


def paired(loss: Callable[..., Any], xp: Any = jnp) -> Callable[..., Any]:
    """Of two towers. The keys are made of the queries, by numbers that round no dtype.

    The labels are the ids. With `biased`, keys have a bias, and with `alone`, queries have keys of
    their own. With `hits`, keys have ids of their own, and with `guided`, all rows have guides.
    """

    @wraps(loss)
    def call(
        features,
        labels,
        *,
        where=None,
        further=False,
        biased=False,
        alone=False,
        hits=False,
        guided=False,
        **options,
    ):
        valid = labels >= 0 if where is None else where & (labels >= 0)
        keys = -0.5 * xp.roll(features, 1, 1)
        if further:
            options["key_where"] = xp.concatenate([valid, valid])
            keys = xp.concatenate([keys, 2.0 * xp.roll(features, 2, 1)])
        if biased:
            options["key_bias"] = 0.25 * keys[:, 0]
        if alone:
            options["own_keys"] = xp.stack([xp.roll(features, 3, 1), -0.5 * features], 1)
            options["own_key_where"] = xp.stack([labels % 2 == 0, valid], 1)
        if hits:  # A further key may have the id of a query.
            options["key_ids"] = xp.concatenate([labels, labels - 3 * (labels % 2)])
        if guided:
            options["guide"] = xp.concatenate([features, keys[: features.shape[0]]], 1)
            guides = [keys, xp.roll(keys, 3, 1)]
            options["key_guide"] = xp.concatenate(guides, 1)
            if alone:
                options["own_key_guide"] = xp.concatenate([options["own_keys"]] * 2, 2)
        return loss(features, keys, ids=labels, where=valid, **options)

    return call


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
    adapt: Callable[..., Any] | None = None,
    make_inputs: Callable[..., Inputs] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    numpy: Mapping[str, Any] | None = None,
    torch: Mapping[str, Any] | None = None,
    **facts: Any,
) -> LossRow:
    """The row of `jaxloss.{loss}_loss`, and of the functions of this name of the references.

    `kwargs` are hyperparameters of all three; `own`, `numpy` and `torch` of one of them.
    """
    shared, loss_name = dict(kwargs or {}), f"{loss}_loss"
    function = getattr(jaxloss, loss_name)
    reference = formula(references, "references", loss_name)
    if adapt is not None:
        function, reference = adapt(function), adapt(reference, np)
    if kind == "targets":
        facts["multi_hot"] = True
    return LossRow(
        name=name or loss,
        is_variant=bool(name),
        function=function,
        kind=kind,
        adapt=adapt,
        make_inputs=make_inputs or INPUTS[kind],
        reference=partial(reference, **shared, **(numpy or {})),
        torch_reference=from_torch(loss_name, adapt, **shared, **(torch or {})),
        kwargs={key: as_jax(option) for key, option in (shared | dict(own or {})).items()},
        **facts,
    )


def as_jax(option: Any) -> Any:
    """The annotations say JAX arrays, whose numbers must be exact in float32."""
    if not isinstance(option, np.ndarray):
        return option
    return jnp.asarray(option, np.int32 if option.dtype == np.int32 else np.float32)


TEMPERATURE = {"temperature": (0.0, -1.0)}
TEMPERATURES = {f"{sign}_temperature": (0.0, -1.0) for sign in ("positive", "negative")}
SCALE = {"scale": (0.0, -1.0)}
ANGLE = {"angular_margin": (-0.1, 28.6)}
BLOCKS = {"block_size": (0, -1)}
MINING = {"margin": (-0.1,), "mining": ("easy", None)}
FOCUS = {"positive_focus": (-0.1,), "negative_focus": (-0.1,), "clip": (-0.1, 1.0)}
RAMP = {"ramp": (1.0,), "leak": (-0.1,), "binary_weight": (-0.1,)}
GROUPS = {"num_groups": (0, DIM + 1), "bound": ("type-I",)}
MULTI_SIMILARITY = {
    "positive_scale": (0.0,),
    "negative_scale": (0.0, -1.0),
    "mining_margin": (-0.1,),
}
CLASSIFIER = {"label_smoothing": (-0.1, 1.0), "similarity": ("l2",), "soft_cap": (0.0, -1.0)}
LOSSES = (
    loss_row(
        "softmax", "logits", one_of_a_kind=True, invalid={"label_smoothing": (-0.1, 1.0, 1.5)}
    ),
    loss_row("sigmoid", "logits"),
    loss_row(
        "margin_softmax", "logits", kwargs={"margin": -0.3, "scale": 1.7}, invalid=SCALE | ANGLE
    ),
    loss_row("nca", "features", one_of_a_kind=True, invalid=TEMPERATURE | BLOCKS),
    loss_row(
        "prototypical",
        "features",
        one_of_a_kind=True,
        invalid=TEMPERATURE | BLOCKS | {"num_classes": (0,)},
    ),
    loss_row(
        "supervised_contrastive",
        "features",
        invalid=TEMPERATURE | BLOCKS | {"denominator": ("positives",)},
    ),
    loss_row("multi_similarity", "features", invalid=MULTI_SIMILARITY | BLOCKS),
    loss_row(
        "circle",
        "features",
        kwargs={"margin": 0.3, "scale": 6.0},
        constant=(0, "margin"),
        invalid=SCALE | BLOCKS,
    ),
    loss_row("triplet", "features", weighs_terms=True, invalid=MINING | BLOCKS),
    loss_row("sum", "classifier"),
    loss_row("direct_sum", "classifier", one_of_a_kind=True, invalid={"epsilon": (-1e-3,)}),
    loss_row("spectral_sum", "classifier", invalid={"power": (-0.1,)}),
    loss_row("group_softmax", "classifier", kwargs={"num_groups": 3}, invalid=GROUPS),
    loss_row("prototype", "prototypes", one_of_a_kind=True),
    loss_row("dot_regression", "prototypes", constant=(0,)),
    loss_row("sample_wise", "targets", invalid=TEMPERATURES),
    loss_row(
        "class_wise",
        "targets",
        terms="classes",
        weighs_inside=True,
        one_of_a_kind=True,
        invalid=TEMPERATURES,
    ),
    loss_row("two_way", "targets", terms=None, invalid=TEMPERATURES),
    loss_row("multilabel_softmax", "targets"),
    loss_row("asymmetric", "targets", invalid=FOCUS),
    loss_row("warp", "targets"),
    loss_row("robust_multilabel", "targets", invalid=RAMP),
    loss_row(
        "classifier", "classifier", one_of_a_kind=True, invalid=SCALE | ANGLE | BLOCKS | CLASSIFIER
    ),
    loss_row("proxy_anchor", "proxies", terms=None, weighs_inside=True, invalid=SCALE),
    loss_row("proxy_nca", "proxies", invalid=TEMPERATURE),
)
WITHOUT_LABELS = (
    loss_row("info_nce", "features", adapt=paired, kwargs={"temperature": 0.3}),
    loss_row("sigmoid_contrastive", "features", adapt=paired, kwargs={"further": True}),
    loss_row("relational", "features", adapt=taught, kwargs={"temperature": 0.4}),
    loss_row("koleo", "features", adapt=alone, invalid={"neighbors": (0,)}),
    loss_row(
        "sigreg",
        "features",
        adapt=sketched,
        own={"num_directions": 6},
        terms=None,
        constant=("limit",),
        invalid={"num_directions": (0,), "num_points": (1, 16), "limit": (0.0,)},
    ),
    loss_row(
        "score_distillation",
        "features",
        adapt=rescored,
        kwargs={"temperature": 1.3},
        invalid={"kind": ("mse",)} | TEMPERATURE | {"teacher_temperature": (0.0,)},
    ),
    loss_row("vicreg", "features", adapt=views, terms=None),
    loss_row("barlow_twins", "features", adapt=views, terms=None),
)
EVERY_LOSS = LOSSES + WITHOUT_LABELS
PLAIN = {row.name: row for row in EVERY_LOSS}


def variant(
    loss: str,
    suffix: str,
    block_size: int | None = None,
    *,
    adapt: Callable[..., Any] | None = None,
    own: Mapping[str, Any] | None = None,
    numpy: Mapping[str, Any] | None = None,
    torch: Mapping[str, Any] | None = None,
    make_inputs: Callable[..., Inputs] | None = None,
    multi_hot: bool = False,
    constant: tuple[int | str, ...] = (),
    one_of_a_kind: bool = False,
    rare: bool = False,
    **options: Any,
) -> LossRow:
    """A loss with other options, which has the facts of its plain row.

    Cosines of a classifier are without a bias, with the arguments of prototypes.
    """
    plain = PLAIN[loss]
    kind: Kind = plain.kind
    if options.get("similarity") == "cosine":
        kind = "prototypes"
    return loss_row(
        loss,
        kind,
        name=f"{loss}_{suffix}",
        adapt=towers if suffix.startswith("references") else adapt or plain.adapt,
        make_inputs=make_inputs,
        kwargs=options,
        own={**(own or {}), **({"block_size": block_size} if block_size else {})},
        numpy=numpy,
        torch=torch,
        terms=plain.terms,
        weighs_terms=plain.weighs_terms,
        multi_hot=multi_hot or kind == "targets",
        constant=constant or plain.constant,
        one_of_a_kind=one_of_a_kind,
        rare=rare,
    )


def with_and_without_blocks(
    name: str, blocks: Mapping[str, Any] | None = None, **options: Any
) -> tuple[LossRow, ...]:
    """Rows of `classifier_loss`. In blocks of 3 of the 4 classes, the smaller has one class."""
    plain = variant("classifier", name, **options, rare=True)
    return plain, variant("classifier", f"{name}_in_blocks", 3, **options, **(blocks or {}))


NUM_CLASSES: dict[str, Any] = {"num_classes": CLASSES}
NEGATIVES: dict[str, Any] = {"denominator": "negatives"}
MULTI_HOT: dict[str, Any] = {
    "make_inputs": features_and_targets,
    "multi_hot": True,
    "temperature": 0.3,
}
ASSIGNED: dict[str, Any] = {
    "make_inputs": partial(prototype_inputs, num_prototypes=6),
    "assignment": ASSIGNMENT,
}
CLASS_MARGINS = np.array([0.25, -0.125, 0.0625, 0.5])
CLASS_ANGLES = np.array([0.375, 0.0, 1.25, 2.125])

VARIANTS = (
    variant("softmax", "smoothed", label_smoothing=0.2, logsumexp_penalty=0.3),
    variant("softmax", "targets", adapt=soft, label_smoothing=0.2, logsumexp_penalty=0.3),
    variant("sigmoid", "multi_hot", make_inputs=logits_and_targets, multi_hot=True),
    # Tiles that do not divide the batch, on and below the diagonal.
    variant("nca", "in_tiles", 3, temperature=1.3, one_of_a_kind=True),
    variant("nca", "references", temperature=1.3, one_of_a_kind=True),
    variant("nca", "references_in_tiles", 3, temperature=1.3, rare=True),
    # Tiles of one class, and tiles that do not divide the classes.
    variant("prototypical", "in_tiles", 1, temperature=1.3),
    variant("prototypical", "num_classes", temperature=1.3, **NUM_CLASSES),
    variant("prototypical", "num_classes_in_tiles", 3, temperature=1.3, **NUM_CLASSES),
    variant("prototypical", "references", temperature=1.3),
    variant("prototypical", "references_in_tiles", 2, temperature=1.3, rare=True),
    variant("prototypical", "references_num_classes", temperature=1.3, **NUM_CLASSES, rare=True),
    variant("supervised_contrastive", "in_tiles", 3),
    variant("supervised_contrastive", "references_in_tiles", 3, rare=True),
    variant(
        "supervised_contrastive",
        "negatives_in_tiles",
        3,
        temperature=0.4,
        **NEGATIVES,
        one_of_a_kind=True,
    ),
    variant("supervised_contrastive", "references_negatives", temperature=0.4, **NEGATIVES),
    variant("supervised_contrastive", "multi_hot", similarity="inner", **MULTI_HOT),
    variant(
        "supervised_contrastive",
        "multi_hot_negatives_in_tiles",
        3,
        **NEGATIVES,
        **MULTI_HOT,
        rare=True,
    ),
    variant(
        "supervised_contrastive",
        "distances",
        temperature=0.4,
        similarity="negative_distance",
        **NEGATIVES,
    ),
    variant("multi_similarity", "mined_in_tiles", 3, mining_margin=0.2),
    variant(
        "multi_similarity", "references_mined", mining_margin=0.2, threshold=0.1, negative_scale=7.0
    ),
    variant("circle", "in_tiles", 3, scale=6.0, rare=True),
    variant("circle", "references_in_tiles", 3, scale=6.0),
    variant("triplet", "in_tiles", 3, margin=0.5, squared=True, one_of_a_kind=True),
    variant("triplet", "references_in_tiles", 3, soft=True, rare=True),
    variant("triplet", "semihard", mining="semihard", rare=True),
    variant("triplet", "semihard_in_blocks", 3, mining="semihard", squared=True, normalize=False),
    variant("triplet", "references_semihard", mining="semihard", soft=True),
    variant("triplet", "all", mining="all", rare=True),
    variant("triplet", "all_in_blocks", 5, mining="all", squared=True, margin=0.6),
    variant("triplet", "references_all", mining="all", normalize=False, rare=True),
    variant("triplet", "all_soft_in_blocks", 3, mining="all", soft=True),
    # A loss of cosines gets features that are normalised before they are projected.
    variant(
        "direct_sum",
        "supervised_contrastive",
        make_inputs=unit_classifier_inputs,
        own={"metric_loss": partial(jaxloss.supervised_contrastive_loss, similarity="inner")},
        numpy={"metric": partial(references.supervised_contrastive_loss, similarity="inner")},
        torch={"metric": from_torch("supervised_contrastive_loss", similarity="inner")},
    ),
    variant("info_nce", "one_way_in_tiles", 3, temperature=0.3, symmetric=False, further=True),
    variant("info_nce", "in_tiles", 5, temperature=0.8, similarity="inner", one_of_a_kind=True),
    variant(
        "info_nce",
        "biased_in_tiles",
        5,
        temperature=0.3,
        further=True,
        biased=True,
        logsumexp_penalty=0.2,
        margin_of_false_negatives=0.1,
    ),
    variant(
        "info_nce",
        "alone",
        temperature=0.8,
        alone=True,
        equal_ids="positive",
        similarity="negative_distance",
    ),
    variant("info_nce", "hard", temperature=0.3, hardness=0.7, constant=(0,)),
    variant(
        "info_nce",
        "same_tower_in_tiles",
        5,
        temperature=0.3,
        further=True,
        hits=True,
        biased=True,
        same_tower_negatives=True,
    ),
    variant(
        "info_nce",
        "decoupled_guided",
        temperature=0.5,
        positive_in_denominator=False,
        guided=True,
        guide_margin=-0.2,
        alone=True,
        same_tower_negatives=True,
        one_of_a_kind=True,
    ),
    variant("sigmoid_contrastive", "in_tiles", 3, scale=2.0, bias=-1.5),
    variant(
        "sigmoid_contrastive",
        "alone_in_tiles",
        5,
        scale=2.0,
        bias=-1.5,
        alone=True,
        biased=True,
        guided=True,
        margin_of_false_negatives=0.1,
        similarity="negative_squared_distance",
    ),
    variant(
        "sigmoid_contrastive",
        "hard_positives",
        scale=2.0,
        bias=-1.5,
        equal_ids="positive",
        hardness=0.7,
        constant=(0,),
    ),
    # Here the metric loss has no gradient for the classifier.
    *(
        variant(
            loss,
            "stopped",
            own={"stop_gradient": True},
            torch={"stop_gradient": True},
            constant=(2,),
        )
        for loss in ("direct_sum", "spectral_sum")
    ),
    # Every option of a sum away from its default, and more classes than dimensions.
    variant(
        "spectral_sum",
        "sigmoid_prototypical",
        make_inputs=partial(classifier_inputs, dim=3),
        metric_weight=0.6,
        power=0.5,
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
    variant(
        "spectral_sum",
        "of_a_basis",
        own={"basis": basis_of(BASIS_WEIGHTS)},
        numpy={"basis_weights": BASIS_WEIGHTS},
        torch={"basis_weights": BASIS_WEIGHTS},
        one_of_a_kind=True,
    ),
    variant(
        "group_softmax",
        "tight",
        make_inputs=partial(classifier_inputs, dim=6),
        num_groups=2,
        bound="tight",
    ),
    variant("prototype", "assigned", **ASSIGNED),
    variant("dot_regression", "assigned_lengths", lengths=LENGTHS, **ASSIGNED),
    variant("two_way", "tempered", positive_temperature=1.7, negative_temperature=0.6, margin=0.4),
    # At 0, at which learning does not start, the clip is off.
    variant(
        "asymmetric",
        "unclipped",
        positive_focus=1.5,
        negative_focus=0.5,
        clip=0.0,
        constant=("clip",),
    ),
    variant(
        "asymmetric",
        "stopped",
        positive_focus=1.5,
        negative_focus=2.5,
        own={"stop_focus_gradient": True},
        torch={"stop_focus_gradient": True},
        constant=(0, "positive_focus", "negative_focus", "clip"),
    ),
    variant("robust_multilabel", "by_other_constants", ramp=0.3, leak=0.4, binary_weight=0.7),
    variant("classifier", "in_blocks", 3, rare=True),
    variant("classifier", "smoothed_in_blocks", 1, margin=-0.3, scale=1.7, label_smoothing=0.2),
    variant(
        "classifier",
        "capped_in_blocks",
        3,
        margin=0.2,
        scale=3.0,
        soft_cap=1.5,
        logsumexp_penalty=0.2,
        one_of_a_kind=True,
    ),
    *with_and_without_blocks("targets", adapt=soft, scale=1.7, label_smoothing=0.1, soft_cap=2.0),
    *with_and_without_blocks(
        "cosine", similarity="cosine", margin=0.2, scale=3.0, label_smoothing=0.1
    ),
    *with_and_without_blocks("class_margins", margin=CLASS_MARGINS, scale=1.7, label_smoothing=0.1),
    *with_and_without_blocks(
        "sample_margins", adapt=sample_margins, similarity="cosine", margin=0.2, scale=3.0
    ),
    *with_and_without_blocks(
        "angles",
        blocks={"one_of_a_kind": True},
        similarity="cosine",
        margin=0.1,
        angular_margin=CLASS_ANGLES,
        scale=4.0,
        label_smoothing=0.1,
    ),
    *with_and_without_blocks(
        "sub_centres",
        make_inputs=sub_centre_inputs,
        similarity="cosine",
        angular_margin=0.3,
        scale=3.0,
    ),
    variant(
        "margin_softmax",
        "angles",
        make_inputs=cosines_and_labels,
        margin=CLASS_MARGINS,
        angular_margin=CLASS_ANGLES,
        scale=4.0,
    ),
    variant(
        "margin_softmax",
        "sample_margins",
        adapt=sample_margins,
        make_inputs=cosines_and_labels,
        angular_margin=0.4,
        scale=4.0,
        one_of_a_kind=True,
    ),
    variant("proxy_nca", "without_own", temperature=0.7, include_own=False, normalize=False),
    variant("koleo", "in_tiles", 5),
    variant(
        "relational",
        "distances_in_tiles",
        3,
        teacher_temperature=0.7,
        similarity="negative_squared_distance",
    ),
    variant("relational", "mse_in_tiles", 5, kind="mse", similarity="inner"),
    variant("koleo", "of_neighbors_in_tiles", 5, neighbors=3),
    variant("score_distillation", "of_margins", kind="margin_mse"),
    variant("sigreg", "of_other_points", own={"num_directions": 6}, num_points=5, limit=2.0),
)

CASES = EVERY_LOSS + VARIANTS
TYPICAL = tuple(row for row in LOSSES if row.one_of_a_kind)
TILES_OF_A_KIND = tuple(row for row in VARIANTS if row.one_of_a_kind and row.has_tiles)
"""Pairs in one and in two stages, triplets, both directions, and blocks of classes."""


def function_row(name: str, make_inputs: Callable[..., Inputs], **options: Any) -> FunctionRow:
    """The row of `jaxloss.{name}`, whose references take the same options."""
    invalid, suffix = options.pop("invalid", {}), options.pop("suffix", "")
    fixed = {key: value for key, value in options.items() if key != "stop_gradient"}
    return FunctionRow(
        name=name + suffix,
        function=getattr(jaxloss, name),
        make_inputs=make_inputs,
        reference=partial(formula(references, "references", name), **fixed),
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
    # Other options, and a constant projection, for d > C and d < C.
    *(
        function_row(
            name, partial(features_and_weights, dim=dim), suffix=f"_{suffix}_{dim}", **options
        )
        for dim in (DIM, 3)
        for name, suffix, options in (
            ("project_classifier", "options", {"epsilon": 0.02}),
            ("project_complement", "options", {"epsilon": 0.02}),
            ("project_spectral_complement", "options", {"power": 0.4}),
            ("project_spectral_complement", "stopped", {"power": 0.4, "stop_gradient": True}),
        )
    ),
    function_row("cosine_logits", features_and_sub_centres, suffix="_sub_centres"),
)
