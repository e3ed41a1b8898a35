"""Group softmax: a softmax loss for each of several groups of features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer, Key, UInt, UInt32

from jaxloss.core import batch, checks
from jaxloss.core.backend import on_cpu, platform
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.logsumexp import softplus
from jaxloss.core.products import product
from jaxloss.core.programs import compiled_once
from jaxloss.core.sharding import divided
from jaxloss.losses.logits import Classifier, gaps_to_own, widened_classifier

Bound: TypeAlias = Literal["tight", "loose"]


@divided
def group_softmax_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None = None,
    *,
    num_groups: int,
    bound: Bound = "loose",
    groups: Integer[Array, "n d"] | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Group softmax (GSL): softmax cross-entropy of each of G groups of features.

    .. math:: \ell^{loose}_i = -\sum_g \log \frac{e^{z^g_{iy}}}{\sum_c e^{z^g_{ic}}}, \quad
       \ell^{tight}_i = -\frac{1}{G} \sum_g \log \frac{e^{G z^g_{iy}}}{\sum_c e^{G z^g_{ic}}}, \quad
       z^g_{ic} = \sum_{j: g_{ij} = g} W_{jc} x_{ij} + \frac{b_c}{G}

    The logits of the groups sum to the whole logit, and softmax loss ≤ tight ≤ loose
    (Proposition 1). For G = 1 the three are equal. The loss needs memory for n·G·(d + C) numbers,
    and G times the matrix products of a linear classifier.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices.
      weights: `[d, C]`, one column per class.
      bias: `[C]`, or None.
      num_groups: G, from 1 to d.
      bound: `"loose"` (type II in the paper) or `"tight"` (type I). The paper prefers `"tight"` for
        very many samples and classes.
      groups: int `[n, d]`, the group of every feature, from 0 to G−1. Other numbers give NaN. By
        default, the `discriminative_groups` of the other arguments.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `num_groups` is not in 1 to d, or `bound` has another value.

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

    References:
      Kobayashi, Group Softmax Loss with Discriminative Feature Grouping, WACV 2021, supplement
      eq. (A.2).
    """
    checks.choice("bound", bound, ("tight", "loose"))
    labels, classifier = _checked(features, labels, weights, bias, num_groups)
    features, weights, bias, low = classifier
    valid = batch.valid_rows(labels, checks.row_mask(where, "features", features))
    features = batch.zero_invalid(features, valid)
    if groups is None:
        groups = discriminative_groups(features, labels, weights, num_groups)
    groups = checks.integers("groups", groups, "")
    hint = "; copy groups that all samples share with jnp.broadcast_to"
    checks.same_shape("groups", groups, "features", features, hint)

    num_classes = weights.shape[1]
    axis = 1 if on_cpu() else 0
    members = _members(features, groups, num_groups, axis)
    # A row for each group of each sample, by one product of [n·G, d] and [d, C].
    logits = product(members.reshape(-1, weights.shape[0]), weights, low)
    logits = logits if bias is None else logits + (bias / num_groups)[None, :]
    scale = num_groups if bound == "tight" else 1
    logits = scale * logits
    of_rows = jnp.broadcast_to(jnp.expand_dims(labels, axis), members.shape[:2]).reshape(-1)
    of_groups = softplus(gaps_to_own(logits, batch.is_own_class(of_rows, num_classes)))
    values = jnp.sum(of_groups.reshape(members.shape[:2]), axis=axis) / scale
    # A feature outside all groups must not be ignored: treat its sample as one without a class.
    outside = jnp.any((groups < 0) | (groups >= num_groups), axis=1)
    labels = jnp.where(outside, num_classes, labels)
    values = batch.nan_where_no_class(values, labels, valid, num_classes)
    return batch.reduce(values, valid, sample_weights, reduction, axis_name)


def _members(
    features: Float[Array, "n d"], groups: Integer[Array, "n d"], num_groups: int, axis: int
) -> Float[Array, "a b d"]:
    """Returns the features of each group, with 0 for the others. The groups are along the axis."""
    if axis == 0 and num_groups <= _MOST_APART:
        return jnp.stack([jnp.where(groups == group, features, 0) for group in range(num_groups)])
    numbers = jnp.arange(num_groups, dtype=groups.dtype)
    is_member = jnp.expand_dims(groups, axis) == jnp.expand_dims(numbers, (1 - axis, 2))
    return jnp.where(is_member, jnp.expand_dims(features, axis), 0)


_MOST_APART = 16
"""Groups that are masked one by one: a TPU would write the copies of a broadcast array."""


def _checked(
    features: Any, labels: Any, weights: Any, bias: Any, num_groups: Any
) -> tuple[Integer[Array, " n"], Classifier]:
    """Checks the arguments. Returns the labels, and features and classifier in one dtype."""
    features = checks.floating("features", features, "n d")
    weights, bias = checks.classifier(features, weights, bias)
    labels = checks.class_labels(labels, "features", features)
    _check_num_groups(num_groups, features.shape[1])
    return labels, widened_classifier(features, weights, bias)


def _check_num_groups(num_groups: Any, dim: Any) -> None:
    """Raises unless the features can be split into as many groups."""
    checks.positive_count("num_groups", num_groups)
    checks.positive_count("dim", dim)
    if num_groups > dim:
        raise ValueError(
            f"`num_groups` must be at most the number of features, {dim}, got {num_groups}"
        )


@divided(result="rows")
def discriminative_groups(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    weights: Float[Array, "d C"],
    num_groups: int,
) -> Int32[Array, "n d"]:
    r"""Groups of features that are similarly discriminative for the class of a sample.

    .. math:: λ_{ij} = W_{jy} x_{ij} - \frac{1}{C-1} \sum_{c≠y} W_{jc} x_{ij}

    The features of a sample are ranked by λ, lowest first, and the ranking is cut into G equal
    parts. If G divides d, no other equal parts give a larger `Σ_g log(1 + e^{−Σ_{j∈g} λ_j})`. This
    sum is a lower bound of the loose group softmax loss. Ties are ranked by index, and NaN is last.
    The groups have no gradient. No array of n·d·C numbers is needed.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices. The groups of other labels have no meaning.
      weights: `[d, C]`, one column per class.
      num_groups: G, from 1 to d. If G does not divide d, the first `d mod G` groups have one more
        feature than the others.

    Returns:
      The group of every feature, int32 `[n, d]`, from 0 (least discriminative) to G−1.

    Raises:
      ValueError: If `num_groups` is not in 1 to d.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, weights = jnp.array([[3.0, -1.0, 2.0, 1.0]]), jnp.ones((4, 2)).at[:, 1].set(0)
      >>> for label in (0, 1):
      ...     print(jaxloss.discriminative_groups(features, jnp.array([label]), weights, 2))
      [[1 0 1 0]]
      [[0 1 0 1]]

    References:
      Kobayashi, Group Softmax Loss with Discriminative Feature Grouping, WACV 2021, supplement
      eq. (A.13), (A.14), Lemma 1.
    """
    labels, classifier = _checked(features, labels, weights, None, num_groups)
    features, weights = lax.stop_gradient(classifier[:2])
    num_classes = weights.shape[1]
    own = weights.T[jnp.clip(labels, 0, num_classes - 1)]
    others = jnp.sum(weights, axis=1)[None, :] - own
    scores = features * (own - others / max(num_classes - 1, 1))
    return _equal_groups(_sortable_bits(scores), num_groups)


def contiguous_groups(num_samples: int, dim: int, num_groups: int) -> Int32[Array, "n d"]:
    r"""Groups of neighbouring features, the same for every sample.

    .. math:: g_{ij} = ⌊j G / d⌋ \quad \text{if G divides d}

    Args:
      num_samples: n of the groups `[n, d]`.
      dim: d.
      num_groups: G, from 1 to d. If G does not divide d, the first `d mod G` groups have one more
        feature than the others.

    Returns:
      The group of every feature, int32 `[n, d]`, from 0 to G−1.

    Raises:
      TypeError: If an argument is not an integer.
      ValueError: If an argument is below 1, or `num_groups` is larger than `dim`.

    Example:
      >>> import jaxloss
      >>> print(jaxloss.contiguous_groups(2, 5, 2))
      [[0 0 0 1 1]
       [0 0 0 1 1]]

    References:
      Kobayashi, Group Softmax Loss with Discriminative Feature Grouping, WACV 2021
      (baseline grouping).
    """
    checks.positive_count("num_samples", num_samples)
    _check_num_groups(num_groups, dim)
    groups = np.sort(np.arange(dim, dtype=np.int32) % num_groups)
    return jnp.broadcast_to(jnp.asarray(groups)[None, :], (num_samples, dim))


@compiled_once
def random_groups(
    key: Key[Array, ""] | UInt32[Array, " _"], num_samples: int, dim: int, num_groups: int
) -> Int32[Array, "n d"]:
    r"""Random groups of equal size, drawn independently for every sample.

    .. math:: g_{ij} = ⌊π_i(j) G / d⌋ \quad \text{if G divides d, with random permutations } π_i

    Args:
      key: A random key, from `jax.random.key` or `jax.random.PRNGKey`.
      num_samples: n of the groups `[n, d]`.
      dim: d.
      num_groups: G, from 1 to d. If G does not divide d, the first `d mod G` groups have one more
        feature than the others.

    Returns:
      The group of every feature, int32 `[n, d]`, from 0 to G−1.

    Raises:
      TypeError: If `key` is not a random key, or another argument is not an integer.
      ValueError: If an integer is below 1, or `num_groups` is larger than `dim`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxloss
      >>> groups = jaxloss.random_groups(jax.random.key(0), 3, 8, 4)
      >>> print(groups.shape, jnp.bincount(groups[0]))
      (3, 8) [2 2 2 2]

    References:
      Kobayashi, Group Softmax Loss with Discriminative Feature Grouping, WACV 2021
      (baseline grouping).
    """
    checks.positive_count("num_samples", num_samples)
    _check_num_groups(num_groups, dim)
    return _equal_groups(jax.random.bits(key, (num_samples, dim), jnp.uint32), num_groups)


def _sortable_bits(scores: Float[Array, "n d"]) -> UInt[Array, "n d"]:
    """Returns unsigned integers in the order of the floats, with −0 equal to 0 and NaN largest."""
    unsigned = jnp.uint64 if scores.dtype == jnp.float64 else jnp.uint32
    bits = lax.bitcast_convert_type(scores, unsigned)
    sign = jnp.asarray(1 << (jnp.iinfo(unsigned).bits - 1), unsigned)
    magnitude = bits & (sign - 1)
    ordered = jnp.where(bits >= sign, sign - magnitude, sign + magnitude)
    return jnp.where(jnp.isnan(scores), jnp.asarray(jnp.iinfo(unsigned).max, unsigned), ordered)


def _equal_groups(keys: UInt[Array, "n d"], num_groups: int) -> Int32[Array, "n d"]:
    """Returns the group of every key when the keys of a row are ranked and cut into equal parts.

    XLA sorts slowly, so the ends of the groups are found as order statistics. The end of group g
    is a pair of a key and, among equal keys, an index: the largest pair with at most as many
    features below it as groups 0 to g hold.
    """
    # XLA may compute the keys of each search anew, and round the scores behind them in another way.
    keys = lax.optimization_barrier(keys)
    dim = keys.shape[1]
    sizes = np.bincount(np.arange(dim) % num_groups)
    ends = np.cumsum(sizes, dtype=np.int32)[None, :-1]
    keys = keys[:, None, :]
    index = jnp.arange(dim, dtype=keys.dtype)[None, None, :]

    def below_key(key: UInt[Array, "n E"]) -> Bool[Array, "n E d"]:
        return keys < key[:, :, None]

    key = _largest(below_key, ends, keys, jnp.iinfo(keys.dtype).bits)

    def below(index_of_end: UInt[Array, "n E"]) -> Bool[Array, "n E d"]:
        tied = keys == key[:, :, None]
        return below_key(key) | (tied & (index < index_of_end[:, :, None]))

    end = _largest(below, ends, keys, (dim - 1).bit_length())
    return jnp.sum(~below(end), axis=1, dtype=jnp.int32)


def _largest(
    below: Callable[[Array], Array], ends: np.ndarray, keys: UInt[Array, "n 1 d"], num_bits: int
) -> UInt[Array, "n E"]:
    """Returns the largest numbers of `num_bits` bits with at most `ends` features below them."""
    powers = jnp.asarray([1 << bit for bit in reversed(range(num_bits))], keys.dtype)

    def step(number: UInt[Array, "n E"], power: UInt[Array, ""]) -> tuple[Array, None]:
        trial = number | power
        return jnp.where(_count(below(trial)) <= ends, trial, number), None

    start = jnp.zeros_like(keys, shape=(keys.shape[0], ends.shape[1]))
    return lax.scan(step, start, powers)[0]


def _count(mask: Bool[Array, "n E d"]) -> Int32[Array, "n E"]:
    """Returns how many features are in the mask."""
    if platform() != "tpu":
        return jnp.sum(mask, axis=2, dtype=jnp.int32)
    # The matrix unit adds up faster than a vector unit does across its lanes.
    ones = jnp.ones((mask.shape[2], 8), jnp.int8)
    return jnp.matmul(mask.astype(jnp.int8), ones, preferred_element_type=jnp.int32)[:, :, 0]
