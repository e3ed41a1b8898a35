"""How many pairs a paired comparison needs."""

import numpy as np
import pytest

from experiments.cli.main import main
from experiments.reporting.grid import write_grid
from experiments.reporting.power import paired_power, pairs_needed, smallest_effect
from experiments.reporting.results import Axis, Comparison
from tests.experiments.test_grid_report import ERROR, METHODS, run, runs_of, squeezed


@pytest.mark.parametrize(
    ("ratio", "power", "pairs"),
    # Cohen's d of 0.5, 0.8 and 1.0 at 5 %, two-sided: tables of the paired t-test (G*Power).
    [(0.5, 0.8, 34), (0.5, 0.9, 44), (0.8, 0.9, 19), (1.0, 0.8, 10)],
)
def test_textbook_numbers_of_pairs(ratio, power, pairs):
    assert pairs_needed(ratio * 0.7, 0.7, power) == pairs
    assert pairs_needed(-ratio * 0.7, 0.7, power) == pairs


def test_power_has_no_gaps():
    assert paired_power(5, 0, 1) == pytest.approx(0.05)
    for pairs in (2, 3, 8, 500):
        powers = [paired_power(pairs, effect, 1) for effect in np.linspace(0, 12, 200)]
        assert np.isfinite(powers).all()
        assert (np.diff(powers) >= -1e-12).all()
    assert pairs_needed(100, 1, 0.9) == 2


@pytest.mark.parametrize("pairs", [2, 3, 10])
def test_the_smallest_effect_is_found_just_so(pairs):
    effect = smallest_effect(pairs, 0.3, 0.9)
    assert paired_power(pairs, effect, 0.3) == pytest.approx(0.9)
    assert pairs_needed(1.001 * effect, 0.3, 0.9) == pairs


def printed(capsys, *words):
    assert main(["power", *words]) == 0
    return squeezed(capsys.readouterr().out)


def test_the_command_prints_the_numbers(capsys):
    text = printed(capsys, "--deviation", "0.9", "--effect", "1.3", "--pairs", "6", "8")
    assert f"{pairs_needed(1.3, 0.9, 0.8)} for 80 %, {pairs_needed(1.3, 0.9, 0.9)} for 90 %" in text
    assert (
        f"| 8 | {smallest_effect(8, 0.9, 0.8):.3g} | {smallest_effect(8, 0.9, 0.9):.3g} |" in text
    )
    assert "needed" not in printed(capsys, "--deviation", "0.9")


def written(directory, comparison):
    values = {"softmax": (0.137, 0.126, 0.140), "loose": (0.121, 0.124, 0.121)}
    runs = runs_of({(m, n): of for m, of in values.items() for n in ("5", "50")}, ERROR)
    axes = [METHODS, Axis("n", ("5", "50"))]
    write_grid(directory, axes, runs, title="T", command="c", comparison=comparison)


@pytest.fixture
def directory(tmp_path):
    written(tmp_path, Comparison(("Method", "softmax")))
    return tmp_path


def test_a_grid_gives_the_deviation(directory, capsys):
    deviation = float(np.std([-1.6, -0.2, -1.9], ddof=1))
    expected = (
        f"| loose, 5 | error (points) ↓ | 3 | -1.23 | {deviation:.2f} | "
        f"{smallest_effect(3, deviation, 0.8):.2f} | {pairs_needed(1, deviation, 0.8)} | "
        f"{pairs_needed(1, deviation, 0.9)} |"
    )
    assert expected in printed(capsys, "--directory", str(directory), "--effect", "1")
    # Runs that do not differ need two pairs. The two values of n have the same runs here.
    written(directory, Comparison(("n", "5")))
    text = printed(capsys, "--directory", str(directory), "--effect", "1")
    assert "| loose, 50 | error (points) ↓ | 3 | +0.00 | 0.00 | 0.00 | 2 | 2 |" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either --deviation or --directory"),
        (["--deviation", "0"], "deviation must be above 0, got 0"),
        (["--deviation", "1", "--effect", "0"], "effect must not be 0"),
        (["--deviation", "1", "--pairs", "1"], "pairs must be at least 2"),
        (["--directory", "nowhere"], "nowhere/table.json is not the table of a grid"),
    ],
)
def test_what_cannot_be_computed_is_refused(words, message, capsys):
    assert main(["power", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_grid_without_pairs_is_refused(directory, capsys):
    write_grid(directory, [METHODS], [run(("loose",), 0, (ERROR, 1))], title="T", command="c")
    assert main(["power", "--directory", str(directory)]) == 2
    assert "no differences of two pairs of runs; give sweep or" in capsys.readouterr().err
