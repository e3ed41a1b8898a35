"""Statistics of pairs in tiles equal those of plain arrays, with all derivatives."""

from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.core import products
from jaxloss.pairs import LOGSUMEXP, SUM, ByClass, Pair, Statistic, visits
from jaxloss.pairs.fused import in_two_stages, weighted_sum
from jaxloss.pairs.rows import Rows, anchors_and_references
from jaxloss.pairs.statistics import similarity_of
from jaxloss.pairs.visits import Sides, in_both_directions, largest_of, rows_at, statistics_of
from tests.jaxloss.harness import QUICK, P, compiled, enable_x64, over_mesh
from tests.jaxloss.references import overlaps as jaccard
from tests.tolerances import FLOAT32

DEVICES = 4


def scaled(pair, params):
    return pair.similarity * params["scale"]


def curved(pair, params):
    """Differs by class, and is not linear."""
    return of_class(pair.similarity, pair.same, params)


def of_class(similarities, positives, params):
    bent = jnp.square(similarities - params["shift"])
    return jnp.where(positives, -bent, similarities * params["scale"] + bent / 4)


def against(pair, params):
    """Differs by anchor, with a weight of the pair."""
    return of_anchor(pair, params, pair.anchor["level"], pair.anchor["slope"])


def of_anchor(pair, params, level, slope):
    gaps = level - pair.similarity * params["scale"]
    return pair.same.astype(gaps.dtype) * jax.nn.softplus(gaps) + pair.similarity * slope


def between(pair, params):
    """Differs by both rows, in floats and in integers."""
    gap = pair.anchor["level"] - 2 * pair.reference["slope"] * pair.similarity
    return jnp.where(pair.anchor["step"] > pair.reference["step"], gap, params["shift"] * gap)


def above(pair, params):
    s, positives = pair.similarity, pair.same.astype(bool)
    return jnp.where(positives, 0.3 - s, s) > pair.anchor["slope"]


def level(first):
    """The log-sum-exp of the negatives, or 0."""
    sums, _ = first
    return jnp.where(jnp.isfinite(sums.negative), sums.negative, 0)


def relative(pair, params):
    return of_anchor(pair, params, pair.anchor, jnp.tanh(pair.anchor))


STATISTICS = (Statistic(LOGSUMEXP, curved), Statistic(SUM, curved))
STAGES = (Statistic(LOGSUMEXP, curved), Statistic(SUM, scaled)), level, (Statistic(SUM, relative),)
OF_NUMBERS = (
    Statistic(LOGSUMEXP, against, above),
    Statistic(SUM, against),
    Statistic(SUM, between),
)
MOST = 3
"""Statistics of a case."""
NEGATIVES = (Statistic(SUM, curved),)
BY_KIND = {"plain": STATISTICS, "numbers": OF_NUMBERS, "stages": STATISTICS, "weights": NEGATIVES}


def make_rows(rng, n, dim=5, positions=None, multi_hot=False) -> Any:
    labels = rng.integers(0, 3, n).astype(np.int32)
    labels[: n // 4] = -1
    valid = (labels >= 0) & (np.arange(n) != n - 2)
    positions = np.arange(n, dtype=np.int32) if positions is None else positions
    if multi_hot:
        labels = rng.integers(-1, 2, (n, 4)).astype(np.int32)
    return rng.normal(0.4, 0.7, (n, dim)) * (5 / dim) ** 0.5, labels, valid, positions


PARAMS = {"scale": np.float64(1.3), "shift": np.float64(0.2)}


def plain(statistics, params, anchors, references, similarity):
    """The statistics by arrays of all pairs, written another way."""
    products = anchors.features @ references.features.T
    if similarity != "inner":
        gaps = anchors.features[:, None, :] - references.features[None, :, :]
        products = -jnp.sum(gaps**2, axis=2)
    used = anchors.valid[:, None] & references.valid[None, :]
    used &= anchors.positions[:, None] != references.positions[None, :]
    if anchors.labels.ndim == 1:
        overlaps = same = anchors.labels[:, None] == references.labels[None, :]
    else:
        labels, of_anchors = (np.asarray(rows.labels) for rows in (references, anchors))
        overlaps = jnp.array([jaccard(y, labels) for y in of_anchors])
        same = overlaps > 0
    reductions = {
        LOGSUMEXP: lambda v, m: jax.nn.logsumexp(v, axis=1, where=m),
        SUM: lambda v, m: jnp.sum(v, axis=1, where=m),
    }
    results = []
    pair = Pair(
        products,
        {
            "same": overlaps,
            "anchor": jax.tree.map(lambda x: x[:, None], anchors.numbers),
            "reference": jax.tree.map(lambda x: x[None, :], references.numbers),
        },
    )
    for statistic in statistics:
        values = statistic.value(pair, params)
        reduce = reductions[statistic.reduction]
        mask = used if statistic.mask is None else used & statistic.mask(pair, params)
        results.append(ByClass(reduce(values, mask & same), reduce(values, mask & ~same)))
    return tuple(results)


def combine(results, weights):
    """A scalar of the statistics of the anchors that have them."""
    total = 0.0
    for pair, factor in zip(results, weights, strict=True):
        for values, numbers in zip(pair[:2], factor, strict=True):
            finite = values != -jnp.inf
            total += jnp.sum(jnp.where(finite, jnp.sin(jnp.where(finite, values, 0)) * numbers, 0))
    return total


def without_exists(results):
    return tuple(ByClass(found.positive, found.negative) for found in results)


def arrays(rows) -> Any:
    return None if rows is None else Rows(*map(jnp.asarray, rows))


def direction_of(leaves):
    """A constant."""
    return jax.lax.stop_gradient(jax.tree.map(lambda x: jnp.cos(3 * x + 1), leaves))


def derivatives(scalar, leaves):
    """The results beside a scalar, its gradient, and a product of its Hessian."""
    direction = direction_of(leaves)
    gradient = jax.grad(scalar, has_aux=True)
    (gradients, results), (product, _) = jax.jvp(gradient, (leaves,), (direction,))
    return results, gradients, product


def problem(seed, n=8, m=None, multi_hot=False, dim=5) -> Any:
    rng = np.random.default_rng(seed)
    anchors = make_rows(rng, n, dim, multi_hot=multi_hot)
    elsewhere = np.full(m or 0, -1, np.int32)
    references = None if m is None else make_rows(rng, m, dim, elsewhere, multi_hot)
    weights = rng.normal(size=(MOST, 2, n))
    numbers = {name: rng.normal(0.2, 0.8, n) for name in ("level", "slope")}
    return anchors, references, weights, numbers | {"step": rng.permutation(n)}


OFTEN = (
    ("inner", None, 3, "stages"),
    ("inner", 7, 3, "weights"),
)
SELDOM = (
    ("negative_squared_distance", 7, 3, "plain"),
    ("inner", None, None, "stages, multi-hot"),
    ("negative_squared_distance", None, None, "plain"),
    ("inner", None, 3, "numbers, multi-hot"),
    ("inner", None, None, "numbers"),
    ("negative_squared_distance", 7, 3, "numbers, multi-hot"),
    ("negative_squared_distance", 7, 3, "stages"),
    ("negative_squared_distance", 7, None, "weights"),
)


@pytest.mark.parametrize(
    ("similarity", "m", "block_size", "kind"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OFTEN),
        *(pytest.param(*case, marks=pytest.mark.long) for case in SELDOM),
    ],
)
def test_statistics_and_derivatives(similarity, m, block_size, kind):
    statistics = BY_KIND[kind.partition(",")[0]]
    # From 256 dimensions on, the gradient of references is another product on a CPU.
    dim = 260 if kind == "weights" else 5
    anchors, references, weights, numbers = problem(80, m=m, multi_hot="multi-hot" in kind, dim=dim)
    with enable_x64(True):
        anchors, references = arrays(anchors), arrays(references)
        weights = jnp.asarray(weights[: MOST if "stages" in kind else len(statistics)])
        params = jax.tree.map(jnp.asarray, PARAMS)
        numbers = jax.tree.map(jnp.asarray, numbers)
        floats = {name: numbers[name] for name in ("level", "slope")}
        step = {"step": numbers["step"]}
        given = floats if "numbers" in kind else floats["level"] if kind == "weights" else None
        inputs = (params, anchors.features, None if m is None else references.features, given)
        of_others = None if m is None else jax.tree.map(lambda x: x[:m], numbers)

        def with_numbers(sides, given):
            sides = sides._replace(anchors=sides.anchors._replace(numbers=given | step))
            if sides.references is None:
                return sides
            return sides._replace(references=sides.references._replace(numbers=of_others))

        def tiled(params, own, other, given):
            others: Any = None if other is None else references._replace(features=other)
            sides = Sides(anchors._replace(features=own), others, similarity, block_size=block_size)
            if kind == "weights":
                of_negatives = Statistic(
                    SUM, lambda p, params: of_class(p.similarity, False, params)
                )
                sides = sides._replace(of_towers=True)
                total, _ = weighted_sum(sides, params, of_negatives, given)
                return (ByClass(total[None], total[None]),)
            if "stages" in kind:
                return without_exists(sum(in_two_stages(sides, params, *STAGES), ()))
            sides = with_numbers(sides, given) if "numbers" in kind else sides
            return without_exists(statistics_of(sides, params, statistics))

        def untiled(params, own, other, given):
            rows = anchors._replace(features=own)
            if "numbers" in kind:
                rows = rows._replace(numbers=given | step)
            others = (
                rows if other is None else references._replace(features=other, numbers=of_others)
            )
            if kind == "weights":
                (sums,) = plain(NEGATIVES, params, rows, others, similarity)
                return (ByClass(*2 * [jnp.sum(given * sums.negative)[None]]),)
            if "stages" not in kind:
                return plain(statistics, params, rows, others, similarity)
            first = plain(STAGES[0], params, rows, others, similarity)
            rows = rows._replace(numbers=level(first))
            return first + plain(STAGES[2], params, rows, others, similarity)

        def scalar(statistics, inputs):
            results = statistics(*inputs)
            return combine(results, weights), results

        def along(inputs):
            """A product of the Hessian by reverse mode."""
            gradient, _ = jax.grad(partial(scalar, tiled), has_aux=True)(inputs)
            products = jax.tree.map(jnp.vdot, gradient, direction_of(inputs))
            return sum(jax.tree.leaves(products))

        got, expected = (
            jax.jit(partial(derivatives, partial(scalar, f)), compiler_options=QUICK)(inputs)
            for f in (tiled, untiled)
        )
        by_reverse = jax.jit(jax.grad(along), compiler_options=QUICK)(inputs)
    assert kind == "weights" or any(np.isinf(x).any() for x in jax.tree.leaves(expected[0]))
    chex.assert_trees_all_close(got, expected, rtol=1e-8, atol=1e-10)
    chex.assert_trees_all_close(by_reverse, expected[2], rtol=1e-8, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("similarity", "block_size", "axis_name"),
    [
        ("negative_squared_distance", 3, None),
        ("inner", 2, "b"),
    ],
)
def test_statistics_in_both_directions(similarity, block_size, axis_name):
    """They are those of anchors and references, and of references and anchors."""
    anchors, references, weights, _ = problem(82, n=8, m=12)
    weights = weights[: len(STATISTICS)]
    of_references = np.random.default_rng(83).normal(size=(len(STATISTICS), 2, 12))
    with enable_x64(True):
        anchors, references = arrays(anchors), arrays(references)
        params = jax.tree.map(jnp.asarray, PARAMS)
        inputs = (params, anchors, references, *map(jnp.asarray, (weights, of_references)))

        def sides(own, others, axis_name=None):
            options: Any = {"block_size": block_size, "axis_name": axis_name}
            return Sides(own, others, similarity, **options)

        def at_once(statistics, params, *rows, axis_name=None):
            return in_both_directions(sides(*rows, axis_name=axis_name), params, statistics)

        def one_by_one(statistics, params, *rows):
            return tuple(
                statistics_of(sides(*both), params, statistics) for both in (rows, rows[::-1])
            )

        def run(both, total, params, anchors, references, *weights):
            def scalar(leaves):
                params, own, other = leaves
                rows = anchors._replace(features=own), references._replace(features=other)
                results = both(STATISTICS, params, *rows)
                value = sum(combine(*pair) for pair in zip(results, weights, strict=True))
                return total(value), results

            return derivatives(scalar, (params, anchors.features, references.features))

        spread = partial(run, at_once, lambda value: value)
        if axis_name is not None:
            rows, of_weights = P(axis_name), P(None, None, axis_name)
            total = partial(jax.lax.psum, axis_name=axis_name)
            spread = over_mesh(
                partial(run, partial(at_once, axis_name=axis_name), total),
                (P(), rows, rows, of_weights, of_weights),
                (rows, (P(), rows, rows), (P(), rows, rows)),
                names=(axis_name,),
            )
        alone = partial(run, one_by_one, lambda value: value)
        got, expected = (jax.jit(f, compiler_options=QUICK)(*inputs) for f in (spread, alone))
    chex.assert_trees_all_close(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("block_size", [None, 2, 3])
def test_the_first_of_the_largest_values(block_size):
    """By class, among the anchors themselves; the rows 1, 2 and 3 are equally far from row 0."""
    features = jnp.array([[0.0], [1.0], [-1.0], [1.0], [3.0], [jnp.nan], [5.0]])
    labels, valid = jnp.array([0, 0, 0, 0, 1, 0, 2]), jnp.arange(7) != 5
    rows = Rows(jnp.nan_to_num(features), labels, valid, jnp.arange(7))
    sides = Sides(rows, None, "negative_squared_distance", block_size=block_size)
    values, positions = jax.jit(
        lambda rows: largest_of(
            sides._replace(anchors=rows),
            lambda pair, _: jnp.where(pair.same, pair.similarity, -pair.similarity),
        )
    )(rows)
    assert values.positive.tolist() == [-1, 0, -1, 0, *3 * [-np.inf]]
    assert positions.positive[:4].tolist() == [1, 3, 0, 1]
    assert values.negative[::2].tolist() == [25, 36, 16, 36]
    assert positions.negative[::2].tolist() == [6, 6, 2, 2]


def test_products_may_depend_on_the_order_of_their_factors(monkeypatch):
    """Some compilers add up `x · y` and `y · x` differently, by which a largest value is missed."""

    def product(a, b):
        products = plain(a, b)
        above = jnp.triu(jnp.ones(products.shape, bool))
        return jnp.where(above, products * (1 + 2 * jnp.finfo(products.dtype).eps), products)

    def gradient(block_size):
        loss = partial(jaxloss.triplet_loss, labels=jnp.arange(12) % 3, block_size=block_size)
        return jax.jit(jax.grad(lambda x: loss(x)))(features)

    plain = products.wide_product
    features = jnp.asarray(np.random.default_rng(7).normal(size=(12, 5)), jnp.float32)
    for block_size in (None, 5):
        expected = gradient(block_size)
        with monkeypatch.context() as patch:
            patch.setattr(products, "wide_product", product)
            chex.assert_trees_all_close(gradient(block_size), expected, atol=8 * FLOAT32)


@pytest.mark.parametrize("way", ["gathered", "ring"])
@pytest.mark.parametrize("block_size", [None, 2])
def test_largest_values_over_devices(way, block_size, monkeypatch):
    """NaN is the largest. The rows of references are found, and get their gradients."""
    monkeypatch.setattr(visits, "GATHERED_BYTES", GATHERED_BYTES[way])
    rng = np.random.default_rng(84)
    x, r = (jnp.asarray(rng.integers(-2, 3, (n, 2)), jnp.float32) for n in (8, 12))
    r = r.at[7].set(jnp.nan)
    y, of_references = jnp.arange(8) % 3, jnp.arange(12) % 3

    def run(x, y, r, of_references, axis_name=None):
        given = r, of_references, jnp.ones(len(r), bool)
        valid = jnp.ones(len(x), bool)
        anchors, references = anchors_and_references(x, y, valid, given, axis_name, load=True)
        sides = Sides(anchors, references, "inner", block_size=block_size, axis_name=axis_name)
        found = largest_of(sides, similarity_of)
        return found, rows_at(found[1].positive, r, axis_name)

    spread = over_mesh(partial(run, axis_name="b"), P("b"), P("b"), names=("b",))
    (found, rows), (expected, _) = (jax.jit(f)(x, y, r, of_references) for f in (spread, run))
    chex.assert_trees_all_equal(found, expected)
    positions = found[1].positive
    assert (positions == 7).tolist() == (y == 1).tolist()
    np.testing.assert_array_equal(rows, r[positions])
    pull = jax.jit(jax.grad(lambda r: jnp.sum(jnp.sin(spread(x, y, r, of_references)[1]))))
    counts = jnp.bincount(positions, length=12)[:, None].astype(r.dtype)
    np.testing.assert_allclose(pull(r), jnp.where(counts > 0, counts * jnp.cos(r), 0), rtol=1e-6)


# Devices ----

# The references of all devices are gathered, or passed around.
GATHERED_BYTES = {"gathered": 2**30, "ring": 0}


def nca_problem(with_references):
    """Features are inputs times a kernel; devices differ in their numbers of valid rows."""
    rng = np.random.default_rng(81)
    n = DEVICES * 5
    batch = {
        "inputs": rng.normal(size=(n, 3)),
        "labels": rng.integers(-1, 3, n).astype(np.int32),
        "where": np.arange(n) % 5 < np.arange(n) // 5 + 1,
    }
    if with_references:
        m = DEVICES * 3
        batch["references"] = rng.normal(size=(m, 3))
        batch["reference_labels"] = rng.integers(-1, 3, m).astype(np.int32)
        batch["reference_where"] = np.arange(m) % 4 != 1
    params = {"kernel": rng.normal(size=(3, 6)), "temperature": np.float64(1.7)}
    return params, batch


def nca_derivatives(axis_name, block_size, params, batch):
    """Of the mean loss; queries and references share the kernel."""

    def mean(params):
        given = dict(batch)
        for name in ("inputs", "references"):
            if name in given:
                given[name] = given[name] @ params["kernel"]
        value = jaxloss.nca_loss(
            given.pop("inputs"),
            given.pop("labels"),
            temperature=params["temperature"],
            axis_name=axis_name,
            block_size=block_size,
            **given,
        )
        return value, value

    value, *of_params = derivatives(mean, params)
    return value, of_params if axis_name is None else jax.lax.pmean(of_params, axis_name)


@cache
def on_one_device(with_references):
    with enable_x64(True):
        run = jax.jit(partial(nca_derivatives, None, None))
        return jax.tree.map(np.asarray, run(*nca_problem(with_references)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("with_references", "how", "way"),
    [
        pytest.param(False, "pmap", "ring", marks=pytest.mark.long),
        (True, "two axes", "ring"),
        pytest.param(False, "unchecked", "ring", marks=pytest.mark.long),
        pytest.param(True, "check_vma", "ring", marks=pytest.mark.long),
        pytest.param(True, "check_vma", "gathered", marks=pytest.mark.long),
    ],
)
def test_devices(with_references, how, way, monkeypatch):
    """`test_devices.py` has all ways to spread rows that are gathered."""
    monkeypatch.setattr(visits, "GATHERED_BYTES", GATHERED_BYTES[way])
    params, batch = nca_problem(with_references)
    axes, shape = (("host", "chip"), (2, 2)) if how == "two axes" else (("b",), (DEVICES,))
    apart = how in ("pmap", "unchecked")  # The results of every device are compared.

    def step(params, batch):
        results = nca_derivatives(axes, 2, params, batch)
        return jax.tree.map(lambda x: x[None], results) if how == "unchecked" else results

    with enable_x64(True):
        if how == "pmap":
            batch = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
            results = jax.pmap(step, axis_name="b", in_axes=(None, 0))(params, batch)
        else:
            specs = (P(), P(axes)), P(axes) if apart else P()
            run = over_mesh(step, *specs, shape, axes, check_vma=how != "unchecked")
            results = jax.jit(run, compiler_options=QUICK)(params, batch)
        results = jax.tree.map(np.asarray, results)
    for device in range(DEVICES) if apart else [...]:
        result = jax.tree.map(lambda x, device=device: x[device], results)
        chex.assert_trees_all_close(result, on_one_device(with_references), rtol=1e-9)


def test_ring_holds_no_row_of_other_devices_but_one_block(monkeypatch):
    """No array of the whole batch, which is too large, in the program of a device."""
    rows, dim = 6, 11
    monkeypatch.setattr(visits, "GATHERED_BYTES", 4 * DEVICES * rows * dim - 1)
    gradient = jax.grad(partial(jaxloss.nca_loss, axis_name="batch"))
    step = over_mesh(lambda x, y: gradient(x, y), P("batch"), P("batch"))
    n = DEVICES * rows
    text, _ = compiled(step, ((n, dim), np.float32), ((n,), np.int32))
    assert "collective-permute" in text
    assert "all-gather" not in text
    assert f"{DEVICES * rows},{dim}]" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [jaxloss.nca_loss, pytest.param(jaxloss.prototypical_loss, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("axis_name", [pytest.param(None, marks=pytest.mark.long), "b"])
def test_references_that_every_device_has(loss, axis_name):
    """A support set that is not spread over the devices, beside a batch that is."""
    rng = np.random.default_rng(41)
    labels, of_references = jnp.arange(8) % 3, jnp.arange(5) % 3

    def losses(features, labels, references, of_references, axis_name=None):
        given = {"references": references, "reference_labels": of_references, "block_size": 2}
        return loss(features, labels, **given, axis_name=axis_name, reduction="none")

    specs = (P("b"), P("b"), P(), P()), P("b")
    spread = over_mesh(partial(losses, axis_name=axis_name), *specs, names=("b",))
    copies = 1 if axis_name is None else DEVICES  # With the axis, every device adds its copy.

    def total(x, r):
        return jnp.sum(jnp.cos(spread(x, labels, r, of_references)))

    def expected_total(x, r):
        copied = jnp.tile(r, (copies, 1)), jnp.tile(of_references, copies)
        return jnp.sum(jnp.cos(losses(x, labels, *copied)))

    with enable_x64(True):
        arrays = [jnp.asarray(rng.normal(size=(n, 3))) for n in (8, 5)]
        got, expected = (
            jax.jit(jax.value_and_grad(function, (0, 1)), compiler_options=QUICK)(*arrays)
            for function in (total, expected_total)
        )
    chex.assert_trees_all_close(got, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        jaxloss.prototypical_loss,
        partial(jaxloss.prototypical_loss, num_classes=3),
        *(partial(jaxloss.triplet_loss, mining=m) for m in ("hard", "semihard", "all")),
    ],
    ids=["prototypical", "num_classes", "hard", "semihard", "all"],
)
def test_no_references_at_all(loss):
    """No sample counts, as for a queue that is still empty."""
    features = jnp.asarray(np.random.default_rng(9).normal(size=(8, 3)), jnp.float32)
    nothing = {"references": features[:0], "reference_labels": jnp.zeros(0, int)}
    value, gradient = jax.jit(jax.value_and_grad(loss))(features, jnp.arange(8) % 3, **nothing)
    assert value == 0
    assert not gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [jaxloss.nca_loss, jaxloss.prototypical_loss])
def test_an_anchor_that_is_not_finite_reaches_no_other(loss):
    features = jnp.ones((4, 3)).at[2].set(jnp.nan)
    references, labels = jnp.arange(6.0).reshape(2, 3), jnp.array([0, 1])
    run = jax.jit(partial(loss, reduction="none"))
    anchors = features, jnp.array([0, 1, 1, 0])
    losses = run(*anchors, references=references, reference_labels=labels)
    assert np.isnan(losses).tolist() == [False, False, True, False]
