"""The report of a grid: tables, figures and paired differences, and how many pairs they need."""

import itertools
import json
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import scipy.stats

from experiments.cli.main import main
from experiments.core.protocol import Metric, PairMetrics, mean_and_interval
from experiments.reporting.grid import Axis, Comparison, Run, make_grid
from experiments.reporting.grid_report import grid_figure, grid_table, write_grid
from experiments.reporting.markdown import table
from experiments.reporting.power import paired_power, pairs_needed, smallest_effect
from experiments.reporting.style import series_mark

ACCURACY = Metric("accuracy")
ERROR = Metric("error", higher_is_better=False)
RATIO = Metric("discriminability", "")

METHODS = Axis("Method", ("softmax", "loose"))
BASELINE = ("Method", "softmax")
AXES = [METHODS, Axis("n", ("5", "50"))]


def run(place, seed, *measured, validation=None, **more):
    report = {
        "seed": seed,
        "seconds": 30.0,
        "command": "typed",
        "version": "0.9.0",
        "commit": None,
        "metrics": [metric.measured(value) for metric, value in measured],
        "validation": None if validation is None else ACCURACY.measured(validation),
    }
    return Run(place, report | more)


def diverged(place, seed):
    return run(place, seed, diverged="diverged: loss is nan at step 3")


def runs_of(values, *metrics):
    """Runs with the same value of all metrics: for each place, one value a seed."""
    places = {(place,) if isinstance(place, str) else place: of for place, of in values.items()}
    return [
        run(place, seed, *((metric, value) for metric in metrics))
        for place, of_seeds in places.items()
        for seed, value in enumerate(of_seeds)
    ]


def squeezed(text):
    """Markdown with single spaces in its tables."""
    lines = text.splitlines()
    return "\n".join(" ".join(line.split()) if line.startswith("|") else line for line in lines)


def text_of(axes, runs, metrics=()):
    return squeezed(grid_table(make_grid(axes, runs, metrics), runs, title="T"))


def written(directory, axes, runs, **options):
    paths = write_grid(directory, axes, runs, title="T", command="c", **options)
    return squeezed(paths[0].read_text()), json.loads(paths[1].read_text())


def figure_of(axes, runs, baseline=None) -> Any:
    """The figure of the means, or of differences: all marks and bars are within their panels."""
    grid = make_grid(axes, runs, comparison=Comparison(baseline))
    figure: Any = grid_figure(grid, difference=bool(baseline), title="T", command="c")
    for panel in figure.axes:
        for marks, _, bars in (container.lines for container in panel.containers):
            ends = [segment for bar in bars for segment in bar.get_segments()]
            points = np.concatenate([marks.get_xydata(), *ends])
            assert all(panel.viewLim.contains(x, y) for x, y in points)
    return figure


def texts_of(items):
    return [" ".join(item.get_text().split()) for item in items]


def test_cells_of_a_table_stay_what_they_are():
    lines = table(["a|b", "n", "m"], [["x", "1.50", None], ["y", "**2.0**", 1]])
    head, rule, *rows = (squeezed(line) for line in lines)
    assert head == r"| a\|b | n | m |"
    assert [part[:1] + part[-1:] for part in rule.split("|")[1:-1]] == [":-", "::", "::"]
    assert rows == ["| x | 1.50 | – |", "| y | **2.0** | 1 |"]


def test_table_of_two_axes():
    values = {("softmax", "5"): (0.2, 0.3, 0.4), ("loose", "5"): (0.25,), ("softmax", "50"): (0.1,)}
    text = text_of(AXES, [*runs_of(values, ERROR), diverged(("loose", "50"), 0)])
    assert "**error (%) ↓** against n" in text
    assert "| Method | 5 | 50 |" in text
    # One seed is not compared with three.
    assert "| softmax | 30.0 ± 10.0 | 10.0 (1 of 3) |" in text
    assert "| loose | 25.0 (1 of 3) | diverged |" in text
    assert "- ±: standard deviation over seeds 0, 1, 2. (k of n): k of n runs have" in text
    assert "\n- ↓: lower is better.\n" in text
    assert "- Diverged: loose, 50 (seed 0)." in text
    assert "- 6 runs, 3.0 minutes of training." in text
    # A third axis has its combinations with the second as columns.
    batches = ("32x4", "random")
    places = itertools.product(METHODS.labels, ("5",), batches)
    runs = runs_of(dict.fromkeys(places, (2,)), ERROR, RATIO)
    text = text_of([*AXES, Axis("Batch", batches)], runs)
    assert "**error (%) ↓** against n, Batch" in text
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
    assert "Bold: best in its column." in text
    assert "validation: accuracy on the validation split, which selects the checkpoint." in text
    assert "| loose | **60.0** | – | **70.0** |" in text
    # In the order requested; of a metric that no run has, nothing is known.
    text = text_of([METHODS], runs, metrics=["error", "recall", "accuracy"])
    assert "| Method | error (%) ↓ | recall | accuracy (%) |" in text
    assert "| softmax | 10.0 | – | 50.0 |" in text
    assert "validation" not in text.partition("- ")[0]


@pytest.mark.parametrize("higher_is_better", [True, False, None])
def test_the_metric_decides_what_is_best(higher_is_better):
    """Not its name: an error of which more is better, and an accuracy of which less is."""
    metric = Metric("error" if higher_is_better else "accuracy", "%", higher_is_better)
    runs = runs_of({"softmax": (0.2,), "loose": (0.4,)}, metric)
    text = text_of([METHODS], runs)
    assert ("| loose | **40.0** |" in text) == (higher_is_better is True)
    assert ("| softmax | **20.0** |" in text) == (higher_is_better is False)
    down = "↓" in figure_of([METHODS], runs).axes[0].get_title()
    assert down == (higher_is_better is False)


def test_ties_as_printed_are_all_best():
    axis, best = Axis("Method", ("a", "b", "c")), run(("c",), 1, (ACCURACY, 0.9))
    text = text_of([axis], runs_of({"a": [0.70041], "b": [0.69959], "c": [0.69941]}, ACCURACY))
    assert "| a | **70.0** |\n| b | **70.0** |\n| c | 69.9 |" in text
    # Entries that lack seeds do not compete.
    text = text_of([axis], [*runs_of({"a": (0.5, 0.5), "b": (0.5, 0.5)}, ACCURACY), best])
    assert "| a | **50.0 ± 0.0** |" in text
    assert "| c | 90.0 (1 of 2) |" in text
    assert "Bold: best in its column, among entries with all runs." in text
    # Nothing to compare with.
    assert "**" not in text_of([axis], [best])


def test_a_single_seed_shows_the_interval_of_its_metric():
    def measured(value, interval, seed=0, place="loose"):
        return run((place,), seed, metrics=[ACCURACY.measured(value, interval)])

    single = measured(0.5, 0.0123)
    assert "| loose | 50.0 ± 1.2 |" in text_of([METHODS], [single])
    assert np.ptp(bar_of(figure_of([METHODS], [single]).axes[0])) == pytest.approx(2.46)
    # Of several seeds, the standard deviation tells more.
    several = [measured(0.5, 0.3), measured(0.6, 0.3, seed=1)]
    caption = "- Values of seed 0. ± of one run: 95 % interval over its"
    assert caption in text_of([METHODS], [single])
    assert "± of one run" not in text_of([METHODS], several)
    text = text_of([METHODS], [*several, measured(0.4, 0.02, place="softmax")])
    assert "| loose | 55.0 ± 7.1 |" in text
    assert "| softmax | 40.0 ± 2.0 (1 of 2) |" in text


def test_an_axis_of_one_label_is_stated_once():
    samples = Axis("Samples", ("5",))
    text = text_of([METHODS, samples], runs_of({("softmax", "5"): (0.5,)}, ACCURACY, ERROR))
    assert "| Method | accuracy (%) | error (%) ↓ |" in text
    assert "- Samples: 5 in all runs." in text
    # The first axis has the methods, however few.
    text = text_of([Axis("Method", ("loose",)), AXES[1]], runs_of({("loose", "5"): (0.5,)}, ERROR))
    assert "| loose | 50.0 | – |" in text


def test_commands_versions_and_notes_are_stated_once():
    later = {"command": "later", "commit": "abc1234"}
    runs = runs_of(dict.fromkeys(METHODS.labels, (0.1,)), ERROR)
    text = text_of([METHODS], [*runs, run(("loose",), 4, (ERROR, 0.1), **later)])
    assert text.count("- Command: ") == 2
    assert "- Command: `typed`\n- Command: `later`" in text
    assert "- Code: jaxloss 0.9.0; jaxloss 0.9.0, commit abc1234." in text
    noted = [run((name,), 0, (ERROR, 0.1), notes=["Damaged."]) for name in METHODS.labels]
    assert "\n- All: Damaged.\n" in text_of([METHODS], noted)
    text = text_of([METHODS], [*noted, run(("loose",), 1, (ERROR, 0.1))])
    assert "\n- softmax (seed 0); loose (seed 0): Damaged.\n" in text


def test_without_values_there_is_no_figure(tmp_path):
    runs = runs_of({"softmax": (0.25,)}, ERROR)
    # Such as the validation of runs that have no images for it.
    assert "| softmax | – |" in written(tmp_path, [METHODS], runs, metrics=["validation"])[0]
    runs = [diverged((name,), 0) for name in METHODS.labels]
    for metrics in ((), ("accuracy",)):
        text, _ = written(tmp_path, [METHODS], runs, metrics=metrics)
        assert "| softmax | diverged |" in text
        assert "- Diverged: softmax (seed 0); loose (seed 0)." in text
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "table.json"}


def test_numbers_of_an_axis():
    assert Axis("n", ("5", "10")).numbers == [5, 10]
    assert Axis("n", ("a", "10")).numbers is None
    assert Axis("n", ("5", "10", "all")).numbers == [0, 1, 2]
    assert Axis("n", ("all", "10", "5")).numbers == [2, 1, 0]


@pytest.mark.parametrize(
    ("labels", "scale"),
    [
        ("-0.1 -0.05 -0.02 0.0 0.05", "linear"),
        ("5 10 all", "linear"),
        ("0.0 0.02 0.2", "linear"),
        ("5 29", "linear"),
        ("5 30", "log"),
        ("5 10 20 50 100 179", "log"),
    ],
)
def test_numbers_do_not_touch_and_a_wide_range_is_logarithmic(labels, scale):
    runs = runs_of(dict.fromkeys(labels.split(), (0.1,)), *(Metric(name) for name in "abc"))
    figure = figure_of([Axis("n", tuple(labels.split()))], runs)
    figure.draw_without_rendering()
    for panel in figure.axes:
        assert panel.get_xscale() == scale
        texts = [t.get_window_extent() for t in panel.get_xticklabels() if t.get_text()]
        assert len(texts) == len(labels.split())
        for left, right in itertools.pairwise(sorted(texts, key=lambda box: box.x0)):
            assert left.x1 < right.x0


def test_points_are_joined_in_the_order_of_their_numbers():
    runs = runs_of({"0.0": (0,), "-0.1": (0.1,), "0.05": (0.2,)}, ERROR)
    (panel,) = figure_of([Axis("loss.margin", ("0.0", "-0.1", "0.05"))], runs).axes
    points = np.array([[-0.1, 10], [0, 0], [0.05, 20]])
    np.testing.assert_allclose(panel.containers[0].lines[0].get_xydata(), points, atol=1e-9)
    assert panel.get_xlabel() == "margin"


def test_rows_hold_a_mark_for_every_combination():
    axes = [METHODS, Axis("Batch", ("32x4", "random"))]
    places = itertools.product(*(axis.labels for axis in axes))
    runs = runs_of({place: (n, n + 1) for n, place in enumerate(places)}, RATIO)
    figure = figure_of(axes, runs)
    (panel,) = figure.axes
    first, second = (container.lines[0].get_xydata() for container in panel.containers)
    assert (first[:, 0].tolist(), second[:, 0].tolist()) == ([0.5, 2.5], [1.5, 3.5])
    heights = [*first[:, 1], *second[:, 1]]
    assert heights[0] < 0 < heights[2] < 0.5 < heights[1] < 1 < heights[3]
    (legend,) = figure.legends
    assert texts_of(legend.get_texts()) == ["32x4", "random"]
    assert legend.get_title().get_text() == "Batch"
    # A tick for every seed.
    ticks = [line for line in panel.lines if line.get_marker() == "|"]
    numbers = sorted(x for line in ticks for x in np.asarray(line.get_xdata()))
    assert numbers == [0, 1, 1, 2, 2, 3, 3, 4]
    assert len({series_mark(number)[:2] for number in range(64)}) == 64


def bar_of(panel):
    (segments,) = panel.containers[0].lines[2]
    (bar,) = segments.get_segments()[0].T[np.ptp(segments.get_segments()[0], axis=0) > 0]
    return bar


def test_bars_of_three_seeds_are_confidence_intervals():
    axis, values = Axis("n", ("25", "50")), [0.10, 0.14, 0.12]
    low, high = scipy.stats.ttest_1samp(100 * np.array(values), 0).confidence_interval(0.95)
    (panel,) = figure_of([axis], runs_of(dict.fromkeys(axis.labels, values), ERROR)).axes
    assert bar_of(panel) == pytest.approx([low, high])
    assert texts_of(panel.get_xticklabels()) == ["25", "50"]
    # Two seeds have a standard deviation.
    (panel,) = figure_of([axis], runs_of(dict.fromkeys(axis.labels, values[:2]), ERROR)).axes
    assert bar_of(panel) == pytest.approx([12 - 8**0.5, 12 + 8**0.5])


def test_lines_at_one_number_are_side_by_side():
    axes = [METHODS, Axis("n", ("1", "100"))]
    places = itertools.product(*(axis.labels for axis in axes))
    (panel,) = figure_of(axes, runs_of(dict.fromkeys(places, (0.1,)), ERROR)).axes
    first, second = (np.log(container[0].get_xdata()) for container in panel.containers)
    assert (first < second).all()
    np.testing.assert_allclose((first + second) / 2, np.log([1, 100]), atol=1e-9)


@pytest.mark.parametrize(
    ("axis", "labels", "shown"),
    [
        ("loss.name", ("Softmax", "Loose"), ["Softmax", "Loose"]),
        # Labels that do not tell the places apart are no help, and other axes have none.
        ("loss.name", ("Group softmax",) * 2, ["a/1", "b/2"]),
        ("data.name/loss.name", ("Softmax", "Loose"), ["a", "b"]),
    ],
)
def test_losses_have_the_labels_of_their_protocol(axis, labels, shown):
    at = ("a/1", "b/2")
    runs = [run((at[n],), 0, (ERROR, 0.1), label=label) for n, label in enumerate(labels)]
    (panel,) = figure_of([Axis(axis, at)], runs).axes
    assert texts_of(panel.get_yticklabels()) == shown


@pytest.mark.parametrize("of_protocol", [True, False])
def test_rows_of_several_options_name_those_that_differ(of_protocol):
    """Between positions of the same loss; with or without labels of the protocol."""
    positions = ("sce/False/0.125/0.1", "d/False/0.125/0.1", "d/True/0.5/0.1", "d/True/0.5/0.3")
    labels = {"sce": "Softmax", "d": "SCE⊕NCA"} if of_protocol else {"sce": "", "d": ""}
    metrics = [(Metric(name), 0.1) for name in "abcd"]
    runs = [run((at,), 0, *metrics, label=labels[at.partition("/")[0]]) for at in positions]
    axis = Axis("loss.name/loss.stop_gradient/loss.temperature/optimizer.rate", positions)
    softmax, direct = labels.values() if of_protocol else labels
    panels = figure_of([axis], runs).axes
    assert texts_of(panels[0].get_yticklabels()) == [
        softmax,
        f"{direct}, as written, temperature=0.125, rate=0.1",
        f"{direct}, stopped, temperature=0.5, rate=0.1",
        f"{direct}, stopped, temperature=0.5, rate=0.3",
    ]
    # The first panel of each of two rows has a name.
    assert [panel.get_ylabel() for panel in panels] == ["loss", "", "", "loss"]
    assert [panel.get_title() for panel in panels] == ["a (%)", "b (%)", "c (%)", "d (%)"]
    title, *_ = texts_of(figure_of([axis], runs, (axis.name, positions[1])).texts)
    assert title == f"T: differences from loss = {direct}, as written, temperature=0.125, rate=0.1"


def test_differences_are_drawn_around_zero():
    axes = [METHODS, Axis("n", ("1", "100"))]
    values = {
        **dict.fromkeys([("softmax", "1"), ("softmax", "100")], (0.1, 0.1, 0.1)),
        ("loose", "1"): (0.12, 0.121, 0.122),
        ("loose", "100"): (0.0995, 0.1005, 0.1015),
    }
    figure = figure_of(axes, runs_of(values, ERROR), BASELINE)
    (panel,) = figure.axes
    assert panel.get_title() == "error (points) ↓"
    line = panel.containers[0][0]
    assert line.get_ydata().tolist() == pytest.approx([2.1, 0.05])
    assert line.get_color() == series_mark(1).color  # As in the figure of the means.
    hollow = [line for line in panel.lines if line.get_markerfacecolor() == "white"]
    assert [np.asarray(line.get_ydata()).tolist() for line in hollow] == [pytest.approx([0.05])]
    assert any(np.asarray(line.get_ydata()).tolist() == [0, 0] for line in panel.lines)
    title, caption = texts_of(figure.texts)
    assert title == "T: differences from Method = softmax"
    assert "Paired differences over seeds 0, 1, 2." in caption
    # A single line is named, too.
    (legend,) = figure.legends
    assert texts_of(legend.get_texts()) == ["loose"]


FIGURES = (
    (1, ("random",)),
    (3, ("64x8", "random")),
    (16, ("a", "b", "c")),
    (16, ("1", "8", "64")),
)


@pytest.mark.filterwarnings("error")  # A glyph that the font lacks is a warning.
@pytest.mark.parametrize(
    ("methods", "batches"),
    [*(pytest.param(*case, marks=pytest.mark.long) for case in FIGURES[:-1]), FIGURES[-1]],
)
def test_nothing_in_the_figure_is_cut_off(tmp_path, methods, batches):
    """Names and numbers that strain the figure: 16 methods, two panels, and two seeds."""
    operators = ("", "+", "⊕", "⊕\N{COMBINING TILDE}")
    names = [f"{a}{o}{b}" for o in operators for a in ("SCE", "BCE") for b in ("NCA", "Proto")]
    axes = [Axis("Method", tuple(names[:methods])), Axis("Training batch", batches)]
    rng, places = np.random.default_rng(0), itertools.product(*(axis.labels for axis in axes))
    metrics = Metric("1-shot accuracy"), Metric("a metric of which the name is wide " * 2)
    runs = runs_of({place: rng.uniform(0.5, 0.9, 2) for place in places}, *metrics)
    command = " ".join(["python -m experiments compare icons --seeds 0 1"] * methods)
    title = "Few-shot accuracy on $5 icons"
    paths = write_grid(tmp_path, axes, runs, title=title, command=command)
    image = matplotlib.image.imread(paths[-1])[..., :3]
    for border in (image[:6], image[-6:], image[:, :6], image[:, -6:]):
        np.testing.assert_array_equal(border, 1.0)


SUBSETS = Axis("subset", ("0", "1", "2", "3"))


def difference_of(axes, runs):
    """The difference of `loose` from softmax, of runs with one metric."""
    grid = make_grid(axes, runs, comparison=Comparison(BASELINE))
    return grid.differences.droplevel("metric").loc["loose"]


def by_scipy(differences):
    """Half the width of the 95 % interval."""
    low, high = scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    return (high - low) / 2


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
    # Without a baseline, there are none.
    assert "sum" not in written(tmp_path, [methods], runs, pair_metrics=pair_metrics)[0]


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
    text, _ = written(tmp_path, [METHODS], runs, comparison=Comparison(BASELINE))
    assert "| loose | −9.00 ± 12.71 (2 missing) |" in text
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


def subset_runs():
    """Three seeds on each of four subsets; returns the runs and the differences [subset, seed]."""
    rng = np.random.default_rng(3)
    values = 0.3 + rng.normal(0, 0.02, (2, 4, 1)) + rng.normal(0, 0.005, (2, 4, 3))
    places = itertools.product(METHODS.labels, SUBSETS.labels)
    runs = runs_of(dict(zip(places, values.reshape(8, 3), strict=True)), ERROR)
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
    runs = [run for run in runs if (run.place, run.report["seed"]) != (("loose", "1"), 2)]
    text, stored = written(tmp_path, axes, runs, **options)
    assert "(1 missing) |" in text
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
    _, half_width = mean_and_interval(loose - softmax)
    (difference,) = stored["differences"]
    assert difference["interval"] is None
    assert difference["own"] == pytest.approx(half_width)
    assert f"(episodes ± {100 * half_width:.2f}) |" in text
    # However narrow, this interval says nothing on other seeds: neither bold nor filled.
    assert difference["mean"] > half_width
    assert "| loose | +" in text
    (panel,) = figure_of([METHODS], runs, BASELINE).axes
    # The bar is that of the episodes.
    assert np.ptp(bar_of(panel)) == pytest.approx(200 * half_width)
    assert panel.lines[1].get_markerfacecolor() == "white"


def test_several_seeds_have_both_intervals():
    softmax, loose = np.random.default_rng(6).uniform(0.3, 0.9, (2, 3, 50))
    difference = difference_of([METHODS], episode_runs(softmax=softmax, loose=loose))
    assert difference["interval"] == pytest.approx(by_scipy((loose - softmax).mean(1)))
    own = [mean_and_interval(row)[1] for row in loose - softmax]
    assert difference["own"] == pytest.approx(np.mean(own))


@pytest.mark.parametrize("other", [{"episode_hash": "bb"}, {"loose": [np.ones(3)]}])
def test_other_episodes_are_not_paired(other):
    runs = episode_runs(softmax=[np.zeros(4)])
    runs += episode_runs(**{"loose": [np.linspace(0, 1, 4)]} | other)
    difference = difference_of([METHODS], runs)
    assert np.isnan(difference["own"])
    assert difference["n"] == 1


GROUPS = Axis("G", ("2", "4", "8"))


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
    needed = (pairs_needed(1.3, 0.9, power) for power in (0.8, 0.9))
    assert "needs {} pairs for a power of 80 %, and {} pairs".format(*needed) in text
    smallest = [f"{smallest_effect(8, 0.9, power):.3g}" for power in (0.8, 0.9)]
    assert f"| 8 | {' | '.join(smallest)} |" in text
    assert "needed" not in printed()


def test_what_cannot_be_computed_is_refused(capsys):
    for words, message in (
        ("0", "--deviation must be finite and above 0, got 0"),
        ("nan", "--deviation must be finite and above 0, got nan"),
        ("inf", "--deviation must be finite and above 0, got inf"),
        ("1 --effect 0", "--effect must not be 0"),
        ("1 --effect nan", "--effect must be finite, got nan"),
        ("1 --pairs 1", "--pairs must be numbers of at least 2, got (1,)"),
    ):
        assert main(["power", "--deviation", *words.split()]) == 2
        assert message in capsys.readouterr().err


def test_an_effect_that_needs_more_pairs_than_are_tried(capsys):
    assert main(["power", "--deviation", "1", "--effect", "1e-5", "--pairs", "3"]) == 0
    assert "needs at least 1000000000 pairs for a power of 80 %" in capsys.readouterr().out
