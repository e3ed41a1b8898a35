"""Group softmax: the features are split into groups, each of which must tell the classes apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from jaxloss import _checks
from jaxloss._batch import AxisName, Reduction, clean_rows, counting_rows, poison, reduce
from jaxloss._linear import exact_product, widen

Bound: TypeAlias = Literal["tight", "loose"]


def _prepare(
    features: Any, labels: Any, weights: Any, bias: Any, num_groups: Any
) -> tuple[Array, Array, Array, Array | None]:
    features = _checks.floating("features", features, "n d")
    weights, bias = _checks.classifier(features, weights, bias)
    labels = _checks.class_labels(labels, "features", features)
    _checks.group_count(num_groups, features.shape[1])
    if bias is None:
        features, weights = widen(features, weights)
    else:
        features, weights, bias = widen(features, weights, bias)
    return features, labels, weights, bias


def _group_logits(
    features: Array, weights: Array, bias: Array | None, groups: Array, num_groups: int
) -> Array:
    """The logits [n, G, C] of each group of features, by one product of [n·G, d] and [d, C]."""
    numbers = jnp.arange(num_groups, dtype=groups.dtype)
    is_member = groups[:, None, :] == numbers[None, :, None]
    logits = exact_product(jnp.where(is_member, features[:, None, :], 0), weights)
    return logits if bias is None else logits + (bias / num_groups)[None, None, :]


def _discriminative(features: Array, labels: Array, weights: Array, num_groups: int) -> Array:
    features, weights = lax.stop_gradient((features, weights))
    num_classes = weights.shape[1]
    own = weights.T[jnp.clip(labels, 0, num_classes - 1)]
    others = jnp.sum(weights, axis=1)[None, :] - own
    scores = features * (own - others / max(num_classes - 1, 1))  # One class alone has no others.
    return _equal_groups(_sortable_bits(scores), num_groups)


def _sortable_bits(scores: Array) -> Array:
    """Unsigned integers in the order of floats: −0 equals 0, and all NaN are one, the largest."""
    scores = jnp.where(jnp.isnan(scores), jnp.nan, scores)
    unsigned = jnp.uint64 if scores.dtype == jnp.float64 else jnp.uint32
    bits = lax.bitcast_convert_type(scores, unsigned)
    half = jnp.asarray(1 << (jnp.iinfo(unsigned).bits - 1), unsigned)  # The sign bit.
    magnitude = bits & (half - 1)
    return jnp.where(bits >= half, half - magnitude, half + magnitude)


def _group_sizes(dim: int, num_groups: int) -> list[int]:
    return [dim // num_groups + (g < dim % num_groups) for g in range(num_groups)]


def _equal_groups(keys: Array, num_groups: int) -> Array:
    """The group [n, d] of every one of the unsigned `keys` [n, d] in the ranking along d.

    XLA sorts slowly. Where group g ends is an order statistic: its key, and among equal keys its
    index, are the largest numbers that have at most the features of groups 0 to g below them.
    """
    dim = keys.shape[1]
    ends = np.cumsum(_group_sizes(dim, num_groups), dtype=np.int32)[None, :-1]
    keys = keys[:, None, :]
    index = jnp.arange(dim, dtype=keys.dtype)[None, None, :]

    def below_key(key):
        return keys < key[:, :, None]

    key = _largest(below_key, ends, keys, jnp.iinfo(keys.dtype).bits)

    def below(index_of_end):
        tied = keys == key[:, :, None]
        return below_key(key) | (tied & (index < index_of_end[:, :, None]))

    return jnp.sum(
        ~below(_largest(below, ends, keys, (dim - 1).bit_length())), axis=1, dtype=jnp.int32
    )


def _largest(
    below: Callable[[Array], Array], ends: np.ndarray, keys: Array, num_bits: int
) -> Array:
    """The largest numbers [n, G−1] of so many bits that have at most `ends` features below them."""
    powers = jnp.asarray([1 << bit for bit in reversed(range(num_bits))], keys.dtype)

    def step(number, power):
        trial = number | power
        fits = jnp.sum(below(trial), axis=2, dtype=jnp.int32) <= ends
        return jnp.where(fits, trial, number), None

    start = jnp.zeros_like(keys, shape=(keys.shape[0], ends.shape[1]))
    return lax.scan(step, start, powers)[0]


def group_softmax_loss(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None = None,
    *,
    num_groups: int,
    bound: Bound = "loose",
    groups: Int[Array, "n d"] | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Group softmax (GSL): softmax cross-entropy of each of G groups of features by itself.

    .. math:: \ell^{loose}_i = -\sum_g \log \frac{e^{z^g_{iy}}}{\sum_c e^{z^g_{ic}}}, \quad
       \ell^{tight}_i = -\frac{1}{G} \sum_g \log \frac{e^{G z^g_{iy}}}{\sum_c e^{G z^g_{ic}}}, \quad
       z^g_{ic} = \sum_{j: g_{ij} = g} W_{jc} x_{ij} + \frac{b_c}{G}

    The groups' logits sum to the whole logit, and softmax loss ≤ tight ≤ loose (Proposition 1); all
    three are the same for G = 1. It takes memory for n·G·(d + C) numbers, and G times the matrix
    products of `softmax_loss`.

    Args:
      features: `[n, d]`, any float dtype.
      labels: `[n]`, integers below C; negative ones are ignored, larger ones give NaN.
      weights: `[d, C]`, a column for each class.
      bias: `[C]`, or None.
      num_groups: G, from 1 to d.
      bound: `"loose"` is the paper's type II, better on fewer samples and classes; `"tight"` is its
        type I, better on very many.
      groups: `[n, d]`, integers: the group of every feature, 0 to G−1. A number out of that range
        gives NaN. By default, `discriminative_groups` of the other arguments.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, there are fewer features than groups, or the bound is none.

    References:
      Kobayashi, Group Softmax Loss with Discriminative Feature Grouping, WACV 2021, supplement
      eq. (A.2).

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels, weights = jnp.array([[1.0, 2.0, 0.0]]), jnp.array([0]), jnp.eye(3, 2)
      >>> for bound in ("tight", "loose"):
      ...     loss = jaxloss.group_softmax_loss(
      ...         features, labels, weights, num_groups=2, bound=bound
      ...     )
      ...     print(f"{loss:.4f}")
      2.0725
      2.4402
    """
    _checks.choice("bound", bound, ("tight", "loose"))
    features, labels, weights, bias = _prepare(features, labels, weights, bias, num_groups)
    counts = counting_rows(labels, _checks.row_mask(where, "features", features))
    features = clean_rows(features, counts)
    if groups is None:
        groups = _discriminative(features, labels, weights, num_groups)
    groups = _checks.feature_groups(groups, features)

    num_classes = weights.shape[1]
    logits = _group_logits(features, weights, bias, groups, num_groups)
    known = jnp.broadcast_to(jnp.clip(labels, 0, num_classes - 1)[:, None], logits.shape[:2])
    sharpness = num_groups if bound == "tight" else 1
    values = optax.softmax_cross_entropy_with_integer_labels(sharpness * logits, known)
    values = jnp.sum(values, axis=1) / sharpness
    # A feature in no group must not vanish silently: its sample is treated as one of no class.
    stray = jnp.any((groups < 0) | (groups >= num_groups), axis=1)
    values = poison(jnp.where(stray, num_classes, labels), counts, num_classes, values)
    return reduce(
        values, counts, sample_weights=sample_weights, reduction=reduction, axis_name=axis_name
    )


def discriminative_groups(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    weights: Float[Array, "d C"],
    num_groups: int,
) -> Int[Array, "n d"]:
    r"""Groups of features that speak for the sample's class to a like degree.

    .. math:: λ_{ij} = W_{jy} x_{ij} - \frac{1}{C-1} \sum_{c≠y} W_{jc} x_{ij}

    A sample's features are ranked by λ, lowest first, and the ranking is cut into G equal parts.
    Where G divides d, no other equal parts give a larger `Σ_g log(1 + e^{−Σ_{j∈g} λ_j})`, which is
    a lower bound of the loose group softmax loss. The ranking is that of a stable sort: ties go by
    index, lowest first, and NaN comes last. No gradient flows through it, no array of n·d·C numbers
    is needed, and nothing is sorted.

    Args:
      features: `[n, d]`, any float dtype.
      labels: `[n]`, integers; those that are no class get groups too, of no meaning.
      weights: `[d, C]`, a column for each class.
      num_groups: G, from 1 to d. Where G does not divide d, the first `d mod G` groups have one
        feature more than the others.

    Returns:
      The group of every feature, int32 `[n, d]`, 0 (least discriminative) to G−1.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or there are fewer features than groups.

    References:
      Kobayashi, Group Softmax Loss with Discriminative Feature Grouping, WACV 2021, supplement
      eq. (A.13), (A.14), Lemma 1.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, weights = jnp.array([[3.0, -1.0, 2.0, 1.0]]), jnp.ones((4, 2)).at[:, 1].set(0)
      >>> for label in (0, 1):
      ...     print(jaxloss.discriminative_groups(features, jnp.array([label]), weights, 2))
      [[1 0 1 0]]
      [[0 1 0 1]]
    """
    features, labels, weights, _ = _prepare(features, labels, weights, None, num_groups)
    return _discriminative(features, labels, weights, num_groups)


def contiguous_groups(num_samples: int, dim: int, num_groups: int) -> Int[Array, "n d"]:
    """Groups of neighbouring features, the same for every sample.

    .. math:: g_{ij} = ⌊j G / d⌋ \\quad \\text{where G divides d}

    Args:
      num_samples: n of the groups `[n, d]`.
      dim: d.
      num_groups: G, from 1 to d. Where G does not divide d, the first `d mod G` groups have one
        feature more than the others.

    Returns:
      The group of every feature, int32 `[n, d]`, 0 to G−1.

    Raises:
      TypeError: a number is no integer.
      ValueError: a number is below 1, or there are fewer features than groups.

    References:
      Kobayashi, Group Softmax Loss with Discriminative Feature Grouping, WACV 2021: a grouping to
      compare the discriminative one with.

    Example:
      >>> import jaxloss
      >>> print(jaxloss.contiguous_groups(2, 5, 2))
      [[0 0 0 1 1]
       [0 0 0 1 1]]
    """
    _checks.positive_count("num_samples", num_samples)
    _checks.group_count(num_groups, dim)
    sizes = _group_sizes(dim, num_groups)
    groups = np.repeat(np.arange(num_groups, dtype=np.int32), sizes)
    return jnp.broadcast_to(jnp.asarray(groups)[None, :], (num_samples, dim))


def random_groups(
    key: PRNGKeyArray, num_samples: int, dim: int, num_groups: int
) -> Int[Array, "n d"]:
    r"""Random groups of equal size, drawn for every sample by itself.

    .. math:: g_{ij} = ⌊π_i(j) G / d⌋ \quad \text{where G divides d, with random permutations } π_i

    Args:
      key: a key of `jax.random`, typed or of the older kind.
      num_samples: n of the groups `[n, d]`.
      dim: d.
      num_groups: G, from 1 to d. Where G does not divide d, the first `d mod G` groups have one
        feature more than the others.

    Returns:
      The group of every feature, int32 `[n, d]`, 0 to G−1.

    Raises:
      TypeError: a number is no integer, or the key is none.
      ValueError: a number is below 1, there are fewer features than groups, or more keys than one.

    References:
      Kobayashi, Group Softmax Loss with Discriminative Feature Grouping, WACV 2021: a grouping to
      compare the discriminative one with.

    Example:
      >>> import jax, jax.numpy as jnp, jaxloss
      >>> groups = jaxloss.random_groups(jax.random.key(0), 3, 8, 4)
      >>> print(groups.shape, jnp.bincount(groups[0]))
      (3, 8) [2 2 2 2]
    """
    _checks.positive_count("num_samples", num_samples)
    _checks.group_count(num_groups, dim)
    return _equal_groups(jax.random.bits(key, (num_samples, dim), jnp.uint32), num_groups)
