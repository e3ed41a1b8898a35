"""Every loss with its sizes, its arrays, its floor and its other forms in JAX."""

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

# Of all float arrays; `mixed` is bfloat16 features and float32 weights.
Dtype = Literal["bfloat16", "float32", "mixed"]
# Of rows; `all` are the first three.
Group = Literal["paper", "large", "own", "accelerator", "all"]

GROUPS = 4
MARGIN, SCALE = -0.3, 30.0
ANGLE, FACE_SCALE = 0.5, 64.0
BASE_CLASSES = 64
_NUM_REFERENCES = 65_536
_OWN_KEYS = 4  # Mined negatives of each query.
_DIRECTIONS, _POINTS = 1024, 17  # Of SIGReg.
_MOST_SCORES = 2**29  # That bare products hold at once.


class Size(NamedTuple):
    """How large the arrays of a loss are."""

    n: int  # Batch size.
    d: int  # Dimension of the features; 0 for a loss on logits.
    C: int  # Number of classes.


@dataclass(frozen=True)
class Case:
    """A loss, its sizes and its arrays."""

    name: str  # Also of its form in PyTorch, if it has one: a key of `torch_forms.FORMS`.
    loss: Callable[..., Array]  # From the arrays to a scalar.
    paper: Size  # The size at which the paper uses it.
    arrays: tuple[str, ...]  # Names of the arrays, keys of `_DRAWS`.
    floor: str  # A key of `FLOORS`.
    grows: Literal["n", "C"] = "n"  # What is ten times larger at the large size.
    optax: Callable[..., Array] | None = None  # The same by optax.
    composition: Callable[..., Array] | None = None  # From simpler functions of `jaxloss`.
    small_only: tuple[str, ...] = ()  # Forms that need more than 4 GB at the large size.
    tolerance: float = TOLERANCE
    """Largest disagreement of forms that are timed. It is large where the loss chooses pairs by the
    order of their distances, which is another for each form where two are equal but for rounding.
    """
    own: tuple[Size, ...] = ()  # Sizes of which PyTorch's forms are not measured.
    value_only: bool = False  # It has no gradient.

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Positions of the arrays that gradients are taken for."""
        varied = ("logits", "features", "view", "own_keys", "weights", "bias")
        named = enumerate(() if self.value_only else self.arrays)
        return tuple(i for i, name in named if name in varied)

    @property
    def large(self) -> Size:
        """Ten times that of the paper."""
        return self.paper._replace(**{self.grows: 10 * getattr(self.paper, self.grows)})

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
        has_classes = "labels" in self.case.arrays or not self.size.d or not self.size.n
        numbers = self.size if has_classes else self.size[:2]
        return [self.case.name, " × ".join(f"{n:,}" for n in numbers if n), self.dtype]


def _labels(key: Array, size: Size) -> Array:
    """Classes of equal size, spread over all, in no order; each has at least four samples."""
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
    prototypes = jax.random.normal(key, (size.d, size.C))
    return prototypes / jnp.linalg.norm(prototypes, axis=0)


def _rows(key: Array, *shape: int) -> Array:
    """Features are not centred, as behind a ReLU; all norms are about √d."""
    return 0.2 + jax.random.normal(key, shape)


_normal = jax.random.normal
_DRAWS: dict[str, Callable[[Array, Size], Array]] = {
    "logits": lambda key, size: 2.0 * _normal(key, (size.n, size.C)),
    "labels": _labels,
    "targets": _targets,
    "features": lambda key, size: _rows(key, size.n, size.d),
    "view": lambda key, size: _rows(key, size.n, size.d),
    "own_keys": lambda key, size: _rows(key, size.n, _OWN_KEYS, size.d),
    "weights": lambda key, size: size.d**-0.5 * _normal(key, (size.d, size.C)),
    "bias": lambda key, size: 0.1 * _normal(key, (size.C,)),
    "prototypes": _prototypes,
    "means": lambda key, size: _normal(key, (size.d, size.C)),
    "assignment": lambda key, size: jax.random.permutation(key, size.C),
    "references": lambda key, size: _rows(key, _NUM_REFERENCES, size.d),
    "reference_labels": lambda key, size: jax.random.randint(key, (_NUM_REFERENCES,), 0, size.C),
    "seed": lambda *_: jnp.zeros((), int),
    "directions": lambda _, size: _prototypes(jax.random.key(0), size._replace(C=_DIRECTIONS)),
    "vectors": lambda key, size: jnp.linalg.qr(_normal(key, (size.d, min(size[1:]))))[0],
    "values": lambda key, size: jnp.linspace(2, 0.1, min(size[1:])),
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


def _complement(features: Array, basis: Array) -> Array:
    """Pairs in the complement of a subspace: projects the features, and their gradient."""
    gradient = _pairs(features - product(product(features, basis), basis.T))
    return product(product(gradient, basis), basis.T)


def _references(features: Array, _labels: Array, references: Array, *_: Array) -> Array:
    """All inner products with 1024 references at a time."""
    blocks = references.reshape(-1, 1024, references.shape[1])
    return lax.map(lambda block: product(product(features, block.T), block), blocks)


def _groups(features: Array, labels: Array, weights: Array, _bias: Array) -> object:
    """A linear layer for the features of each group; on a CPU, the others are 0."""
    parts = jnp.concatenate([features] * GROUPS)
    if platform() == "cpu":  # Where masks take a seventh of the time.
        groups = jnp.arange(features.shape[1]) % GROUPS == jnp.arange(GROUPS)[:, None]
        parts = jnp.where(groups[None], features[:, None, :], 0).reshape(parts.shape)
    return _linear(parts, labels, weights)


def _sketch(features: Array, _seed: Array, directions: Array) -> Any:
    """Projections on 128 directions at a time, their cosines and sines, and the gradient."""

    def step(gradient: Array, block: Array) -> tuple[Array, Any]:
        angles = product(features, block)
        every = [
            f(3 / (_POINTS - 1) * k * angles) for k in range(_POINTS) for f in (jnp.cos, jnp.sin)
        ]
        return gradient + product(angles, block.T), [jnp.mean(x, axis=0) for x in every]

    blocks = jnp.moveaxis(directions.reshape(len(directions), -1, 128), 1, 0)
    return lax.scan(step, jnp.zeros_like(features), blocks)


FLOORS: dict[str, Callable[..., Any]] = {
    "pass": lambda scored, *_: 2 * scored,  # Reads what is scored, and writes as much.
    "exponential": lambda z, *_: jnp.exp(-jnp.abs(z)),  # Which costs more than the memory.
    "linear": _linear,  # 3 products n·d·C.
    "class means": lambda x, y: _linear(x, y, x[:BASE_CLASSES].T),  # 3 products n·d·C.
    "pairs": _pairs,  # 2 products n·n·d.
    "references": _references,  # 2 products n·m·d for m references.
    "two sides": lambda a, b, *_: products(a, b.T, of_columns=True),  # 3 products n·n·d.
    # 4 and 3 products n·d·d.
    "covariances": lambda *views: [products(x.T, x, of_columns=False) for x in views],
    "correlations": lambda a, b: products(a.T, b, of_columns=True),
    "sketch": _sketch,  # 2 products n·d·1024, and 2·17 cosines of each number of the first.
    # 3 products n·d·C, 2 of n·n·d.
    "sum": lambda *arrays: (_linear(*arrays), _pairs(*arrays)),
    # 6 products n·d·C, 2 of n·n·d, one of C·C·d: the logits are the coordinates.
    "direct sum": lambda x, y, w, _: (_linear(x, y, w), _complement(x, w), product(w.T, w)),
    # 3 products n·d·C, 2 of n·n·d, 4 of n·d·d; not the singular vectors.
    "spectral sum": lambda x, y, w, *_: (_linear(x, y, w), _complement(x, w[:, : len(w)])),
    "groups": _groups,  # 3 products G·n·d·C.
    "cosines": lambda means, prototypes: product(means.T, prototypes),  # One product C·d·C.
}
"""What a loss and its gradient cannot avoid, as functions of the loss's arrays."""


def _at_temperature_d(loss: Callable[..., Array], **options) -> Callable[..., Array]:
    """A loss on squared distances, which grow with d: d is therefore the temperature."""
    return lambda features, labels, **common: loss(
        features, labels, temperature=float(features.shape[1]), **options, **common
    )


_nca = _at_temperature_d(jaxloss.nca_loss)
_means = partial(_at_temperature_d, jaxloss.prototypical_loss)
_margin_softmax = partial(jaxloss.margin_softmax_loss, margin=MARGIN, scale=SCALE)
_direct = partial(jaxloss.direct_sum_loss, metric_loss=_nca)
_spectral = partial(jaxloss.spectral_sum_loss, metric_loss=_nca)
_info_nce = jaxloss.info_nce_loss
_supcon = jaxloss.supervised_contrastive_loss
_arcface = partial(
    jaxloss.classifier_loss, similarity="cosine", angular_margin=ANGLE, scale=FACE_SCALE
)


def _with_basis(*arrays: Array) -> Array:
    *arguments, vectors, values = arrays
    return _spectral(*arguments, basis=jaxloss.SpectralBasis(vectors, values))


def _on_prototypes(name: str, loss: Callable[..., Array], size: Size) -> Case:
    def assigned(x: Array, y: Array, prototypes: Array, assignment: Array) -> Array:
        return loss(x, y, prototypes, assignment=assignment)

    return Case(name, assigned, size, (*_PAIR, "prototypes", "assignment"), "pass")


def _sigreg(features: Array, seed: Array, _directions: Array) -> Array:
    """Draws its directions, which PyTorch's form is given."""
    return jaxloss.sigreg_loss(features, jax.random.key(seed), num_directions=_DIRECTIONS)


def _with_metrics(queries: Array, keys: Array) -> Array:
    value, metrics = _info_nce(queries, keys, metrics=True)
    return value + 0 * sum(metrics)  # XLA does not see that this adds nothing.


def _optax_softmax(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _optax_sigmoid(logits: Array, targets: Array) -> Array:
    if targets.ndim == 1:
        targets = jnp.arange(logits.shape[1]) == targets[:, None]
    return optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=1).mean()


def _optax_multilabel(logits: Array, targets: Array) -> Array:
    proportions = targets / jnp.sum(targets, axis=1, keepdims=True)
    return optax.softmax_cross_entropy(logits, proportions).mean()


_PAIR = ("features", "labels")
_LAYER = (*_PAIR, "weights", "bias")
_on_logits = partial(Case, arrays=("logits", "labels"), floor="exponential", grows="C")
_on_targets = partial(Case, arrays=("logits", "targets"), floor="exponential")
_on_pairs = partial(Case, arrays=_PAIR, floor="pairs")
_on_layer = partial(Case, arrays=_LAYER, floor="linear")
_on_proxies = partial(Case, arrays=_LAYER[:3], floor="linear")
_on_views = partial(Case, arrays=("features", "view"), floor="two sides")
_on_triplets = partial(_on_pairs, tolerance=0.3)  # Two nearest negatives can be as near.

_MINI = Size(512, 640, BASE_CLASSES)  # mini-ImageNet, ResNet-12.
_INAT = Size(512, 640, 908)  # iNaturalist2017, ResNet-12.
_COCO = Size(512, 0, 80)
_METRIC = Size(512, 512, BASE_CLASSES)  # 8 samples of each class.
_VIEWS = Size(512, 512, 0)  # Two views or modalities.
_CUB = Size(512, 512, 100)
_OWN_NCA = Size(16_384, 640, BASE_CLASSES), Size(65_536, 64, BASE_CLASSES)
_OWN_CLASSIFIER = tuple(Size(256, 512, 10**k) for k in (4, 5, 6))

CASES: tuple[Case, ...] = (
    # ImageNet, tiered-ImageNet, and twice mini-ImageNet.
    _on_logits("softmax", jaxloss.softmax_loss, Size(256, 0, 1000), optax=_optax_softmax),
    _on_logits("sigmoid", jaxloss.sigmoid_loss, Size(512, 0, 351), optax=_optax_sigmoid),
    _on_logits("margin_softmax", _margin_softmax, Size(256, 0, BASE_CLASSES)),
    _on_proxies(
        "cosine_margin_softmax",
        lambda x, y, w: _margin_softmax(jaxloss.cosine_logits(x, w), y),
        Size(256, 640, BASE_CLASSES),
    ),
    _on_pairs("nca", _nca, _MINI, own=_OWN_NCA),
    Case(
        "nca_references",
        lambda x, y, m, n: _nca(x, y, references=m, reference_labels=n),
        Size(256, 128, BASE_CLASSES),
        (*_PAIR, "references", "reference_labels"),
        "references",
    ),
    _on_pairs("prototypical", _means(num_classes=BASE_CLASSES), _MINI, floor="class means"),
    _on_pairs("prototypical_by_samples", _means(), _MINI, floor="class means"),
    _on_layer("sum", partial(jaxloss.sum_loss, metric_loss=_nca), _MINI, floor="sum"),
    _on_layer("direct_sum", _direct, _MINI, floor="direct sum"),
    _on_layer(
        "direct_sum_stopped", partial(_direct, stop_gradient=True), _MINI, floor="direct sum"
    ),
    _on_layer("spectral_sum", _spectral, _INAT, floor="spectral sum"),
    _on_layer(
        "spectral_sum_stopped", partial(_spectral, stop_gradient=True), _INAT, floor="spectral sum"
    ),
    Case(
        "spectral_sum_with_basis",
        _with_basis,
        _INAT,
        (*_LAYER, "vectors", "values"),
        "spectral sum",
    ),
    _on_layer(  # ImageNet.
        "classifier",
        jaxloss.classifier_loss,
        Size(256, 512, 1000),
        composition=lambda x, y, w, b: jaxloss.softmax_loss(jaxloss.linear_logits(x, w, b), y),
        own=_OWN_CLASSIFIER,
    ),
    _on_layer(  # ImageNet, ResNet-50.
        "group_softmax",
        partial(jaxloss.group_softmax_loss, num_groups=GROUPS),
        Size(256, 2048, 1000),
        floor="groups",
        grows="C",
    ),
    # ImageNet; CIFAR-100-LT, ResNet-32.
    _on_prototypes("prototype", jaxloss.prototype_loss, Size(1024, 512, 1000)),
    _on_prototypes("dot_regression", jaxloss.dot_regression_loss, Size(128, 64, 100)),
    _on_targets("sigmoid_of_targets", jaxloss.sigmoid_loss, _COCO, optax=_optax_sigmoid),
    _on_targets("two_way", jaxloss.two_way_loss, _COCO),
    _on_targets("sample_wise", jaxloss.sample_wise_loss, _COCO),
    _on_targets("class_wise", jaxloss.class_wise_loss, _COCO),
    _on_targets(
        "multilabel_softmax", jaxloss.multilabel_softmax_loss, _COCO, optax=_optax_multilabel
    ),
    _on_targets("asymmetric", jaxloss.asymmetric_loss, _COCO),
    _on_targets("warp", jaxloss.warp_loss, _COCO, floor="pass"),
    _on_targets("robust_multilabel", jaxloss.robust_multilabel_loss, _COCO, floor="pass"),
    _on_pairs("supervised_contrastive", _supcon, _METRIC),
    _on_pairs(
        "nt_xent",
        partial(_supcon, denominator="negatives"),
        _METRIC,
        optax=partial(optax.losses.ntxent, temperature=0.1),
        small_only=("optax",),
    ),
    # The least that a loss of two towers can take: what the products of each library take.
    _on_views("products", lambda a, b: jnp.mean(product(a, b.T) ** 2), _VIEWS),
    _on_views("info_nce", _info_nce, _VIEWS),
    # Beside the loss alone, in the column of compositions.
    _on_views("info_nce_metrics", _with_metrics, _VIEWS, composition=_info_nce),
    _on_views(
        "info_nce_own_keys",
        lambda queries, keys, own: _info_nce(queries, keys, own_keys=own),
        _VIEWS,
        arrays=("features", "view", "own_keys"),
    ),
    _on_views("sigmoid_contrastive", jaxloss.sigmoid_contrastive_loss, _VIEWS),
    _on_pairs("multi_similarity", jaxloss.multi_similarity_loss, _METRIC),
    _on_pairs("circle", jaxloss.circle_loss, _METRIC),
    _on_triplets("triplet_hard", partial(jaxloss.triplet_loss, mining="hard"), _METRIC),
    _on_triplets("triplet_semihard", partial(jaxloss.triplet_loss, mining="semihard"), _METRIC),
    _on_pairs(
        "triplet_all", partial(jaxloss.triplet_loss, mining="all"), _METRIC, small_only=("PML",)
    ),
    _on_proxies("proxy_anchor", jaxloss.proxy_anchor_loss, _CUB),
    _on_proxies("proxy_nca", jaxloss.proxy_nca_loss, _CUB),
    _on_proxies("arcface", _arcface, Size(512, 512, 10_572)),  # CASIA-WebFace.
    _on_views("vicreg", jaxloss.vicreg_loss, _VIEWS, floor="covariances"),
    _on_views("barlow_twins", jaxloss.barlow_twins_loss, _VIEWS, floor="correlations"),
    Case("sigreg", _sigreg, _VIEWS, ("features", "seed", "directions"), "sketch"),
)

_RESNET_50 = Size(4_096, 2_048, 1_000)  # ImageNet.
_CUB_MARGIN = Size(4_096, 640, 100)  # Or all classes of mini-ImageNet; ResNet-12.
_MULTI_LABEL = tuple(case.name for case in CASES if "targets" in case.arrays)

FOR_ACCELERATORS: tuple[Case, ...] = (
    _on_layer(
        "group_softmax_random",
        lambda x, y, w, b: jaxloss.group_softmax_loss(
            *(x, y, w, b),
            num_groups=GROUPS,
            # A key that is known would be a constant, and with it all groups.
            groups=jaxloss.random_groups(jax.random.key(y[0]), len(x), x.shape[1], GROUPS),
        ),
        _RESNET_50,
        floor="groups",
    ),
    Case(
        "discriminative_groups",
        partial(jaxloss.discriminative_groups, num_groups=GROUPS),
        _RESNET_50,
        _LAYER[:3],
        "pass",
        value_only=True,
    ),
    Case(
        "assign_prototypes",
        jaxloss.assign_prototypes,
        Size(0, 512, 1_000),
        ("means", "prototypes"),
        "cosines",
        value_only=True,
    ),
    _on_proxies(
        "linear_margin_softmax",
        lambda x, y, w: _margin_softmax(jaxloss.linear_logits(x, w), y),
        _CUB_MARGIN,
    ),
)
"""What no table of a CPU has: it has no form in PyTorch, and one size."""


def _accelerator_rows() -> list[Problem]:
    """The most important ones first: the losses that most use, at a medium size."""
    pairs: Sequence[str] = "nca", "supervised_contrastive", "info_nce", "sigmoid_contrastive"
    layers: Sequence[str] = "classifier", "arcface"
    small, medium, large = (
        dict.fromkeys(pairs, Size(n, 512, n // 8)) | dict.fromkeys(layers, Size(m, 512, C))
        for n, m, C in [(512, 512, 10**4), (8_192, 4_096, 10**5), (32_768, 1_024, 10**6)]
    )
    others = {"multi_similarity": Size(8_192, 512, 1_024), "prototypical": Size(8_192, 512, 64)}
    others |= dict.fromkeys(("proxy_anchor", "proxy_nca"), Size(4_096, 512, 10_000))
    others |= {"group_softmax": _RESNET_50}
    order: Any = [("bfloat16", sizes) for sizes in (medium, small, large)]
    order += [("float32", sizes) for sizes in (medium, small)]
    order += [("bfloat16", others), ("mixed", {"classifier": medium["classifier"]})]
    order += [("float32", large), ("float32", others)]
    sums: Sequence[str] = "sum", "direct_sum", "spectral_sum_with_basis", "spectral_sum"
    papers = {"group_softmax_random": _RESNET_50, "discriminative_groups": _RESNET_50}
    papers |= dict.fromkeys(sums, _RESNET_50)
    papers |= dict.fromkeys(("prototype", "dot_regression"), Size(4_096, 512, 1_000))
    papers |= {"assign_prototypes": Size(0, 512, 1_000), "sigreg": Size(4_096, 512, 0)}
    papers |= dict.fromkeys(_MULTI_LABEL, Size(4_096, 0, 1_000))
    papers |= dict.fromkeys(("linear_margin_softmax", "cosine_margin_softmax"), _CUB_MARGIN)
    order += [("bfloat16", papers), ("float32", papers)]
    named = {case.name: case for case in (*CASES, *FOR_ACCELERATORS)}
    return [
        Problem(named[name], size, dtype, "accelerator")
        for dtype, sizes in order
        for name, size in sizes.items()
    ]


def problems_of(
    names: Sequence[str], group: Group, dtype: Dtype | Literal[""] = ""
) -> list[Problem]:
    """The rows of a group, or those with the names and the dtype among them.

    Raises a `ConfigError` for a name of no row.
    """
    if group == "accelerator":
        rows = _accelerator_rows()
    else:
        sizes: dict[Group, list[tuple[Case, Size]]] = {
            "paper": [(case, case.paper) for case in CASES],
            "large": [(case, case.large) for case in CASES],
            "own": [(case, size) for case in CASES for size in case.own],
        }
        groups = sizes if group == "all" else (group,)
        rows = [Problem(*of, "float32", each) for each in groups for of in sizes[each]]
    known = list(dict.fromkeys(row.case.name for row in rows))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"unknown loss {unknown[0]!r}; choose from {', '.join(known)}")
    return [row for row in rows if row.case.name in (names or known) and dtype in ("", row.dtype)]
