"""Strict tests: no rank broadcasting, no dtype promotion, and checked annotations."""

import contextlib
import functools
from importlib.util import find_spec

import jax
import jaxtyping
import pytest

from tests.jaxloss.loss_table import VARIANTS, FunctionRow

# The doctest collector imports every file. `make quick` has no PyTorch.
collect_ignore = [] if find_spec("torch") else ["torch_references.py"]


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist reads the groups.
def pytest_collection_modifyitems(items):
    """Groups the tests of a loss in one process of pytest-xdist, to share compiled functions.

    `make quick` tests every loss with its plainest options, in one or two dtypes, and some on a
    mesh. The markers `slow` and `long` leave out the rest: `make library` runs the slow ones, and
    `make long` the others.
    """
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.runtest = float16_may_be_missing()(item.runtest)
        row = getattr(getattr(item, "callspec", None), "params", {}).get("row")
        if isinstance(row, FunctionRow):
            item.add_marker(pytest.mark.xdist_group(row.name))
            if row in VARIANTS:
                item.add_marker(pytest.mark.slow)
            if getattr(row, "rare", False):
                item.add_marker(pytest.mark.long)
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)


@functools.cache
def compiles_float16() -> bool:
    """XLA does not, for an x86 processor without the instructions that convert it."""
    try:
        jax.jit(lambda x: x.astype("float32"))(jax.numpy.ones(3, "float16")).block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@contextlib.contextmanager
def float16_may_be_missing():
    """Skips a test that fails where there is no float16."""
    try:
        yield
    except Exception as error:
        cause = getattr(error, "exc_info", (None, error))[1]  # Of an example in a docstring.
        if "materialize symbols" in f"{cause} {cause.__cause__}" and not compiles_float16():
            pytest.skip("XLA does not compile float16 for this processor")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with float16_may_be_missing():
        return (yield)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def checked_annotations():
    """Turns on the checks of tests/conftest.py. In all tests, they would take a fifth of the time.

    They would reject wrong arguments before the library does, and their error is a `TypeError`.
    Tests of the library's own errors turn them off again: see `raises` in `harness`.
    """
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)
