"""Strictness for the library's tests: no silent broadcasting, no silent change of dtype.

The tests of one loss run in one process of pytest-xdist, where they share compiled functions.
"""

import jax
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        row = getattr(getattr(item, "callspec", None), "params", {}).get("row")
        if row is not None:
            item.add_marker(pytest.mark.xdist_group(row.name))


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield
