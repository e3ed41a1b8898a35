"""Losses of two towers. As variants of the loss table, the contract tests run over them, too."""

from functools import cache, partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxloss
from jaxloss import _tiles
from tests.jaxloss import references
from tests.jaxloss.harness import QUICK, P, compiled, magnitude, mesh, precision, raises, widen

LOSSES = {
    "info_nce": (jaxloss.info_nce_loss, {"temperature": 0.3}),
    "info_nce_one_way": (
        partial(jaxloss.info_nce_loss, symmetric=False, normalize=False),
        {"temperature": 0.8},
    ),
    "sigmoid_contrastive": (jaxloss.sigmoid_contrastive_loss, {"scale": 4.0, "bias": -1.5}),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


class Towers(NamedTuple):
    queries: Any
    keys: Any
    ids: Any
    where: Any
    key_where: Any


def make_towers(n=8, further=0, seed=0, dim=5) -> Towers:
    """Two towers with duplicates, of which rows are masked as unevenly as possible."""
    rng = np.random.default_rng(seed)
    queries = rng.normal(0.1, 1.0, (n, dim))
    keys = rng.normal(-0.2, 0.8, (n + further, dim)) + 0.3 * queries[np.arange(n + further) % n]
    queries[3], keys[4] = queries[1], keys[6]
    ids = rng.permutation(np.resize([3, 0, 3, -1, -1, 5], n)).astype(np.int32)
    where, key_where = np.arange(n) % 4 != 2, np.ones(n + further, bool)
    where[: n // 4], key_where[n - 1], key_where[n + 2 : n + 3] = True, False, False
    return Towers(queries, keys, ids, where, key_where)


def cast(towers: Towers, dtype: Any) -> Towers:
    floats = (jnp.asarray(x, dtype) for x in towers[:2])
    return Towers(*floats, *map(jnp.asarray, towers[2:]))


def total_and_terms(name: str, options: Any, features: Any, params: Any, masks: Any) -> Any:
    loss = partial(LOSSES[name][0], *features, **params, **masks, **options)
    terms = loss(reduction="none")
    return loss() + jnp.sum(terms**2), terms


@cache
def differentiated(name: str, **options: Any) -> Any:
    """The jitted `(features, params, masks)` to `((total, terms), gradients)`."""
    function = partial(total_and_terms, name, options)
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))


def evaluate(name: str, towers: Towers, dtype: Any = np.float64, **options: Any) -> Any:
    with precision(dtype):
        features, masks = cast(towers, dtype)[:2], cast(towers, dtype)[2:]
        params = jax.tree.map(partial(jnp.asarray, dtype=dtype), LOSSES[name][1])
        masks = dict(zip(Towers._fields[2:], masks, strict=True))
        return widen(differentiated(name, **options)(features, params, masks))


def by_torch(name: str, towers: Towers) -> Any:
    """The same in PyTorch, from the rows that are left."""
    torch = pytest.importorskip("torch")
    from tests.jaxloss import torch_references

    queries, keys, ids, where, key_where = map(torch.tensor, towers)
    loss, params = LOSSES[name]
    fixed = loss.keywords if isinstance(loss, partial) else {}
    values = getattr(torch_references, f"{name.removesuffix('_one_way')}_values")
    params = {
        k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in params.items()
    }
    queries.requires_grad_()
    keys.requires_grad_()
    n = len(queries)
    pairs = where & key_where[:n]
    kept = torch.cat([pairs, key_where[n:]])
    terms = torch.stack(values(queries[pairs], keys[kept], ids=ids[pairs], **params, **fixed))
    total = terms.mean() + (terms**2).sum()
    total.backward()
    losses = np.zeros(n)
    losses[pairs.numpy()] = terms.detach().numpy()
    of_params = {k: gradient(v) for k, v in params.items()}
    return (total.item(), losses), ((gradient(queries), gradient(keys)), of_params)


def gradient(tensor: Any) -> np.ndarray:
    return tensor.grad.numpy()


def check(got: Any, expected: Any, tolerance: float) -> None:
    """Relative to the largest number of each array."""

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, magnitude(b)))

    jax.tree.map(close, got, expected)


@every_loss
@pytest.mark.parametrize("further", [0, 5])
def test_values_and_gradients_equal_pytorch(name, further):
    towers = make_towers(further=further)
    expected = by_torch(name, towers)
    check(evaluate(name, towers), expected, 1e-10)
    check(evaluate(name, towers, block_size=3), expected, 1e-10)
    single = towers._replace(**{k: np.float32(getattr(towers, k)) for k in ("queries", "keys")})
    expected = by_torch(
        name, single._replace(**{k: np.float64(getattr(single, k)) for k in ("queries", "keys")})
    )
    check(evaluate(name, single, np.float32), expected, 1e-6)


@pytest.mark.slow
@every_loss
def test_values_equal_loops(name):
    """Without masks, so that also the defaults are tested."""
    towers, (loss, params) = make_towers(further=3, seed=1), LOSSES[name]
    values = getattr(references, f"{name.removesuffix('_one_way')}_values")
    fixed = loss.keywords if isinstance(loss, partial) else {}
    with precision(np.float64):
        got = loss(*cast(towers, np.float64)[:2], **params, reduction="none")
    expected = values(towers.queries, towers.keys, **params, **fixed)
    np.testing.assert_allclose(got, expected, rtol=1e-10)


# Optax ----


def test_ntxent_of_optax():
    """Two views of a sample are the only pair; further keys are negatives of both."""
    first, second, *rest = make_towers(7, seed=4).queries

    def ours(first, second, rest):
        def one(query, key):
            loss = partial(jaxloss.info_nce_loss, temperature=0.2, symmetric=False)
            return loss(query[None], jnp.concatenate([key[None], rest]))

        return (one(first, second) + one(second, first)) / 2

    def theirs(first, second, rest):
        rows = jnp.concatenate([first[None], second[None], rest])
        labels = jnp.maximum(jnp.arange(len(rows)) - 1, 0)
        return optax.losses.ntxent(rows, labels, temperature=0.2)

    with (
        precision(np.float64),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        arrays = (jnp.asarray(first), jnp.asarray(second), jnp.asarray(rest))
        got, expected = (
            widen(jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options=QUICK)(*arrays))
            for loss in (ours, theirs)
        )
    check(got, expected, 1e-10)


# Devices ----


def in_shares(towers: Towers, devices: int) -> tuple[Towers, np.ndarray]:
    """Towers as `axis_name` takes them, and the places of the keys in them."""
    n, m = len(towers.queries), len(towers.keys)
    missing = (n - m) % devices
    places = np.arange(m + missing)
    parts = (places[:n].reshape(devices, -1), places[n:].reshape(devices, -1))
    order = np.concatenate(parts, axis=1).reshape(-1)
    keys = np.pad(towers.keys, ((0, missing), (0, 0)))[order]
    key_where = np.pad(towers.key_where, (0, missing))[order]
    return towers._replace(keys=keys, key_where=key_where), np.argsort(order)[:m]


SPREAD = [
    ("axis_name", 1, 5),
    ("axis_name", 2, 5),
    ("ring", 4, 5),
    ("ring", 2, 0),
    ("Explicit", 4, 5),
    ("Explicit", 2, 0),
    ("sharded_loss", 4, 5),
]
"""Ways to spread towers, numbers of devices, and of keys beyond the queries."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["info_nce", "sigmoid_contrastive"])
@pytest.mark.parametrize(("way", "devices", "further"), SPREAD)
def test_devices_equal_one(name, way, devices, further, monkeypatch):
    towers = make_towers(further=further, seed=5)
    expected = evaluate(name, towers)
    loss, params = LOSSES[name]
    kind = AxisType.Explicit if way == "Explicit" else AxisType.Auto
    on = mesh((devices,), kind=kind)
    if way == "ring":
        monkeypatch.setattr(_tiles, "GATHERED_BYTES", 0)

    def of(features: Any, params: Any, masks: Any, loss: Any = loss, axis_name: Any = None) -> Any:
        def objective(features, params):
            ours = partial(loss, *features, **params, **masks)
            if axis_name is not None:
                ours = partial(ours, axis_name=axis_name)
            terms = ours(reduction="none")
            squares = jnp.sum(terms**2)
            return ours() + (
                squares if axis_name is None else jax.lax.psum(squares, axis_name)
            ), terms

        result = jax.value_and_grad(objective, (0, 1), has_aux=True)(features, params)
        (total, terms), (of_features, of_params) = result
        if axis_name is not None:
            of_params = jax.lax.pmean(of_params, axis_name)
        return (total, terms), (of_features, of_params)

    run: Any = of
    places = np.arange(8 + further)
    with precision(np.float64):
        params = jax.tree.map(partial(jnp.asarray, dtype=np.float64), params)
        if way in ("axis_name", "ring"):
            towers, places = in_shares(towers, devices)
            rows = P("batch")
            run = jax.shard_map(
                partial(of, axis_name="batch"),
                mesh=on,
                in_specs=(rows, P(), rows),
                out_specs=((P(), rows), (rows, P())),
            )
        elif way == "sharded_loss":
            run = partial(of, loss=jaxloss.sharded_loss(loss, on, "batch"))
        arrays = cast(towers, np.float64)
        if way == "Explicit":
            place = NamedSharding(on, P("batch"))
            arrays = Towers(
                *(
                    jax.device_put(
                        x, place if x.shape[0] % devices == 0 else NamedSharding(on, P())
                    )
                    for x in arrays
                )
            )
        masks = dict(zip(Towers._fields[2:], arrays[2:], strict=True))
        got = widen(jax.jit(run, compiler_options=QUICK)(arrays[:2], params, masks))
    head, ((of_queries, of_keys), of_params) = got
    check((head, ((of_queries, of_keys[places]), of_params)), expected, 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_visit_for_value_and_gradient(reduction):
    """SigLIP has another way for sums than for the losses of samples."""
    with precision(np.float64):
        towers = cast(make_towers(further=3, seed=6), np.float64)
        loss, params = LOSSES["sigmoid_contrastive"]
        masks = dict(zip(Towers._fields[2:], towers[2:], strict=True))
        weights = jnp.linspace(0.5, 2.0, 8)
        counts = masks["where"] & masks["key_where"][:8]

        def at_once(features: Any, params: Any, weights: Any) -> Any:
            ours = partial(loss, *features, **params, **masks, sample_weights=weights)
            return ours(block_size=3, reduction=reduction)

        def by_samples(features: Any, params: Any, weights: Any) -> Any:
            ours = partial(loss, *features, **params, **masks)
            total = jnp.sum(ours(sample_weights=weights, reduction="none"))
            return total / jnp.sum(weights, where=counts) if reduction == "mean" else total

        def derivatives(function: Any) -> Any:
            def squares(*arguments: Any) -> Any:
                gradients = jax.grad(function, (0, 1, 2))(*arguments)
                return sum(jnp.sum(jnp.sin(leaf + 1)) for leaf in jax.tree.leaves(gradients))

            arguments = (towers[:2], jax.tree.map(jnp.asarray, params), weights)
            value = jax.value_and_grad(lambda *of: 3 * function(*of), (0, 1, 2))(*arguments)
            return value, jax.grad(squares, (0, 1, 2))(*arguments)

        got, expected = (jax.jit(lambda of=of: derivatives(of))() for of in (at_once, by_samples))
        check(got, expected, 1e-12)


# Memory, edges, errors ----


@pytest.mark.parametrize("loss", [jaxloss.info_nce_loss, jaxloss.sigmoid_contrastive_loss])
def test_blocks_bound_the_memory(loss):
    """All similarities would be 1 GiB."""
    towers = ((16384, 512), np.float32)
    _, memory = compiled(loss, towers, towers)
    assert memory < 150 * 2**20


@every_loss
def test_pairs_without_negatives_and_zeros(name):
    """One id for all rows, zero rows, and equal rows have finite losses and gradients."""
    towers = make_towers(further=0)
    for edge in (
        towers._replace(ids=np.zeros(8, np.int32)),
        towers._replace(queries=0 * towers.queries),
        towers._replace(queries=0 * towers.queries, keys=0 * towers.keys),
        towers._replace(queries=0 * towers.queries + 1, keys=0 * towers.keys - 1),
    ):
        chex.assert_tree_all_finite(evaluate(name, edge))
    got = evaluate(name, towers._replace(ids=np.zeros(8, np.int32)))
    if name != "sigmoid_contrastive":
        assert magnitude(got) == 0


@pytest.mark.parametrize("name", ["info_nce", "sigmoid_contrastive"])
def test_zero_vectors_have_no_gradient(name):
    """Neither through the similarity with the own key nor through those with the others."""
    towers = make_towers()
    towers.queries[1], towers.keys[5] = 0, 0
    _, ((of_queries, of_keys), _) = evaluate(name, towers)
    for gradient, zero in ((of_queries, 1), (of_keys, 5)):
        np.testing.assert_array_equal(np.any(gradient, axis=1)[zero], False)
        assert np.any(gradient)


@every_loss
def test_masked_rows_do_not_leak(name):
    towers = make_towers(further=3)
    expected = evaluate(name, towers)
    keys, queries = towers.keys.copy(), towers.queries.copy()
    pairs = towers.where & towers.key_where[:8]
    queries[~pairs] = np.nan
    keys[~np.concatenate([pairs, towers.key_where[8:]])] = np.inf
    chex.assert_trees_all_equal(
        evaluate(name, towers._replace(queries=queries, keys=keys)), expected
    )


ones, zeros = np.ones, np.zeros
WRONG = [
    (ValueError, "queries", {"queries": ones(4, np.float32)}),
    (TypeError, "queries", {"queries": zeros((5, 4), np.int32)}),
    (TypeError, "keys", {"keys": zeros((5, 4), np.int32)}),
    (ValueError, r"`keys`.*m at least 5 and d = 4", {"keys": ones((4, 4), np.float32)}),
    (ValueError, r"`keys`.*m at least 5 and d = 4", {"keys": ones((5, 3), np.float32)}),
    (ValueError, "ids", {"ids": zeros(6, np.int32)}),
    (TypeError, "ids", {"ids": zeros(5, np.float32)}),
    (ValueError, "key_where", {"key_where": ones(5, bool)}),
    (TypeError, "key_where", {"key_where": ones(6, np.int32)}),
    (ValueError, "where", {"where": ones(6, bool)}),
    (ValueError, "sample_weights", {"sample_weights": ones(6, np.float32)}),
    (ValueError, "reduction", {"reduction": "avg"}),
    (ValueError, "block_size", {"block_size": 0}),
]


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        (jaxloss.info_nce_loss, [(ValueError, "temperature", {"temperature": 0.0})]),
        (
            jaxloss.sigmoid_contrastive_loss,
            [(ValueError, "scale", {"scale": 0.0}), (ValueError, "bias", {"bias": np.nan})],
        ),
    ],
)
def test_wrong_arguments_are_named(loss, wrong):
    right = {"queries": ones((5, 4), np.float32), "keys": ones((6, 4), np.float32)}
    for error, match, changes in WRONG + wrong:
        given = right | changes
        with raises(error, match):
            jax.eval_shape(lambda given=given: loss(**given))
