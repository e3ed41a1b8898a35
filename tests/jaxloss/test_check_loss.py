"""`check_loss` finds planted faults, names the rule, and passes every loss of the library.

`make quick` leaves out the faults, which test `check_loss` itself, and `make test` the losses of
the library, which have the same properties in `test_contract`.
"""

import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxloss
from jaxloss import testing
from jaxloss.testing import ContractError, check_loss
from tests.jaxloss.harness import over, unchecked
from tests.jaxloss.loss_table import LOSSES, ONE_OF_A_KIND

CLASSES = 3


def rows_and_labels(rng, n):
    return rng.normal(size=(n, CLASSES)), rng.integers(0, CLASSES, n)


@pytest.mark.slow
@pytest.mark.long
@over(LOSSES)
def test_losses_of_the_library_keep_the_contract(row):
    """`test_contract` has half precision, and `test_devices` devices, for all of them."""

    def make_inputs(rng, n):
        rows, labels, *shared = row.make_inputs(rng, n, np.float64)
        return rows, labels[:n], *shared  # A second view may have more rows.

    with unchecked():  # The annotations of a loss may leave out "none".
        check_loss(
            partial(row.function, **row.kwargs),
            make_inputs,
            # In PyTorch, it has the gradients of a loss with a stop-gradient.
            reference=row.torch_reference if row.constant else None,
            devices=row in ONE_OF_A_KIND,
            dtypes=row in ONE_OF_A_KIND,
        )


@pytest.fixture
def usual_promotion():
    """Of dtypes and ranks, as users have it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


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


def cross_entropies(logits, labels, valid, axis_name, *, log_sum_exp=jax.nn.logsumexp):
    labels = jnp.where(valid, labels, 0)
    targets = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return log_sum_exp(logits, axis=1) - targets, valid


def distance(squared):
    apart = squared != 0
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, squared, 1)), 0)


def gather(rows, axis_name):
    return rows if axis_name is None else lax.all_gather(rows, axis_name, tiled=True)


def first_row(n, axis_name):
    return 0 if axis_name is None else lax.axis_index(axis_name) * n


def pairs(
    features,
    labels,
    valid,
    axis_name,
    *,
    root=distance,
    gather_rows=gather,
    defined=lambda valid, positives: valid & positives.any(axis=1),
):
    """Softmax of negative distances: the log-probability of the positives."""
    n = len(labels)
    others, their_labels = gather_rows(features, axis_name), gather(labels, axis_name)
    squared = jnp.sum((features[:, None, :] - others[None, :, :]) ** 2, axis=2)
    position = jnp.arange(n) + first_row(n, axis_name)
    usable = gather(valid, axis_name)[None, :]
    usable = usable & (position[:, None] != jnp.arange(len(others))[None, :])
    positives = usable & (labels[:, None] == their_labels[None, :])
    counts = defined(valid, positives)
    scores = -root(squared)

    def log_sum(mask):
        mask = mask | ~counts[:, None]
        return jax.nn.logsumexp(jnp.where(mask, scores, -jnp.inf), axis=1)

    return log_sum(usable) - log_sum(positives), counts


def distances_to_means(
    features, labels, valid, axis_name, *, members=lambda one_hot, valid: one_hot
):
    """Squared distances of the rows to the mean of their class in the global batch."""
    one_hot = (labels[:, None] == jnp.arange(CLASSES)[None, :]).astype(features.dtype)
    rows = members(one_hot * valid[:, None].astype(features.dtype), one_hot)
    sums, sizes = sum_over(rows.T @ features, axis_name), sum_over(rows.sum(axis=0), axis_name)
    means = sums / jnp.where(sizes == 0, 1, sizes)[:, None]
    return jnp.sum((features - one_hot @ means) ** 2, axis=1), valid


def views_and_views(rng, n):
    return rng.normal(size=(n, 3)), rng.normal(size=(n, 3))


def view_loss(first, second, *, where=None, sample_weights=None, reduction="mean", axis_name=None):
    valid = jnp.ones(len(first), bool) if where is None else where
    first, second = (without_invalid(widen(rows), valid) for rows in (first, second))
    losses = jnp.sum((first - second) ** 2, axis=1)
    return reduce_rows(losses, valid, sample_weights, reduction, axis_name)


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


@pytest.mark.slow
@pytest.mark.parametrize("values", [cross_entropies, pairs, distances_to_means])
@pytest.mark.usefixtures("usual_promotion")
def test_a_right_loss_passes(values):
    check_loss(own(values), rows_and_labels)


# Faults ----


def without_keywords(logits, labels, *, where=None, reduction="mean"):
    return own()(logits, labels, where=where, reduction=reduction)


def only_on_values(labels, where):
    if where is not None and not where.any():
        return jnp.zeros(len(labels), bool)
    return valid_rows(labels, where)


def wrapped_labels(logits, labels, valid, axis_name):
    targets = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - targets, valid


def only_mask(labels, where):
    return jnp.ones(len(labels), bool) if where is None else where


def mean_by(denominator):
    """A reduction whose mean has another denominator, of the counts and the weights."""

    def reduce(losses, counts, weights, reduction, axis_name):
        total = reduce_rows(losses, counts, weights, "sum", axis_name)
        if reduction != "mean":
            return reduce_rows(losses, counts, weights, reduction, axis_name)
        weights = jnp.ones_like(losses) if weights is None else weights.astype(losses.dtype)
        below = denominator(counts, jnp.where(counts, weights, 0), losses.dtype)
        return total / below

    return reduce


def number_of_rows(counts, weights, dtype):
    return jnp.maximum(counts.sum(), 1).astype(dtype)


def at_least_one(counts, weights, dtype):
    return jnp.maximum(weights.sum(), 1)


def none_not_zeroed(losses, counts, weights, reduction, axis_name):
    if reduction == "none":
        return losses if weights is None else losses * weights.astype(losses.dtype)
    return reduce_rows(losses, counts, weights, reduction, axis_name)


def sum_for_none(losses, counts, weights, reduction, axis_name):
    reduction = "sum" if reduction == "none" else reduction
    return reduce_rows(losses, counts, weights, reduction, axis_name)


def unweighted_sum(losses, counts, weights, reduction, axis_name):
    weights = None if reduction == "sum" else weights
    return reduce_rows(losses, counts, weights, reduction, axis_name)


def without_nan(losses, *others):
    return reduce_rows(jnp.nan_to_num(losses), *others)


def widened_too_late(losses, *others):
    return widen(reduce_rows(losses, *others))


def mean_of_means(losses, counts, weights, reduction, axis_name):
    if reduction != "mean":
        return reduce_rows(losses, counts, weights, reduction, axis_name)
    mean = reduce_rows(losses, counts, weights, "mean", None)
    return mean if axis_name is None else lax.pmean(mean, axis_name)


def sum_of_gathered(x, axis_name):
    return x if axis_name is None else lax.all_gather(x, axis_name).sum()


def gathered_without_gradient(rows, axis_name):
    return rows if axis_name is None else lax.stop_gradient(gather(rows, axis_name))


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


@jax.custom_vjp
def square_once(x):
    return x**2


square_once.defvjp(lambda x: (x**2, x), lambda x, g: (g * lax.stop_gradient(2 * x),))


def through(function):
    def values(logits, labels, valid, axis_name):
        losses, valid = cross_entropies(logits, labels, valid, axis_name)
        return function(losses), valid

    return values


def without_batching(logits, labels, valid, axis_name):
    shape = jax.ShapeDtypeStruct(labels.shape, labels.dtype)
    labels = jax.pure_callback(lambda x: np.asarray(x), shape, labels)
    return cross_entropies(logits, labels, valid, axis_name)


def unshifted(logits, axis):
    return jnp.log(jnp.sum(jnp.exp(logits), axis=axis))


def over_norm(rows, valid):
    rows = without_invalid(rows, valid)
    return rows / jnp.where(valid[:, None], jnp.linalg.norm(rows, axis=1, keepdims=True), 1)


def root_of_apart(squared):
    """The distance of a row from itself has a root of 1."""
    itself = jnp.eye(*squared.shape, dtype=squared.dtype)
    return jnp.where(squared != 0, jnp.sqrt(squared + itself), 0)


def mean_of_others(logits, labels, valid, axis_name):
    """The log-odds against the classes of the other rows: nothing is left with one class."""
    _, valid = cross_entropies(logits, labels, valid, axis_name)
    others = valid[None, :] & (labels[:, None] != labels[None, :])
    number = others.sum(axis=1).astype(logits.dtype)
    total = jnp.sum(jnp.where(others[:, :, None], logits[None, :, :], 0), axis=1)
    losses = jnp.sum((logits - total / number[:, None]) ** 2, axis=1)
    return losses, valid


def binary_entropies(logits, targets, valid, axis_name):
    """An unknown class is as a negative one."""
    signs = jnp.where(targets > 0, -1.0, 1.0).astype(logits.dtype)
    return jax.nn.softplus(signs * logits).sum(axis=1), valid


def of_unit_weights(rows, labels, weights, **common):
    return own()(rows @ (weights / jnp.linalg.norm(weights, axis=0)), labels, **common)


def rows_and_targets(rng, n):
    return rng.normal(size=(n, CLASSES)), rng.integers(-1, 2, (n, CLASSES))


def rows_labels_and_weights(rng, n):
    return rng.normal(size=(n, 2)), rng.integers(0, CLASSES, n), rng.normal(size=(2, CLASSES))


INPUTS = {"unknown targets": rows_and_targets, "norm of zero weights": rows_labels_and_weights}
"""By the name of the fault, where they are no `rows_and_labels`."""
FAULTS = {
    "keywords": ("keywords", without_keywords),
    "if on values": ("jit", own(valid=only_on_values)),
    "computed in float32": ("float64", own(widen=lambda rows: rows.astype(jnp.float32))),
    "root of 0": ("finite", own(partial(pairs, root=jnp.sqrt))),
    "double where missing": ("duplicates", own(partial(pairs, root=root_of_apart))),
    "norm of 0": ("zeros", own(prepare=over_norm)),
    "norm of zero weights": ("zeros", of_unit_weights),
    "unshifted log-sum-exp": (
        "large_values",
        own(partial(cross_entropies, log_sum_exp=unshifted)),
    ),
    "empty mean of the other classes": ("one_class", own(mean_of_others)),
    "NaN without positives": (
        "no_positives",
        own(partial(pairs, defined=lambda valid, positives: valid)),
    ),
    "0 / 0": ("nothing_counts", own(reduce=mean_by(lambda counts, weights, _: weights.sum()))),
    "class mean of padding": (
        "masks",
        own(partial(distances_to_means, members=lambda _, one_hot: one_hot)),
    ),
    "0 times NaN": (
        "padding_leaks",
        own(prepare=lambda rows, valid: rows * valid[:, None].astype(rows.dtype)),
    ),
    "mask of the losses alone": ("padding_leaks", own(prepare=lambda rows, valid: rows)),
    "negative label": ("ignored_labels", own(wrapped_labels, valid=only_mask)),
    "unknown targets": ("ignored_labels", own(binary_entropies, valid=only_mask)),
    "none not zeroed": ("none", own(reduce=none_not_zeroed)),
    "a scalar as none": ("none", own(reduce=sum_for_none)),
    "unweighted sum": ("sums", own(reduce=unweighted_sum)),
    "weights not in the denominator": ("weights", own(reduce=mean_by(number_of_rows))),
    "denominator of at least 1": ("weights", own(reduce=mean_by(at_least_one))),
    "nan_to_num": ("hidden_nan", own(reduce=without_nan)),
    "wrong custom gradient": ("gradient", own(through(doubled_gradient))),
    "custom gradient of first order": ("second_derivatives", own(through(square_once))),
    "without batching": ("vmap", own(without_batching)),
    "float16 accumulation": (
        "half_precision",
        own(widen=lambda rows: rows, reduce=widened_too_late),
    ),
    "float16 result": ("half_precision", own(widen=lambda rows: rows)),
    "mean of means": ("devices", own(reduce=mean_of_means)),
    "gathered without gradient": (
        "device_gradients",
        own(partial(pairs, gather_rows=gathered_without_gradient)),
    ),
    "sum that varies": ("check_vma", own(reduce=partial(reduce_rows, total=sum_of_gathered))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("usual_promotion")
def test_planted_faults(name, monkeypatch):
    rule, loss = FAULTS[name]
    (part,) = {r.part for r in testing.RULES if r.name == rule} or {""}
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
        assert f"Smallest input found, n = {len(error.inputs['labels'])}:\n  rows = [[" in text


def test_the_smallest_input_is_found():
    """A class mean needs a second row of the class, and a mask."""
    _, loss = FAULTS["class mean of padding"]
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ContractError) as caught:
        check_loss(loss, rows_and_labels, devices=False, dtypes=False)
    inputs = caught.value.inputs
    assert list(inputs) == ["rows", "labels", "where"]
    assert len(set(inputs["labels"])) < len(inputs["labels"]) <= 3
    assert 0 < inputs["where"].sum() < len(inputs["where"])
    assert "rows = [[" in str(caught.value)


def by_numpy(logits, labels):
    """Of another temperature."""
    return np.mean(np.log(np.exp(2 * logits).sum(1)) - 2 * logits[np.arange(len(labels)), labels])


def by_torch(logits, labels, detach=False):
    torch = pytest.importorskip("torch")
    values = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    weights = values.detach() if detach else values
    return (weights * values).mean()


def squared(logits, labels, valid, axis_name, stop=lambda x: x):
    losses, valid = cross_entropies(logits, labels, valid, axis_name)
    return stop(losses) * losses, valid


@pytest.mark.slow
@pytest.mark.usefixtures("usual_promotion")
def test_references():
    check = partial(check_loss, make_inputs=rows_and_labels, devices=False, dtypes=False)
    for loss, reference in ((own(), by_numpy), (own(squared), partial(by_torch, detach=True))):
        with pytest.raises(ContractError, match="reference") as caught:
            check(loss, reference=reference)
        assert caught.value.rule == "reference"


@pytest.mark.slow
@pytest.mark.usefixtures("usual_promotion")
def test_a_stop_gradient_needs_a_reference_in_pytorch():
    loss = own(partial(squared, stop=lax.stop_gradient))
    check = partial(check_loss, loss, rows_and_labels, devices=False, dtypes=False)
    check(reference=partial(by_torch, detach=True))
    with pytest.raises(ContractError, match="stop_gradient") as caught:
        check()
    assert caught.value.rule == "gradient"


@pytest.mark.slow
@pytest.mark.usefixtures("usual_promotion")
def test_two_views():
    check_loss(view_loss, views_and_views)


def test_inputs_are_checked():
    for inputs in (
        lambda rng, n: (np.ones((n, 2)),),
        lambda rng, n: (np.ones((n, 2)), np.zeros(n + 1, int)),
        lambda rng, n: (np.ones((n, 2), int), np.zeros(n, int)),
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
    documented = re.findall(r"^ *`(\w+)`  ", check_loss.__doc__ or "", flags=re.MULTILINE)
    assert documented == ["keywords", *(rule.name for rule in testing.RULES)]
    assert {rule for rule, _ in FAULTS.values()} == {*documented} - {"reference"}


def test_the_package_does_not_import_it():
    for path in Path(jaxloss.__file__).parent.glob("_*.py"):
        source = path.read_text()
        assert "import testing" not in source
        assert path.name == "_rules.py" or "jaxloss._rules" not in source
