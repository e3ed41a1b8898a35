"""Statistics of pairs in tiles equal those of plain arrays, with all derivatives."""

from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss import _tiles
from jaxloss._tiles import (
    LOGSUMEXP,
    MAX,
    SUM,
    Rows,
    Statistic,
    pair_statistics,
    statistics_in_both_directions,
)
from tests.jaxloss.harness import QUICK, P, compiled, enable_x64, mesh

DEVICES = 4


def scaled(similarities, _positives, params):
    return similarities * params["scale"]


def curved(similarities, positives, params):
    """Differs by class, and is not linear."""
    bent = jnp.square(similarities - params["shift"])
    return jnp.where(positives, -bent, similarities * params["scale"] + bent / 4)


def against(similarities, overlaps, params, given):
    """Differs by anchor, with a weight of the pair."""
    gaps = given["level"] - similarities * params["scale"]
    return overlaps.astype(gaps.dtype) * jax.nn.softplus(gaps) + similarities * given["slope"]


def above(similarities, overlaps, params, given):
    positives = overlaps.astype(bool)
    return jnp.where(positives, 0.3 - similarities, similarities) > given["slope"]


STATISTICS = (Statistic(LOGSUMEXP, curved), Statistic(SUM, curved), Statistic(MAX, scaled))
OF_GIVEN = (Statistic(LOGSUMEXP, against, above), Statistic(SUM, against))


def make_rows(rng, n, dim=5, positions=None, multi_hot=False) -> Any:
    labels = rng.integers(0, 3, n).astype(np.int32)
    labels[: n // 4] = -1
    valid = (labels >= 0) & (np.arange(n) != n - 2)
    positions = np.arange(n, dtype=np.int32) if positions is None else positions
    if multi_hot:
        labels = rng.integers(-1, 2, (n, 4)).astype(np.int32)
    return rng.normal(0.4, 0.7, (n, dim)), labels, valid, positions


PARAMS = {"scale": np.float64(1.3), "shift": np.float64(0.2)}


def jaccard(a, b):
    """Of the sets of classes that are known for both."""
    known = (a >= 0) & (b >= 0)
    union = np.sum(known & ((a > 0) | (b > 0)))
    return np.sum(known & (a > 0) & (b > 0)) / union if union else 0.0


def plain(statistics, params, anchors, references, similarity):
    """The statistics by arrays of all pairs, written another way."""
    products = anchors.features @ references.features.T
    if similarity != "product":
        gaps = anchors.features[:, None, :] - references.features[None, :, :]
        products = -jnp.sum(gaps**2, axis=2)
    used = anchors.valid[:, None] & references.valid[None, :]
    used &= anchors.positions[:, None] != references.positions[None, :]
    if anchors.labels.ndim == 1:
        overlaps = same = anchors.labels[:, None] == references.labels[None, :]
    else:
        labels = np.asarray(references.labels)
        overlaps = jnp.array([[jaccard(a, b) for b in labels] for a in np.asarray(anchors.labels)])
        same = overlaps > 0
    reductions = {
        LOGSUMEXP: lambda v, m: jax.nn.logsumexp(v, axis=1, where=m),
        SUM: lambda v, m: jnp.sum(v, axis=1, where=m),
        MAX: lambda v, m: jnp.max(v, axis=1, where=m, initial=-jnp.inf),
    }
    results = []
    given = () if anchors.given is None else (jax.tree.map(lambda x: x[:, None], anchors.given),)
    for statistic in statistics:
        values = statistic.value(products, overlaps, params, *given)
        reduce = reductions[statistic.reduction]
        mask = (
            used
            if statistic.mask is None
            else used & statistic.mask(products, overlaps, params, *given)
        )
        results.append((reduce(values, mask & same), reduce(values, mask & ~same)))
    return results


def combine(results, weights):
    """A scalar of the statistics of the anchors that have them."""
    total = 0.0
    for pair, factor in zip(results, weights, strict=True):
        for values, numbers in zip(pair, factor, strict=True):
            finite = values != -jnp.inf
            total += jnp.sum(jnp.where(finite, jnp.sin(jnp.where(finite, values, 0)) * numbers, 0))
    return total


def arrays(rows) -> Any:
    return None if rows is None else Rows(*map(jnp.asarray, rows))


def problem(seed, n=8, m=None, multi_hot=False) -> Any:
    rng = np.random.default_rng(seed)
    anchors = make_rows(rng, n, multi_hot=multi_hot)
    elsewhere = np.full(m or 0, -1, np.int32)
    references = None if m is None else make_rows(rng, m, 5, elsewhere, multi_hot)
    weights = rng.normal(size=(len(STATISTICS), 2, n))
    given = {name: rng.normal(0.2, 0.8, n) for name in ("level", "slope")}
    return anchors, references, weights, given


@pytest.mark.parametrize(
    ("similarity", "m", "block_size", "kind"),
    [
        ("product", None, 3, "plain"),
        pytest.param("negative_squared_distance", None, None, "plain", marks=pytest.mark.slow),
        pytest.param("product", 7, None, "plain", marks=pytest.mark.slow),
        ("negative_squared_distance", 7, 3, "plain"),
        pytest.param("product", None, None, "given", marks=pytest.mark.slow),
        pytest.param("product", None, 3, "given, multi-hot", marks=pytest.mark.slow),
        pytest.param("negative_squared_distance", 7, 3, "given, multi-hot", marks=pytest.mark.slow),
    ],
)
def test_statistics_and_derivatives(similarity, m, block_size, kind):
    statistics = OF_GIVEN if "given" in kind else STATISTICS
    anchors, references, weights, given = problem(80, m=m, multi_hot="multi-hot" in kind)
    with enable_x64(True):
        anchors, references = arrays(anchors), arrays(references)
        weights = jnp.asarray(weights[: len(statistics)])
        params = jax.tree.map(jnp.asarray, PARAMS)
        given = jax.tree.map(jnp.asarray, given) if "given" in kind else None
        inputs = (params, anchors.features, None if m is None else references.features, given)

        def tiled(params, own, other, given):
            others = None if other is None else references._replace(features=other)
            return pair_statistics(
                statistics,
                params,
                anchors._replace(features=own, given=given),
                others,
                similarity=similarity,
                block_size=block_size,
            )

        def untiled(params, own, other, given):
            rows = anchors._replace(features=own, given=given)
            others = rows if other is None else references._replace(features=other)
            return plain(statistics, params, rows, others, similarity)

        def scalar(statistics):
            return lambda inputs: combine(statistics(*inputs), weights)

        def everything(statistics, inputs, direction):
            """Statistics, a gradient, and a product of the Hessian in both ways."""

            def scalar(inputs):
                return combine(statistics(*inputs), weights)

            def along(inputs):
                gradient = jax.grad(scalar)(inputs)
                return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, direction)))

            gradient, product = jax.jvp(jax.grad(scalar), (inputs,), (direction,))
            return jax.tree.leaves(statistics(*inputs)), gradient, product, jax.grad(along)(inputs)

        direction = jax.tree.map(lambda x: jnp.cos(3 * x + 1), inputs)
        run = jax.jit(everything, static_argnums=0, compiler_options=QUICK)
        got, expected = run(tiled, inputs, direction), run(untiled, inputs, direction)
    assert any(np.isinf(values).any() for values in map(np.asarray, expected[0]))
    chex.assert_trees_all_close(got, expected, rtol=1e-8, atol=1e-10)
    chex.assert_trees_all_close(got[2], got[3], rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("similarity", "block_size", "axis_name"),
    [
        ("negative_squared_distance", 3, None),
        ("product", 2, "b"),
    ],
)
def test_statistics_in_both_directions(similarity, block_size, axis_name):
    """They are those of anchors and references, and of references and anchors."""
    anchors, references, weights, _ = problem(82, n=8, m=12)
    of_references = np.random.default_rng(83).normal(size=(len(STATISTICS), 2, 12))
    options = {"similarity": similarity, "block_size": block_size}
    with enable_x64(True):
        anchors, references = arrays(anchors), arrays(references)
        params = jax.tree.map(jnp.asarray, PARAMS)
        inputs = (params, anchors, references, *map(jnp.asarray, (weights, of_references)))

        def at_once(*rows, axis_name=None):
            return statistics_in_both_directions(*rows, **options, axis_name=axis_name)

        def one_by_one(statistics, params, anchors, references):
            rows = pair_statistics(statistics, params, anchors, references, **options)
            return rows, pair_statistics(statistics, params, references, anchors, **options)

        def derivatives(both, total, params, anchors, references, *weights):
            """Statistics, the gradient of a scalar, and a product of its Hessian."""
            leaves = (params, anchors.features, references.features)

            def scalar(leaves):
                params, own, other = leaves
                rows = anchors._replace(features=own), references._replace(features=other)
                results = both(STATISTICS, params, *rows)
                value = sum(combine(*pair) for pair in zip(results, weights, strict=True))
                return total(value), results

            def gradient(leaves):
                return jax.grad(scalar, has_aux=True)(leaves)

            direction = jax.tree.map(lambda x: jnp.cos(3 * x + 1), leaves)
            (gradients, results), (product, _) = jax.jvp(gradient, (leaves,), (direction,))
            return results, gradients, product

        run = partial(derivatives, at_once, lambda value: value)
        if axis_name is not None:
            at_once, rows = partial(at_once, axis_name=axis_name), P(axis_name)
            of_leaves = (P(), rows, rows)
            run = jax.shard_map(
                partial(derivatives, at_once, partial(jax.lax.psum, axis_name=axis_name)),
                mesh=mesh(names=(axis_name,)),
                in_specs=(P(), rows, rows, P(None, None, axis_name), P(None, None, axis_name)),
                out_specs=(rows, of_leaves, of_leaves),
            )
        got = jax.jit(run, compiler_options=QUICK)(*inputs)
        expected = jax.jit(
            partial(derivatives, one_by_one, lambda value: value), compiler_options=QUICK
        )(*inputs)
    chex.assert_trees_all_close(got, expected, rtol=1e-8, atol=1e-10)


def test_equal_largest_values_share_the_gradient():
    features = jnp.array([[0.0], [1.0], [-1.0], [1.0], [3.0]])
    rows = Rows(
        features, jnp.zeros(5, jnp.int32), jnp.ones(5, bool), jnp.arange(5, dtype=jnp.int32)
    )
    statistic = Statistic(MAX, lambda s, _positives, _params: s)

    def nearest(x, block_size):
        (values,) = pair_statistics(
            (statistic,),
            (),
            rows._replace(features=x),
            similarity="negative_squared_distance",
            block_size=block_size,
        )
        return values.positive[0]  # The rows 1, 2 and 3 are equally far from row 0.

    for block_size in (None, 2):
        run = jax.jit(jax.value_and_grad(partial(nearest, block_size=block_size)))
        value, gradient = run(features)
        assert value == -1
        np.testing.assert_allclose(gradient[:, 0], np.array([2, -2, 2, -2, 0]) / 3, rtol=1e-6)


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


def nca_step(axis_name, block_size, params, batch):
    """Value and gradients; queries and references share the kernel."""

    def loss(params):
        given = dict(batch)
        for name in ("inputs", "references"):
            if name in given:
                given[name] = given[name] @ params["kernel"]
        return jaxloss.nca_loss(
            given.pop("inputs"),
            given.pop("labels"),
            temperature=params["temperature"],
            axis_name=axis_name,
            block_size=block_size,
            **given,
        )

    value, gradients = jax.value_and_grad(loss)(params)
    if axis_name is not None:
        gradients = jax.lax.pmean(gradients, axis_name)
    return value, gradients


@cache
def on_one_device(with_references):
    with enable_x64(True):
        run = jax.jit(partial(nca_step, None, None))
        return jax.tree.map(np.asarray, run(*nca_problem(with_references)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("with_references", "how", "way"),
    [
        (False, "pmap", "gathered"),
        (False, "check_vma", "ring"),
        (False, "unchecked", "ring"),
        (False, "two axes", "gathered"),
        (True, "pmap", "ring"),
        (True, "check_vma", "gathered"),
        (True, "check_vma", "ring"),
        (True, "unchecked", "gathered"),
        (True, "two axes", "ring"),
    ],
)
def test_devices(with_references, how, way, monkeypatch):
    monkeypatch.setattr(_tiles, "GATHERED_BYTES", GATHERED_BYTES[way])
    params, batch = nca_problem(with_references)
    expected = on_one_device(with_references)
    with enable_x64(True):
        if how == "pmap":
            split = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
            run = jax.pmap(partial(nca_step, "b", 2), axis_name="b", in_axes=(None, 0))
            results = run(params, split)
            results = [jax.tree.map(lambda x, k=k: x[k], results) for k in range(DEVICES)]
        else:
            axes = ("host", "chip") if how == "two axes" else ("b",)
            shape = (2, 2) if how == "two axes" else (DEVICES,)
            devices = mesh(shape, axes)
            checked = how != "unchecked"

            def step(params, batch):
                outcome = nca_step(axes, None, params, batch)
                return outcome if checked else jax.tree.map(lambda x: x[None], outcome)

            run = jax.shard_map(
                step,
                mesh=devices,
                in_specs=(P(), P(axes)),
                out_specs=P() if checked else P(axes),
                check_vma=checked,
            )
            outcome = jax.jit(run, compiler_options=QUICK)(params, batch)
            results = (
                [outcome]
                if checked
                else [jax.tree.map(lambda x, k=k: x[k], outcome) for k in range(DEVICES)]
            )
    for result in results:
        chex.assert_trees_all_close(
            jax.tree.map(np.asarray, result), jax.tree.map(np.asarray, expected), rtol=1e-9
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", GATHERED_BYTES)
def test_second_derivatives_around_the_ring(way, monkeypatch):
    monkeypatch.setattr(_tiles, "GATHERED_BYTES", GATHERED_BYTES[way])
    params, batch = nca_problem(with_references=True)
    with enable_x64(True):

        def hessian_product(axis_name, params, batch):
            def gradient(params):
                return nca_step(axis_name, 2, params, batch)[1]

            direction = jax.tree.map(lambda x: jnp.sin(x + 1), params)
            _, product = jax.jvp(gradient, (params,), (direction,))
            return product if axis_name is None else jax.lax.pmean(product, axis_name)

        run = jax.shard_map(
            partial(hessian_product, "b"),
            mesh=mesh(names=("b",)),
            in_specs=(P(), P("b")),
            out_specs=P(),
        )
        got = jax.jit(run, compiler_options=QUICK)(params, batch)
        expected = jax.jit(partial(hessian_product, None))(params, batch)
    chex.assert_trees_all_close(
        jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, expected), rtol=1e-9
    )


def test_ring_holds_no_row_of_other_devices_but_one_block(monkeypatch):
    """No array of the whole batch in the program of a device."""
    monkeypatch.setattr(_tiles, "GATHERED_BYTES", 0)
    rows, dim = 6, 11
    step = jax.shard_map(
        lambda x, y: jax.grad(partial(jaxloss.nca_loss, axis_name="b"))(x, y),
        mesh=mesh(names=("b",)),
        in_specs=P("b"),
        out_specs=P("b"),
    )
    n = DEVICES * rows
    text, _ = compiled(step, ((n, dim), np.float32), ((n,), np.int32))
    assert "collective-permute" in text
    assert "all-gather" not in text
    assert f"{DEVICES * rows},{dim}]" not in text


@pytest.mark.slow
@pytest.mark.parametrize("loss", [jaxloss.nca_loss, jaxloss.prototypical_loss])
@pytest.mark.parametrize("axis_name", [None, "b"])
def test_references_that_every_device_has(loss, axis_name):
    """A support set that is not spread over the devices, beside a batch that is."""
    rng = np.random.default_rng(41)
    with enable_x64(True):
        features, references = jnp.asarray(rng.normal(size=(8, 3))), rng.normal(size=(5, 3))
        labels, of_references = jnp.arange(8) % 3, jnp.arange(5) % 3

        def value_and_grad(axis_name, mean, features, labels, references):
            def value(features, references):
                return mean(
                    loss(
                        features,
                        labels,
                        references=references,
                        reference_labels=of_references,
                        block_size=2,
                        axis_name=axis_name,
                    )
                )

            return jax.value_and_grad(value, (0, 1))(features, references)

        spread = jax.shard_map(
            partial(
                value_and_grad,
                axis_name,
                partial(jax.lax.pmean, axis_name="b") if axis_name is None else lambda value: value,
            ),
            mesh=mesh(names=("b",)),
            in_specs=(P("b"), P("b"), P()),
            out_specs=(P(), (P("b"), P())),
        )
        got = jax.jit(spread, compiler_options=QUICK)(features, labels, jnp.asarray(references))
        # With the axis, every device adds its copy of the references.
        copies = 1 if axis_name is None else DEVICES
        of_references = jnp.tile(of_references, copies)
        single = jax.jit(partial(value_and_grad, None, lambda value: value))
        value, (d_features, d_references) = single(
            features, labels, jnp.tile(jnp.asarray(references), (copies, 1))
        )
        expected = value, (d_features, d_references.reshape(copies, 5, 3).sum(0))
    chex.assert_trees_all_close(got, expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [jaxloss.nca_loss, jaxloss.prototypical_loss])
def test_an_anchor_that_is_not_finite_reaches_no_other(loss):
    features = jnp.ones((4, 3)).at[2].set(jnp.nan)
    references, labels = jnp.arange(6.0).reshape(2, 3), jnp.array([0, 1])
    run = jax.jit(partial(loss, reduction="none"))
    anchors = features, jnp.array([0, 1, 1, 0])
    losses = run(*anchors, references=references, reference_labels=labels)
    assert np.isnan(losses).tolist() == [False, False, True, False]
