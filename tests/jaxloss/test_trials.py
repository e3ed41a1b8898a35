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
import zlib
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jaxloss
from jaxloss.testing.checked_loss import CheckedLoss, Result
from tests.jaxloss.harness import Batch, checked, magnitude, numbers_of, over, reference_values
from tests.jaxloss.loss_table import CASES, CLASSES, EVERY_LOSS, LossRow, alone
from tests.jaxloss.references import unit
from tests.tolerances import FLOAT32, FLOAT64, rounded_to

TRIED = tuple(row for row in EVERY_LOSS if row.adapt is not alone)
"""A logarithm of the nearest distance has no bound beside a duplicate."""
BY_NAME = {row.name: row for row in CASES}
MOST = 40
SIZES = (9, 40, 17, 33, 5)
"""Each loss has one of them in float32, by its name. Masks leave any number of rows."""
HALF_SIZES = (("bfloat16", 9), ("float16", 4))
"""And one of these."""
WITHOUT_WEIGHTS = (5, 9, 17)
"""The sizes of the programs without the argument `sample_weights`."""
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
    poison: str = "nan"
    reduction: str = "mean"
    along: int = 0
    """Of which argument, weights or hyperparameter the slope is compared."""
    numbers: tuple[tuple[str, float], ...] = ()
    seed: int = 0

    @property
    def row(self) -> LossRow:
        return BY_NAME[self.loss]


# What Hypothesis draws ----

CHOICES = {
    "counts": ("all", "some", "first", "one", "none"),
    "labels": ("random", "ignored", "one class", "every class", "alone", "all ignored"),
    "rows": (
        *("random", "duplicates", "opposite", "some zeros", "zeros", "clusters", "corners"),
        *("constant", "lengths"),
    ),
    "weights": ("ones", "random", "some zeros", "tiny", "large", "zeros"),
    "poison": ("nan", "inf", "-inf"),
}
OTHERS = ("random", "random", "zeros", "equal", "aligned", "zero column", "orthogonal")
SCALES = (1.0, 1.0, 1.0, 1e-3, 1e-20, 1e4, 1e9)


def reductions_of(row: LossRow) -> tuple[str, ...]:
    """Two of them: the sum is that of the terms, as `test_contract` checks."""
    return ("mean", "sum") if row.terms is None else ("mean", "none")


def numbers_in(row: LossRow) -> dict[str, tuple[float, ...]]:
    """The values of the scalar hyperparameters that may be traced."""
    plain = {name: float(value) for name, value in numbers_of(row).items() if not value.ndim}
    return {name: HYPERPARAMETERS.get(name, (x, 2 * x, x / 2)) for name, x in plain.items()}


def one_of(row: LossRow, programs: tuple) -> Any:
    """It stays the same when another row is added."""
    return programs[zlib.crc32(row.name.encode()) % len(programs)]


def trials_of(row: LossRow, programs: list[tuple[str, int]]) -> st.SearchStrategy[Trial]:
    numbers = {name: st.sampled_from(values) for name, values in numbers_in(row).items()}
    choices: dict[str, Any] = {
        "program": st.sampled_from(programs),
        **{name: st.sampled_from(values) for name, values in CHOICES.items()},
        "others": st.sampled_from(OTHERS if len(row.differentiable) > 1 else OTHERS[:1]),
        "scale": st.sampled_from([x for x in SCALES if x <= row.largest_scale]),
        "reduction": st.sampled_from(reductions_of(row)),
        "along": st.integers(0, len(row.differentiable) + len(numbers_of(row))),
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
    largest = min(trial.scale, 1e4 if trial.dtype == "float16" else np.inf)
    limit = 0.4 * min(float(jnp.finfo(trial.dtype).max), 1e30)
    return np.clip(largest * kinds[trial.rows], -limit, limit)


def labels_of(trial: Trial, rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    n, every = len(labels), np.arange(len(labels), dtype=labels.dtype)
    multi_hot, bounded = trial.row.multi_hot, trial.row.bounds_labels
    some = rng.choice([False, True], n, p=[0.7, 0.3]).reshape(-1, *[1] * (labels.ndim - 1))
    classes = every % CLASSES
    kinds = {
        "random": labels,
        "ignored": np.where(some, rng.choice([-1, -100]), labels),
        "one class": np.full_like(labels, 1),
        "every class": np.eye(CLASSES, dtype=labels.dtype)[classes] if multi_hot else classes,
        "alone": np.zeros_like(labels) if multi_hot else classes if bounded else every,
        "all ignored": np.full_like(labels, -1),
    }
    return kinds[trial.labels]


def other(kind: str, array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Weights, proxies or prototypes `[d, C]`."""
    if array.ndim < 2:
        return array
    some = unit(rows[: array.shape[1]]).T
    kinds = {
        "random": array,
        "zeros": 0 * array,
        "equal": 0 * array + array[:, :1],
        "zero column": array * (np.arange(array.shape[1]) != 1),
        "orthogonal": 10 * np.eye(*array.shape),
        "aligned": np.concatenate([some, array[:, some.shape[1] :]], axis=1),
    }
    return kinds[kind]


def inputs_of(trial: Trial) -> tuple[Batch, np.ndarray]:
    """A batch and the cotangent of its terms. Rows that do not count have ordinary numbers here."""
    row, n, rng = trial.row, trial.size, np.random.default_rng(trial.seed)
    rows, labels, *others = row.make_inputs(rng, max(n, 1), np.float64)
    labels = labels_of(trial, rng, labels[:n])
    rows = scored(trial, rng, rows[:n])
    args = (rows, labels, *(other(trial.others, array, rows) for array in others))
    numbers: dict[str, Any] = dict(trial.numbers) or {
        k: values[0] for k, values in numbers_in(row).items()
    }
    if "sample_margin" in numbers_of(row):
        numbers["sample_margin"] = rng.uniform(-0.2, 0.3, n)
    index, random = np.arange(n), rng.uniform(0.2, 2.0, n)
    masks = {
        "all": index >= 0,
        "some": rng.random(n) < 0.7,
        "first": index < rng.integers(0, n + 1),
        "one": index == rng.integers(0, max(n, 1)),
        "none": index < 0,
    }
    weights = {
        "none": 1 + 0 * random,
        "ones": 1 + 0 * random,
        "random": random,
        "some zeros": random * rng.choice([0, 1], n),
        "tiny": random * 2.0**-30,
        # Gradients of sums must fit into the dtype.
        "large": random * 2.0 ** (4 if trial.dtype == "float16" else 20),
        "zeros": 0 * random,
    }
    numbers = {name: np.asarray(x) for name, x in numbers.items()}
    batch = Batch(args, masks[trial.counts], weights[trial.weights], numbers)
    cotangent = rng.normal(size=CLASSES if row.terms == "classes" else n)
    return checked(row).rounded(batch, trial.dtype), cotangent


def counts_in(batch: Batch) -> np.ndarray:
    """Which rows are neither padding nor ignored."""
    known = batch.args[1] >= 0
    return batch.where & (known if known.ndim == 1 else known.any(axis=1))


def poisoned(trial: Trial, batch: Batch) -> Batch:
    """What must have no effect, in the rows that do not count."""
    out = ~counts_in(batch)
    rows, labels, *others = batch.args
    rows = np.where(out[:, None], float(trial.poison), rows)
    if not trial.row.multi_hot:
        labels = np.where(batch.where, labels, 10**6).astype(labels.dtype)
    numbers = {k: np.where(out, np.nan, x) if x.ndim else x for k, x in batch.numbers.items()}
    weights = None if trial.weights == "none" else np.where(out, np.nan, batch.sample_weights)
    return Batch((rows, labels, *others), batch.where, weights, numbers)


def pad(array: np.ndarray, value: Any) -> np.ndarray:
    missing = [(0, MOST - len(array)), *[(0, 0)] * (array.ndim - 1)]
    return np.pad(array, missing, constant_values=value)


def padded(batch: Batch) -> Batch:
    """With padding of NaN after the rows."""
    rows, labels, *others = batch.args
    numbers = {k: pad(x, np.nan) if x.ndim else x for k, x in batch.numbers.items()}
    args = (pad(rows, np.nan), pad(labels, 1), *others)
    return Batch(args, pad(batch.where, False), pad(batch.sample_weights, np.nan), numbers)


# The check ----


def run(trial: Trial, batch: Batch, cotangent: np.ndarray, dtype: str) -> Result:
    """The gradients are those of the trial's reduction. Padding is cut off."""
    row, n, loss = trial.row, trial.size, checked(trial.row)
    if row.terms == "samples":
        cotangent = pad(cotangent, 1.0)[: batch.size]
    values, gradients = loss.evaluate(batch, reductions_of(row), cotangent, dtype)
    of_rows = (loss.names[0], "sample_weights", "sample_margin")
    if row.terms == "samples":
        values["none"] = values["none"][:n]
    return Result(
        {name: value.astype(np.float64) for name, value in values.items()},
        {
            name: (x[:n] if name in of_rows else x).astype(np.float64)
            for name, x in gradients[trial.reduction].items()
        },
    )


def largest_logit(row: LossRow, batch: Batch) -> Any:
    """The magnitude of the numbers that a loss subtracts from each other.

    Their roundings are what a value may differ by, and the relative error of an exponent.
    """
    rows = batch.args[0][counts_in(batch)]
    numbers = {k: magnitude(x) for k, x in batch.numbers.items()}
    length = magnitude(lengths_of(rows))
    if row.takes_logits:
        base = magnitude(rows)
    elif row.magnitude is not None:
        base = row.magnitude(length, numbers)
    elif row.kind == "classifier":
        weights, bias = batch.args[2:]
        base = length * magnitude(lengths_of(weights.T)) + magnitude(bias)
        base += 4 * length**2 * numbers.get("metric_weight", 0.0)
    else:
        others = [1 + magnitude(lengths_of(array.T)) for array in batch.args[2:]]
        base = 4 * (length * np.prod(others) ** 2) ** row.degree
    for name in ("margin", "sample_margin", "threshold", "angular_margin", "bias"):
        base += numbers.get(name, 0.0)
    for name in ("scale", "positive_scale", "negative_scale", "binary_weight"):
        base *= max(numbers.get(name, 1.0), 1.0)
    for name in ("positive_focus", "negative_focus"):
        base *= 1 + numbers.get(name, 0.0)
    for name in ("temperature", "positive_temperature", "negative_temperature"):
        base *= max(1 / numbers.get(name, 1.0), 1.0)
        base += numbers.get(name, 0.0)
    return base


def moves(loss: CheckedLoss, batch: Batch, seed: int) -> dict[str, np.ndarray]:
    """A random direction of all leaves. Zeros and rows that do not count stay."""
    rng, out = np.random.default_rng(seed + 1), {}
    for name, leaf in loss.leaves_of(batch).items():
        normal = rng.normal(size=leaf.shape)
        if name in loss.names and leaf.ndim == 2:
            axis = 1 if name == loss.names[0] else 0
            size = np.sqrt(np.mean(leaf**2, axis=axis, keepdims=True))
        else:  # A hinge has a kink where the margin is 0.
            size = np.maximum(np.abs(leaf), float(name.endswith("margin")))
        out[name] = np.asarray(normal * size)
        if name in (loss.names[0], "sample_weights", "sample_margin"):
            out[name][~counts_in(batch)] = 0
    return out


def moved(loss: CheckedLoss, batch: Batch, steps: dict[str, np.ndarray], step: float) -> Batch:
    leaves = loss.leaves_of(batch)
    return loss.with_leaves(
        batch, leaves | {name: leaves[name] + step * d for name, d in steps.items()}
    )


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
    row, loss, (clean, cotangent) = trial.row, checked(trial.row), inputs_of(trial)
    of_rows, counts = row.terms == "samples", counts_in(clean)
    weights = np.where(counts, clean.sample_weights, 0)
    wider = "float64" if trial.dtype == "float64" else "float32"
    got = run(trial, poisoned(trial, clean), cotangent, trial.dtype)
    full = run(trial, padded(clean), cotangent, "float64")
    with np.errstate(all="ignore"):
        expected = reference_values(row, clean, reductions_of(row))

    # Rows that do not count.
    for result in (got, full):
        behind = [result.gradients.get(k) for k in (loss.names[0], "sample_weights")]
        behind += [
            result.gradients.get("sample_margin"),
            result.values["none"] if of_rows else None,
        ]
        assert not any(np.any(x[~counts]) for x in behind if x is not None), "a masked row"

    # Values.
    logit, enlarge = largest_logit(row, clean), row.enlarges(clean.numbers, clean.args)
    sizes = {"mean": 1.0, "sum": weights.sum(), "none": magnitude(weights)}
    if not of_rows:
        sizes |= {"sum": CLASSES + weights.sum(), "none": 1.0}
    eps = FLOAT64 if wider == "float64" else FLOAT32
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
    steps = moves(loss, clean, trial.seed)

    @cache
    def near(name: str = "") -> list[dict[str, np.ndarray]]:
        """The gradients on both sides, along one leaf or all."""
        of = {name: steps[name]} if name else steps
        there = [padded(moved(loss, clean, of, sign * STEP)) for sign in (1, -1)]
        return [run(trial, batch, cotangent, "float64").gradients for batch in there]

    share = sizes[trial.reduction]
    if trial.reduction == "none":
        share = magnitude(cotangent * (weights if of_rows else 1.0))
    for name, gradient in got.gradients.items():
        wide = full.gradients[name]
        dtype = trial.dtype if name in loss.names else wider
        natural = natural_size(row, loss, clean, name, share * (1 + logit))
        allowed = eps * enlarge * ((1 + logit) * magnitude(wide) + natural)
        allowed = allowed + float(jnp.finfo(dtype).tiny)
        if dtype != wider:
            allowed = allowed + rounded_to(dtype) * magnitude(wide)
        limit = float(jnp.finfo(dtype).max)
        assert np.all(np.isfinite(gradient) | (np.abs(wide) > limit)), (name, gradient)
        error = np.where(np.isfinite(gradient), np.abs(gradient - wide), 0)
        if np.any(error > allowed):  # Where it changes within some roundings, it differs by that.
            change = magnitude([there[name] - wide for there in near()])
            # A kink, such as a tie: each side is right.
            kink = change > magnitude(wide) / 100
            assert kink or np.all(error <= allowed + 4 * change), (
                f"the gradient of {name} in {dtype} differs from the one in float64:\n{gradient}\n"
                f"{wide}\nallowed:\n{allowed}"
            )

    # The slope of the reference, which is between the slopes at both ends.
    name = [*full.gradients][trial.along % len(full.gradients)]
    gradient, constant = (
        full.gradients[name],
        [loss.names[k] for k in row.constant if isinstance(k, int)],
    )
    if name in constant and trial.rows == "random" and find_spec("torch"):
        by_torch = torch_gradient(trial, clean, cotangent, name)
        natural = natural_size(row, loss, clean, name, logit * share + 1)
        allowed = 1e-8 * (magnitude(by_torch) + natural)
        assert np.all(np.abs(gradient - by_torch) <= allowed), (name, gradient, by_torch)
    if name in constant or name in row.constant:
        return
    slope = np.sum(gradient * steps[name])

    def slope_of_reference(step: float) -> tuple[float, float]:
        """And the magnitude of the values."""
        values, factor = [], cotangent if trial.reduction == "none" else 1.0
        for sign in (1, -1):
            there = moved(loss, clean, {name: steps[name]}, sign * step)
            with np.errstate(all="ignore"):
                of = reference_values(row, there, (trial.reduction,))
            values.append(np.sum(of[trial.reduction] * factor))
        return (values[0] - values[1]) / (2 * step), magnitude(values)

    by_reference, value = slope_of_reference(STEP)
    allowed = 1e-5 * abs(slope) + 1e-15 * (logit * share + value + 1) / STEP
    if abs(slope - by_reference) > allowed:
        allowed += sum(2 * abs(np.sum(there[name] * steps[name]) - slope) for there in near(name))
    if abs(slope - by_reference) > allowed:
        # Where the loss jumps, as at a tie of ranks, a smaller step gives a larger slope.
        closer = slope_of_reference(STEP / 8)[0]
        assert abs(closer - by_reference) > abs(slope - by_reference) / 2, (
            f"the slope along {name} is {slope}, that of the reference {by_reference}, ± {allowed}"
        )


def natural_size(row: LossRow, loss: CheckedLoss, batch: Batch, name: str, value: float) -> Any:
    """The size of a gradient of a loss that changes by this value along its leaf."""
    leaf = loss.leaves_of(batch)[name]
    if name == loss.names[0] and not row.takes_logits:
        length = lengths_of(leaf)
    elif leaf.ndim == 2 and name != loss.names[0]:
        length = lengths_of(leaf.T).T
    else:
        length = magnitude(leaf) or 1.0
    return value / np.where(length > 0, length, np.inf)


def torch_gradient(trial: Trial, batch: Batch, cotangent: np.ndarray, name: str) -> np.ndarray:
    """Of an argument with a stop-gradient, which is no slope."""
    from tests.jaxloss import torch_references

    row, numbers = trial.row, {name: float(x) for name, x in batch.numbers.items()}
    results = torch_references.evaluate(
        partial(row.torch_reference, **numbers),
        batch.args,
        row.differentiable,
        reductions=(trial.reduction,),
        where=batch.where,
        sample_weights=batch.sample_weights,
        cotangent=cotangent,
    )
    position = row.differentiable.index(checked(row).names.index(name))
    return results[f"{trial.reduction}_grad"][position]


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
@over(TRIED)
def test_trials(row):
    try_all(row, [("float32", one_of(row, SIZES)), ("float64", MOST)], 230)


@pytest.mark.long
@over(TRIED)
def test_trials_in_half_precision(row):
    try_all(row, [one_of(row, HALF_SIZES)], 70)


def constant_leak(value: Any, options: Any) -> Any:
    """A gradient of rows that do not count."""
    rows = jnp.where(options["where"][:, None], 0, options["logits"])
    return value + jnp.where(jnp.isfinite(rows), rows - jax.lax.stop_gradient(rows), 0).sum()


FAULTS = {
    "none": lambda value, options: value,
    "factor": lambda value, options: value * (1 + 1e-4),
    "gradient": lambda value, options: value + 1e-3 * (value - jax.lax.stop_gradient(value)),
    "leak": constant_leak,
    "hyperparameter": lambda value, options: (
        value + options["label_smoothing"] - jax.lax.stop_gradient(options["label_smoothing"])
    ),
    "low precision": lambda value, options: (
        value.astype(jnp.bfloat16).astype(value.dtype) if value.dtype == jnp.float32 else value
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(monkeypatch, fault):
    @wraps(jaxloss.softmax_loss)
    def function(logits, labels, **options):
        value = jaxloss.softmax_loss(logits, labels, **options)
        return FAULTS[fault](value, options | {"logits": logits})

    row = replace(BY_NAME["softmax"], function=function)
    monkeypatch.setitem(BY_NAME, "softmax", row)
    if fault == "none":
        try_all(row, [("float32", 4)], 20)
        return
    with pytest.raises(AssertionError) as caught:
        try_all(row, [("float32", 4)], 60, (Phase.generate,))
    # It says how to repeat it.
    call = re.search(r"`(check\(Trial\(loss='softmax'.*\)\))`", caught.value.__notes__[0])
    assert call
    with pytest.raises(AssertionError):
        eval(call[1])
