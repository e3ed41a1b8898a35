"""One row a loss: its sizes, its arrays, and the forms in JAX that are measured.

The forms in PyTorch stand in `experiments.benchmark.torch_forms`, under the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Literal

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jaxloss
from jaxloss._linear import exact_product as product

SizeName = Literal["toy", "paper", "large"]
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Size:
    """How large the arrays of a loss are."""

    n: int
    """Batch size."""
    d: int
    """Dimension of the features."""
    C: int
    """Number of classes."""

    def __str__(self) -> str:
        parts = {"n": self.n, "d": self.d, "C": self.C}
        return ", ".join(f"{name} = {value:,}" for name, value in parts.items() if value)


@dataclass(frozen=True, eq=False)
class Case:
    """A loss and everything that its measurement needs but its PyTorch forms."""

    name: str
    paper: Size
    """The size at which the paper uses it."""
    source: str
    """Where that size is from."""
    grows: Literal["n", "C"]
    """What is ten times larger at the large size."""
    make_arrays: Callable[[np.random.Generator, Size], Arrays]
    loss: Callable[..., Array]
    """From these arrays to a scalar."""
    differentiable: tuple[int, ...]
    """Positions of the arrays that gradients are taken for."""
    floor: Callable[..., object]
    """The matrix products that the loss and its gradient cannot avoid, of the same arrays."""
    products: str
    """What the floor is, in words."""
    rivals: Mapping[str, Callable[..., Array]] = field(default_factory=lambda: MappingProxyType({}))
    """The same loss from other JAX packages."""
    toy: Size = Size(24, 12, 4)

    def size(self, name: SizeName) -> Size:
        """The size of that name; `large` is ten times `paper`."""
        if name == "toy":
            return self.toy
        factor = {"paper": 1, "large": 10}[name]
        grown = factor * getattr(self.paper, self.grows)
        return dataclasses.replace(self.paper, **{self.grows: grown})


# ---------------------------------------------------------------------------------------- arrays


def _labels(rng: np.random.Generator, size: Size) -> np.ndarray:
    """Classes of equal size, four samples at least, so that every sample has a positive."""
    classes = max(min(size.C, size.n // 4), 1)
    return rng.permutation(np.arange(size.n) % classes).astype(np.int32)


def _features(rng: np.random.Generator, size: Size) -> np.ndarray:
    # Not centred, as behind a ReLU; all norms are about √d.
    return rng.normal(0.2, 1.0, (size.n, size.d)).astype(np.float32)


def _weights(rng: np.random.Generator, size: Size) -> np.ndarray:
    return (rng.normal(0.0, 1.0, (size.d, size.C)) / np.sqrt(size.d)).astype(np.float32)


def logits_and_labels(rng: np.random.Generator, size: Size) -> Arrays:
    """Logits [n, C] and classes [n]."""
    return rng.normal(0.0, 2.0, (size.n, size.C)).astype(np.float32), _labels(rng, size)


def logits_and_targets(rng: np.random.Generator, size: Size) -> Arrays:
    """Logits [n, C] and multi-hot targets [n, C]: about three positives a sample, as in COCO."""
    targets = rng.random((size.n, size.C)) < min(3 / size.C, 0.4)
    targets[np.arange(size.n), rng.integers(0, size.C, size.n)] = True
    logits = rng.normal(0.0, 2.0, (size.n, size.C)).astype(np.float32)
    return logits, targets.astype(np.int32)


def features_and_labels(rng: np.random.Generator, size: Size) -> Arrays:
    """Features [n, d] and classes [n]."""
    return _features(rng, size), _labels(rng, size)


def classifier_arrays(rng: np.random.Generator, size: Size) -> Arrays:
    """Features [n, d], classes [n], weights [d, C] and bias [C]."""
    bias = rng.normal(0.0, 0.1, size.C).astype(np.float32)
    return _features(rng, size), _labels(rng, size), _weights(rng, size), bias


def features_and_weights(rng: np.random.Generator, size: Size) -> Arrays:
    """Features [n, d], classes [n] and weights [d, C]."""
    return _features(rng, size), _labels(rng, size), _weights(rng, size)


def features_and_prototypes(rng: np.random.Generator, size: Size) -> Arrays:
    """Features [n, d], classes [n], unit prototypes [d, C] and an assignment [C]."""
    prototypes = _weights(rng, size)
    prototypes /= np.linalg.norm(prototypes, axis=0)
    assignment = rng.permutation(size.C).astype(np.int32)
    return _features(rng, size), _labels(rng, size), prototypes, assignment


# ---------------------------------------------------------------------------------------- floors
# The factors of a backward product have the shapes of the real ones, not their values. Products are
# as precise as the losses' own, which matters on a GPU.


def one_pass(rows: Array, *_: Array) -> Array:
    """Where there is no matrix product: reads what is scored and writes as much."""
    return 2 * rows


def one_exponential(logits: Array, *_: Array) -> Array:
    """The same with an exponential, which costs more than the memory."""
    return jnp.exp(-jnp.abs(logits))


def classifier_products(features: Array, _labels: Array, weights: Array, *_: Array):
    """Logits, and the gradients of features and weights."""
    logits = product(features, weights)
    return logits, product(logits, weights.T), product(features.T, logits)


def pairwise_products(features: Array, *_: Array):
    """All inner products, and the gradient of the features."""
    products = product(features, features.T)
    return products, product(products, features)


def class_mean_products(features: Array, _labels: Array, *, num_classes: int):
    """Features times class means, and the gradients of both."""
    means = features[jnp.arange(num_classes) % features.shape[0]]
    logits = product(features, means.T)
    return logits, product(logits, means), product(logits.T, features)


def sample_mean_products(features: Array, _labels: Array):
    """Features times the means that the samples stand for, and the gradients of both."""
    means = features[::-1]
    logits = product(features, means.T)
    return logits, product(logits, means), product(logits.T, features)


def sum_products(features: Array, labels: Array, weights: Array, *_: Array):
    """Those of the classifier and of NCA."""
    return classifier_products(features, labels, weights), pairwise_products(features)


def direct_sum_products(features: Array, labels: Array, weights: Array, *_: Array):
    """Those of the sum, WᵀW, W times the coordinates, and the projection of the gradient."""
    logits, d_features, d_weights = classifier_products(features, labels, weights)
    within = product(logits, weights.T)
    products, metric_gradient = pairwise_products(features - within)
    d_within = product(product(metric_gradient, weights), weights.T)
    gram = product(weights.T, weights)
    return d_features, d_weights, products, d_within, gram


def spectral_sum_products(features: Array, labels: Array, weights: Array, *_: Array):
    """Those of the sum and, with the singular vectors given, two projections by them."""
    d_features, d_weights = classifier_products(features, labels, weights)[1:]
    basis = weights[:, : weights.shape[0]]
    within = product(product(features, basis), basis.T)
    products, metric_gradient = pairwise_products(features - within)
    d_within = product(product(metric_gradient, basis), basis.T)
    return d_features, d_weights, products, d_within


def group_products(features: Array, _labels: Array, weights: Array, *_: Array, num_groups: int):
    """G times those of a classifier: the features of each group, the others 0."""
    groups = jnp.arange(features.shape[1]) % num_groups == jnp.arange(num_groups)[:, None]
    parts = jnp.where(groups[None], features[:, None, :], 0).reshape(-1, features.shape[1])
    return classifier_products(parts, _labels, weights)


# ---------------------------------------------------------------------------------------- losses
# Squared distances grow with d, which is therefore the temperature.

GROUPS = 4
MARGIN, SCALE = -0.3, 30.0
BASE_CLASSES = 64


def _temperature(features: Array) -> float:
    return float(features.shape[1])


def _nca(features: Array, labels: Array, **options) -> Array:
    return jaxloss.nca_loss(features, labels, temperature=_temperature(features), **options)


def _prototypical(features: Array, labels: Array, **options) -> Array:
    return jaxloss.prototypical_loss(
        features, labels, temperature=_temperature(features), **options
    )


def _integrated(loss: Callable[..., Array]) -> Callable[..., Array]:
    return partial(loss, metric_loss=_nca)


def _cosine_margin_softmax(features: Array, labels: Array, weights: Array) -> Array:
    logits = jaxloss.cosine_logits(features, weights)
    return jaxloss.margin_softmax_loss(logits, labels, margin=MARGIN, scale=SCALE)


def _prototype_loss(features, labels, prototypes, assignment) -> Array:
    return jaxloss.prototype_loss(features, labels, prototypes, assignment=assignment)


def _dot_regression_loss(features, labels, prototypes, assignment) -> Array:
    return jaxloss.dot_regression_loss(features, labels, prototypes, assignment=assignment)


def _optax_softmax(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _optax_sigmoid(logits: Array, labels: Array) -> Array:
    targets = jnp.arange(logits.shape[1], dtype=labels.dtype) == labels[:, None]
    return optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=1).mean()


def _optax_multilabel_softmax(logits: Array, targets: Array) -> Array:
    proportions = targets / jnp.sum(targets, axis=1, keepdims=True)
    return optax.softmax_cross_entropy(logits, proportions).mean()


def _optax_multilabel_sigmoid(logits: Array, targets: Array) -> Array:
    return optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=1).mean()


def _multilabel(
    name: str,
    loss: Callable[..., Array],
    *,
    exponentials: bool = True,
    **rivals: Callable[..., Array],
) -> Case:
    return Case(
        name=name,
        paper=COCO,
        source="MS-COCO, batch 512",
        grows="n",
        make_arrays=logits_and_targets,
        loss=loss,
        differentiable=(0,),
        floor=one_exponential if exponentials else one_pass,
        products=ONE_EXPONENTIAL if exponentials else ONE_PASS,
        rivals=MappingProxyType(rivals),
    )


ONE_PASS = "no product, but one pass that reads what is scored and writes as much"
ONE_EXPONENTIAL = "no product, but one pass that takes an exponential of every logit"
IMAGENET = Size(256, 0, 1000)
COCO = Size(512, 0, 80)
MINI_IMAGENET = Size(512, 640, BASE_CLASSES)

CASES = (
    Case(
        name="softmax",
        paper=IMAGENET,
        source="ImageNet, batch 256",
        grows="C",
        make_arrays=logits_and_labels,
        loss=jaxloss.softmax_loss,
        differentiable=(0,),
        floor=one_exponential,
        products=ONE_EXPONENTIAL,
        rivals=MappingProxyType({"optax": _optax_softmax}),
    ),
    Case(
        name="sigmoid",
        paper=Size(512, 0, 351),
        source="tiered-ImageNet, batch 512",
        grows="C",
        make_arrays=logits_and_labels,
        loss=jaxloss.sigmoid_loss,
        differentiable=(0,),
        floor=one_exponential,
        products=ONE_EXPONENTIAL,
        rivals=MappingProxyType({"optax": _optax_sigmoid}),
    ),
    Case(
        name="margin_softmax",
        paper=Size(256, 0, BASE_CLASSES),
        source="mini-ImageNet, batch 256",
        grows="C",
        make_arrays=logits_and_labels,
        loss=partial(jaxloss.margin_softmax_loss, margin=MARGIN, scale=SCALE),
        differentiable=(0,),
        floor=one_exponential,
        products=ONE_EXPONENTIAL,
    ),
    Case(
        name="cosine_margin_softmax",
        paper=Size(256, 640, BASE_CLASSES),
        source="mini-ImageNet, ResNet-12, batch 256",
        grows="n",
        make_arrays=features_and_weights,
        loss=_cosine_margin_softmax,
        differentiable=(0, 2),
        floor=classifier_products,
        products="3 products n·d·C",
    ),
    Case(
        name="nca",
        paper=MINI_IMAGENET,
        source="mini-ImageNet, ResNet-12, batch 512",
        grows="n",
        make_arrays=features_and_labels,
        loss=_nca,
        differentiable=(0,),
        floor=pairwise_products,
        products="2 products n·n·d",
    ),
    Case(
        name="nca_in_blocks",
        paper=MINI_IMAGENET,
        source="mini-ImageNet, ResNet-12, batch 512; block_size=256",
        grows="n",
        make_arrays=features_and_labels,
        loss=partial(_nca, block_size=256),
        differentiable=(0,),
        floor=pairwise_products,
        products="2 products n·n·d",
    ),
    Case(
        name="prototypical",
        paper=MINI_IMAGENET,
        source="mini-ImageNet, ResNet-12, batch 512; num_classes=64",
        grows="n",
        make_arrays=features_and_labels,
        loss=partial(_prototypical, num_classes=BASE_CLASSES),
        differentiable=(0,),
        floor=partial(class_mean_products, num_classes=BASE_CLASSES),
        products="3 products n·d·C",
    ),
    Case(
        name="prototypical_by_samples",
        paper=MINI_IMAGENET,
        source="mini-ImageNet, ResNet-12, batch 512; without num_classes",
        grows="n",
        make_arrays=features_and_labels,
        loss=_prototypical,
        differentiable=(0,),
        floor=sample_mean_products,
        products="3 products n·n·d",
    ),
    Case(
        name="sum",
        paper=MINI_IMAGENET,
        source="mini-ImageNet, ResNet-12, batch 512; softmax and NCA",
        grows="n",
        make_arrays=classifier_arrays,
        loss=_integrated(jaxloss.sum_loss),
        differentiable=(0, 2, 3),
        floor=sum_products,
        products="3 products n·d·C, 2 of n·n·d",
    ),
    Case(
        name="direct_sum",
        paper=MINI_IMAGENET,
        source="mini-ImageNet, ResNet-12, batch 512; softmax and NCA",
        grows="n",
        make_arrays=classifier_arrays,
        loss=_integrated(jaxloss.direct_sum_loss),
        differentiable=(0, 2, 3),
        floor=direct_sum_products,
        products="6 products n·d·C, 2 of n·n·d, one of C·C·d",
    ),
    Case(
        name="spectral_sum",
        paper=Size(512, 640, 908),
        source="iNaturalist2017, ResNet-12, batch 512; softmax and NCA",
        grows="n",
        make_arrays=classifier_arrays,
        loss=_integrated(jaxloss.spectral_sum_loss),
        differentiable=(0, 2, 3),
        floor=spectral_sum_products,
        products="3 products n·d·C, 2 of n·n·d, 4 of n·d·d; not the singular vectors",
        toy=Size(24, 4, 12),
    ),
    Case(
        name="group_softmax",
        paper=Size(256, 2048, 1000),
        source="ImageNet, ResNet-50, batch 256, G = 4",
        grows="C",
        make_arrays=classifier_arrays,
        loss=partial(jaxloss.group_softmax_loss, num_groups=GROUPS),
        differentiable=(0, 2, 3),
        floor=partial(group_products, num_groups=GROUPS),
        products="3 products G·n·d·C",
    ),
    Case(
        name="prototype",
        paper=Size(1024, 512, 1000),
        source="ImageNet, batch 1024, d = 512",
        grows="n",
        make_arrays=features_and_prototypes,
        loss=_prototype_loss,
        differentiable=(0,),
        floor=one_pass,
        products=ONE_PASS,
    ),
    Case(
        name="dot_regression",
        paper=Size(128, 64, 100),
        source="CIFAR-100-LT, ResNet-32, batch 128",
        grows="n",
        make_arrays=features_and_prototypes,
        loss=_dot_regression_loss,
        differentiable=(0,),
        floor=one_pass,
        products=ONE_PASS,
    ),
    _multilabel("sigmoid_of_targets", jaxloss.sigmoid_loss, optax=_optax_multilabel_sigmoid),
    _multilabel("two_way", jaxloss.two_way_loss),
    _multilabel("sample_wise", jaxloss.sample_wise_loss),
    _multilabel("class_wise", jaxloss.class_wise_loss),
    _multilabel(
        "multilabel_softmax", jaxloss.multilabel_softmax_loss, optax=_optax_multilabel_softmax
    ),
    _multilabel("asymmetric", jaxloss.asymmetric_loss),
    _multilabel("warp", jaxloss.warp_loss, exponentials=False),
)
