"""The benchmark at small sizes: all forms of a loss are the same loss, and the tables hold them."""

import dataclasses

import numpy as np
import pytest
import torch

from experiments.__main__ import main
from experiments.benchmark import measure, run, solvers
from experiments.benchmark.cases import CASES, Size
from experiments.benchmark.measure import TOLERANCE, disagreement, jax_form, torch_form
from experiments.benchmark.run import SOLVERS, measure_case, run_benchmark, time_table
from experiments.benchmark.torch_forms import PACKAGE

SMALL = Size(24, 12, 4)
BY_NAME = {case.name: dataclasses.replace(case, paper=SMALL, own=(SMALL,)) for case in CASES}


OFTEN = {"softmax", "nca", "direct_sum", "group_softmax", "two_way", "sigmoid_contrastive"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in OFTEN else pytest.mark.long)
        for case in CASES
    ],
)
def test_all_forms_agree(case):
    # More classes than dimensions only where the paper has them.
    size = Size(24, 4, 12) if case.name == "spectral_sum" else SMALL
    arrays = case.make_arrays(np.random.default_rng(1), size)
    ours = jax_form(case.loss, arrays, case.differentiable).results
    assert len(ours) == 1 + len(case.differentiable)
    assert all(np.any(result != 0) for result in ours)
    for form in filter(None, (case.torch, PACKAGE.get(case.name))):
        theirs = torch_form(form, arrays, case.differentiable, compiled=False).results
        assert disagreement(theirs, ours) < TOLERANCE
    for form in filter(None, (case.optax, case.composition)):
        results = jax_form(form, arrays, case.differentiable).results
        assert disagreement(results, ours) < TOLERANCE
    assert jax_form(case.floor.run, arrays, None).results == []


@pytest.fixture(autouse=True)
def threads_of_pytorch():
    """Those that the benchmark takes would slow down PyTorch in the tests of other files."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.fixture
def quick(monkeypatch):
    """Two turns, and no torch.compile."""
    monkeypatch.setattr(measure, "TURNS", 2)
    monkeypatch.setattr(run, "TORCH", {"PyTorch eager": False})
    monkeypatch.setattr(run, "cores_of_others", lambda: 1.26)


def test_numbers_that_are_nan_disagree():
    assert not disagreement([np.array([np.nan])], [np.array([1.0])]) <= TOLERANCE
    assert disagreement([np.array([0.0, 2.0])], [np.array([0.1, 2.0])]) == pytest.approx(0.05)


@pytest.mark.long
def test_tables(quick, monkeypatch, capsys):
    monkeypatch.setattr(run, "CASES", tuple(BY_NAME.values()))
    monkeypatch.setitem(solvers.SPREADS, "paper", ((8, 4, 50, 20, 0.3),))
    monkeypatch.setitem(solvers.ASSIGNMENTS, "paper", ((6, 4),))
    names = ["softmax", "nca", *SOLVERS]
    text = run_benchmark(names, ["paper"], command="a command", allow_load=True)
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert text.startswith("**Other programs used 1.3 of ")
    assert "a command" in text
    parts = text.split("### ")[1:]
    titles = [part.partition("\n")[0] for part in parts]
    assert titles == ["The size of the paper", "uniform_prototypes", "assign_prototypes"]
    table = [line for line in parts[0].splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in table] == ["loss", "softmax", "nca"]
    headings = [cell.strip() for cell in table[0].strip("|").split("|")]
    columns = ["loss", "size", "jaxloss (ms)", "best", "PyTorch eager", "optax", "floor"]
    assert headings == [*columns, "jaxloss (MB)", "optax (MB)", "gradients (MB)"]
    assert table[2].count("–") == 2
    assert "differs" not in text


@pytest.mark.long
def test_a_form_that_disagrees_or_does_not_compile_is_not_timed(quick, monkeypatch):
    def no_compiler(*arrays):
        raise RuntimeError("no compiler\nand a long explanation")

    another = dataclasses.replace(BY_NAME["sigmoid"], torch=BY_NAME["softmax"].torch)
    row = measure_case(another, "paper", SMALL)
    assert row.forms["PyTorch eager"]["failure"].startswith("differs by")
    for name in ("jaxloss", "optax", "floor"):
        assert row.forms[name]["median_ms"] >= row.forms[name]["fastest_ms"] > 0
    assert "differs by" in "".join(time_table([row]))

    monkeypatch.setattr(run, "TORCH", {"torch.compile": True})
    row = measure_case(dataclasses.replace(another, torch=no_compiler), "paper", SMALL)
    assert row.forms["torch.compile"]["failure"].endswith("no compiler")


def test_a_busy_machine_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(run, "cores_of_others", lambda: 0.5)
    assert main(["benchmark", "softmax"]) == 2
    assert "other programs use 0.5 of" in capsys.readouterr().err
    assert main(["benchmark", "nca", "lifted"]) == 2
    assert "lifted" in capsys.readouterr().err
