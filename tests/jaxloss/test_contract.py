"""Every property of the contract, over every row of the loss table.

`test_check_loss` has those that a loss of one's own is checked for, too, and that need a program of
their own: masked rows that equal removed ones, `jax.vmap`, `jax.checkpoint`, second derivatives.

What a row computes is tested over all of them; what it checks and its labels' dtypes over each
loss once, and over those that are computed in tiles.
"""

import inspect
import re
from functools import cache, partial
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
    assert_close,
    cast,
    check_against_references,
    cotangent_of,
    default,
    enable_x64,
    evaluate,
    finite,
    magnitude,
    make_batch,
    merge,
    numbers_of,
    over,
    reference_values,
    rounded,
    widen,
)
from tests.jaxloss.loss_table import (
    CASES,
    CLASSES,
    DIM,
    FUNCTIONS,
    LOSSES,
    ONE_OF_A_KIND,
    TILES_OF_A_KIND,
    LossRow,
)
from tests.tolerances import FLOAT32, FLOAT64, rounded_to

TILED = tuple(row for row in CASES if row.has_tiles)
OFTEN = LOSSES + TILES_OF_A_KIND
EVERY_LOSS = (
    *LOSSES,
    *(
        row
        for row in CASES
        if row.name in ("info_nce", "sigmoid_contrastive", "koleo")
        or row.name.endswith("of_one_batch")
    ),
)
"""With those of other arguments, which have no plain row."""
HALF_OFTEN = tuple(row for row in ONE_OF_A_KIND if row.name in ("softmax", "nca", "direct_sum"))

every_case, every_loss = over(CASES), over(LOSSES)
LONG, SLOW = [pytest.mark.long], [pytest.mark.slow]
ON_ACCELERATORS = OFTEN + tuple(row for row in TILED if row.name == "sigmoid_contrastive_in_tiles")


def on_accelerators(row: LossRow, dtype: str) -> list[pytest.MarkDecorator]:
    """Two programs a row, in the dtypes of an accelerator; all tests of a row share them."""
    often = row in ON_ACCELERATORS and dtype in ("float32", "bfloat16")
    return [pytest.mark.accelerator] if often else []


def in_dtypes(**rows: tuple[LossRow, ...]):
    """Each row in its dtypes. Half precision is not in `make quick`."""
    often = {"float64": CASES, "float32": OFTEN, "bfloat16": EVERY_LOSS, "float16": HALF_OFTEN}
    return [
        pytest.param(
            row,
            np.dtype(dtype),
            id=f"{row.name}-{dtype}",
            marks=[
                *(LONG if row not in often[dtype] else SLOW if "16" in dtype else []),
                *on_accelerators(row, dtype),
            ],
        )
        for dtype, of in rows.items()
        for row in of
    ]


SINGLE = in_dtypes(float64=CASES, float32=LOSSES + TILES_OF_A_KIND)
HALF = in_dtypes(bfloat16=LOSSES + TILES_OF_A_KIND, float16=ONE_OF_A_KIND)
IN_EVERY_DTYPE = in_dtypes(
    float64=CASES, float32=OFTEN, bfloat16=EVERY_LOSS + TILES_OF_A_KIND, float16=ONE_OF_A_KIND
)


def in_both_dtypes(first: str, *others: str):
    """The first way in float64; the others in float32, if other tests compile the row for it."""
    return pytest.mark.parametrize(
        ("row", "how", "dtype"),
        [
            pytest.param(
                row,
                how,
                np.dtype(dtype),
                id=f"{row.name}-{how}",
                marks=on_accelerators(row, dtype),
            )
            for row in CASES
            for how in (first, *others)
            for dtype in ["float32" if how != first and row in OFTEN else "float64"]
        ],
    )


def value_and_grad(row: LossRow):
    """A function from `(args, where)` to the mean loss and its gradients, not jitted."""

    def run(args, where=None):
        def loss(values):
            merged = merge(args, row.differentiable, values)
            return row.function(*merged, where=where, **row.kwargs)

        return jax.value_and_grad(loss)(tuple(args[k] for k in row.differentiable))

    return run


# Values and gradients ----


@every_case
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.usefixtures("checked_annotations")
def test_float64_equals_references(row, masked):
    for seed in (0, 1):
        batch = make_batch(row, seed, masked=masked)
        check_against_references(row, batch, np.float64, (1e-10, 1e-10), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "dtype"), in_dtypes(float32=LOSSES + TILES_OF_A_KIND))
def test_float32_equals_references(row, dtype):
    batch = make_batch(row, seed=2)
    batch = batch._replace(args=rounded(batch.args, row.differentiable, dtype))
    # The exponents of some losses enlarge the roundings of similarities.
    check_against_references(row, batch, dtype, (4 * FLOAT32, FLOAT32), 4 * FLOAT32)


# `make test` has a loss of each way to write derivatives by hyperparameters.
NUMBERS_OFTEN = tuple(
    row
    for row in LOSSES
    if row.name
    in (
        *("margin_softmax", "supervised_contrastive", "multi_similarity", "two_way", "asymmetric"),
        *("direct_sum", "spectral_sum"),
    )
)


WITH_NUMBERS = tuple(row for row in CASES if numbers_of(row))
ONE_FORM_OF_EACH = tuple(row for row in LOSSES + TILES_OF_A_KIND if numbers_of(row))


@cache
def gradient_by_numbers(row: LossRow):
    """The jitted `(numbers, args, where)` to the mean and its gradient by the numbers."""

    def run(numbers, args, where):
        def mean(numbers):
            return row.function(*args, where=where, **{**row.kwargs, **numbers})

        return jax.value_and_grad(mean)(numbers)

    return jax.jit(run, compiler_options=QUICK)


def by_numbers(row: LossRow, batch: Batch, numbers: dict[str, Any] | None = None) -> Any:
    """The mean, and its gradient by all hyperparameters, which are traced."""
    with enable_x64(True):
        args = cast(batch.args, row.differentiable, np.float64)
        run = gradient_by_numbers(row)
        results = run(numbers_of(row) if numbers is None else numbers, args, batch.where)
        return jax.tree.map(np.asarray, results)


@pytest.mark.slow
@over(ONE_FORM_OF_EACH, often=NUMBERS_OFTEN)
def test_gradients_of_hyperparameters(row):
    """Those of every float option, traced, against the slope of the mean."""
    batch, numbers, step = make_batch(row, seed=3), numbers_of(row), 1e-6
    got = by_numbers(row, batch)[1]
    for name, number in numbers.items():
        if row.name == "circle" and name == "margin":  # Its weights are constants of the gradient.
            continue
        moved = [by_numbers(row, batch, {**numbers, name: number + s * step})[0] for s in (1, -1)]
        slope = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(got[name].sum(), slope, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.slow
@over(ONE_FORM_OF_EACH, often=NUMBERS_OFTEN)
def test_rows_that_do_not_count_do_not_leak_into_hyperparameters(row):
    how = ("where", "labels")[ONE_FORM_OF_EACH.index(row) % 2]
    batch, rows, _ = without_rows(make_batch(row, seed=9, masked=False), how)
    numbers = numbers_of(row)
    value, gradients = by_numbers(row, batch)
    assert finite(gradients)
    if "sample_margin" in numbers:
        assert not gradients["sample_margin"][rows].any()
        numbers["sample_margin"][rows] = np.nan
    poisoned = batch.with_arg(0, rows, POISON)
    chex.assert_trees_all_equal(by_numbers(row, poisoned, numbers), (value, gradients))


@pytest.mark.slow
@over(
    tuple(
        row
        for row in WITH_NUMBERS
        if (row.takes_logits or row.kind == "classifier")
        # With smoothing, a class of -inf costs infinity; margins of features are no logits.
        and not row.kwargs.get("label_smoothing")
        and "sample_margins" not in row.name
    ),
    often=tuple(row for row in NUMBERS_OFTEN if row.takes_logits),
)
def test_hyperparameters_beside_infinite_and_largest_logits(row):
    """A class that is left out, of -inf, is as one of a very low logit."""
    batch = make_batch(row, seed=9, masked=False)
    scored, labels, *rest = batch.args
    largest = 0.9 * float(np.finfo(np.float64).max)
    own = np.eye(CLASSES)[labels] if labels.ndim == 1 else labels
    some = (np.arange(12) % 3 > 0) & np.any(own == 0, axis=1)

    def args(low, high):
        """The others' and the own logits of some rows, or the bias of the last class."""
        if row.kind == "classifier":
            last = CLASSES - 1
            bias = np.where(np.arange(CLASSES) == last, low, rest[1])
            return (scored, np.where(labels == last, 0, labels), rest[0], bias)
        logits = np.where(some[:, None] & (own == 0), low, scored)
        return (np.where(some[:, None] & (own > 0), high, logits), labels)

    extremes = [(-np.inf, 1e4)]
    # An angle moves a cosine by a share of it: one of 1e308 by more than a rounding error of 1e292.
    extremes += [(-largest, largest)] if row.takes_logits and "angles" not in row.name else []
    extremes += [(-np.inf, np.inf)] if row.multi_hot else []
    value, expected = by_numbers(row, batch._replace(args=args(-1e4, 1e4)))
    for low, high in extremes:
        got_value, got = by_numbers(row, batch._replace(args=args(low, high)))
        np.testing.assert_allclose(got_value, value, rtol=FLOAT64, atol=FLOAT64)
        for name in {*got} - {"label_smoothing"}:
            np.testing.assert_allclose(
                got[name], expected[name], rtol=FLOAT64, atol=FLOAT64, err_msg=f"{name}, {low}"
            )


# Counting ----


@every_loss
def test_reductions(row):
    """The sum is that of the terms; weights that sum to less than one are not divided by one."""
    batch = make_batch(row, seed=4)
    got = evaluate(row, batch, cotangent=np.ones_like(cotangent_of(row, batch)))
    if row.terms is not None:
        chex.assert_trees_all_close(got["none"].sum(), got["sum"], rtol=1e-12)
        chex.assert_trees_all_close(got["none_grad"], got["sum_grad"], rtol=1e-10, atol=1e-13)
    if row.terms == "samples":  # Others weigh the samples within their terms.
        scaled = batch._replace(sample_weights=batch.sample_weights * 1e-3)
        other = evaluate(row, scaled, np.float64)
        chex.assert_trees_all_close(other["mean"], got["mean"], rtol=1e-12)
        chex.assert_trees_all_close(
            other["mean_grad"][:-1], got["mean_grad"][:-1], rtol=1e-10, atol=1e-13
        )


@in_both_dtypes("where", "labels", "both")
def test_nothing_counts(row, how, dtype):
    batch = make_batch(row, seed=6)
    if how != "where":
        batch = batch.with_arg(1, slice(None), -1)
    if how != "labels":
        batch = batch._replace(where=np.zeros(12, bool))
    if how == "both":
        batch = batch.with_arg(0, slice(None), np.nan)
    for leaf in jax.tree.leaves(evaluate(row, batch, dtype)):
        assert np.all(leaf == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "n"),
    [
        pytest.param(row, n, id=f"{row.name}-{n}", marks=[] if often else pytest.mark.long)
        for n, rows in ((0, LOSSES + TILED), (1, LOSSES))
        for row in rows
        for often in [n == 0 and row in ONE_OF_A_KIND]
    ],
)
def test_one_sample_and_none(row, n):
    """Without samples, the value and every gradient are zero."""
    batch = make_batch(row, seed=7, n=1, masked=False)
    batch = batch._replace(args=tuple(a[:n] if k < 2 else a for k, a in enumerate(batch.args)))
    if row.multi_hot:
        batch = batch._replace(args=(batch.args[0], np.array([[1, 0, -1, 0]], np.int32)[:n]))
    run = jax.jit(value_and_grad(row), compiler_options=QUICK)
    value, grads = run(cast(batch.args, row.differentiable, np.float32), jnp.ones(n, bool))
    assert finite(grads)
    if n == 0:
        assert value == 0
        assert magnitude(grads) == 0
    else:
        expected = row.reference(*batch.args, reduction="mean")
        np.testing.assert_allclose(value, expected, rtol=4 * FLOAT32)


@every_case
def test_no_positives_leave_the_metric_undefined(row):
    """Every class once: a metric loss is undefined, a classification loss is not."""
    batch = make_batch(row, seed=8, masked=False)
    if not row.multi_hot:
        labels = np.full_like(batch.args[1], -1)
        labels[[2, 5, 6, 9]] = [1, 0, 3, 2]
        batch = batch._replace(args=(batch.args[0], labels, *batch.args[2:]))
    got = evaluate(row, batch)
    assert finite(got)
    chex.assert_trees_all_close(got["mean"], reference_values(row, batch)["mean"], rtol=FLOAT64)
    if row.needs_positives:
        assert magnitude(got) == 0


# NaN and infinity ----


POISON = np.array([[np.nan], [np.inf], [-np.inf]])


def without_rows(batch: Batch, how: str) -> tuple[Batch, list[int], tuple[int, ...]]:
    """Three rows are padding or ignored. Returns them, and the shape of an array beside them."""
    # Norms of a batch with a zero row are computed with more care.
    batch = batch.with_arg(0, 2, 0)
    rows = [1, 4, 10]
    of_rows = (3, *[1] * (batch.args[1].ndim - 1))
    if how == "where":
        where = batch.where.copy()
        where[rows] = False
        return batch._replace(where=where), rows, of_rows
    negative = np.array([-1, -2, -100]).reshape(of_rows)
    return batch.with_arg(1, rows, negative), rows, of_rows


@pytest.mark.parametrize(("row", "dtype"), IN_EVERY_DTYPE)
def test_rows_that_do_not_count_do_not_leak(row, dtype):
    for how in ("where", "labels"):
        batch, rows, of_rows = without_rows(make_batch(row, seed=9, masked=False), how)
        batch = batch._replace(sample_weights=np.linspace(0.3, 1.9, 12))
        expected = evaluate(row, batch, dtype)
        assert finite(expected)
        assert not widen(expected["mean_grad"])[0][rows].any()

        poisoned = batch.with_arg(0, rows, POISON)
        if how == "where":
            poisoned = poisoned.with_arg(1, rows, np.array([10**6, 1, 0]).reshape(of_rows))
        sample_weights = batch.sample_weights.copy()
        sample_weights[rows] = np.nan
        got = evaluate(row, poisoned._replace(sample_weights=sample_weights), dtype)
        chex.assert_trees_all_equal(widen(got), widen(expected))


@every_loss
def test_a_negative_weight_gives_nan(row):
    """In every reduction; that of a row that does not count has no effect."""
    batch, rows, _ = without_rows(make_batch(row, seed=9, masked=False), "where")
    batch = batch._replace(sample_weights=np.linspace(0.3, 1.9, 12))
    expected = evaluate(row, batch)
    batch.sample_weights[rows] = -1
    chex.assert_trees_all_equal(evaluate(row, batch), expected)
    counts = np.setdiff1d(np.arange(12), rows)
    batch.sample_weights[counts] *= -1
    got = evaluate(row, batch)
    for reduction in row.reductions:
        defined = np.asarray(expected[reduction]) != 0
        assert np.any(defined)
        assert np.all(np.isnan(got[reduction])[defined])


def compares_rows(row: LossRow) -> bool:
    """Whether a sample without weight is still a reference of the others."""
    return "sum" in row.name or (row.kind == "features" and row.terms is not None)


@over(tuple(row for row in CASES if not compares_rows(row)))
def test_a_sample_of_weight_0_is_as_one_that_is_masked(row):
    rows = [1, 4, 10]
    batch = make_batch(row, seed=9, masked=False)
    batch = batch._replace(sample_weights=np.linspace(0.3, 1.9, 12))
    expected = evaluate(row, batch.with_mask(rows))
    sample_weights = batch.sample_weights.copy()
    sample_weights[rows] = 0
    batch = batch._replace(sample_weights=sample_weights)

    def check(batch, last):
        got = evaluate(row, batch)
        for reduction in row.reductions:
            assert_close(got[reduction], expected[reduction], FLOAT64)
            gradients = f"{reduction}_grad"
            assert_close(got[gradients][:last], expected[gradients][:last], FLOAT64)

    check(batch, -1)
    # Where the weights are inside the logarithms, nothing else of the sample counts either.
    if row.name in ("class_wise", "proxy_anchor"):
        check(batch.with_arg(0, rows, POISON), None)
    if row.name == "proxy_anchor":
        check(batch.with_arg(1, rows, 10**6), None)


@in_both_dtypes("nan", "infinite")
def test_nan_in_a_counting_sample_is_not_hidden(row, how, dtype):
    batch = make_batch(row, seed=10, masked=False)
    batch = batch.with_arg(1, 3, 1) if row.multi_hot else batch.with_arg(1, [3, 8], 0)
    place, poison = ((3, 1), np.nan) if how == "nan" else (3, np.inf)
    got = evaluate(row, batch.with_arg(0, place, poison), dtype)
    if how == "nan":
        check_nan(row, got, 1 if row.terms == "classes" else 3)
    else:
        assert not np.isfinite(got["mean"]) or row.multi_hot


def check_nan(row, got, term):
    """All reductions are NaN, and so is a term, and something in every gradient."""
    for reduction in row.reductions:
        if reduction not in got:
            continue
        assert np.isnan(np.atleast_1d(got[reduction])[0 if reduction != "none" else term])
        assert all(np.isnan(gradient).any() for gradient in got[f"{reduction}_grad"])


@over(tuple(row for row in CASES if row.bounds_labels))
def test_label_out_of_range_is_nan(row):
    batch = make_batch(row, seed=11, masked=False)
    for label in (CLASSES, CLASSES + 1, 10**6):
        got = evaluate(row, batch.with_arg(1, 5, label))
        check_nan(row, got, 5)
    if row.takes_logits:
        assert "none" not in got or np.isnan(got["none"]).sum() == 1
        assert np.isnan(got["mean_grad"][0]).any(axis=1).sum() == 1


# Dtypes ----


@pytest.mark.parametrize(("row", "dtype"), HALF)
def test_half_precision_is_computed_in_float32(row, dtype):
    batch = make_batch(row, seed=12)
    batch = batch._replace(args=rounded(batch.args, row.differentiable, dtype))
    got, expected = evaluate(row, batch, dtype), evaluate(row, batch, np.float32)
    assert_close(got["mean"], expected["mean"], FLOAT32)
    assert_close(widen(got["mean_grad"]), expected["mean_grad"], rounded_to(dtype))


@pytest.mark.slow
@over(tuple(row for row in LOSSES if len(row.differentiable) > 1))
def test_bfloat16_features_beside_float32_parameters(row):
    batch = make_batch(row, seed=13)
    batch = batch._replace(
        args=rounded(batch.args, row.differentiable[:1], jnp.bfloat16),
        where=np.ones(12, bool),
        sample_weights=np.ones(12),
    )
    features, *rest = cast(batch.args, row.differentiable, np.float32)
    run = jax.jit(value_and_grad(row), compiler_options=QUICK)
    value, grads = run((features.astype(jnp.bfloat16), *rest))
    got = evaluate(row, batch, np.float32)
    expected, expected_grads = got["mean"], got["mean_grad"][:-1]
    assert value.dtype == np.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16, *[np.float32] * (len(grads) - 1)]
    np.testing.assert_allclose(value, expected, rtol=FLOAT32)
    for k, (ours, theirs) in enumerate(zip(grads, expected_grads, strict=True)):
        assert_close(widen(ours), theirs, 4 * FLOAT32 if k else rounded_to(jnp.bfloat16))


@pytest.mark.slow
@every_loss
def test_float32_beside_float64(row):
    """With x64 enabled, float32 inputs still give float32, whatever the dtype of the labels."""
    with enable_x64(True):
        args = [
            jnp.asarray(a, np.float32 if k != 1 else np.int64)
            for k, a in enumerate(make_batch(row).args)
        ]
        for leaf in jax.tree.leaves(jax.eval_shape(value_and_grad(row), args)):
            assert leaf.dtype == np.float32


OF_SORTED_OR_SOFT_LABELS = (
    *("sigmoid_multi_hot", "triplet_semihard", "triplet_references_semihard"),
    *("triplet_all", "prototypical_references"),
)


@pytest.mark.slow
@over((*ONE_OF_A_KIND, *(row for row in CASES if row.name in OF_SORTED_OR_SOFT_LABELS)))
def test_labels_of_any_dtype(row):
    batch = make_batch(row, seed=14, masked=False)
    labels = np.maximum(batch.args[1], 0)  # Unsigned ones have no unknown targets.
    batch = batch._replace(args=(batch.args[0], labels, *batch.args[2:]))
    scored, _, *rest = cast(batch.args, row.differentiable, np.float32)
    dtypes = (np.uint8, np.int8, np.uint32, *((np.bool_, jnp.bfloat16) if row.multi_hot else ()))
    every = [jnp.asarray(labels, dtype) for dtype in dtypes]

    def values(every):
        return [row.function(scored, labels, *rest, **row.kwargs) for labels in every]

    got = jax.jit(values, compiler_options=QUICK)(every)
    np.testing.assert_allclose(
        got, np.full(len(dtypes), evaluate(row, batch, np.float32)["mean"]), rtol=FLOAT32
    )


# Edge cases ----


def edge_batches(row: LossRow):
    """The hard inputs of the contract as (name, batch), all within the range of float16."""
    plain = make_batch(row, seed=15, masked=False)
    n, width = plain.args[0].shape
    signs = np.where(np.arange(n) % 3 == 0, -1.0, 1.0)
    one_class = plain.args[1] if row.multi_hot else np.ones(n, np.int32)
    yield "zeros", plain.with_arg(0, slice(None), 0.0)
    yield "some zeros", plain.with_arg(0, [0, 3, 7], 0.0)
    yield "duplicates", plain.with_arg(0, slice(None), plain.args[0][:1])
    yield (
        "two duplicates",
        plain.with_arg(0, [1, 2, 6], plain.args[0][0]),
    )
    yield "one class", plain._replace(args=(plain.args[0], one_class, *plain.args[2:]))
    # Rows that are plus or minus a basis vector: cosines of 1, -1 and 0, and large logits.
    corners = signs[:, None] * np.eye(width)[np.arange(n) % width]
    for scale in (1.0, 1e3, 1e4) if row.takes_logits else (1.0, 1e3):
        args = plain.with_arg(0, slice(None), scale * corners).args
        if row.kind == "classifier":
            # Orthonormal columns times 10: the logits reach 1e4 and the features lie in their span.
            weights = 10 * np.eye(width, plain.args[2].shape[1])
            args = (*args[:2], weights, args[3])
        yield f"corners {scale:g}", plain._replace(args=args)
    if row.takes_logits:
        yield "constant logits", plain.with_arg(0, slice(None), 1e4 * signs[:, None])
    if row.kind == "classifier":
        features, labels, weights, bias = plain.args
        yield "zero classifier", plain._replace(args=(features, labels, 0 * weights, bias))
        yield "rank one", plain._replace(args=(features, labels, 0 * weights + 0.5, bias))
        yield "zero column", plain._replace(args=(features, labels, weights * [1, 0, 1, 1], bias))
        everything = (0 * features, labels, 0 * weights, 0 * bias)
        yield "all zero", plain._replace(args=everything)
    if row.kind in ("prototypes", "proxies"):
        features, labels, prototypes = plain.args
        yield "zero prototypes", plain._replace(args=(features, labels, 0 * prototypes))
        yield "all zero", plain._replace(args=(0 * features, labels, 0 * prototypes))
        same = prototypes[:, :1] + 0 * prototypes
        for sign in (1, -1):
            towards = plain.with_arg(0, slice(None), sign * same.reshape(width, -1)[:, 0])
            yield f"cosine {sign}", towards._replace(args=(*towards.args[:2], same))


def finite_but_for_overflow(got, wide, dtype) -> bool:
    """Whether a value is infinite only where it exceeds the range of the dtype."""
    limit = float(jnp.finfo(dtype).max)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wide), strict=True)
    return all(np.all(np.isfinite(x.astype(float)) | (np.abs(y) > limit)) for x, y in pairs)


@pytest.mark.parametrize(("row", "dtype"), SINGLE + HALF)
def test_edge_cases_are_finite_and_right(row, dtype):
    for name, batch in edge_batches(row):
        batch = batch._replace(args=rounded(batch.args, row.differentiable, dtype))
        got = evaluate(row, batch, dtype)
        if not finite(got):
            wide = evaluate(row, batch, reductions=tuple(r for r in row.reductions if r in got))
            assert finite_but_for_overflow(got, wide, dtype), (name, got)
        expected = reference_values(row, batch)
        # A small loss may be the difference of two large numbers, and has their absolute error.
        # They are as large as the largest logit or squared feature.
        largest = magnitude(expected[row.reductions[-1]]) + magnitude(batch.args[0]) ** (
            1 if row.takes_logits else 2
        )
        tolerance = 1e-12 if dtype == np.float64 else FLOAT32 / 4
        for reduction in (name for name in row.reductions if name in got):
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


def wrong_arguments(row: LossRow):
    """(error, words of its message, positional arguments or None, keywords)."""
    scored, labels, *rest = args = specs(row)
    name, targets = scored_name(row), row.kind == "targets"
    for shape in [(), (5,), (5, 3, 2), (1, 5, DIM), (5, 0)]:
        yield ValueError, [name], [float_spec(*shape), *args[1:]], {}
    for dtype in (np.int32, np.bool_, np.complex64):
        yield TypeError, [name], [jax.ShapeDtypeStruct(scored.shape, dtype), *args[1:]], {}

    shapes = [(), (1,), (6,), (5, 1), (6, CLASSES), (1, CLASSES), (5, 5, 2)]
    if targets:
        shapes.append((5,))
    elif row.name not in ("sigmoid", "supervised_contrastive"):  # They take multi-hot targets.
        shapes.append((5, CLASSES))
    for shape in shapes:
        words = ["targets" if targets else "labels", *map(str, shape[:1])]
        yield ValueError, words, [scored, int_spec(*shape), *rest], {}
    for dtype in (np.complex64,) if targets else (np.float32, np.bool_):
        spec = jax.ShapeDtypeStruct(labels.shape, dtype)
        yield TypeError, ["targets" if targets else "labels"], [scored, spec, *rest], {}

    for option, right, wrong in (
        ("where", np.bool_, (np.int32, np.float32)),
        ("sample_weights", np.float32, (np.int32, np.bool_)),
    ):
        for shape in [(), (1,), (6,), (5, 1)]:
            yield ValueError, [option], None, {option: jax.ShapeDtypeStruct(shape, right)}
        for dtype in wrong:
            yield TypeError, [option], None, {option: jax.ShapeDtypeStruct((5,), dtype)}
    for reduction in ("avg", "Mean", "", None):
        yield ValueError, ["reduction"], None, {"reduction": reduction}

    if row.kind == "classifier":
        weights, bias = rest
        dim, classes = weights.shape
        for shape in [(dim,), (dim + 1, classes), (1, classes), (classes, dim), (1, dim, classes)]:
            words = ["weights", str(shape[0])]
            yield ValueError, words, [scored, labels, float_spec(*shape), bias], {}
        for shape in [(), (1,), (classes + 1,), (1, classes)]:
            yield ValueError, ["bias"], [scored, labels, weights, float_spec(*shape)], {}
        yield TypeError, ["weights"], [scored, labels, int_spec(dim, classes), bias], {}
        yield TypeError, ["bias"], [scored, labels, weights, int_spec(classes)], {}

    for option in inspect.signature(row.function).parameters:
        if isinstance(default(row, option), bool):
            for value in ("False", 1, None, np.ones(2, bool), jax.ShapeDtypeStruct((), np.bool_)):
                yield TypeError, [option, "bool"], None, {option: value}

    for option, values in row.invalid.items():
        for value in values:
            yield ValueError, [option], None, {option: value}
        if option in ("num_classes", "num_groups", "block_size"):
            yield TypeError, [option], None, {option: 2.5}
        if isinstance(default(row, option), float):
            for value in ("1.0", [1.0], np.ones(2), 1j):
                # An array has an angle for each class.
                wrong_shape = option == "angular_margin" and isinstance(value, np.ndarray)
                yield ValueError if wrong_shape else TypeError, [option], None, {option: value}
            for value in (np.inf, -np.inf, np.nan):
                yield ValueError, [option], None, {option: value}


@every_loss
def test_wrong_arguments_are_named(row):
    jax.eval_shape(partial(row.function, **row.kwargs), *specs(row))
    for error, mentions, args, options in wrong_arguments(row):
        raises(row, error, mentions, args, **options)


@over(LOSSES + TILES_OF_A_KIND, often=LOSSES)
def test_hyperparameters_widen_nothing(row):
    """Neither NumPy's numbers nor traced ones."""
    numbers = [name for name in row.invalid if isinstance(default(row, name), float)]
    with enable_x64(True):
        wide = {name: np.float64(default(row, name)) for name in numbers}
        run = partial(row.function, **{**row.kwargs, **wide})
        assert jax.eval_shape(run, *specs(row)).dtype == np.float32
        traced = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in numbers_of(row).items()}

        def run_traced(args, numbers):
            return row.function(*args, **{**row.kwargs, **numbers})

        assert jax.eval_shape(run_traced, specs(row, 12), traced).dtype == np.float32


@pytest.mark.parametrize(
    ("function", "name", "shapes"),
    [
        *(
            (row.function, name, [a.shape for a in row.make_inputs(np.random, 5, np.float32)])
            for row in FUNCTIONS
            for name in row.invalid
        ),
        (partial(jaxloss.update_class_means, labels=jnp.arange(5)), "decay", [(4, 3), (5, 4)]),
        (jaxloss.spectral_overlap, "power", [(4, 3)]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_hyperparameters_of_functions_widen_nothing(function, name, shapes):
    def run(number, *arrays):
        return function(*arrays, **{name: number})

    with enable_x64(True):
        arrays = [float_spec(*shape) for shape in shapes]
        got = jax.eval_shape(run, jax.ShapeDtypeStruct((), np.float64), *arrays)
    assert got.dtype == np.float32


# Transformations ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=LONG if row.name == "direct_sum" else [])
        for row in LOSSES
        if row.name in ("softmax", "prototypical", "direct_sum")
    ],
)
def test_rows_that_do_not_count_do_not_leak_without_jit(row):
    """Operation by operation, XLA turns no product with a mask into a choice."""
    batch = make_batch(row, seed=26)
    expected = evaluate(row, batch)["mean"]
    padding = ~batch.where
    batch = batch.with_arg(0, padding, np.nan).with_arg(1, padding, 10**6)
    args = cast(batch.args, row.differentiable, np.float32)
    weights = jnp.where(batch.where, jnp.asarray(batch.sample_weights, np.float32), jnp.nan)
    where = jnp.asarray(batch.where)
    with jax.disable_jit():
        got = row.function(*args, where=where, sample_weights=weights, **row.kwargs)
    np.testing.assert_allclose(got, expected, rtol=4 * FLOAT32)


@every_loss
def test_numpy_arrays_are_accepted(row):
    batch = make_batch(row, seed=27)
    args = [
        np.asarray(a, np.float32 if k in row.differentiable else np.int32)
        for k, a in enumerate(batch.args)
    ]
    jax.eval_shape(lambda: row.function(*args, where=batch.where, **row.kwargs))


@every_loss
def test_labels_that_do_not_fit_are_named(row):
    """JAX would cut them off without a word."""
    scored, labels, *rest = (
        np.asarray(a, np.float32 if k in row.differentiable else np.int64)
        for k, a in enumerate(make_batch(row, seed=27).args)
    )
    name = "targets" if row.kind == "targets" else "labels"
    with harness.raises(OverflowError, f"`{name}` must have integers that fit into int32, got -"):
        jax.eval_shape(lambda: row.function(scored, labels * 2**32, *rest, **row.kwargs))


# Signatures ----


@every_loss
def test_signature(row):
    parameters = inspect.signature(row.function).parameters
    positional = [
        name for name, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    expected = [scored_name(row), "targets" if row.kind == "targets" else "labels"]
    if row.kind == "classifier":
        expected += ["weights", "bias"]
        assert parameters["bias"].default is None
    if row.kind == "prototypes":
        expected += ["prototypes"]
        assert parameters["assignment"].default is None
    if row.kind == "proxies":
        expected += ["proxies"]
    assert positional == expected
    common = {"where": None, "sample_weights": None, "reduction": "mean", "axis_name": None}
    for name, p in parameters.items():
        if name not in positional:
            assert p.kind is inspect.Parameter.KEYWORD_ONLY, name
    assert {name: parameters[name].default for name in common} == common


@over(tuple(row for row in LOSSES if row.kind == "classifier"))
def test_bias_is_optional(row):
    batch = make_batch(row, seed=28, masked=False)
    args = cast(batch.args, row.differentiable, np.float32)
    got = jax.jit(partial(row.function, **row.kwargs))(*args[:3])
    zero = batch._replace(args=(*batch.args[:3], 0 * batch.args[3]))
    chex.assert_trees_all_close(got, evaluate(row, zero)["mean"], rtol=FLOAT32)
