"""How many pairs a paired comparison needs."""

import numpy as np
import pytest

from experiments.cli.main import main
from experiments.reporting.power import paired_power, pairs_needed, smallest_effect
from tests.experiments.test_grid_report import squeezed


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


def test_the_command_prints_the_numbers(capsys):
    def printed(*words):
        assert main(["power", "--deviation", "0.9", *words]) == 0
        return squeezed(capsys.readouterr().out)

    text = printed("--effect", "1.3", "--pairs", "6", "8")
    assert f"{pairs_needed(1.3, 0.9, 0.8)} for 80 %, {pairs_needed(1.3, 0.9, 0.9)} for 90 %" in text
    smallest = [f"{smallest_effect(8, 0.9, power):.3g}" for power in (0.8, 0.9)]
    assert f"| 8 | {' | '.join(smallest)} |" in text
    assert "needed" not in printed()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0", "--deviation must be above 0, got 0"),
        ("1 --pairs 1", "--pairs must be numbers of at least 2, got (1,)"),
    ],
)
def test_what_cannot_be_computed_is_refused(words, message, capsys):
    assert main(["power", "--deviation", *words.split()]) == 2
    assert message in capsys.readouterr().err
