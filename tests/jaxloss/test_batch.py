"""Errors in the rows that a loss compares its samples with."""

import jax.numpy as jnp
import pytest

from jaxloss._batch import reference_rows
from tests.jaxloss.harness import raises

FEATURES = jnp.ones((3, 2))
REFERENCES, LABELS = jnp.ones((4, 2)), jnp.array([0, -1, 2, 1])


@pytest.mark.parametrize(
    ("given", "error", "mentions"),
    [
        ((REFERENCES, None, None), ValueError, ("`reference_labels`", "only `references`")),
        ((None, LABELS, None), ValueError, ("`references`", "only `reference_labels`")),
        ((None, None, LABELS > 0), ValueError, ("`references`", "only `reference_where`")),
        ((REFERENCES[:, :1], LABELS, None), ValueError, ("`references`", "d = 2", r"\(4, 1\)")),
        ((REFERENCES[0], LABELS, None), ValueError, ("`references`", r"\[m, d\]")),
        ((REFERENCES, LABELS[:3], None), ValueError, ("`reference_labels`", r"\(4, 2\)")),
        ((REFERENCES, LABELS[None], None), ValueError, ("`reference_labels`", r"\[m\]")),
        ((REFERENCES, LABELS, jnp.ones(3, bool)), ValueError, ("`reference_where`", r"\(3,\)")),
        ((LABELS[:, None], LABELS, None), TypeError, ("`references`", "int32")),
        ((REFERENCES, jnp.ones(4), None), TypeError, ("`reference_labels`", "float32")),
        ((REFERENCES, LABELS, jnp.ones(4)), TypeError, ("`reference_where`", "float32")),
        (([[1.0, 2.0]], LABELS, None), TypeError, ("`references`", "list")),
    ],
)
def test_wrong_references(given, error, mentions):
    references, labels, where = given
    with raises(error) as caught:
        reference_rows(references, labels, where, FEATURES)
    for mention in mentions:
        assert caught.match(mention)
