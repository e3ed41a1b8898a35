"""Two derivatives of every custom rule in a scan, where JAX may drop the rule of a function.

There it differentiates the body in place of the rule, which must then be right as well. Rules of
whole losses have the rule `second_derivatives` of the contract.
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
from jaxloss.core import blocks
from jaxloss.core.linear import l2_normalize
from jaxloss.core.logsumexp import softplus
from jaxloss.losses.hypersphere import cosine_gaps, row_norms
from tests.jaxloss.harness import QUICK, enable_x64

_RNG = np.random.default_rng(0)
_DRAWN: Any = _RNG.normal(size=(3, 6, 4))
POINT, OTHER, DIRECTION = _DRAWN
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


sum_of_blocks: Any = blocks.sum_of_blocks


def _of_block(rows, _, shared):
    return jnp.sum(jnp.sin(rows @ shared) ** 2), ()


RULES = {
    "_units": lambda x: _waves(l2_normalize(x)),
    "_units padding": lambda x: _waves(l2_normalize(_padded(x), jnp.asarray(VALID))),
    "_units columns": lambda x: _waves(l2_normalize(x, axis=0)),
    "_units zero row": lambda x: _waves(l2_normalize(jnp.where(VALID[:, None], x, 0))),
    "row_norms": lambda x: _waves(row_norms(x, jnp.asarray(VALID))[:, None]),
    "cosine_gaps": lambda x: _waves(
        cosine_gaps(x, jnp.asarray(OTHER), jnp.asarray(VALID))[:, None]
    ),
    "softplus at 0": lambda x: _waves(softplus(x - POINT)),
    "_statistic": lambda x: jaxloss.sigreg_loss(x, jax.random.PRNGKey(1), num_directions=3),
    "_statistics": lambda x: jaxloss.nca_loss(x, LABELS),
    "above_lowest": lambda x: jaxloss.class_wise_loss(x, TARGETS),
    "_moments": lambda x: jaxloss.vicreg_loss(x, OTHER),
    "_cross_moments": lambda x: jaxloss.barlow_twins_loss(x, OTHER),
    "sum_of_blocks": lambda x: sum_of_blocks(
        (_of_block, _of_block), x.reshape(3, 2, 4), None, WEIGHTS
    )[0],
    "_with_gradients": lambda x: sum_of_blocks(
        (_of_block, _of_block), OTHER.reshape(3, 2, 4), None, x.T
    )[0],
    "_spectral_part": lambda x: _waves(jaxloss.project_spectral_complement(OTHER, x.T[:, :3])),
}
"""By the name of the rule, and of the case."""
OF_LOW_PRECISION = {"_low_product", "_mixed", "with_cotangent_at_once", "_relative_to_some"}
"""They compute in float32: `test_products` has their derivatives."""
OF_LOSSES = {"_two_stages", "_weighted_sum", "_scan_of_first", "in_blocks", "gram_of", "_statistic"}
"""Rows of the loss table: SINCERE, SigLIP, prototypes, classes in blocks, direct sums, SIGReg."""


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
    missing = found - {name.split()[0] for name in RULES} - OF_LOW_PRECISION - OF_LOSSES
    assert not missing, f"add a case to `RULES` of {__file__} for {missing}"


def in_scan(function):
    def scanned(x):
        def step(total, _):
            return 0.5 * total + function(x + 0 * total), None

        return lax.scan(step, jnp.zeros((), x.dtype), length=2)[0]

    return scanned


def check(function):
    """Against central differences along a direction, of the value and of its gradient."""
    step = 1e-5
    with enable_x64(True):

        @partial(jax.jit, compiler_options=QUICK)
        def derivatives(x):
            return jax.jvp(jax.value_and_grad(function), (x,), (jnp.asarray(DIRECTION),))

        (_, gradient), (slope, product) = derivatives(jnp.asarray(POINT))
        (after, before), _ = zip(
            *(derivatives(jnp.asarray(POINT + sign * step * DIRECTION)) for sign in (1, -1)),
            strict=True,
        )
    differences = jax.tree.map(lambda a, b: (a - b) / (2 * step), after, before)
    np.testing.assert_allclose(np.vdot(gradient, DIRECTION), slope, rtol=1e-10)
    for got, expected in zip((slope, product), differences, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_second_derivatives_in_a_scan(name):
    check(in_scan(RULES[name]))
