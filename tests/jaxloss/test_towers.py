"""Losses of two towers. As variants of the loss table, the contract tests run over them, too."""

from functools import cache, partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxloss
from jaxloss.pairs import visits
from tests.jaxloss import references
from tests.jaxloss.harness import QUICK, P, magnitude, mesh, precision, raises, widen
from tests.tolerances import FLOAT32

LOSSES: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "info_nce": ("info_nce_loss", {}, {"temperature": 0.3}),
    "info_nce_one_way": (
        "info_nce_loss",
        {"symmetric": False, "similarity": "inner"},
        {"temperature": 0.8},
    ),
    "sigmoid_contrastive": ("sigmoid_contrastive_loss", {}, {"scale": 4.0, "bias": -1.5}),
}
"""Functions, options, and hyperparameters that have a gradient."""
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


def find(name: str, module: Any = jaxloss) -> Any:
    function, options, _ = LOSSES[name]
    return partial(getattr(module, function), **options)


def total_and_terms(loss: Any, features: Any, params: Any, masks: Any, axis_name: Any = None):
    """A scalar of the mean and of every loss, and the losses. It takes arrays of any library."""
    loss = partial(loss, *features, **params, **masks)
    if axis_name is not None:
        loss = partial(loss, axis_name=axis_name)
    terms = loss(reduction="none")
    squares = (terms**2).sum()
    return loss() + (squares if axis_name is None else jax.lax.psum(squares, axis_name)), terms


@cache
def differentiated(name: str, **options: Any) -> Any:
    """The jitted `(features, params, masks)` to `((total, terms), gradients)`."""
    function = partial(total_and_terms, partial(find(name), **options))
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))


def arguments(name: str, towers: Towers, dtype: Any) -> Any:
    """The features, params and masks, as JAX arrays."""
    features, masks = cast(towers, dtype)[:2], cast(towers, dtype)[2:]
    params = jax.tree.map(partial(jnp.asarray, dtype=dtype), LOSSES[name][2])
    return features, params, dict(zip(Towers._fields[2:], masks, strict=True))


def evaluate(name: str, towers: Towers, dtype: Any = np.float64, **options: Any) -> Any:
    with precision(dtype):
        return widen(differentiated(name, **options)(*arguments(name, towers, dtype)))


def by_torch(name: str, towers: Towers) -> Any:
    torch = pytest.importorskip("torch")
    from tests.jaxloss import torch_references

    *features, ids, where, key_where = map(torch.tensor, towers)
    params = {k: torch.tensor(v, dtype=torch.float64) for k, v in LOSSES[name][2].items()}
    leaves = jax.tree.map(lambda x: x.requires_grad_(), (tuple(features), params))
    masks = {"ids": ids, "where": where, "key_where": key_where}
    total, terms = total_and_terms(find(name, torch_references), leaves[0], leaves[1], masks)
    total.backward()
    gradients = jax.tree.map(lambda x: x.grad.numpy(), leaves)
    return (total.item(), terms.detach().numpy()), gradients


def check(got: Any, expected: Any, tolerance: float) -> None:
    """Relative to the largest number of each array."""

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, magnitude(b)))

    jax.tree.map(close, got, expected)


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("info_nce", 5),
        ("sigmoid_contrastive", 5),
        *(pytest.param(name, 0, marks=pytest.mark.long) for name in LOSSES),
        pytest.param("info_nce_one_way", 5, marks=pytest.mark.long),
    ],
)
def test_values_and_gradients_equal_references(name, further):
    towers = make_towers(further=further)
    masks = dict(zip(Towers._fields[2:], towers[2:], strict=True))
    loops = total_and_terms(find(name, references), towers[:2], LOSSES[name][2], masks)
    got = [evaluate(name, towers, block_size=size) for size in (None, 3)]
    for values, _ in got:
        check(values, loops, 1e-10)
    expected = by_torch(name, towers)
    for values in got:
        check(values, expected, 1e-10)
    rounded = towers._replace(
        **{k: np.float64(np.float32(getattr(towers, k))) for k in ("queries", "keys")}
    )
    check(evaluate(name, rounded, np.float32), by_torch(name, rounded), FLOAT32)


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
OFTEN = {
    "info_nce": (("axis_name", 2, 5), ("sharded_loss", 4, 5)),
    "sigmoid_contrastive": (("ring", 4, 5),),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way", "devices", "further"),
    [
        pytest.param(name, *way, marks=[] if way in often else pytest.mark.long)
        for number, (name, often) in enumerate(OFTEN.items())
        for way in sorted({*often, *SPREAD[number::2]})
    ],
)
def test_devices_equal_one(name, way, devices, further, monkeypatch):
    towers = make_towers(further=further, seed=5)
    expected = evaluate(name, towers)
    on = mesh((devices,), kind=AxisType.Explicit if way == "Explicit" else AxisType.Auto)
    rows, places = P("batch"), np.arange(8 + further)
    loss = find(name)
    if way == "sharded_loss":
        loss = jaxloss.sharded_loss(loss, on, "batch")
    if way == "ring":
        monkeypatch.setattr(visits, "GATHERED_BYTES", 0)
        loss = partial(loss, block_size=3)  # Several tiles of a device.

    def run(features: Any, params: Any, masks: Any, axis_name: Any = None) -> Any:
        objective = partial(total_and_terms, loss, axis_name=axis_name)
        both = jax.value_and_grad(objective, (0, 1), has_aux=True)
        values, (of_features, of_params) = both(features, params, masks)
        if axis_name is not None:
            of_params = jax.lax.pmean(of_params, axis_name)
        return values, (of_features, of_params)

    def place(x: Any) -> Any:
        return jax.device_put(x, NamedSharding(on, rows if len(x) % devices == 0 else P()))

    function: Any = run
    with precision(np.float64):
        if way in ("axis_name", "ring"):
            towers, places = in_shares(towers, devices)
            function = jax.shard_map(
                partial(run, axis_name="batch"),
                mesh=on,
                in_specs=(rows, P(), rows),
                out_specs=((P(), rows), (rows, P())),
            )
        features, params, masks = arguments(name, towers, np.float64)
        if way == "Explicit":
            features, masks = jax.tree.map(place, (features, masks))
        got = widen(jax.jit(function, compiler_options=QUICK)(features, params, masks))
    head, ((of_queries, of_keys), of_params) = got
    check((head, ((of_queries, of_keys[places]), of_params)), expected, 1e-10)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_unsigned_ids_are_no_markers(devices):
    """The largest one, which -1 is in this dtype, is an id like others, and not of further keys."""
    towers = make_towers(further=4)
    ids = np.where(towers.ids < 0, np.arange(8) + 10, towers.ids).astype(np.uint32)
    ids[towers.ids == 3] = np.iinfo(np.uint32).max
    spread, _ = in_shares(towers, devices)

    def on_devices(queries, keys, ids, where, key_where):
        masks = {"where": where, "key_where": key_where, "axis_name": "batch"}
        return [loss(queries, keys, ids=ids, **masks) for loss in losses]

    losses = [find(name) for name in ("info_nce", "sigmoid_contrastive")]
    on_mesh = jax.shard_map(on_devices, mesh=mesh((devices,)), in_specs=P("batch"), out_specs=P())
    run = jax.jit(on_mesh, compiler_options=QUICK)
    expected, got = (run(*cast(spread._replace(ids=x), np.float32)) for x in (towers.ids, ids))
    np.testing.assert_allclose(got, expected, rtol=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("name", OFTEN)
def test_without_ids_all_other_keys_are_negatives(name):
    """Also those at the same place of another device."""
    queries, keys = cast(make_towers(), np.float32)[:2]
    loss = partial(find(name), **LOSSES[name][2])
    spread = jax.shard_map(
        partial(loss, axis_name="batch"), mesh=mesh(), in_specs=P("batch"), out_specs=P()
    )
    got, expected = (jax.jit(f, compiler_options=QUICK)(queries, keys) for f in (spread, loss))
    np.testing.assert_allclose(got, expected, rtol=4 * FLOAT32)


# Edges, errors ----


def test_large_logits_have_a_gradient():
    """Of a negative with the inner product 100, whose exponential overflows in float32."""
    queries = 10 * np.eye(4)
    keys = np.roll(queries, 1, axis=0)
    loss = partial(jaxloss.sigmoid_contrastive_loss, scale=1.0, bias=0.0, similarity="inner")
    got, expected = [], []
    for results, dtype in ((got, np.float32), (expected, np.float64)):
        with precision(dtype):
            rows = [jnp.asarray(x, dtype) for x in (queries, keys)]
            results.append(jax.jit(jax.grad(loss), compiler_options=QUICK)(*rows))
    np.testing.assert_allclose(*got, *expected, rtol=4 * FLOAT32)


@pytest.mark.slow
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


@pytest.mark.slow
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
