"""The public namespace: complete, documented, and covered by the loss table."""

import inspect
import re
import types
import typing
from collections import Counter

import jax
import pytest

import jaxloss
from jaxloss.core.dimensions import dims_of
from tests.jaxloss.harness import over
from tests.jaxloss.loss_table import CASES, EVERY_LOSS, FUNCTIONS

PUBLIC = {name: getattr(jaxloss, name) for name in jaxloss.__all__}
FUNCTION_NAMES = sorted(name for name, value in PUBLIC.items() if inspect.isfunction(value))


def test_every_loss_is_in_the_table_once():
    losses = {name for name in jaxloss.__all__ if name.endswith("_loss")} - {"sharded_loss"}
    rows = Counter(row.function.__name__ for row in EVERY_LOSS)
    missing = ", ".join(sorted(losses - {*rows}))
    where = "`LOSSES`, or to `WITHOUT_LABELS`, of tests/jaxloss/loss_table.py"
    assert not missing, f"add a row to {where}, such as loss_row(NAME, KIND), for {missing}"
    assert rows == Counter(losses)


def test_names_are_unique():
    for rows in (CASES, FUNCTIONS):
        assert len({row.name for row in rows}) == len(rows)
    assert len(set(jaxloss.__all__)) == len(jaxloss.__all__)


def test_nothing_else_is_public():
    undeclared = {
        name
        for name, value in vars(jaxloss).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    } - set(jaxloss.__all__)
    assert not undeclared - {"annotations"}


def sections(docstring: str) -> dict[str, str]:
    """The text under each heading of a Google-style docstring."""
    parts = re.split(r"^(Args|Returns|Raises|Example|References):$", docstring, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", FUNCTION_NAMES)
def test_docstring_and_annotations(name):
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    assert docstring.splitlines()[0].endswith(".")
    of_a_formula = name not in ("sharded_loss", "make_queue", "divided")
    assert (".. math::" in docstring) == of_a_formula
    found = sections(docstring)
    order = ("Args", "Returns", "Raises", "Example", "References")
    assert list(found) == [part for part in order if part in found]
    assert set(order) - set(found) <= ({"Raises"} if of_a_formula else {"References"})
    assert ">>>" in found["Example"]
    # The annotations must be resolvable, strings or not: tools read them.
    annotated = typing.get_type_hints(PUBLIC[name])
    for parameter in inspect.signature(PUBLIC[name]).parameters:
        assert re.search(rf"\b{parameter}\b", found["Args"]), parameter
        assert parameter in annotated, parameter
    assert "return" in annotated
    assert not of_a_formula or re.search(r"\[[ndC]", found["Args"])  # Shapes, as `[n, d]`.


def test_annotations_say_which_arrays_devices_divide():
    """Every array has dimensions: one without them would be copied to every device."""
    for name, function in PUBLIC.items():
        if not hasattr(function, "_result"):  # Not `divided`.
            continue
        hints = typing.get_type_hints(function)
        del hints["return"]
        for parameter, hint in hints.items():
            is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
            kinds = typing.get_args(hint) if is_union else (hint,)
            assert not {jax.Array, typing.Any}.intersection(kinds), (name, parameter)
            for kind in kinds:
                fields = getattr(kind, "_fields", ())
                assert not fields or {*fields} == dims_of(kind).keys(), (name, parameter)
        first = dims_of(function).get(next(iter(hints)), ("",))
        assert function._result == "replicated" or all(dims.lstrip("*")[0] == "n" for dims in first)


@over([*EVERY_LOSS, *FUNCTIONS])
def test_docstring_names_the_hyperparameters_with_a_range(row):
    """The package states the common errors, and a function only its own."""
    raises = sections(inspect.getdoc(row.function) or "").get("Raises", "")
    for name in dict(row.invalid):
        assert f"`{name}`" in raises, name
