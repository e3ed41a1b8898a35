"""Metric losses on proxies: one learned vector per class, with which samples are compared."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Integer

from jaxloss.core import batch, checks
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.linear import product_with_columns, widen
from jaxloss.core.logsumexp import logsumexp, softplus, softplus_where
from jaxloss.core.products import low_dtypes
from jaxloss.core.sharding import divided
from jaxloss.losses.logits import cosines, gaps_to_own


@divided
def proxy_anchor_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    proxies: Float[Array, "d C"],
    *,
    margin: Number = 0.1,
    scale: Number = 32.0,
    normalize: bool = True,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""]:
    r"""Proxy Anchor loss: each proxy pulls its hardest positives and pushes its hardest negatives.

    .. math:: \ell =
       \mathrm{mean}_{c ∈ C_+} \log\Big(1 + \sum_{y_i = c} s_i e^{-β (z_{ic} - δ)}\Big)
       + \mathrm{mean}_c \log\Big(1 + \sum_{y_i ≠ c} s_i e^{β (z_{ic} + δ)}\Big)

    z are the cosines, and C₊ the classes of the batch. The memory grows with n·C.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices.
      proxies: `[d, C]`, one column per class: parameters that are learned, usually with a larger
        learning rate than the network.
      margin: δ, any number.
      scale: β > 0.
      normalize: Whether features and proxies are L2-normalised, so that z are cosines. With False,
        z are the inner products of what is given.
      where: A common keyword of `jaxloss`.
      sample_weights: floats `[n]`, s ≥ 0. They weight the samples inside the logarithms: weight 2
        equals the same sample twice, and weight 0 removes it. Negative weights give NaN.
      reduction: Over the classes, of each of the two terms. `"mean"` is the formula, `"sum"` has
        sums in place of the means.
      axis_name: A common keyword of `jaxloss`. Devices exchange a few numbers per class.

    Returns:
      A scalar.

    Raises:
      ValueError: If `scale` is not positive, or `reduction` is `"none"`.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels = jnp.array([[3.0, 4.0], [0.0, 2.0]]), jnp.array([0, 1])
      >>> print(f"{jaxloss.proxy_anchor_loss(features, labels, jnp.eye(2), scale=4.0):.4f}")
      2.3469

    References:
      Kim et al., Proxy Anchor Loss for Deep Metric Learning, CVPR 2020, eq. (4).
    """
    checks.no_terms("proxy_anchor_loss", reduction)
    similarities, labels, proxies, valid = _compared(
        features, labels, proxies, normalize, where, sample_weights
    )
    dtype = similarities.dtype
    margin = checks.in_range("margin", margin, dtype)
    scale = checks.in_range("scale", scale, dtype, above=0)
    log_weights = jnp.zeros_like(similarities, shape=labels.shape)
    if sample_weights is not None:
        weights = batch.weights_of_samples(sample_weights, labels.shape[0], dtype)
        log_weights = jnp.log(jnp.where(valid, weights, 1))
    num_classes = proxies.shape[1]
    # A label of C or more would be a negative of all classes.
    visible = batch.nan_where_no_class(jnp.ones_like(log_weights), labels, valid, num_classes)
    similarities = similarities * visible[:, None]
    is_own = batch.is_own_class(labels, num_classes)

    def of_classes(
        exponents: Float[Array, "n C"], members: Bool[Array, "n C"]
    ) -> tuple[Float[Array, " C"], Bool[Array, " C"]]:
        """Returns `log(1 + Σ e^v)` of each class, and whether it has a member."""
        exponents = exponents + log_weights[:, None]
        soft = logsumexp(exponents, members & valid[:, None], axis=0, axis_name=axis_name)
        not_empty = soft != -jnp.inf
        return softplus_where(not_empty, soft), not_empty

    positive, has_positive = of_classes(-scale * (similarities - margin), is_own)
    negative, _ = of_classes(scale * (similarities + margin), ~is_own)
    # Every device has the same C values, so the reductions need no axis.
    return batch.reduce(positive, has_positive, None, reduction, None) + batch.reduce(
        negative, jnp.ones_like(has_positive), None, reduction, None
    )


@divided
def proxy_nca_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    proxies: Float[Array, "d C"],
    *,
    temperature: Number = 1 / 9,
    include_own: bool = True,
    normalize: bool = True,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Proxy NCA: a softmax of the negative squared distances to the proxies of all classes.

    .. math:: \ell_i = -\log \frac{e^{-\|\hat x_i - \hat p_{y_i}\|^2 / T}}
       {\sum_c e^{-\|\hat x_i - \hat p_c\|^2 / T}}

    The memory grows with n·C.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices.
      proxies: `[d, C]`, one column per class: parameters that are learned.
      temperature: T > 0.
      include_own: Whether the sum has the class y itself, as in ProxyNCA++. Without it (ProxyNCA),
        the loss can be negative; without `normalize`, it is not bounded below.
      normalize: Whether features and proxies are L2-normalised.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `temperature` is not positive, or `include_own=False` comes with one proxy.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, labels = jnp.array([[3.0, 4.0], [0.0, 2.0]]), jnp.array([0, 1])
      >>> losses = jaxloss.proxy_nca_loss(
      ...     features, labels, jnp.eye(2), temperature=1.0, reduction="none"
      ... )
      >>> print(np.asarray(losses).round(4))
      [0.913  0.1269]

    References:
      Movshovitz-Attias et al., No Fuss Distance Metric Learning using Proxies, ICCV 2017, eq. (7).
      Teh et al., ProxyNCA++, ECCV 2020 (the own class in the sum, T = 1/9).
    """
    similarities, labels, proxies, valid = _compared(features, labels, proxies, normalize, where)
    temperature = checks.in_range("temperature", temperature, similarities.dtype, above=0)
    num_classes = proxies.shape[1]
    if num_classes == 1 and not include_own:
        raise ValueError(
            "`proxies` must have at least 2 columns with include_own=False, which leaves out the "
            f"own one, got shape {proxies.shape}"
        )
    # ‖x‖² is the same for all proxies of a sample, and cancels. ‖p̂‖² is 1, or 0 for a zero vector.
    squared = jnp.sum(proxies * proxies, axis=0)
    if normalize:
        squared = lax.stop_gradient(
            jnp.max(jnp.abs(proxies), axis=0) > jnp.finfo(proxies.dtype).tiny
        ).astype(squared.dtype)
    logits = (1 / temperature) * (2 * similarities - squared[None, :])
    gaps = gaps_to_own(logits, batch.is_own_class(labels, num_classes))
    values = softplus(gaps) if include_own else gaps
    values = batch.nan_where_no_class(values, labels, valid, num_classes)
    return batch.reduce(values, valid, sample_weights, reduction, axis_name)


def _compared(
    features: Any,
    labels: Any,
    proxies: Any,
    normalize: bool,
    where: Any,
    sample_weights: Any = None,
) -> tuple[Float[Array, "n C"], Integer[Array, " n"], Float[Array, "d C"], Bool[Array, " n"]]:
    """Checks the arguments. Returns cosines or products, the labels, the proxies, and the mask.

    With `sample_weights`, those of weight 0 are not in the mask.
    """
    features, labels, valid = batch.checked_rows("features", features, labels, where)
    proxies = checks.matching("proxies", proxies, "d C", features)
    low = low_dtypes(features, proxies)
    features, proxies = widen(features, proxies)
    if sample_weights is not None:
        weights = batch.weights_of_samples(sample_weights, labels.shape[0], features.dtype)
        valid = valid & (weights != 0)
    if normalize:
        return cosines(features, proxies, low, valid), labels, proxies, valid
    products = product_with_columns(batch.zero_invalid(features, valid), proxies, low)
    return products, labels, proxies, valid
