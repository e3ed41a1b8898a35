"""How far apart two results may be, and how much of that each comparison uses.

    python -m pytest --tolerances

prints the largest difference that every comparison met, as a share of what it allows. One that uses
more than a third may fail on another processor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

FLOAT64 = 1e-10
FLOAT32 = 32 * float(np.finfo(np.float32).eps)
"""4e-6: two ways to compute the same numbers, by sums over some dozens of numbers.

Where a formula enlarges roundings (a scale, an exponent, a root, a deep network), a test states by
how much: `4 * FLOAT32`. Bounds of random draws and of finite differences are no roundings, do not
depend on the processor, and stand where they are used.
"""


def rounded_to(dtype: Any) -> float:
    """A gradient that is rounded to a half precision on two paths, and so is their sum.

    That makes 1.5 times the distance of two numbers; float32 arithmetic adds nothing that shows.
    """
    return 2 * float(jnp.finfo(dtype).eps)


def share_of_tolerance(got: Any, expected: Any, rtol: float, atol: float) -> float:
    """The largest finite difference, as a share of `atol + rtol * |expected|`."""
    if isinstance(expected, Mapping):
        every = (share_of_tolerance(got[key], expected[key], rtol, atol) for key in expected)
        return max(every, default=0.0)
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.abs(got - expected) / (atol + rtol * np.abs(expected))
    return float(np.max(shares, initial=0.0, where=np.isfinite(shares)))


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """The largest share of every comparison that is made in this context."""
    shares: dict[str, float] = {}
    allclose, approx = np.testing.assert_allclose, pytest.approx

    def note(got: Any, expected: Any, rtol: float, atol: float) -> None:
        try:
            share = share_of_tolerance(got, expected, rtol, atol)
        except (KeyError, TypeError, ValueError):  # The comparison itself says what is wrong.
            return
        key = _place()
        shares[key] = max(shares.get(key, 0.0), share)

    class Approx:
        """`pytest.approx` of some numbers."""

        __array_ufunc__ = None
        __hash__: Any = None

        def __init__(self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False):
            self.expected, self.inner = expected, approx(expected, rel, abs, nan_ok)
            default = 1e-6 if abs is None else 0.0
            self.bounds = default if rel is None else rel, 1e-12 if abs is None else abs

        def __eq__(self, got: Any) -> bool:
            note(got, self.expected, *self.bounds)
            return self.inner == got

        def __repr__(self) -> str:
            return repr(self.inner)

    def assert_allclose(
        actual: Any, desired: Any, rtol: Any = 1e-7, atol: Any = 0, **options: Any
    ) -> None:
        note(actual, desired, rtol, atol)
        allclose(actual, desired, rtol, atol, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.testing, "assert_allclose", assert_allclose)
        patch.setattr(pytest, "approx", Approx)
        yield shares


def _place() -> str:
    """The line of a test that compares, by itself or by a function of another file."""
    frame = sys._getframe(2)
    while frame.f_back and not Path(frame.f_code.co_filename).name.startswith("test_"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
