"""`check_loss` finds planted faults, and names the rule.

`make quick` leaves out the faults, which test `check_loss` itself. `test_contract` and
`test_devices` check its rules for every loss of the library.
"""

import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call

from jaxloss import testing
from jaxloss.testing import ContractError, check_loss
from jaxloss.testing.checked_loss import REDUCTIONS

CLASSES = 3


def rows_and_labels(rng, n):
    return rng.normal(size=(n, CLASSES)), rng.integers(0, CLASSES, n)


@pytest.fixture(autouse=True)
def strict_promotion():
    """Dtypes and ranks are promoted as users have it."""


# A loss that keeps the contract, in parts. A fault replaces one of them. ----


def valid_rows(labels, where):
    valid = labels >= 0
    return valid if where is None else valid & where


def widen(rows):
    return rows.astype(jnp.promote_types(rows.dtype, jnp.float32))


def without_invalid(rows, valid):
    return jnp.where(valid[:, None], rows, 0)


def sum_over(x, axis_name):
    return x if axis_name is None else lax.psum(x, axis_name)


def reduce_rows(losses, counts, weights, reduction, axis_name, *, total=sum_over):
    weights = jnp.ones_like(losses) if weights is None else weights.astype(losses.dtype)
    weights = jnp.where(counts, weights, 0)
    terms = weights * jnp.where(counts, losses, 0)
    if reduction == "none":
        return terms
    numerator, denominator = total(terms.sum(), axis_name), total(weights.sum(), axis_name)
    if reduction == "sum":
        return numerator
    return numerator / jnp.where(denominator == 0, 1, denominator)


def cross_entropies(
    logits,
    labels,
    valid,
    axis_name,
    *,
    log_sum_exp=jax.nn.logsumexp,
    index=lambda labels, valid: jnp.where(valid, labels, 0),
):
    targets = jnp.take_along_axis(logits, index(labels, valid)[:, None], axis=1)[:, 0]
    return log_sum_exp(logits, axis=1) - targets, valid


def distance(squared):
    apart = squared != 0
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, squared, 1)), 0)


def gather(rows, axis_name):
    return rows if axis_name is None else lax.all_gather(rows, axis_name, tiled=True)


def pairs(
    features,
    labels,
    valid,
    axis_name,
    *,
    root=distance,
    gather_rows=gather,
    usable_rows=lambda valid: valid,
    defined=lambda valid, positives: valid & positives.any(axis=1),
    candidates=lambda usable, positives: usable,
):
    """Softmax of negative distances: the log-probability of the positives."""
    n = len(labels)
    others, their_labels = gather_rows(features, axis_name), gather(labels, axis_name)
    squared = jnp.sum((features[:, None, :] - others[None, :, :]) ** 2, axis=2)
    first = 0 if axis_name is None else lax.axis_index(axis_name) * n
    usable = gather(usable_rows(valid), axis_name)[None, :]
    usable = usable & (first + jnp.arange(n)[:, None] != jnp.arange(len(others))[None, :])
    positives = usable & (labels[:, None] == their_labels[None, :])
    counts = defined(valid, positives)
    scores = -root(squared)

    def log_sum(mask):
        mask = mask | ~counts[:, None]
        return jax.nn.logsumexp(jnp.where(mask, scores, -jnp.inf), axis=1)

    return log_sum(candidates(usable, positives)) - log_sum(positives), counts


def own(
    values=cross_entropies,
    valid=valid_rows,
    prepare=without_invalid,
    widen=widen,
    reduce=reduce_rows,
):
    def own_loss(
        rows, labels, *, where=None, sample_weights=None, reduction="mean", axis_name=None
    ):
        counts = valid(labels, where)
        rows = prepare(widen(rows), counts)
        losses, counts = values(rows, labels, counts, axis_name)
        return reduce(losses, counts, sample_weights, reduction, axis_name)

    return own_loss


# Faults ----


def without_keywords(logits, labels, *, where=None, reduction="mean"):
    return own()(logits, labels, where=where, reduction=reduction)


def only_on_values(labels, where):
    if where is not None and not where.any():
        return jnp.zeros(len(labels), bool)
    return valid_rows(labels, where)


def only_mask(labels, where):
    return jnp.ones(len(labels), bool) if where is None else where


def when(kind, fault):
    """The usual reduction, but for `reduction=kind` this faulty one."""

    def reduce(losses, counts, weights, reduction, axis_name):
        function = fault if reduction == kind else reduce_rows
        return function(losses, counts, weights, reduction, axis_name)

    return reduce


def mean_by(denominator):
    """A reduction whose mean has another denominator, of the counts and the weights."""

    def mean(losses, counts, weights, _, axis_name):
        total = reduce_rows(losses, counts, weights, "sum", axis_name)
        weights = jnp.ones_like(losses) if weights is None else weights
        return total / denominator(counts, jnp.where(counts, weights, 0))

    return when("mean", mean)


def times_all_weights(losses, counts, weights, *_):
    """0 times a weight of NaN is NaN."""
    return (1 if weights is None else weights) * jnp.where(counts, losses, 0)


def mean_of_means(losses, counts, weights, reduction, axis_name):
    mean = reduce_rows(losses, counts, weights, reduction, None)
    return mean if axis_name is None else lax.pmean(mean, axis_name)


def sum_of_gathered(x, axis_name):
    return x if axis_name is None else lax.all_gather(x, axis_name).sum()


def gathered_without_gradient(rows, axis_name):
    return rows if axis_name is None else lax.stop_gradient(gather(rows, axis_name))


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def square(forward, reverse):
    """A square whose second derivative is one number by forward mode, and one by reverse mode."""

    @jax.custom_jvp
    def twice(x):
        return 2 * x

    @twice.defjvp
    def _(primals, tangents):
        of = (lambda _, x: forward * x), (lambda _, g: reverse * g)
        return twice(*primals), linear_call(*of, (), *tangents)

    @jax.custom_vjp
    def squared(x):
        return x**2

    squared.defvjp(lambda x: (x**2, x), lambda x, g: (g * twice(x),))
    return squared


@jax.custom_vjp
def with_gradient_of_all_rows(rows, valid):
    """The gradient of a mean over all rows, masked ones included."""
    return without_invalid(rows, valid)


with_gradient_of_all_rows.defvjp(
    lambda rows, valid: (without_invalid(rows, valid), valid),
    lambda valid, g: (without_invalid(g, valid) * valid.mean(dtype=g.dtype), None),
)


def hides_nan_in(kind):
    """A reduction that hides NaN, of this kind alone."""
    return own(reduce=when(kind, lambda losses, *rest: reduce_rows(jnp.nan_to_num(losses), *rest)))


def through(function):
    def values(logits, labels, valid, axis_name):
        losses, valid = cross_entropies(logits, labels, valid, axis_name)
        return function(losses), valid

    return values


def without_batching(logits, labels, valid, axis_name):
    shape = jax.ShapeDtypeStruct(labels.shape, labels.dtype)
    labels = jax.pure_callback(lambda x: np.asarray(x), shape, labels)
    return cross_entropies(logits, labels, valid, axis_name)


def over_norm(rows, valid):
    rows = without_invalid(rows, valid)
    return rows / jnp.where(valid[:, None], jnp.linalg.norm(rows, axis=1, keepdims=True), 1)


def root_of_apart(squared):
    """The distance of a row from itself has a root of 1."""
    itself = jnp.eye(*squared.shape, dtype=squared.dtype)
    return jnp.where(squared != 0, jnp.sqrt(squared + itself), 0)


def binary_entropies(logits, targets, valid, axis_name):
    """An unknown class is as a negative one."""
    signs = jnp.where(targets > 0, -1.0, 1.0).astype(logits.dtype)
    return jax.nn.softplus(signs * logits).sum(axis=1), valid


def of_unit_weights(rows, labels, weights, **common):
    return own()(rows @ (weights / jnp.linalg.norm(weights, axis=0)), labels, **common)


def of_scaled_rows(rows, labels, *, scale=2.0, before=without_invalid, **common):
    """`before` gets the rows before they are scaled."""
    valid = valid_rows(labels, common.get("where"))
    scaled = jnp.asarray(scale, rows.dtype) * before(rows, valid)
    return own()(scaled, labels, **common)


def of_a_scale_that_devices_stop(rows, labels, *, scale=2.0, axis_name=None, **common):
    scale = scale if axis_name is None else lax.stop_gradient(scale)
    return of_scaled_rows(rows, labels, scale=scale, axis_name=axis_name, **common)


def of_a_scale_of_ignored_rows(rows, labels, *, scale=2.0, where=None, **common):
    rows = without_invalid(rows, only_mask(labels, where))
    common |= {"scale": scale, "where": where, "before": lambda rows, valid: rows}
    return of_scaled_rows(rows, labels, **common)


def of_numbers_that_cannot_be_traced(rows, labels, *, smoothing=0.0, power=2, **common):
    if smoothing:
        raise NotImplementedError
    return own()(rows**power, labels, **common)


def rows_and_targets(rng, n):
    return rng.normal(size=(n, CLASSES)), rng.integers(-1, 2, (n, CLASSES))


def rows_labels_and_weights(rng, n):
    return rng.normal(size=(n, 2)), rng.integers(0, CLASSES, n), rng.normal(size=(2, CLASSES))


INPUTS = {"unknown targets": rows_and_targets, "norm of zero weights": rows_labels_and_weights}
"""By the name of the fault, where they are no `rows_and_labels`."""
FAULTS = {
    "keywords": {"keywords": without_keywords},
    "jit": {"if on values": own(valid=only_on_values)},
    "float64": {
        "computed in float32": own(widen=lambda rows: rows.astype(jnp.float32)),
        "float32 inside": own(
            widen=lambda rows: rows.astype(jnp.float32),
            reduce=lambda *args: reduce_rows(*args).astype(jnp.float64),
        ),
    },
    "finite": {"root of 0": own(partial(pairs, root=jnp.sqrt))},
    "duplicates": {"double where missing": own(partial(pairs, root=root_of_apart))},
    "zeros": {"norm of 0": own(prepare=over_norm), "norm of zero weights": of_unit_weights},
    "large_values": {
        "unshifted log-sum-exp": own(
            partial(cross_entropies, log_sum_exp=lambda x, axis: jnp.log(jnp.exp(x).sum(axis)))
        )
    },
    "one_class": {
        "no candidates": own(
            partial(pairs, candidates=lambda usable, positives: usable & ~positives)
        )
    },
    "no_positives": {
        "NaN without positives": own(partial(pairs, defined=lambda valid, positives: valid))
    },
    "nothing_counts": {"0 / 0": own(reduce=mean_by(lambda _, weights: weights.sum()))},
    "no_rows": {
        "maximum of no rows": own(
            prepare=lambda rows, valid: without_invalid(rows - rows.max(), valid)
        )
    },
    "masks": {
        "pairs with padding": own(partial(pairs, usable_rows=jnp.ones_like)),
        "gradient of all rows": own(prepare=with_gradient_of_all_rows),
    },
    "padding_leaks": {
        "0 times NaN": own(prepare=lambda rows, valid: rows * valid[:, None].astype(rows.dtype)),
        "mask of the losses alone": own(prepare=lambda rows, valid: rows),
        "mask by isnan": own(  # Infinite rows of padding stay.
            prepare=lambda rows, valid: jnp.where(valid[:, None] | ~jnp.isnan(rows), rows, 0)
        ),
        "0 times a weight of NaN": own(
            reduce=when("sum", lambda *args: times_all_weights(*args).sum())
        ),
    },
    "ignored_labels": {
        "negative label": own(
            partial(cross_entropies, index=lambda labels, valid: labels), valid=only_mask
        ),
        "unknown targets": own(binary_entropies, valid=only_mask),
        "only the label -1": own(
            valid=lambda labels, where: only_mask(labels, where) & (labels != -1)
        ),
    },
    "hyperparameters": {
        "scale of padding": partial(of_scaled_rows, before=lambda rows, valid: rows),
        "scale of ignored rows": of_a_scale_of_ignored_rows,
    },
    "none": {
        "none not zeroed": own(
            reduce=when("none", lambda losses, _, weights, *others: losses * weights)
        ),
        "none of a weight of NaN": own(reduce=when("none", times_all_weights)),
        "a scalar as none": own(reduce=when("none", lambda x, counts, weights, _, axis: x.sum())),
    },
    "sums": {
        "unweighted sum": own(
            reduce=when("sum", lambda x, counts, _, *others: reduce_rows(x, counts, None, *others))
        )
    },
    "weights": {
        "weights not in the denominator": own(reduce=mean_by(lambda counts, _: counts.sum())),
        "denominator of at least 1": own(reduce=mean_by(lambda _, x: jnp.maximum(x.sum(), 1))),
    },
    "hidden_nan": {**{f"nan_to_num in the {kind}": hides_nan_in(kind) for kind in REDUCTIONS}},
    "gradient": {"wrong custom gradient": own(through(doubled_gradient))},
    "second_derivatives": {
        "custom gradient of first order": own(through(square(0, 0))),
        "wrong forward mode": own(through(square(3, 2))),
        "wrong reverse mode": own(through(square(2, 3))),
    },
    "vmap": {"without batching": own(without_batching)},
    "half_precision": {
        "float16 accumulation": own(
            widen=lambda rows: rows, reduce=lambda *args: widen(reduce_rows(*args))
        ),
        "float16 result": own(widen=lambda rows: rows),
    },
    "devices": {"mean of means": own(reduce=when("mean", mean_of_means))},
    "device_gradients": {
        "gathered without gradient": own(partial(pairs, gather_rows=gathered_without_gradient)),
        "scale without gradient": of_a_scale_that_devices_stop,
    },
    "check_vma": {"sum that varies": own(reduce=partial(reduce_rows, total=sum_of_gathered))},
}
"""By the rule that finds them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule, faults in FAULTS.items() for name in faults]
)
def test_planted_faults(rule, name, monkeypatch):
    loss = FAULTS[rule][name]
    (part,) = {r.part for r in testing.RULES if r.name == rule}
    # By its own rule, and in one smaller batch: others would compile further programs.
    monkeypatch.setattr(testing, "RULES", [r for r in testing.RULES if r.name in ("jit", rule)])
    monkeypatch.setattr(testing, "_SMALL", (4,))
    with pytest.raises(ContractError) as caught:
        check_loss(loss, INPUTS.get(name, rows_and_labels), devices=part == "devices")
    error = caught.value
    assert error.rule == rule, error
    text = str(error)
    assert f'"{rule}"' in text
    assert "What to do: " in text
    if rule != "keywords":
        assert f"Smallest input found, n = {len(error.inputs['labels'])}:\n  rows = [" in text


@pytest.mark.slow
def test_the_smallest_input_is_found():
    """A pair needs a second row of the class, and the fault a mask."""
    loss = FAULTS["masks"]["pairs with padding"]
    with pytest.raises(ContractError) as caught:
        check_loss(loss, rows_and_labels, devices=False, dtypes=False)
    inputs = caught.value.inputs
    assert list(inputs) == ["rows", "labels", "where"]
    assert len(set(inputs["labels"])) < len(inputs["labels"]) <= 3
    assert 0 < inputs["where"].sum() < len(inputs["where"])
    assert "rows = [[" in str(caught.value)


def by_numpy(logits, labels):
    """Of another temperature."""
    return np.mean(np.log(np.exp(2 * logits).sum(1)) - 2 * logits[np.arange(len(labels)), labels])


def by_torch(logits, labels):
    """With a stop-gradient."""
    torch = pytest.importorskip("torch")
    values = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (values.detach() * values).mean()


def squared(logits, labels, valid, axis_name, stop=lambda x: x):
    losses, valid = cross_entropies(logits, labels, valid, axis_name)
    return stop(losses) * losses, valid


@pytest.mark.slow
def test_references():
    """A stop-gradient needs one in PyTorch."""
    check = partial(check_loss, make_inputs=rows_and_labels, devices=False, dtypes=False)
    stopped = own(partial(squared, stop=lax.stop_gradient))
    check(stopped, reference=by_torch)
    for rule, loss, reference in (
        ("reference", own(), by_numpy),
        ("reference", own(squared), by_torch),
        ("gradient", stopped, None),
    ):
        with pytest.raises(ContractError) as caught:
            check(loss, reference=reference)
        assert caught.value.rule == rule


OF_NUMBERS = ("jit", "hyperparameters", "device_gradients")


def between_views(first, second, valid, axis_name):
    return jnp.sum((first - without_invalid(widen(second), valid)) ** 2, axis=1), valid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "inputs", "rules"),
    [
        (own(pairs), rows_and_labels, ()),
        (own(between_views, valid=only_mask), lambda rng, n: tuple(rng.normal(size=(2, n, 3))), ()),
        # With hyperparameters, also one that cannot be traced.
        (of_scaled_rows, rows_and_labels, OF_NUMBERS),
        (of_numbers_that_cannot_be_traced, rows_and_labels, OF_NUMBERS),
    ],
    ids=["pairs", "views", "scale", "numbers"],
)
def test_a_right_loss_passes(loss, inputs, rules, monkeypatch):
    only = [rule for rule in testing.RULES if not rules or rule.name in rules]
    monkeypatch.setattr(testing, "RULES", only)
    check_loss(loss, inputs)


def test_inputs_are_checked():
    for inputs in (
        lambda rng, n: (np.ones((n, 2)),),
        lambda rng, n: (np.ones((n, 2)), np.zeros(n + 1, int)),
        lambda rng, n: (np.ones((n, 2), int), np.zeros(n, int)),
        lambda rng, n: (np.ones((n, 2)), np.arange(n) << 32),
        lambda rng, n: (np.ones((n, 2)), np.full(n, 2**32, np.uint64)),
        lambda rng, n: (np.ones((n, 2)), np.array(["a"] * n)),
        lambda rng, n: (np.ma.ones((n, 2)), np.zeros(n, int)),
    ):
        with pytest.raises(ValueError, match="make_inputs"):
            check_loss(own(), inputs)


def test_an_error_of_the_loss_is_its_cause():
    def loss(rows, labels, *, where=None, sample_weights=None, reduction="mean", axis_name=None):
        raise KeyError("a bug")

    with pytest.raises(ContractError, match="the loss raised KeyError") as caught:
        check_loss(loss, rows_and_labels)
    assert isinstance(caught.value.__cause__, KeyError)


def test_chex_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "chex", None)
    with pytest.raises(ImportError, match="pip install chex"):
        check_loss(own(), rows_and_labels)


def test_one_device_warns(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with (
        pytest.warns(UserWarning, match="jax_num_cpu_devices"),
        pytest.raises(ContractError, match="does not take"),
    ):
        check_loss(without_keywords, rows_and_labels)


def test_rules_are_documented():
    """In the order in which they are checked."""
    documented = re.findall(r"^ *\* `(\w+)`: ", check_loss.__doc__ or "", flags=re.MULTILINE)
    assert documented == [rule.name for rule in testing.RULES]
    assert {*FAULTS} == {*documented} - {"reference"}
