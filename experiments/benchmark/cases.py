"""Every loss with its sizes, its arrays, its floor and its forms in JAX.

The forms in PyTorch are in `torch_forms`, under the same names.
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


@dataclass(frozen=True)
class Case:
    """A loss, its arrays and its sizes."""

    name: str
    loss: Callable[..., Array]
    """From the arrays to a scalar."""
    paper: Size
    """The size at which the paper uses it."""
    source: str
    """Data set, network and batch of that size."""
    arrays: tuple[str, ...]
    """Names of the arrays, keys of `_DRAWS`."""
    floor: Floor
    grows: Literal["n", "C"] = "n"
    """What is ten times larger at the large size."""
    own: tuple[Size, ...] = ()
    """Sizes of this loss alone: only the floor and the composition are measured beside it."""

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Positions of the arrays that gradients are taken for."""
        varied = ("logits", "features", "weights", "bias")
        return tuple(i for i, name in enumerate(self.arrays) if name in varied)

    def sizes(self, name: SizeName) -> tuple[Size, ...]:
        """The sizes of that name; `large` is ten times `paper`."""
        large = self.paper._replace(**{self.grows: 10 * getattr(self.paper, self.grows)})
        return {"paper": (self.paper,), "large": (large,), "own": self.own}[name]

    def make_arrays(self, rng: np.random.Generator, size: Size) -> tuple[np.ndarray, ...]:
        """Random arrays of that size, float32 and int32."""
        return tuple(
            array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
            for array in (_DRAWS[name](rng, size) for name in self.arrays)
        )


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
NUM_REFERENCES = 65_536

GROUPS = 4
MARGIN, SCALE = -0.3, 30.0
BASE_CLASSES = 64

# Floors: the factors of a backward product have the shapes of the real ones, not their values.
# Products are as precise as the losses' own, which matters on a GPU.


def _linear(features: Array, _labels: Array, weights: Array, *_: Array) -> tuple[Array, ...]:
    """Logits, and the gradients of features and weights."""
    logits = product(features, weights)
    return logits, product(logits, weights.T), product(features.T, logits)


def _pairs_of(anchors: Array, features: Array) -> Array:
    return product(product(anchors, features.T), features)


def _pairs(features: Array, *_: Array) -> Array:
    """All inner products and the gradient of the features, 1024 anchors at a time."""
    blocks = features.reshape(-1, math.gcd(1024, len(features)), features.shape[1])
    return lax.map(lambda block: _pairs_of(block, features), blocks).reshape(features.shape)


def _references(features: Array, _labels: Array, references: Array, *_: Array) -> Array:
    """The same with 1024 references at a time."""
    blocks = references.reshape(-1, 1024, references.shape[1])
    return lax.map(lambda block: _pairs_of(features, block), blocks)


def _complement(features: Array, coordinates: Array, basis: Array) -> Array:
    """Pairs in the complement of a subspace: projects the features, and their gradient."""
    gradient = _pairs(features - product(coordinates, basis.T))
    return product(product(gradient, basis), basis.T)


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
PAIRS = Floor(_pairs, "2 products n·n·d")
REFERENCES = Floor(_references, "2 products n·m·d for m references")
SUM = Floor(lambda *arrays: (_linear(*arrays), _pairs(*arrays)), "3 products n·d·C, 2 of n·n·d")
DIRECT_SUM = Floor(_direct_sum, "6 products n·d·C, 2 of n·n·d, one of C·C·d")
SPECTRAL_SUM = Floor(
    _spectral_sum, "3 products n·d·C, 2 of n·n·d, 4 of n·d·d; not the singular vectors"
)
GROUP = Floor(_groups, "3 products G·n·d·C")


def _at_temperature_d(loss: Callable[..., Array], **options) -> Callable[..., Array]:
    """A loss on squared distances, which grow with d: d is therefore the temperature."""
    return lambda features, labels, **common: loss(
        features, labels, temperature=float(features.shape[1]), **options, **common
    )


def _assigned(loss: Callable[..., Array]) -> Callable[..., Array]:
    return lambda features, labels, prototypes, assignment: loss(
        features, labels, prototypes, assignment=assignment
    )


_margin_softmax = partial(jaxloss.margin_softmax_loss, margin=MARGIN, scale=SCALE)
_nca = _at_temperature_d(jaxloss.nca_loss)


def _cosine_margin_softmax(features: Array, labels: Array, weights: Array) -> Array:
    return _margin_softmax(jaxloss.cosine_logits(features, weights), labels)


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


COMPOSITIONS = {"classifier": _classifier_composition}
"""The same loss from simpler functions of `jaxloss`."""
OPTAX_FORMS = {
    "softmax": _optax_softmax,
    "sigmoid": _optax_sigmoid,
    "sigmoid_of_targets": _optax_multilabel_sigmoid,
    "multilabel_softmax": _optax_multilabel_softmax,
}
"""The same loss by optax."""

_MINI, _INAT = Size(512, 640, BASE_CLASSES), Size(512, 640, 908)
_OF_MINI = "mini-ImageNet, ResNet-12, batch 512"
_OF_INAT = "iNaturalist2017, ResNet-12, batch 512"
_logits = partial(Case, arrays=("logits", "labels"), floor=ONE_EXPONENTIAL, grows="C")
_metric = partial(Case, arrays=("features", "labels"))
_with_classifier = partial(Case, arrays=("features", "labels", "weights", "bias"))
_prototype = partial(
    Case, arrays=("features", "labels", "prototypes", "assignment"), floor=ONE_PASS
)
_multilabel = partial(
    Case,
    paper=Size(512, 0, 80),
    source="MS-COCO, batch 512",
    arrays=("logits", "targets"),
    floor=ONE_EXPONENTIAL,
)


def _sums(name: str, loss: Callable[..., Array], *fields, floor: Floor) -> tuple[Case, ...]:
    """A sum of softmax and NCA, as written and with a constant projection."""
    return tuple(
        _with_classifier(
            name + suffix,
            partial(loss, metric_loss=_nca, stop_gradient=stopped),
            *fields,
            floor=floor,
        )
        for suffix, stopped in (("", False), ("_stopped", True))
    )


CASES = (
    _logits("softmax", jaxloss.softmax_loss, Size(256, 0, 1000), "ImageNet, batch 256"),
    _logits("sigmoid", jaxloss.sigmoid_loss, Size(512, 0, 351), "tiered-ImageNet, batch 512"),
    _logits("margin_softmax", _margin_softmax, Size(256, 0, 64), "mini-ImageNet, batch 256"),
    Case(
        "cosine_margin_softmax",
        _cosine_margin_softmax,
        Size(256, 640, BASE_CLASSES),
        "mini-ImageNet, ResNet-12, batch 256",
        arrays=("features", "labels", "weights"),
        floor=LINEAR,
    ),
    _metric(
        "nca",
        _nca,
        _MINI,
        _OF_MINI,
        floor=PAIRS,
        own=(Size(16_384, 640, BASE_CLASSES), Size(65_536, 64, BASE_CLASSES)),
    ),
    Case(
        "nca_references",
        _nca_references,
        Size(256, 128, BASE_CLASSES),
        f"a queue of {NUM_REFERENCES:,} earlier rows, batch 256, d = 128",
        arrays=("features", "labels", "references", "reference_labels"),
        floor=REFERENCES,
    ),
    _metric(
        "prototypical",
        _at_temperature_d(jaxloss.prototypical_loss, num_classes=BASE_CLASSES),
        _MINI,
        f"{_OF_MINI}; num_classes={BASE_CLASSES}",
        floor=CLASS_MEANS,
    ),
    _metric(
        "prototypical_by_samples",
        _at_temperature_d(jaxloss.prototypical_loss),
        _MINI,
        f"{_OF_MINI}; without num_classes",
        floor=CLASS_MEANS,
    ),
    _with_classifier(
        "sum", partial(jaxloss.sum_loss, metric_loss=_nca), _MINI, _OF_MINI, floor=SUM
    ),
    *_sums("direct_sum", jaxloss.direct_sum_loss, _MINI, _OF_MINI, floor=DIRECT_SUM),
    *_sums("spectral_sum", jaxloss.spectral_sum_loss, _INAT, _OF_INAT, floor=SPECTRAL_SUM),
    Case(
        "spectral_sum_with_basis",
        _spectral_sum_with_basis,
        _INAT,
        f"{_OF_INAT}; with `basis=`",
        arrays=("features", "labels", "weights", "bias", "vectors", "values"),
        floor=SPECTRAL_SUM,
    ),
    _with_classifier(
        "classifier",
        jaxloss.classifier_loss,
        Size(256, 512, 1000),
        "ImageNet, batch 256, d = 512",
        floor=LINEAR,
        own=(Size(256, 512, 10_000), Size(256, 512, 100_000), Size(256, 512, 1_000_000)),
    ),
    _with_classifier(
        "group_softmax",
        partial(jaxloss.group_softmax_loss, num_groups=GROUPS),
        Size(256, 2048, 1000),
        f"ImageNet, ResNet-50, batch 256, G = {GROUPS}",
        floor=GROUP,
        grows="C",
    ),
    _prototype(
        "prototype",
        _assigned(jaxloss.prototype_loss),
        Size(1024, 512, 1000),
        "ImageNet, batch 1024, d = 512",
    ),
    _prototype(
        "dot_regression",
        _assigned(jaxloss.dot_regression_loss),
        Size(128, 64, 100),
        "CIFAR-100-LT, ResNet-32, batch 128",
    ),
    _multilabel("sigmoid_of_targets", jaxloss.sigmoid_loss),
    _multilabel("two_way", jaxloss.two_way_loss),
    _multilabel("sample_wise", jaxloss.sample_wise_loss),
    _multilabel("class_wise", jaxloss.class_wise_loss),
    _multilabel("multilabel_softmax", jaxloss.multilabel_softmax_loss),
    _multilabel("asymmetric", jaxloss.asymmetric_loss),
    _multilabel("warp", jaxloss.warp_loss, floor=ONE_PASS),
    _multilabel("robust_multilabel", jaxloss.robust_multilabel_loss, floor=ONE_PASS),
)
