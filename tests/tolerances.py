"""How far apart two results may be, and how much of that each comparison uses.

    python -m pytest --tolerances

prints the largest difference that every comparison met, as a share of what it allows. One that uses
more than a third may fail on another processor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

FLOAT64 = 1e-10
"""Far above the roundings of float64, and far below any error in a formula."""
FLOAT32 = 32 * float(np.finfo(np.float32).eps)
"""4e-6, 32 roundings: two ways to compute the same numbers, by sums over some dozens of numbers.

Tests multiply it where a formula enlarges the roundings of its inputs: by 4 for exponents and
quotients, as in a loss with a scale; by 16 for logits of several products, decompositions, and
numbers near a difference; by 32 or more for networks of many layers and for several steps. Bounds
of random draws and of finite differences are no roundings: they stand where they are used, and do
not depend on the processor.
"""


def rounded_to(dtype: Any) -> float:
    """Of a gradient in half precision, relative to its largest number.

    Its two parts and their sum are rounded, each by half of the distance of two numbers at most.
    """
    return 2 * float(jnp.finfo(dtype).eps)


def share_of_tolerance(got: Any, expected: Any, allowed: Callable[[Any], Any]) -> float:
    """The largest finite difference, as a share of what is allowed for the expected numbers."""
    if isinstance(expected, Mapping):
        every = (share_of_tolerance(got[key], expected[key], allowed) for key in expected)
        return max(every, default=0.0)
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.abs(got - expected) / allowed(np.abs(expected))
    return float(np.max(shares, initial=0.0, where=np.isfinite(shares)))


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """The largest share of every comparison that is made in this context."""
    shares: dict[str, float] = {}
    allclose, approx = np.testing.assert_allclose, pytest.approx

    def note(got: Any, expected: Any, allowed: Callable[[Any], Any]) -> None:
        try:
            share = share_of_tolerance(got, expected, allowed)
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
            self.rel, self.abs = default if rel is None else rel, 1e-12 if abs is None else abs

        def __eq__(self, got: Any) -> bool:
            note(got, self.expected, lambda size: np.maximum(self.rel * size, self.abs))
            return self.inner == got

        def __repr__(self) -> str:
            return repr(self.inner)

    def assert_allclose(
        actual: Any, desired: Any, rtol: Any = 1e-7, atol: Any = 0, **options: Any
    ) -> None:
        note(actual, desired, lambda size: atol + rtol * size)
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
    file = Path(frame.f_code.co_filename)
    return f"{file.parent.name}/{file.name}:{frame.f_lineno}"
