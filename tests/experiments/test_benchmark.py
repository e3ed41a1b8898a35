"""The benchmark at small sizes: all forms of a loss are the same loss, and the tables hold them."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.benchmark import measure, run, solvers, steps
from experiments.benchmark.cases import CASES, PAIRS_IN_BLOCKS, OwnSize, Size
from experiments.benchmark.measure import disagreement, jax_form, torch_form
from experiments.benchmark.report import write_benchmark
from experiments.benchmark.run import SOLVERS, TOLERANCE, run_benchmark, select
from experiments.benchmark.torch_forms import TORCH_FORMS
from experiments.config import ModelConfig

SMALL = Size(24, 12, 4)
TINY_TRAININGS = (
    steps.Training(ModelConfig(widths=(4, 4, 4, 80)), (16, 16, 1), 16),
    steps.Training(
        ModelConfig(backbone="resnet12", widths=(4, 4, 8, 80), pooling="mean"), (16, 16, 3), 8
    ),
)


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
    for function in filter(None, (case.optax, case.composition)):
        results = jax_form(function, arrays, case.differentiable).results
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
    sizes = {case.name: (*case.sizes("paper"), *case.sizes("large")) for case in CASES}
    assert sizes["softmax"] == (Size(256, 0, 1000), Size(256, 0, 10_000))
    assert sizes["nca"] == (Size(512, 640, 64), Size(5120, 640, 64))


def test_tables(tmp_path, monkeypatch):
    small = tuple(dataclasses.replace(case, paper=SMALL) for case in CASES)
    monkeypatch.setattr(run, "CASES", small)
    monkeypatch.setitem(solvers.SPREADS, "paper", ((8, 4, 50, 20),))
    monkeypatch.setitem(solvers.ASSIGNMENTS, "paper", ((6, 8, 4),))
    monkeypatch.setitem(steps.TRAININGS, "paper", TINY_TRAININGS[:1])
    monkeypatch.setattr(run, "cores_of_others", lambda: 1.26)
    lines = []
    report = run_benchmark(
        ["softmax", "nca", *SOLVERS],
        ["paper"],
        repeats=2,
        compiled=False,
        command="a command",
        allow_load=True,
        say=lines.append,
    )
    assert len(lines) == 5
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
    assert text.startswith("**Other programs used 1.3 of ")
    assert len(parts) == 5
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
    forms = run.measure_case(case, "paper", SMALL, losses, repeats=1)["forms"]
    assert forms["eager"]["failure"].startswith("differs by")
    assert "no compiler" in forms["compile"]["failure"]
    assert "\n" not in forms["compile"]["failure"]
    assert forms["optax"]["fastest_ms"] > 0


def test_select_and_command(capsys):
    assert [case.name for case in select(["nca"])[0]] == ["nca"]
    assert select([])[1] == ["uniform_prototypes", "assign_prototypes", "steps"]
    assert main(["benchmark", "nca", "triplet"]) == 2
    assert "triplet" in capsys.readouterr().err


def test_a_busy_machine_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(run, "cores_of_others", lambda: 0.5)
    assert main(["benchmark", "softmax"]) == 2
    assert "other programs use 0.5 of" in capsys.readouterr().err


def test_the_cores_of_others_are_those_that_are_not_idle(monkeypatch):
    readings = iter([10.0, 13.0])
    monkeypatch.setattr(measure, "_WATCHED_SECONDS", 0.5)
    monkeypatch.setattr(measure, "_busy_seconds", lambda: next(readings))
    assert measure.cores_of_others() == pytest.approx(6.0, rel=0.3)
    monkeypatch.undo()
    others = measure.cores_of_others()
    assert others is None or others >= 0


def test_a_size_of_a_single_loss():
    own = OwnSize(Size(32, 6, 4), ("eager",), turns=1, floor=PAIRS_IN_BLOCKS)
    case = next(case for case in CASES if case.name == "nca")
    case = dataclasses.replace(case, own_sizes=(own,), optax=case.loss)
    assert case.sizes("own") == (own.size,)
    losses = {"eager": TORCH_FORMS, "compile": TORCH_FORMS}
    row = run.measure_case(case, "own", own.size, losses, repeats=50, own=own)
    assert set(row["forms"]) == {"jaxloss", "eager", "floor"}
    assert row["forms"]["eager"]["calls"] <= 1 + measure._MOST_CALLS
    assert row["products"] == PAIRS_IN_BLOCKS.text


@pytest.mark.parametrize("training", TINY_TRAININGS, ids=lambda t: t.model.backbone)
def test_steps_agree_with_pytorch(training):
    row = steps.measure_training(training, repeats=1)
    assert row["forms"]["jaxloss"]["fastest_ms"] > 0
    assert row["forms"]["PyTorch"]["fastest_ms"] > 0
    assert float(row["result"]["images/s"].replace(",", "")) > 0


def test_another_step_is_not_timed(monkeypatch):
    other = dataclasses.replace(steps._OPTIMIZER, learning_rate=0.2)
    parts = steps.build(TINY_TRAININGS[0])
    monkeypatch.setattr(steps, "_OPTIMIZER", other)
    monkeypatch.setattr(steps, "build", lambda training: parts)
    row = steps.measure_training(TINY_TRAININGS[0], repeats=1)
    assert row["forms"]["PyTorch"]["failure"].startswith("differs by")
    assert row["result"]["images/s, PyTorch"] is None
