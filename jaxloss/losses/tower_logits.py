"""Logits of two towers, with the options of their losses: what becomes of similarities.

A logit is `line(s_ij) + b_j`, with a bias b of the key, and of a negative also `+ h · sg(s_ij)`.
The positives of a query are its own key, or all keys of its id. Its negatives are the others, but
for those that are left out: of its id, or more similar than its own key by a margin, also to a
guide. Keys that a query alone sees are further negatives, and so may the other queries be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxloss.core import checks
from jaxloss.core.batch import sum_over
from jaxloss.core.linear import l2_normalize
from jaxloss.core.logsumexp import is_on, logsumexp, softplus
from jaxloss.core.products import wide_product
from jaxloss.losses.contrastive_metrics import (
    ContrastiveMetrics,
    Watched,
    contrastive_metrics,
    num_others,
    watched,
)
from jaxloss.pairs.statistics import COUNT, LOGSUMEXP, SUM, ByClass, Pair, PairReduction, Statistic
from jaxloss.pairs.towers import Towers, similarities_of_rows
from jaxloss.pairs.visits import statistics_of

EqualIds: TypeAlias = Literal["ignore", "positive"]
Line: TypeAlias = Callable[[Array, Any], Array]
"""`(similarities, params)` to logits."""


class _Params(NamedTuple):
    line: Any
    hardness: Float[Array, ""] | None
    margin: Float[Array, ""] | None
    guide_margin: Float[Array, ""] | None


class _Numbers(NamedTuple):
    """Of each key, or of each query."""

    bias: Float[Array, " n"] | None = None
    upper: Float[Array, " n"] | None = None
    """The own similarity, rounded up."""
    guide: Float[Array, " n"] | None = None
    """The same of guides."""


class OwnKeys(NamedTuple):
    """The keys `[n, k]` that a query alone sees."""

    similarities: Float[Array, "n k"]
    logits: Float[Array, "n k"]
    used: Bool[Array, "n k"]


class LogSums(NamedTuple):
    """Of each query, or of each key: what a softmax over its candidates needs."""

    positive: Float[Array, " n"]
    """The log-sum-exp of the logits of its positives."""
    mean: Float[Array, " n"] | None
    """The mean of these logits; None if there is only one."""
    negative: Float[Array, " n"]
    """The log-sum-exp of the logits of its negatives; -inf if there are none."""

    @property
    def losses(self) -> Float[Array, " n"]:
        """The mean of `−log(e^a / Σ e^b)` over its positives."""
        # −log(e^a / (e^a + e^b)) = softplus(b − a) does not cancel for a small loss.
        values = softplus(self.negative - self.positive)
        return values if self.mean is None else values + (self.positive - self.mean)

    @property
    def has_negative(self) -> Bool[Array, " n"]:
        """Whether there is a negative."""
        return self.negative != -jnp.inf

    @property
    def decoupled_losses(self) -> Float[Array, " n"]:
        """The same with negatives alone in the sum. Without one, the row must not count."""
        negative = jnp.where(self.has_negative, self.negative, self.positive)
        return negative - (self.positive if self.mean is None else self.mean)

    @property
    def every(self) -> Float[Array, " n"]:
        """The log-sum-exp of all logits."""
        return self.positive + softplus(self.negative - self.positive)


class TowerLogits(NamedTuple):
    """The logits of queries and keys."""

    towers: Towers
    """With the numbers of the rows that the logits need."""
    line: Line
    params: _Params
    own: Float[Array, " n"]
    """The logit of each query and its own key."""
    has_bias: bool
    counts_pairs: bool
    """Whether the tiles must tell how many negatives there are."""
    bound: float | None
    """A number that is never below the absolute value of a logit, if one is known."""

    @property
    def of_ids(self) -> bool:
        """Whether all keys of an id are positives. Then the tiles have the own ones, too."""
        return not self.towers.how.ignores_equal

    def statistic(self, reduction: PairReduction, sign: int = 1, **options: Any) -> Statistic:
        """Returns a statistic of the logits, those of positives with this sign."""

        def value(pair: Pair, params: _Params) -> Array:
            logits = self._of_pair(pair, params)
            if sign == 1 or not self.of_ids:
                return logits
            return jnp.where(pair.same, -logits, logits)

        options |= {"bound": self.bound, "is_smooth": True, "by_row": self._mask is not None}
        return Statistic(reduction, value, self._mask, **options)

    def statistics(
        self, *statistics: Statistic, of_keys: bool = False
    ) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...] | None]:
        """Returns statistics of queries and of keys, by class."""
        how = self.towers.how._replace(both_ways=of_keys)
        rows = self.towers.anchors, self.towers.references
        return statistics_of(*rows, how, self.params, statistics)

    def watched(self) -> tuple[Statistic, ...]:
        """Returns the statistics of `metrics_of`."""

        def plain(pair: Pair, params: _Params) -> Array:
            return self._of_pair(pair, params._replace(hardness=None))

        every = watched(plain, self._mask)
        if self.counts_pairs:
            return every
        how = self.towers.how
        # `_totals` needs no tile if all similarities are products of the rows at hand.
        return every[:1] if how.similarity == "inner" and not how.is_low else every[:2]

    def _totals(self) -> ByClass:
        """Returns the sum of such similarities of each query and all other keys."""
        queries, keys, how, *_ = self.towers
        every = sum_over(jnp.sum(keys.features, axis=0), how.axis_name)
        of_all = wide_product(queries.features, every[:, None])[:, 0]
        return ByClass(self.towers.own, of_all - self.towers.own)

    def _within(self, side: int, metrics: bool) -> tuple[ByClass, ...]:
        """Returns statistics of queries over the other queries, or of own keys over other keys.

        They are the log-sum-exps of negatives, and those of `watched`.
        """
        rows, references, how, *_ = self.towers
        number = rows.valid.shape[0]
        every, positions = rows, rows.positions
        if side == 1:
            every, rows = references, jax.tree.map(lambda array: array[:number], references)
            rows = rows._replace(positions=positions)
            # Own keys without an id have one of their own here.
            alone = -2 - positions.astype(rows.labels.dtype)
            rows = rows._replace(labels=jnp.where(rows.labels < 0, alone, rows.labels))
        others = None
        if every.valid.shape[0] > number:
            further = jax.tree.map(lambda array: array[number:], every)
            others = jax.tree.map(lambda *both: jnp.concatenate(both), rows, further)
        how = how._replace(ignores_equal=True, low=(how.low[side],) * 2)
        towers = self.towers._replace(anchors=rows, references=others, how=how)
        has_bias = self.has_bias and side == 1
        logits = self._replace(towers=towers, has_bias=has_bias, counts_pairs=True)
        statistics = logits.statistic(LOGSUMEXP), *(logits.watched() if metrics else ())
        by_row = logits._mask is not None or has_bias
        statistics = tuple(statistic._replace(by_row=by_row) for statistic in statistics)
        return statistics_of(rows, others, how, self.params, statistics)[0]

    def log_sums(
        self, own_keys: OwnKeys | None, *, symmetric: bool, same_tower: bool, metrics: bool
    ) -> tuple[list[LogSums], tuple[list[ByClass], list[ByClass]]]:
        """Returns those of queries and, if `symmetric`, of keys; and what `metrics_of` takes."""
        statistics, number = [self.statistic(LOGSUMEXP)], self.towers.own.shape[0]
        if self.of_ids:
            statistics += [self.statistic(SUM), Statistic(COUNT, mask=self._mask, is_smooth=True)]
        several = (*statistics, *(self.watched() if metrics else ()))
        found = self.statistics(*several, of_keys=symmetric)
        of_sides = [side[: len(statistics)] for side in found if side is not None]
        results, of_others = [], []
        for index, (side, own) in enumerate(zip(of_sides, (own_keys, None), strict=False)):
            of_own = jax.tree.map(lambda x: x[:number], side)
            within = None
            if same_tower:
                within, *more = self._within(index, metrics and index == 0)
                of_others += more
            results.append(self.log_sums_of(*of_own, own_keys=own, within=within))
        return results, ([*found[0][len(statistics) :]], of_others)

    def log_sums_of(
        self,
        sums: ByClass,
        *of_positives: ByClass,
        own_keys: OwnKeys | None,
        within: ByClass | None = None,
    ) -> LogSums:
        """Returns them from statistics of the tiles: log-sum-exps, and of ids sums and counts."""
        negative = sums.negative
        columns = [
            (one.negative[:, None], one.has_negative[:, None]) for one in (sums, within) if one
        ]
        if own_keys is not None:
            columns.append((own_keys.logits, own_keys.used))
        if len(columns) > 1:
            values, used = (jnp.concatenate(of, axis=1) for of in zip(*columns, strict=True))
            negative = logsumexp(values, used, axis=1)
        if not self.of_ids:
            return LogSums(self.own, None, negative)
        positive, mean = jnp.where(sums.has_positive, sums.positive, 0), None
        if of_positives:
            total, count = (one.positive for one in of_positives)
            mean = total / jnp.where(count == 0, 1, count)
        return LogSums(positive, mean, negative)

    def metrics_of(
        self,
        found: tuple[list[ByClass], list[ByClass]],
        log_sums: Float[Array, " n"],
        own_keys: OwnKeys | None,
        counts: Bool[Array, " n"] | None = None,
    ) -> ContrastiveMetrics:
        """Returns the metrics of the queries.

        Args:
          found: The results of `watched` of keys, and those of other queries, or none.
          log_sums: Of all logits.
          own_keys: Further negatives.
          counts: Which queries count, beside those of padding; by default all.
        """
        (largest, *rest), of_others = found
        ones = jnp.ones_like(self.towers.own)
        if self.counts_pairs:
            total, number = rest
        else:  # All other valid keys.
            (total,) = rest or [self._totals()]
            number = ByClass(ones, (num_others(self.towers) - 1) * ones)
        if not self.of_ids:
            # An equal key in a tile, where it is rounded in another way, is a miss.
            lower = self.own - (
                self.line(_upper(self.towers), self.params.line)
                - self.line(self.towers.own, self.params.line)
            )
            largest = ByClass(lower, largest.negative)
            total = ByClass(self.towers.own, total.negative)
            number = ByClass(ones, number.negative)
        further = [one.negative for one in of_others], []
        if own_keys is not None:
            s, _, used = own_keys
            logits = self.line(s, self.params.line)
            best = jnp.max(logits, 1, where=used, initial=-jnp.inf)
            count = jnp.sum(used, 1, dtype=s.dtype)
            further = further[0], [best, jnp.sum(s, 1, where=used), count]
        for best, sums, count in filter(None, further):
            largest = ByClass(largest.positive, jnp.maximum(largest.negative, best))
            total = ByClass(total.positive, total.negative + sums)
            number = ByClass(number.positive, number.negative + count)
        counts = jnp.ones_like(log_sums, bool) if counts is None else counts
        return contrastive_metrics(self.towers, Watched(largest, total, number), log_sums, counts)

    def logits_of_own_keys(
        self, queries: Any, own_keys: Any, own_key_where: Any, own_key_guide: Any
    ) -> OwnKeys | None:
        """Checks the keys that a query alone sees, and returns their logits."""
        if own_keys is None:
            for name, value in (("where", own_key_where), ("guide", own_key_guide)):
                if value is not None:
                    raise ValueError(
                        f"`own_key_{name}` must come with `own_keys`, which is missing"
                    )
            return None
        queries = checks.floating("queries", queries, "n d")
        keys = checks.floating("own_keys", own_keys, "n k d")
        (number, dim), shape = queries.shape, keys.shape
        if (shape[0], shape[2]) != (number, dim):
            raise ValueError(
                f"`own_keys` must have shape [n, k, d] with n = {number} and d = {dim} to match "
                f"`queries` {queries.shape}, got {shape}"
            )
        valid = self.towers.anchors.valid
        used = jnp.broadcast_to(valid[:, None], shape[:2])
        if own_key_where is not None:
            used = used & checks.mask_of("own_key_where", own_key_where, "n k", shape[:2])
        queries, keys = queries.astype(self.towers.dtype), keys.astype(self.towers.dtype)
        flat = keys.reshape(-1, dim)
        similarity = self.towers.similarity
        if similarity == "cosine":
            queries = l2_normalize(queries, valid)
            flat = l2_normalize(flat, used.reshape(-1))
        else:
            queries = jnp.where(valid[:, None], queries, 0)
            flat = jnp.where(used.reshape(-1, 1), flat, 0)
        s = similarities_of_rows(similarity, queries[:, None, :], flat.reshape(shape))
        guided = self.params
        if own_key_guide is None:
            guide, guided = None, guided._replace(guide_margin=None)
        else:
            guide = self._guides_of_own_keys(own_key_guide, used)
        of_rows = jax.tree.map(lambda one: one[:, None], self.towers.anchors.numbers)
        is_used = self._is_used(s, guide, of_rows, guided)
        used = used if is_used is None else used & is_used
        return OwnKeys(s, self._logits(s, self.params), used)

    def _guides_of_own_keys(
        self, own_key_guide: Any, used: Bool[Array, "n k"]
    ) -> Float[Array, "n k"]:
        """Returns the cosines of the guides of such keys and of their queries."""
        of_queries = self.towers.anchors.guide
        guide = checks.floating("own_key_guide", own_key_guide, "n k e")
        if of_queries is None:
            raise ValueError("`guide` is missing beside `own_key_guide`")
        wanted = *used.shape, of_queries.shape[1]
        if guide.shape != wanted:
            raise ValueError(
                f"`own_key_guide` must have shape [n, k, e] = {wanted} to match `own_keys` and "
                f"`guide`, got {guide.shape}"
            )
        flat = l2_normalize(guide.astype(of_queries.dtype).reshape(-1, wanted[2]), used.reshape(-1))
        flat = lax.stop_gradient(flat).reshape(wanted)
        return similarities_of_rows("cosine", of_queries[:, None, :], flat)

    # Of a pair ----

    def _of_pair(self, pair: Pair, params: _Params) -> Array:
        """A value: the logit."""
        logits = self._logits(pair.similarity, params, pair.same if self.of_ids else None)
        return logits + pair.reference.bias if self.has_bias else logits

    def _logits(self, s: Array, params: _Params, same: Any = None) -> Array:
        """Returns logits without the bias of keys. `same` is None of negatives."""
        logits = self.line(s, params.line)
        if params.hardness is None:
            return logits
        harder = params.hardness * lax.stop_gradient(s)
        return logits + (harder if same is None else jnp.where(same, 0, harder))

    @property
    def _mask(self) -> Callable[[Pair, Any], Array] | None:
        if self.params.margin is None and self.params.guide_margin is None:
            return None

        def mask(pair: Pair, params: _Params) -> Array:
            guide = None if params.guide_margin is None else pair.guide
            used: Any = self._is_used(pair.similarity, guide, pair.of_row, params)
            return used | pair.same if self.of_ids else used

        return mask

    def _is_used(self, s: Array, guide: Any, row: _Numbers, params: _Params) -> Array | None:
        """Returns which negatives are not left out for their similarity; None for all."""
        used = None
        own: Any
        for similarity, own, margin in (
            (s, row.upper, params.margin),
            (guide, row.guide, params.guide_margin),
        ):
            if margin is not None:
                # The difference comes first: beside a large similarity, the margin would be lost.
                # A NaN stays visible.
                below = ~(similarity - lax.stop_gradient(own) > margin)
                used = below if used is None else used & below
        return used


def tower_logits(
    towers: Towers,
    line: Line,
    line_params: Any,
    *,
    bound: float | None,
    has_ids: bool,
    equal_ids: Any,
    key_bias: Float[Array, " m"] | None,
    hardness: Any,
    margin_of_false_negatives: Any,
    guide_margin: Any,
) -> TowerLogits:
    """Checks the options of a loss of two towers, and returns its logits.

    Args:
      line, line_params: Of similarities without options, as `line(s, line_params)`.
      bound: Of the absolute value of `line`, if one is known.
      has_ids: Whether ids are given.
      equal_ids, key_bias, hardness, margin_of_false_negatives, guide_margin: Options of the losses.
    """
    checks.choice("equal_ids", equal_ids, ("ignore", "positive"))
    queries, keys, dtype = towers.anchors, towers.references, towers.dtype
    if key_bias is not None:
        key_bias = checks.floating("key_bias", key_bias, "m")
        checks.same_rows("key_bias", key_bias, "keys", keys.features)
    missing = keys.labels.shape[0] - queries.labels.shape[0]  # Further keys look for no query.
    of_queries, of_keys = _Numbers(), _Numbers(key_bias)
    hardness = checks.in_range("hardness", hardness, dtype)
    margin = margin_of_false_negatives
    if margin is not None:
        margin = checks.in_range("margin_of_false_negatives", margin, dtype)
        margin = jnp.asarray(margin, dtype)
        own = lax.stop_gradient(_upper(towers))
        of_queries = of_queries._replace(upper=own)
        of_keys = of_keys._replace(upper=jnp.pad(own, (0, missing)))
    guide_margin = checks.in_range("guide_margin", guide_margin, dtype)
    if towers.own_guide is None:
        guide_margin = None
    else:
        guide_margin = -jnp.asarray(guide_margin, dtype)
        own = towers.own_guide + 16 * float(jnp.finfo(dtype).eps)  # As `_upper` of cosines.
        of_queries = of_queries._replace(guide=own)
        of_keys = of_keys._replace(guide=jnp.pad(own, (0, missing)))
    if equal_ids == "positive":  # The tiles have own keys, too, with the ids of their queries.
        positions = jnp.where(keys.positions < 0, keys.positions, ~keys.positions)
        labels = jnp.concatenate([queries.labels, keys.labels[queries.labels.shape[0] :]])
        keys = keys._replace(positions=positions, labels=labels)
    towers = towers._replace(
        anchors=queries.with_numbers(of_queries, dtype),
        references=keys.with_numbers(of_keys, dtype),
        how=towers.how._replace(ignores_equal=equal_ids == "ignore"),
    )
    if key_bias is not None or bound is None or isinstance(hardness, jax.Array):
        bound = None
    else:
        bound = bound + abs(hardness)
    harder = jnp.asarray(hardness, dtype) if is_on(hardness) else None
    params = _Params(line_params, harder, margin, guide_margin)
    own = line(towers.own, line_params)
    if key_bias is not None:
        valid = queries.valid
        own = own + jnp.where(valid, jnp.asarray(key_bias, dtype)[: valid.shape[0]], 0)
    leaves_out = margin is not None or guide_margin is not None
    counts_pairs = has_ids or leaves_out or equal_ids == "positive"
    return TowerLogits(towers, line, params, own, key_bias is not None, counts_pairs, bound)


def _rounding(towers: Towers) -> Float[Array, " n"]:
    """Returns by how much an own similarity may differ from that of an equal key in a tile."""
    own, eps = towers.own, 16 * float(jnp.finfo(towers.dtype).eps)
    if towers.similarity == "cosine":
        return jnp.full_like(own, eps)
    rows, keys = towers.anchors, towers.references
    squares = (
        jnp.sum(side.features[: own.shape[0]].astype(own.dtype) ** 2, axis=1)
        for side in (rows, keys)
    )
    rounding = eps * jnp.where(rows.valid, sum(squares), 0)
    if towers.similarity == "negative_distance":
        rounding = rounding / jnp.maximum(-own, jnp.sqrt(rounding) + eps)
    return rounding


def _upper(towers: Towers) -> Float[Array, " n"]:
    """Returns the own similarities, rounded up: an equal key is not above them."""
    return towers.own + lax.stop_gradient(_rounding(towers))
