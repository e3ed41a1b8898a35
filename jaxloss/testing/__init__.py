"""Checks that a loss of your own keeps the contract of `jaxloss`.

`jaxloss` does not import this module: write `from jaxloss.testing import check_loss`.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxloss.testing.checked_loss import ROWS, Broken, CheckedLoss, MakeInputs, num_devices, text
from jaxloss.testing.rules import RULES, Rule

__all__ = ["ContractError", "check_loss"]

_SMALL = (1, 2, 3, 4, 6, 8)
"""The sizes that are tried for a smaller input that breaks the same rule."""
_SEEDS = (0, 1)


_Check = TypeVar("_Check", bound=Callable[..., None])


class ContractError(AssertionError):
    """A loss breaks a rule of the contract.

    Attributes:
      rule: The name of the rule, such as `"masks"`.
      inputs: The smallest input found that breaks it: the arguments of the loss by their names.
    """

    def __init__(self, message: str, rule: str, inputs: Mapping[str, np.ndarray]):
        super().__init__(message)
        self.rule = rule
        self.inputs = dict(inputs)


def _with_rules(check: _Check) -> _Check:
    """Adds the rules to the help of a function."""
    items = [
        textwrap.fill(f"* `{rule.name}`: {rule.statement}.", 98, subsequent_indent="  ")
        for rule in RULES
    ]
    table = "\n".join(items) + "\n\nArgs:"
    # Python 3.13 takes the indentation of docstrings away.
    check.__doc__ = re.sub(
        "^( *)Args:", lambda line: textwrap.indent(table, line[1]), check.__doc__ or "", flags=re.M
    )
    return check


@_with_rules
def check_loss(
    loss: Callable[..., Any],
    make_inputs: MakeInputs,
    *,
    reference: Callable[..., Any] | None = None,
    devices: bool = True,
    dtypes: bool = True,
) -> None:
    """Checks that a loss keeps the contract of `jaxloss`, and raises an error if it does not.

    The contract is in the help of `jaxloss`: `where`, `sample_weights`, `reduction`, `axis_name`,
    labels, dtypes. The check runs the loss on random and on extreme batches of 12 rows, and takes
    these rules in their order. A loss may refuse `reduction="none"` by a `ValueError` with its
    name.

    Args:
      loss: The function. Arguments with a default may be set by `functools.partial`. Keyword-only
        ones whose default is a float, and which can be traced, are its hyperparameters.
      make_inputs: `make_inputs(rng, n)` returns the positional arguments of the loss for n ≥ 1 rows
        as NumPy arrays, drawn from the `numpy.random.Generator`: the scored rows `[n, ...]`; labels
        `[n]` or targets `[n, C]`, integers or bool; further arrays such as class weights. Floats
        are differentiated. A second array of floats `[n, ...]` is a second view of the rows: make
        soft targets of integers, in a function around the loss. Give the scored rows elements of
        about 1, and several rows to most of the classes.
      reference: A function of the same positional arguments that returns the mean loss. It gets
        NumPy arrays in float64. If it cannot use them, or returns a PyTorch tensor, it gets PyTorch
        tensors in float64, and its gradients are compared, too. These then replace finite
        differences. A loss with `jax.lax.stop_gradient` needs that.
      devices: Whether to check `axis_name`. It needs at least two devices; with a single one, a
        warning says that these rules are left out. On a CPU, call
        `jax.config.update("jax_num_cpu_devices", 4)` before JAX is used.
      dtypes: Whether to check float32, bfloat16 and float16. The other rules use float64.

    Returns:
      None.

    Raises:
      ContractError: An `AssertionError`: the first broken rule, what to do, and the smallest input
        found that breaks it.
      ImportError: If chex is not installed, which compares the results.
      ValueError: If `make_inputs` does not return such arrays.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> from jaxloss.testing import check_loss
      >>> def make_inputs(rng, n):
      ...     return rng.normal(size=(n, 3)), rng.integers(0, 3, n)
      >>> check_loss(jaxloss.softmax_loss, make_inputs, devices=False)
      >>> def own_loss(logits, labels, *, where=None, sample_weights=None, reduction="mean"):
      ...     if where is not None:
      ...         logits = logits * where[:, None]
      ...     return jaxloss.softmax_loss(
      ...         logits, labels, sample_weights=sample_weights, reduction=reduction
      ...     )
      >>> check_loss(own_loss, make_inputs, devices=False)
      Traceback (most recent call last):
      jaxloss.testing.ContractError: `own_loss` breaks the rule "nothing_counts"...
    """
    try:
        import chex  # noqa: F401  # The library itself does not need it.
    except ImportError as error:
        raise ImportError(
            "`check_loss` compares results with chex: pip install chex", name="chex"
        ) from error
    checked = CheckedLoss(loss, make_inputs, reference)
    parts = {"": True, "devices": devices and jax.device_count() > 1, "dtypes": dtypes}
    if devices and not parts["devices"]:
        warnings.warn(
            "`check_loss` found one device and leaves out the rules of several; give "
            "`devices=False` if that is right, or on a CPU call "
            '`jax.config.update("jax_num_cpu_devices", 4)` before JAX is used',
            stacklevel=2,
        )
    checked.common = checked.common if devices else checked.common[:-1]
    for rule in RULES:
        if not parts[rule.part]:
            continue
        for seed in _SEEDS:
            broken = _first_fault(rule, checked, ROWS, seed)
            if broken is not None:
                raise _error(rule, checked, _smaller(rule, checked) or broken)


def _first_fault(rule: Rule, checked: CheckedLoss, n: int, seed: int) -> Broken | None:
    rng = np.random.default_rng(seed)
    try:
        rule.check(checked, checked.batch(rng, n), rng)
    except Broken as broken:
        return broken
    return None


def _smaller(rule: Rule, checked: CheckedLoss) -> Broken | None:
    """The smallest batch found that breaks the rule, below the usual size."""
    step = num_devices() if rule.part == "devices" else 1
    for n in (n for n in _SMALL if n % step == 0):
        for seed in (*_SEEDS, 2):
            try:
                broken = _first_fault(rule, checked, n, seed)
            except Exception:  # `make_inputs` or the reference may not take so few rows.
                break
            if broken is not None:
                return broken
    return None


def _error(rule: Rule, checked: CheckedLoss, broken: Broken) -> ContractError:
    batch, inputs, smallest = broken.batch, {}, ""
    if batch is not None:
        inputs = dict(zip(checked.names, batch.args, strict=True))
        masks = {"where": batch.where, "sample_weights": batch.sample_weights}
        inputs |= {k: x for k, x in masks.items() if x is not None and np.any(x != 1)}
        lines = [f"\n  {name} = {text(value, f'  {name} = ')}" for name, value in inputs.items()]
        smallest = f"\nSmallest input found, n = {batch.size}:" + "".join(lines)
    error = ContractError(
        f'`{checked.name}` breaks the rule "{rule.name}": {rule.statement}.\n'
        f"Found: {broken.found}.\nWhat to do: {rule.advice}.{smallest}",
        rule.name,
        inputs,
    )
    error.__cause__ = broken.__cause__
    return error
