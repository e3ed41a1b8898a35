"""Losses, logits and measures that `jax.export` writes for any number of rows."""

from functools import partial

import jax
import numpy as np
import pytest
from jax import export

import jaxloss
from tests.jaxloss.harness import over
from tests.jaxloss.loss_table import CASES, EVERY_LOSS, FUNCTIONS, PLAIN, features_and_labels
from tests.tolerances import FLOAT32

IN_BLOCKS = tuple(row for row in CASES if row.has_tiles and not row.rare)


def check(function, args, number, rtol=16 * FLOAT32, atol=16 * FLOAT32, sizes=(12,)):
    """Of arguments the first of which, in this number, may have any number of rows."""
    (rows,) = export.symbolic_shape("b")
    specs = [
        jax.ShapeDtypeStruct((rows, *x.shape[1:]) if k < number else x.shape, x.dtype)
        for k, x in enumerate(args)
    ]
    exported = export.export(run := jax.jit(function))(*specs)
    for size in sizes:
        some = [x[:size] if k < number else x for k, x in enumerate(args)]
        results = (jax.tree.leaves(f(*some)) for f in (exported.call, run))
        for ours, theirs in zip(*results, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def inputs(make_inputs):
    made = make_inputs(np.random.default_rng(3), 12, np.float32)
    return [x if x.dtype == np.float32 else x.astype(np.int32) for x in made]


@over(EVERY_LOSS + IN_BLOCKS, often=(PLAIN["nca"], PLAIN["triplet"]))
def test_loss_of_any_number_of_rows(row):
    check(partial(row.function, **row.kwargs), inputs(row.make_inputs), 2)


@over([PLAIN["prototypical"], PLAIN["group_softmax"]])
def test_loss_of_any_number_of_rows_on_an_accelerator(row, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    check(partial(row.function, **row.kwargs), inputs(row.make_inputs), 2)


@pytest.mark.slow
@over(FUNCTIONS[:2], often=FUNCTIONS[1:2])
def test_logits_of_any_number_of_rows(row):
    check(row.function, inputs(row.make_inputs), 1, 4 * FLOAT32, FLOAT32, sizes=(12, 1))


@pytest.mark.slow
@pytest.mark.parametrize("measure", [jaxloss.retrieval_metrics, jaxloss.discriminability])
def test_measures_of_any_number_of_rows(measure):
    check(measure, inputs(features_and_labels)[:2], 2, 4 * FLOAT32, 0)
