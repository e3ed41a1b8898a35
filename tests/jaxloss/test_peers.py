"""Every loss of others in `peers` equals ours, and the site lists how far they are apart."""

import numpy as np
import pytest

from tests.jaxloss import accuracy

pytest.importorskip("torch")
pytest.importorskip("pytorch_metric_learning")

from tests.jaxloss.peers import PEERS


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, 1e-10), (np.float32, 1e-6)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_values_and_gradients_are_equal(peer, dtype, tolerance):
    """The tolerance is relative to the largest number of each array."""
    (value, gradients), (their_value, their_gradients) = accuracy.evaluate_peer(peer, dtype)
    assert np.abs(their_value) > 1e-3
    assert accuracy.difference(value, their_value) < tolerance
    for ours, theirs in zip(gradients, their_gradients, strict=True):
        assert ours.shape == theirs.shape
        assert accuracy.difference(ours, theirs) < tolerance


def test_the_site_lists_every_difference():
    """If not, run the command of `accuracy` again."""
    listed = accuracy.read()
    own = [(row.function.__name__, "", "") for row in accuracy.ROWS]
    assert [d.key for d in listed] == own + [(p.loss, p.options, p.theirs) for p in PEERS]
    assert max(max(d.value, d.gradient) for d in listed) < 1e-9
