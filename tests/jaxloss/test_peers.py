"""Every loss of others in `peers` equals ours, and the site lists how far they are apart."""

import chex
import numpy as np
import pytest

from tests.jaxloss import accuracy
from tests.jaxloss.harness import assert_close
from tests.tolerances import FLOAT32, FLOAT64

pytest.importorskip("torch")
pytest.importorskip("pytorch_metric_learning")

from tests.jaxloss.peers import PEERS

FIRST = {peer.loss: peer for peer in reversed(PEERS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(np.float64, FLOAT64), pytest.param(np.float32, FLOAT32, marks=pytest.mark.long)],
    ids=["float64", "float32"],
)
@pytest.mark.parametrize(
    "peer",
    [
        # One option of every loss; `make long` has all of them.
        pytest.param(peer, id=peer.name, marks=[] if FIRST[peer.loss] is peer else pytest.mark.long)
        for peer in PEERS
    ],
)
def test_values_and_gradients_are_equal(peer, dtype, tolerance):
    ours, theirs = accuracy.evaluate_peer(peer, dtype)
    assert np.abs(theirs[0]) > 1e-3
    chex.assert_trees_all_equal_shapes(ours[1], theirs[1])
    assert_close(ours, theirs, tolerance)


def test_the_site_lists_every_difference():
    """If not, run the command of `accuracy` again."""
    listed = accuracy.read()
    own = [(row.function.__name__, "", "") for row in accuracy.ROWS]
    assert [d.key for d in listed] == own + [(p.loss, p.options, p.theirs) for p in PEERS]
    assert max(max(d.value, d.gradient) for d in listed) < 1e-9
