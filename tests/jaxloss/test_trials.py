"""Random trials of every loss: sizes, dtypes, masks, extremes, reductions and hyperparameters.

A trial is a configuration, `Trial`, which Hypothesis draws and shrinks. Its loss is computed in one
program of its size and dtype, with the arguments, weights and hyperparameters traced, and in a
program of 40 rows in float64, in which what is missing is padding. Checked are

- the reductions of both against the reference;
- the gradient in float64 against the slope of the reference, along one of the arguments;
- the gradient in the dtype of the trial against the one in float64;
- that nothing reaches, or comes from, rows that do not count; and that all is finite.

A failed trial says how to repeat it:

    JAX_PLATFORMS=cpu python -c "from tests.jaxloss.test_trials import *; check(Trial(...))"
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jaxloss
from tests.jaxloss.harness import (
    QUICK,
    magnitude,
    merge,
    numbers_of,
    over,
    precision,
    widen,
)
from tests.jaxloss.loss_table import CASES, CLASSES, LOSSES, LossRow
from tests.jaxloss.references import unit
from tests.tolerances import FLOAT32, FLOAT64, rounded_to

ROWS = LOSSES + tuple(
    row
    for row in CASES
    if row.name
    in ("info_nce", "sigmoid_contrastive", "vicreg_of_one_batch", "barlow_twins_of_one_batch")
)
"""And the losses that have no plain row."""
BY_NAME = {row.name: row for row in CASES}

MOST = 40
OF_ROWS = ("argument 0", "sample_weights", "sample_margin")
"""The leaves with an element for each row."""
SIZES = (9, 40, 17, 33, 5)
"""Each loss has one of them in float32. Masks leave any number of rows."""
HALF_SIZES = (("bfloat16", 9), ("float16", 4))
"""And one of these."""
WITHOUT_WEIGHTS = (5, 9, 17)
"""The sizes of the programs without the argument `sample_weights`."""
TRIALS, HALF_TRIALS = 230, 70

LARGEST = 1e9
"""The largest scale of features and logits, in a dtype that has it."""
SMALLEST = 1e-20
SCALES = (1.0, 1.0, 1.0, 1e-3, SMALLEST, 1e4, LARGEST)
LARGEST_OF = {"vicreg_of_one_batch": 1e4}
"""The largest scale of which squared covariances are numbers of float32."""

HYPERPARAMETERS = {
    "temperature": (1.0, 0.07, 0.3, 5.0, 1e3, 0.01),
    "positive_temperature": (4.0, 1.0, 0.3, 50.0, 0.01),
    "negative_temperature": (1.0, 4.0, 0.3, 50.0, 0.01),
    "scale": (1.7, 1.0, 10.0, 64.0, 0.01),
    "positive_scale": (2.0, 0.1, 50.0),
    "negative_scale": (50.0, 0.1, 2.0),
    "margin": (0.3, 0.0, 2.0),
    "angular_margin": (0.3, 0.0, 1.5, 3.0),
    "label_smoothing": (0.1, 0.0, 0.9),
    "threshold": (0.5, 0.0, -0.5, 1.0),
    "metric_weight": (1.0, 0.0, 0.3, 10.0),
    "epsilon": (1e-4, 1e-2, 0.5, 100.0),
    "power": (0.3, 0.0, 1.0, 2.0),
    "positive_focus": (0.5, 0.0, 1.0, 2.0, 4.0),
    "negative_focus": (4.0, 0.0, 1.0, 2.0, 0.5),
    "clip": (0.05, 0.0, 0.5, 0.9),
    "ramp": (-0.8, 0.0, 0.5, -5.0),
    "leak": (0.1, 0.0, 1.0),
    "binary_weight": (5.0, 0.0, 1.0),
    "bias": (-10.0, 0.0, 3.0),
    "off_diagonal": (5e-3, 0.0, 1.0),
    "invariance": (25.0, 0.0, 1.0),
    "variance": (25.0, 0.0, 1.0),
    "covariance": (1.0, 0.0, 25.0),
}
"""Their values: the first is the plainest, and some are the ends of their ranges. Another name has
its default, twice and half of it."""


@dataclass(frozen=True)
class Trial:
    loss: str
    dtype: str = "float32"
    size: int = 5
    counts: str = "all"
    labels: str = "random"
    rows: str = "random"
    others: str = "random"
    scale: float = 1.0
    weights: str = "ones"
    poison: float = float("nan")
    reduction: str = "mean"
    along: int = 0
    """Of which argument, weights or hyperparameter the slope is compared."""
    numbers: tuple[tuple[str, float], ...] = ()
    seed: int = 0

    @property
    def row(self) -> LossRow:
        return BY_NAME[self.loss]

    def __repr__(self) -> str:
        """What differs from the defaults."""
        plain = Trial(self.loss)
        given = {k: v for k, v in vars(self).items() if repr(v) != repr(getattr(plain, k))}
        words = [f"{key}={text(value)}" for key, value in given.items() if key != "loss"]
        return f"Trial({', '.join([repr(self.loss), *words])})"


def text(value: Any) -> str:
    value = repr(value)
    return f"float('{value}')" if value in ("nan", "inf", "-inf") else value


# What Hypothesis draws ----

COUNTS = ("all", "some", "first", "one", "none")
LABELS = ("random", "ignored", "one class", "every class", "alone", "all ignored")
ROW_KINDS = ("random", "duplicates", "opposite", "some zeros", "zeros", "clusters", "corners")
ROW_KINDS += ("constant", "lengths")
OTHERS = ("random", "random", "zeros", "equal", "aligned", "zero column", "orthogonal")
WEIGHTS = ("ones", "random", "some zeros", "tiny", "large", "zeros")


def reductions_of(row: LossRow) -> tuple[str, ...]:
    """Two of them: the sum is that of the terms, as `test_contract` checks."""
    return ("mean", "sum") if row.terms is None else ("mean", "none")


@cache
def traced(row: LossRow) -> tuple[str, ...]:
    return tuple(numbers_of(row))


def numbers_in(row: LossRow) -> dict[str, tuple[float, ...]]:
    """The values of the scalar hyperparameters that may be traced."""
    plain = {name: float(value) for name, value in numbers_of(row).items() if not value.ndim}
    return {name: HYPERPARAMETERS.get(name, (x, 2 * x, x / 2)) for name, x in plain.items()}


def programs_of(row: LossRow) -> list[tuple[str, int]]:
    return [("float32", SIZES[ROWS.index(row) % len(SIZES)]), ("float64", MOST)]


def half_programs_of(row: LossRow) -> list[tuple[str, int]]:
    return [HALF_SIZES[ROWS.index(row) % len(HALF_SIZES)]]


def trials_of(row: LossRow, programs: list[tuple[str, int]]) -> st.SearchStrategy[Trial]:
    numbers = {name: st.sampled_from(values) for name, values in numbers_in(row).items()}
    choices: dict[str, Any] = {
        "program": st.sampled_from(programs),
        "counts": st.sampled_from(COUNTS),
        "labels": st.sampled_from(LABELS),
        "rows": st.sampled_from(ROW_KINDS),
        "others": st.sampled_from(OTHERS if len(row.differentiable) > 1 else OTHERS[:1]),
        "scale": st.sampled_from([x for x in SCALES if x <= LARGEST_OF.get(row.name, LARGEST)]),
        "weights": st.sampled_from(WEIGHTS),
        "poison": st.sampled_from((np.nan, np.inf, -np.inf)),
        "reduction": st.sampled_from(reductions_of(row)),
        "along": st.integers(0, len(row.differentiable) + len(traced(row))),
        "numbers": st.fixed_dictionaries(numbers),
        "seed": st.integers(0, 2**16),
    }

    def trial(drawn: dict[str, Any]) -> Trial:
        dtype, size = drawn.pop("program")
        if size in WITHOUT_WEIGHTS:
            drawn["weights"] = "none"
        drawn["numbers"] = tuple(drawn["numbers"].items())
        return Trial(row.name, dtype, size, **drawn)

    return st.fixed_dictionaries(choices).map(trial)


# The arrays of a trial, in NumPy float64 ----


class Inputs(NamedTuple):
    args: Any
    where: np.ndarray
    sample_weights: Any
    numbers: dict[str, Any]
    factors: dict[str, Any]
    """Of the reductions, in the sum that is differentiated."""

    @property
    def labels(self) -> np.ndarray:
        return self.args[1]

    @property
    def counts(self) -> np.ndarray:
        """Which rows are neither padding nor ignored."""
        known = self.labels >= 0
        return self.where & (known if known.ndim == 1 else known.any(axis=1))


def lengths_of(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows, axis=-1, keepdims=True)


def scored(trial: Trial, rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    n, width = rows.shape
    signs = rng.choice([-1.0, 1.0], (n, 1))
    kinds = {
        "random": rows,
        "duplicates": rows[rng.integers(0, max(n // 2, 1), n)] if n else rows,
        "opposite": signs * rows[:1],
        "some zeros": rows * rng.choice([0.0, 1.0], (n, 1)),
        "zeros": 0 * rows,
        "clusters": 10 + rows / 10,
        "corners": signs * np.eye(width)[rng.integers(0, width, n)],
        "constant": signs + 0 * rows,
        "lengths": rows * 10.0 ** rng.uniform(-3, 3, (n, 1)),
    }
    largest = min(trial.scale, LARGEST, 1e4 if trial.dtype == "float16" else np.inf)
    limit = 0.4 * min(float(jnp.finfo(trial.dtype).max), 1e30)
    return np.clip(largest * kinds[trial.rows], -limit, limit)


def labels_of(trial: Trial, rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    n, every = len(labels), np.arange(len(labels), dtype=labels.dtype)
    multi_hot, bounded = trial.row.multi_hot, trial.row.bounds_labels
    some = rng.choice([False, True], n, p=[0.7, 0.3])
    if trial.labels == "ignored":
        return np.where(some.reshape(-1, *[1] * (labels.ndim - 1)), rng.choice([-1, -100]), labels)
    if trial.labels == "one class":
        return np.full_like(labels, 1)
    if trial.labels == "every class":
        return (
            np.eye(CLASSES, dtype=labels.dtype)[every % CLASSES] if multi_hot else every % CLASSES
        )
    if trial.labels == "alone":  # No positives.
        return np.zeros_like(labels) if multi_hot else every % CLASSES if bounded else every
    if trial.labels == "all ignored":
        return np.full_like(labels, -1)
    return labels


def other(kind: str, array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Weights, proxies or prototypes `[d, C]`."""
    if array.ndim < 2 or kind == "random":
        return array
    if kind == "zeros":
        return 0 * array
    if kind == "equal":
        return 0 * array + array[:, :1]
    if kind == "zero column":
        return array * (np.arange(array.shape[1]) != 1)
    if kind == "orthogonal":
        return 10 * np.eye(*array.shape)
    array = array.copy()
    some = unit(rows[: array.shape[1]]).T
    array[:, : some.shape[1]] = some
    return array


def where_of(trial: Trial, rng: np.random.Generator) -> np.ndarray:
    index = np.arange(trial.size)
    kinds = {
        "all": index >= 0,
        "some": rng.random(trial.size) < 0.7,
        "first": index < rng.integers(0, trial.size + 1),
        "one": index == rng.integers(0, max(trial.size, 1)),
        "none": index < 0,
    }
    return kinds[trial.counts]


def weights_of(trial: Trial, rng: np.random.Generator) -> np.ndarray:
    random = rng.uniform(0.2, 2.0, trial.size).astype(np.float32).astype(np.float64)
    kinds = {
        "none": 1 + 0 * random,
        "ones": 1 + 0 * random,
        "random": random,
        "some zeros": random * rng.choice([0, 1], trial.size),
        "tiny": random * 2.0**-30,
        # Gradients of sums must fit into the dtype.
        "large": random * 2.0 ** (4 if trial.dtype == "float16" else 20),
        "zeros": 0 * random,
    }
    return kinds[trial.weights]


def inputs_of(trial: Trial) -> Inputs:
    """Rows that do not count have ordinary numbers here."""
    row, rng = trial.row, np.random.default_rng(trial.seed)
    rows, labels, *others = row.make_inputs(rng, max(trial.size, 1), np.float64)
    labels = labels_of(trial, rng, labels[: trial.size])
    rows = scored(trial, rng, rows[: trial.size])
    others = [other(trial.others, array, rows) for array in others]
    args = (rows, labels, *others)
    args = tuple(
        a.astype(jnp.dtype(trial.dtype)).astype(np.float64) if k in row.differentiable else a
        for k, a in enumerate(args)
    )
    numbers = dict(trial.numbers) or {k: values[0] for k, values in numbers_in(row).items()}
    arrays: dict[str, Any] = {
        name: np.asarray(np.float32(x), np.float64) for name, x in numbers.items()
    }
    if "sample_margin" in traced(row):
        arrays["sample_margin"] = np.float64(np.float32(rng.uniform(-0.2, 0.3, trial.size)))
    size = CLASSES if row.terms == "classes" else trial.size
    factors: dict[str, Any] = {
        reduction: np.float64(reduction == trial.reduction) for reduction in reductions_of(row)
    }
    if "none" in factors:
        factors["none"] = factors["none"] * np.float64(np.float32(rng.normal(size=size)))
    return Inputs(args, where_of(trial, rng), weights_of(trial, rng), arrays, factors)


def poisoned(trial: Trial, inputs: Inputs) -> Inputs:
    """What must have no effect, in the rows that do not count."""
    out = ~inputs.counts
    rows, labels, *others = inputs.args
    rows = np.where(out[:, None], trial.poison, rows)
    if not trial.row.multi_hot:
        labels = np.where(inputs.where, labels, 10**6)
    numbers = {k: np.where(out, np.nan, x) if x.ndim else x for k, x in inputs.numbers.items()}
    weights = np.where(out, np.nan, inputs.sample_weights)
    if trial.weights == "none":
        weights = None
    return inputs._replace(args=(rows, labels, *others), sample_weights=weights, numbers=numbers)


def padded(inputs: Inputs, of_rows: bool) -> Inputs:
    """With padding of NaN after the rows. `of_rows`: there is a term for each row."""
    missing = MOST - len(inputs.where)

    def pad(array: np.ndarray, value: Any) -> np.ndarray:
        return np.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)], constant_values=value)

    rows, labels, *others = inputs.args
    numbers = {k: pad(x, np.nan) if x.ndim else x for k, x in inputs.numbers.items()}
    factors = inputs.factors
    if of_rows and "none" in factors:
        factors = factors | {"none": pad(factors["none"], 1.0)}
    args = (pad(rows, np.nan), pad(labels, 1), *others)
    weights = pad(inputs.sample_weights, np.nan)
    return Inputs(args, pad(inputs.where, False), weights, numbers, factors)


# Programs ----


class Result(NamedTuple):
    values: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    """By the names of `leaves_of`."""


def leaves_of(row: LossRow, inputs: Inputs) -> dict[str, np.ndarray]:
    """All that is differentiated, by name."""
    args = {f"argument {k}": inputs.args[k] for k in row.differentiable}
    weights = inputs.sample_weights
    return args | ({} if weights is None else {"sample_weights": weights}) | inputs.numbers


def with_leaves(row: LossRow, inputs: Inputs, leaves: dict[str, np.ndarray]) -> Inputs:
    args = merge(
        inputs.args, row.differentiable, [leaves[f"argument {k}"] for k in row.differentiable]
    )
    numbers = {name: leaves[name] for name in inputs.numbers}
    return inputs._replace(args=args, sample_weights=leaves.get("sample_weights"), numbers=numbers)


@cache
def program(row: LossRow):
    """The jitted function of the leaves and the inputs to the values and the gradients."""

    def run(leaves, inputs):
        def total(leaves):
            full = with_leaves(row, inputs, leaves)
            values = {
                reduction: row.function(
                    *full.args,
                    where=full.where,
                    sample_weights=full.sample_weights,
                    reduction=reduction,
                    **{**row.kwargs, **full.numbers},
                )
                for reduction in full.factors
            }
            return sum(jnp.vdot(full.factors[k], value) for k, value in values.items()), values

        (_, values), gradients = jax.value_and_grad(total, has_aux=True)(leaves)
        return values, gradients

    return jax.jit(run, compiler_options=QUICK)


def run(row: LossRow, inputs: Inputs, dtype: str) -> Result:
    wide = np.float64 if dtype == "float64" else np.float32
    integer = np.int64 if dtype == "float64" else np.int32

    def cast(name: str, leaf: np.ndarray) -> np.ndarray:
        return leaf.astype(jnp.dtype(dtype) if name.startswith("argument") else wide)

    leaves = {name: cast(name, leaf) for name, leaf in leaves_of(row, inputs).items()}
    # What is differentiated is not in it.
    shared = inputs._replace(
        args=tuple(a.astype(integer) if k == 1 else None for k, a in enumerate(inputs.args)),
        sample_weights=None,
        numbers=dict.fromkeys(inputs.numbers),
        factors={k: x.astype(wide) for k, x in inputs.factors.items()},
    )
    with precision(dtype):
        return Result(*widen(program(row)(leaves, shared)))


def cut(result: Result, row: LossRow, n: int) -> Result:
    """Without padding."""
    values, gradients = dict(result.values), dict(result.gradients)
    if row.terms == "samples":
        values["none"] = values["none"][:n]
    for name in OF_ROWS:
        if name in gradients:
            gradients[name] = gradients[name][:n]
    return Result(values, gradients)


def reference(row: LossRow, inputs: Inputs, reductions: Any) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        return {
            reduction: np.asarray(
                row.reference(
                    *inputs.args,
                    where=inputs.where,
                    sample_weights=inputs.sample_weights,
                    reduction=reduction,
                    **inputs.numbers,
                )
            )
            for reduction in reductions
        }


# Tolerances ----


def largest_logit(row: LossRow, inputs: Inputs) -> Any:
    """The magnitude of the numbers that a loss subtracts from each other.

    Their roundings are what a value may differ by, and the relative error of an exponent.
    """
    rows = inputs.args[0][inputs.counts]
    length, numbers = (
        magnitude(lengths_of(rows)),
        {k: magnitude(x) for k, x in inputs.numbers.items()},
    )
    loss = row.name
    if row.takes_logits:
        base = magnitude(rows)
    elif row.kind == "classifier":
        weights, bias = inputs.args[2:]
        base = length * magnitude(lengths_of(weights.T)) + magnitude(bias)
        if "sum" in loss:
            base += 4 * length**2 * numbers["metric_weight"]
    elif loss == "dot_regression":
        base = length * (1 + magnitude(lengths_of(inputs.args[2].T))) ** 2
    elif loss.startswith("vicreg"):
        base = (1 + length) ** 2 * (numbers["invariance"] + numbers["variance"]) + length**4
    else:
        base = 4 * length**row.degree
    for name in ("margin", "sample_margin", "threshold", "angular_margin", "bias"):
        base += numbers.get(name, 0.0)
    if loss == "circle":
        base = base**2
    for name in ("scale", "positive_scale", "negative_scale", "binary_weight"):
        base *= max(numbers.get(name, 1.0), 1.0)
    for name in ("positive_focus", "negative_focus"):
        base *= 1 + numbers.get(name, 0.0)
    for name in ("temperature", "positive_temperature", "negative_temperature"):
        base *= max(1 / numbers.get(name, 1.0), 1.0)
        base += numbers.get(name, 0.0)
    return base


def enlarged(row: LossRow, inputs: Inputs) -> float:
    """How much a formula enlarges roundings of its inputs."""
    if row.name == "direct_sum":
        weights = np.linalg.norm(inputs.args[2], 2) ** 2
        return float(4 * (1 + weights / inputs.numbers["epsilon"]))
    return 16.0 if row.name == "spectral_sum" else 4.0


def moves(row: LossRow, inputs: Inputs, trial: Trial) -> dict[str, np.ndarray]:
    """A random direction of all leaves. Zeros stay."""
    rng = np.random.default_rng(trial.seed + 1)
    out = {}
    for name, leaf in leaves_of(row, inputs).items():
        normal = rng.normal(size=leaf.shape)
        if name.startswith("argument") and leaf.ndim == 2:
            axis = 1 if name == "argument 0" else 0
            size = np.sqrt(np.mean(leaf**2, axis=axis, keepdims=True))
        else:  # A hinge has a kink where the margin is 0.
            size = np.maximum(np.abs(leaf), float(name.endswith("margin")))
        out[name] = np.asarray(normal * size)
    return out


def moved(row: LossRow, inputs: Inputs, steps: dict[str, np.ndarray], step: float) -> Inputs:
    leaves = leaves_of(row, inputs)
    steps = {
        name: leaf + step * steps[name] if name in steps else leaf for name, leaf in leaves.items()
    }
    return with_leaves(row, inputs, steps)


# The check ----


def check(trial: Trial) -> None:
    """Raises an `AssertionError` that says how to repeat it."""
    try:
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            _check(trial)
    except Exception as error:
        error.add_note(f"Repeat it by `check({trial!r})` of {__name__}.")
        raise


STEP = 1e-6


def _check(trial: Trial) -> None:
    row, clean = trial.row, inputs_of(trial)
    n, of_rows = trial.size, trial.row.terms == "samples"
    weights = np.where(clean.counts, clean.sample_weights, 0)
    wide = padded(clean, of_rows)
    got = run(row, poisoned(trial, clean), trial.dtype)
    full = cut(run(row, wide, "float64"), row, n)
    expected = reference(row, clean, clean.factors)

    # Rows that do not count.
    for result in (got, full):
        behind = [result.gradients[k] for k in OF_ROWS if k in result.gradients]
        behind += [result.values["none"]] if of_rows else []
        assert all(not np.any(array[~clean.counts]) for array in behind), "a masked row"

    # Values.
    logit, enlarge = largest_logit(row, clean), enlarged(row, clean)
    sizes = {"mean": 1.0, "sum": weights.sum(), "none": magnitude(weights)}
    if row.terms == "classes" or row.terms is None:
        sizes |= {"sum": CLASSES + weights.sum(), "none": 1.0}
    eps = rounding(trial.dtype)
    for result, tolerance in ((full, FLOAT64 * enlarge), (got, eps * enlarge)):
        for reduction, value in expected.items():
            np.testing.assert_allclose(
                result.values[reduction],
                value,
                rtol=tolerance,
                atol=tolerance * (1 + logit) * sizes[reduction],
                err_msg=f"the {reduction} in {trial.dtype if result is got else 'float64'}",
            )

    # Gradients.
    steps = moves(row, clean, trial)

    @cache
    def near() -> list[Result]:
        there = [moved(row, wide, padded_steps(steps, row, wide), s * STEP) for s in (1, -1)]
        return [cut(run(row, inputs, "float64"), row, n) for inputs in there]

    share = sizes[trial.reduction]
    if trial.reduction == "none":
        share = magnitude(clean.factors["none"] * (weights if of_rows else 1.0))
    for name, of_trial in got.gradients.items():
        gradient = full.gradients[name]
        dtype = trial.dtype if name.startswith("argument") else wider(trial.dtype)
        natural = natural_size(row, clean, name, share * (1 + logit))
        allowed = eps * enlarge * ((1 + logit) * magnitude(gradient) + natural)
        allowed = allowed + float(jnp.finfo(dtype).tiny)
        if dtype != wider(dtype):
            allowed = allowed + rounded_to(dtype) * magnitude(gradient)
        check_gradient(name, of_trial, gradient, allowed, dtype, near)
    check_slope(trial, clean, wide, full, steps, logit * share)


def padded_steps(steps: dict[str, np.ndarray], row: LossRow, wide: Inputs) -> dict[str, np.ndarray]:
    """The directions of all rows of `wide`, those of padding are 0."""
    leaves, out = leaves_of(row, wide), {}
    for name, step in steps.items():
        out[name] = np.zeros(leaves[name].shape)
        out[name][tuple(slice(size) for size in step.shape)] = step
    return out


def wider(dtype: str) -> str:
    """Of values, weights and hyperparameters."""
    return "float64" if dtype == "float64" else "float32"


def rounding(dtype: str) -> float:
    return FLOAT64 if dtype == "float64" else FLOAT32


def natural_size(row: LossRow, inputs: Inputs, name: str, value: float) -> Any:
    """The size of a gradient of a loss that changes by this value along its leaf."""
    leaf = leaves_of(row, inputs)[name]
    if name == "argument 0" and not row.takes_logits:
        length = lengths_of(leaf)
    elif leaf.ndim == 2 and name != "argument 0":
        length = lengths_of(leaf.T).T
    else:
        length = magnitude(leaf) or 1.0
    return value / np.where(length > 0, length, np.inf)


def check_gradient(
    name: str,
    got: np.ndarray,
    expected: np.ndarray,
    allowed: Any,
    dtype: str,
    near: Callable[[], list[Result]],
) -> None:
    """With the one in float64. Where that changes within some roundings, they differ by that."""
    limit = float(jnp.finfo(dtype).max)
    assert np.all(np.isfinite(got) | (np.abs(expected) > limit)), f"the gradient of {name}: {got}"

    def wrong(allowed: Any) -> bool:
        return bool(np.any((np.abs(got - expected) > allowed) & np.isfinite(got)))

    if not wrong(allowed):
        return
    change = magnitude([there.gradients[name] - expected for there in near()])
    if change > magnitude(expected) / 100:  # A kink, such as a tie: each side is right.
        return
    allowed = allowed + 4 * change
    assert not wrong(allowed), (
        f"the gradient of {name} in {dtype} differs from the one in float64:\n{got}\n{expected}\n"
        f"allowed:\n{allowed}"
    )


def torch_gradient(trial: Trial, inputs: Inputs, position: int) -> np.ndarray:
    """Of an argument with a stop-gradient, which is no slope."""
    from tests.jaxloss import torch_references

    row, numbers = trial.row, {name: float(x) for name, x in inputs.numbers.items()}
    results = torch_references.evaluate(
        partial(row.torch_reference, **numbers),
        inputs.args,
        row.differentiable,
        reductions=(trial.reduction,),
        where=inputs.where,
        sample_weights=inputs.sample_weights,
        cotangent=inputs.factors["none"],
    )
    return results[f"{trial.reduction}_grad"][row.differentiable.index(position)]


def check_slope(
    trial: Trial,
    inputs: Inputs,
    wide: Inputs,
    full: Result,
    steps: dict[str, np.ndarray],
    size: float,
) -> None:
    """With the slope of the reference, which is between the slopes at both ends."""
    row, names = trial.row, list(full.gradients)
    name = names[trial.along % len(names)]
    constant = [f"argument {k}" for k in row.constant]
    if name in constant and trial.rows == "random" and find_spec("torch"):
        natural = natural_size(row, inputs, name, size + 1)
        by_torch = torch_gradient(trial, inputs, row.constant[constant.index(name)])
        allowed = 1e-8 * (magnitude(by_torch) + natural)
        assert np.all(np.abs(full.gradients[name] - by_torch) <= allowed), (
            f"the gradient of {name} differs from PyTorch's:\n{full.gradients[name]}\n{by_torch}"
        )
    if name in constant or (row.name == "circle" and name == "margin"):
        return
    counts = inputs.counts.reshape(-1, *[1] * (steps[name].ndim - 1))
    if name in OF_ROWS:
        steps[name] = np.where(counts, steps[name], 0)
    one = {name: steps[name]}
    slope = np.sum(full.gradients[name] * steps[name])

    def slope_of_reference(step: float) -> tuple[float, float]:
        """And the magnitude of the values."""
        values = []
        for sign in (1, -1):
            value = reference(row, moved(row, inputs, one, sign * step), [trial.reduction])
            values.append(np.sum(value[trial.reduction] * inputs.factors[trial.reduction]))
        return (values[0] - values[1]) / (2 * step), magnitude(values)

    expected, value = slope_of_reference(STEP)
    noise = 1e-15 * (size + value + 1) / STEP
    allowed = 1e-5 * abs(slope) + noise
    if abs(slope - expected) <= allowed:
        return
    for sign in (1, -1):
        there = moved(row, wide, padded_steps(one, row, wide), sign * STEP)
        gradient = cut(run(row, there, "float64"), row, trial.size).gradients[name]
        allowed += 2 * abs(np.sum(gradient * steps[name]) - slope)
    if abs(slope - expected) <= allowed:
        return
    # Where the loss jumps, as at a tie of ranks, a smaller step gives a larger slope.
    closer = slope_of_reference(STEP / 8)[0]
    assert abs(closer - expected) > abs(slope - expected) / 2, (
        f"the slope along {name} is {slope}, that of the reference {expected}, ± {allowed}"
    )


# The tests ----


def try_all(
    row: LossRow,
    programs: list[tuple[str, int]],
    number: int,
    phases: tuple[Phase, ...] = (Phase.generate, Phase.shrink),
) -> None:
    @settings(
        max_examples=number,
        derandomize=True,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(trials_of(row, programs))
    def run_trials(trial):
        check(trial)

    run_trials()


@pytest.mark.long
@over(ROWS)
def test_trials(row):
    try_all(row, programs_of(row), TRIALS)


@pytest.mark.long
@over(ROWS)
def test_trials_in_half_precision(row):
    try_all(row, half_programs_of(row), HALF_TRIALS)


def planted(fault: str, **options: Any) -> Any:
    """The softmax loss with a fault."""
    logits, where = options["logits"], options["where"]
    if fault == "low precision" and logits.dtype == jnp.float32:
        options["logits"] = logits.astype(jnp.bfloat16).astype(jnp.float32)
    if fault == "hyperparameter":
        options["label_smoothing"] = jax.lax.stop_gradient(options["label_smoothing"])
    if fault == "unit weights" and options["reduction"] == "mean":
        options["sample_weights"] = None
    value = jaxloss.softmax_loss(**options)
    if fault == "factor":
        return value * (1 + 1e-4)
    if fault == "gradient":
        return value + 1e-3 * (value - jax.lax.stop_gradient(value))
    if fault == "leak":
        rows = jnp.where(where[:, None], 0, logits)
        return value + jnp.where(jnp.isfinite(rows), rows - jax.lax.stop_gradient(rows), 0).sum()
    return value


FAULTS = ("factor", "gradient", "leak", "unit weights", "hyperparameter", "low precision")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_planted_faults_are_found(monkeypatch, fault):
    @wraps(jaxloss.softmax_loss)
    def function(logits, labels, **options):
        return planted(fault, logits=logits, labels=labels, **options)

    row = replace(BY_NAME["softmax"], function=function)
    monkeypatch.setitem(BY_NAME, "softmax", row)
    if fault == "none":
        try_all(row, [("float32", 4)], 20)
        return
    with pytest.raises(AssertionError) as caught:
        try_all(row, [("float32", 4)], 60, (Phase.generate,))
    # It says how to repeat it.
    call = re.search(r"`(check\(Trial\('softmax'.*\)\))`", caught.value.__notes__[0])
    assert call
    with pytest.raises(AssertionError):
        eval(call[1])
