"""`--tolerances` sees what is compared, and where."""

import chex
import numpy as np
import pytest

from tests import tolerances


def test_shares_of_all_ways_to_compare():
    with tolerances.watched() as shares:
        np.testing.assert_allclose([1.0, 2.02], [1.0, 2.0], atol=0.05, rtol=0)
        chex.assert_trees_all_close({"a": np.ones(2)}, {"a": np.ones(2) * 1.1}, rtol=0.2)
        assert pytest.approx({"a": 3.3}, rel=0.2) == {"a": 3.0}
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(np.nan, 1.0)
    assert [key.partition(":")[0] for key in shares] == ["tests/test_tolerances.py"] * 4
    assert [*shares.values()] == pytest.approx([0.4, 0.5 / 1.1, 0.5 / 1.1, 0.0])
    with tolerances.watched() as shares:
        pass
    assert not shares
