"""Sweeps: axes and cells; and protocol B by the command line."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.config import DataConfig, ModelConfig, SamplingConfig
from experiments.errors import ConfigError
from experiments.protocols import run_from_dict
from experiments.protocols.group_softmax import GroupSoftmaxConfig
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


def test_all_samples_have_a_label_of_their_own():
    assert parse_axis("data.samples_per_class=5,10,0", CONFIG).labels() == ["5", "10", "all"]


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
