"""Losses that `jax.export` writes for any number of rows."""

import jax
import numpy as np
import pytest
from jax import export

import jaxloss
from tests.jaxloss.harness import over
from tests.jaxloss.loss_table import LOSSES, TILES_OF_A_KIND
from tests.tolerances import FLOAT32


def _of_rows(array, rows):
    dtype = np.float32 if np.issubdtype(array.dtype, np.floating) else np.int32
    shape = (rows, *array.shape[1:])
    return jax.ShapeDtypeStruct(shape, dtype)


@over(LOSSES + TILES_OF_A_KIND, often=[row for row in LOSSES if row.name == "nca"])
def test_loss_of_any_number_of_rows(row):
    (rows,) = export.symbolic_shape("b")

    def loss(*args):
        return row.function(*args, **row.kwargs)

    made = row.make_inputs(np.random.default_rng(3), 12, np.float32)
    args = [x.astype(_of_rows(x, 12).dtype) for x in made]
    specs = [_of_rows(x, rows if k < 2 else len(x)) for k, x in enumerate(args)]
    run = jax.jit(loss)
    exported = export.export(run)(*specs)
    np.testing.assert_allclose(
        exported.call(*args), run(*args), rtol=16 * FLOAT32, atol=16 * FLOAT32
    )


@pytest.mark.slow
@pytest.mark.parametrize("measure", [jaxloss.retrieval_metrics, jaxloss.discriminability])
def test_measures_of_any_number_of_rows(measure):
    (rows,) = export.symbolic_shape("b")
    specs = jax.ShapeDtypeStruct((rows, 4), np.float32), jax.ShapeDtypeStruct((rows,), np.int32)
    rng = np.random.default_rng(4)
    features = rng.normal(size=(9, 4)).astype(np.float32)
    labels = rng.integers(0, 3, 9).astype(np.int32)
    run = jax.jit(measure)
    exported = export.export(run)(*specs)
    got = jax.tree.leaves(exported.call(features, labels))
    expected = jax.tree.leaves(run(features, labels))
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=4 * FLOAT32)
