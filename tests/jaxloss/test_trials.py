"""Random trials of every loss: sizes, dtypes, masks, extremes, reductions and hyperparameters.

A trial is a configuration, `Trial`, which Hypothesis draws and shrinks. Its loss is computed in its
dtype and in float64, by programs of 37 rows, with the arguments, weights and hyperparameters
traced; what is missing is padding. Checked are the reductions of both against the reference, the
gradient in float64 against the slope of the reference along one of the arguments, that nothing
reaches or comes from rows that do not count, and that all is finite. `test_contract` compares
gradients in float32 and half precision. A failed trial says how to repeat it:

    JAX_PLATFORMS=cpu python -c "from tests.jaxloss.test_trials import *; check(Trial(...))"
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jaxloss
from jaxloss.testing.checked_loss import Result
from tests.jaxloss.harness import Batch, checked, magnitude, numbers_of, over, reference_values
from tests.jaxloss.loss_table import CASES, CLASSES, EVERY_LOSS, LossRow, alone
from tests.jaxloss.references import unit
from tests.tolerances import FLOAT32, FLOAT64

TRIED = tuple(row for row in EVERY_LOSS if row.adapt is not alone)
"""A logarithm of the nearest distance has no bound beside a duplicate."""
BY_NAME = {row.name: row for row in CASES}
MOST = 37
"""The rows of every program."""
ENDS = {
    **dict.fromkeys(("temperature", "positive_temperature", "negative_temperature"), (0.01, 1e3)),
    **dict.fromkeys(("scale", "positive_scale", "negative_scale"), (0.1, 64.0)),
    **dict.fromkeys(("margin", "power", "positive_focus", "negative_focus"), (0.0, 2.0)),
    **dict.fromkeys(("invariance", "variance", "covariance"), (0.0, 25.0)),
    **dict.fromkeys(("leak", "binary_weight", "off_diagonal"), (0.0, 1.0)),
    **dict.fromkeys(("label_smoothing", "clip"), (0.0, 0.9)),
    "angular_margin": (0.0, 3.0),
    "threshold": (0.0, -0.5),
    "metric_weight": (0.0, 10.0),
    "epsilon": (1e-4, 100.0),
    "ramp": (-5.0, 0.5),
    "bias": (0.0, -10.0),
}
"""Further values of hyperparameters, beside the default, twice and half of it.
Of a default of 0, it is 0.1; a hardness stays 0, as its slope has a stop-gradient."""


@dataclass(frozen=True)
class Trial:
    loss: str
    dtype: str = "float32"
    size: int = 5
    """At most `MOST`. Masks leave fewer rows."""
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
    "counts": ("all", "some", "some", "one", "none"),
    "labels": ("random", "ignored", "one class", "every class", "alone"),
    "rows": ("random", "duplicates", "opposite", "some zeros", "clusters", "corners", "lengths"),
    "weights": ("ones", "random", "some zeros", "tiny", "large", "zeros"),
    "poison": ("nan", "inf", "1", "-inf"),
}
OTHERS = ("random", "random", "zeros", "equal", "aligned", "orthogonal")
SCALES = (1.0, 1.0, 1.0, 1e-3, 1e-20, 1e4, 1e9)


def reductions_of(row: LossRow) -> tuple[str, ...]:
    """Two of them: the sum is that of the terms, as `test_contract` checks."""
    return ("mean", "sum") if row.terms is None else ("mean", "none")


def numbers_in(row: LossRow) -> dict[str, tuple[float, ...]]:
    """The values of the scalar hyperparameters that may be traced, the plainest first."""
    plain = {k: float(x) for k, x in numbers_of(row).items() if not x.ndim}
    plain = {k: x or 0.1 * (k in ENDS) for k, x in plain.items()}
    return {name: (x, 2 * x, x / 2, *ENDS.get(name, ())) for name, x in plain.items()}


def trials_of(row: LossRow, dtypes: Sequence[str]) -> st.SearchStrategy[Trial]:
    numbers = {name: st.sampled_from(values) for name, values in numbers_in(row).items()}
    choices: dict[str, Any] = {
        **{name: st.sampled_from(values) for name, values in CHOICES.items()},
        "others": st.sampled_from(OTHERS if len(row.differentiable) > 1 else OTHERS[:1]),
        "scale": st.sampled_from([x for x in SCALES if x <= row.largest_scale]),
        "reduction": st.sampled_from(reductions_of(row)),
        "along": st.integers(0, len(row.differentiable) + len(numbers_of(row))),
        "numbers": st.fixed_dictionaries(numbers).map(lambda drawn: tuple(drawn.items())),
        "seed": st.integers(0, 2**16),
    }
    return st.builds(
        Trial, st.just(row.name), st.sampled_from(dtypes), st.integers(1, MOST), **choices
    )


# The arrays of a trial, in NumPy float64 ----


def scored(trial: Trial, rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    n, width = rows.shape
    signs = rng.choice([-1.0, 1.0], (n, 1))
    kinds = {
        "random": rows,
        "duplicates": rows[rng.integers(0, max(n // 2, 1), n)],
        "opposite": signs * rows[:1],
        "some zeros": rows * rng.choice([0.0, 1.0], (n, 1)),
        "clusters": 10 + rows / 10,
        "corners": signs * np.eye(width)[rng.integers(0, width, n)],
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
        "orthogonal": 10 * np.eye(*array.shape),
        "aligned": np.concatenate([some, array[:, some.shape[1] :]], axis=1),
    }
    return kinds[kind]


def inputs_of(trial: Trial) -> tuple[Batch, np.ndarray]:
    """A batch and the cotangent of its terms. Rows that do not count have ordinary numbers here."""
    row, n, rng = trial.row, trial.size, np.random.default_rng(trial.seed)
    rows, labels, *others = row.make_inputs(rng, n, np.float64)
    labels, rows = labels_of(trial, rng, labels), scored(trial, rng, rows)
    args = (rows, labels, *(other(trial.others, array, rows) for array in others))
    numbers: Any = {name: values[0] for name, values in numbers_in(row).items()}
    numbers |= dict(trial.numbers)
    if "sample_margin" in numbers_of(row):
        numbers["sample_margin"] = rng.uniform(-0.2, 0.3, n)
    chance, random = rng.random(n), rng.uniform(0.2, 2.0, n)
    limit = {"all": 1.0, "some": 0.7, "one": chance.min(), "none": -1.0}[trial.counts]
    factors = {
        **{"ones": 0 * random + 1, "random": random, "zeros": 0 * random},
        "some zeros": random * rng.choice([0, 1], n),
        "tiny": random * 2.0**-30,
        # Gradients of sums must fit into the dtype.
        "large": random * 2.0 ** (4 if trial.dtype == "float16" else 20),
    }
    numbers = {name: np.asarray(x) for name, x in numbers.items()}
    batch = Batch(args, chance <= limit, factors[trial.weights], numbers)
    cotangent = rng.normal(size=CLASSES if row.terms == "classes" else n)
    return checked(row).rounded(batch, trial.dtype), cotangent


def counts_in(batch: Batch) -> np.ndarray:
    """Which rows are neither padding nor ignored."""
    known = batch.args[1] >= 0
    return batch.where & (known if known.ndim == 1 else known.any(axis=1))


def spoiled(trial: Trial, batch: Batch) -> Batch:
    """Filled up to `MOST` rows. Those that do not count have what must have no effect."""
    rows, labels, *others = batch.args
    where, out = pad(batch.where), ~pad(counts_in(batch))
    rows = np.where(out[:, None], float(trial.poison), pad(rows))
    labels = pad(labels)
    if not trial.row.multi_hot:
        labels = np.where(where, labels, 10**6).astype(labels.dtype)
    weights, numbers = jax.tree.map(
        lambda x: np.where(out, np.nan, pad(x)) if x.ndim else x,
        (batch.sample_weights, batch.numbers),
    )
    return Batch((rows, labels, *others), where, weights, numbers)


def pad(array: np.ndarray) -> np.ndarray:
    return np.pad(array, [(0, MOST - len(array)), *[(0, 0)] * (array.ndim - 1)])


# The check ----


def run(trial: Trial, clean: Batch, cotangent: np.ndarray, dtype: str) -> Result:
    """Values, and gradients of the trial's reduction alone. Padding is cut off."""
    row, n, loss = trial.row, trial.size, checked(trial.row)
    of_samples = row.terms == "samples"
    cotangent = pad(cotangent) if of_samples else cotangent
    values, gradients = loss.evaluate(spoiled(trial, clean), reductions_of(row), cotangent, dtype)
    gradients = gradients[trial.reduction]
    out = ~pad(counts_in(clean))
    for name in {loss.names[0], "sample_weights", "sample_margin"} & {*gradients}:
        assert not np.any(gradients[name][out]), f"a gradient of a masked row, for {name}"
        gradients[name] = gradients[name][:n]
    if of_samples:
        assert not np.any(values["none"][out]), "a term of a masked row"
        values["none"] = values["none"][:n]
    return jax.tree.map(lambda x: x.astype(np.float64), Result(values, gradients))


def largest_number(row: LossRow, batch: Batch) -> Any:
    """A generous bound of the numbers that a loss subtracts from each other.

    A value may differ by their roundings, and a slope by those divided by its step.
    """
    rows, numbers = batch.args[0][counts_in(batch)], batch.numbers
    length = magnitude(np.linalg.norm(rows, axis=1))
    others = np.prod([1 + magnitude(np.linalg.norm(x, axis=0)) for x in batch.args[2:]])
    power = 1 if row.takes_logits or row.kind == "classifier" else row.degree
    power = 2 if "metric_weight" in numbers else power
    if row.magnitude is not None:
        largest = row.magnitude(length, {name: magnitude(x) for name, x in numbers.items()})
    else:
        largest = 4 * (length * others**2) ** power + others
    for number in numbers.values():
        largest *= max(1.0, magnitude(number), 1 / (magnitude(number) or 1.0))
    return largest + 1


def moved(trial: Trial, batch: Batch, name: str, step: float) -> tuple[Batch, np.ndarray]:
    """Along a random direction of one leaf. Zeros and rows that do not count stay."""
    loss, rng = checked(trial.row), np.random.default_rng(trial.seed + 1)
    leaves = loss.leaves_of(batch)
    leaf = leaves[name]
    if name in loss.names and leaf.ndim == 2:
        size = np.sqrt(np.mean(leaf**2, axis=int(name == loss.names[0]), keepdims=True))
    else:  # A hinge has a kink where the margin is 0.
        size = np.maximum(np.abs(leaf), float(name.endswith("margin")))
    direction = np.asarray(rng.normal(size=leaf.shape) * size)
    if name in (loss.names[0], "sample_weights", "sample_margin"):
        direction[~counts_in(batch)] = 0
    return loss.with_leaves(batch, leaves | {name: leaf + step * direction}), direction


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
    got, full = (run(trial, clean, cotangent, dtype) for dtype in (trial.dtype, "float64"))

    # Values, and gradients beyond the largest number of their dtype.
    with np.errstate(all="ignore"):
        expected = reference_values(row, clean, reductions_of(row))
    largest, enlarge = largest_number(row, clean), row.enlarges(clean.numbers, clean.args)
    total = 1 + clean.sample_weights[counts_in(clean)].sum()
    eps = FLOAT64 if trial.dtype == "float64" else FLOAT32
    for result, tolerance in ((full, FLOAT64 * enlarge), (got, eps * enlarge)):
        for reduction, value in expected.items():
            atol = tolerance * largest * (1.0 if reduction == "mean" else total)
            what = f"the {reduction} in {'float64' if result is full else trial.dtype}"
            np.testing.assert_allclose(result.values[reduction], value, tolerance, atol, True, what)
    for name, gradient in got.gradients.items():
        limit = float(jnp.finfo(trial.dtype if name in loss.names else "float32").max)
        overflows = np.maximum(np.abs(full.gradients[name]), largest * total) > limit
        assert np.all(np.isfinite(gradient) | overflows), (name, gradient)

    # The slope of the reference, which is between the slopes at both ends.
    name = [*full.gradients][trial.along % len(full.gradients)]
    if name in (*row.constant, *(loss.names[k] for k in row.constant if isinstance(k, int))):
        return  # `test_contract` compares it with PyTorch.
    slope = np.sum(full.gradients[name] * moved(trial, clean, name, 0)[1])

    def slope_of_reference(step: float) -> tuple[float, float]:
        """And the magnitude of the values."""
        values, factor = [], cotangent if trial.reduction == "none" else 1.0
        for there in (moved(trial, clean, name, sign * step)[0] for sign in (1, -1)):
            with np.errstate(all="ignore"):
                of = reference_values(row, there, (trial.reduction,))
            values.append(np.sum(of[trial.reduction] * factor))
        return (values[0] - values[1]) / (2 * step), magnitude(values)

    by_reference, value = slope_of_reference(STEP)
    share = 1.0 if trial.reduction == "mean" else 4 * total
    allowed = 1e-5 * abs(slope) + 1e-15 * (largest * share + value) / STEP
    if abs(slope - by_reference) > allowed:
        for step in (STEP, -STEP):
            there, direction = moved(trial, clean, name, step)
            near = run(trial, there, cotangent, "float64").gradients[name]
            allowed += 2 * abs(np.sum(near * direction) - slope)
    if abs(slope - by_reference) > allowed:
        # Where the loss jumps, as at a tie of ranks, a smaller step gives a larger slope.
        closer = slope_of_reference(STEP / 8)[0]
        assert abs(closer - by_reference) > abs(slope - by_reference) / 2, (
            f"the slope along {name} is {slope}, that of the reference {by_reference}, ± {allowed}"
        )


# The tests ----


def try_all(
    row: LossRow,
    dtypes: Sequence[str],
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
    @given(trials_of(row, dtypes))
    def run_trials(trial):
        check(trial)

    run_trials()


@pytest.mark.long
@over(TRIED)
def test_trials(row):
    # The half precision stays the same when another row is added.
    half = ("bfloat16", "float16")[zlib.crc32(row.name.encode()) % 2]
    try_all(row, ("float32", "float64", half), 300)


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
        try_all(row, ["float32"], 20)
        return
    with pytest.raises(AssertionError) as caught:
        try_all(row, ["float32"], 120, (Phase.generate,))
    # It says how to repeat it.
    call = re.search(r"`(check\(Trial\(loss='softmax'.*\)\))`", caught.value.__notes__[0])
    assert call
    with pytest.raises(AssertionError):
        eval(call[1])
