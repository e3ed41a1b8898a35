"""Strict tests: no rank broadcasting, no dtype promotion, and checked annotations."""

import functools
import inspect
from importlib.util import find_spec
from typing import Any

import jax
import jaxtyping
import numpy as np
import pytest

import jaxloss
from tests.jaxloss.loss_table import VARIANTS, FunctionRow

# The doctest collector imports every file. `make quick` has no PyTorch.
_NEEDS = {"torch_references.py": "torch", "peers.py": "pytorch_metric_learning"}
collect_ignore = [file for file, package in _NEEDS.items() if not find_spec(package)]


def pytest_collection_modifyitems(items):
    """Groups the tests of a loss in one process of pytest-xdist, to share compiled functions.

    `make quick` tests every loss with its plainest options, in one or two dtypes and on one kind of
    mesh. The marker `slow` leaves out the rest; `make library` runs it, too.
    """
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.runtest = functools.partial(run_compiled, item.runtest)
        row = getattr(getattr(item, "callspec", None), "params", {}).get("row")
        if isinstance(row, FunctionRow):
            item.add_marker(pytest.mark.xdist_group(row.name))
            if row in VARIANTS:
                item.add_marker(pytest.mark.slow)


def run_compiled(example):
    """Runs an example of the library with compiled losses.

    Compiling one operation after the other takes ten times as long; `test_without_jit` does it.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in jaxloss.__all__:
            function = getattr(jaxloss, name)
            if hasattr(function, "_result"):  # Its arguments are arrays, and options by name.
                patch.setattr(jaxloss, name, compiled(function))
        example()


def compiled(function):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        arrays = {k: x for k, x in given.items() if isinstance(x, jax.Array | np.ndarray)}
        others = {k: x for k, x in given.items() if k not in arrays}
        return jax.jit(functools.partial(function, **others))(**arrays)

    return call


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def checked_annotations():
    """Turns on the checks of tests/conftest.py.

    They would reject wrong arguments before the library does, and their error is a `TypeError`.
    Tests of the library's own errors turn them off again: see `raises` in `harness`.
    """
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", True)
