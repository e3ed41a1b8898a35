"""Every loss with its sizes, its arrays, its floor and its other forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

import jaxloss
from experiments.benchmark.measure import TOLERANCE
from experiments.core.errors import ConfigError
from jaxloss.core.backend import platform

Dtype = Literal["bfloat16", "float32", "mixed"]
"""Of all float arrays; `mixed` is bfloat16 features and float32 weights."""
Group = Literal["paper", "large", "own", "accelerator", "all"]
"""Of rows: `all` are the first three."""

GROUPS = 4
MARGIN, SCALE = -0.3, 30.0
ANGLE, FACE_SCALE = 0.5, 64.0
_MOST_SCORES = 2**29  # That bare products hold at once.


class Size(NamedTuple):
    """How large the arrays of a loss are."""

    n: int  # Batch size.
    d: int  # Dimension of the features; 0 for a loss on logits.
    C: int  # Number of classes.


class Floor(NamedTuple):
    """What a loss and its gradient cannot avoid."""

    run: Callable[..., object]  # Takes the arrays of the loss.
    text: str


@dataclass(frozen=True)
class Case:
    """A loss, its arrays and its sizes."""

    name: str  # Also of its form in PyTorch, a key of `torch_forms.FORMS`.
    loss: Callable[..., Array]  # From the arrays to a scalar.
    paper: Size  # The size at which the paper uses it.
    source: str  # Data set, network and batch of that size.
    arrays: tuple[str, ...]  # Names of the arrays, keys of `_DRAWS`.
    floor: Floor
    grows: Literal["n", "C"] = "n"  # What is ten times larger at the large size.
    optax: Callable[..., Array] | None = None  # The same by optax.
    composition: Callable[..., Array] | None = None  # From simpler functions of `jaxloss`.
    small_only: tuple[str, ...] = ()  # Forms that need more than 4 GB at the large size.
    tolerance: float = TOLERANCE
    """Largest disagreement of forms that are timed. It is large where the loss chooses pairs by the
    order of their distances, which is another for each form where two are equal but for rounding.
    """
    own: tuple[Size, ...] = ()
    """Sizes of this loss alone: only the floor and the composition are measured beside it."""

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Positions of the arrays that gradients are taken for."""
        varied = ("logits", "features", "view", "own_keys", "weights", "bias")
        return tuple(i for i, name in enumerate(self.arrays) if name in varied)

    def sizes(self, name: Literal["paper", "large", "own"]) -> tuple[Size, ...]:
        """The sizes of that name; `large` is ten times `paper`."""
        large = self.paper._replace(**{self.grows: 10 * getattr(self.paper, self.grows)})
        return {"paper": (self.paper,), "large": (large,), "own": self.own}[name]

    def make_arrays(self, size: Size, dtype: Dtype = "float32", *, seed: int = 0) -> list[Array]:
        """Random arrays of that size, drawn on the device: int32, or floats of that dtype."""
        arrays = []
        keys = jax.random.split(jax.random.key(seed), len(self.arrays))
        for name, key in zip(self.arrays, keys, strict=True):
            array = _DRAWS[name](key, size)
            of_layer = name in ("weights", "bias")
            floats = dtype if dtype != "mixed" else "float32" if of_layer else "bfloat16"
            is_float = jnp.issubdtype(array.dtype, jnp.floating)
            arrays.append(array.astype(floats if is_float else "int32"))
        return arrays


class Problem(NamedTuple):
    """A row: a loss, its size and the dtype of its arrays."""

    case: Case
    size: Size
    dtype: Dtype
    group: Group

    def cells(self) -> list[str]:
        """The name, the size and the dtype, as tables have them."""
        numbers = self.size if "labels" in self.case.arrays or not self.size.d else self.size[:2]
        return [self.case.name, " × ".join(f"{n:,}" for n in numbers if n), self.dtype]


def _labels(key: Array, size: Size) -> Array:
    """Classes of equal size, spread over all, in no order.

    A class that has a sample has at least four: each sample has a positive.
    """
    classes = max(min(size.C, size.n // 4), 1)
    labels = jnp.arange(size.n) % classes * max(size.C // classes, 1)
    return jax.random.permutation(key, labels)


def _targets(key: Array, size: Size) -> Array:
    """Multi-hot, about three positives per sample, as in COCO."""
    others, one = jax.random.split(key)
    targets = jax.random.uniform(others, (size.n, size.C)) < min(3 / size.C, 0.4)
    classes = jax.random.randint(one, (size.n,), 0, size.C)
    return targets.at[jnp.arange(size.n), classes].set(True)


def _prototypes(key: Array, size: Size) -> Array:
    prototypes = _normal(key, size.d, size.C)
    return prototypes / jnp.linalg.norm(prototypes, axis=0)


def _normal(key: Array, *shape: int, mean: float = 0.0, spread: float = 1.0) -> Array:
    return mean + spread * jax.random.normal(key, shape)


NUM_REFERENCES = 65_536
OWN_KEYS = 4  # Mined negatives of each query.
BASE_CLASSES = 64
# Features are not centred, as behind a ReLU; all norms are about √d.
_rows = partial(_normal, mean=0.2)
_DRAWS: dict[str, Callable[[Array, Size], Array]] = {
    "logits": lambda key, size: _normal(key, size.n, size.C, spread=2.0),
    "labels": _labels,
    "targets": _targets,
    "features": lambda key, size: _rows(key, size.n, size.d),
    "view": lambda key, size: _rows(key, size.n, size.d),
    "own_keys": lambda key, size: _rows(key, size.n, OWN_KEYS, size.d),
    "weights": lambda key, size: _normal(key, size.d, size.C, spread=size.d**-0.5),
    "bias": lambda key, size: _normal(key, size.C, spread=0.1),
    "prototypes": _prototypes,
    "assignment": lambda key, size: jax.random.permutation(key, size.C),
    "references": lambda key, size: _rows(key, NUM_REFERENCES, size.d),
    "reference_labels": lambda key, size: jax.random.randint(key, (NUM_REFERENCES,), 0, size.C),
    "vectors": lambda key, size: jnp.linalg.qr(_normal(key, size.d, min(size.d, size.C)))[0],
    "values": lambda key, size: jnp.linspace(2, 0.1, min(size.d, size.C)),
}

# Floors: the factors of a backward product have the shapes of the real ones, not their values.


def product(a: Array, b: Array) -> Array:
    """`a @ b` in the dtype of its factors, float32 without TF32."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def products(rows: Array, columns: Array, *, of_columns: bool, most: int = 2**62) -> Any:
    """`rows @ columns`, and what it takes to get the gradients from a matrix of that shape.

    Where the pairs of a batch are symmetric, that is one product: without `of_columns`. It holds
    at `most` so many numbers of `rows @ columns` at once, if the rows can be halved so often.
    """
    parts, most = 1, min(most, _MOST_SCORES)
    while len(rows) * columns.shape[1] > parts * most and len(rows) % (2 * parts) == 0:
        parts *= 2

    def step(total: Any, block: Array) -> tuple[Any, Array]:
        scores = product(block, columns)
        of_block = product(scores, columns.T)
        return (total + product(block.T, scores) if of_columns else None), of_block

    if parts == 1:
        return step(0, rows)[::-1]
    start = jnp.zeros_like(columns) if of_columns else None
    return lax.scan(step, start, rows.reshape(parts, -1, rows.shape[1]))[::-1]


def _linear(features: Array, _labels: Array, weights: Array, *_: Array) -> Any:
    """Logits, and the gradients of features and weights."""
    return products(features, weights.astype(features.dtype), of_columns=True)


def _pairs(features: Array, *_: Array) -> Array:
    """All inner products, and the gradient of the features."""
    n = len(features)
    most = 1024 * n if platform() == "cpu" else n * n  # They stay in the caches.
    gradient, _ = products(features, features.T, of_columns=False, most=most)
    return gradient.reshape(features.shape)


def _references(features: Array, _labels: Array, references: Array, *_: Array) -> Array:
    """The same with 1024 references at a time."""
    blocks = references.reshape(-1, 1024, references.shape[1])
    return lax.map(lambda block: product(product(features, block.T), block), blocks)


def _complement(features: Array, basis: Array) -> Array:
    """Pairs in the complement of a subspace: projects the features, and their gradient."""
    gradient = _pairs(features - product(product(features, basis), basis.T))
    return product(product(gradient, basis), basis.T)


def _direct_sum(features: Array, labels: Array, weights: Array, _bias: Array) -> object:
    gradients = _linear(features, labels, weights)  # Its logits are the coordinates.
    return gradients, _complement(features, weights), product(weights.T, weights)


def _spectral_sum(features: Array, labels: Array, weights: Array, *_: Array) -> object:
    basis = weights[:, : weights.shape[0]]  # In place of the singular vectors.
    return _linear(features, labels, weights), _complement(features, basis)


def _groups(features: Array, labels: Array, weights: Array, _bias: Array) -> object:
    """A linear layer for the features of each group; on a CPU, the others are 0."""
    parts = jnp.concatenate([features] * GROUPS)
    if platform() == "cpu":  # Where masks take a seventh of the time.
        groups = jnp.arange(features.shape[1]) % GROUPS == jnp.arange(GROUPS)[:, None]
        parts = jnp.where(groups[None], features[:, None, :], 0).reshape(parts.shape)
    return _linear(parts, labels, weights)


ONE_PASS = Floor(lambda rows, *_: 2 * rows, "one pass that reads what is scored and writes as much")
ONE_EXPONENTIAL = Floor(  # Which costs more than the memory.
    lambda logits, *_: jnp.exp(-jnp.abs(logits)),
    "one pass that takes an exponential of every logit",
)
LINEAR = Floor(_linear, "3 products n·d·C")
CLASS_MEANS = LINEAR._replace(run=lambda x, y: _linear(x, y, x[:BASE_CLASSES].T))
PAIRS = Floor(_pairs, "2 products n·n·d")
REFERENCES = Floor(_references, "2 products n·m·d for m references")
TWO_SIDES = Floor(
    lambda queries, keys, *_: products(queries, keys.T, of_columns=True),
    "3 products n·n·d",
)
COVARIANCES = Floor(
    lambda *views: [products(view.T, view, of_columns=False) for view in views],
    "4 products n·d·d",
)
CORRELATIONS = Floor(
    lambda first, second: products(first.T, second, of_columns=True), "3 products n·d·d"
)
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


_margin_softmax = partial(jaxloss.margin_softmax_loss, margin=MARGIN, scale=SCALE)
_nca = _at_temperature_d(jaxloss.nca_loss)
_integers = optax.softmax_cross_entropy_with_integer_labels


def _spectral_sum_with_basis(*arrays: Array) -> Array:
    *arguments, vectors, values = arrays
    basis = jaxloss.SpectralBasis(vectors, values)
    return jaxloss.spectral_sum_loss(*arguments, metric_loss=_nca, basis=basis)


def _optax_multilabel_softmax(logits: Array, targets: Array) -> Array:
    proportions = targets / jnp.sum(targets, axis=1, keepdims=True)
    return optax.softmax_cross_entropy(logits, proportions).mean()


def _optax_targets(logits: Array, targets: Array) -> Array:
    return optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=1).mean()


def _with_metrics(loss: Callable[..., Any]) -> Callable[..., Array]:
    """A loss, with its metrics computed beside it."""

    def value(*arrays: Array) -> Array:
        value, metrics = loss(*arrays, metrics=True)
        return value + 0 * sum(metrics)  # XLA does not see that this adds nothing.

    return value


_IMAGENET = Size(256, 0, 1000), "ImageNet, batch 256"
_TIERED = Size(512, 0, 351), "tiered-ImageNet, batch 512"
_MARGIN = Size(256, 0, BASE_CLASSES), "mini-ImageNet, batch 256"
_COSINES = Size(256, 640, BASE_CLASSES), "mini-ImageNet, ResNet-12, batch 256"
_QUEUE = Size(256, 128, BASE_CLASSES), f"{NUM_REFERENCES:,} earlier rows, batch 256, d = 128"
_MINI = Size(512, 640, BASE_CLASSES), "mini-ImageNet, ResNet-12, batch 512"
_INAT = Size(512, 640, 908), "iNaturalist2017, ResNet-12, batch 512"
_BASIS = _INAT[0], f"{_INAT[1]}; with `basis=`"
_LINEAR = Size(256, 512, 1000), "ImageNet, batch 256, d = 512"
_GROUPS = Size(256, 2048, 1000), f"ImageNet, ResNet-50, batch 256, G = {GROUPS}"
_SPHERE = Size(1024, 512, 1000), "ImageNet, batch 1024, d = 512"
_CIFAR = Size(128, 64, 100), "CIFAR-100-LT, ResNet-32, batch 128"
_COCO = Size(512, 0, 80), "MS-COCO, batch 512"

_METRIC = Size(512, 512, BASE_CLASSES), "64 classes of 8 samples, batch 512, d = 512"
_VIEWS = Size(512, 512, 0), "two views or modalities, batch 512, d = 512"
_CUB = Size(512, 512, 100), "CUB-200-2011, batch 512, d = 512"
_FACES = Size(512, 512, 10_572), "CASIA-WebFace, batch 512, d = 512"

_LAYER = ("features", "labels", "weights", "bias")
_on_logits = partial(Case, arrays=("logits", "labels"), floor=ONE_EXPONENTIAL, grows="C")
_on_layer = partial(Case, arrays=_LAYER)
_PROTOTYPES = ("features", "labels", "prototypes", "assignment")
_on_pairs = partial(Case, arrays=("features", "labels"), floor=PAIRS)
_on_views = partial(Case, arrays=("features", "view"), floor=TWO_SIDES)
_on_proxies = partial(Case, arrays=_LAYER[:3], floor=LINEAR)
_on_targets = partial(Case, arrays=("logits", "targets"), floor=ONE_EXPONENTIAL)
_triplet = partial(partial, jaxloss.triplet_loss)


def _stopped(name: str, loss: Callable[..., Array], *size: Any, floor: Floor) -> Case:
    """A sum of softmax and NCA with a constant projection."""
    return _on_layer(f"{name}_stopped", partial(loss, stop_gradient=True), *size, floor=floor)


def _on_prototypes(name: str, loss: Callable[..., Array], *size: Any) -> Case:
    def assigned(x: Array, y: Array, prototypes: Array, assignment: Array) -> Array:
        return loss(x, y, prototypes, assignment=assignment)

    return Case(name, assigned, *size, arrays=_PROTOTYPES, floor=ONE_PASS)


_sum = partial(jaxloss.sum_loss, metric_loss=_nca)
_DIRECT = "direct_sum", partial(jaxloss.direct_sum_loss, metric_loss=_nca)
_SPECTRAL = "spectral_sum", partial(jaxloss.spectral_sum_loss, metric_loss=_nca)
_means = partial(_at_temperature_d, jaxloss.prototypical_loss)
_group_softmax = partial(jaxloss.group_softmax_loss, num_groups=GROUPS)
_arcface = partial(
    jaxloss.classifier_loss, similarity="cosine", angular_margin=ANGLE, scale=FACE_SCALE
)

CASES: tuple[Case, ...] = (
    _on_logits(
        "softmax", jaxloss.softmax_loss, *_IMAGENET, optax=lambda z, y: _integers(z, y).mean()
    ),
    _on_logits(
        "sigmoid",
        jaxloss.sigmoid_loss,
        *_TIERED,
        optax=lambda z, y: _optax_targets(z, jnp.arange(z.shape[1]) == y[:, None]),
    ),
    _on_logits("margin_softmax", _margin_softmax, *_MARGIN),
    _on_proxies(
        "cosine_margin_softmax",
        lambda x, y, w: _margin_softmax(jaxloss.cosine_logits(x, w), y),
        *_COSINES,
    ),
    _on_pairs(
        "nca", _nca, *_MINI, own=(Size(16_384, 640, BASE_CLASSES), Size(65_536, 64, BASE_CLASSES))
    ),
    Case(
        "nca_references",
        lambda x, y, m, n: _nca(x, y, references=m, reference_labels=n),
        *_QUEUE,
        arrays=("features", "labels", "references", "reference_labels"),
        floor=REFERENCES,
    ),
    _on_pairs("prototypical", _means(num_classes=BASE_CLASSES), *_MINI, floor=CLASS_MEANS),
    _on_pairs("prototypical_by_samples", _means(), *_MINI, floor=CLASS_MEANS),
    _on_layer("sum", _sum, *_MINI, floor=SUM),
    _on_layer(*_DIRECT, *_MINI, floor=DIRECT_SUM),
    _stopped(*_DIRECT, *_MINI, floor=DIRECT_SUM),
    _on_layer(*_SPECTRAL, *_INAT, floor=SPECTRAL_SUM),
    _stopped(*_SPECTRAL, *_INAT, floor=SPECTRAL_SUM),
    Case(
        "spectral_sum_with_basis",
        _spectral_sum_with_basis,
        *_BASIS,
        arrays=(*_LAYER, "vectors", "values"),
        floor=SPECTRAL_SUM,
    ),
    _on_layer(
        "classifier",
        jaxloss.classifier_loss,
        *_LINEAR,
        floor=LINEAR,
        composition=lambda x, y, w, b: jaxloss.softmax_loss(jaxloss.linear_logits(x, w, b), y),
        own=(Size(256, 512, 10_000), Size(256, 512, 100_000), Size(256, 512, 1_000_000)),
    ),
    _on_layer("group_softmax", _group_softmax, *_GROUPS, floor=GROUP, grows="C"),
    _on_prototypes("prototype", jaxloss.prototype_loss, *_SPHERE),
    _on_prototypes("dot_regression", jaxloss.dot_regression_loss, *_CIFAR),
    _on_targets("sigmoid_of_targets", jaxloss.sigmoid_loss, *_COCO, optax=_optax_targets),
    _on_targets("two_way", jaxloss.two_way_loss, *_COCO),
    _on_targets("sample_wise", jaxloss.sample_wise_loss, *_COCO),
    _on_targets("class_wise", jaxloss.class_wise_loss, *_COCO),
    _on_targets(
        "multilabel_softmax",
        jaxloss.multilabel_softmax_loss,
        *_COCO,
        optax=_optax_multilabel_softmax,
    ),
    _on_targets("asymmetric", jaxloss.asymmetric_loss, *_COCO),
    _on_targets("warp", jaxloss.warp_loss, *_COCO, floor=ONE_PASS),
    _on_targets("robust_multilabel", jaxloss.robust_multilabel_loss, *_COCO, floor=ONE_PASS),
    _on_pairs("supervised_contrastive", jaxloss.supervised_contrastive_loss, *_METRIC),
    _on_pairs(
        "nt_xent",
        partial(jaxloss.supervised_contrastive_loss, denominator="negatives"),
        *_METRIC,
        optax=partial(optax.losses.ntxent, temperature=0.1),
        small_only=("optax",),
    ),
    # The least that a loss of two towers can take: what the products of each library take.
    _on_views("products", lambda a, b: jnp.mean(product(a, b.T) ** 2), *_VIEWS),
    _on_views("info_nce", jaxloss.info_nce_loss, *_VIEWS),
    # Beside the loss alone, in the column of compositions.
    _on_views(
        "info_nce_metrics",
        _with_metrics(jaxloss.info_nce_loss),
        *_VIEWS,
        composition=jaxloss.info_nce_loss,
    ),
    Case(
        "info_nce_own_keys",
        lambda queries, keys, own: jaxloss.info_nce_loss(queries, keys, own_keys=own),
        _VIEWS[0],
        f"{_VIEWS[1]}; {OWN_KEYS} mined negatives of each query",
        arrays=("features", "view", "own_keys"),
        floor=TWO_SIDES,
    ),
    _on_views("sigmoid_contrastive", jaxloss.sigmoid_contrastive_loss, *_VIEWS),
    _on_pairs("multi_similarity", jaxloss.multi_similarity_loss, *_METRIC),
    _on_pairs("circle", jaxloss.circle_loss, *_METRIC),
    # Two nearest negatives can be as near, but for rounding.
    _on_pairs("triplet_hard", _triplet(mining="hard"), *_METRIC, tolerance=0.3),
    _on_pairs("triplet_semihard", _triplet(mining="semihard"), *_METRIC, tolerance=0.3),
    _on_pairs("triplet_all", _triplet(mining="all"), *_METRIC, small_only=("PML",)),
    _on_proxies("proxy_anchor", jaxloss.proxy_anchor_loss, *_CUB),
    _on_proxies("proxy_nca", jaxloss.proxy_nca_loss, *_CUB),
    _on_proxies("arcface", _arcface, *_FACES),
    _on_views("vicreg", jaxloss.vicreg_loss, *_VIEWS, floor=COVARIANCES),
    _on_views("barlow_twins", jaxloss.barlow_twins_loss, *_VIEWS, floor=CORRELATIONS),
)
BY_NAME = {case.name: case for case in CASES}

_PAIRS: Sequence[str] = "nca", "supervised_contrastive", "info_nce", "sigmoid_contrastive"
_LAYERS: Sequence[str] = "classifier", "arcface"
_OTHERS = {
    "multi_similarity": Size(8_192, 512, 1_024),
    "prototypical": Size(8_192, 512, 64),
    "proxy_anchor": Size(4_096, 512, 10_000),
    "proxy_nca": Size(4_096, 512, 10_000),
    "group_softmax": Size(4_096, 512, 1_000),
}


def _of_accelerator(dtype: Dtype, sizes: dict[str, Size]) -> list[Problem]:
    return [Problem(BY_NAME[name], size, dtype, "accelerator") for name, size in sizes.items()]


def _important(place: int, dtype: Dtype) -> list[Problem]:
    """The losses that most use, at a small, a medium or a large size."""
    n, m, C = [(512, 512, 10_000), (8_192, 4_096, 100_000), (32_768, 1_024, 1_000_000)][place]
    sizes = dict.fromkeys(_PAIRS, Size(n, 512, n // 8)) | dict.fromkeys(_LAYERS, Size(m, 512, C))
    return _of_accelerator(dtype, sizes)


ACCELERATOR: tuple[Problem, ...] = (  # The most important ones first.
    *(problem for place in (1, 0, 2) for problem in _important(place, "bfloat16")),
    *(problem for place in (1, 0) for problem in _important(place, "float32")),
    *_of_accelerator("bfloat16", _OTHERS),
    *_of_accelerator("mixed", {"classifier": Size(4_096, 512, 100_000)}),
    *_important(2, "float32"),
    *_of_accelerator("float32", _OTHERS),
)


def problems_of(names: Sequence[str], group: Group, dtype: Dtype | None = None) -> list[Problem]:
    """The rows of a group, or those with the names and the dtype among them.

    Raises a `ConfigError` for a name of no row.
    """
    if group == "accelerator":
        rows = list(ACCELERATOR)
    else:
        groups: Any = ("paper", "large", "own") if group == "all" else (group,)
        rows = [
            Problem(case, size, "float32", each)
            for each in groups
            for case in CASES
            for size in case.sizes(each)
        ]
    known = list(dict.fromkeys(row.case.name for row in rows))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"unknown loss {unknown[0]!r}; choose from {', '.join(known)}")
    return [row for row in rows if row.case.name in (names or known) and dtype in (None, row.dtype)]
