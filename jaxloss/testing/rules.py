"""The rules that `jaxloss.testing` checks, in their order.

Each must hold for a batch of any size: the smallest that breaks it is searched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
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
    x64,
)

_Check: TypeAlias = Callable[[CheckedLoss, Batch, np.random.Generator], None]
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


def _ignored(checked: CheckedLoss, labels: np.ndarray) -> np.ndarray:
    """The rows that are ignored."""
    if checked.kind == "views":
        return np.zeros(len(labels), bool)
    return np.all(labels.reshape(len(labels), -1) < 0, axis=1)


# Rules ----


class Rule(NamedTuple):
    name: str
    statement: str
    advice: str
    check: _Check
    part: _Part


RULES: list[Rule] = []


def _rule(name: str, statement: str, advice: str, part: _Part = "") -> Callable[[_Check], _Check]:
    """Adds a check to the rules."""

    def add(check: _Check) -> _Check:
        RULES.append(Rule(name, statement, advice, check, part))
        return check

    return add


@_rule(
    "jit",
    "it must work under `jax.jit` and `jax.grad`, and return arrays of floats",
    "correct the error; use `jnp.where` instead of `if` on the values of arrays",
)
def _under_jit(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """Also finds out which reductions there are."""
    shapes = {}
    for reduction in REDUCTIONS:
        loss = functools.partial(checked.loss, reduction=reduction)
        with x64(True):
            try:
                shapes[reduction] = jax.eval_shape(functools.partial(_call, loss), *batch)
            except Exception as error:
                named = "reduction" in str(error) or "none" in str(error)
                if reduction == "none" and isinstance(error, ValueError) and named:
                    continue
                found = f'with reduction="{reduction}" the loss raised {first_line(error)}'
                try:
                    _call(loss, *jax.tree.map(jnp.asarray, tuple(batch)))
                    found += " (only when it is traced)"
                except Exception:  # The same one, without `jax.jit`.
                    pass
                raise Broken(found, batch) from error
    for reduction, got in shapes.items():
        if not hasattr(got, "dtype") or not jnp.issubdtype(got.dtype, jnp.floating):
            raise Broken(f'the "{reduction}" is not an array of floats, but {got}', batch)
        if reduction != "none" and got.shape != ():
            raise Broken(f'the "{reduction}" has the shape {got.shape}, and must have ()', batch)
    checked.reductions = tuple(shapes)
    if "none" in shapes:
        shape = shapes["none"].shape
        if shape == (batch.size,):
            checked.terms = "rows"
        elif checked.kind == "targets" and shape == batch.args[1].shape[1:]:
            checked.terms = "classes"
        else:  # The rule `none` says so.
            checked.terms, checked.reductions = "other", ("mean", "sum")
    checked.evaluate(batch)


def _call(loss: Any, args: Any, where: Any, sample_weights: Any) -> Any:
    return loss(*args, where=where, sample_weights=sample_weights)


@_rule(
    "float64",
    "float64 inputs must be computed in float64",
    "widen only float16 and bfloat16, for example by "
    "`x.astype(jnp.promote_types(x.dtype, jnp.float32))`",
)
def _stays_float64(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    result = checked.evaluate(batch)
    for reduction, value in result.values.items():
        if value.dtype != np.float64:
            raise Broken(f'for float64 inputs the "{reduction}" has dtype {value.dtype}', batch)
    # Sums of random numbers of float64 are not all numbers of float32.
    values = np.concatenate([np.ravel(value) for value in result.values.values()])
    values = values[np.isfinite(values) & (values != np.round(values))]
    if batch.size == ROWS and len(values) and np.all(values == values.astype(np.float32)):
        raise Broken("for float64 inputs all values are numbers of float32", batch)


@_rule(
    "finite",
    "value and gradient must be finite for random rows",
    "find the operation with `jax.config.update('jax_debug_nans', True)`; a root is not "
    "differentiable at 0, as in the distance of a row from itself",
)
def _random_is_finite(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    batch = _with_positives(checked, batch)
    check_finite("for random rows", checked.evaluate(batch), batch)


@_rule(
    "duplicates",
    "value and gradient must be finite if rows are equal or opposite",
    "guard a root or a division at a distance of zero by a `jnp.where` inside and another one "
    "outside: the gradient of a single one is NaN",
)
def _duplicates(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    batch = _with_positives(checked, batch)
    row, n = batch.args[0][0], batch.size
    signs = np.where(np.arange(n) % 3 == 1, -1.0, 1.0).reshape(-1, *[1] * row.ndim)
    for what, rows, value in (
        ("some rows are equal", slice(None, None, 2), row),
        ("all rows are equal", slice(None), row),
        ("all rows are equal or opposite", slice(None), signs * row),
    ):
        changed = batch.with_args(checked.row_positions, rows, value)
        check_finite(f"if {what}", checked.evaluate(changed), changed)


@_rule(
    "zeros",
    "value and gradient must be finite if rows or other arrays are zero",
    "guard a norm of zero by a `jnp.where` inside of the root, and again outside",
)
def _zeros(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    batch = _with_positives(checked, batch)
    rows, every = checked.row_positions, slice(None)
    others = [k for k in checked.differentiable if k not in rows]
    for what, positions, which in (
        ("some rows are zero", rows, slice(None, None, 2)),
        ("all rows are zero", rows, every),
        *((f"`{checked.names[k]}` is zero", [k], every) for k in others),
        ("all arrays are zero", [*rows, *others], every),
    ):
        changed = batch.with_args(positions, which, 0.0)
        check_finite(f"if {what}", checked.evaluate(changed), changed)


@_rule(
    "large_values",
    f"value and gradient must be finite for elements of ±{_LARGE:g}",
    "shift a log-sum-exp by its maximum, as `jax.nn.logsumexp` does, and write "
    "log(1 + exp(x)) as `jax.nn.softplus(x)`",
)
def _large_values(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    batch = _with_positives(checked, batch)
    shape, n = batch.args[0].shape, batch.size
    width = int(np.prod(shape[1:]))
    signs = np.where(np.arange(n) % 3 == 0, -1.0, 1.0)[:, None]
    for rows in (
        signs * np.eye(width)[np.arange(n) % width],
        signs * np.ones((n, width)),
        rng.choice([-1.0, 1.0], (n, width)),
    ):
        large = _LARGE * rows.reshape(shape)
        changed = batch.with_args(checked.row_positions, slice(None), large)
        check_finite(f"for elements of ±{_LARGE:g}", checked.evaluate(changed), changed)


@_rule(
    "one_class",
    "value and gradient must be finite if all rows have one class",
    "guard what may be empty, such as the negatives or a class without rows: put a constant in "
    "its place by `jnp.where`, before the logarithm or the division and not only after",
)
def _one_class(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    if checked.kind != "views":
        targets = checked.kind == "targets"
        changed = batch.with_arg(1, slice(None), 1 if targets else batch.args[1][0])
        what = "if all targets are positive" if targets else "if all rows have one class"
        check_finite(what, checked.evaluate(changed), changed)


@_rule(
    "no_positives",
    "value and gradient must be finite if a row has no other row of its class",
    "let such a row not count: put a constant in place of its inputs by `jnp.where`, before "
    "the logarithm or the division and not only after",
)
def _no_positives(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    alone = batch.with_mask(slice(1, None))
    check_finite("if only the first row counts", checked.evaluate(alone), alone)
    if checked.kind == "labels":
        first = np.unique(batch.args[1], return_index=True)[1]
        changed = batch.with_mask(np.setdiff1d(np.arange(batch.size), first))
        check_finite("if each class has one row", checked.evaluate(changed), changed)
    elif checked.kind == "targets":
        changed = batch.with_arg(1, slice(None), 0)
        check_finite("without a positive target", checked.evaluate(changed), changed)


@_rule(
    "nothing_counts",
    "value and gradient must be 0 if no row counts",
    "give rows of where=False the weight 0 in the sum and in its divisor, and divide by "
    "`jnp.where(total == 0, 1, total)`",
)
def _nothing_counts(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    _all_zero(checked, "with where=False everywhere", batch.with_mask(slice(None)))
    args = tuple(a[:0] if k < 2 else a for k, a in enumerate(batch.args))
    none = Batch(args, batch.where[:0], batch.sample_weights[:0])
    value, gradients = checked.mean(none, none.args)
    _close_to_zero("without rows, the mean", value, none)
    _close_to_zero("without rows, the gradient", gradients, none)


def _all_zero(checked: CheckedLoss, what: str, batch: Batch) -> None:
    result = checked.evaluate(batch, mean=1.0, sum=1.0)
    for reduction in ("mean", "sum"):
        _close_to_zero(f'{what} the "{reduction}"', result.values[reduction], batch)
    _close_to_zero(f"{what} the gradient", result.gradients, batch)


def _close_to_zero(what: str, got: Any, batch: Batch) -> None:
    close(what, got, jax.tree.map(np.zeros_like, got), batch, 0.0, 0.0)


@_rule(
    "masks",
    "a row of where=False must have no effect",
    "leave masked rows out of every sum, mean, maximum and set of references",
)
def _masks(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    masked = batch.with_mask(_some_rows(batch, rng))
    keep = masked.where
    if not keep.any():
        return
    got = checked.evaluate(masked)
    removed = tuple(a[keep] if k < 2 else a for k, a in enumerate(batch.args))
    value, gradients = checked.mean(masked, removed)
    what = "the mean, which differs from the mean without the masked rows,"
    close(what, got.values["mean"], value, masked, 1e-12)
    for k, full, expected in zip(checked.differentiable, got.gradients, gradients, strict=True):
        of_rows, name = k in checked.row_positions, f"the gradient of `{checked.names[k]}`"
        close(name, full[keep] if of_rows else full, expected, masked)
        if of_rows:
            masked_rows = full[~keep]
            close(f"{name} in masked rows", masked_rows, np.zeros_like(masked_rows), masked)


@_rule(
    "padding_leaks",
    "what is in a row of where=False must have no effect, even if it is NaN",
    "replace masked rows before you compute, by `jnp.where(where[:, None], rows, 0)`; "
    "0 times NaN is NaN",
)
def _padding_leaks(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    rows = _some_rows(batch, rng)
    masked = _masked(batch, rows, rng)
    expected = checked.evaluate(masked, mean=1.0, sum=0.3)
    _no_leak(checked, "a masked row", masked, rows, expected)
    weights = masked.sample_weights.copy()
    weights[rows] = np.nan
    cases = [("NaN as the weight of a masked row", masked._replace(sample_weights=weights))]
    if checked.kind == "labels":
        large = masked.with_arg(1, rows, min(_HUGE_LABEL, np.iinfo(batch.args[1].dtype).max))
        cases.append(("a large label of a masked row", large))
    for what, changed in cases:
        _same(checked, what, changed, expected)


def _no_leak(checked: CheckedLoss, where: str, batch: Batch, rows: Any, expected: Result) -> None:
    for poison in (np.nan, np.inf, -np.inf):
        changed = batch.with_args(checked.row_positions, rows, poison)
        _same(checked, f"{poison} in {where}", changed, expected)


def _same(checked: CheckedLoss, what: str, batch: Batch, expected: Result) -> None:
    got = checked.evaluate(batch, mean=1.0, sum=0.3)
    for reduction in ("mean", "sum"):
        a, b = got.values[reduction], expected.values[reduction]
        close(f'with {what} the "{reduction}"', a, b, batch)
    for k, a, b in zip(checked.differentiable, got.gradients, expected.gradients, strict=True):
        close(f"with {what} the gradient of `{checked.names[k]}`", a, b, batch)


@_rule(
    "ignored_labels",
    "a row of a negative label must be treated like a row of where=False",
    "start with `where = where & (labels >= 0)`: as an index, -1 is the last class",
)
def _ignored_labels(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    if not checked.can_ignore:
        return
    rows = _some_rows(batch, rng)
    expected = checked.evaluate(batch.with_mask(rows), mean=1.0, sum=0.3)
    _all_zero(checked, "with negative labels only", batch.with_arg(1, slice(None), -1))
    for label in (-1, -2):
        changed = batch.with_arg(1, rows, label)
        _same(checked, f"the label {label}", changed, expected)
        _no_leak(checked, f"a row with the label {label}", changed, rows, expected)


@_rule(
    "hyperparameters",
    "the gradient of a traced hyperparameter must be finite, and must not depend on rows of "
    "where=False or of a negative label, even if they are NaN",
    "replace such rows before a hyperparameter multiplies or divides them: 0 times NaN is NaN "
    "in its gradient, also where a mask follows",
)
def _hyperparameters(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    rows = _some_rows(batch, rng)
    batch = _with_positives(checked, batch)
    masked = _masked(batch, rows, rng)
    expected = checked.number_gradients(masked)
    for name, gradient in expected.items():
        if not np.isfinite(gradient):
            raise Broken(f"the gradient of `{name}` is {text(gradient)}", masked)
    ignored = masked._replace(where=np.ones(batch.size, bool))
    ignored = ignored.with_arg(1, rows, -1) if checked.can_ignore else None
    for poison in (np.nan, np.inf, -np.inf) if expected else ():
        for where, changed in (("masked", masked), ("negatively labelled", ignored)):
            if changed is None:
                continue
            changed = changed.with_args(checked.row_positions, rows, poison)
            got = checked.number_gradients(changed)
            for name, gradient in expected.items():
                what = f"with {poison} in a {where} row the gradient of `{name}`"
                close(what, got[name], gradient, changed)


@_rule(
    "none",
    'reduction="none" must give a loss for every row, and 0 for a row that does not count',
    "return `jnp.where(counts, sample_weights * losses, 0)`",
)
def _zeros_of_none(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    if checked.terms == "other":
        loss = functools.partial(checked.loss, reduction="none")
        with x64(True):
            shape = jax.eval_shape(functools.partial(_call, loss), *batch).shape
        raise Broken(f'"none" has the shape {shape}, and must have ({batch.size},)', batch)
    if checked.terms != "rows":
        return
    masked = _random_mask(checked, batch, rng).with_mask(_some_rows(batch, rng))
    out = ~masked.where | _ignored(checked, masked.args[1])
    poisoned = masked._replace(sample_weights=np.where(out, np.nan, masked.sample_weights))
    poisoned = poisoned.with_args(checked.row_positions, out, np.nan)
    for changed in (masked, poisoned):
        terms = checked.evaluate(changed).values["none"][out]
        _close_to_zero('"none" of rows that do not count', terms, changed)


@_rule(
    "sums",
    'the losses of reduction="none" must sum to that of "sum", in value and gradient',
    "compute all reductions from the same losses",
)
def _sums(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    if checked.terms is None:
        return
    masked = _random_mask(checked, batch, rng)
    of_sum, of_terms = checked.evaluate(masked, sum=1.0), checked.evaluate(masked, none=1.0)
    total, terms = of_sum.values["sum"], of_sum.values["none"]
    close('the "sum"', total, terms.sum(), masked)
    close('the gradient of the "sum"', of_sum.gradients, of_terms.gradients, masked)


@_rule(
    "weights",
    'with the weights s, "none" must be s_i ℓ_i, and the mean Σ s_i ℓ_i / Σ s_i over the rows '
    "that count",
    "multiply the loss of each row by its weight, and divide the mean by the sum of the "
    "weights, not by the number of rows or `jnp.maximum(total, 1)`",
)
def _weights(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    if checked.terms != "rows":
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
    light = weighted._replace(sample_weights=1e-3 * weights)
    got = checked.evaluate(light)
    close("the mean of small weights", got.values["mean"], result.values["mean"], light)
    close("the gradient of small weights", got.gradients, result.gradients, light)


@_rule(
    "hidden_nan",
    "NaN in a row that counts must give NaN",
    "leave out `jnp.nan_to_num`, and write comparisons so that NaN does not become a 0",
)
def _hidden_nan(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    """Where the gradient is largest, a row counts, and its element matters."""
    gradient = checked.evaluate(batch).gradients[0]
    if not gradient.any():
        return
    place = [int(k) for k in np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)]
    changed = batch.with_arg(0, tuple(place), np.nan)
    for reduction in ("mean", "sum"):
        result = checked.evaluate(changed, **{reduction: 1.0})
        if not np.isnan(result.values[reduction]):
            found = f'with NaN at {place} the "{reduction}" is {result.values[reduction]}'
            raise Broken(found, changed)
        if not np.isnan(result.gradients[0]).any():
            raise Broken(f'the gradient of the "{reduction}" is finite', changed)
    terms = result.values.get("none", np.array(np.nan))
    if not np.isnan(terms).any():
        raise Broken(f'with NaN at {place} "none" is {text(terms)}', changed)


@_rule(
    "gradient",
    "the gradient must equal finite differences",
    "correct the custom gradient; if the loss has a `jax.lax.stop_gradient` on purpose, give a "
    "`reference` in PyTorch, whose gradients are compared instead",
)
def _gradient(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    if _torch_reference(checked, batch) is not None:
        return  # Its gradients are compared.
    masked = _random_mask(checked, batch, rng)
    for k in checked.differentiable:
        _slopes(checked, masked, rng, k)


def _slopes(checked: CheckedLoss, batch: Batch, rng: np.random.Generator, k: int) -> None:
    """Raises unless the gradient of argument k equals central differences along directions."""
    for reduction in checked.reductions:
        factor = 1.0
        if reduction == "none":
            factor = rng.normal(size=checked.factors(batch, {})["none"].shape)
        result = checked.evaluate(batch, **{reduction: factor})
        gradient = result.gradients[checked.differentiable.index(k)]
        for _ in range(2):
            direction, step, values = rng.normal(size=gradient.shape), 1e-6, []
            for sign in (1, -1):
                moved = batch.with_arg(k, ..., batch.args[k] + sign * step * direction)
                values.append(np.sum(factor * checked.evaluate(moved).values[reduction]))
            expected = (values[0] - values[1]) / (2 * step)
            what = f'the slope of the "{reduction}" along a direction of `{checked.names[k]}`'
            # Rounding of the values gives about 1e-10 of them.
            atol = 1e-6 * max(1.0, *map(abs, values))
            close(what, np.sum(gradient * direction), expected, batch, 1e-5, atol)


@_rule(
    "reference",
    "the mean and its gradient must equal those of the reference",
    "compare the formulas, signs and constants of the two",
)
def _reference(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    if checked.reference is None:
        return
    result = checked.evaluate(batch)
    by_torch = _torch_reference(checked, batch)
    value = checked.reference(*batch.args) if by_torch is None else by_torch[0]
    value = np.asarray(value, np.float64)
    close("the mean", result.values["mean"], value, batch, 1e-6, 1e-8)
    if by_torch is None:
        return
    for k, got, expected in zip(checked.differentiable, result.gradients, by_torch[1], strict=True):
        close(f"the gradient of `{checked.names[k]}`", got, expected, batch, 1e-6, 1e-8)


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
    arrays = [
        np.zeros(leaf.shape) if gradient is None else gradient.numpy()
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
    return value.detach().numpy(), tuple(arrays)


@_rule(
    "second_derivatives",
    "`jax.grad` and `jax.jvp` of the gradient must equal finite differences of it",
    "write the backward pass of a custom gradient in functions that JAX can differentiate, "
    "of arrays that are its residuals",
)
def _second_derivatives(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    masked = _random_mask(checked, batch, rng)._replace(sample_weights=np.ones(batch.size))
    smooth = checked.differentiable
    if _torch_reference(checked, batch) is not None:
        smooth = _smooth(checked, masked, rng)
    values = checked.values_of(masked.args)
    # Along an argument of a stop-gradient, finite differences are other numbers.
    direction = [
        rng.normal(size=value.shape) * (k in smooth)
        for k, value in zip(checked.differentiable, values, strict=True)
    ]
    forward, backward = checked.second_derivatives(masked, direction)
    # Four points: with two, the error would be above 1e-8 where a loss has a scale of 50 or more.
    step, moved = 1e-5, []
    for steps in (1, -1, 2, -2):
        shifted = [v + steps * step * d for v, d in zip(values, direction, strict=True)]
        args = tuple(checked.merge(masked.args, shifted))
        moved.append(checked.evaluate(masked._replace(args=args)).gradients)
    expected = jax.tree.map(lambda a, b, c, d: (8 * (a - b) - (c - d)) / (12 * step), *moved)
    # Rounding of the gradients gives about 1e-10 of the largest numbers.
    atol = 1e-8 * max(1.0, magnitude(expected))
    of = zip(checked.differentiable, forward, backward, expected, strict=True)
    for k, by_jvp, by_grad, product in of:
        what = f"the Hessian times a direction, at `{checked.names[k]}` and by"
        close(f"{what} `jax.jvp`,", by_jvp, product, masked, 1e-6, atol)
        if k in smooth:
            close(f"{what} `jax.grad`,", by_grad, product, masked, 1e-6, atol)


def _smooth(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> tuple[int, ...]:
    """The arguments whose gradient equals finite differences, as there is no stop-gradient."""

    def equal(k):
        try:
            _slopes(checked, batch, rng, k)
        except Broken:
            return False
        return True

    return tuple(filter(equal, checked.differentiable))


@_rule(
    "vmap",
    "`jax.vmap` and `jax.checkpoint` must not change value and gradient",
    "use operations that `jax.vmap` can batch, and no side effects",
)
def _vmap(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    others = [batch, checked.batch(rng, batch.size), checked.batch(rng, batch.size)]
    batches = [
        _random_mask(checked, other, rng)._replace(sample_weights=np.ones(batch.size))
        for other in others
    ]
    values, gradients = checked.mean_of_stack(batches)
    for k, one in enumerate(batches):
        expected = checked.evaluate(one)
        close("the mean", values[k], expected.values["mean"], one)
        close("the gradient", tuple(g[k] for g in gradients), expected.gradients, one)


@_rule(
    "half_precision",
    "float32, bfloat16 and float16 inputs must give float32, computed in float32",
    "start with `x.astype(jnp.promote_types(x.dtype, jnp.float32))`",
    "dtypes",
)
def _half_precision(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    batch = _random_mask(checked, batch, rng)
    for dtype in (np.float32, jnp.bfloat16, np.float16):
        name = jnp.dtype(dtype).name
        args = tuple(
            a.astype(dtype).astype(np.float64) if k in checked.differentiable else a
            for k, a in enumerate(batch.args)
        )
        weights = batch.sample_weights.astype(np.float32)
        rounded = batch._replace(args=args, sample_weights=weights.astype(np.float64))
        value, gradients = checked.mean(
            rounded, args, dtype, where=batch.where, sample_weights=weights
        )
        if value.dtype != np.float32:
            raise Broken(f"for {name} inputs the mean has dtype {value.dtype}", rounded)
        expected = checked.evaluate(rounded)
        wide = value.astype(np.float64)
        # Roundings of float32, which a scale, an exponent or a projection may enlarge.
        single = float(jnp.finfo(np.float32).eps)
        rtol, atol = 200 * single, 100 * single
        mean = expected.values["mean"]
        close(f"for {name} inputs the mean", wide, mean, rounded, rtol, atol)
        # A gradient is also rounded to the dtype of its array, once on each of a few paths.
        eps = max(4 * float(jnp.finfo(dtype).eps), 800 * single)
        for k, got, full in zip(checked.differentiable, gradients, expected.gradients, strict=True):
            what = f"for {name} inputs the gradient of `{checked.names[k]}`"
            close(
                what, got.astype(np.float64), full, rounded, 0.0, eps * max(magnitude(full), 1e-2)
            )


def _uneven(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> Batch:
    """All rows of the first device count, one of the next, none, and all but one."""
    size = num_devices()
    where = np.zeros((size, batch.size // size), bool)
    where[0], where[1, -1:] = True, True
    where[3:, 1:] = True
    batch = _masked(batch, ~where.reshape(-1), rng)
    return batch.with_arg(1, [-1], -1) if checked.can_ignore else batch


@_rule(
    "devices",
    "with `axis_name`, every device must return the value of the global batch",
    "add numerators and denominators up by `jax.lax.psum` before you divide, and compare with "
    "the rows of all devices; find a row's own index among them with `jax.lax.axis_index`",
    "devices",
)
def _device_values(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    batch = _uneven(checked, batch, rng)
    expected = checked.evaluate(batch, mean=1.0, sum=0.3).values
    for device, result in enumerate(checked.on_devices(batch, False, mean=1.0, sum=0.3)):
        for reduction, value in result.values.items():
            what = f'on device {device} of {num_devices()} the "{reduction}"'
            close(what, value, expected[reduction], batch)


@_rule(
    "device_gradients",
    "the mean of the gradients over the devices must equal the gradient on one device",
    "reduce inside of the loss, by `jax.lax.psum`, and let gradients flow through "
    "`jax.lax.all_gather`",
    "devices",
)
def _device_gradients(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    batch = _uneven(checked, batch, rng)
    for reduction in ("mean", "sum"):
        expected = checked.evaluate(batch, **{reduction: 1.0}).gradients
        factors = {"mean": 0.0, "sum": 0.0, reduction: 1.0}
        got = checked.on_devices(batch, False, **factors)[0].gradients
        for k, a, b in zip(checked.differentiable, got, expected, strict=True):
            close(f'the gradient of the "{reduction}" for `{checked.names[k]}`', a, b, batch)
    single = checked.number_gradients(batch)
    for name, gradient in checked.number_gradients(batch, devices=True).items():
        close(f"the gradient of `{name}`", gradient, single[name], batch)


@_rule(
    "check_vma",
    "under `jax.shard_map` with check_vma=True, value and gradient must be the same",
    "reduce by `jax.lax.psum`, after which JAX knows that all devices have the same value",
    "devices",
)
def _check_vma(checked: CheckedLoss, batch: Batch, rng: np.random.Generator) -> None:
    batch = _uneven(checked, batch, rng)
    expected = checked.evaluate(batch, mean=1.0, sum=0.3)
    (got,) = checked.on_devices(batch, True, mean=1.0, sum=0.3)
    for reduction, value in got.values.items():
        close(f'the "{reduction}"', value, expected.values[reduction], batch)
    close("the gradient", got.gradients, expected.gradients, batch)
