"""The benchmark at small sizes: all forms of a loss are the same loss, and the tables hold them."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.benchmark import run, solvers
from experiments.benchmark.cases import CASES, Size
from experiments.benchmark.measure import disagreement, jax_form, torch_form
from experiments.benchmark.report import write_benchmark
from experiments.benchmark.run import TOLERANCE, run_benchmark, select
from experiments.benchmark.torch_forms import TORCH_FORMS

SMALL = Size(24, 12, 4)


def arrays_of(case):
    # More classes than dimensions only where the paper has them.
    size = Size(24, 4, 12) if case.name == "spectral_sum" else SMALL
    return case.make_arrays(np.random.default_rng(1), size)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_forms_agree(case):
    arrays = arrays_of(case)
    ours = jax_form(case.loss, arrays, case.differentiable)
    theirs = torch_form(TORCH_FORMS[case.name], arrays, case.differentiable)
    assert len(ours.results) == 1 + len(case.differentiable)
    assert all(np.any(result != 0) for result in ours.results)
    assert disagreement(theirs.results, ours.results) < TOLERANCE
    if case.optax:
        results = jax_form(case.optax, arrays, case.differentiable).results
        assert disagreement(results, ours.results) < TOLERANCE
    assert jax_form(case.floor.run, arrays, None).results == []
    assert theirs.temporary_bytes is not None


def test_another_formula_disagrees():
    case = next(case for case in CASES if case.name == "sigmoid")
    arrays = arrays_of(case)
    ours = jax_form(case.loss, arrays, case.differentiable).results
    theirs = torch_form(TORCH_FORMS["softmax"], arrays, case.differentiable).results
    assert disagreement(theirs, ours) > TOLERANCE
    assert not disagreement([np.full_like(part, np.nan) for part in ours], ours) <= TOLERANCE


def test_sizes():
    sizes = {case.name: (case.size("paper"), case.size("large")) for case in CASES}
    assert sizes["softmax"] == (Size(256, 0, 1000), Size(256, 0, 10_000))
    assert sizes["nca"] == (Size(512, 640, 64), Size(5120, 640, 64))


def test_tables(tmp_path, monkeypatch):
    small = tuple(dataclasses.replace(case, paper=SMALL) for case in CASES)
    monkeypatch.setattr(run, "CASES", small)
    monkeypatch.setitem(solvers.SPREADS, "paper", ((8, 4, 50, 20),))
    monkeypatch.setitem(solvers.ASSIGNMENTS, "paper", ((6, 8, 4),))
    lines = []
    report = run_benchmark(
        ["softmax", "nca", *solvers.SOLVERS],
        ["paper"],
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
    spread = report["uniform_prototypes"][0]["forms"]
    assert spread["PyTorch's loop"]["fastest_ms"] > 0
    assert all(row["agree"] for row in report["assign_prototypes"])
    markdown, as_json, picture = write_benchmark(tmp_path, report)
    text = markdown.read_text(encoding="utf-8")
    parts = text.split("### ")[1:]
    assert len(parts) == 4
    for part in parts:
        table = [line for line in part.splitlines() if line.startswith("| ")]
        assert len(table) > 1
    times = [line for line in parts[0].splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in times] == ["loss", "softmax", "nca"]
    assert len({line.count("|") for line in times}) == 1
    assert "a command" in text
    assert "with the same sum of cosines" in text
    assert json.loads(as_json.read_text(encoding="utf-8")) == report
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_form_that_disagrees_or_does_not_compile_is_not_timed():
    case = dataclasses.replace(next(c for c in CASES if c.name == "sigmoid"), paper=SMALL)
    wrong = {"sigmoid": TORCH_FORMS["softmax"]}

    def no_compiler(*arrays):
        raise RuntimeError("no compiler\nand a long explanation")

    losses = {"eager": wrong, "compile": {"sigmoid": no_compiler}}
    forms = run.measure_case(case, "paper", losses, repeats=1)["forms"]
    assert forms["eager"]["failure"].startswith("differs by")
    assert "no compiler" in forms["compile"]["failure"]
    assert "\n" not in forms["compile"]["failure"]
    assert forms["optax"]["fastest_ms"] > 0


def test_select_and_command(capsys):
    assert [case.name for case in select(["nca"])[0]] == ["nca"]
    assert select([])[1] == ["uniform_prototypes", "assign_prototypes"]
    assert main(["benchmark", "--loss", "triplet"]) == 2
    assert "triplet" in capsys.readouterr().err
