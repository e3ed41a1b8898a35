"""The benchmark at small sizes: all forms of a loss are the same loss, and the tables hold them."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

from experiments.benchmark import accelerator, cases, cycles, dense_forms, measure, run
from experiments.benchmark.cases import CASES, Size
from experiments.benchmark.measure import TOLERANCE, disagreement, jax_program, torch_run
from experiments.benchmark.package_forms import PACKAGE
from experiments.benchmark.run import measure_case, run_benchmark, time_table
from experiments.benchmark.torch_forms import FORMS
from experiments.cli.main import main

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
    arrays = case.make_arrays(size, seed=1)
    ours = jax_program(case.loss, arrays, case.differentiable)(*arrays)
    assert len(jax.tree.leaves(ours)) == 1 + len(case.differentiable)
    assert all(np.any(result != 0) for result in jax.tree.leaves(ours))
    for form in filter(None, (case.optax, case.composition, dense_forms.FORMS.get(case.name))):
        results = jax_program(form, arrays, case.differentiable)(*arrays)
        assert max(disagreement(results, ours)) < TOLERANCE
    for form in filter(None, (FORMS[case.name], PACKAGE.get(case.name))):
        theirs = torch_run(form, arrays, case.differentiable)()
        assert max(disagreement(theirs, ours)) < TOLERANCE
    jax_program(case.floor.run, arrays, None)(*arrays)


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
    monkeypatch.setattr(measure, "TORCH", {"PyTorch eager": False})
    monkeypatch.setattr(run, "cores_of_others", lambda: 1.26)


def test_numbers_that_are_nan_disagree():
    (difference,) = disagreement([np.array([np.nan])], [np.array([1.0])])
    assert not difference <= TOLERANCE
    (difference,) = disagreement([np.array([0.0, 2.0])], [np.array([0.1, 2.0])])
    assert difference == pytest.approx(0.05)


@pytest.mark.long
def test_tables(quick, monkeypatch, capsys):
    monkeypatch.setattr(run, "CASES", tuple(BY_NAME.values()))
    text = run_benchmark(["softmax", "nca"], "paper", command="a command", allow_load=True)
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert text.startswith("**Other programs used 1.3 of ")
    assert "a command" in text
    parts = text.split("### ")[1:]
    titles = [part.partition("\n")[0] for part in parts]
    assert titles == ["The size of the paper"]
    table = [line for line in parts[0].splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in table] == ["loss", ":--", "softmax", "nca"]
    headings = [cell.strip() for cell in table[0].strip("|").split("|")]
    columns = ["loss", "size", "jaxloss (ms)", "best", "PyTorch eager", "optax", "floor"]
    assert headings == [*columns, "jaxloss (MB)", "optax (MB)", "gradients (MB)"]
    assert table[3].count("–") == 2
    assert "differs" not in text


@pytest.mark.long
def test_a_form_that_disagrees_or_does_not_compile_is_not_timed(quick, monkeypatch):
    def no_compiler(*arrays):
        raise RuntimeError("no compiler\nand a long explanation")

    monkeypatch.setitem(FORMS, "sigmoid", FORMS["softmax"])
    row = measure_case(BY_NAME["sigmoid"], "paper", SMALL)
    assert row.forms["PyTorch eager"]["failure"].startswith("differs by")
    for name in ("jaxloss", "optax", "floor"):
        assert row.forms[name]["median_ms"] >= row.forms[name]["fastest_ms"] > 0
    assert "differs by" in "".join(time_table([row]))

    monkeypatch.setattr(measure, "TORCH", {"torch.compile": True})
    monkeypatch.setitem(FORMS, "sigmoid", no_compiler)
    row = measure_case(BY_NAME["sigmoid"], "paper", SMALL)
    assert row.forms["torch.compile"]["failure"].endswith("no compiler")


def test_a_busy_machine_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(run, "cores_of_others", lambda: 0.5)
    assert main(["benchmark", "softmax"]) == 2
    assert "other programs use 0.5 of" in capsys.readouterr().err
    assert main(["benchmark", "nca", "lifted"]) == 2
    assert "lifted" in capsys.readouterr().err


# On an accelerator ----

WITHOUT = ("pandas", "psutil", "tabulate", "tyro", "tensorflow_datasets", "grain", "etils")
TINY = {"classifier": Size(32, 16, 40), "arcface": Size(32, 16, 40)}


def tiny(name: str, dtype: cases.Dtype) -> accelerator.Problem:
    return accelerator.Problem(BY_NAME[name], TINY.get(name, Size(32, 16, 4)), dtype)


@pytest.mark.long
def test_rows_of_an_accelerator(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(accelerator, "_TURNS", 3)
    monkeypatch.setattr(measure, "TORCH", {"PyTorch eager": False})
    monkeypatch.setitem(FORMS, "arcface", lambda *arrays: 1 / 0)
    problems = [tiny("nca", "bfloat16"), tiny("arcface", "float32"), tiny("classifier", "mixed")]
    output = tmp_path / "table.md"
    text = accelerator.run_accelerator(problems, command="the command", seconds=60, output=output)
    assert output.read_text(encoding="utf-8") == text
    printed = capsys.readouterr().out
    assert printed.endswith(f"{text}\n")
    assert printed.count("| nca | 32 × 16 × 4 | bfloat16 |") == 1 + 1 + 1 + 2  # Then the tables.
    assert "the command" in text
    assert "3 of 3 rows" in text
    (failed,) = (line for line in text.splitlines() if "ZeroDivisionError" in line)
    assert failed.startswith("| arcface | 32 × 16 × 40 | float32 |")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("nca", "float32"), pytest.param("info_nce", "bfloat16", marks=pytest.mark.long)],
)
def test_errors_on_an_accelerator(name, dtype, monkeypatch):
    """The reference is the dense form in float64: all other forms are compared with it."""
    monkeypatch.setattr(accelerator, "_TURNS", 1)
    monkeypatch.setattr(measure, "TORCH", {"PyTorch eager": False})
    (row,) = accelerator.measured_rows([tiny(name, dtype)], 60)
    assert not row.failures
    forms = {"jaxloss", "dense JAX", "PyTorch eager"}
    assert row.milliseconds.keys() == forms | {"bare products"}
    allowed = {"float32": (1e-4, 1e-3), "bfloat16": (0.2, 0.6)}[dtype]
    for form in forms:
        value, *gradients = row.errors["random"][form]
        assert value < allowed[0], form
        assert max(gradients) < allowed[1], form
    value, *gradients = row.errors["clustered"]["jaxloss"]
    assert value < 1e-3
    assert max(gradients) < 0.02


def test_a_form_that_fails_while_it_is_timed_costs_the_others_nothing(monkeypatch):
    monkeypatch.setattr(accelerator, "_TURNS", 1)
    monkeypatch.setattr(measure, "TORCH", {"PyTorch eager": False})
    form, calls = FORMS["classifier"], iter([True] * 2)
    monkeypatch.setitem(FORMS, "classifier", lambda *arrays: next(calls) and form(*arrays))
    (row,) = accelerator.measured_rows([tiny("classifier", "mixed")], 60)
    assert row.failures.keys() == {"PyTorch eager"}
    assert row.milliseconds.keys() == {"jaxloss", "bare products", "dense JAX"}


def test_arrays_that_pytorch_cannot_read_cost_the_others_nothing(monkeypatch):
    monkeypatch.setattr(accelerator, "_TURNS", 1)

    def fail(*arguments, **options):
        raise RuntimeError("no dlpack")

    monkeypatch.setattr(accelerator, "torch_run", fail)
    (row,) = accelerator.measured_rows([tiny("classifier", "mixed")], 60)
    assert set(row.failures.values()) == {"RuntimeError: no dlpack"}
    assert row.failures.keys() == {"torch.compile", "PyTorch eager"}
    assert row.milliseconds.keys() == {"jaxloss", "bare products", "dense JAX"}


def test_rows_that_would_start_too_late_are_left_out():
    assert list(accelerator.measured_rows([tiny("nca", "float32")], -1)) == []


def test_bare_products_in_parts(monkeypatch):
    """They need not hold all scores at once."""
    problems = [tiny("info_nce", "float32"), tiny("nca", "float32")]
    arrays = [problem.case.make_arrays(problem.size) for problem in problems]
    runs = [problem.case.floor.run for problem in problems]
    whole = [run(*some) for run, some in zip(runs, arrays, strict=True)]
    monkeypatch.setattr(cases, "_MOST_SCORES", 32 * 32 // 4)
    parts = [run(*some) for run, some in zip(runs, arrays, strict=True)]
    assert jax.tree.leaves(parts)[0].shape == (4, 8, 16)
    for got, expected in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-5, atol=1e-3)


def test_an_accelerator_needs_no_other_packages():
    code = f"""
import sys
sys.modules.update(dict.fromkeys({(*WITHOUT, "torch", "pytorch_metric_learning")}))
from experiments.benchmark import accelerator
from experiments.benchmark.__main__ import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--minutes" in done.stdout


COMPILED = """\
HloModule jit_f

%fused_product (p: bf16[8,4], q: bf16[4,8]) -> f32[8,8] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %c = f32[8,8]{1,0} convolution(%p, %q), dim_labels=bf_io->bf
}

%cond (t: (s32[], f32[8,8])) -> pred[] {
  %trips = s32[]{:T(128)} constant(3)
  %t = (s32[], f32[8,8]{1,0:T(8,128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{:T(512)} compare(%at, %trips), direction=LT
}

%body (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t = (s32[], f32[8,8]{1,0}) parameter(0)
  %fusion.1 = f32[8,8]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused_product, \
metadata={op_name="jit(f)/while/body/dot_general"}, backend_config={"estimated_cycles":"500"}
  ROOT %r = (s32[], f32[8,8]{1,0}) tuple(%i, %fusion.1)
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %while = (s32[], f32[8,8]{1,0:T(8,128)}) while(%t), condition=%cond, body=%body
  ROOT %exp = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%e, \
backend_config={"estimated_cycles":"20"}
}
"""


def test_cycles_are_added_up_over_the_trips_of_loops():
    found = cycles.operations(COMPILED)
    assert [(it.cycles, it.trips, it.is_product) for it in found] == [
        (500, 3, True),
        (20, 1, False),
    ]
    assert found[0].of == "jit(f)/while/body/dot_general"
    assert cycles.total(found) == 1520


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--topology", "v99:1x1"], "'v99:1x1' cannot be described"), (["nac"], "unknown loss 'nac'")],
)
def test_cycles_of_what_is_not_there(options, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        cycles.main(options)
    assert said in capsys.readouterr().err
