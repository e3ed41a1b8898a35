"""The rules that `jaxloss.testing` checks, in their order.

Each must hold for a batch of any size: the smallest that breaks it is searched.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxloss.testing.checked_loss import (
    REDUCTIONS,
    ROWS,
    Batch,
    Broken,
    CheckedLoss,
    Result,
    check_finite,
    close,
    first_line,
    magnitude,
    num_devices,
    text,
)

_Named: TypeAlias = Iterator[tuple[str, Batch]]
_Check: TypeAlias = Callable[[CheckedLoss, Batch, np.random.Generator], None]
_Batches: TypeAlias = Callable[[CheckedLoss, Batch, np.random.Generator], _Named]
_Part: TypeAlias = Literal["", "devices", "dtypes"]

_LARGE = 1e4
_HUGE_LABEL = 10**6


# Batches ----


def _random_mask(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> Batch:
    """Some masked rows and ignored labels, and weights that differ."""
    n = batch.size
    masked = rng.choice(n, n // 5, replace=False)
    if checked.can_ignore:
        batch = batch.with_arg(1, rng.choice(n, n // 6, replace=False), -1)
    return _masked(batch, masked, rng)


def _with_positives(checked: CheckedLoss, batch: Batch) -> Batch:
    """A row that is alone in its class joins the largest class."""
    if checked.kind != "labels":
        return batch
    labels, counts = np.unique(batch.args[1], return_counts=True)
    alone = np.isin(batch.args[1], labels[counts == 1])
    return batch.with_arg(1, alone, labels[np.argmax(counts)])


def _some_rows(batch: Batch, rng: np.random.Generator) -> np.ndarray:
    """A quarter of the rows, and at least one."""
    return rng.choice(batch.size, max(1, batch.size // 4), replace=False)


def _masked(batch: Batch, rows: Any, rng: np.random.Generator) -> Batch:
    """Rows that are masked, and weights that differ."""
    return batch.with_mask(rows)._replace(sample_weights=rng.uniform(0.2, 2.0, batch.size))


# Rules ----


class Rule(NamedTuple):
    name: str
    statement: str
    advice: str
    check: _Check
    part: _Part = ""
    batches: _Batches | None = None
    """Extreme batches, for which value and gradient must be finite."""


RULES: list[Rule] = []


def _rule(part: _Part = "", finite: bool = False) -> Callable[[Any], Any]:
    """Adds a function to the rules; its name and its docstring are those of the rule.

    If value and gradient must be finite, the function yields batches, and what they are.
    """

    def add(function: Any) -> Any:
        def all_are_finite(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
            for what, changed in function(checked, batch, rng):
                check_finite(what, checked.evaluate(changed), changed)

        documented = " ".join((function.__doc__ or "").split())  # Empty with `python -OO`.
        statement, _, advice = documented.rstrip(".").partition(". What to do: ")
        texts = function.__name__, statement[:1].lower() + statement[1:], advice
        check = all_are_finite if finite else function
        RULES.append(Rule(*texts, check, part, function if finite else None))
        return function

    return add


@_rule()
def keywords(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """It must take the common keywords of `jaxloss`.

    What to do: add keyword-only arguments with the defaults where=None, sample_weights=None,
    reduction="mean", axis_name=None; `devices=False` needs no `axis_name`.
    """
    parameters = inspect.signature(checked.loss).parameters
    missing = [f"`{name}`" for name in checked.common if name not in parameters]
    if missing and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        raise Broken(f"it does not take {', '.join(missing)}")


@_rule()
def jit(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """It must work under `jax.jit` and `jax.grad`, and return arrays of floats.

    What to do: correct the error; use `jnp.where` instead of `if` on the values of arrays.
    """
    for reduction in REDUCTIONS:
        got = checked.shape_of(reduction, batch)
        if isinstance(got, Exception):
            named = "reduction" in str(got) or "none" in str(got)
            if reduction == "none" and isinstance(got, ValueError) and named:
                continue
            found = f'with reduction="{reduction}" the loss raised {first_line(got)}'
            try:
                checked.call(jax.tree.map(jnp.asarray, batch), reduction=reduction)
                found += " (only when it is traced)"
            except Exception:  # The same one, without `jax.jit`.
                pass
            raise Broken(found, batch) from got
        if not hasattr(got, "dtype") or not jnp.issubdtype(got.dtype, jnp.floating):
            raise Broken(f'the "{reduction}" is not an array of floats, but {got}', batch)
        if reduction != "none" and got.shape != ():
            raise Broken(f'the "{reduction}" has the shape {got.shape}, and must have ()', batch)
    checked.evaluate(batch)


@_rule()
def float64(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """Float64 inputs must be computed in float64.

    What to do: widen only float16 and bfloat16, for example by `x.astype(jnp.promote_types(x.dtype,
    jnp.float32))`.
    """
    result = checked.evaluate(batch)
    for reduction, value in result.values.items():
        if value.dtype != np.float64:
            raise Broken(f'for float64 inputs the "{reduction}" has dtype {value.dtype}', batch)
    # Sums of random numbers of float64 are not all numbers of float32.
    values = np.concatenate([np.ravel(value) for value in result.values.values()])
    values = values[np.isfinite(values) & (values != np.round(values))]
    if batch.size == ROWS and len(values) and np.all(values == values.astype(np.float32)):
        raise Broken("for float64 inputs all values are numbers of float32", batch)


@_rule(finite=True)
def finite(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> _Named:
    """Value and gradient must be finite for random rows of any length.

    What to do: find the operation with `jax.config.update('jax_debug_nans', True)`; a root is not
    differentiable at 0, as in the distance of a row from itself.
    """
    batch = _with_positives(checked, batch)
    rows, shape = batch.args[0], (batch.size, *[1] * (batch.args[0].ndim - 1))
    yield "for random rows", batch
    lengths = 10.0 ** rng.uniform(-3, 3, shape)
    for what, changed in (("tiny rows", 1e-20 * rows), ("rows of many lengths", lengths * rows)):
        yield f"for {what}", batch.with_args(checked.row_positions, slice(None), changed)


@_rule(finite=True)
def duplicates(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> _Named:
    """Value and gradient must be finite if rows, or columns of other arrays, are equal or opposite.

    What to do: guard a root or a division at a distance of zero by a `jnp.where` inside and another
    one outside: the gradient of a single one is NaN.
    """
    batch = _with_positives(checked, batch)
    row, n = batch.args[0][0], batch.size
    signs = np.where(np.arange(n) % 3 == 1, -1.0, 1.0).reshape(-1, *[1] * row.ndim)
    for what, rows, value in (
        ("some rows are equal", slice(None, None, 2), row),
        ("all rows are equal", slice(None), row),
        ("all rows are equal or opposite", slice(None), signs * row),
    ):
        yield f"if {what}", batch.with_args(checked.row_positions, rows, value)
    for k, name, array in _matrices(checked, batch):
        column = array[:, :1]
        same = batch.with_arg(k, slice(None), column)
        yield f"if all columns of `{name}` are equal", same
        along = column.reshape(len(column), -1)[:, 0]
        for sign in (1, -1) if row.shape == along.shape else ():
            rows = same.with_args(checked.row_positions, slice(None), sign * along)
            yield f"if all rows are {sign} times all columns of `{name}`", rows


def _matrices(checked: CheckedLoss, batch: Batch) -> Iterator[tuple[int, str, np.ndarray]]:
    """Further arrays with columns, such as those of classes: position, name and array."""
    for k in checked.differentiable:
        if k not in checked.row_positions and batch.args[k].ndim > 1:
            yield k, checked.names[k], batch.args[k]


@_rule(finite=True)
def zeros(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> _Named:
    """Value and gradient must be finite if rows or other arrays are zero.

    What to do: guard a norm of zero by a `jnp.where` inside of the root, and again outside.
    """
    batch = _with_positives(checked, batch)
    rows, every = checked.row_positions, slice(None)
    others = [k for k in checked.differentiable if k not in rows]
    for what, positions, which in (
        ("some rows are zero", rows, slice(None, None, 2)),
        ("all rows are zero", rows, every),
        *((f"`{checked.names[k]}` is zero", [k], every) for k in others),
        ("all arrays are zero", [*rows, *others], every),
    ):
        yield f"if {what}", batch.with_args(positions, which, 0.0)
    for k, name, _ in _matrices(checked, batch):
        yield f"if a column of `{name}` is zero", batch.with_arg(k, (slice(None), 1), 0.0)


@_rule(finite=True)
def large_values(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> _Named:
    """Value and gradient must be finite for elements of ±10000.

    What to do: shift a log-sum-exp by its maximum, as `jax.nn.logsumexp` does, and write log(1 +
    exp(x)) as `jax.nn.softplus(x)`.
    """
    batch = _with_positives(checked, batch)
    shape, n = batch.args[0].shape, batch.size
    width = int(np.prod(shape[1:]))
    signs = np.where(np.arange(n) % 3 == 0, -1.0, 1.0)[:, None]
    corners = signs * np.eye(width)[np.arange(n) % width]
    for rows in (corners, signs * np.ones((n, width)), rng.choice([-1.0, 1.0], (n, width))):
        large = _LARGE * rows.reshape(shape)
        changed = batch.with_args(checked.row_positions, slice(None), large)
        yield f"for elements of ±{_LARGE:g}", changed


@_rule(finite=True)
def one_class(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> _Named:
    """Value and gradient must be finite if all rows have one class.

    What to do: guard what may be empty, such as the negatives or a class without rows: put a
    constant in its place by `jnp.where`, before the logarithm or the division and not only after.
    """
    if checked.kind == "targets":
        yield "if all targets are positive", batch.with_arg(1, slice(None), 1)
    elif checked.kind == "labels":
        yield "if all rows have one class", batch.with_arg(1, slice(None), batch.args[1][0])


@_rule(finite=True)
def no_positives(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> _Named:
    """Value and gradient must be finite if a row has no other row of its class.

    What to do: let such a row not count: put a constant in place of its inputs by `jnp.where`,
    before the logarithm or the division and not only after.
    """
    yield "if only the first row counts", batch.with_mask(slice(1, None))
    if checked.kind == "labels":
        first = np.unique(batch.args[1], return_index=True)[1]
        alone = batch.with_mask(np.setdiff1d(np.arange(batch.size), first))
        yield "if each class has one row", alone
    elif checked.kind == "targets":
        yield "without a positive target", batch.with_arg(1, slice(None), 0)


@_rule()
def nothing_counts(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """Value and gradient must be 0 if no row counts.

    What to do: give rows of where=False the weight 0 in the sum and in its divisor, and divide by
    `jnp.where(total == 0, 1, total)`.
    """
    _all_zero(checked, "with where=False everywhere", batch.with_mask(slice(None)))


@_rule()
def no_rows(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """Value and gradient must be 0 without rows.

    What to do: give a maximum or a minimum over rows the keyword `initial`, and guard a division by
    the number of rows.
    """
    args = tuple(a[:0] if k < 2 else a for k, a in enumerate(batch.args))
    none = Batch(args, batch.where[:0], batch.sample_weights[:0])
    _all_zero(checked, "without rows", none, ("mean",))


def _all_zero(
    checked: CheckedLoss, what: str, batch: Batch, reductions: Sequence[str] | None = None
) -> None:
    result = checked.evaluate(batch, reductions)
    _same(what, result, jax.tree.map(np.zeros_like, result), batch, atol=0.0)


def _same(what: str, got: Result, expected: Result, batch: Batch, atol: float = 1e-12) -> None:
    """Raises unless values and gradients of mean and sum are the same, up to roundings."""
    for reduction, gradients in expected.gradients.items():
        if reduction == "none":
            continue
        values = got.values[reduction], expected.values[reduction]
        close(f'{what} the "{reduction}"', *values, batch, atol=atol)
        for name, gradient in gradients.items():
            of = f'{what} the gradient of the "{reduction}" for `{name}`'
            close(of, got.gradients[reduction][name], gradient, batch, atol=atol)


@_rule()
def masks(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """A row of where=False must have no effect.

    What to do: leave masked rows out of every sum, mean, maximum and set of references.
    """
    masked = batch.with_mask(_some_rows(batch, rng))
    keep = masked.where
    if not keep.any():
        return
    got = checked.evaluate(masked)
    rows = Batch(tuple(a[keep] if k < 2 else a for k, a in enumerate(batch.args)), None, None)
    value, gradients = (found["mean"] for found in checked.evaluate(rows, ("mean",)))
    what = "the mean, which differs from the mean without the masked rows,"
    close(what, got.values["mean"], value, masked, 1e-12)
    of_rows = [checked.names[k] for k in checked.row_positions]
    for argument, expected in gradients.items():
        full, name = got.gradients["mean"][argument], f"the gradient of `{argument}`"
        close(name, full[keep] if argument in of_rows else full, expected, masked)
        if argument in of_rows:
            close(f"{name} in masked rows", full[~keep], np.zeros_like(full[~keep]), masked)


@_rule()
def padding_leaks(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """What is in a row of where=False must have no effect, even if it is NaN.

    What to do: replace masked rows before you compute, by `jnp.where(where[:, None], rows, 0)`; 0
    times NaN is NaN.
    """
    rows = _some_rows(batch, rng)
    masked = _masked(batch, rows, rng)
    expected = checked.evaluate(masked)
    _no_leak(checked, "a masked row", masked, rows, expected)
    weights = masked.sample_weights.copy()
    weights[rows] = np.nan
    cases = [("NaN as the weight of a masked row", masked._replace(sample_weights=weights))]
    if checked.kind == "labels":
        large = masked.with_arg(1, rows, min(_HUGE_LABEL, np.iinfo(batch.args[1].dtype).max))
        cases.append(("a large label of a masked row", large))
    for what, changed in cases:
        _same(f"with {what}", checked.evaluate(changed), expected, changed)


def _no_leak(checked: CheckedLoss, where: str, batch: Batch, rows: Any, expected: Result) -> None:
    for poison in (np.nan, np.inf, -np.inf):
        changed = batch.with_args(checked.row_positions, rows, poison)
        _same(f"with {poison} in {where}", checked.evaluate(changed), expected, changed)


@_rule()
def ignored_labels(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """A row of a negative label must be treated like a row of where=False.

    What to do: start with `where = where & (labels >= 0)`: as an index, -1 is the last class.
    """
    if not checked.can_ignore:
        return
    rows = _some_rows(batch, rng)
    expected = checked.evaluate(batch.with_mask(rows))
    _all_zero(checked, "with negative labels only", batch.with_arg(1, slice(None), -1))
    for label in (-1, -2):
        changed = batch.with_arg(1, rows, label)
        _same(f"with the label {label}", checked.evaluate(changed), expected, changed)
        _no_leak(checked, f"a row with the label {label}", changed, rows, expected)


@_rule()
def hyperparameters(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """The gradient of a traced hyperparameter must be finite, and must not depend on rows of
    where=False or of a negative label, even if they are NaN.

    What to do: replace such rows before a hyperparameter multiplies or divides them: 0 times NaN is
    NaN in its gradient, also where a mask follows.
    """

    def gradients_of(changed: Batch) -> dict[str, np.ndarray]:
        of_all = checked.evaluate(changed, ("mean",)).gradients["mean"]
        return {name: of_all[name] for name in changed.numbers}

    rows = _some_rows(batch, rng)
    batch = _with_positives(checked, batch)
    masked = _masked(batch, rows, rng)._replace(numbers=batch.numbers or checked.numbers)
    if not masked.numbers:
        return
    expected = gradients_of(masked)
    for name, gradient in expected.items():
        if not np.all(np.isfinite(gradient)):
            raise Broken(f"the gradient of `{name}` is {text(gradient)}", masked)
    cases = [("masked", masked)]
    if checked.can_ignore:
        counting = masked._replace(where=np.ones(batch.size, bool))
        cases.append(("negatively labelled", counting.with_arg(1, rows, -1)))
    for poison in (np.nan, np.inf, -np.inf):
        for where, given in cases:
            changed = given.with_args(checked.row_positions, rows, poison)
            what = f"with {poison} in a {where} row the gradient of"
            for name, gradient in gradients_of(changed).items():
                close(f"{what} `{name}`", gradient, expected[name], changed)


@_rule()
def none(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """Reduction="none" must give a loss for every row, and 0 for a row that does not count.

    What to do: return `jnp.where(counts, sample_weights * losses, 0)`.
    """
    if checked.terms == "other":
        shape = checked.shape_of("none", batch).shape
        raise Broken(f'"none" has the shape {shape}, and must have ({batch.size},)', batch)
    if checked.terms != "rows" or "none" not in checked.reductions:
        return
    masked = _random_mask(checked, batch, rng).with_mask(_some_rows(batch, rng))
    out = ~masked.where
    if checked.kind != "views":
        out |= np.all(masked.args[1].reshape(batch.size, -1) < 0, axis=1)
    poisoned = masked._replace(sample_weights=np.where(out, np.nan, masked.sample_weights))
    poisoned = poisoned.with_args(checked.row_positions, out, np.nan)
    for changed in (masked, poisoned):
        terms = checked.evaluate(changed).values["none"][out]
        close('"none" of rows that do not count', terms, np.zeros_like(terms), changed, 0, 0)


@_rule()
def sums(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """The losses of reduction="none" must sum to that of "sum", in value and gradient.

    What to do: compute all reductions from the same losses.
    """
    if "none" not in checked.reductions:
        return
    masked = _random_mask(checked, batch, rng)
    values, gradients = checked.evaluate(masked)
    close('the "sum"', values["sum"], values["none"].sum(), masked)
    close('the gradient of the "sum"', gradients["sum"], gradients["none"], masked)


@_rule()
def weights(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """With the weights s, "none" must be s_i ℓ_i, and the mean Σ s_i ℓ_i / Σ s_i over the rows that
    count.

    What to do: multiply the loss of each row by its weight, and divide the mean by the sum of the
    weights, not by the number of rows or `jnp.maximum(total, 1)`.
    """
    if checked.terms != "rows" or "none" not in checked.reductions:
        return

    def losses_of(weighted):
        equal = weighted._replace(sample_weights=np.ones(batch.size))
        return checked.evaluate(equal).values["none"]

    weighted = _random_mask(checked, batch, rng)
    weights, losses = weighted.sample_weights, losses_of(weighted)
    if checked.kind == "labels":
        # Of a sum of two losses, one may be undefined for a row that is alone in its class, and the
        # means have different denominators.
        labels = np.where(weighted.where, weighted.args[1], -1)
        alone = np.array([np.sum(labels == label) == 1 for label in labels])
        weighted = weighted.with_mask(alone & (losses != 0))
        losses = losses_of(weighted)
    result = checked.evaluate(weighted)
    close('"none"', result.values["none"], weights * losses, weighted)
    close('the "sum"', result.values["sum"], np.sum(weights * losses), weighted)
    # A row whose loss is 0 counts if its weight changes the mean.
    counts = losses != 0
    for row in np.flatnonzero(~counts & weighted.where & (result.values["mean"] != 0)):
        heavier = weights.copy()
        heavier[row] *= 2
        changed = checked.evaluate(weighted._replace(sample_weights=heavier)).values["mean"]
        counts[row] = not np.isclose(changed, result.values["mean"], 1e-9, 0)
    if counts.any():
        expected = np.sum(weights * losses) / np.sum(weights[counts])
        close("the mean", result.values["mean"], expected, weighted)
    for size, factor in (("small", 2.0**-30), ("large", 2.0**20)):
        scaled = weighted._replace(sample_weights=factor * weights)
        got = checked.evaluate(scaled)
        close(f"the mean of {size} weights", got.values["mean"], result.values["mean"], scaled)
        for name, gradient in got.gradients["mean"].items():
            if name != "sample_weights":
                what = f"the gradient of `{name}` for {size} weights"
                close(what, gradient, result.gradients["mean"][name], scaled)


@_rule()
def hidden_nan(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """A NaN in a row that counts must give NaN.

    What to do: leave out `jnp.nan_to_num`, and write comparisons so that NaN does not become a 0.
    """
    # Where the gradient is largest, a row counts, and its element matters.
    gradient = checked.evaluate(batch).gradients["mean"][checked.names[0]]
    if not gradient.any():
        return
    place = [int(k) for k in np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)]
    changed = batch.with_arg(0, tuple(place), np.nan)
    values, gradients = checked.evaluate(changed)
    for reduction, value in values.items():
        if not np.isnan(value).any():
            raise Broken(f'with NaN at {place} the "{reduction}" is {text(value)}', changed)
        if not np.isnan(gradients[reduction][checked.names[0]]).any():
            raise Broken(f'the gradient of the "{reduction}" is finite', changed)


@_rule()
def gradient(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """The gradient must equal finite differences.

    What to do: correct the custom gradient; if the loss has a `jax.lax.stop_gradient` on purpose,
    give a `reference` in PyTorch, whose gradients are compared instead.
    """
    if _torch_reference(checked, batch) is not None:
        return  # Its gradients are compared.
    masked = _random_mask(checked, batch, rng)
    for k in checked.differentiable:
        _slopes(checked, masked, rng, k)


def _slopes(checked: CheckedLoss, batch: Batch, rng: np.random.Generator, k: int) -> None:
    """Raises unless the gradient of argument k equals central differences along directions."""
    name = checked.names[k]
    terms = checked.evaluate(batch).values.get("none", np.zeros(0))
    factors = {"mean": 1.0, "sum": 1.0, "none": rng.normal(size=terms.shape)}
    result = checked.evaluate(batch, cotangent=factors["none"])
    for _ in range(2):
        direction, step = rng.normal(size=batch.args[k].shape), 1e-6
        moved = [
            checked.evaluate(batch.with_arg(k, ..., batch.args[k] + sign * step * direction)).values
            for sign in (1, -1)
        ]
        for reduction, gradients in result.gradients.items():
            values = [np.sum(factors[reduction] * there[reduction]) for there in moved]
            expected = (values[0] - values[1]) / (2 * step)
            what = f'the slope of the "{reduction}" along a direction of `{name}`'
            # Rounding of the values gives about 1e-10 of them.
            atol = 1e-6 * max(1.0, *map(abs, values))
            close(what, np.sum(gradients[name] * direction), expected, batch, 1e-5, atol)


@_rule()
def reference(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """The mean and its gradient must equal those of the reference.

    What to do: compare the formulas, signs and constants of the two.
    """
    if checked.reference is None:
        return
    result = checked.evaluate(batch)
    by_torch = _torch_reference(checked, batch)
    value = checked.reference(*batch.args) if by_torch is None else by_torch[0]
    value = np.asarray(value, np.float64)
    close("the mean", result.values["mean"], value, batch, 1e-6, 1e-8)
    for name, expected in by_torch[1].items() if by_torch else ():
        got = result.gradients["mean"][name]
        close(f"the gradient of `{name}`", got, expected, batch, 1e-6, 1e-8)


def _torch_reference(checked: CheckedLoss, batch: Batch) -> tuple[Any, Any] | None:
    """Value and gradients of a reference in PyTorch; None for one in NumPy.

    It has imported PyTorch, at the latest when it is called.
    """
    if checked.reference is None:
        return None
    try:
        value = checked.reference(*batch.args)
    except Exception:  # Perhaps NumPy arrays do not suit it.
        if "torch" not in sys.modules:
            raise
        value = None
    torch: Any = sys.modules.get("torch")
    if value is not None and (torch is None or not isinstance(value, torch.Tensor)):
        return None
    tensors = [
        torch.tensor(a) if a.dtype != np.int32 else torch.tensor(a).long() for a in batch.args
    ]
    leaves = [tensors[k].requires_grad_() for k in checked.differentiable]
    value = checked.reference(*tensors)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.detach().numpy(), {
        checked.names[k]: np.zeros(leaf.shape) if gradient is None else gradient.numpy()
        for k, leaf, gradient in zip(checked.differentiable, leaves, gradients, strict=True)
    }


@_rule()
def second_derivatives(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """`jax.grad` and `jax.jvp` of the gradient must equal finite differences of it.

    What to do: write the backward pass of a custom gradient in functions that JAX can
    differentiate, of arrays that are its residuals.
    """
    masked = _random_mask(checked, batch, rng)._replace(sample_weights=None)
    smooth: Iterable[int] = checked.differentiable
    if _torch_reference(checked, batch) is not None:
        smooth = _smooth(checked, masked._replace(sample_weights=batch.sample_weights), rng)
    leaves = checked.leaves_of(masked)
    # Along an argument of a stop-gradient, finite differences are other numbers.
    names = [checked.names[k] for k in smooth]
    direction = {k: rng.normal(size=x.shape) * (k in names) for k, x in leaves.items()}
    forward, backward = checked.second_derivatives(masked, direction)
    # Four points: with two, the error would be above 1e-8 where a loss has a scale of 50 or more.
    step, moved = 1e-5, []
    for steps in (1, -1, 2, -2):
        there = {name: leaf + steps * step * direction[name] for name, leaf in leaves.items()}
        moved.append(checked.evaluate(checked.with_leaves(masked, there), ("mean",)).gradients)
    expected = jax.tree.map(lambda a, b, c, d: (8 * (a - b) - (c - d)) / (12 * step), *moved)
    # Rounding of the gradients gives about 1e-10 of the largest numbers.
    atol = 1e-8 * max(1.0, magnitude(expected))
    for name, product in expected["mean"].items():
        what = f"the Hessian times a direction, at `{name}` and by"
        close(f"{what} `jax.jvp`,", forward[name], product, masked, 1e-6, atol)
        if name in names:
            close(f"{what} `jax.grad`,", backward[name], product, masked, 1e-6, atol)


def _smooth(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> Iterator[int]:
    """The arguments whose gradient equals finite differences, as there is no stop-gradient."""
    for k in checked.differentiable:
        with suppress(Broken):
            _slopes(checked, batch, rng, k)
            yield k


@_rule()
def vmap(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """`jax.vmap` and `jax.checkpoint` must not change value and gradient.

    What to do: use operations that `jax.vmap` can batch, and no side effects.
    """
    others = [batch, checked.batch(rng, batch.size), checked.batch(rng, batch.size)]
    batches = [_random_mask(checked, other, rng) for other in others]
    results = checked.of_stack(batches)
    for k, one in enumerate(batches):
        got = jax.tree.map(lambda x, k=k: x[k], results)
        _same("", got, checked.evaluate(one, ("mean",)), one)


@_rule(part="dtypes")
def half_precision(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """Float32, bfloat16 and float16 inputs must give float32, computed in float32.

    What to do: start with `x.astype(jnp.promote_types(x.dtype, jnp.float32))`.
    """
    batch = _random_mask(checked, batch, rng)
    for dtype in (np.float32, jnp.bfloat16, np.float16):
        what = f"for {jnp.dtype(dtype).name} inputs the"
        rounded = checked.rounded(batch, dtype)
        value, gradients = (of["mean"] for of in checked.evaluate(rounded, ("mean",), dtype=dtype))
        if value.dtype != np.float32:
            raise Broken(f"{what} mean has dtype {value.dtype}", rounded)
        expected, of_wide = (of["mean"] for of in checked.evaluate(rounded))
        # Roundings of float32, which a scale, an exponent or a projection may enlarge.
        single = float(jnp.finfo(np.float32).eps)
        close(f"{what} mean", value.astype(float), expected, rounded, 200 * single, 100 * single)
        for name, full in of_wide.items():
            # A gradient is also rounded to the dtype of its array, once on each of a few paths.
            eps = max(4 * float(jnp.finfo(gradients[name].dtype).eps), 800 * single)
            got, atol = gradients[name].astype(float), eps * max(magnitude(full), 1e-2)
            close(f"{what} gradient of `{name}`", got, full, rounded, 0.0, atol)


def _uneven(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> Batch:
    """All rows of the first device count, one of the next, none, and all but one."""
    size = num_devices()
    where = np.zeros((size, batch.size // size), bool)
    where[0], where[1, -1:] = True, True
    where[3:, 1:] = True
    batch = _masked(batch, ~where.reshape(-1), rng)
    return batch.with_arg(1, [-1], -1) if checked.can_ignore else batch


@_rule(part="devices")
def devices(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """With `axis_name`, every device must return the value of the global batch.

    What to do: add numerators and denominators up by `jax.lax.psum` before you divide, and compare
    with the rows of all devices; find a row's own index among them with `jax.lax.axis_index`.
    """
    batch = _uneven(checked, batch, rng)
    expected = checked.evaluate(batch).values
    for device, result in enumerate(checked.on_devices(batch, check_vma=False)):
        for reduction, value in result.values.items():
            what = f'on device {device} of {num_devices()} the "{reduction}"'
            close(what, value, expected[reduction], batch)


@_rule(part="devices")
def device_gradients(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """The mean of the gradients over the devices must equal the gradient on one device.

    What to do: reduce inside of the loss, by `jax.lax.psum`, and let gradients flow through
    `jax.lax.all_gather`.
    """
    batch = _uneven(checked, batch, rng)
    on_devices = checked.on_devices(batch, check_vma=False)[0]
    _same("on devices", on_devices, checked.evaluate(batch), batch)
    if checked.numbers:
        traced = batch._replace(numbers=checked.numbers)
        # They are the same on all devices, and `check_vma` is a rule of its own.
        of_devices = checked.on_devices(traced, False, ("mean",))[0]
        _same("on devices", of_devices, checked.evaluate(traced, ("mean",)), traced)


@_rule(part="devices")
def check_vma(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """Under `jax.shard_map` with check_vma=True, value and gradient must be the same.

    What to do: reduce by `jax.lax.psum`, after which JAX knows that all devices have the same
    value.
    """
    batch = _uneven(checked, batch, rng)
    expected = checked.evaluate(batch)
    (got,) = checked.on_devices(batch)
    for reduction, value in got.values.items():
        close(f'the "{reduction}"', value, expected.values[reduction], batch)
    _same("on devices", got, expected, batch)
