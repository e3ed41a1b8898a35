"""Every loss with its sizes, its arrays, its floor and its forms in JAX.

The forms in PyTorch are in `experiments.benchmark.torch_forms`, under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

import jaxloss
from jaxloss._linear import exact_product as product

SizeName = Literal["paper", "large", "own"]


class Size(NamedTuple):
    """How large the arrays of a loss are."""

    n: int
    """Batch size."""
    d: int
    """Dimension of the features; 0 for a loss on logits."""
    C: int
    """Number of classes."""


class Floor(NamedTuple):
    """What a loss and its gradient cannot avoid."""

    run: Callable[..., object]
    """Takes the arrays of the loss."""
    text: str


class OwnSize(NamedTuple):
    """A size of one loss, such as one at which most forms do not fit into memory."""

    size: Size
    forms: tuple[str, ...] = ()
    """What is measured beside jaxloss and the floor, keys of `figure.STYLES`."""
    turns: int = 3
    """The most turns of each form."""
    floor: Floor | None = None
    """In place of that of the loss."""


@dataclass(frozen=True)
class Case:
    """A loss and everything that its measurement needs, except its PyTorch forms."""

    name: str
    loss: Callable[..., Array]
    """From the arrays to a scalar."""
    arrays: tuple[str, ...]
    """Names of the arrays, keys of `_DRAWS`."""
    floor: Floor
    paper: Size
    """The size at which the paper uses it."""
    source: str
    """Data set, network and batch of that size."""
    grows: Literal["n", "C"] = "n"
    """What is ten times larger at the large size."""
    optax: Callable[..., Array] | None = None
    """The same loss by optax, if it has it."""
    composition: Callable[..., Array] | None = None
    """The same loss from simpler functions of `jaxloss`."""
    own_sizes: tuple[OwnSize, ...] = ()

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Positions of the arrays that gradients are taken for."""
        constant = {"labels", "targets", "prototypes", "assignment"}
        constant |= {"references", "reference_labels", "vectors", "values"}
        return tuple(i for i, name in enumerate(self.arrays) if name not in constant)

    def sizes(self, name: SizeName) -> tuple[Size, ...]:
        """The sizes of that name; `large` is ten times `paper`."""
        if name == "own":
            return tuple(own.size for own in self.own_sizes)
        if name == "paper":
            return (self.paper,)
        return (self.paper._replace(**{self.grows: 10 * getattr(self.paper, self.grows)}),)

    def make_arrays(self, rng: np.random.Generator, size: Size) -> tuple[np.ndarray, ...]:
        """Random arrays of that size, float32 and int32."""
        return tuple(
            array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
            for array in (_DRAWS[name](rng, size) for name in self.arrays)
        )


# ---------------------------------------------------------------------------------------- arrays


def _labels(rng: np.random.Generator, size: Size) -> np.ndarray:
    """Classes of equal size, at least four samples each, so that every sample has a positive."""
    classes = max(min(size.C, size.n // 4), 1)
    return rng.permutation(np.arange(size.n) % classes)


def _targets(rng: np.random.Generator, size: Size) -> np.ndarray:
    """Multi-hot, about three positives per sample, as in COCO."""
    targets = rng.random((size.n, size.C)) < min(3 / size.C, 0.4)
    targets[np.arange(size.n), rng.integers(0, size.C, size.n)] = True
    return targets


def _prototypes(rng: np.random.Generator, size: Size) -> np.ndarray:
    prototypes = rng.normal(size=(size.d, size.C))
    return prototypes / np.linalg.norm(prototypes, axis=0)


_DRAWS: dict[str, Callable[[np.random.Generator, Size], np.ndarray]] = {
    "logits": lambda rng, size: rng.normal(0, 2, (size.n, size.C)),
    "labels": _labels,
    "targets": _targets,
    # Not centred, as behind a ReLU; all norms are about √d.
    "features": lambda rng, size: rng.normal(0.2, 1, (size.n, size.d)),
    "weights": lambda rng, size: rng.normal(0, size.d**-0.5, (size.d, size.C)),
    "bias": lambda rng, size: rng.normal(0, 0.1, size.C),
    "prototypes": _prototypes,
    "assignment": lambda rng, size: rng.permutation(size.C),
    "references": lambda rng, size: rng.normal(0.2, 1, (NUM_REFERENCES, size.d)),
    "reference_labels": lambda rng, size: rng.integers(0, size.C, NUM_REFERENCES),
    "vectors": lambda rng, size: np.linalg.qr(rng.normal(size=(size.d, min(size.d, size.C))))[0],
    "values": lambda rng, size: np.linspace(2, 0.1, min(size.d, size.C)),
}
CLASSIFIER = ("features", "labels", "weights", "bias")
NUM_REFERENCES = 65_536

# ---------------------------------------------------------------------------------------- floors
# The factors of a backward product have the shapes of the real ones, not their values. Products are
# as precise as the losses' own, which matters on a GPU.

GROUPS = 4
MARGIN, SCALE = -0.3, 30.0
BASE_CLASSES = 64


def _linear(features: Array, _labels: Array, weights: Array, *_: Array) -> tuple[Array, ...]:
    """Logits, and the gradients of features and weights."""
    logits = product(features, weights)
    return logits, product(logits, weights.T), product(features.T, logits)


def _pairs(features: Array, *_: Array) -> tuple[Array, ...]:
    """All inner products, and the gradient of the features."""
    products = product(features, features.T)
    return products, product(products, features)


def _references(features: Array, _labels: Array, references: Array, *_: Array) -> object:
    """All inner products, and the gradient of the features, for 1024 references at a time."""
    blocks = references.reshape(-1, 1024, references.shape[1])
    return lax.map(lambda block: _pairs_of(features, block), blocks)


def _pairs_in_blocks(features: Array, *_: Array) -> Array:
    """The same products for 1024 anchors at a time: no more of the n·n numbers exist."""
    blocks = features.reshape(-1, math.gcd(1024, len(features)), features.shape[1])
    return lax.map(lambda block: _pairs_of(block, features), blocks)


def _pairs_of(anchors: Array, features: Array) -> Array:
    return product(product(anchors, features.T), features)


def _complement(features: Array, coordinates: Array, basis: Array) -> tuple[Array, ...]:
    """Pairs in the complement of a subspace: projects the features, and their gradient."""
    products, gradient = _pairs(features - product(coordinates, basis.T))
    return products, product(product(gradient, basis), basis.T)


def _direct_sum(features: Array, labels: Array, weights: Array, _bias: Array) -> object:
    logits, *gradients = _linear(features, labels, weights)
    return gradients, _complement(features, logits, weights), product(weights.T, weights)


def _spectral_sum(features: Array, labels: Array, weights: Array, *_: Array) -> object:
    basis = weights[:, : weights.shape[0]]  # In place of the singular vectors.
    pairs = _complement(features, product(features, basis), basis)
    return _linear(features, labels, weights)[1:], pairs


def _groups(features: Array, labels: Array, weights: Array, _bias: Array) -> object:
    """A linear layer for the features of each group, the others 0."""
    groups = jnp.arange(features.shape[1]) % GROUPS == jnp.arange(GROUPS)[:, None]
    parts = jnp.where(groups[None], features[:, None, :], 0).reshape(-1, features.shape[1])
    return _linear(parts, labels, weights)


def _class_means(features: Array, labels: Array) -> object:
    return _linear(features, labels, features[jnp.arange(BASE_CLASSES) % len(features)].T)


ONE_PASS = Floor(lambda rows, *_: 2 * rows, "one pass that reads what is scored and writes as much")
ONE_EXPONENTIAL = Floor(  # Which costs more than the memory.
    lambda logits, *_: jnp.exp(-jnp.abs(logits)),
    "one pass that takes an exponential of every logit",
)
LINEAR = Floor(_linear, "3 products n·d·C")
CLASS_MEANS = Floor(_class_means, "3 products n·d·C")
PAIRS = Floor(_pairs, "2 products n·n·d, 4n²d operations; 3n²d cannot be avoided")
PAIRS_IN_BLOCKS = Floor(
    _pairs_in_blocks, "2 products n·n·d in blocks of rows, 4n²d operations; none can be avoided"
)
REFERENCES = Floor(_references, "2 products n·m·d for m references, in blocks of references")
SUM = Floor(lambda *arrays: (_linear(*arrays), _pairs(*arrays)), "3 products n·d·C, 2 of n·n·d")
DIRECT_SUM = Floor(_direct_sum, "6 products n·d·C, 2 of n·n·d, one of C·C·d")
SPECTRAL_SUM = Floor(
    _spectral_sum, "3 products n·d·C, 2 of n·n·d, 4 of n·d·d; not the singular vectors"
)
GROUP = Floor(_groups, "3 products G·n·d·C")

# ---------------------------------------------------------------------------------------- losses


def _at_temperature_d(loss: Callable[..., Array], **options) -> Callable[..., Array]:
    """A loss on squared distances, which grow with d: d is therefore the temperature."""
    return lambda features, labels, **common: loss(
        features, labels, temperature=float(features.shape[1]), **options, **common
    )


def _assigned(loss: Callable[..., Array]) -> Callable[..., Array]:
    return lambda features, labels, prototypes, assignment: loss(
        features, labels, prototypes, assignment=assignment
    )


def _cosine_margin_softmax(features: Array, labels: Array, weights: Array) -> Array:
    return _margin_softmax(jaxloss.cosine_logits(features, weights), labels)


_margin_softmax = partial(jaxloss.margin_softmax_loss, margin=MARGIN, scale=SCALE)
_nca = _at_temperature_d(jaxloss.nca_loss)


def _nca_references(
    features: Array, labels: Array, references: Array, reference_labels: Array
) -> Array:
    return _nca(features, labels, references=references, reference_labels=reference_labels)


def _spectral_sum_with_basis(*arrays: Array) -> Array:
    *arguments, vectors, values = arrays
    basis = jaxloss.SpectralBasis(vectors, values)
    return jaxloss.spectral_sum_loss(*arguments, metric_loss=_nca, basis=basis)


def _classifier_composition(features: Array, labels: Array, weights: Array, bias: Array) -> Array:
    return jaxloss.softmax_loss(jaxloss.linear_logits(features, weights, bias), labels)


def _optax_softmax(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _optax_sigmoid(logits: Array, labels: Array) -> Array:
    return _optax_multilabel_sigmoid(logits, jnp.arange(logits.shape[1]) == labels[:, None])


def _optax_multilabel_softmax(logits: Array, targets: Array) -> Array:
    proportions = targets / jnp.sum(targets, axis=1, keepdims=True)
    return optax.softmax_cross_entropy(logits, proportions).mean()


def _optax_multilabel_sigmoid(logits: Array, targets: Array) -> Array:
    return optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=1).mean()


_MINI_IMAGENET = "mini-ImageNet, ResNet-12, batch 512"
_logits = partial(Case, arrays=("logits", "labels"), floor=ONE_EXPONENTIAL, grows="C")
_metric = partial(Case, arrays=("features", "labels"), paper=Size(512, 640, BASE_CLASSES))
_softmax_and_nca = partial(
    Case,
    arrays=CLASSIFIER,
    paper=Size(512, 640, BASE_CLASSES),
    source=f"{_MINI_IMAGENET}; softmax and NCA",
)
_FORMS = (("", False), ("_stopped", True))
"""Endings of the names of direct and spectral sums, and whether their projection is a constant."""
_prototype = partial(
    Case, arrays=("features", "labels", "prototypes", "assignment"), floor=ONE_PASS
)
_multilabel = partial(
    Case,
    arrays=("logits", "targets"),
    floor=ONE_EXPONENTIAL,
    paper=Size(512, 0, 80),
    source="MS-COCO, batch 512",
)

CASES = (
    _logits(
        "softmax",
        jaxloss.softmax_loss,
        paper=Size(256, 0, 1000),
        source="ImageNet, batch 256",
        optax=_optax_softmax,
    ),
    _logits(
        "sigmoid",
        jaxloss.sigmoid_loss,
        paper=Size(512, 0, 351),
        source="tiered-ImageNet, batch 512",
        optax=_optax_sigmoid,
    ),
    _logits(
        "margin_softmax",
        _margin_softmax,
        paper=Size(256, 0, BASE_CLASSES),
        source="mini-ImageNet, batch 256",
    ),
    Case(
        "cosine_margin_softmax",
        _cosine_margin_softmax,
        arrays=CLASSIFIER[:3],
        floor=LINEAR,
        paper=Size(256, 640, BASE_CLASSES),
        source="mini-ImageNet, ResNet-12, batch 256",
    ),
    _metric(
        "nca",
        _nca,
        floor=PAIRS,
        source=_MINI_IMAGENET,
        own_sizes=(
            OwnSize(Size(16_384, 640, BASE_CLASSES), floor=PAIRS_IN_BLOCKS),
            OwnSize(Size(65_536, 64, BASE_CLASSES), floor=PAIRS_IN_BLOCKS),
        ),
    ),
    Case(
        "nca_references",
        _nca_references,
        arrays=("features", "labels", "references", "reference_labels"),
        floor=REFERENCES,
        paper=Size(256, 128, BASE_CLASSES),
        source=f"a queue of {NUM_REFERENCES:,} earlier rows, batch 256, d = 128",
    ),
    _metric(
        "prototypical",
        _at_temperature_d(jaxloss.prototypical_loss, num_classes=BASE_CLASSES),
        floor=CLASS_MEANS,
        source=f"{_MINI_IMAGENET}; num_classes={BASE_CLASSES}",
    ),
    _metric(
        "prototypical_by_samples",
        _at_temperature_d(jaxloss.prototypical_loss),
        floor=CLASS_MEANS,
        source=f"{_MINI_IMAGENET}; without num_classes",
    ),
    _softmax_and_nca("sum", partial(jaxloss.sum_loss, metric_loss=_nca), floor=SUM),
    *(
        _softmax_and_nca(
            "direct_sum" + suffix,
            partial(jaxloss.direct_sum_loss, metric_loss=_nca, stop_gradient=stopped),
            floor=DIRECT_SUM,
        )
        for suffix, stopped in _FORMS
    ),
    *(
        _softmax_and_nca(
            "spectral_sum" + suffix,
            partial(jaxloss.spectral_sum_loss, metric_loss=_nca, stop_gradient=stopped),
            floor=SPECTRAL_SUM,
            paper=Size(512, 640, 908),
            source="iNaturalist2017, ResNet-12, batch 512; softmax and NCA",
        )
        for suffix, stopped in _FORMS
    ),
    Case(
        "spectral_sum_with_basis",
        _spectral_sum_with_basis,
        arrays=(*CLASSIFIER, "vectors", "values"),
        floor=SPECTRAL_SUM,
        paper=Size(512, 640, 908),
        source="the same, with `basis=`",
    ),
    Case(
        "classifier",
        jaxloss.classifier_loss,
        arrays=CLASSIFIER,
        floor=LINEAR,
        paper=Size(256, 512, 1000),
        source="ImageNet, batch 256, d = 512",
        composition=_classifier_composition,
        own_sizes=(
            OwnSize(Size(256, 512, 10_000), forms=("composition",), turns=20),
            OwnSize(Size(256, 512, 100_000), forms=("composition",)),
            OwnSize(Size(256, 512, 1_000_000)),
        ),
    ),
    Case(
        "group_softmax",
        partial(jaxloss.group_softmax_loss, num_groups=GROUPS),
        arrays=CLASSIFIER,
        floor=GROUP,
        paper=Size(256, 2048, 1000),
        source=f"ImageNet, ResNet-50, batch 256, G = {GROUPS}",
        grows="C",
    ),
    _prototype(
        "prototype",
        _assigned(jaxloss.prototype_loss),
        paper=Size(1024, 512, 1000),
        source="ImageNet, batch 1024, d = 512",
    ),
    _prototype(
        "dot_regression",
        _assigned(jaxloss.dot_regression_loss),
        paper=Size(128, 64, 100),
        source="CIFAR-100-LT, ResNet-32, batch 128",
    ),
    _multilabel("sigmoid_of_targets", jaxloss.sigmoid_loss, optax=_optax_multilabel_sigmoid),
    _multilabel("two_way", jaxloss.two_way_loss),
    _multilabel("sample_wise", jaxloss.sample_wise_loss),
    _multilabel("class_wise", jaxloss.class_wise_loss),
    _multilabel(
        "multilabel_softmax", jaxloss.multilabel_softmax_loss, optax=_optax_multilabel_softmax
    ),
    _multilabel("asymmetric", jaxloss.asymmetric_loss),
    _multilabel("warp", jaxloss.warp_loss, floor=ONE_PASS),
    _multilabel("robust_multilabel", jaxloss.robust_multilabel_loss, floor=ONE_PASS),
)
