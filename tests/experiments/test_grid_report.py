"""The report of a grid: tables, figures and paired differences, and how many pairs they need."""

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
import scipy.stats

from experiments.cli.main import main
from experiments.core.protocol import Metric, PairMetrics, mean_and_interval
from experiments.reporting.grid import Axis, Comparison, GridRun, make_grid
from experiments.reporting.grid_report import grid_figure, grid_table, write_grid
from experiments.reporting.power import paired_power, power_lines

ACCURACY = Metric("accuracy")
ERROR = Metric("error", higher_is_better=False)
RATIO = Metric("discriminability", "")

METHODS = Axis("Method", ("softmax", "loose"))
BASELINE = ("Method", "softmax")
AXES = [METHODS, Axis("n", ("5", "50"))]
GROUPS = Axis("G", ("2", "4", "8"))


def run(place, seed, *measured, validation=None, **more):
    report = {
        **{"seed": seed, "seconds": 30.0, "command": "typed", "version": "0.9.0", "commit": None},
        "metrics": [metric.measured(value) for metric, value in measured],
        "validation": None if validation is None else ACCURACY.measured(validation),
    }
    return GridRun(place, report | more)


def diverged(place, seed):
    return run(place, seed, diverged="diverged: loss is nan at step 3")


def runs_of(values, *metrics):
    """Runs with the same value of all metrics: for each place, one value a seed."""
    return [
        run((place,) if isinstance(place, str) else place, seed, *((m, value) for m in metrics))
        for place, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]


def squeezed(text):
    """Markdown with single spaces in its tables."""
    lines = text.splitlines()
    return "\n".join(" ".join(line.split()) if line.startswith("|") else line for line in lines)


def text_of(axes, runs, metrics=(), baseline=None):
    grid = make_grid(axes, runs, metrics, comparison=Comparison(baseline))
    return squeezed(grid_table(grid, runs, title="T"))


def written(directory, axes, runs, **options):
    paths = write_grid(directory, axes, runs, title="T", command="c", **options)
    return squeezed(paths[0].read_text()), json.loads(paths[1].read_text())


def figure_of(axes, runs, baseline=None) -> Any:
    grid = make_grid(axes, runs, comparison=Comparison(baseline))
    return grid_figure(grid, difference=bool(baseline), title="T", command="c")


def by_scipy(differences):
    """Half the width of the 95 % interval."""
    low, high = scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    return (high - low) / 2


def test_table_of_two_axes():
    values = {("softmax", "5"): (0.2, 0.3, 0.4), ("loose", "5"): (0.25,), ("softmax", "50"): (0.1,)}
    text = text_of(AXES, [*runs_of(values, ERROR), diverged(("loose", "50"), 0)])
    # One seed is not compared with three.
    assert "**error (%) ↓** against n" in text
    assert "| softmax | 30.0 ± 10.0 | 10.0 (1 of 3) |\n| loose | 25.0 (1 of 3) | diverged |" in text
    assert "- Diverged: loose, 50 (seed 0).\n- 6 runs, 3.0 minutes of training." in text
    # A third axis has its combinations with the second as columns.
    batches = ("32x4", "random")
    places = itertools.product(METHODS.labels, ("5",), batches)
    runs = runs_of(dict.fromkeys(places, (2,)), ERROR, RATIO)
    text = text_of([*AXES, Axis("Batch", batches)], runs)
    assert "| Method | 5, 32x4 | 5, random | 50, 32x4 | 50, random |" in text
    assert "| softmax | **2.00** | **2.00** | – | – |" in text


def test_table_of_one_axis_has_metrics_as_columns():
    runs = [
        run(("softmax",), 0, (ACCURACY, 0.5), (ERROR, 0.1), validation=0.7),
        run(("loose",), 0, (ACCURACY, 0.6), validation=0.7),
    ]
    text = text_of([METHODS], runs)
    assert "| Method | accuracy (%) | error (%) ↓ | validation (%) |" in text
    assert "| softmax | 50.0 | 10.0 | **70.0** |" in text
    assert "| loose | **60.0** | – | **70.0** |" in text
    assert "validation: accuracy on the validation split, which selects the checkpoint." in text
    # In the order requested; of a metric that no run has, nothing is known.
    text = text_of([METHODS], runs, metrics=["error", "recall", "accuracy"])
    assert "| Method | error (%) ↓ | recall | accuracy (%) |" in text
    assert "| softmax | 10.0 | – | 50.0 |" in text


@pytest.mark.parametrize("higher_is_better", [True, False, None])
def test_the_metric_decides_what_is_best(higher_is_better):
    """Not its name: an error of which more is better, and an accuracy of which less is."""
    metric = Metric("error" if higher_is_better else "accuracy", "%", higher_is_better)
    text = text_of([METHODS], runs_of({"softmax": (0.2,), "loose": (0.4,)}, metric))
    assert ("| loose | **40.0** |" in text) == (higher_is_better is True)
    assert ("| softmax | **20.0** |" in text) == (higher_is_better is False)


def test_ties_as_printed_are_all_best():
    axis, best = Axis("Method", ("a", "b", "c")), run(("c",), 1, (ACCURACY, 0.9))
    text = text_of([axis], runs_of({"a": [0.70041], "b": [0.69959], "c": [0.69941]}, ACCURACY))
    assert "| a | **70.0** |\n| b | **70.0** |\n| c | 69.9 |" in text
    # Entries that lack seeds do not compete.
    text = text_of([axis], [*runs_of({"a": (0.5, 0.5), "b": (0.5, 0.5)}, ACCURACY), best])
    assert "| a | **50.0 ± 0.0** |" in text
    assert "| c | 90.0 (1 of 2) |" in text
    # Nothing to compare with.
    assert "**" not in text_of([axis], [best])


def test_a_single_seed_shows_the_interval_of_its_metric():
    def measured(value, interval, seed=0):
        return run(("loose",), seed, metrics=[ACCURACY.measured(value, interval)])

    single = measured(0.5, 0.0123)
    assert "| loose | 50.0 ± 1.2 |" in text_of([METHODS], [single])
    assert bar_of(figure_of([METHODS], [single]).axes[0]) == pytest.approx([48.77, 51.23])
    # Of several seeds, the standard deviation tells more.
    several = [measured(0.5, 0.3), measured(0.6, 0.3, seed=1)]
    assert "| loose | 55.0 ± 7.1 |" in text_of([METHODS], several)


def test_what_runs_have_in_common_is_stated_once():
    later = {"command": "later", "commit": "abc1234", "notes": ["Damaged."]}
    runs = runs_of({("softmax", "5"): (0.5,), ("loose", "5"): (0.4,)}, ACCURACY, ERROR)
    runs.append(run(("loose", "5"), 4, (ERROR, 0.1), **later))
    text = text_of([METHODS, Axis("Samples", ("5",))], runs)
    assert "- Samples: 5 in all runs.\n- loose, 5 (seed 4): Damaged.\n- 3 runs" in text
    assert "- Code: jaxloss 0.9.0; jaxloss 0.9.0, commit abc1234." in text
    assert "- Command: `typed`\n- Command: `later`" in text
    noted = [of._replace(report=of.report | later) for of in runs]
    assert "\n- All: Damaged.\n" in text_of([METHODS, Axis("Samples", ("5",))], noted)
    # The first axis has the methods, however few.
    text = text_of([Axis("Method", ("loose",)), AXES[1]], runs_of({("loose", "5"): (0.5,)}, ERROR))
    assert "| loose | 50.0 | – |" in text


def test_without_values_there_is_no_figure(tmp_path):
    runs = runs_of({"softmax": (0.25,)}, ERROR)
    # Such as the validation of runs that have no images for it.
    assert "| softmax | – |" in written(tmp_path, [METHODS], runs, metrics=["validation"])[0]
    runs = [diverged((name,), 0) for name in METHODS.labels]
    text, _ = written(tmp_path, [METHODS], runs, comparison=Comparison(BASELINE))
    assert "| softmax | diverged |" in text
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "table.json", "runs.csv"}


def test_the_values_of_runs_are_a_file(tmp_path):
    runs = runs_of({"softmax": (0.25, 0.5), "loose": (0.125,)}, ERROR)
    runs.append(diverged(("loose",), 1))
    written(tmp_path, [METHODS], runs, comparison=Comparison(BASELINE))
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert lines[:3] == [f"# baseline: {'='.join(BASELINE)}", "# command: c", lines[2]]
    assert lines[2].startswith("# code: jaxloss ")
    assert lines[3:] == [
        "Method,seed,error (%) ↓",
        "softmax,0,25",
        "softmax,1,50",
        "loose,0,12.5",
        "loose,1,",
    ]


def bar_of(panel):
    (segments,) = panel.containers[0].lines[2]
    (bar,) = segments.get_segments()[0].T[np.ptp(segments.get_segments()[0], axis=0) > 0]
    return bar


def test_bars_are_intervals_of_three_seeds_and_deviations_of_two():
    values = (0.10, 0.14, 0.12)
    (panel,) = figure_of([METHODS], runs_of({"softmax": values}, ERROR)).axes
    half = 100 * by_scipy(values)
    assert bar_of(panel) == pytest.approx([12 - half, 12 + half])
    (panel,) = figure_of([METHODS], runs_of({"softmax": values[:2]}, ERROR)).axes
    assert bar_of(panel) == pytest.approx([12 - 8**0.5, 12 + 8**0.5])


def measure_sum(report, baseline):
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
    # Alone, they have no table of differences.
    alone, _ = written(tmp_path, [methods], runs, metrics=["sum"], **options)
    assert "Difference from" not in alone
    # Without a baseline, there are none.
    assert "sum" not in written(tmp_path, [methods], runs, pair_metrics=pair_metrics)[0]


def test_the_table_has_the_differences(tmp_path):
    values = {"softmax": (0.14, 0.12, 0.15), "loose": (0.12, 0.10, 0.125)}
    runs = runs_of(values, ERROR, RATIO)
    text, stored = written(tmp_path, [METHODS], runs, comparison=Comparison(BASELINE))
    assert "**Difference from Method = softmax**" in text
    assert "| Method | error (points) ↓ | discriminability |" in text
    assert "| loose | **−2.17 ± 0.72** | **−0.022 ± 0.007** |" in text
    # Only differences have bold entries: the best mean need not be better than the baseline.
    assert "Bold: best" not in text
    error, _ = stored["differences"]
    assert (error["metric"], error["place"], error["n"]) == ("error", ["loose"], 3)
    assert error["values"] == pytest.approx([-0.02, -0.02, -0.025])
    assert error["interval"] == pytest.approx(by_scipy(error["values"]))
    assert stored["comparison"]["baseline"] == ["Method", "softmax"]
    # A run that diverged or is missing is counted.
    runs = runs_of({"softmax": (0.2, 0.2, 0.2, 0.2), "loose": (0.1, 0.12)}, ERROR)
    text = text_of([METHODS], [*runs, diverged(("loose",), 2)], baseline=BASELINE)
    assert "| loose | −9.00 ± 12.71 (n = 2, 2 missing) |" in text
    runs = [*runs_of({"softmax": (0.2,)}, ERROR), diverged(("loose",), 0)]
    assert "| loose | – (n = 0, 1 missing) |" in text_of([METHODS], runs, baseline=BASELINE)


def test_the_baseline_can_be_on_any_axis():
    values = {
        ("softmax", "5"): (0.4, 0.41),
        ("softmax", "50"): (0.2, 0.21),
        ("loose", "5"): (0.3, 0.31),
        ("loose", "50"): (0.25, 0.26),
    }
    runs = runs_of(values, ERROR, RATIO)
    text = text_of(AXES, runs, baseline=("n", "50"))
    assert "| Method | 5 |" in text
    assert "| softmax | **+20.00 ± 0.00** |" in text
    assert "| loose | **+5.00 ± 0.00** |" in text
    text = text_of(AXES, runs, baseline=BASELINE)
    assert "| loose | **−10.00 ± 0.00** | **+5.00 ± 0.00** |" in text


def test_pooled_repetitions_are_clusters(tmp_path):
    """Three seeds on each of four subsets: twelve pairs, but four independent numbers."""
    rng, subsets = np.random.default_rng(3), Axis("subset", ("0", "1", "2", "3"))
    values = 0.3 + rng.normal(0, 0.02, (2, 4, 1)) + rng.normal(0, 0.005, (2, 4, 3))
    places, of_pairs = itertools.product(METHODS.labels, subsets.labels), values[1] - values[0]
    runs = runs_of(dict(zip(places, values.reshape(8, 3), strict=True)), ERROR)
    axes, options = [METHODS, subsets], {"comparison": Comparison(BASELINE, "subset")}
    text, stored = written(tmp_path, axes, runs, **options)
    (difference,) = stored["differences"]
    assert difference["values"] == pytest.approx(of_pairs.mean(1))
    assert difference["interval"] == pytest.approx(by_scipy(of_pairs.mean(1)))
    assert "over subset 0, 1, 2, 3, each a mean of seeds 0, 1, 2." in text
    # A cluster that lacks a run says so.
    runs = [run for run in runs if (run.place, run.report["seed"]) != (("loose", "1"), 2)]
    text, stored = written(tmp_path, axes, runs, **options)
    assert "(n = 4, 1 missing) |" in text
    assert "(11 of 12) |" in text
    assert stored["differences"][0]["values"][1] == pytest.approx(of_pairs[1, :2].mean())


def episode_runs(episode_hash="aa", **accuracies):
    """Runs with these accuracies [seed, episode] of a method."""
    return [
        run((label,), seed, (ACCURACY, np.mean(values)), results=[{"hash": episode_hash}])._replace(
            episodes={ACCURACY.name: values}
        )
        for label, of_seeds in accuracies.items()
        for seed, values in enumerate(of_seeds)
    ]


def test_one_seed_is_compared_episode_by_episode(tmp_path):
    rng = np.random.default_rng(5)
    hard = rng.uniform(0.3, 0.9, 400)
    softmax, loose = (hard + rng.normal(shift, 0.02, 400) for shift in (0, 0.01))
    runs = episode_runs(softmax=[softmax], loose=[loose])
    text, stored = written(tmp_path, [METHODS], runs, comparison=Comparison(BASELINE))
    mean, half_width = mean_and_interval(loose - softmax)
    (difference,) = stored["differences"]
    assert difference["interval"] is None
    assert difference["own"] == pytest.approx(half_width)
    # However narrow, this interval says nothing on other seeds: neither bold nor filled.
    assert mean > half_width
    assert f"| loose | +{100 * mean:.2f} (episodes ± {100 * half_width:.2f}) |" in text
    (panel,) = figure_of([METHODS], runs, BASELINE).axes
    ends = [100 * (mean - half_width), 100 * (mean + half_width)]
    assert bar_of(panel) == pytest.approx(ends)
    assert panel.lines[1].get_markerfacecolor() == "white"


def test_intervals_over_episodes_need_the_same_episodes():
    def difference(runs):
        grid = make_grid([METHODS], runs, comparison=Comparison(BASELINE))
        return grid.differences.loc["accuracy", "loose"]

    softmax, loose = np.random.default_rng(6).uniform(0.3, 0.9, (2, 3, 50))
    found = difference(episode_runs(softmax=softmax, loose=loose))
    assert found["interval"] == pytest.approx(by_scipy((loose - softmax).mean(1)))
    own = [mean_and_interval(row)[1] for row in loose - softmax]
    assert found["own"] == pytest.approx(np.mean(own))
    for other in ({"episode_hash": "bb", "loose": loose}, {"loose": loose[:, :9]}):
        assert np.isnan(difference(episode_runs(softmax=softmax) + episode_runs(**other))["own"])


def test_validation_chooses_at_every_place(tmp_path):
    """Validation and test disagree on the best G; each method has another best one."""
    values = {"softmax": (0.5, 0.7, 0.6), "loose": (0.8, 0.6, 0.7)}
    runs = [
        run((name, groups), seed, (ERROR, 1 - value + (groups == "8")), validation=validation)
        for name, of_groups in values.items()
        for groups, value in zip(GROUPS.labels, of_groups, strict=True)
        for seed, validation in enumerate((value, value + 0.01))
    ]
    comparison = Comparison(BASELINE, choose="G")
    text, stored = written(tmp_path, [METHODS, GROUPS], runs, comparison=comparison)
    assert "- G: the best mean validation. softmax: 4; loose: 2." in text
    assert "| softmax | 30.0 ± 0.0 | 70.5 ± 0.7 |" in text
    assert "| loose | 20.0 ± 0.0 | 80.5 ± 0.7 |" in text
    assert "| loose | **−10.00 ± 0.00** |" in text
    # All runs that were tried are in the file and in the count.
    assert len(stored["runs"]) == 12
    assert "- 12 runs, " in text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({("2", 0): 0.5, ("2", 1): 0.5, ("4", 0): 0.9, ("4", 1): 0.2}, "4"),
        # A run that diverged is a disadvantage, however good the others are.
        ({("2", 0): 0.5, ("2", 1): 0.5, ("4", 0): 0.9, ("4", 1): None}, "2"),
        ({("2", 0): None, ("2", 1): None, ("4", 0): 0.1, ("4", 1): None}, "4"),
        # Where nothing can be compared, the first value is shown.
        ({("2", 0): None, ("4", 0): None}, "none"),
        # Over all repetitions.
        ({("2", "0", 0): 0.9, ("2", "1", 0): 0.1, ("4", "0", 0): 0.6, ("4", "1", 0): 0.6}, "4"),
    ],
)
def test_a_choice_is_fair(values, expected):
    runs = [
        diverged(("softmax", *place), seed)
        if value is None
        else run(("softmax", *place), seed, (ERROR, 0.1), validation=value)
        for (*place, seed), value in values.items()
    ]
    axes, over = [METHODS, GROUPS], ""
    if len(runs[0].place) > 2:
        axes, over = [*axes, Axis("subset", ("0", "1"))], "subset"
    grid = make_grid(axes, runs, comparison=Comparison(pairs_over=over, choose="G"))
    assert grid.choices == {("softmax",): expected}
    assert [axis.name for axis in grid.axes] == ["Method"]


def test_power_is_that_of_the_noncentral_t_distribution():
    for pairs, effect in itertools.product((2, 3, 8, 50), (0.0, 0.4, -1.5)):
        critical, shift = scipy.stats.t.ppf(0.975, pairs - 1), effect / 0.7 * pairs**0.5
        own = scipy.stats.nct(pairs - 1, shift)
        expected = own.sf(critical) + own.cdf(-critical)
        assert paired_power(pairs, effect, 0.7) == pytest.approx(expected, abs=1e-6)
    # SciPy has no number for some effects of which none is missed.
    powers = [paired_power(8, effect, 1) for effect in np.linspace(0, 12, 200)]
    assert (np.diff(powers) >= -1e-12).all()


@pytest.mark.parametrize(
    ("ratio", "needed"),
    # Cohen's d at 5 %, two-sided: tables of the paired t-test (G*Power).
    [(0.5, (34, 44)), (-0.8, (15, 19)), (1.0, (10, 13)), (1e-5, (10**9, 10**9)), (200, (2, 2))],
)
def test_textbook_numbers_of_pairs(ratio, needed):
    line, *_, last = power_lines(0.7, ratio * 0.7, [3, 10])
    assert [*map(int, re.findall(r"(\d+) pairs", line))] == [*needed]
    assert ("needs at least" in line) == (abs(ratio) == 1e-5)
    # The smallest effect is found just so.
    pairs, *effects = map(float, last.strip("|").split("|"))
    powers = [paired_power(int(pairs), effect, 0.7) for effect in effects]
    assert powers == pytest.approx([0.8, 0.9], abs=0.01)


def test_the_command_prints_the_numbers(capsys):
    assert main(["power", "--deviation", "0.7", "--effect", "0.35", "--pairs", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == power_lines(0.7, 0.35, [3])
