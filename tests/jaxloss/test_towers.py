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
from tests.jaxloss.harness import (
    QUICK,
    P,
    compiled,
    magnitude,
    mesh,
    over_mesh,
    precision,
    raises,
    widen,
)
from tests.tolerances import FLOAT32

LOSSES: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "info_nce": ("info_nce_loss", {}, {"temperature": 0.3}),
    "info_nce_one_way": (
        "info_nce_loss",
        {"symmetric": False, "similarity": "inner"},
        {"temperature": 0.8},
    ),
    "sigmoid_contrastive": ("sigmoid_contrastive_loss", {}, {"scale": 4.0, "bias": -1.5}),
    "info_nce_with_options": (
        "info_nce_loss",
        {"equal_ids": "positive", "margin_of_false_negatives": 0.3},
        {"temperature": 0.3, "hardness": 0.7, "logsumexp_penalty": 0.2},
    ),
    "sigmoid_contrastive_with_options": (
        "sigmoid_contrastive_loss",
        {"similarity": "negative_distance", "margin_of_false_negatives": 0.3},
        {"scale": 4.0, "bias": -1.5, "hardness": 0.7},
    ),
}
"""Functions, options, and hyperparameters that have a gradient."""
every_loss = pytest.mark.parametrize("name", LOSSES)


class Towers(NamedTuple):
    queries: Any
    keys: Any
    ids: Any
    where: Any
    key_where: Any
    key_bias: Any = None
    own_keys: Any = None
    own_key_where: Any = None


FLOATS = ("queries", "keys", "key_bias", "own_keys")


def make_towers(n=8, further=0, seed=0, dim=5, extra=False) -> Towers:
    """Two towers with duplicates, of which rows are masked as unevenly as possible."""
    rng = np.random.default_rng(seed)
    queries = rng.normal(0.1, 1.0, (n, dim))
    keys = rng.normal(-0.2, 0.8, (n + further, dim)) + 0.3 * queries[np.arange(n + further) % n]
    queries[3], keys[4] = queries[1], keys[6]
    ids = rng.permutation(np.resize([3, 0, 3, -1, -1, 5], n)).astype(np.int32)
    where, key_where = np.arange(n) % 4 != 2, np.ones(n + further, bool)
    where[: n // 4], key_where[n - 1], key_where[n + 2 : n + 3] = True, False, False
    if not extra:
        return Towers(queries, keys, ids, where, key_where)
    bias, own_keys = rng.normal(size=n + further), rng.normal(size=(n, 3, dim))
    return Towers(queries, keys, ids, where, key_where, bias, own_keys, rng.random((n, 3)) < 0.7)


def towers_of(name: str, **options: Any) -> Towers:
    return make_towers(**options, extra="options" in name)


def find(name: str, module: Any = jaxloss) -> Any:
    function, options, _ = LOSSES[name]
    return partial(getattr(module, function), **options)


def total_and_terms(loss: Any, features: Any, params: Any, masks: Any, axis_name: Any = None):
    """A scalar of the mean and of every loss, and the losses. It takes arrays of any library."""
    loss = partial(loss, **features, **params, **masks)
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


def split(towers: Towers, array: Any = lambda x: x) -> tuple[dict[str, Any], dict[str, Any]]:
    """The features and the masks that are given, by name."""
    given = {name: array(x) for name, x in towers._asdict().items() if x is not None}
    features = {name: given.pop(name) for name in FLOATS if name in given}
    return features, given


def arguments(name: str, towers: Towers, dtype: Any) -> Any:
    """The features, params and masks, as JAX arrays."""
    features, masks = split(towers, jnp.asarray)
    features = {name: x.astype(dtype) for name, x in features.items()}
    return features, jax.tree.map(partial(jnp.asarray, dtype=dtype), LOSSES[name][2]), masks


def evaluate(name: str, towers: Towers, dtype: Any = np.float64, **options: Any) -> Any:
    with precision(dtype):
        return widen(differentiated(name, **options)(*arguments(name, towers, dtype)))


def by_torch(name: str, towers: Towers) -> Any:
    torch = pytest.importorskip("torch")
    from tests.jaxloss import torch_references

    features, masks = split(towers, torch.tensor)
    params = {k: torch.tensor(v, dtype=torch.float64) for k, v in LOSSES[name][2].items()}
    leaves: Any = jax.tree.map(lambda x: x.requires_grad_(), (features, params))
    total, terms = total_and_terms(find(name, torch_references), leaves[0], leaves[1], masks)
    total.backward()
    gradients = jax.tree.map(lambda x: x.grad.numpy(), leaves)
    return (total.item(), terms.detach().numpy()), gradients


def check(got: Any, expected: Any, tolerance: float) -> None:
    """Relative to the largest number of each array."""
    chex.assert_trees_all_equal_structs(got, expected)

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, magnitude(b)))

    jax.tree.map(close, got, expected)


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("info_nce", 5),
        ("sigmoid_contrastive", 5),
        ("info_nce_with_options", 5),
        ("sigmoid_contrastive_with_options", 5),
        *(pytest.param(name, 0, marks=pytest.mark.long) for name in LOSSES),
        pytest.param("info_nce_one_way", 5, marks=pytest.mark.long),
    ],
)
def test_values_and_gradients_equal_references(name, further):
    towers = towers_of(name, further=further)
    features, masks = split(towers)
    loops = total_and_terms(find(name, references), features, LOSSES[name][2], masks)
    got = [evaluate(name, towers, block_size=size) for size in (None, 3)]
    for values, _ in got:
        check(values, loops, 1e-10)
    expected = by_torch(name, towers)
    for values in got:
        check(values, expected, 1e-10)
    rounded = {name: np.float64(np.float32(x)) for name, x in features.items()}
    towers = towers._replace(**rounded)
    check(evaluate(name, towers, np.float32), by_torch(name, towers), FLOAT32)


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
    bias = None if towers.key_bias is None else np.pad(towers.key_bias, (0, missing))[order]
    towers = towers._replace(keys=keys, key_where=key_where, key_bias=bias)
    return towers, np.argsort(order)[:m]


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
    "info_nce_with_options": (("ring", 4, 5), ("Explicit", 4, 5)),
    "sigmoid_contrastive_with_options": (("axis_name", 2, 5),),
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
    towers = towers_of(name, further=further, seed=5)
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
    _, (of_features, _) = got
    for of_keys in of_features.keys() & {"keys", "key_bias"}:
        of_features[of_keys] = of_features[of_keys][places]
    check(got, expected, 1e-10)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_unsigned_ids_are_no_markers(devices):
    """The largest one, which -1 is in this dtype, is an id like others, and not of further keys."""
    towers = make_towers(further=4)
    ids = np.where(towers.ids < 0, np.arange(8) + 10, towers.ids).astype(np.uint32)
    ids[towers.ids == 3] = np.iinfo(np.uint32).max
    spread, _ = in_shares(towers, devices)

    def on_devices(arrays):
        return [loss(**arrays, axis_name="batch") for loss in losses]

    losses = [find(name) for name in ("info_nce", "sigmoid_contrastive")]
    on_mesh = jax.shard_map(on_devices, mesh=mesh((devices,)), in_specs=P("batch"), out_specs=P())
    run = jax.jit(on_mesh, compiler_options=QUICK)
    expected, got = (
        run(features | masks)
        for x in (towers.ids, ids)
        for features, _, masks in [arguments("info_nce", spread._replace(ids=x), np.float32)]
    )
    np.testing.assert_allclose(got, expected, rtol=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("name", OFTEN)
def test_without_ids_all_other_keys_are_negatives(name):
    """Also those at the same place of another device."""
    queries, keys = (np.float32(x) for x in make_towers()[:2])
    loss = partial(find(name), **LOSSES[name][2])
    spread = jax.shard_map(
        partial(loss, axis_name="batch"), mesh=mesh(), in_specs=P("batch"), out_specs=P()
    )
    got, expected = (jax.jit(f, compiler_options=QUICK)(queries, keys) for f in (spread, loss))
    np.testing.assert_allclose(got, expected, rtol=4 * FLOAT32)


# Options ----

# An orthogonal array (Plackett and Burman): each pair of options meets on and on, and off and off.
GENERATOR = np.array([1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0], bool)
RUNS = [*(np.roll(GENERATOR, k) for k in range(11)), ~np.ones(11, bool)]
PENALTY = "logsumexp_penalty"
PAIRED = (
    *("ids", "equal_ids", "key_bias", "own_keys", "hardness", "margin_of_false_negatives"),
    *(PENALTY, "symmetric", "similarity", "own_key_where", "block_size"),
)


@pytest.mark.parametrize("function", ["info_nce_loss", "sigmoid_contrastive_loss"])
@pytest.mark.parametrize(
    "run", [pytest.param(k, marks=[] if k % 4 == 0 else pytest.mark.long) for k in range(12)]
)
def test_pairs_of_options(function, run, monkeypatch):
    """Values, gradients and metrics of options that are on at the same time."""
    pytest.importorskip("torch")
    is_on = dict(zip(PAIRED, RUNS[run], strict=True))
    towers = make_towers(further=3, seed=run, extra=True)
    arrays = ("ids", "key_bias", "own_keys", "own_key_where")
    left_out = [name for name in arrays if not is_on[name]]
    left_out += [] if is_on["own_keys"] else ["own_key_where"]
    towers = towers._replace(**dict.fromkeys(left_out))
    options: dict[str, Any] = {"equal_ids": "positive" if is_on["equal_ids"] else "ignore"}
    options["similarity"] = "negative_squared_distance" if is_on["similarity"] else "cosine"
    if is_on["margin_of_false_negatives"]:
        options["margin_of_false_negatives"] = -0.1
    params = {"scale": 3.0, "bias": -1.0}
    if function == "info_nce_loss":
        options["symmetric"] = bool(is_on["symmetric"])
        params = {"temperature": 0.4}
        params |= {PENALTY: 0.3} if is_on[PENALTY] else {}
    params |= {"hardness": 0.6} if is_on["hardness"] else {}
    monkeypatch.setitem(LOSSES, "run", (function, options, params))
    expected = by_torch("run", towers)

    def total(features, params, masks):
        size = 4 if is_on["block_size"] else None
        loss = partial(find("run"), **features, **params, **masks, block_size=size, metrics=True)
        (terms, _), (mean, metrics) = loss(reduction="none"), loss()
        return mean + (terms**2).sum(), (terms, metrics)

    with precision(np.float64):
        compute = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), compiler_options=QUICK)
        results = widen(compute(*arguments("run", towers, np.float64)))
    (value, (terms, metrics)), gradients = results
    check(((value, terms), gradients), expected, 1e-10)
    np.testing.assert_allclose(metrics, dense_metrics(towers, options, params), rtol=1e-10)


def dense_metrics(towers: Towers, options: dict[str, Any], params: dict[str, float]) -> Any:
    """Those of the queries that count."""
    found, params = [], dict(params)
    line = (params.pop("scale", 1 / params.pop("temperature", 1.0)), params.pop("bias", 0.0))
    options = {k: x for k, x in (options | params).items() if k not in ("symmetric", PENALTY)}

    @references.over_pairs
    def keep(queries, keys, ids, **of_rows):
        def logits(s):
            return line[0] * s + line[1]

        of_queries, _ = references.candidates(queries, keys, ids, logits, **of_rows)
        found.extend(of_queries)
        return np.zeros(len(of_queries))

    features, masks = split(towers)
    keep(**features, **masks, **options)
    return references.contrastive_metrics(found, options.get("hardness", 0.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "axis_name"),
    [
        (jaxloss.info_nce_loss, None),
        (jaxloss.sigmoid_contrastive_loss, "batch"),
        pytest.param(jaxloss.info_nce_loss, "batch", marks=pytest.mark.long),
        pytest.param(jaxloss.sigmoid_contrastive_loss, None, marks=pytest.mark.long),
    ],
)
def test_options_hold_no_array_of_all_pairs(loss, axis_name, monkeypatch):
    """Of the gradient. An array of all logits of a device would be 256 MiB, or 64 MiB."""
    monkeypatch.setattr(visits, "GATHERED_BYTES", 0)
    n, dim = 2**13, 16

    def total(queries, keys, bias, own_keys, ids):
        options = {"equal_ids": "positive", "hardness": 0.5, "margin_of_false_negatives": 0.1}
        arrays = {"key_bias": bias, "own_keys": own_keys, "ids": ids}
        results = loss(queries, keys, **arrays, **options, metrics=True, axis_name=axis_name)
        return results[0] + results[1].logsumexp

    gradient = jax.grad(total, argnums=(0, 1, 2, 3))
    if axis_name is not None:
        gradient = over_mesh(gradient, P("batch"), P("batch"))
    shapes = ((n, dim), (n, dim), (n,), (n, 2, dim))
    _, memory = compiled(gradient, *((x, np.float32) for x in shapes), ((n,), np.int32))
    assert memory < 48 * 2**20


@pytest.mark.parametrize("similarity", ["cosine", "inner", "negative_distance"])
@pytest.mark.parametrize("dim", [64, 256])
def test_equal_keys_are_misses_and_stay_in(similarity, dim):
    """Of collapsed features, although a tile rounds in another way than a sum of a row."""
    rng = np.random.default_rng(dim)
    one = jnp.asarray(np.tile(rng.normal(size=(1, dim)), (32, 1)), np.float32)
    half = one.astype(jnp.bfloat16)
    for loss in (jaxloss.info_nce_loss, jaxloss.sigmoid_contrastive_loss):
        loss = partial(loss, similarity=similarity, metrics=True)
        for rows in (one, half):
            assert float(jax.jit(loss)(rows, rows)[1].accuracy) == 0
    queries = jnp.asarray(rng.normal(size=(8, dim)), np.float32)
    twice = jnp.concatenate([queries, queries])
    options = {"similarity": similarity, "symmetric": False, "reduction": "none"}
    limited = partial(jaxloss.info_nce_loss, margin_of_false_negatives=0.0, **options)
    assert np.all(jax.jit(limited)(queries, twice) > 0.9 * np.log(2))


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
    towers = towers_of(name, further=0)
    for edge in (
        towers._replace(ids=np.zeros(8, np.int32)),
        towers._replace(queries=0 * towers.queries),
        towers._replace(queries=0 * towers.queries, keys=0 * towers.keys),
        towers._replace(queries=0 * towers.queries + 1, keys=0 * towers.keys - 1),
    ):
        chex.assert_tree_all_finite(evaluate(name, edge))
    got = evaluate(name, towers._replace(ids=np.zeros(8, np.int32)))
    if name.startswith("info_nce") and towers.own_keys is None:
        assert magnitude(got) == 0


@pytest.mark.parametrize("name", ["info_nce", "sigmoid_contrastive"])
def test_zero_vectors_have_no_gradient(name):
    """Neither through the similarity with the own key nor through those with the others."""
    towers = make_towers()
    towers.queries[1], towers.keys[5] = 0, 0
    _, (gradients, _) = evaluate(name, towers)
    for gradient, zero in ((gradients["queries"], 1), (gradients["keys"], 5)):
        np.testing.assert_array_equal(np.any(gradient, axis=1)[zero], False)
        assert np.any(gradient)


@pytest.mark.slow
@every_loss
def test_masked_rows_do_not_leak(name):
    towers = towers_of(name, further=3)
    expected = evaluate(name, towers)
    poisoned = Towers(*(None if x is None else x.copy() for x in towers))
    pairs = towers.where & towers.key_where[:8]
    of_keys = np.concatenate([pairs, towers.key_where[8:]])
    poisoned.queries[~pairs] = np.nan
    poisoned.keys[~of_keys] = np.inf
    if poisoned.key_bias is not None:
        poisoned.key_bias[~of_keys] = np.nan
        poisoned.own_keys[~towers.own_key_where] = np.inf
        poisoned.own_keys[~pairs] = np.nan
    chex.assert_trees_all_equal(evaluate(name, poisoned), expected)


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
    (ValueError, "similarity", {"similarity": "l2"}),
    (ValueError, "equal_ids", {"equal_ids": "negative"}),
    (ValueError, "hardness", {"hardness": np.inf}),
    (TypeError, "margin_of_false_negatives", {"margin_of_false_negatives": "0.1"}),
    (TypeError, "`metrics` must be", {"metrics": 1}),
    (ValueError, "key_bias", {"key_bias": ones(5, np.float32)}),
    (TypeError, "key_bias", {"key_bias": zeros(6, np.int32)}),
    (ValueError, r"`own_keys`.* n = 5 and d = 4", {"own_keys": ones((5, 2, 3), np.float32)}),
    (ValueError, "own_keys", {"own_keys": ones((5, 4), np.float32)}),
    (TypeError, "own_keys", {"own_keys": zeros((5, 2, 4), np.int32)}),
    (
        ValueError,
        "`own_key_where` must come with `own_keys`",
        {"own_key_where": ones((5, 2), bool)},
    ),
    *(
        (error, "own_key_where", {"own_keys": ones((5, 2, 4), np.float32), "own_key_where": wrong})
        for error, wrong in ((ValueError, ones((5, 3), bool)), (TypeError, ones((5, 2), np.int32)))
    ),
]


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        (
            jaxloss.info_nce_loss,
            [
                (ValueError, "temperature", {"temperature": 0.0}),
                (ValueError, "logsumexp_penalty", {"logsumexp_penalty": np.nan}),
            ],
        ),
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
