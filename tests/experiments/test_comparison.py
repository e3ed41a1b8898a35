"""Paired comparison of the runs of a grid."""

import json
from typing import Any

import numpy as np
import pytest
import scipy.stats

from experiments.contracts import Metric, PairMetrics, mean_and_interval
from experiments.reporting.grid import difference_figure, write_grid
from experiments.reporting.results import Axis, Comparison, interval, make_grid
from tests.experiments.test_grid_report import (
    ACCURACY,
    ERROR,
    METHODS,
    RATIO,
    assert_everything_is_within_the_axes,
    bar_of,
    diverged,
    run,
    runs_of,
    squeezed,
)

BASELINE = ("Method", "softmax")
SUBSETS = Axis("subset", ("0", "1", "2", "3"))


def written(directory, axes, runs, **options):
    paths = write_grid(directory, axes, runs, title="T", command="c", **options)
    return squeezed(paths[0].read_text()), json.loads(paths[1].read_text())


def difference_of(axes, runs):
    """The difference of `loose` from softmax, of runs with one metric."""
    grid = make_grid(axes, runs, comparison=Comparison(BASELINE))
    return grid.differences.droplevel("metric").loc["loose"]


def by_scipy(differences):
    """Half the width of the 95 % interval."""
    low, high = scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    return (high - low) / 2


def measure_sum(report, baseline):
    """The sum of the first metrics of two runs."""
    first, other = (r["metrics"][0]["value"] for r in (report, baseline))
    return [Metric("sum", "").measured(first + 10 * other)]


def test_metrics_of_a_run_and_the_baseline_are_columns_without_differences(tmp_path):
    methods = Axis("Method", ("softmax", "loose", "tight"))
    runs = runs_of({"softmax": (0.1, 0.2), "loose": (0.3, 0.5, 0.8), "tight": (0.4, 0.6)}, ERROR)
    runs.append(diverged(("softmax",), 2))
    pair_metrics = PairMetrics([Metric("sum", "")], measure_sum)
    options: Any = {"comparison": Comparison(BASELINE), "pair_metrics": pair_metrics}
    text, stored = written(tmp_path, [methods], runs, **options)
    table, _, of_differences = text.replace("*", "").partition("Difference from")
    assert "| Method | error (%) ↓ | sum |" in table
    # Of the pairs (0.3, 0.1) and (0.5, 0.2): 1.3 and 2.5.
    ends = ["| – |", "| 1.90 ± 0.85 (2 of 3) |", "| 2.00 ± 0.85 (2 of 3) |"]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert all(row.endswith(end) for row, end in zip(rows, ends, strict=True))
    assert "sum" not in of_differences.partition("- ")[0]
    assert {difference["metric"] for difference in stored["differences"]} == {"error"}
    # Without a baseline, there are none.
    assert "sum" not in written(tmp_path, [methods], runs, pair_metrics=pair_metrics)[0]


def test_differences_are_taken_seed_by_seed():
    rng = np.random.default_rng(0)
    shared, own = rng.normal(0.3, 0.1, 6), rng.normal(0, 0.01, (2, 6))
    softmax, loose = shared + own[0], shared + own[1] - 0.02
    difference = difference_of([METHODS], runs_of({"softmax": softmax, "loose": loose}, ERROR))
    assert difference["mean"] == pytest.approx(np.mean(loose - softmax), rel=1e-12)
    assert difference["interval"] == pytest.approx(by_scipy(loose - softmax), rel=1e-12)
    assert (difference["found"], difference["expected"]) == (6, 6)
    assert np.isnan(interval([0.3]))


def test_the_table_has_the_differences(tmp_path):
    values = {"softmax": (0.14, 0.12, 0.15), "loose": (0.12, 0.10, 0.125)}
    runs = runs_of(values, ERROR, RATIO)
    text, stored = written(tmp_path, [METHODS], runs, comparison=Comparison(BASELINE))
    assert "**Difference from Method = softmax**" in text
    assert "| Method | error (points) ↓ | discriminability |" in text
    assert "| loose | **−2.17 ± 0.72** | **−0.022 ± 0.007** |" in text
    assert (
        "mean ± 95 % interval (Student's t) over seeds 0, 1, 2, n = 3. Bold: the interval" in text
    )
    # Only differences have bold entries: the best mean need not be better than the baseline.
    assert "**Means**" in text
    assert "Bold: best" not in text
    error, _ = stored["differences"]
    assert (error["metric"], error["place"], error["n"]) == ("error", ["loose"], 3)
    assert error["values"] == pytest.approx([-0.02, -0.02, -0.025])
    assert stored["comparison"]["baseline"] == ["Method", "softmax"]
    # A run that diverged or is missing is counted.
    runs = runs_of({"softmax": (0.2, 0.2, 0.2, 0.2), "loose": (0.1, 0.12)}, ERROR)
    runs += [diverged(("loose",), 2)]
    text, stored = written(tmp_path, [METHODS], runs, comparison=Comparison(BASELINE))
    assert "| loose | −9.00 ± 12.71 (2 missing) |" in text
    assert [stored["differences"][0][key] for key in ("found", "expected")] == [2, 4]
    runs = [*runs_of({"softmax": (0.2,)}, ERROR), diverged(("loose",), 0)]
    text, _ = written(tmp_path, [METHODS], runs, comparison=Comparison(BASELINE))
    assert "| loose | – (1 missing) |" in text


def test_the_baseline_can_be_on_any_axis(tmp_path):
    axes = [METHODS, Axis("n", ("5", "50"))]
    values = {
        ("softmax", "5"): (0.4, 0.41),
        ("softmax", "50"): (0.2, 0.21),
        ("loose", "5"): (0.3, 0.31),
        ("loose", "50"): (0.25, 0.26),
    }
    runs = runs_of(values, ERROR, RATIO)
    text, _ = written(tmp_path, axes, runs, comparison=Comparison(("n", "50")))
    assert "**Difference from n = 50**: **error (points) ↓** against n" in text
    assert "| Method | 5 |" in text
    assert "| softmax | **+20.00 ± 0.00** |" in text
    assert "| loose | **+5.00 ± 0.00** |" in text
    text, _ = written(tmp_path, axes, runs, comparison=Comparison(BASELINE))
    assert "| loose | **−10.00 ± 0.00** | **+5.00 ± 0.00** |" in text


def subset_runs(lacking=()):
    """Three seeds on each of four subsets; returns the runs and the differences [subset, seed]."""
    rng = np.random.default_rng(3)
    values = 0.3 + rng.normal(0, 0.02, (2, 4, 1)) + rng.normal(0, 0.005, (2, 4, 3))
    runs = [
        run((label, subset), seed, (ERROR, float(values[m, s, seed])))
        for m, label in enumerate(METHODS.labels)
        for s, subset in enumerate(SUBSETS.labels)
        for seed in range(3)
        if (label, subset, seed) not in lacking
    ]
    return runs, values[1] - values[0]


def test_pooled_repetitions_are_clusters(tmp_path):
    axes, options = [METHODS, SUBSETS], {"comparison": Comparison(BASELINE, "subset")}
    runs, of_pairs = subset_runs()
    text, stored = written(tmp_path, axes, runs, **options)
    (difference,) = stored["differences"]
    # Twelve pairs, but four independent numbers.
    assert (difference["found"], len(difference["values"])) == (12, 4)
    assert difference["values"] == pytest.approx(of_pairs.mean(1))
    assert difference["interval"] == pytest.approx(by_scipy(of_pairs.mean(1)))
    assert "between runs of the same seed and subset, in percentage points for %: mean ± " in text
    assert "over subset 0, 1, 2, 3, each a mean of seeds 0, 1, 2, n = 4." in text
    grid = make_grid(axes, runs, comparison=Comparison(pairs_over="subset"))
    assert [axis.name for axis in grid.axes] == ["Method"]
    row = grid.means.loc["error", "loose"]
    assert (row["n"], row["found"], row["expected"]) == (4, 12, 12)
    # A cluster that lacks a run says so.
    text, stored = written(tmp_path, axes, subset_runs(lacking={("loose", "1", 2)})[0], **options)
    assert "(1 missing) |" in text
    assert "(11 of 12) |" in text
    assert stored["differences"][0]["values"][1] == pytest.approx(of_pairs[1, :2].mean())


def with_episodes(place, seed, accuracies, lists=("aa",)):
    results = [{"hash": name} for name in lists]
    found = run(place, seed, (ACCURACY, float(np.mean(accuracies))), results=results)
    return found._replace(episodes={ACCURACY.name: accuracies})


def test_one_seed_is_compared_episode_by_episode(tmp_path):
    rng = np.random.default_rng(5)
    hard = rng.uniform(0.3, 0.9, 400)
    softmax, loose = (hard + rng.normal(shift, 0.02, 400) for shift in (0, 0.01))
    runs = [with_episodes(("softmax",), 0, softmax), with_episodes(("loose",), 0, loose)]
    text, stored = written(tmp_path, [METHODS], runs, comparison=Comparison(BASELINE))
    _, half_width = mean_and_interval(loose - softmax)
    (difference,) = stored["differences"]
    assert difference["interval"] is None
    assert difference["own"] == pytest.approx(half_width)
    assert f"(episodes ± {100 * half_width:.2f}) |" in text
    # However narrow, this interval says nothing on other seeds: neither bold nor filled.
    assert difference["mean"] > half_width
    assert "| loose | +" in text
    grid = make_grid([METHODS], runs, comparison=Comparison(BASELINE))
    figure: Any = difference_figure(grid, title="T", command="c")
    assert_everything_is_within_the_axes(figure)
    # The bar is that of the episodes.
    assert np.ptp(bar_of(figure.axes[0])) == pytest.approx(200 * half_width)
    assert figure.axes[0].lines[1].get_markerfacecolor() == "white"


def test_several_seeds_have_both_intervals():
    accuracies = np.random.default_rng(6).uniform(0.3, 0.9, (2, 3, 50))
    runs = [
        with_episodes((label,), seed, accuracies[m, seed])
        for m, label in enumerate(METHODS.labels)
        for seed in range(3)
    ]
    difference, by_episode = difference_of([METHODS], runs), accuracies[1] - accuracies[0]
    assert difference["interval"] == pytest.approx(interval(by_episode.mean(1)))
    assert difference["own"] == pytest.approx(
        np.mean([mean_and_interval(row)[1] for row in by_episode])
    )


@pytest.mark.parametrize("other", [{"lists": ("bb",)}, {"accuracies": np.ones(3)}])
def test_other_episodes_are_not_paired(other):
    given = {"accuracies": np.linspace(0, 1, 4)} | other
    runs = [with_episodes(("softmax",), 0, np.zeros(4)), with_episodes(("loose",), 0, **given)]
    difference = difference_of([METHODS], runs)
    assert np.isnan(difference["own"])
    assert difference["n"] == 1


GROUPS = Axis("G", ("2", "4", "8"))


def tuned_runs():
    """Validation and test disagree on the best G; each method has another best one."""
    values = {"softmax": (0.5, 0.7, 0.6), "loose": (0.8, 0.6, 0.7)}
    return [
        run((name, groups), seed, (ERROR, 1 - value + (groups == "8")), validation=validation)
        for name, of_groups in values.items()
        for groups, value in zip(GROUPS.labels, of_groups, strict=True)
        for seed, validation in enumerate((value, value + 0.01))
    ]


def test_validation_chooses_at_every_place(tmp_path):
    comparison = Comparison(BASELINE, choose="G")
    text, stored = written(tmp_path, [METHODS, GROUPS], tuned_runs(), comparison=comparison)
    assert "- G: the best mean validation. softmax: 4; loose: 2." in text
    assert "| softmax | 30.0 ± 0.0 | 70.5 ± 0.7 |" in text
    assert "| loose | 20.0 ± 0.0 | 80.5 ± 0.7 |" in text
    assert "| loose | **−10.00 ± 0.00** |" in text
    assert stored["choices"] == [
        {"place": ["softmax"], "label": "4"},
        {"place": ["loose"], "label": "2"},
    ]
    # All runs that were tried are in the file and in the count.
    assert len(stored["runs"]) == 12
    assert "- 12 runs, " in text


def chosen(values, axes=(METHODS, GROUPS), **options):
    """The choice of G for softmax, whose runs have these validations by place and seed."""
    runs = [
        diverged(("softmax", *place), seed)
        if value is None
        else run(("softmax", *place), seed, (ERROR, 0.1), validation=value)
        for (*place, seed), value in values.items()
    ]
    grid = make_grid(axes, runs, comparison=Comparison(choose="G", **options))
    return grid.choices[("softmax",)], grid


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({("2", 0): 0.5, ("2", 1): 0.5, ("4", 0): 0.9, ("4", 1): 0.2}, "4"),
        # A run that diverged is a disadvantage, however good the others are.
        ({("2", 0): 0.5, ("2", 1): 0.5, ("4", 0): 0.9, ("4", 1): None}, "2"),
        ({("2", 0): None, ("2", 1): None, ("4", 0): 0.1, ("4", 1): None}, "4"),
        # Where nothing can be compared, the first value is shown.
        ({("2", 0): None, ("4", 0): None}, "none"),
    ],
)
def test_a_choice_is_fair(values, expected):
    assert chosen(values)[0] == expected


def test_a_choice_is_over_all_repetitions():
    axes = [METHODS, GROUPS, Axis("subset", ("0", "1"))]
    values = {("2", "0", 0): 0.9, ("2", "1", 0): 0.1, ("4", "0", 0): 0.6, ("4", "1", 0): 0.6}
    label, grid = chosen(values, axes, pairs_over="subset")
    assert label == "4"
    assert [axis.name for axis in grid.axes] == ["Method"]
    assert grid.means.loc[("error", "softmax"), "found"] == 2
