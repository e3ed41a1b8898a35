"""Sweeps: axes, cells, tables and figures; and protocol B by the command line."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.config import DataConfig, ModelConfig, SamplingConfig
from experiments.errors import ConfigError
from experiments.protocols import run_from_dict
from experiments.protocols.group_softmax import GroupSoftmaxConfig
from experiments.reporting import sweep as reporting
from experiments.sweep import cells, finished, parse_axis
from experiments.training.checkpoints import read_config

CONFIG = GroupSoftmaxConfig(
    data=DataConfig(holdout=0.2),
    sampling=SamplingConfig(batch_size=16),
    model=ModelConfig(widths=(4, 4, 4, 8)),
    steps=2,
    validate_every=2,
)


def test_an_axis_is_read_in_the_types_of_its_options():
    axis = parse_axis("loss.name/optimizer.learning-rate=softmax/0.3,loose/0.01", CONFIG)
    assert axis.options == ("loss.name", "optimizer.learning_rate")
    assert axis.values == (("softmax", 0.3), ("loose", 0.01))
    assert (axis.name, axis.labels()) == ("loss.name", ["softmax", "loose"])
    # Where the first option does not tell the places apart, all of them do.
    axis = parse_axis("loss.name/data.classes=softmax/5,softmax/9,loose/5", CONFIG)
    assert axis.name == "loss.name/data.classes"
    assert axis.labels() == ["softmax/5", "softmax/9", "loose/5"]
    assert parse_axis("data.classes=5,20", CONFIG).values == ((5,), (20,))
    assert parse_axis("data.flip=True,false", CONFIG).values == ((True,), (False,))
    # Several numbers are one value.
    axis = parse_axis("steps/optimizer.decay-steps=90/30+60,40/20", CONFIG)
    assert axis.values == ((90, (30, 60)), (40, (20,)))
    assert parse_axis("optimizer.decay_steps=30+60", CONFIG).labels() == ["30+60"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss.name", "must be OPTION=VALUE"),
        ("loss.name=", "must be OPTION=VALUE"),
        ("loss.nam=softmax", "loss.nam: there is no option of that name; there is loss.name"),
        ("los.name=softmax", "los.name: there is no option of that name; there is loss.name"),
        ("model=4", "model: there is no option .* model.backbone, model.widths, "),
        ("protocol=few-shot", "protocol: there is no option .* --help lists them"),
        ("model.widths=4+x", r"'4\+x' is no ints joined by \+"),
        ("loss.name=soft", "'soft' must be one of softmax, tight, loose"),
        ("data.classes=5,x", "'x' is no int"),
        ("data.flip=yes", "'yes' must be True or False"),
        ("data.classes=5,5", "comes twice"),
        ("loss.name/data.classes=loose/5,loose/5", "loss.name/data.classes comes twice"),
        ("loss.name/data.classes=softmax", "1 values for 2 options"),
        ("seed=1,2", "give --seeds"),
    ],
)
def test_axes_that_cannot_be(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_axis(text, CONFIG)


def test_cells_are_all_combinations(tmp_path):
    axes = [parse_axis("loss.name=softmax,loose", CONFIG), parse_axis("data.classes=5,9", CONFIG)]
    found = cells(CONFIG, axes, [3, 1, 3], tmp_path)
    assert len(found) == len({cell.directory for cell in found}) == 8
    assert [cell.config.seed for cell in found] == [3] * 4 + [1] * 4
    last = found[-1]
    assert last.place == ("loose", "9")
    assert (last.config.loss.name, last.config.data.classes) == ("loose", 9)
    assert last.directory == tmp_path / "loss.name=loose" / "data.classes=9" / "seed-1"
    axes = [parse_axis("model.widths=4+8+8+8,4+4+4+4", CONFIG)]
    first = cells(CONFIG, axes, [0], tmp_path)[0]
    assert first.config.model.widths == (4, 8, 8, 8)
    assert first.directory == tmp_path / "model.widths=4+8+8+8" / "seed-0"
    with pytest.raises(ConfigError, match="an option twice"):
        cells(CONFIG, [axes[0], axes[0]], [0], tmp_path)


def run(place, seed, error, **more):
    report = {"seed": seed, "seconds": 30, "command": "typed", "metrics": {"error": error}}
    return place, report | more


AXES = [reporting.Axis("loss.name", ["softmax", "loose"]), reporting.Axis("n", ["5", "50"])]


def test_table_of_two_axes():
    runs = [run(("softmax", "5"), seed, 0.2 + 0.1 * seed) for seed in (0, 1, 2)]
    runs += [run(("loose", "5"), 0, 0.25), run(("softmax", "50"), 0, 0.1)]
    runs += [run(("loose", "50"), 0, None, metrics={}, diverged="loss is nan")]
    table = reporting.sweep_table(AXES, runs, title="T", command="c")
    assert "| loss.name | 5 | 50 |" in table
    # One seed is not compared with three.
    assert "| softmax | 30.0 ± 10.0 | 10.0 (1 of 3) |" in table
    assert "| loose | 25.0 (1 of 3) | – |" in table
    assert "- (k of 3): of k seeds" in table
    assert "Diverged: loose, 50 (seed 0)." in table
    assert "6 runs, together 3 minutes" in table


def test_ratios_are_no_percentages():
    metrics = {"base 1-shot": 0.5, "base discriminability": 1.234}
    table = reporting.sweep_table(
        AXES[:1], [run(("loose",), 0, 0, metrics=metrics)], title="T", command="c"
    )
    assert "| loose | 50.0 | 1.23 |" in table
    assert "In %, but for ratios." in table


def test_table_of_one_axis_has_metrics_as_columns():
    metrics = [{"accuracy": 0.5, "calibration error": 0.1}, {"accuracy": 0.6}]
    runs = [
        run((name,), 0, 0, metrics=m, validation=0.7)
        for name, m in zip(("softmax", "loose"), metrics, strict=True)
    ]
    table = reporting.sweep_table(AXES[:1], runs, title="T", command="c")
    assert "| loss.name | accuracy | calibration error ↓ | validation |" in table
    assert "| softmax | 50.0 | 10.0 | **70.0** |" in table
    assert "| loose | **60.0** | – | **70.0** |" in table
    chosen = reporting.sweep_table(AXES[:1], runs, title="T", command="c", metrics=["accuracy"])
    assert "| loss.name | accuracy |" in chosen
    # Runs may be older than a metric.
    chosen = reporting.sweep_table(AXES[:1], runs, title="T", command="c", metrics=["recall"])
    assert "| softmax | – |" in chosen


def test_metrics_that_no_run_has_give_a_table_without_values(tmp_path):
    """Such as the validation of runs that have no images for it."""
    runs = [run(("softmax",), 0, 0.25)]
    paths = reporting.write_sweep(
        tmp_path, AXES[:1], runs, title="T", command="c", metrics=["validation"]
    )
    assert [path.name for path in paths] == ["table.md", "table.json"]
    assert "| softmax | – |" in paths[0].read_text()


def test_where_all_runs_diverged_the_table_says_so(tmp_path):
    runs = [run((name,), 0, None, metrics={}, diverged="nan") for name in ("softmax", "loose")]
    for metrics in ((), ("accuracy",)):
        paths = reporting.write_sweep(
            tmp_path, AXES[:1], runs, title="T", command="c", metrics=metrics
        )
        assert "Diverged: softmax (seed 0); loose (seed 0)." in paths[0].read_text()


@pytest.mark.parametrize("labels", [["-0.1", "-0.05", "-0.02", "0.0", "0.05"], ["5", "10", "all"]])
def test_numbers_along_an_axis_do_not_touch(tmp_path, monkeypatch, labels):
    figures = []
    monkeypatch.setattr(reporting, "write_picture", lambda path, figure: figures.append(figure))
    runs = [run((label,), 0, 0.1, metrics=dict.fromkeys("abc", 0.1)) for label in labels]
    axes = [reporting.Axis("n", labels)]
    reporting.sweep_figure(axes, runs, tmp_path / "figure.png", title="T", command="c")
    (figure,) = figures
    figure.draw_without_rendering()
    for panel in figure.axes:
        texts = [t.get_window_extent() for t in panel.get_xticklabels() if t.get_text()]
        assert len(texts) >= 3
        for left, right in itertools.pairwise(sorted(texts, key=lambda box: box.x0)):
            assert left.x1 < right.x0


def test_figures_of_words_name_what_was_varied(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(reporting, "write_picture", lambda path, figure: figures.append(figure))
    runs = [run((label,), 0, 0.1, metrics=dict.fromkeys("abcd", 0.1)) for label in ("x/y", "y/x")]
    axes = [reporting.Axis("first/second", ["x/y", "y/x"])]
    reporting.sweep_figure(axes, runs, tmp_path / "figure.png", title="T", command="c")
    # The first panel of each of two rows.
    named = [panel.get_ylabel() for panel in figures[0].axes]
    assert named == ["first/second", "", "", "first/second", "", ""]


@pytest.mark.parametrize(
    ("seeds", "told"),
    [((1, 1), "One seed. "), ((2, 2), "Mean of 2 seeds; "), ((1, 3), "Mean of 1 to 3 seeds; ")],
)
def test_figures_tell_how_many_seeds_they_have(tmp_path, monkeypatch, seeds, told):
    figures = []
    monkeypatch.setattr(reporting, "write_picture", lambda path, figure: figures.append(figure))
    axes = [reporting.Axis("loss.name", ["softmax", "loose"])]
    runs = [
        run((name,), seed, 0.1)
        for name, number in zip(axes[0].labels, seeds, strict=True)
        for seed in range(number)
    ]
    reporting.sweep_figure(axes, runs, tmp_path / "figure.png", title="T", command="c")
    assert any(text.get_text().startswith(told) for text in figures[0].texts)


def test_points_are_joined_in_the_order_of_their_numbers(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(reporting, "write_picture", lambda path, figure: figures.append(figure))
    labels = ["0.0", "-0.1", "0.05"]
    runs = [run((label,), 0, 0.1 * place) for place, label in enumerate(labels)]
    axes = [reporting.Axis("m", labels)]
    reporting.sweep_figure(axes, runs, tmp_path / "figure.png", title="T", command="c")
    (container,) = figures[0].axes[0].containers
    assert list(container[0].get_xdata()) == [-0.1, 0.0, 0.05]
    assert list(container[0].get_ydata()) == pytest.approx([10, 0, 20])


def test_all_samples_stand_last_on_their_axis():
    axis = parse_axis("data.samples_per_class=5,10,0", CONFIG)
    assert axis.labels() == ["5", "10", "all"]
    assert reporting.Axis(axis.name, axis.labels()).numbers == [0, 1, 2]
    assert reporting.Axis("n", ["5", "10"]).numbers == [5, 10]


@pytest.mark.parametrize("axes", [AXES, AXES[:1], AXES[1:]], ids=["both", "names", "numbers"])
def test_figures_are_drawn(tmp_path, axes):
    labels = [axis.labels for axis in axes]
    places = [()]
    for own in labels:
        places = [(*place, label) for place in places for label in own]
    runs = [run(place, seed, 0.1 * seed) for place in places for seed in (0, 1)]
    reporting.sweep_figure(axes, runs, tmp_path / "figure.png", title="T", command="c")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep")
    data = tmp_path_factory.mktemp("data")
    command = ["sweep", "icons-groups", "--data-dir", str(data), "--directory", str(directory)]
    command += ["--steps", "2", "--validate-every", "2", "--sampling.batch-size", "16"]
    command += ["--model.widths", "4", "4", "4", "8", "--data.classes", "5"]
    assert main([*command, "--over", "loss.name=softmax,loose"]) == 0
    return directory, command


def test_a_sweep_writes_runs_table_and_figure(swept, capsys):
    directory, command = swept
    for name in ("table.md", "table.json", "figure.png"):
        assert (directory / name).stat().st_size > 0
    stored = json.loads((directory / "table.json").read_text())
    assert [r["place"] for r in stored["runs"]] == [["loose"], ["softmax"]]
    for stored_run in stored["runs"]:
        report = stored_run["report"]
        assert report["classes"] == 5
        assert report["metrics"]["error"] == pytest.approx(1 - report["metrics"]["accuracy"])
        assert 0 <= report["validation"] <= 1
    # A finished run is not trained again; another value adds to the table.
    before = (directory / "loss.name=loose" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    assert main([*command, "--over", "loss.name=loose"]) == 0
    assert (directory / "loss.name=loose" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert "| loose |" in capsys.readouterr().out


def test_the_run_can_be_evaluated_again(swept, capsys):
    directory, command = swept
    path = directory / "loss.name=loose" / "seed-0"
    config = run_from_dict(read_config(path))
    assert isinstance(config, GroupSoftmaxConfig)
    assert config.loss.name == "loose"
    data = command[command.index("--data-dir") + 1]
    assert main(["evaluate", str(path), "--split", "validation", "--data-dir", data]) == 0
    assert "validation split, 5 classes" in capsys.readouterr().out
    assert main(["evaluate", str(path), "--ways", "3", "--data-dir", data]) == 2
    assert "evaluation of protocol group-softmax has no ways" in capsys.readouterr().err
    assert main(["evaluate", str(path), "--split", "novel", "--data-dir", data]) == 2
    assert "no split 'novel'; it has train, validation, test" in capsys.readouterr().err


def test_runs_of_other_options_are_left_out(swept):
    directory, _ = swept
    config = run_from_dict(read_config(directory / "loss.name=loose" / "seed-0"))
    axis = parse_axis("loss.name=softmax,loose", config)
    assert len(finished(config, [axis], directory)) == 2
    other = dataclasses.replace(config, steps=3)
    assert finished(other, [axis], directory) == []
    np.testing.assert_equal(len(finished(config, [axis], directory / "nowhere")), 0)


def test_nothing_to_sweep_is_refused(capsys):
    assert main(["sweep", "icons-groups"]) == 2
    assert "needs at least one axis" in capsys.readouterr().err
    assert main(["compare", "icons-groups"]) == 2
    assert "compare is for few-shot learning" in capsys.readouterr().err


def test_a_directory_of_another_run_is_found_before_training(swept, capsys):
    directory, command = swept
    command = [*command, "--steps", "4", "--over", "loss.name=tight,loose"]
    assert main(command) == 2
    assert "holds a run of another configuration:\n  steps: 2 -> 4" in capsys.readouterr().err
    assert not (directory / "loss.name=tight").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "3"], "sweep sets --seed itself, in every run; give --seeds"),
        (["--loss.name=tight"], "sweep sets --loss.name itself, in every run; give its values to"),
        (
            ["--metrics", "eror"],
            "no metric 'eror'; there are error, accuracy, calibration error",
        ),
        (["--metrics", "tail accuracy"], "no metric 'tail accuracy'; there are error"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused_before_it_trains(tmp_path, capsys, words, message):
    places = ["--data-dir", str(tmp_path / "data"), "--directory", str(tmp_path / "sweep")]
    # Short, should it train for all that.
    short = ["--steps", "2", "--validate-every", "2", "--model.widths", "4", "4", "4", "8"]
    command = ["sweep", "icons-groups", "--over", "loss.name=softmax,tight", *short, *places]
    assert main([*command, *words]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_options_of_all_cells_are_checked_before_data_is_prepared(tmp_path, capsys):
    places = ["--data-dir", str(tmp_path / "data"), "--directory", str(tmp_path / "sweep")]
    command = ["sweep", "icons-groups", "--over", "loss.num_groups=4,9999", *places]
    assert main(command) == 2
    assert "loss.num_groups = 9999 must be at most the 256 features" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
