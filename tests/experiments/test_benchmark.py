"""The benchmark at small sizes: all forms of a loss are the same loss, and the table holds them."""

import dataclasses
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from experiments.benchmark import cases, cycles, measure, run
from experiments.benchmark.cases import (
    CASES,
    FLOORS,
    FOR_ACCELERATORS,
    Problem,
    Size,
    problems_of,
)
from experiments.benchmark.measure import TOLERANCE, disagreement, jax_program, torch_run
from experiments.benchmark.precision import errors, setting, tpu_on_a_cpu
from experiments.benchmark.run import measure_problem, run_benchmark, time_table
from experiments.benchmark.torch_forms import FORMS, package_forms
from experiments.core.errors import ConfigError

SMALL = Size(24, 12, 4)
BY_NAME = {case.name: case for case in CASES}
OFTEN = {"softmax", "nca", "direct_sum", "group_softmax", "two_way", "sigmoid_contrastive"}


def test_a_difference_is_relative_to_the_largest_number_and_nan_differs():
    assert not disagreement([np.array([np.nan])], [np.array([1.0])]) <= TOLERANCE
    found = disagreement([np.array([0.0, 2.0]), np.ones(1)], [np.array([0.1, 2.0]), np.ones(1)])
    assert found == pytest.approx(0.05)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in OFTEN else pytest.mark.long)
        for case in (*CASES, *FOR_ACCELERATORS)
    ],
)
def test_all_forms_agree(case):
    # More classes than dimensions only where the paper has them.
    size = Size(24, 4, 12) if case.name == "spectral_sum" else SMALL
    arrays = case.make_arrays(size, seed=1)
    ours = jax_program(case.loss, arrays, case.differentiable)(*arrays)
    assert len(jax.tree.leaves(ours)) == 1 + len(case.differentiable)
    assert all(np.any(result != 0) for result in jax.tree.leaves(ours))
    for form in filter(None, (case.optax, case.composition)):
        results = jax_program(form, arrays, case.differentiable)(*arrays)
        assert disagreement(results, ours) < TOLERANCE
    for form in filter(None, (FORMS.get(case.name), package_forms().get(case.name))):
        theirs = torch_run(form, arrays, case.differentiable)()
        assert disagreement(theirs, ours) < TOLERANCE
    jax_program(FLOORS[case.floor], arrays, ())(*arrays)


@pytest.fixture
def quick(monkeypatch):
    """Two turns, no torch.compile, and the threads that PyTorch had."""
    number = torch.get_num_threads()
    monkeypatch.setattr(measure, "TURNS", 2)
    monkeypatch.setattr(run, "TORCH", {"PyTorch eager": False})
    monkeypatch.setattr(run, "cores_of_others", lambda cores: 1.26)
    yield
    torch.set_num_threads(number)


def tiny(name: str, dtype: cases.Dtype = "float32", **changes) -> Problem:
    return Problem(dataclasses.replace(BY_NAME[name], **changes), SMALL, dtype, "paper")


def test_the_table_has_a_row_for_each_loss_and_a_column_for_each_form(quick, tmp_path):
    output, problems = tmp_path / "table.md", [tiny("softmax"), tiny("nca", "bfloat16")]
    text = run_benchmark(problems, command="a command", output=output, allow_load=True)
    assert output.read_text(encoding="utf-8") == text
    assert text.startswith("**Other programs used 1.3 of ")
    assert "2 of 2 rows" in text
    headings, _, softmax, nca = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    )
    columns = ["loss", "size", "dtype", "jaxloss (ms)", "best", "PyTorch eager", "optax", "floor"]
    assert headings == [*columns, "jaxloss (MB)", "optax (MB)", "gradients (MB)"]
    assert softmax[:3] == ["softmax", "24 × 12 × 4", "float32"]
    assert nca[:3] == ["nca", "24 × 12 × 4", "bfloat16"]
    assert (nca[6], nca[9]) == ("–", "–")  # optax has no NCA.
    assert "–" not in softmax
    assert run_benchmark(problems, command="", seconds=-1, allow_load=True) == ""
    with pytest.raises(ConfigError, match=r"other programs use 1\.3 of .* measure with --allow"):
        run_benchmark(problems, command="")


def test_a_form_that_differs_or_fails_is_not_timed_and_costs_the_others_nothing(quick, monkeypatch):
    monkeypatch.setitem(FORMS, "sigmoid", FORMS["softmax"])
    row = measure_problem(tiny("sigmoid"), torch)
    assert row.forms["PyTorch eager"]["failure"].startswith("differs by")
    for name in ("jaxloss", "optax", "floor"):
        assert row.forms[name]["median_ms"] > 0
    assert "differs by" in "".join(time_table([row]))

    calls = iter([True] * 2)  # The third call is a turn.
    form = FORMS["sigmoid_of_targets"]
    monkeypatch.setitem(FORMS, "sigmoid", lambda *arrays: next(calls) and form(*arrays))
    row = measure_problem(tiny("sigmoid"), torch)
    assert row.forms["PyTorch eager"]["failure"].startswith("StopIteration")
    assert all("ratio" in row.forms[name] for name in ("jaxloss", "optax", "floor"))

    def no_compiler(*arrays):
        raise RuntimeError("no compiler\nand a long explanation")

    row = measure_problem(tiny("sigmoid", loss=no_compiler), None)
    assert row.forms["jaxloss"]["failure"].endswith("no compiler")
    assert row.forms.keys() == {"jaxloss", "optax", "floor"}
    assert not any("ratio" in form for form in row.forms.values())
    assert "no compiler" in "".join(time_table([row]))


def test_the_rows_of_a_group():
    assert [row.size for row in problems_of(["nca"], "large")] == [Size(5120, 640, 64)]
    assert [row.size for row in problems_of(["softmax"], "large")] == [Size(256, 0, 10_000)]
    assert {row.case.name for row in problems_of([], "own")} == {"nca", "classifier"}
    assert {row.group for row in problems_of(["nca"], "all")} == {"paper", "large", "own"}
    rows = problems_of(["classifier"], "accelerator", "bfloat16")
    assert [row.size.C for row in rows] == [100_000, 10_000, 1_000_000]
    (row,) = problems_of(["assign_prototypes"], "accelerator", "float32")
    assert row.cells() == ["assign_prototypes", "512 × 1,000", "float32"]
    assert cycles.is_medium(row)


def test_bare_products_in_parts(monkeypatch):
    """They need not hold all scores at once."""
    some = [BY_NAME["info_nce"], BY_NAME["nca"]]
    arrays = [case.make_arrays(Size(32, 16, 4)) for case in some]
    whole = [FLOORS[case.floor](*of) for case, of in zip(some, arrays, strict=True)]
    monkeypatch.setattr(cases, "_MOST_SCORES", 32 * 32 // 4)
    parts = [FLOORS[case.floor](*of) for case, of in zip(some, arrays, strict=True)]
    assert jax.tree.leaves(parts)[0].shape == (4, 8, 16)
    for got, expected in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-5, atol=1e-3)


COMPILED = """\
HloModule jit_f

%fused_product (p: bf16[8,4], q: bf16[4,8]) -> f32[8,8] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %c = f32[8,8]{1,0} convolution(%p, %q), dim_labels=bf_io->bf
}

%cond (t: (s32[], f32[8,8])) -> pred[] {
  %trips = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[]{:T(512)} compare(%at, %trips), direction=LT
}

%body (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %fusion.1 = f32[8,8]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused_product, \
metadata={op_name="jit(f)/while/body/dot_general"}, backend_config={"estimated_cycles":"500"}
  ROOT %r = (s32[], f32[8,8]{1,0}) tuple(%i, %fusion.1)
}

%not_yet (t: (pred[], f32[8,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %few = pred[]{:T(512)} compare(%at, %limit), direction=LT
  ROOT %go = pred[]{:T(512)} and(%few, %wanted)
}

%skip (t: f32[8,8]) -> f32[8,8] {
  ROOT %t = f32[8,8]{1,0} parameter(0)
}

%work (t: f32[8,8]) -> f32[8,8] {
  ROOT %w = f32[8,8]{1,0} fusion(%t), kind=kLoop, calls=%e, \
backend_config={"estimated_cycles":"100"}
}

%search (t: (pred[], f32[8,8])) -> (pred[], f32[8,8]) {
  %either = f32[8,8]{1,0} conditional(%p, %a, %b), branch_computations={%skip, %work}
  %while.1 = (s32[], f32[8,8]{1,0:T(8,128)}) while(%t), condition=%cond, body=%factor
  ROOT %r = (pred[], f32[8,8]{1,0}) tuple(%i, %while.1)
}

%factor (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %custom-call = f32[8,8]{1,0} custom-call(%a), custom_call_target="Cholesky"
  ROOT %sub = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%e, \
backend_config={"estimated_cycles":"9"}
}

%fused_rows (p: f32[8,8], q: s32[8]) -> f32[8,8] {
  ROOT %g = f32[8,8]{1,0} gather(%p, %q), slice_sizes={1,8}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %seldom = f32[8,8]{1,0} conditional(%p, %a, %b), branch_computations={%work, %skip}
  %room = f32[8,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %while.2 = (pred[], f32[8,8]{1,0:T(8,128)}) while(%t), condition=%not_yet, body=%search
  %rows = f32[8,8]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused_rows
  %while = (s32[], f32[8,8]{1,0:T(8,128)}) while(%t), condition=%cond, body=%body
  ROOT %exp = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%e, \
backend_config={"estimated_cycles":"20"}
}
"""


def test_cycles_are_added_up_over_the_trips_of_loops():
    found = cycles.operations(COMPILED)
    assert [(it.cycles, it.trips, it.is_product) for it in found if not it.unknown] == [
        (100, 1, False),
        (9, 3, False),
        (500, 3, True),
        (20, 1, False),
    ]
    assert found[4].of == "jit(f)/while/body/dot_general"
    assert cycles.total(found) == 1647


def test_a_loop_that_depends_on_the_numbers_counts_once_and_what_has_no_estimate_is_named():
    found = cycles.operations(COMPILED)
    assert cycles.total(it for it in found if it.in_open_loop) == 127
    assert cycles.unknown(found) == "3 Cholesky, 1 gather"


def _with_a_tpus_products():
    """Of a product, errors by JAX's switch, beside one of bfloat16 numbers; and those of NCA."""
    a, b = jax.random.normal(jax.random.key(0), (2, 64, 64))
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    low = np.matmul(*(np.asarray(jnp.asarray(x, "bfloat16"), np.float64) for x in (a, b)))
    found = {"low": disagreement(low, expected)}
    with tpu_on_a_cpu():
        for switch in ("bfloat16", "high", "highest"):
            with setting(switch):
                found[switch] = disagreement(jax.jit(jnp.matmul)(a, b), expected)
    of_nca = errors(tiny("nca", paper=SMALL), ["", "high", "bfloat16"])
    return found, [gradient for _, gradient in of_nca]


def test_errors_of_the_settings():
    """In a process of its own, which keeps these products."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found, of_nca = pool.submit(_with_a_tpus_products).result()
    assert found["bfloat16"] == pytest.approx(found["low"], rel=1e-3)
    assert found["highest"] < 1e-6 < found["high"] < 3e-5
    assert of_nca[0] < of_nca[1] / 3 < of_nca[2] / 30 < 0.01
