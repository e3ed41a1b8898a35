"""The report of a grid: tables and figures that state what every number means."""

import itertools
import json
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import scipy.stats

from experiments.contracts import Metric
from experiments.reporting.grid import difference_figure, grid_table, mean_figure, write_grid
from experiments.reporting.markdown import table
from experiments.reporting.results import Axis, Comparison, Run, make_grid
from experiments.reporting.style import series_mark

ACCURACY = Metric("accuracy")
ERROR = Metric("error", higher_is_better=False)
RATIO = Metric("discriminability", "")

METHODS = Axis("Method", ("softmax", "loose"))
AXES = [METHODS, Axis("n", ("5", "50"))]


def run(place, seed, *measured, validation=None, **more):
    """A run that measured pairs of a metric and its value."""
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


def figure_of(axes, runs) -> Any:
    figure = mean_figure(make_grid(axes, runs), title="T", command="c")
    assert figure is not None
    assert_everything_is_within_the_axes(figure)
    return figure


def assert_everything_is_within_the_axes(figure):
    """Every mean and both ends of every bar are within the limits of its panel."""
    for panel in figure.axes:
        for marks, _, bars in (container.lines for container in panel.containers):
            ends = [segment for bar in bars for segment in bar.get_segments()]
            points = np.concatenate([marks.get_xydata(), *ends])
            assert all(panel.viewLim.contains(x, y) for x, y in points)


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
    assert (
        "\n- ±: standard deviation over seeds 0, 1, 2. (k of n): k of n runs have a value.\n"
        in text
    )
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
    assert "- Values of seed 0. ± of one run: 95 % interval over its" in text_of(
        [METHODS], [single]
    )
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
    runs = [*runs_of(dict.fromkeys(METHODS.labels, (0.1,)), ERROR)]
    text = text_of([METHODS], [*runs, run(("loose",), 4, (ERROR, 0.1), **later)])
    assert text.count("- Command: ") == 2
    assert "- Command: `typed`\n- Command: `later`" in text
    assert "- Code: jaxloss 0.9.0; jaxloss 0.9.0, commit abc1234." in text
    noted = [run((name,), 0, (ERROR, 0.1), notes=["Damaged."]) for name in METHODS.labels]
    assert "\n- All: Damaged.\n" in text_of([METHODS], noted)
    text = text_of([METHODS], [*noted, run(("loose",), 1, (ERROR, 0.1))])
    assert "\n- softmax (seed 0); loose (seed 0): Damaged.\n" in text


def test_files_of_a_grid(tmp_path):
    runs = runs_of({"softmax": (0.1,), "loose": (0.1,)}, ERROR)
    paths = write_grid(tmp_path / "new", [METHODS], runs, title="Icons", command="c")
    assert [path.name for path in paths] == ["table.md", "table.json", "figure.png"]
    text = paths[0].read_text()
    assert text.startswith("### Icons\n\n| Method")
    assert "(figure.png)" in text
    stored = json.loads(paths[1].read_text())
    assert stored["axes"] == [{"name": "Method", "labels": ["softmax", "loose"]}]
    assert [r["place"] for r in stored["runs"]] == [["softmax"], ["loose"]]
    assert [r["report"] for r in stored["runs"]] == [r.report for r in runs]


def test_without_values_there_is_no_figure(tmp_path):
    def written(runs, metrics=()):
        paths = write_grid(tmp_path, [METHODS], runs, title="T", command="c", metrics=metrics)
        assert [path.name for path in paths] == ["table.md", "table.json"]
        return squeezed(paths[0].read_text())

    # Such as the validation of runs that have no images for it.
    assert "| softmax | – |" in written(runs_of({"softmax": (0.25,)}, ERROR), ["validation"])
    runs = [diverged((name,), 0) for name in METHODS.labels]
    for metrics in ((), ("accuracy",)):
        text = written(runs, metrics)
        assert "| softmax | diverged |" in text
        assert "- Diverged: softmax (seed 0); loose (seed 0)." in text


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


def test_rows_name_what_was_varied():
    runs = runs_of({"x/y": (0.1,), "y/x": (0.1,)}, *(Metric(name) for name in "abcd"))
    figure = figure_of([Axis("first/second", ("x/y", "y/x"))], runs)
    # The first panel of each of two rows.
    assert [panel.get_ylabel() for panel in figure.axes] == ["first/second", "", "", "first/second"]
    assert [panel.get_title() for panel in figure.axes] == ["a (%)", "b (%)", "c (%)", "d (%)"]


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
    assert [text.get_text() for text in legend.get_texts()] == ["32x4", "random"]
    assert legend.get_title().get_text() == "Batch"
    # A tick for every seed.
    ticks = [line for line in panel.lines if line.get_marker() == "|"]
    numbers = sorted(x for line in ticks for x in np.asarray(line.get_xdata()))
    assert numbers == [0, 1, 1, 2, 2, 3, 3, 4]


def bar_of(panel):
    """Both ends of the first bar."""
    (segments,) = panel.containers[0].lines[2]
    (bar,) = segments.get_segments()[0].T[np.ptp(segments.get_segments()[0], axis=0) > 0]
    return bar


def test_bars_of_three_seeds_are_confidence_intervals():
    axis, values = Axis("n", ("25", "50")), [0.10, 0.14, 0.12]
    low, high = scipy.stats.ttest_1samp(100 * np.array(values), 0).confidence_interval(0.95)
    (panel,) = figure_of([axis], runs_of(dict.fromkeys(axis.labels, values), ERROR)).axes
    assert bar_of(panel) == pytest.approx([low, high])
    assert [text.get_text() for text in panel.get_xticklabels()] == ["25", "50"]
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
    ("labels", "shown"),
    [
        ({"softmax": "Softmax", "loose": "Type II"}, ["Softmax", "Type II"]),
        # Labels that do not tell the places apart are no help.
        (dict.fromkeys(METHODS.labels, "Group softmax"), ["softmax", "loose"]),
    ],
)
def test_losses_have_the_labels_of_their_protocol(labels, shown):
    runs = [run((name,), 0, (ERROR, 0.1), label=label) for name, label in labels.items()]
    (panel,) = figure_of([Axis("loss.name", METHODS.labels)], runs).axes
    assert [text.get_text() for text in panel.get_yticklabels()] == shown
    assert panel.get_ylabel() == "loss"


def test_differences_are_drawn_around_zero():
    axes = [METHODS, Axis("n", ("1", "100"))]
    values = {
        **dict.fromkeys([("softmax", "1"), ("softmax", "100")], (0.1, 0.1, 0.1)),
        ("loose", "1"): (0.12, 0.121, 0.122),
        ("loose", "100"): (0.0995, 0.1005, 0.1015),
    }
    grid = make_grid(axes, runs_of(values, ERROR), comparison=Comparison(("Method", "softmax")))
    figure = difference_figure(grid, title="T", command="c")
    assert figure is not None
    assert_everything_is_within_the_axes(figure)
    (panel,) = figure.axes
    assert panel.get_title() == "error (points) ↓"
    (container,) = panel.containers
    line: Any = container[0]
    assert line.get_ydata().tolist() == pytest.approx([2.1, 0.05])
    assert line.get_color() == series_mark(1).color  # As in the figure of the means.
    hollow = [line for line in panel.lines if line.get_markerfacecolor() == "white"]
    assert [np.asarray(line.get_ydata()).tolist() for line in hollow] == [pytest.approx([0.05])]
    assert any(np.asarray(line.get_ydata()).tolist() == [0, 0] for line in panel.lines)
    caption = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    assert "T: differences from Method = softmax" in caption
    assert "Paired differences over seeds 0, 1, 2." in caption
    # A single line is named, too.
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["loose"]


def test_marks_of_many_series_differ():
    assert len({series_mark(number)[:2] for number in range(64)}) == 64


def many(methods, batches):
    """Names and numbers that strain the figure: 16 methods, two panels, and two seeds."""
    operators = ("", "+", "⊕", "⊕\N{COMBINING TILDE}")
    names = [f"{a}{o}{b}" for o in operators for a in ("SCE", "BCE") for b in ("NCA", "Proto")]
    axes = [Axis("Method", tuple(names[:methods])), Axis("Training batch", batches)]
    rng = np.random.default_rng(0)
    metrics = [Metric("1-shot accuracy"), Metric("a metric of which the name is wide " * 2)]
    runs = [
        run(place, seed, *((metric, rng.uniform(0.5, 0.9)) for metric in metrics))
        for place in itertools.product(*(axis.labels for axis in axes))
        for seed in (0, 1)
    ]
    return axes, runs


@pytest.mark.filterwarnings("error")  # A glyph that the font lacks is a warning.
@pytest.mark.parametrize(
    ("methods", "batches"),
    [(1, ("random",)), (3, ("64x8", "random")), (16, ("a", "b", "c")), (16, ("1", "8", "64"))],
)
def test_nothing_in_the_figure_is_cut_off(tmp_path, methods, batches):
    axes, runs = many(methods, batches)
    command = " ".join(["python -m experiments compare icons --seeds 0 1"] * methods)
    title = "Few-shot accuracy on $5 icons"
    paths = write_grid(tmp_path, axes, runs, title=title, command=command)
    image = matplotlib.image.imread(paths[-1])[..., :3]
    edge = 6
    for border in (image[:edge], image[-edge:], image[:, :edge], image[:, -edge:]):
        np.testing.assert_array_equal(border, 1.0)
