"""Custom derivatives to the third order, also in a scan, where JAX may drop the rule of a function.

There it differentiates the body in place of the rule, which must then be right as well.
"""

import pkgutil
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxloss
from jaxloss.core.linear import cosine_gaps, l2_normalize, row_norms
from jaxloss.core.logsumexp import softplus
from tests.jaxloss.harness import QUICK, enable_x64

_RNG = np.random.default_rng(0)
_DRAWN: Any = _RNG.normal(size=(5, 6, 4))
POINT, OTHER, *DIRECTIONS = _DRAWN
WEIGHTS: Any = _RNG.normal(size=(4, 5))
LABELS: Any = np.array([0, 1, 0, 1, 2, 2], np.int32)
VALID = np.arange(6) < 5
TARGETS: Any = _RNG.integers(0, 2, (6, 4))


def _waves(values):
    """A scalar whose derivatives of all orders depend on every value."""
    return jnp.sum(jnp.sin(3 * values) * OTHER[: values.shape[0], : values[0].size].T[:1].T)


def _padded(x):
    """NaN in the row that does not count."""
    return jnp.where(VALID[:, None], x, jnp.nan)


def _classifier(x, **options):
    return jaxloss.classifier_loss(x, LABELS, WEIGHTS, block_size=2, **options)


RULES = {
    "_units": {
        "rows": lambda x: _waves(l2_normalize(x)),
        "padding": lambda x: _waves(l2_normalize(_padded(x), jnp.asarray(VALID))),
        "columns": lambda x: _waves(l2_normalize(x, axis=0)),
        "zero row": lambda x: _waves(l2_normalize(jnp.where(VALID[:, None], x, 0))),
    },
    "row_norms": {"": lambda x: _waves(row_norms(x, jnp.asarray(VALID))[:, None])},
    "cosine_gaps": {
        "": lambda x: _waves(cosine_gaps(x, jnp.asarray(OTHER), jnp.asarray(VALID))[:, None])
    },
    "softplus": {"at 0": lambda x: _waves(softplus(x - POINT))},
    "_statistics": {
        "nca": lambda x: jaxloss.nca_loss(x, LABELS),
        "multi_similarity": lambda x: jaxloss.multi_similarity_loss(x, LABELS, negative_scale=4.0),
    },
    "_two_stages": {
        "": lambda x: jaxloss.supervised_contrastive_loss(
            x, LABELS, temperature=1.0, denominator="negatives"
        )
    },
    "_weighted_sum": {"": lambda x: jaxloss.sigmoid_contrastive_loss(x, OTHER, scale=2.0)},
    "_over_classes": {"": lambda x: jaxloss.prototypical_loss(x, LABELS)},
    "_loop": {"": lambda x: jaxloss.prototypical_loss(x, LABELS, block_size=2)},
    "_in_blocks": {
        "inner": _classifier,
        "cosine": lambda x: _classifier(x, similarity="cosine", scale=4.0),
        "weights": lambda x: jaxloss.classifier_loss(
            OTHER[:3], LABELS[:3], x.T, similarity="cosine", scale=4.0, block_size=2
        ),
    },
    "_above_lowest": {"": lambda x: jaxloss.class_wise_loss(x, TARGETS)},
    "_moments": {"": lambda x: jaxloss.vicreg_loss(x, OTHER)},
    "_cross_moments": {"": lambda x: jaxloss.barlow_twins_loss(x, OTHER)},
    "_spectral_part": {
        "": lambda x: _waves(jaxloss.project_spectral_complement(OTHER, x.T[:, :3]))
    },
}


OF_LOW_PRECISION = {"_low_product", "_mixed", "_in_exact_blocks"}
"""They compute in float32: `test_products` has their derivatives."""


def test_every_rule_is_tested():
    found = pkgutil.walk_packages(jaxloss.__path__, "jaxloss.")
    modules = [import_module(it.name) for it in found]
    kinds = (jax.custom_jvp, jax.custom_vjp)
    found = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, kinds) and getattr(value, "__module__", "") == module.__name__
    }
    assert found == {*RULES, *OF_LOW_PRECISION}


def in_scan(function):
    def scanned(x):
        def step(total, _):
            return 0.5 * total + function(x + 0 * total), None

        return lax.scan(step, jnp.zeros((), x.dtype), length=2)[0]

    return scanned


QUICK_CASES = {("_units", "rows"), ("softplus", "at 0")}
ALONE = {
    "_loop",  # JAX refuses: "Reverse-mode differentiation does not".
    *("_two_stages", "_weighted_sum", "_over_classes", "_in_blocks"),  # As `_statistics`.
}
CASES = [
    pytest.param(
        case,
        place,
        id=f"{rule}-{name}-{place.__name__ if place else 'alone'}",
        marks=pytest.mark.long if place or (rule, name) not in QUICK_CASES else pytest.mark.slow,
    )
    for rule, cases in RULES.items()
    for name, case in cases.items()
    for place in (None, in_scan)[: 1 + (name == next(iter(cases)) and rule not in ALONE)]
]


@pytest.mark.parametrize(("case", "place"), CASES)
def test_derivatives_to_the_third_order(case, place):
    """Against central differences of the derivative of one order less, along random directions.

    The first two are by reverse mode, and the third by forward mode of the second.
    """
    function = case if place is None else place(case)
    step = 1e-5

    def along(of, direction):
        return lambda x: jnp.vdot(jax.grad(of)(x), direction)

    with enable_x64(True):
        point, *directions = map(jnp.asarray, (POINT, *DIRECTIONS))
        first = along(function, directions[0])
        second = along(first, directions[1])

        @partial(jax.jit, compiler_options=QUICK)
        def derivatives(x):
            highest, third = jax.jvp(second, (x,), (directions[2],))
            return function(x), first(x), highest, third

        found = derivatives(point)
        for order, direction in enumerate(directions):
            after, before = (derivatives(point + sign * step * direction) for sign in (1, -1))
            difference = (after[order] - before[order]) / (2 * step)
            np.testing.assert_allclose(found[order + 1], difference, rtol=1e-5, atol=1e-6)
