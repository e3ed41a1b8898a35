"""The benchmark at toy sizes: all forms of a loss are the same loss, and the tables hold them."""

import json

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.benchmark.cases import CASES
from experiments.benchmark.measure import disagreement, jax_form, torch_form
from experiments.benchmark.run import SOLVERS, TOLERANCE, run_benchmark, select
from experiments.benchmark.torch_forms import TORCH_FORMS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_forms_agree(case):
    arrays = case.make_arrays(np.random.default_rng(1), case.size("toy"))
    ours = jax_form(case.loss, arrays, case.differentiable)
    theirs = torch_form(TORCH_FORMS[case.name], arrays, case.differentiable)
    assert ours.results is not None
    assert theirs.results is not None
    assert len(ours.results) == 1 + len(case.differentiable)
    assert all(np.any(result != 0) for result in ours.results)
    assert disagreement(theirs.results, ours.results) < TOLERANCE
    for rival in case.rivals.values():
        results = jax_form(rival, arrays, case.differentiable).results
        assert results is not None
        assert disagreement(results, ours.results) < TOLERANCE
    assert jax_form(case.floor, arrays, None).results is None
    assert theirs.temporary_bytes is not None


def test_another_formula_disagrees():
    case = next(case for case in CASES if case.name == "sigmoid")
    arrays = case.make_arrays(np.random.default_rng(1), case.size("toy"))
    ours = jax_form(case.loss, arrays, case.differentiable).results
    theirs = torch_form(TORCH_FORMS["softmax"], arrays, case.differentiable).results
    assert ours is not None
    assert theirs is not None
    assert disagreement(theirs, ours) > TOLERANCE


def test_tables(tmp_path):
    from experiments.benchmark.report import write_benchmark

    lines = []
    report = run_benchmark(
        ["softmax", "nca", *SOLVERS],
        ["toy"],
        repeats=2,
        compiled=False,
        command="a command",
        say=lines.append,
    )
    assert len(lines) == 4
    rows = {row["loss"]: row["forms"] for row in report["losses"]}
    assert set(rows["softmax"]) == {"jaxloss", "eager", "optax", "floor"}
    assert {"jaxloss", "eager", "floor"} <= set(rows["nca"])
    for form in (form for forms in rows.values() for form in forms.values()):
        assert form["median_ms"] >= form["fastest_ms"] > 0
        assert form["spread_ms"] >= 0
    for forms in rows.values():
        assert forms["eager"]["disagreement"] < TOLERANCE
    markdown, as_json, picture = write_benchmark(tmp_path, report)
    text = markdown.read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table if line.startswith("| nca")} >= {len(_columns(text))}
    assert "a command" in text
    assert json.loads(as_json.read_text(encoding="utf-8")) == report
    assert picture.read_bytes().startswith(b"\x89PNG")


def _columns(text):
    head = next(line for line in text.splitlines() if line.startswith("| loss"))
    return head.split("|")[1:]


def test_select_and_command(capsys):
    assert [case.name for case in select(["nca"])[0]] == ["nca"]
    assert select([])[1] == SOLVERS
    assert main(["benchmark", "--loss", "triplet"]) == 2
    assert "triplet" in capsys.readouterr().err
