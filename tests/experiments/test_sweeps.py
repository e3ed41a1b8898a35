"""Grids: axes and cells, the command `sweep`, and evaluations of one run against each other."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.cli.main import main
from experiments.core.config import TrainConfig
from experiments.core.errors import ConfigError
from experiments.papers import few_shot, integration
from experiments.papers.group_softmax import GroupSoftmaxConfig
from experiments.sweeps.grid import make_cells, parse_axis, parse_comparison
from tests.experiments.test_grid_report import squeezed
from tests.experiments.tiny_runs import TINY_OPTIONS, metrics

pytestmark = pytest.mark.usefixtures("light_backbone")

CONFIG = GroupSoftmaxConfig()


def test_values_are_parsed_in_the_types_of_their_options():
    def values(text, config: TrainConfig = CONFIG):
        return [tuple(at.values()) for at in parse_axis(text, config).settings]

    assert values("data.classes=5,20") == [(5,), (20,)]
    assert values("data.flip=True,false") == [(True,), (False,)]
    # Several numbers or names are one value.
    assert values("steps/optimizer.decay-steps=90/30+60,40/20") == [(90, (30, 60)), (40, (20,))]
    found = values("evaluation.distances=cosine,euclidean+cosine", few_shot.FewShotConfig())
    assert found == [(("cosine",),), (("euclidean", "cosine"),)]


def test_an_axis_is_named_after_the_options_that_distinguish_its_positions():
    for text, name, labels in (
        ("loss.name/steps=softmax/3,loose/1", "loss.name", "softmax loose"),
        ("loss.name/steps=tight/5,tight/9,loose/5", "loss.name/steps", "tight/5 tight/9 loose/5"),
        ("data.samples_per_class=5,10,0", "data.samples_per_class", "5 10 all"),
    ):
        assert parse_axis(text, CONFIG)[:2] == (name, tuple(labels.split()))


def axes_of(*texts):
    return [parse_axis(text, CONFIG) for text in texts]


def test_cells_are_all_combinations(tmp_path):
    axes = axes_of("loss.name=softmax,loose", "data.classes=5,9")
    found = make_cells(CONFIG, axes, [3, 1, 3], tmp_path)
    assert len(found) == len({cell.directory for cell in found}) == 8
    assert [cell.config.seed for cell in found] == [3] * 4 + [1] * 4
    last: Any = found[-1]
    assert last.place == ("loose", "9")
    assert (last.config.loss.name, last.config.data.classes) == ("loose", 9)
    assert last.directory == tmp_path / "loss.name=loose" / "data.classes=9" / "seed-1"
    (cell,) = make_cells(CONFIG, axes_of("model.weights=runs/a"), [0], tmp_path)
    assert cell.directory.parent == tmp_path / "model.weights=runs-a"


def test_a_comparison_is_parsed():
    axes = axes_of(
        "loss.name/optimizer.learning_rate=softmax/0.3,loose/0.1",
        "data.classes=5,0",
        "loss.num_groups=2,4",
    )
    for baseline in ("loss.name=softmax", "loss.name/optimizer.learning-rate=softmax/0.30"):
        found = parse_comparison(axes, CONFIG, baseline=baseline, choose="loss.num-groups")
        assert found == (("loss.name", "softmax"), "", "loss.num_groups")
    found = parse_comparison(axes, CONFIG, baseline="data.classes=0", pairs_over="loss.name")
    assert found == (("data.classes", "all"), "loss.name", "")
    pairs = axes_of("loss.name/optimizer.weight_decay=softmax/0,softmax/0.1,loose/0")
    baseline = "loss.name/optimizer.weight-decay=softmax/0"
    found = parse_comparison(pairs, CONFIG, baseline=baseline)
    assert found.baseline == ("loss.name/optimizer.weight_decay", "softmax/0.0")
    with pytest.raises(ConfigError, match="2 labels have this value"):
        parse_comparison(pairs, CONFIG, baseline="loss.name=softmax")


SWEEP = "--over loss.name=softmax,tight"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--over loss.name=", "must be OPTION=VALUE"),
        ("--over model.widths=4+x", "'x' must be of type int"),
        ("--over loss.name=soft", "'soft' must be one of softmax, tight, loose, "),
        ("--over loss.name/data.classes=loose/5,loose/5", "the value 'loose/5' is repeated"),
        ("--over loss.name/data.classes=softmax", "1 values for 2 options"),
        ("--over seed=1,2", "use --seeds"),
        ("--over data.name=folder:/a/b,folder:/a-b", "two values of --over have the same"),
        ("--over loss.name=tight loss.name=loose", "two axes have the same option"),
        (f"{SWEEP} --baseline loss.name=loose", "0 labels have this value"),
        (f"{SWEEP} --baseline loss.name=tight,softmax", "must be one label"),
        (f"{SWEEP} --pairs-over seed", "got seed, and the axes are loss.name"),
        (f"{SWEEP} --choose loss.name", "leave one for"),
        (f"{SWEEP} --seed 3", "the grid sets --seed in every run; use --seeds instead"),
        (f"{SWEEP} --loss.name=loose --loss.name tight", "sets --loss.name in every run; use its"),
        (f"{SWEEP} --metrics eror", "no metric eror; did you mean error?"),
        # Of all runs, before data is prepared.
        ("--over loss.num_groups=4,9999", "num_groups = 9999 must be at most"),
    ],
)
def test_an_impossible_grid_is_refused_before_it_trains(tmp_path, capsys, words, message):
    places = ["--data-dir", str(tmp_path / "data"), "--directory", str(tmp_path / "grid")]
    # Short, in case it trains after all.
    short = ["--steps", "2", "--validate-every", "2", "--model.widths", "4", "4", "4", "8"]
    assert main(["sweep", "icons-groups", *shlex.split(words), *short, *places]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def grid(tmp_path_factory, folders):
    """A grid on the command line, with a run that diverges before the others."""
    directory = tmp_path_factory.mktemp("grid")
    command = ["sweep", "icons", *TINY_OPTIONS, "--directory", str(directory)]
    command += ["--data-dir", str(folders.data_dir)]
    real = integration.build_loss

    def failing(options, problem):
        loss = real(options, problem)
        return (lambda *batch: jnp.nan * loss(*batch)) if options.name == "sce" else loss

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(integration, "build_loss", failing)
        status = main([*command, "--over", "loss.name=sce,nca"])
    return SimpleNamespace(
        directory=directory, command=command, status=status, output=output.getvalue()
    )


def report_of(grid, loss: str, seed: int = 0) -> Path:
    return grid.directory / f"loss.name={loss}" / f"seed-{seed}" / "report.json"


def test_a_run_that_diverges_does_not_stop_the_others(grid):
    assert grid.status == 3
    run, shown = report_of(grid, "sce").parent, squeezed(grid.output)
    assert "| sce | diverged |" in shown
    assert f"1 run diverged (delete the folder of one to train it again):\n  {run}: " in shown
    report = json.loads((run / "report.json").read_text())
    assert report["diverged"] == "diverged: loss is nan at step 2"
    assert report["diverged"] in (run / "report.md").read_text()
    assert metrics(run)[-1]["loss"] == "NaN"
    # The other run is at its place, with its own numbers.
    stored = json.loads((grid.directory / "table.json").read_text())
    own = json.loads(report_of(grid, "nca").read_text())
    assert [run["place"] for run in stored["runs"]] == [["sce"], ["nca"]]
    assert (own["label"], own["seed"]) == ("NCA", 0)
    assert stored["runs"][1]["report"]["metrics"] == own["metrics"]
    assert f"| nca | {100 * own['metrics'][0]['value']:.1f} ± " in shown


@pytest.mark.long
def test_a_grid_that_was_killed_goes_on_where_it_stopped(grid, caplog, capsys, killed_after):
    """Of two seeds, one is there, and the other is killed."""
    stamp = report_of(grid, "nca").stat().st_mtime_ns
    command = [*grid.command, "--over", "loss.name=nca", "--seeds", "1", "0"]
    # A directory of another run is found before any training.
    assert main([*command, "--steps", "4"]) == 2
    assert "steps: 2 -> 4" in capsys.readouterr().err
    killed_after(4, lambda: main(command))  # Three are of checks.
    assert (report_of(grid, "nca", 1).parent / "config.json").exists()
    assert not report_of(grid, "nca", 1).exists()
    assert main(command) == 0
    assert report_of(grid, "nca").stat().st_mtime_ns == stamp
    first, second = (json.loads(report_of(grid, "nca", seed).read_text()) for seed in (0, 1))
    value, other = (report["metrics"][0]["value"] for report in (first, second))
    assert f"| nca | {50 * (value + other):.1f} ± " in squeezed(capsys.readouterr().out)
    # A torn report is written again, from the checkpoint of the run.
    report_of(grid, "nca").write_text('{"loss": "nca", "sam')
    assert main(command) == 0
    assert "seed-0/report.json cannot be read" in caplog.text
    assert json.loads(report_of(grid, "nca").read_text())["metrics"] == first["metrics"]


@pytest.mark.long
def test_runs_are_compared_pooled_and_chosen(tmp_path, folders, capsys):
    def table(name, words, status=0):
        command = ["sweep", "icons-groups", "--data-dir", str(folders.data_dir), "--steps", "2"]
        command += ["--validate-every", "2", "--sampling.batch-size", "16", "--data.classes", "5"]
        command += ["--directory", str(tmp_path / name), "--over", *words.split()]
        assert main(command) == status
        shown = capsys.readouterr()
        if status:
            assert not (tmp_path / name).exists()
            return shown.err
        return squeezed(shown.out), json.loads((tmp_path / name / "table.json").read_text())

    over = "loss.name=softmax,loose --seeds 0 1 --baseline loss.name=softmax"
    output, stored = table("baseline", over)
    assert "### group-softmax on icons\n" in output
    assert "![" not in output
    values = {
        (run["place"][0], run["report"]["seed"]): run["report"]["metrics"][0]["value"]
        for run in stored["runs"]
    }
    (difference, *_) = stored["differences"]
    expected = [values["loose", seed] - values["softmax", seed] for seed in (0, 1)]
    assert (difference["metric"], difference["place"]) == ("error", ["loose"])
    assert difference["values"] == pytest.approx(expected)

    over = "loss.name=loose loss.num_groups=2,4 --choose loss.num_groups"
    refused = table("choice", f"{over} --data.holdout 0", 2)
    assert "--choose needs the split validation" in refused
    output, stored = table("choice", over)
    validations = {run["place"][1]: run["report"]["validation"]["value"] for run in stored["runs"]}
    (choice,) = stored["choices"]
    assert validations[choice["label"]] == max(validations.values())

    over = "loss.name=loose data.samples_per_class/data.subset_seed=5/0,6/1"
    output, _ = table("subsets", f"{over} --pairs-over data.subset_seed")
    assert "Means over data.samples_per_class 5, 6, each a mean of seed 0." in output


@pytest.mark.long
def test_evaluations_of_a_run_are_kept_and_compared(grid, folders, capsys, monkeypatch):
    run = report_of(grid, "nca").parent
    command = ["evaluate", str(run), "--data-dir", str(folders.data_dir), "--split", "validation"]
    command += ["--over", "evaluation.ways=2,4", "--baseline", "evaluation.ways=2"]
    command += ["--set", "evaluation.queries=3", "--metrics", "5-shot accuracy"]
    assert main(command) == 0
    shown = squeezed(capsys.readouterr().out)
    root = run / "evaluations" / "validation-step2,evaluation.queries=3"
    values = []
    for ways in (2, 4):
        report = root / f"evaluation.ways={ways}" / "seed-0" / "report.json"
        stored = json.loads(report.read_text())
        own = stored["evaluation"]
        assert (stored["split"], own["ways"], own["queries"]) == ("validation", ways, 3)
        values += [of["value"] for of in stored["metrics"] if of["name"] == "5-shot accuracy"]
    assert f"| 4 | {100 * values[1]:.1f} ± " in shown
    assert f"| 4 | {100 * np.subtract(*values[::-1]):+.2f} |".replace("-", "−") in shown
    monkeypatch.setattr("experiments.sweeps.grid.evaluate", None)  # They are read.
    assert main(command) == 0
    assert main([*command, "--set", "evaluation.ways=3"]) == 2
    assert "the grid sets --evaluation.ways in every run" in capsys.readouterr().err
