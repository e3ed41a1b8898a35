"""The contract over every row of the loss table: the rules of `check_loss`, and more.

A rule is finite differences or another property of a loss alone. Here are also the references, the
errors, and what the rules leave to a loss of one's own, such as labels that are out of range.
"""

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
from jaxloss.testing import RULES
from tests.jaxloss import harness
from tests.jaxloss.harness import (
    QUICK,
    Batch,
    assert_close,
    cast,
    check_against_references,
    checked,
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
    EVERY_LOSS,
    FUNCTIONS,
    LOSSES,
    TILES_OF_A_KIND,
    TYPICAL,
    LossRow,
)
from tests.tolerances import FLOAT32, FLOAT64, rounded_to

OFTEN = EVERY_LOSS + TILES_OF_A_KIND
every_case, every_loss = over(CASES), over(LOSSES)
LONG, SLOW = [pytest.mark.long], [pytest.mark.slow]
ROWS_IN = {"float64": CASES, "float32": OFTEN, "bfloat16": OFTEN, "float16": TYPICAL}
"""The rows that are tested in a dtype, which is a program of its own. Half precision is not in
`make quick`."""
ON_ACCELERATORS = (*OFTEN, *(row for row in CASES if row.name == "sigmoid_contrastive_in_tiles"))


def marks_of(row: LossRow, dtype: str) -> list[pytest.MarkDecorator]:
    """Two programs a row, in the dtypes of an accelerator; all tests of a row share them."""
    on_accelerators = row in ON_ACCELERATORS and dtype in ("float32", "bfloat16")
    marks = [pytest.mark.accelerator] if on_accelerators else []
    return marks + (SLOW if "16" in dtype else [])


def in_dtypes(*dtypes: str):
    return pytest.mark.parametrize(
        ("row", "dtype"),
        [
            pytest.param(row, np.dtype(dtype), id=f"{row.name}-{dtype}", marks=marks_of(row, dtype))
            for dtype in dtypes or ROWS_IN
            for row in ROWS_IN[dtype]
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
@in_dtypes("float32")
def test_float32_equals_references(row, dtype):
    batch = make_batch(row, seed=2)
    batch = batch._replace(args=rounded(batch.args, row.differentiable, dtype))
    # The exponents of some losses enlarge the roundings of similarities.
    check_against_references(row, batch, dtype, (4 * FLOAT32, FLOAT32), 4 * FLOAT32)


@in_dtypes("bfloat16", "float16")
def test_half_precision_is_computed_in_float32(row, dtype):
    batch = make_batch(row, seed=12)
    batch = batch._replace(args=rounded(batch.args, row.differentiable, dtype))
    got, expected = evaluate(row, batch, dtype), evaluate(row, batch, np.float32)
    assert_close(got["mean"], expected["mean"], FLOAT32)
    assert_close(widen(got["mean_grad"]), expected["mean_grad"], rounded_to(dtype))


@in_dtypes()
def test_edge_cases_are_finite_and_right(row, dtype):
    """Those of the rules, and of a single number for all logits."""
    loss, rng = checked(row, dtype), np.random.default_rng(15)
    plain = loss.batch(rng, 12)
    cases = [case for rule in RULES if rule.batches for case in rule.batches(loss, plain, rng)]
    for what, batch in cases:
        batch = loss.rounded(batch)
        got, expected = loss.evaluate(batch), reference_values(row, batch, loss.reductions)
        if not finite(got):
            wide = checked(row).evaluate(batch, loss.reductions)
            assert finite_but_for_overflow(got, wide, dtype), (what, got)
        # A small loss may be the difference of two large numbers, and has their absolute error.
        # They are as large as the largest logit or squared feature.
        power = 1 if row.takes_logits else 2
        largest = magnitude(expected) + magnitude(batch.args[0]) ** power
        tolerance = 1e-12 if dtype == np.float64 else FLOAT32 / 4
        for reduction, value in expected.items():
            atol = tolerance * largest * (12 if reduction == "sum" else 1)
            np.testing.assert_allclose(
                got.values[reduction], value, 10 * tolerance, atol, err_msg=f"{what}, {reduction}"
            )
        if not magnitude(expected):  # Such as a loss that is undefined without a positive.
            assert magnitude(got) <= tolerance * largest, what


def finite_but_for_overflow(got, wide, dtype) -> bool:
    """Whether a value is infinite only where it exceeds the range of the dtype."""
    limit = float(jnp.finfo(dtype).max)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wide), strict=True)
    return all(np.all(np.isfinite(x.astype(float)) | (np.abs(y) > limit)) for x, y in pairs)


# Rules of `check_loss` ----

COMPILED = ("no_rows", "masks", "hyperparameters", "second_derivatives", "vmap")
"""These need further programs of a row: `make long` tests every row."""
OF_PADDING = ("nothing_counts", "padding_leaks", "ignored_labels", "hidden_nan")
"""And these are tested in every dtype."""


def rules():
    for rule in RULES:
        if rule.part or rule.batches or rule.name == "reference":  # They are tested above.
            continue
        for dtype in ROWS_IN if rule.name in OF_PADDING else ["float64"]:
            for row in ROWS_IN[dtype]:
                if rule.name in ("sums", "weights") and "mining" in row.kwargs:
                    continue  # The terms are triplets, and not rows.
                often = rule.name == "hyperparameters" and row in LOSSES
                often = often or (rule.name == "no_rows" and row in TYPICAL)
                marks = SLOW if often else LONG if rule.name in COMPILED else []
                yield pytest.param(
                    rule,
                    row,
                    np.dtype(dtype),
                    id=f"{rule.name}-{row.name}-{dtype}",
                    marks=[*marks, *marks_of(row, dtype)],
                )


@pytest.mark.parametrize(("rule", "row", "dtype"), rules())
def test_rule(rule, row, dtype):
    loss, rng = checked(row, dtype), np.random.default_rng(9)
    batch = loss.rounded(loss.batch(rng, 12))
    if rule.name in OF_PADDING:  # Norms of a batch with a zero row are computed with more care.
        batch = batch.with_arg(0, 2, 0.0)
    if rule.name == "hyperparameters":
        batch = batch._replace(numbers=numbers_of(row))
    rule.check(loss, batch, rng)


# Hyperparameters ----

ENDS = {
    **dict.fromkeys(("temperature", "positive_temperature", "negative_temperature"), (0.01, 1e3)),
    **dict.fromkeys(("scale", "positive_scale", "negative_scale"), (0.1, 64.0)),
    **dict.fromkeys(("margin", "power", "positive_focus", "negative_focus"), (0.0, 2.0)),
    **dict.fromkeys(("invariance", "variance", "covariance"), (0.0, 25.0)),
    **dict.fromkeys(("leak", "binary_weight", "off_diagonal"), (0.0, 1.0)),
    **dict.fromkeys(("label_smoothing", "clip"), (0.0, 0.9)),
    **{"angular_margin": (0.0, 3.0), "threshold": (0.0, -0.5), "metric_weight": (0.0, 10.0)},
    **{"epsilon": (1e-4, 100.0), "ramp": (-5.0, 0.5), "bias": (0.0, -10.0)},
    **{"logsumexp_penalty": (0.0, 1.0), "soft_cap": (0.1, 50.0)},
}
"""Values of hyperparameters far from their defaults."""


def by_numbers(row: LossRow, batch: Batch, numbers: dict[str, Any]) -> Any:
    """The mean, and its gradient by hyperparameters, which are traced."""
    values, gradients = checked(row).evaluate(batch._replace(numbers=numbers), ("mean",))
    return values["mean"], {name: gradients["mean"][name] for name in numbers}


@pytest.mark.slow
@over(tuple(row for row in CASES if numbers_of(row)), often=LOSSES)
def test_gradients_of_hyperparameters(row):
    """Those of every float option, against the slope of the mean; and values at both ends."""
    batch, numbers, step = make_batch(row, seed=3), numbers_of(row), 1e-6
    value, got = by_numbers(row, batch, numbers)
    for name, number in numbers.items():
        for end in ENDS.get(name, ()):
            there = {**numbers, name: np.full_like(number, end)}
            expected = reference_values(row, batch._replace(numbers=there), ("mean",))["mean"]
            found = by_numbers(row, batch, there)[0]
            np.testing.assert_allclose(found, expected, 1e-9, 1e-9, err_msg=f"{name} of {end}")
        if name in row.constant:
            continue
        moved = [by_numbers(row, batch, {**numbers, name: number + s * step})[0] for s in (1, -1)]
        slope = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(got[name].sum(), slope, rtol=1e-5, atol=1e-7, err_msg=name)
    if "sample_margin" in numbers:
        margins = np.where(batch.where, numbers["sample_margin"], np.nan)
        poisoned = by_numbers(row, batch, numbers | {"sample_margin": margins})
        chex.assert_trees_all_equal(poisoned, (value, got))


@pytest.mark.slow
@over(
    tuple(
        row
        for row in CASES
        if numbers_of(row)
        and (row.takes_logits or row.kind == "classifier")
        # With smoothing, a class of -inf costs infinity; margins of features are no logits; a cap
        # raises very low logits.
        and not {"label_smoothing", "soft_cap"} & {*row.kwargs}
        and row.adapt is None
    ),
    often=tuple(row for row in LOSSES if row.takes_logits),
)
def test_hyperparameters_beside_infinite_and_largest_logits(row):
    """A class that is left out, of -inf, is as one of a very low logit."""
    batch, numbers = make_batch(row, seed=9, masked=False), numbers_of(row)
    numbers.pop("logsumexp_penalty", None)  # The squares of such logits are infinite.
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
    extremes += (
        [(-largest, largest)]
        if row.takes_logits and not np.any(numbers.get("angular_margin", 0))
        else []
    )
    extremes += [(-np.inf, np.inf)] if row.multi_hot else []
    value, expected = by_numbers(row, batch._replace(args=args(-1e4, 1e4)), numbers)
    for low, high in extremes:
        got_value, got = by_numbers(row, batch._replace(args=args(low, high)), numbers)
        np.testing.assert_allclose(got_value, value, rtol=FLOAT64, atol=FLOAT64)
        for name in {*got} - {"label_smoothing"}:
            np.testing.assert_allclose(
                got[name], expected[name], rtol=FLOAT64, atol=FLOAT64, err_msg=f"{name}, {low}"
            )


# Which samples count ----

POISON = np.array([[np.nan], [np.inf], [-np.inf]])


@every_loss
def test_a_negative_weight_gives_nan(row):
    """In every reduction; that of a row that does not count has no effect."""
    rows = [1, 4, 10]
    batch = make_batch(row, seed=9, masked=False).with_mask(rows)
    batch = batch._replace(sample_weights=np.linspace(0.3, 1.9, 12))
    expected = evaluate(row, batch)
    batch.sample_weights[rows] = -1
    chex.assert_trees_all_equal(evaluate(row, batch), expected)
    batch.sample_weights[batch.where] *= -1
    got = evaluate(row, batch)
    for reduction in row.reductions:
        defined = np.asarray(expected[reduction]) != 0
        assert np.any(defined)
        assert np.all(np.isnan(got[reduction])[defined])


@over(tuple(row for row in CASES if not row.compares_rows))
def test_a_sample_of_weight_0_is_as_one_that_is_masked(row):
    rows = [1, 4, 10]
    batch = make_batch(row, seed=9, masked=False)
    batch = batch._replace(sample_weights=np.linspace(0.3, 1.9, 12))
    expected = evaluate(row, batch.with_mask(rows))
    batch.sample_weights[rows] = 0

    def check(batch, last):
        got = evaluate(row, batch)
        for reduction in row.reductions:
            assert_close(got[reduction], expected[reduction], FLOAT64)
            gradients = f"{reduction}_grad"
            assert_close(got[gradients][:last], expected[gradients][:last], FLOAT64)

    check(batch, -1)
    if row.weighs_inside:  # Nothing else of the sample counts either.
        check(batch.with_arg(0, rows, POISON), None)
        if batch.args[1].ndim == 1:
            check(batch.with_arg(1, rows, 10**6), None)


@in_dtypes("float64", "float32")
def test_infinity_in_a_counting_sample_is_not_hidden(row, dtype):
    batch = make_batch(row, seed=10, masked=False)
    batch = batch.with_arg(1, 3, 1) if row.multi_hot else batch.with_arg(1, [3, 8], 0)
    got = evaluate(row, batch.with_arg(0, 3, np.inf), dtype)
    assert not np.isfinite(got["mean"]) or row.multi_hot


@over(tuple(row for row in CASES if row.bounds_labels))
def test_label_out_of_range_is_nan(row):
    """All reductions are NaN, and so is a term, and something in every gradient."""
    batch = make_batch(row, seed=11, masked=False)
    for label in (CLASSES, CLASSES + 1, 10**6):
        got = evaluate(row, batch.with_arg(1, 5, label))
        for reduction in row.reductions:
            assert np.isnan(np.atleast_1d(got[reduction])[0 if reduction != "none" else 5])
            assert all(np.isnan(gradient).any() for gradient in got[f"{reduction}_grad"])
    if row.takes_logits:
        assert "none" not in got or np.isnan(got["none"]).sum() == 1
        assert np.isnan(got["mean_grad"][0]).any(axis=1).sum() == 1


@pytest.mark.long
@every_loss
def test_one_sample(row):
    batch = make_batch(row, seed=7, n=1, masked=False)
    batch = batch.with_arg(1, 0, [1, 0, -1, 0]) if row.multi_hot else batch
    got, expected = evaluate(row, batch), reference_values(row, batch)
    assert finite(got)
    np.testing.assert_allclose(got["mean"], expected["mean"], rtol=FLOAT64)


# Dtypes ----


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


@pytest.mark.slow
@over(
    CASES,
    often=tuple(
        row
        for row in CASES  # Those that sort labels, and those that take two kinds of them, too.
        if row in TYPICAL or "mining" in row.kwargs or (row.multi_hot and row.kind != "targets")
    ),
)
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


# Errors ----


def spec_of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def specs(row: LossRow, n: int = 5):
    """The shapes and dtypes of the arguments."""
    return [
        spec_of(np.float32 if k in row.differentiable else np.int32, *a.shape)
        for k, a in enumerate(make_batch(row, n=n).args)
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


float_spec = partial(spec_of, np.float32)
int_spec = partial(spec_of, np.int32)


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
    elif "C" not in str(row.parameters["labels"].annotation):  # Others take multi-hot targets.
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


@over(OFTEN, often=EVERY_LOSS)
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


# What else is accepted, and signatures ----


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
