"""Every property of the contract, over every row of the loss table."""

import inspect
import re
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import harness
from tests.jaxloss.harness import (
    QUICK,
    Batch,
    cast,
    evaluate,
    finite,
    magnitude,
    make_batch,
    merge,
    reference_values,
    rounded,
    widen,
    with_labels,
    with_scored,
)
from tests.jaxloss.loss_table import CASES, CLASSES, DIM, LOSSES, LossRow

every_case = pytest.mark.parametrize("row", CASES, ids=lambda row: row.name)
every_loss = pytest.mark.parametrize("row", LOSSES, ids=lambda row: row.name)
HALF = (jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow))


def value_and_grad(row: LossRow, **common):
    """A function from `(args, where)` to the mean loss and its gradients, not jitted."""

    def run(args, where=None):
        def loss(values):
            merged = merge(args, row.differentiable, values)
            return row.function(*merged, where=where, **row.kwargs, **common)

        return jax.value_and_grad(loss)(tuple(args[k] for k in row.differentiable))

    return run


def torch_values(row: LossRow, batch: Batch):
    """The results of `evaluate`, computed by PyTorch. Skips the test if it is not installed."""
    pytest.importorskip("torch")
    from tests.jaxloss import torch_references

    return torch_references.evaluate(
        row.torch_reference,
        batch.args,
        row.differentiable,
        reductions=row.reductions,
        where=batch.where,
        sample_weights=batch.sample_weights,
        cotangent=batch.cotangent,
    )


# Values and gradients ----


@every_case
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_float64_equals_references(row, masked):
    for seed in (0, 1):
        batch = make_batch(row, seed, masked=masked)
        got, expected = evaluate(row, batch, np.float64), reference_values(row, batch)
        for reduction in row.reductions:
            chex.assert_trees_all_close(
                got[reduction], np.asarray(expected[reduction]), rtol=1e-10, atol=1e-10
            )


@every_case
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_float64_equals_torch(row, masked):
    for seed in (0, 1):
        batch = make_batch(row, seed, masked=masked)
        got, expected = evaluate(row, batch, np.float64), torch_values(row, batch)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
        chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-10)


def rounded_batch(row: LossRow) -> Batch:
    batch = make_batch(row, seed=2)
    return batch._replace(args=rounded(batch.args, row.differentiable, np.float32))


@every_case
def test_float32_equals_references(row):
    batch = rounded_batch(row)
    got, expected = widen(evaluate(row, batch, np.float32)), reference_values(row, batch)
    for reduction in row.reductions:
        chex.assert_trees_all_close(
            got[reduction], np.asarray(expected[reduction]), rtol=1e-5, atol=1e-6
        )


@every_case
def test_float32_equals_torch(row):
    batch = rounded_batch(row)
    got = widen(evaluate(row, batch, np.float32))
    chex.assert_trees_all_close(got, torch_values(row, batch), rtol=1e-5, atol=5e-6)


# Counting ----


def plain_mean(row: LossRow, batch: Batch, keep):
    """The mean over a batch of the rows in `keep`, without a mask and weights."""
    args = tuple(a[keep] if k < 2 else a for k, a in enumerate(batch.args))
    with jax.enable_x64(True):
        return jax.tree.map(
            np.asarray, jax.jit(value_and_grad(row))(cast(args, row.differentiable, np.float64))
        )


@every_loss
def test_masked_rows_equal_removed_rows(row):
    """Also tests the defaults of `where` and `sample_weights`."""
    batch = make_batch(row, seed=3)._replace(sample_weights=np.ones(12))
    ignored = np.all((batch.args[1] < 0).reshape(12, -1), axis=1)
    keep = batch.where & ~ignored
    assert 0 < keep.sum() < 12
    got = evaluate(row, batch, np.float64)
    value, grads = plain_mean(row, batch, keep)
    chex.assert_trees_all_close(got["mean"], value, rtol=1e-12, atol=1e-12)
    for k, full, removed in zip(row.differentiable, got["mean_grad"], grads, strict=False):
        if k == 0:
            chex.assert_trees_all_close(full[keep], removed, rtol=1e-10, atol=1e-12)
            assert not full[~keep].any()
        else:
            chex.assert_trees_all_close(full, removed, rtol=1e-10, atol=1e-12)


@every_case
def test_sum_is_the_sum_of_none(row):
    if row.terms is None:
        pytest.skip("has no terms")
    got = evaluate(row, make_batch(row, seed=4), np.float64)
    chex.assert_trees_all_close(got["none"].sum(), got["sum"], rtol=1e-12)
    batch = make_batch(row, seed=4)
    got = evaluate(row, batch._replace(cotangent=np.ones_like(batch.cotangent)), np.float64)
    chex.assert_trees_all_close(got["none_grad"], got["sum_grad"], rtol=1e-10, atol=1e-13)


@every_case
def test_mean_is_independent_of_the_scale_of_the_weights(row):
    """Weights that sum to less than one must not be divided by one."""
    if row.terms != "samples":
        pytest.skip("weighs the samples within its terms")
    batch = make_batch(row, seed=5)
    scaled = batch._replace(sample_weights=batch.sample_weights * 1e-3)
    got, expected = evaluate(row, scaled, np.float64), evaluate(row, batch, np.float64)
    chex.assert_trees_all_close(got["mean"], expected["mean"], rtol=1e-12)
    chex.assert_trees_all_close(
        got["mean_grad"][:-1], expected["mean_grad"][:-1], rtol=1e-10, atol=1e-13
    )


@every_case
@pytest.mark.parametrize("how", ["where", "labels", "both"])
def test_nothing_counts(row, how):
    batch = make_batch(row, seed=6)
    if how != "where":
        batch = batch._replace(args=with_labels(batch.args, slice(None), -1))
    if how != "labels":
        batch = batch._replace(where=np.zeros(12, bool))
    if how == "both":
        batch = batch._replace(args=with_scored(batch.args, slice(None), np.nan))
    got = evaluate(row, batch)
    for leaf in jax.tree.leaves(got):
        assert np.all(leaf == 0)


@every_loss
def test_single_sample(row):
    batch = make_batch(row, seed=7, n=1, masked=False)
    if row.multi_hot:
        batch = batch._replace(args=(batch.args[0], np.array([[1, 0, -1, 0]])))
    got = evaluate(row, batch)
    assert finite(got)
    chex.assert_trees_all_close(widen(got["mean"]), reference_values(row, batch)["mean"], rtol=1e-5)


@every_case
def test_no_positives_leave_the_metric_undefined(row):
    """Every class once: a metric loss is undefined, a classification loss is not."""
    batch = make_batch(row, seed=8, masked=False)
    if not row.multi_hot:
        batch = batch._replace(args=with_labels(batch.args, slice(None), -1))
        labels = batch.args[1].copy()
        labels[[2, 5, 6, 9]] = [1, 0, 3, 2]
        batch = batch._replace(args=(batch.args[0], labels, *batch.args[2:]))
    got = evaluate(row, batch)
    assert finite(got)
    chex.assert_trees_all_close(widen(got["mean"]), reference_values(row, batch)["mean"], rtol=1e-5)
    if row.needs_positives:
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(got))


# NaN and infinity ----


@every_case
@pytest.mark.parametrize("how", ["where", "labels"])
def test_rows_that_do_not_count_do_not_leak(row, how):
    batch = make_batch(row, seed=9, masked=False)
    rows = [1, 4, 10]
    if how == "where":
        where = batch.where.copy()
        where[rows] = False
        batch = batch._replace(where=where)
    else:
        batch = batch._replace(args=with_labels(batch.args, rows, -1))
    batch = batch._replace(sample_weights=np.linspace(0.3, 1.9, 12))
    expected = evaluate(row, batch)
    assert finite(expected)
    assert not expected["mean_grad"][0][rows].any()

    args = with_scored(batch.args, rows, np.array([[np.nan], [np.inf], [-np.inf]]))
    if how == "where":
        args = with_labels(args, rows, 10**6)
    sample_weights = batch.sample_weights.copy()
    sample_weights[rows] = np.nan
    got = evaluate(row, batch._replace(args=args, sample_weights=sample_weights))
    chex.assert_trees_all_equal(got, expected)


@every_case
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_in_a_counting_sample_is_not_hidden(row, poison):
    batch = make_batch(row, seed=10, masked=False)
    if row.multi_hot:
        batch = batch._replace(args=with_labels(batch.args, 3, 1))
    else:
        batch = batch._replace(args=with_labels(batch.args, [3, 8], 0))
    args = with_scored(batch.args, (3, 1) if np.isnan(poison) else 3, poison)
    got = evaluate(row, batch._replace(args=args))
    term = 1 if row.terms == "classes" else 3
    if np.isnan(poison):
        for reduction in row.reductions:
            assert np.isnan(np.atleast_1d(got[reduction])[0 if reduction != "none" else term])
            assert np.isnan(got[f"{reduction}_grad"][0]).any()
    else:
        assert not np.isfinite(got["mean"]) or row.multi_hot


@every_case
def test_label_out_of_range_is_nan(row):
    if not row.bounds_labels:
        pytest.skip("any label is in range")
    batch = make_batch(row, seed=11, masked=False)
    for label in (CLASSES, CLASSES + 1, 10**6):
        args = with_labels(batch.args, 5, label)
        got = evaluate(row, batch._replace(args=args))
        for reduction in row.reductions:
            assert np.isnan(np.atleast_1d(got[reduction])[0 if reduction != "none" else 5])
            assert np.isnan(got[f"{reduction}_grad"][0]).any()
    if row.takes_logits:
        assert np.isnan(got["none"]).sum() == 1
        assert np.isnan(got["mean_grad"][0]).any(axis=1).sum() == 1


# Dtypes ----


@every_loss
@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32(row, dtype):
    batch = make_batch(row, seed=12)
    batch = batch._replace(args=rounded(batch.args, row.differentiable, dtype))
    got, expected = evaluate(row, batch, dtype), evaluate(row, batch, np.float32)
    for reduction in row.reductions:
        assert got[reduction].dtype == np.float32
        chex.assert_trees_all_close(got[reduction], expected[reduction], rtol=2e-6, atol=1e-6)
        gradients = got[f"{reduction}_grad"]
        assert all(g.dtype == dtype for g in gradients[:-1])
        assert gradients[-1].dtype == np.float32
        # A gradient has two paths at most, and is rounded to the dtype of the input on each.
        for gradient, wide in zip(gradients, expected[f"{reduction}_grad"], strict=True):
            chex.assert_trees_all_close(
                widen(gradient),
                widen(wide),
                rtol=0,
                atol=2 * float(jnp.finfo(dtype).eps) * magnitude(wide),
            )


@every_case
def test_wide_dtypes_stay(row):
    for dtype in (np.float32, np.float64):
        for leaf in jax.tree.leaves(evaluate(row, make_batch(row, seed=13), dtype)):
            assert leaf.dtype == dtype


@every_case
def test_float32_beside_float64(row):
    """With x64 enabled, float32 inputs still give float32, whatever the dtype of the labels."""
    batch = make_batch(row)
    with jax.enable_x64(True):
        args = [
            jnp.asarray(a, np.float32 if k != 1 else np.int64) for k, a in enumerate(batch.args)
        ]
        value, grads = jax.eval_shape(value_and_grad(row), args)
        assert value.dtype == np.float32
        assert all(g.dtype == np.float32 for g in grads)


@every_loss
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32], ids=["uint8", "int8", "uint32"])
def test_any_integer_labels(row, dtype):
    batch = make_batch(row, seed=14, masked=False)
    labels = np.maximum(batch.args[1], 0)  # Unsigned ones have no unknown targets.
    batch = batch._replace(args=(batch.args[0], labels, *batch.args[2:]))
    args = cast(batch.args, row.differentiable, np.float32)
    narrow = (args[0], jnp.asarray(labels, dtype), *args[2:])
    got = jax.jit(partial(row.function, **row.kwargs), compiler_options=QUICK)(*narrow)
    chex.assert_trees_all_close(got, evaluate(row, batch)["mean"], rtol=1e-6)


# Edge cases ----


def edge_batches(row: LossRow):
    """The hard inputs of the contract as (name, batch), all within the range of float16."""
    plain = make_batch(row, seed=15, masked=False)
    n, width = plain.args[0].shape
    signs = np.where(np.arange(n) % 3 == 0, -1.0, 1.0)
    one_class = plain.args[1] if row.multi_hot else np.ones(n, np.int32)
    yield "zeros", plain._replace(args=with_scored(plain.args, slice(None), 0.0))
    yield "some zeros", plain._replace(args=with_scored(plain.args, [0, 3, 7], 0.0))
    yield "duplicates", plain._replace(args=with_scored(plain.args, slice(None), plain.args[0][:1]))
    yield (
        "two duplicates",
        plain._replace(args=with_scored(plain.args, [1, 2, 6], plain.args[0][0])),
    )
    yield "one class", plain._replace(args=(plain.args[0], one_class, *plain.args[2:]))
    # Rows that are plus or minus a basis vector: cosines of 1, -1 and 0, and large logits.
    corners = signs[:, None] * np.eye(width)[np.arange(n) % width]
    for scale in (1.0, 1e3, 1e4) if row.takes_logits else (1.0, 1e3):
        args = with_scored(plain.args, slice(None), scale * corners)
        if row.kind == "classifier":
            # Orthonormal columns times 10: the logits reach 1e4 and the features lie in their span.
            weights = 10 * np.eye(width, plain.args[2].shape[1])
            args = (*args[:2], weights, args[3])
        yield f"corners {scale:g}", plain._replace(args=args)
    if row.takes_logits:
        args = with_scored(plain.args, slice(None), 1e4 * signs[:, None])
        yield "constant logits", plain._replace(args=args)
    if row.kind == "classifier":
        features, labels, weights, bias = plain.args
        yield "zero classifier", plain._replace(args=(features, labels, 0 * weights, bias))
        yield "rank one", plain._replace(args=(features, labels, 0 * weights + 0.5, bias))
        yield "zero column", plain._replace(args=(features, labels, weights * [1, 0, 1, 1], bias))
        everything = (0 * features, labels, 0 * weights, 0 * bias)
        yield "all zero", plain._replace(args=everything)
    if row.kind == "prototypes":
        features, labels, prototypes = plain.args
        yield "zero prototypes", plain._replace(args=(features, labels, 0 * prototypes))
        yield "all zero", plain._replace(args=(0 * features, labels, 0 * prototypes))
        same = prototypes[:, :1] + 0 * prototypes
        for sign in (1, -1):
            args = with_scored(plain.args, slice(None), sign * same[:, 0])
            yield f"cosine {sign}", plain._replace(args=(*args[:2], same))


def finite_but_for_overflow(got, wide, dtype) -> bool:
    """Whether a value is infinite only where it exceeds the range of the dtype."""
    limit = float(jnp.finfo(dtype).max)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wide), strict=True)
    return all(np.all(np.isfinite(x.astype(float)) | (np.abs(y) > limit)) for x, y in pairs)


@every_case
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_edge_cases_are_finite_and_right(row, dtype):
    check_edge_cases(row, dtype)


@pytest.mark.parametrize(
    "row",
    [row for row in CASES if row in LOSSES or row.name.endswith(("_in_tiles", "_in_blocks"))],
    ids=lambda row: row.name,
)
@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
def test_edge_cases_in_half_precision(row, dtype):
    check_edge_cases(row, dtype)


def check_edge_cases(row: LossRow, dtype: Any) -> None:
    for name, batch in edge_batches(row):
        batch = batch._replace(args=rounded(batch.args, row.differentiable, dtype))
        got = evaluate(row, batch, dtype)
        assert finite(got) or finite_but_for_overflow(got, evaluate(row, batch), dtype), (name, got)
        expected = reference_values(row, batch)
        # A small loss may be the difference of two large numbers, and has their absolute error.
        # They are as large as the largest logit or squared feature.
        largest = magnitude(expected[row.reductions[-1]]) + magnitude(batch.args[0]) ** (
            1 if row.takes_logits else 2
        )
        tolerance = 1e-12 if dtype == np.float64 else 1e-6
        for reduction in row.reductions:
            np.testing.assert_allclose(
                got[reduction],
                expected[reduction],
                rtol=10 * tolerance,
                atol=tolerance * largest * (12 if reduction == "sum" else 1),
                err_msg=f"{name}, {reduction}",
            )


# Errors ----


def specs(row: LossRow, n: int = 5):
    """The shapes and dtypes of the arguments."""
    args = make_batch(row, n=n).args
    return [
        jax.ShapeDtypeStruct(a.shape, np.float32 if k in row.differentiable else np.int32)
        for k, a in enumerate(args)
    ]


def raises(row: LossRow, error, mentions, args=None, /, **options):
    """Tracing alone must raise, and the message must mention all of `mentions`."""
    args = specs(row) if args is None else args
    dynamic = {k: v for k, v in options.items() if isinstance(v, jax.ShapeDtypeStruct)}
    static = {k: v for k, v in options.items() if k not in dynamic}
    with harness.raises(error, "") as caught:
        jax.eval_shape(partial(row.function, **{**row.kwargs, **static}), *args, **dynamic)
    # An error of JAX about incompatible shapes does not name the argument.
    for mention in mentions:
        assert re.search(rf"(?<!\w){re.escape(mention)}(?!\w)", str(caught.value)), (
            mention,
            str(caught.value),
        )


def float_spec(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def int_spec(*shape):
    return jax.ShapeDtypeStruct(shape, np.int32)


def scored_name(row):
    return "logits" if row.takes_logits else "features"


def labels_name(row):
    return "targets" if row.kind == "targets" else "labels"


@every_case
def test_correct_shapes_raise_nothing(row):
    jax.eval_shape(partial(row.function, **row.kwargs), *specs(row))


@every_case
@pytest.mark.parametrize("shape", [(), (5,), (5, 3, 2), (1, 5, DIM)], ids=str)
def test_wrong_rank_of_the_scored(row, shape):
    raises(row, ValueError, [scored_name(row)], [float_spec(*shape), *specs(row)[1:]])


@every_case
@pytest.mark.parametrize(
    "dtype", [np.int32, np.bool_, np.complex64], ids=["int", "bool", "complex"]
)
def test_wrong_dtype_of_the_scored(row, dtype):
    args = specs(row)
    bad = jax.ShapeDtypeStruct(args[0].shape, dtype)
    raises(row, TypeError, [scored_name(row)], [bad, *args[1:]])


@every_case
@pytest.mark.parametrize(
    "shape", [(), (1,), (6,), (5, 1), (6, CLASSES), (1, CLASSES), (5, 5, 2)], ids=str
)
def test_wrong_shape_of_the_labels(row, shape):
    mentions = [labels_name(row), *map(str, shape[:1])]
    raises(row, ValueError, mentions, [specs(row)[0], int_spec(*shape), *specs(row)[2:]])


@every_case
def test_multi_hot_labels_where_they_have_no_meaning(row):
    if row.function is jaxloss.sigmoid_loss or row.kind == "targets":
        pytest.skip("takes multi-hot targets")
    args = specs(row)
    raises(row, ValueError, ["labels"], [args[0], int_spec(5, CLASSES), *args[2:]])


@every_case
@pytest.mark.parametrize("dtype", [np.float32, np.bool_], ids=["float", "bool"])
def test_wrong_dtype_of_the_labels(row, dtype):
    if row.kind == "targets":
        pytest.skip("takes bools and floats")
    args = specs(row)
    bad = jax.ShapeDtypeStruct((5,), dtype)
    raises(row, TypeError, ["labels"], [args[0], bad, *args[2:]])


@pytest.mark.parametrize(
    "row", [row for row in LOSSES if row.kind == "targets"], ids=lambda row: row.name
)
def test_wrong_targets(row):
    logits, targets = specs(row)
    raises(row, ValueError, ["targets", "5"], [logits, int_spec(5)])
    complex_targets = jax.ShapeDtypeStruct(targets.shape, np.complex64)
    raises(row, TypeError, ["targets"], [logits, complex_targets])


@every_case
def test_wrong_where(row):
    for shape in [(), (1,), (6,), (5, 1)]:
        raises(row, ValueError, ["where"], where=jax.ShapeDtypeStruct(shape, np.bool_))
    for dtype in (np.int32, np.float32):
        raises(row, TypeError, ["where"], where=jax.ShapeDtypeStruct((5,), dtype))


@every_case
def test_wrong_sample_weights(row):
    for shape in [(), (1,), (6,), (5, 1)]:
        raises(row, ValueError, ["sample_weights"], sample_weights=float_spec(*shape))
    for dtype in (np.int32, np.bool_):
        spec = jax.ShapeDtypeStruct((5,), dtype)
        raises(row, TypeError, ["sample_weights"], sample_weights=spec)


@every_case
@pytest.mark.parametrize("reduction", ["avg", "Mean", "", None])
def test_wrong_reduction(row, reduction):
    raises(row, ValueError, ["reduction"], reduction=reduction)


@every_case
def test_wrong_classifier(row):
    if row.kind != "classifier":
        pytest.skip("takes no classifier")
    features, labels, weights, bias = specs(row)
    dim, classes = weights.shape
    for shape in [(dim,), (dim + 1, classes), (1, classes), (classes, dim), (1, dim, classes)]:
        args = [features, labels, float_spec(*shape), bias]
        raises(row, ValueError, ["weights", str(shape[0])], args)
    raises(row, TypeError, ["weights"], [features, labels, int_spec(dim, classes), bias])
    for shape in [(), (1,), (classes + 1,), (1, classes)]:
        raises(row, ValueError, ["bias"], [features, labels, weights, float_spec(*shape)])
    raises(row, TypeError, ["bias"], [features, labels, weights, int_spec(classes)])


@pytest.mark.parametrize(
    ("row", "name", "value"),
    [(row, name, value) for row in LOSSES for name, value in row.invalid],
    ids=lambda x: x.name if isinstance(x, LossRow) else str(x),
)
def test_hyperparameters_out_of_range(row, name, value):
    raises(row, ValueError, [name], **{name: value})


def default(row: LossRow, name: str):
    return row.kwargs.get(name, inspect.signature(row.function).parameters[name].default)


NUMBERS = [
    (row, name)
    for row in LOSSES
    for name in dict.fromkeys(name for name, _ in row.invalid)
    if isinstance(default(row, name), float)
]
every_number = pytest.mark.parametrize(
    ("row", "name"), NUMBERS, ids=lambda x: getattr(x, "name", x)
)


@every_number
def test_hyperparameters_that_are_no_numbers(row, name):
    for value in ("1.0", [1.0], np.ones(2), 1j):
        raises(row, TypeError, [name], **{name: value})
    for value in (np.inf, -np.inf, np.nan):
        raises(row, ValueError, [name], **{name: value})


@every_number
def test_hyperparameters_widen_nothing(row, name):
    with jax.enable_x64(True):
        kwargs = {**row.kwargs, name: np.float64(default(row, name))}
        assert jax.eval_shape(partial(row.function, **kwargs), *specs(row)).dtype == np.float32


@every_case
def test_empty_batch(row):
    """No samples: the value and every gradient are zero."""
    args = cast(make_batch(row, seed=29, masked=False).args, row.differentiable, np.float32)
    args = (args[0][:0], args[1][:0], *args[2:])
    value, grads = jax.jit(value_and_grad(row), compiler_options=QUICK)(args, jnp.ones(0, bool))
    assert value == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))


@every_case
def test_no_columns(row):
    scored, *rest = specs(row)
    raises(row, ValueError, [scored_name(row)], [float_spec(scored.shape[0], 0), *rest])


# Transformations ----


@every_loss
def test_vmap_equals_a_loop(row):
    batches = [make_batch(row, seed) for seed in (20, 21, 22)]
    stack = [np.stack(leaves) for leaves in zip(*(b.args for b in batches), strict=True)]
    args = cast(stack, row.differentiable, np.float32)
    where = jnp.asarray(np.stack([b.where for b in batches]))
    value, grads = jax.jit(jax.vmap(value_and_grad(row)), compiler_options=QUICK)(args, where)
    for k, batch in enumerate(batches):
        expected = evaluate(row, batch._replace(sample_weights=np.ones(12)))
        chex.assert_trees_all_close(value[k], expected["mean"], rtol=1e-5)
        got = jax.tree.map(lambda g, k=k: np.asarray(g[k]), grads)
        chex.assert_trees_all_close(got, expected["mean_grad"][:-1], rtol=1e-4, atol=2e-6)


@every_loss
def test_checkpoint_changes_nothing(row):
    batch = make_batch(row, seed=23)

    def loss(values, args, where):
        merged = merge(args, row.differentiable, values)
        return row.function(*merged, where=where, **row.kwargs)

    with jax.enable_x64(True):
        args = cast(batch.args, row.differentiable, np.float64)
        values = tuple(args[k] for k in row.differentiable)
        gradient = jax.jit(jax.grad(jax.checkpoint(loss)), compiler_options=QUICK)
        grads = gradient(values, args, jnp.asarray(batch.where))
        grads = jax.tree.map(np.asarray, grads)
    expected = evaluate(row, batch._replace(sample_weights=np.ones(12)), np.float64)
    chex.assert_trees_all_close(grads, expected["mean_grad"][:-1], rtol=1e-10, atol=1e-13)


@every_case
def test_forward_over_reverse(row):
    """The Hessian times a direction equals central differences of the gradient."""
    batch = make_batch(row, seed=24)._replace(sample_weights=np.ones(12))
    rng = np.random.default_rng(25)
    direction = tuple(
        rng.normal(size=batch.args[k].shape) * (k not in row.constant) for k in row.differentiable
    )
    with jax.enable_x64(True):
        args = cast(batch.args, row.differentiable, np.float64)
        where = jnp.asarray(batch.where)

        def gradient(values):
            return value_and_grad(row)(merge(args, row.differentiable, values), where)[1]

        values = tuple(args[k] for k in row.differentiable)
        hessian = jax.jit(lambda x, v: jax.jvp(gradient, (x,), (v,)), compiler_options=QUICK)
        _, got = hessian(values, tuple(map(jnp.asarray, direction)))
        got = jax.tree.map(np.asarray, got)
    step = 1e-5
    moved = []
    for sign in (1, -1):
        shifted = tuple(
            batch.args[k] + sign * step * v
            for k, v in zip(row.differentiable, direction, strict=True)
        )
        shifted_batch = batch._replace(args=merge(batch.args, row.differentiable, shifted))
        moved.append(evaluate(row, shifted_batch, np.float64)["mean_grad"][:-1])
    expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), *moved)
    assert magnitude(expected) > 1e-3 or row.piecewise_linear
    # The error of central differences with this step is about 1e-9.
    chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in LOSSES if row.name in ("softmax", "prototypical", "direct_sum")],
    ids=lambda row: row.name,
)
def test_without_jit(row):
    """Called op by op, as in a notebook."""
    batch = make_batch(row, seed=26)
    args = cast(batch.args, row.differentiable, np.float32)
    where = jnp.asarray(batch.where)
    got = row.function(*args, where=where, **row.kwargs)
    expected = evaluate(row, batch._replace(sample_weights=np.ones(12)))
    chex.assert_trees_all_close(got, expected["mean"], rtol=1e-5)


@every_case
def test_numpy_arrays_are_accepted(row):
    batch = make_batch(row, seed=27)
    args = [
        np.asarray(a, np.float32 if k in row.differentiable else np.int32)
        for k, a in enumerate(batch.args)
    ]
    with harness.unchecked():  # The annotations say JAX arrays.
        jax.eval_shape(lambda: row.function(*args, where=batch.where, **row.kwargs))


# Signatures ----


@every_loss
def test_signature(row):
    parameters = inspect.signature(row.function).parameters
    positional = [
        name for name, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    expected = [scored_name(row), labels_name(row)]
    if row.kind == "classifier":
        expected += ["weights", "bias"]
        assert parameters["bias"].default is None
    if row.kind == "prototypes":
        expected += ["prototypes"]
        assert parameters["assignment"].default is None
    assert positional == expected
    common = {"where": None, "sample_weights": None, "reduction": "mean", "axis_name": None}
    for name, p in parameters.items():
        assert p.annotation is not inspect.Parameter.empty, name
        if name not in positional:
            assert p.kind is inspect.Parameter.KEYWORD_ONLY, name
    assert {name: parameters[name].default for name in common} == common


@pytest.mark.parametrize(
    "row", [row for row in LOSSES if row.kind == "classifier"], ids=lambda row: row.name
)
def test_bias_is_optional(row):
    batch = make_batch(row, seed=28, masked=False)
    args = cast(batch.args, row.differentiable, np.float32)
    got = jax.jit(partial(row.function, **row.kwargs))(*args[:3])
    zero = batch._replace(args=(*batch.args[:3], 0 * batch.args[3]))
    chex.assert_trees_all_close(got, evaluate(row, zero)["mean"], rtol=1e-6)
