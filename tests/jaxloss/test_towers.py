"""Losses of two towers. As variants of the loss table, the contract tests run over them, too."""

from functools import cache, partial
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import QUICK, P, magnitude, mesh, precision, raises, widen
from tests.tolerances import FLOAT32

LOSSES: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "info_nce": ("info_nce_loss", {}, {"temperature": 0.3}),
    "sigmoid_contrastive": ("sigmoid_contrastive_loss", {}, {"scale": 4.0, "bias": -1.5}),
    "info_nce_with_options": (
        "info_nce_loss",
        {
            "equal_ids": "positive",
            "margin_of_false_negatives": 0.3,
            "same_tower_negatives": True,
        },
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


Towers: TypeAlias = dict[str, Any]
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
    towers = {"queries": queries, "keys": keys, "ids": ids, "where": where, "key_where": key_where}
    if extra:
        towers |= {
            "key_bias": rng.normal(size=n + further),
            "own_keys": rng.normal(size=(n, 3, dim)),
        }
        towers["own_key_where"] = rng.random((n, 3)) < 0.7
    return towers


def towers_of(name: str, **options: Any) -> Towers:
    return make_towers(**options, extra="options" in name)


def find(name: str, module: Any = jaxloss) -> Any:
    function, options, _ = LOSSES[name]
    return partial(getattr(module, function), **options)


def total_and_terms(loss: Any, features: Any, params: Any, masks: Any):
    """A scalar of the mean and of every loss, and the losses. It takes arrays of any library."""
    loss = partial(loss, **features, **params, **masks)
    terms = loss(reduction="none")
    return loss() + (terms**2).sum(), terms


def differentiated(loss: Any) -> Any:
    """The jitted `(features, params, masks)` to `((total, terms), gradients)`."""
    run = jax.value_and_grad(partial(total_and_terms, loss), (0, 1), has_aux=True)
    return jax.jit(run, compiler_options=QUICK)


alone = cache(lambda name: differentiated(find(name)))


def split(towers: Towers, array: Any = lambda x: x) -> tuple[dict[str, Any], dict[str, Any]]:
    """The features and the masks that are given, by name."""
    features, masks = {}, {}
    for name, x in towers.items():
        (features if name in FLOATS else masks)[name] = array(x)
    return features, masks


def arguments(name: str, towers: Towers) -> Any:
    """The features, params and masks, as JAX arrays."""
    features, masks = split(towers, jnp.asarray)
    return features, jax.tree.map(jnp.asarray, LOSSES[name][2]), masks


def evaluate(name: str, towers: Towers) -> Any:
    with precision(np.float64):
        return widen(alone(name)(*arguments(name, towers)))


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


# Devices ----

SPREAD = {
    "info_nce": (("sharded_loss", 4, 5), ("ring", 2, 0), ("Explicit", 2, 0)),
    "sigmoid_contrastive": (("ring", 4, 5), ("sharded_loss", 2, 5), ("Explicit", 2, 5)),
    "info_nce_with_options": (("ring", 4, 5), ("Explicit", 4, 5), ("sharded_loss", 2, 5)),
    "sigmoid_contrastive_with_options": (("sharded_loss", 2, 5), ("ring", 2, 0)),
}
"""Ways to spread towers, numbers of devices, and of keys beyond the queries."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way", "devices", "further"),
    [
        pytest.param(name, *way, marks=pytest.mark.long if number > 1 else [])
        for name, ways in SPREAD.items()
        for number, way in enumerate(ways)
    ],
)
def test_devices_equal_one(name, way, devices, further, monkeypatch):
    towers = towers_of(name, further=further, seed=5)
    expected = evaluate(name, towers)
    on = mesh((devices,), kind=AxisType.Explicit if way == "Explicit" else AxisType.Auto)
    loss = find(name)
    if way != "Explicit":
        loss = jaxloss.sharded_loss(loss, on, "batch")
    if way == "ring":
        monkeypatch.setattr("jaxloss.pairs.visits.GATHERED_BYTES", 0)
        loss = partial(loss, block_size=3)  # Several tiles of a device.

    def place(x: Any) -> Any:
        rows = P("batch") if len(x) % devices == 0 else P()
        return jax.device_put(x, NamedSharding(on, rows))

    with precision(np.float64):
        features, params, masks = arguments(name, towers)
        if way == "Explicit":
            features, masks = jax.tree.map(place, (features, masks))
        got = widen(differentiated(loss)(features, params, masks))
    check(got, expected, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["info_nce", "sigmoid_contrastive"])
def test_ids_on_devices(name):
    """Without ids, all other keys are negatives: also those at the same place of another device.

    The largest unsigned id, which -1 is in this dtype, is as others, and not that of further keys.
    """
    queries, keys, of_rows, *_ = make_towers(further=4).values()
    ids = np.where(of_rows < 0, np.arange(8) + 10, of_rows).astype(np.uint32)
    ids[of_rows == 3] = np.iinfo(np.uint32).max
    loss = partial(find(name), **LOSSES[name][2])
    spread = jaxloss.sharded_loss(loss, mesh(), "batch")
    run, spread = (jax.jit(loss, compiler_options=QUICK) for loss in (loss, spread))
    rows, same = (np.float32(queries), np.float32(keys)), {"ids": jnp.asarray(of_rows)}
    for given, equal in (({}, {}), (same, same), ({"ids": jnp.asarray(ids)}, same)):
        np.testing.assert_allclose(spread(*rows, **given), run(*rows, **equal), rtol=4 * FLOAT32)


# Options ----

# An orthogonal array (Plackett and Burman): each pair of options meets on and on, and off and off.
GENERATOR = np.array([1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0], bool)
RUNS = [*(np.roll(GENERATOR, k) for k in range(15)), ~np.ones(15, bool)]
OFTEN = (0, 1, 2, 3)
"""Of four runs, these have the most pairs of options."""
PENALTY = "logsumexp_penalty"
PAIRED = (
    *("ids", "equal_ids", "key_bias", "own_keys", "hardness", "margin_of_false_negatives"),
    *(PENALTY, "symmetric", "similarity", "own_key_where", "block_size"),
    *("key_ids", "positive_in_denominator", "same_tower_negatives", "guide"),
)


@pytest.mark.parametrize("function", ["info_nce_loss", "sigmoid_contrastive_loss"])
@pytest.mark.parametrize(
    "run", [pytest.param(k, marks=[] if k in OFTEN else pytest.mark.long) for k in range(16)]
)
def test_pairs_of_options(function, run, monkeypatch):
    """Values, gradients and metrics of options that are on at the same time."""
    pytest.importorskip("torch")
    is_on = dict(zip(PAIRED, map(bool, RUNS[run]), strict=True))
    is_on["own_key_where"] &= is_on["own_keys"]
    towers = make_towers(further=3, seed=run, extra=True)
    rng, has_guide = np.random.default_rng(run), is_on["guide"]
    towers["key_ids"] = np.concatenate([towers["ids"], [3, 5, -1]]).astype(np.int32)
    is_on["key_ids"] &= is_on["ids"]
    for name, shape in (("guide", (8, 3)), ("key_guide", (11, 3)), ("own_key_guide", (8, 3, 3))):
        towers[name] = rng.normal(size=shape)
        is_on[name] = has_guide and (name != "own_key_guide" or is_on["own_keys"])
    for name in (
        *("ids", "key_bias", "own_keys", "own_key_where", "key_ids"),
        *("guide", "key_guide", "own_key_guide"),
    ):
        if not is_on[name]:
            del towers[name]
    options: dict[str, Any] = {
        "equal_ids": "positive" if is_on["equal_ids"] else "ignore",
        "similarity": "negative_squared_distance" if is_on["similarity"] else "cosine",
        "margin_of_false_negatives": -0.1 if is_on["margin_of_false_negatives"] else None,
    }
    params = {"scale": 3.0, "bias": -1.0}
    if function == "info_nce_loss":
        for name in ("symmetric", "positive_in_denominator", "same_tower_negatives"):
            options[name] = is_on[name]
        params = {"temperature": 0.4, **({PENALTY: 0.3} if is_on[PENALTY] else {})}
    params |= {"hardness": 0.6} if is_on["hardness"] else {}
    options |= {"guide_margin": 0.1} if has_guide else {}
    monkeypatch.setitem(LOSSES, "run", (function, options, params))
    expected = by_torch("run", towers)

    def total(features, params, masks):
        size = 4 if is_on["block_size"] else None
        loss = partial(find("run"), **features, **params, **masks, block_size=size, metrics=True)
        (terms, _), (mean, metrics) = loss(reduction="none"), loss()
        return mean + (terms**2).sum(), (terms, metrics)

    with precision(np.float64):
        compute = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), compiler_options=QUICK)
        (value, (terms, metrics)), gradients = widen(compute(*arguments("run", towers)))
    check(((value, terms), gradients), expected, 1e-10)
    np.testing.assert_allclose(metrics, dense_metrics(towers, options, params), rtol=1e-10)


def dense_metrics(towers: Towers, options: dict[str, Any], params: dict[str, float]) -> Any:
    """Those of the queries that count."""
    found, params = [], dict(params)
    line = (params.pop("scale", 1 / params.pop("temperature", 1.0)), params.pop("bias", 0.0))
    of_loss = "symmetric", PENALTY, "positive_in_denominator"
    decoupled = not options.get("positive_in_denominator", True)
    sides = 1 + options.get("symmetric", False)
    options = {k: x for k, x in (options | params).items() if k not in of_loss}

    @references.over_pairs
    def keep(queries, keys, ids, **of_rows):
        def logits(s):
            return line[0] * s + line[1]

        both = references.candidates(queries, keys, ids, logits, **of_rows)[:sides]
        for of_row in zip(*both, strict=True):
            if not decoupled or all(any(not x for *_, x in side) for side in of_row):
                found.append(of_row[0])
        return np.zeros(len(both[0]))

    features, masks = split(towers)
    keep(**features, **masks, **options)
    return references.contrastive_metrics(found, options.get("hardness", 0.0))


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
    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)
    with precision(np.float64):
        expected = gradient(jnp.asarray(queries), jnp.asarray(keys))
    got = gradient(np.float32(queries), np.float32(keys))
    np.testing.assert_allclose(got, expected, rtol=4 * FLOAT32)


@pytest.mark.slow
@every_loss
def test_pairs_without_negatives_and_zeros(name):
    """One id for all rows, zero rows, and equal rows have finite losses and gradients."""
    towers = towers_of(name)
    queries, nothing = towers["queries"] * (np.arange(8) != 1)[:, None], 0 * towers["queries"]
    one_id, zeros, *_ = results = [
        evaluate(name, towers | edge)
        for edge in (
            {"ids": 0 * towers["ids"]},
            {"queries": queries},
            {"queries": nothing, "keys": nothing},
            {"queries": nothing + 1, "keys": nothing - 1},
        )
    ]
    chex.assert_tree_all_finite(results)
    assert name != "info_nce" or magnitude(one_id) == 0
    if name in ("info_nce", "sigmoid_contrastive"):  # Cosines of a zero vector have no gradient.
        np.testing.assert_array_equal(zeros[1][0]["queries"].any(axis=1)[:2], [True, False])


@pytest.mark.slow
@every_loss
def test_masked_rows_do_not_leak(name):
    towers = towers_of(name, further=3)
    expected = evaluate(name, towers)
    pairs = towers["where"] & towers["key_where"][:8]
    of_keys = np.concatenate([pairs, towers["key_where"][8:]])
    towers["queries"][~pairs] = np.nan
    towers["keys"][~of_keys] = np.inf
    if "key_bias" in towers:
        towers["key_bias"][~of_keys] = np.nan
        towers["own_keys"][~towers["own_key_where"]] = np.inf
        towers["own_keys"][~pairs] = np.nan
    chex.assert_trees_all_equal(evaluate(name, towers), expected)


f32, i32 = partial(np.ones, dtype=np.float32), partial(np.zeros, dtype=np.int32)
FURTHER, QUERIES = r"`keys`.*m at least 5 and d = 4", r"`own_keys`.* n = 5 and d = 4"
OWN = {"own_keys": f32((5, 2, 4))}
GUIDES = {"guide": f32((5, 3)), "key_guide": f32((6, 3))}
WRONG: list[tuple[type[Exception], str, str, Any]] = [
    (ValueError, "", "queries", f32(4)),
    (TypeError, "", "queries", i32((5, 4))),
    (TypeError, "", "keys", i32((5, 4))),
    (ValueError, FURTHER, "keys", f32((4, 4))),
    (ValueError, FURTHER, "keys", f32((5, 3))),
    (ValueError, "", "ids", i32(6)),
    (TypeError, "", "ids", f32(5)),
    (ValueError, "", "key_where", np.ones(5, bool)),
    (TypeError, "", "key_where", i32(6)),
    (ValueError, "", "where", np.ones(6, bool)),
    (ValueError, "", "sample_weights", f32(6)),
    (ValueError, "", "reduction", "avg"),
    (ValueError, "", "block_size", 0),
    (ValueError, "", "similarity", "l2"),
    (ValueError, "", "equal_ids", "negative"),
    (ValueError, "", "hardness", np.inf),
    (TypeError, "", "margin_of_false_negatives", "0.1"),
    (TypeError, "`metrics` must be", "metrics", 1),
    (ValueError, "", "key_bias", f32(5)),
    (TypeError, "", "key_bias", i32(6)),
    (ValueError, QUERIES, "own_keys", f32((5, 2, 3))),
    (ValueError, "", "own_keys", f32((5, 4))),
    (TypeError, "", "own_keys", i32((5, 2, 4))),
    (ValueError, "must come with `own_keys`", "own_key_where", np.ones((5, 2), bool)),
    (ValueError, "", "own_key_where", OWN | {"own_key_where": np.ones((5, 3), bool)}),
    (ValueError, "`ids` is missing", "key_ids", i32(6)),
    (ValueError, "`key_ids` and `keys`", "key_ids", {"ids": i32(5), "key_ids": i32(5)}),
    (ValueError, "`key_guide` is missing", "guide", f32((5, 3))),
    (ValueError, "`guide` is missing", "own_key_guide", OWN | {"own_key_guide": f32((5, 2, 3))}),
    (ValueError, "", "own_key_guide", GUIDES | OWN | {"own_key_guide": f32((5, 2, 2))}),
    (ValueError, "must come with `own_keys`", "own_key_guide", f32((5, 2, 3))),
    (ValueError, "", "guide_margin", np.inf),
    (TypeError, "", "own_key_where", OWN | {"own_key_where": i32((5, 2))}),
]


@pytest.mark.parametrize(
    ("loss", "numbers"),
    [
        (jaxloss.info_nce_loss, {"temperature": 0.0, "logsumexp_penalty": np.nan}),
        (jaxloss.sigmoid_contrastive_loss, {"scale": 0.0, "bias": np.nan}),
    ],
)
def test_wrong_arguments_are_named(loss, numbers):
    own = [(ValueError, "", name, number) for name, number in numbers.items()]
    for error, match, name, wrong in WRONG + own:
        given = {"queries": f32((5, 4)), "keys": f32((6, 4))}
        given |= wrong if isinstance(wrong, dict) else {name: wrong}
        with raises(error, match or name):
            jax.eval_shape(lambda given=given: loss(**given))
