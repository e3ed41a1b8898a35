"""Losses of one's own, written with `jaxloss.pairs`, equal their dense forms.

Values and derivatives in float64: in tiles of 1, of 5 and of all rows, on four devices, and on an
Explicit mesh by `divided`.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Bool, Float, Integer

import jaxloss
from jaxloss import testing
from jaxloss.pairs import (
    ARGMAX,
    COUNT,
    LOGSUMEXP,
    MAX,
    MIN,
    SUM,
    Statistic,
    compare,
    compare_towers,
)
from jaxloss.testing import ContractError, check_loss
from tests.jaxloss.harness import QUICK, P, enable_x64, mesh, over_mesh, raises
from tests.tolerances import FLOAT32

N, M, DIM = 8, 12, 5
RNG = np.random.default_rng(3)
X = RNG.normal(0.2, 0.8, (N, DIM))
R = RNG.normal(0.2, 0.8, (M, DIM))
Y, L = np.array([0, 1, 2, 0, 1, 0, 3, 2]), RNG.integers(-1, 4, M)
BIAS = RNG.normal(size=M)
LEVELS = RNG.normal(size=N)
TARGETS, OF_R = RNG.integers(-1, 2, (N, 4)), RNG.integers(-1, 2, (M, 4))
Rows = Float[Array, "n d"]
Keys = Float[Array, "m d"]
Labels = Integer[Array, " n"]


# One loss of a batch and one of two towers, of any statistics, and their dense forms ----


@jaxloss.divided()
def of_pairs(
    features: Rows,
    labels: Labels | Integer[Array, "n C"],
    *,
    statistics: Any,
    references: Keys | jaxloss.Queue | None = None,
    reference_labels: Integer[Array, " m"] | Integer[Array, "m C"] | None = None,
    levels: Float[Array, " n"] | None = None,
    reference_levels: Float[Array, " m"] | None = None,
    steps: Labels | None = None,
    reference_steps: Integer[Array, " m"] | None = None,
    teacher: Float[Array, "n e"] | None = None,
    reference_teacher: Float[Array, "m e"] | None = None,
    scale: Any = 1.0,
    similarity: Any = "cosine",
    guide_similarity: Any = None,
    where: Bool[Array, " n"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Any = "mean",
    block_size: int | None = None,
    axis_name: Any = None,
):
    pairs = compare(
        features,
        labels,
        references=references,
        reference_labels=reference_labels,
        reference_where=reference_where,
        numbers=numbers_of(levels, steps),
        reference_numbers=numbers_of(reference_levels, reference_steps),
        guide=teacher,
        reference_guide=reference_teacher,
        guide_similarity=guide_similarity,
        similarity=similarity,
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    found = pairs.statistics({"scale": scale}, *statistics)
    if statistics[0].reduction == ARGMAX:
        rows: Any = features if references is None else references
        far, near = (
            jnp.sum((features - pairs.rows_at(positions, rows)) ** 2, axis=1)
            for positions in (found[0].positive, found[0].negative)
        )
        found = [found[0]._replace(positive=far, negative=-near)]
    values = total([(x.positive, x.has_positive, x.negative, x.has_negative) for x in found])
    counts = found[0].has_positive | found[0].has_negative
    return pairs.reduce(values, counts, sample_weights, reduction)


@jaxloss.divided
def of_towers(
    queries: Rows,
    keys: Keys,
    *,
    statistics: Any,
    ids: Labels | None = None,
    key_ids: Integer[Array, " m"] | None = None,
    levels: Float[Array, " n"] | None = None,
    key_levels: Float[Array, " m"] | None = None,
    teacher: Float[Array, "n e"] | None = None,
    key_teacher: Float[Array, "m e"] | None = None,
    scale: Any = 1.0,
    similarity: Any = "cosine",
    where: Bool[Array, " n"] | None = None,
    key_where: Bool[Array, " m"] | None = None,
    of_keys: bool = True,
    block_size: int | None = None,
    axis_name: Any = None,
):
    """Of the other keys of each query and, with `of_keys`, of the other queries of its key."""
    towers = compare_towers(
        queries,
        keys,
        ids=ids,
        key_ids=key_ids,
        numbers=numbers_of(levels),
        key_numbers=numbers_of(key_levels),
        guide=teacher,
        key_guide=key_teacher,
        similarity=similarity,
        where=where,
        key_where=key_where,
        block_size=block_size,
        axis_name=axis_name,
    )
    found = towers.statistics({"scale": scale}, *statistics)
    if of_keys:
        found, others = towers.statistics({"scale": scale}, *statistics, of_keys=True)
        found = *found, *(x[: queries.shape[0]] for x in others)
    values = total([(x, jnp.isfinite(x)) for x in found]) + towers.own**2
    return towers.reduce(values if towers.own_guide is None else values * towers.own_guide)


def numbers_of(levels, steps=None):
    numbers = {"level": levels} if steps is None else {"level": levels, "step": steps}
    return None if levels is None else numbers


def total(found) -> Any:
    """A number of each row, to which each statistic adds another function of itself."""
    flat = [x for of in found for x in of]
    sums = 0.0
    for k, (values, has) in enumerate(zip(flat[::2], flat[1::2], strict=True)):
        sums += jnp.where(has, jnp.sin((k + 1.5) * jnp.where(has, values, 0.0) + k), 0.0)
    return sums


def dense_of_pairs(features, labels, *, statistics, similarity="cosine", scale=1.0, **given):
    n = len(features)
    valid = given.get("where", np.ones(n, bool))
    features, levels = filled(features, valid), filled(given.get("levels"), valid)
    own = levels, given.get("steps"), given.get("teacher")
    x, of_x, theirs = features, labels, own
    used = valid[:, None] & valid[None, :] & ~np.eye(n, dtype=bool)
    if "references" in given:
        of_x = jnp.asarray(given["reference_labels"])
        theirs = [given.get(f"reference_{name}") for name in ("levels", "steps", "teacher")]
        known = jnp.any(of_x.reshape(of_x.shape[0], -1) >= 0, axis=1)
        known &= given.get("reference_where", True)
        x, used = filled(given["references"], known), valid[:, None] & known[None, :]
    if labels.ndim == 2:  # Overlaps of the classes that are known of both.
        known = (labels[:, None] >= 0) & (of_x[None] >= 0)
        either = jnp.sum(known & ((labels[:, None] > 0) | (of_x[None] > 0)), axis=2)
        both = jnp.sum(known & (labels[:, None] > 0) & (of_x[None] > 0), axis=2)
        same: Any = both / jnp.maximum(either, 1)
    else:
        same = labels[:, None] == of_x[None, :]
    of_guides = given.get("guide_similarity") or similarity
    pair = dense_pair((similarity, features, x), (of_guides, own[2], theirs[2]), used, own, theirs)
    pair.same = same
    found = dense_statistics(statistics, pair, scale, used, (same > 0, same == 0), axis=1)
    counts = found[0][1] | found[0][3]
    return jnp.sum(jnp.where(counts, total(found), 0)) / jnp.sum(counts)


def dense_of_towers(queries, keys, *, statistics, similarity="cosine", scale=1.0, **given):
    n, m = len(queries), len(keys)
    key_valid = given.get("key_where", np.ones(m, bool))
    valid = given.get("where", np.ones(n, bool)) & key_valid[:n]
    key_valid = jnp.concatenate([valid, key_valid[n:]])
    used = valid[:, None] & key_valid[None, :] & ~np.eye(n, m, dtype=bool)
    if "ids" in given:
        ids = given["ids"]
        key_ids = given.get("key_ids", jnp.concatenate([ids, np.full(m - n, -1)]))
        used &= (ids[:, None] != key_ids[None, :]) | (ids[:, None] < 0)
    queries, keys = filled(queries, valid), filled(keys, key_valid)
    own = filled(given.get("levels"), valid), None, given.get("teacher")
    theirs = filled(given.get("key_levels"), key_valid), None, given.get("key_teacher")
    s = dense_similarities(similarity, queries, keys)
    guides = similarity, own[2], theirs[2]
    pair = dense_pair((similarity, queries, keys), guides, used, own, theirs)
    found = dense_statistics(statistics, pair, scale, used, (True,), axis=1)
    if given.get("of_keys", True):
        of_keys = dense_statistics(statistics, pair, scale, used, (True,), axis=0)
        found += [[x[:n] for x in of] for of in of_keys]
    values = total(found) + jnp.diagonal(s) ** 2
    values = values if pair.guide is None else values * jnp.diagonal(pair.guide)
    return jnp.sum(jnp.where(valid, values, 0)) / jnp.sum(valid)


def filled(rows, valid):
    """Rows that do not count are NaN."""
    return rows if rows is None else jnp.where(valid.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0.5)


def dense_similarities(similarity, a, b):
    if similarity == "cosine":
        a, b = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    if similarity in ("cosine", "inner"):
        return jnp.sum(a[:, None] * b[None], axis=2)
    far = jnp.sum((a[:, None] - b[None]) ** 2, axis=2)
    return -far if "squared" in similarity else -(jnp.where(far > 0, far, 1) ** 0.5) * (far > 0)


def dense_pair(compared, guides, used, own, theirs):
    """What is a pole at a pair that does not count gets the similarity of another."""
    s = dense_similarities(*compared)
    guide = None if guides[1] is None else jax.lax.stop_gradient(dense_similarities(*guides))
    return SimpleNamespace(
        similarity=jnp.where(used, s, jax.lax.stop_gradient(jnp.max(jnp.where(used, s, -99)))),
        anchor={k: None if x is None else x[:, None] for k, x in zip(NAMES, own, strict=False)},
        reference={k: None if x is None else x[None] for k, x in zip(NAMES, theirs, strict=False)},
        guide=guide,
    )


NAMES = "level", "step"
REDUCTIONS = {
    ARGMAX: lambda v, m, axis: jnp.max(v, axis, where=m, initial=-jnp.inf),
    LOGSUMEXP: lambda v, m, axis: jax.nn.logsumexp(v, axis, where=m),
    SUM: lambda v, m, axis: jnp.sum(v, axis, where=m),
    MAX: lambda v, m, axis: jnp.max(v, axis, where=m, initial=-jnp.inf),
    MIN: lambda v, m, axis: jnp.min(v, axis, where=m, initial=jnp.inf),
    COUNT: lambda v, m, axis: jnp.sum(m, axis, dtype=v.dtype),
}


def dense_statistics(statistics, pair, scale, used, groups, axis):
    """Of each statistic, for each group of pairs: the numbers, and which rows have one."""
    found = []
    for reduction, value, mask, *_ in statistics:
        counts = used if mask is None else used & mask(pair, {"scale": scale})
        values = value(pair, {"scale": scale})
        masks = [counts & group for group in groups]
        of_groups = [(REDUCTIONS[reduction](values, m, axis), m.any(axis)) for m in masks]
        found.append([x for of in of_groups for x in of])
    return found


# What is compared ----


def bent(pair, params):
    """Differs by class, and is not linear."""
    bend = (pair.similarity - 0.2) ** 2
    return jnp.where(pair.same, -bend, params["scale"] * pair.similarity + bend / 4)


def hinge(pair, params):
    """Of distances, as in the contrastive loss of Hadsell et al."""
    s = pair.similarity
    return jnp.where(pair.same, s**2, jnp.maximum(params["scale"] + s, 0.0) ** 2)


def singular(pair, params):
    """Infinite for an anchor with itself, and divided by a number of the anchor."""
    return params["scale"] * jnp.sqrt(-pair.similarity) / pair.anchor["level"]


def between(pair, params):
    """Of the numbers of both rows."""
    own = pair.anchor["level"] ** 2
    return params["scale"] * pair.similarity * pair.reference["level"] + own


def earlier(pair, _):
    return pair.anchor["step"] >= pair.reference["step"]


def overlapping(pair, params):
    return pair.same * jax.nn.softplus(params["scale"] - pair.similarity) + bent(pair, params)


def key_logit(pair, params):
    return params["scale"] * pair.similarity + pair.reference["level"]


def weighed_key(pair, _):
    both = pair.similarity * pair.anchor["level"]
    return both - pair.reference["level"] ** 2 * pair.guide


BATCH = {"features": X, "labels": Y, "scale": np.float64(1.7)}
REFERENCES = {"references": R, "reference_labels": L}
PADDED_REFERENCES = {**REFERENCES, "reference_where": np.arange(M) != 5}
PADDED_REFERENCES["references"] = np.where(np.arange(M)[:, None] != 5, R, np.nan)
NUMBERS = {"levels": LEVELS, "steps": np.arange(N) % 3}
OF_REFERENCES = {**REFERENCES, "reference_levels": BIAS, "reference_steps": L % 2}
TOWERS = {"queries": X, "keys": R, "scale": np.float64(3.0), "key_levels": BIAS}
IDS = {"ids": Y - 1, "key_ids": np.arange(M) % 5 - 1, "levels": LEVELS}
TEACHERS = {"teacher": X[:, :2], "key_teacher": R[:, 1:3]}
SOME, KEYS = np.arange(N) % 4 != 1, np.arange(M) % 7 != 2  # Own keys, and others.
POSITIVE = {"levels": 1 + LEVELS**2}
PADDING = {"where": SOME, "features": np.where(SOME[:, None], X, np.nan)}
PADDING["levels"] = np.where(SOME, POSITIVE["levels"], np.nan)
KEY_PADDING = {"ids": Y - 1, "where": SOME, "key_where": KEYS}
KEY_PADDING |= {
    "keys": np.where(KEYS[:, None], R, np.nan),
    "key_levels": np.where(KEYS, BIAS, np.nan),
}
DISTANCE, SQUARE = "negative_distance", "negative_squared_distance"
OF_EACH = tuple(Statistic(reduction, bent) for reduction in (LOGSUMEXP, SUM, MAX))
OF_NUMBERS = (
    Statistic(SUM, between, earlier),
    Statistic(MIN, between, earlier),
    Statistic(COUNT, mask=earlier),
    Statistic(LOGSUMEXP, between, lambda pair, _: pair.similarity > pair.anchor["level"] - 0.5),
)
HINGE = (Statistic(SUM, hinge),)
SINGULAR = (
    Statistic(SUM, singular),
    Statistic(LOGSUMEXP, lambda pair, _: -jnp.log(-pair.similarity) / pair.anchor["level"]),
)
FARTHEST = (Statistic(ARGMAX, lambda p, _: jnp.where(p.same, -p.similarity, p.similarity)),)
"""The rows of the farthest positive and of the nearest negative."""
OVERLAPS = (Statistic(SUM, overlapping), Statistic(LOGSUMEXP, bent))
OF_GUIDES = (
    Statistic(SUM, lambda pair, _: (pair.similarity - pair.guide) ** 2),
    Statistic(LOGSUMEXP, mask=lambda pair, _: pair.guide > -1.0),
)
OF_KEYS = (Statistic(SUM, weighed_key), Statistic(MAX, weighed_key))
LOGITS = (Statistic(LOGSUMEXP, key_logit), Statistic(MAX, lambda pair, _: pair.similarity**2))
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "by class": (OF_EACH, {}, BATCH),
    "distances": (HINGE, {"similarity": DISTANCE}, BATCH),
    "references": (HINGE, {"similarity": DISTANCE}, BATCH | REFERENCES),
    "squares of references": (OF_EACH, {"similarity": SQUARE}, BATCH | REFERENCES),
    "singular": (SINGULAR, {"similarity": SQUARE}, BATCH | POSITIVE),
    "padding": (SINGULAR, {"similarity": SQUARE}, BATCH | PADDING),
    "farthest": (FARTHEST, {"similarity": SQUARE}, BATCH),
    "farthest of references": (FARTHEST, {"similarity": SQUARE}, BATCH | PADDED_REFERENCES),
    "both rows": (OF_NUMBERS, {"similarity": "inner"}, BATCH | NUMBERS),
    "both, of references": (OF_NUMBERS, {}, BATCH | NUMBERS | OF_REFERENCES),
    "overlaps": (OVERLAPS, {"similarity": "inner"}, BATCH | {"labels": TARGETS}),
    "overlaps with references": (
        OVERLAPS,
        {"similarity": SQUARE},
        BATCH | {"labels": TARGETS, "references": R, "reference_labels": OF_R},
    ),
    **{
        f"guide: {of}": (OF_GUIDES, {"guide_similarity": of}, BATCH | {"teacher": R[:N, :3] + 3})
        for of in (None, "inner", DISTANCE, SQUARE)
    },
    "towers": (LOGITS, {}, TOWERS),
    "as many keys": (LOGITS, {"of_keys": False}, TOWERS | {"keys": R[:N], "key_levels": BIAS[:N]}),
    "towers of ids": (OF_KEYS, {"similarity": "inner"}, TOWERS | IDS | TEACHERS),
    "padding in towers": (LOGITS[:1], {"similarity": SQUARE}, TOWERS | KEY_PADDING),
    "distances of towers": (
        (Statistic(LOGSUMEXP),),
        {"similarity": DISTANCE, "of_keys": False},
        TOWERS | {"keys": np.concatenate([X[:1], R[1:]])},  # A distance that has no gradient.
    ),
}
"""Statistics, options and arrays; with queries, of towers."""


def derivatives(loss, arrays, order=1):
    """The value, the gradients by all floats and, of order 2, products of the Hessian."""
    floats = {name: x for name, x in arrays.items() if x.dtype.kind == "f"}
    others = {name: x for name, x in arrays.items() if name not in floats}
    gradient = jax.value_and_grad(lambda floats: loss(**floats, **others))
    if order == 1:
        return jax.jit(gradient, compiler_options=QUICK)(floats)

    def along(floats):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient(floats)[1], direction)))

    def run(floats):
        first, (_, product) = jax.jvp(gradient, (floats,), (direction,))
        return (*first, product) if order == 2 else (*first, product, jax.grad(along)(floats))

    direction = jax.tree.map(lambda x: jnp.cos(3 * jnp.nan_to_num(x) + 1), floats)
    return jax.jit(run, compiler_options=QUICK)(floats)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("place", "block_size"),
    [
        ("alone", None),
        pytest.param("alone", 1, marks=pytest.mark.slow),
        pytest.param("alone", 5, marks=pytest.mark.slow),
        pytest.param("shard_map", 1, marks=pytest.mark.slow),
        pytest.param("shard_map", None, marks=pytest.mark.long),
        pytest.param("ring", 2, marks=pytest.mark.long),
        pytest.param("Explicit", 5, marks=pytest.mark.slow),
    ],
)
def test_losses_of_ones_own_equal_dense_forms(name, place, block_size, monkeypatch):
    statistics, options, arrays = CASES[name]
    of, dense = (of_towers, dense_of_towers) if "queries" in arrays else (of_pairs, dense_of_pairs)
    options = options | {"statistics": statistics}
    # Hessians in forward mode, and around the ring in reverse mode, too.
    order = {("alone", 5): 2, ("ring", 2): 3}.get((place, block_size), 1)
    loss = partial(of, block_size=block_size, **options)
    with enable_x64(True):
        arrays = {key: jnp.asarray(value) for key, value in arrays.items()}
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            expected = derivatives(partial(dense, **options), arrays, min(order, 2))
        expected = (*expected, expected[-1]) if order == 3 else expected
        if place == "ring":
            monkeypatch.setattr("jaxloss.pairs.visits.GATHERED_BYTES", 0)
        if place in ("shard_map", "ring"):
            loss = jaxloss.sharded_loss(loss, mesh(), "batch")
        elif place == "Explicit":
            of = partial(NamedSharding, mesh(kind=AxisType.Explicit))
            places = {key: of(P("batch") if x.ndim else P()) for key, x in arrays.items()}
            arrays = jax.device_put(arrays, places)
        got = derivatives(loss, arrays, order)
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("place", ["alone", "Explicit", "shard_map"])
def test_a_queue_takes_the_place_of_references(place):
    """Of seven places, which do not spread evenly over four devices, and one empty.

    Its numbers and guides are as its rows: the same on every device, each of which takes a share.
    """
    x, y, ages = jnp.asarray(X, jnp.float32), jnp.asarray(Y), jnp.linspace(0.5, 2, 7)
    queue = jaxloss.push(jaxloss.make_queue(7, DIM), jnp.asarray(R[:6], jnp.float32), y[:6])
    used = jnp.arange(7) != 1
    is_known = place != "Explicit"  # Where annotations spread the numbers as those of references.

    def value(pair, params):
        more = pair.similarity * pair.reference["level"] + pair.guide if is_known else 0.0
        return hinge(pair, params) + more

    def options(x, queue, ages) -> Any:
        more = {"teacher": x[:, :2], "reference_teacher": queue.features[:, :2]}
        more |= {"reference_levels": ages, "guide_similarity": "inner"}
        given = {"statistics": (Statistic(SUM, value),), "similarity": DISTANCE, "scale": 2.0}
        return given | {"reference_where": used} | (more if is_known else {})

    def loss(x, y, ages, queue, **more):
        return of_pairs(x, y, references=queue, **options(x, queue, ages), **more)

    def dense(x, ages):
        rows = {"references": queue.features, "reference_labels": queue.labels}
        return dense_of_pairs(x, y, **rows, **options(x, queue, ages))

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = jax.value_and_grad(dense, (0, 1))(x, ages)
    rows, run = (x, y), loss
    if place == "Explicit":
        rows = jax.device_put(rows, NamedSharding(mesh(kind=AxisType.Explicit), P("batch")))
    elif place == "shard_map":
        run = over_mesh(partial(loss, axis_name="batch"), (P("batch"), P("batch"), P(), P()), P())

    def both(x, ages, features):
        return run(x, rows[1], ages, queue._replace(features=features))

    got, grads = jax.jit(jax.value_and_grad(both, (0, 1, 2)))(rows[0], ages, queue.features)
    chex.assert_trees_all_close((got, grads[:2]), expected, rtol=1e-4, atol=1e-5)
    assert not np.any(np.asarray(grads[2]))


def test_losses_of_ones_own_keep_the_contract(monkeypatch):
    """In what the dense forms do not show."""
    rules = ("jit", "masks", "padding_leaks", "device_gradients")
    monkeypatch.setattr(testing, "RULES", [r for r in testing.RULES if r.name in rules])
    loss = partial(of_pairs, statistics=OF_EACH)

    def rows(rng, n):
        return rng.normal(size=(n, DIM)), rng.integers(0, 3, n)

    check_loss(loss, rows)
    with pytest.raises(ContractError, match="mask"):
        check_loss(lambda x, y, *, where=None, **options: loss(x, y, **options), rows)


@pytest.mark.parametrize("block_size", [None, 2])
@pytest.mark.parametrize(
    ("similarity", "value", "mask"),
    [
        ("inner", lambda pair, _: -jnp.log(pair.similarity), None),
        ("inner", lambda pair, _: 1 / pair.similarity, lambda pair, _: pair.similarity > 0.3),
        (SQUARE, lambda pair, _: jnp.sqrt(1 + pair.similarity), None),
        ("inner", lambda pair, _: pair.similarity / jnp.abs(pair.anchor - pair.reference), None),
        ("inner", lambda pair, _: (pair.similarity - pair.guide) ** 2 / -pair.guide, None),
        (
            "inner",
            lambda pair, _: jnp.sqrt(pair.anchor - pair.similarity),
            lambda pair, _: pair.similarity < pair.anchor,
        ),
        (
            "inner",
            lambda pair, _: pair.similarity * pair.reference / (pair.reference - 1),
            lambda pair, _: pair.reference < 0.9,
        ),
    ],
    ids=["log", "inverse", "root", "gap", "guide", "limit", "masked"],
)
def test_values_may_have_a_pole_anywhere(similarity, value, mask, block_size):
    """Pairs that do not count get nothing at which a value might have no derivative.

    With these numbers, no pair has a squared distance of 1 or more. Some tiles have no pair.
    """
    x = jax.nn.softmax(jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32))
    numbers, labels = jnp.array([0.3, 0.9, 0.2, 1.0, 0.5, 0.4]), jnp.array([0, 0, 1, 1, 2, 3])

    def loss(x, numbers):
        options: Any = {"guide": x[:, :2], "guide_similarity": SQUARE, "similarity": similarity}
        pairs = compare(x, labels, numbers=numbers, block_size=block_size, **options)
        (sums,) = pairs.statistics((), Statistic(SUM, value, mask))
        return jnp.sum(sums.positive)

    def of_pairs_alone(x, numbers):
        """The pairs that count, one beside the other."""
        i, j = jnp.array([0, 1, 2, 3]), jnp.array([1, 0, 3, 2])
        s, guide = (
            jnp.diag(dense_similarities(*of))
            for of in ((similarity, x[i], x[j]), (SQUARE, x[i, :2], x[j, :2]))
        )
        pair = SimpleNamespace(similarity=s, anchor=numbers[i], reference=numbers[j])
        pair.guide = jax.lax.stop_gradient(guide)
        used = np.arange(4) if mask is None else np.flatnonzero(mask(pair, ()))
        pair = SimpleNamespace(**{name: array[used] for name, array in vars(pair).items()})
        return jnp.sum(value(pair, ()))

    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, numbers)
    with jax.numpy_rank_promotion("allow"):
        expected = jax.value_and_grad(of_pairs_alone, (0, 1))(x, numbers)
    chex.assert_trees_all_close(got, expected, rtol=64 * FLOAT32, atol=64 * FLOAT32)


def test_a_pole_beside_an_infinite_row():
    """Pairs that do not count get no infinite similarity, whose value would be 0 times infinity."""
    rows = jnp.array([[1.0, 0.0], [0.5, 0.5], [jnp.inf, 0.0], [0.25, 1.0]])
    compared = compare(rows, jnp.array([0, 0, 1, 1]), similarity="inner")

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def loss(exponents):
        log = lambda pair, _: pair.anchor * jnp.log(pair.similarity)  # noqa: E731
        powers = Statistic(SUM, log, lambda pair, _: pair.same)
        (sums,) = compared.given(exponents).statistics((), powers)
        return jnp.sum(sums.positive[:2]), sums.positive

    gradients, values = loss(jnp.array([2.0, 3.0, 1.0, 1.0]))
    log = np.log(np.float32(0.5))
    np.testing.assert_allclose(values, [2 * log, 3 * log, np.inf, np.inf], rtol=FLOAT32)
    np.testing.assert_allclose(gradients[:2], log, rtol=FLOAT32)


@pytest.mark.parametrize("block_size", [None, 32])
def test_each_row_has_a_gradient_by_its_largest_value(block_size):
    """Also where XLA rounds a value otherwise when it looks for its place."""
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.float32)

    def value(pair, _):
        return pair.similarity + pair.similarity * pair.similarity

    def loss(rows):
        pairs = compare(rows, jnp.arange(64), block_size=block_size)
        return jnp.sum(pairs.statistics((), Statistic(MAX, value))[0].negative)

    def dense(rows):
        units = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
        s = jnp.max(jnp.where(np.eye(64, dtype=bool), -0.5, units @ units.T), axis=1)
        return jnp.sum(s + s * s)

    got, expected = (jax.jit(jax.grad(f))(rows) for f in (loss, dense))
    chex.assert_trees_all_close(got, expected, rtol=64 * FLOAT32, atol=16 * FLOAT32)


@pytest.mark.parametrize("reduction", [SUM, LOGSUMEXP, MIN, MAX])
def test_a_value_of_another_dtype_is_converted(reduction):
    rows, labels = jnp.asarray(X[:6], jnp.float32), jnp.array([0, 0, 1, 1, 2, 2])

    def loss(rows, value):
        (sums,) = compare(rows, labels).statistics((), Statistic(reduction, value))
        return jnp.sum(jnp.where(sums.has_positive, sums.positive, 0))

    def of_low(pair, _):
        return (2 * pair.similarity).astype(jnp.bfloat16)

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1, compiler_options=QUICK)
    for value in (lambda pair, _: pair.same, of_low):
        wide = run(rows, lambda *given, value=value: value(*given).astype(jnp.float32))
        chex.assert_trees_all_equal(run(rows, value), wide)


def test_a_distance_of_zero_has_no_gradient():
    x, y = jnp.asarray(np.repeat(X[:2], 2, axis=0), jnp.float32), jnp.array([0, 0, 0, 0])
    loss = partial(of_pairs, statistics=(Statistic(SUM, hinge),), similarity=DISTANCE)
    value, gradient = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(x, y)
    assert float(value) != 0
    assert np.all(np.isfinite(gradient))
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x[:2], jnp.arange(2)), 0)


def test_a_distance_below_its_rounding_is_zero():
    """Of rows that are equal, far from the mean of all."""
    rows = np.random.default_rng(5).normal(size=(8, 64))
    x, labels = jnp.asarray(np.tile(rows, (2, 1)), jnp.float32), jnp.arange(16) % 8
    compared = partial(compare, labels=labels, similarity=DISTANCE)
    (found,) = jax.jit(lambda x: compared(x).statistics((), Statistic(SUM)))(x)
    np.testing.assert_array_equal(found.positive, 0)
    assert np.all(np.asarray(found.negative) < -14 * 8)


def test_wrong_arguments_are_named():
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y)
    pairs, towers = compare(x, y), compare_towers(x, x)
    batch, of_keys, rows = partial(compare, x, y), partial(compare_towers, x), x[:, 0]
    both, own = {"references": x, "reference_labels": y}, Statistic(SUM).value

    def refused(match, function: Any, *arguments, error: Any = ValueError, **options):
        with raises(error, match):
            function(*arguments, **options)

    def refused_value(match, value: Any = own, mask: Any = None, of: Any = pairs, **options):
        refused(match, of.statistics, 2.0, Statistic(SUM, value, mask), **options)

    refused("`similarity` must be one of inner, .*, got 'l2'", batch, similarity="l2")
    refused("`block_size` must be at least 1, got 0", batch, block_size=0)
    refused(r"`numbers` .*\[n\] with n = 8, got \(7,\)", pairs.given, x[:7, 0])
    refused("`labels` and `features` must have the same number of rows", compare, x, y[:3])
    refused("`reference_numbers` must come with `ref", batch, reference_numbers=rows)
    refused("`reference_guide` must come with `references`", batch, reference_guide=x)
    refused("`reference_guide` is missing", batch, guide=x, **both)
    refused("`guide_similarity` must be one of", batch, guide=x, guide_similarity="l2")
    refused(r"`key_numbers` .* m = 8, got \(3,\)", of_keys, x, key_numbers=rows[:3])
    refused("`keys` must have shape .* with m at least 8", of_keys, x[:3])
    refused("`ids` is missing beside `key_ids`", of_keys, x, key_ids=y)
    refused("`result` must be one of", jaxloss.divided, result="mean")
    refused("`bent` must take `axis_name=None`", jaxloss.divided, bent, error=TypeError)
    is_row = r"element by element.*\(8, 8\).*result of shape \(8,\)"
    refused_value(is_row, lambda pair, _: pair.similarity.sum(1))
    refused_value(is_row, mask=lambda pair, _: pair.same[0])
    for scalar in (lambda pair, _: pair.similarity.sum(), lambda _, scale: scale, lambda *_: None):
        refused_value(r"element by element.*for all pairs is jnp.full_like", scalar)
    refused_value("`mask` of a statistic must return bool, got float32", mask=own, error=TypeError)
    of_params = "`params` must be numbers or float arrays, got a Statistic"
    refused(of_params, pairs.statistics, Statistic(SUM), error=TypeError)
    for of in (pairs, towers):
        for no_statistic in (own, Statistic("sum")):  # pyright: ignore[reportArgumentType]
            match = r"`statistics` must be of `Statistic\(reduction, value\)`"
            refused(match, of.statistics, (), no_statistic, error=TypeError)
    for name in ("anchor", "reference", "guide"):
        match = rf"`pair\.{name}` is not known here: pass `"
        refused_value(match, lambda pair, _, name=name: getattr(pair, name))
    match = "`pair.same` is not known here: keys have no class"
    refused_value(match, lambda pair, _: pair.same, of=towers)
    refused(r"`values` must have shape \[n\], got \(8, 8\)", pairs.reduce, x @ x.T, y >= 0)
    refused("`counts` must have dtype bool", pairs.reduce, rows, rows, error=TypeError)
    refused("`counts` and `queries` must have the same", towers.reduce, rows, y[:3] >= 0)


def test_a_number_is_the_value_of_all_pairs():
    one: Any = lambda *_: 1  # noqa: E731
    pairs = compare(jnp.asarray(X, jnp.float32), jnp.asarray(Y))
    numbers, arrays = pairs.statistics((), Statistic(SUM, one), Statistic(COUNT))
    np.testing.assert_array_equal(numbers.negative, arrays.negative)


class OwnLoss:
    """As `nca_loss`, with no more annotations than are needed."""

    @staticmethod
    def of_rows(embeddings: Rows, classes: "Integer[Array, ' n']", *, t: "Unknown" = 1.0, **more):  # noqa: F821  # pyright: ignore
        return jaxloss.nca_loss(embeddings, classes, temperature=t, **more)

    @staticmethod
    def of_references(features: Rows, labels: Labels, references: Float[Array, "m d"], **more):
        return jaxloss.nca_loss(features, labels, references=references, **more)

    @staticmethod
    def other_letters(embeddings: Float[Array, "b k"], classes: Integer[Array, " b"], **more):
        return jaxloss.nca_loss(embeddings, classes, **more)

    def __call__(self, features: Rows, labels: Labels, **more):
        return self.of_rows(features, labels, **more)


def on_devices(loss, way):
    """The loss, and arrays that devices divide."""
    rows = jnp.asarray(X, jnp.float32), jnp.asarray(Y)
    if way == "sharded_loss":
        return jaxloss.sharded_loss(loss, mesh(), "batch"), rows
    explicit = NamedSharding(mesh(kind=AxisType.Explicit), P("batch"))
    return jaxloss.divided(loss), jax.device_put(rows, explicit)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sharded_loss", "divided"])
@pytest.mark.parametrize("loss", [OwnLoss.of_rows, OwnLoss()], ids=["function", "object"])
def test_an_array_without_an_annotation_is_copied(way, loss):
    """Here a queue, whose rows count once: of as many places as the batch, some of them empty."""
    queue = jaxloss.make_queue(N, DIM)
    queue = jaxloss.push(queue, jnp.asarray(R[:5], jnp.float32), jnp.asarray(Y[:5]))
    options: Any = {"references": queue, "t": jnp.asarray(0.7)}

    def total(function, x, y):
        losses = function(x, y, reduction="none", **options)
        return jnp.sum(jnp.sin(losses)), losses

    spread, rows = on_devices(loss, way)
    alone = jax.value_and_grad(partial(total, OwnLoss.of_rows), has_aux=True)
    expected = alone(jnp.asarray(X, jnp.float32), jnp.asarray(Y))
    got = jax.jit(jax.value_and_grad(partial(total, spread), has_aux=True))(*rows)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)
    assert way == "sharded_loss" or got[0][1].sharding.spec == P("batch")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sharded_loss", "divided"])
def test_errors_say_what_to_annotate(way):
    r, of_r = jnp.asarray(R, jnp.float32), jnp.asarray(L)
    given = {"references": r, "reference_labels": of_r}
    own = partial(OwnLoss.of_rows, **given)
    first = r'the first argument, .* `{}: Float\[Array, "n d"\]`'
    copied = r'no annotation .* write `{}: Shaped\[Array, "n ..."\]` .* "m ..." for references'
    for loss, options, message in (
        (OwnLoss.other_letters, {}, first.format("embeddings")),
        (lambda x, y, axis_name=None: jnp.sum(x), {}, first.format("x")),
        (OwnLoss(), {"where": jnp.arange(N) > 2}, copied.format("where")),
        (OwnLoss.of_references, given, copied.format("reference_labels")),
        (OwnLoss.of_rows, given, copied.format("references")),
        (jaxloss.sum_loss, {"weights": r[:DIM].T, "metric_loss": own}, copied.format("references")),
    ):
        spread, rows = on_devices(loss, way)
        with raises(ValueError, message):
            jax.jit(partial(spread, **options))(*rows)


@pytest.mark.slow
@pytest.mark.parametrize("m", [N, M, M + 1])
def test_keys_without_a_mask(m):
    keys = np.concatenate([R, R[:1]])[:m]
    q, k = jnp.asarray(X, jnp.float32), jnp.asarray(keys, jnp.float32)

    def without_mask(queries: Rows, keys: Float[Array, "m d"], *, axis_name=None):
        return jaxloss.info_nce_loss(queries, keys, axis_name=axis_name)

    run = jax.jit(jaxloss.sharded_loss(without_mask, mesh(), "batch"))
    if m <= M:
        np.testing.assert_allclose(run(q, k), jaxloss.info_nce_loss(q, k), rtol=1e-5)
        return
    with raises(ValueError, "`keys` has 13 rows, .* over the 4 devices; .* take `key_where"):
        run(q, k)


def test_references_of_float64_beside_features_of_float32():
    """A traced temperature keeps its bits, too."""
    with enable_x64(True):
        x, y, r = jnp.asarray(X, jnp.float32), jnp.asarray(Y), jnp.asarray(R)
        run = partial(jaxloss.nca_loss, references=r, reference_labels=jnp.asarray(L))
        got, expected = (
            jax.jit(lambda x, t: run(x, y, temperature=t))(rows, 0.7)
            for rows in (x, x.astype(jnp.float64))
        )
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_second_derivatives_of_far_pairs():
    """Relative to the nearest pair, the exponential of an anchor with itself would overflow."""
    x, y = jnp.asarray(100 * X, jnp.float32), jnp.asarray(Y)
    gradient = jax.grad(jaxloss.nca_loss)
    product = jax.jit(jax.grad(lambda x: jnp.vdot(gradient(x, y), x)))(x)
    assert np.all(np.isfinite(product))
    assert np.any(product)


@pytest.mark.parametrize("denominator", ["all", "negatives"])
def test_an_overlap_below_one_is_a_weight(denominator):
    """A single positive has all of the weight, as with class indices."""
    x, labels = jnp.asarray(X[:4], jnp.float32), jnp.array([0, 0, 1, 1])
    targets = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1]])
    loss = partial(jaxloss.supervised_contrastive_loss, x, denominator=denominator)
    np.testing.assert_allclose(loss(targets), loss(labels), rtol=1e-5)
