"""Grids: axes and cells, and the commands `compare` and `sweep`."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import jax.numpy as jnp
import pytest

from experiments.cli.main import main
from experiments.core.config import TrainConfig
from experiments.core.errors import ConfigError
from experiments.core.storage import write_json
from experiments.papers import config_to_dict, few_shot, integration
from experiments.papers.group_softmax import GroupSoftmaxConfig
from experiments.papers.presets import PRESETS
from experiments.reporting.grid import Axis
from experiments.run import Plan, plan_run, prepare_and_count
from experiments.sweeps import grid as sweeps
from experiments.sweeps.grid import make_cells, parse_axis, parse_comparison
from tests.experiments import test_grid_report as fakes
from tests.experiments.tiny_runs import TINY_OPTIONS, metrics

pytestmark = pytest.mark.usefixtures("light_backbone")

CONFIG = GroupSoftmaxConfig()


def test_values_are_parsed_in_the_types_of_their_options():
    def values(text, config: TrainConfig = CONFIG):
        return [tuple(at.values()) for at in parse_axis(text, config).settings]

    assert values("data.classes=5,20") == [(5,), (20,)]
    assert values("data.flip=True,false") == [(True,), (False,)]
    assert values("model.weights=runs/a,runs/b") == [("runs/a",), ("runs/b",)]
    # Several numbers or names are one value.
    assert values("steps/optimizer.decay-steps=90/30+60,40/20") == [(90, (30, 60)), (40, (20,))]
    few = few_shot.FewShotConfig()
    found = values("evaluation.distances=cosine,euclidean+cosine", few)
    assert found == [(("cosine",),), (("euclidean", "cosine"),)]
    with pytest.raises(ConfigError, match="'l1' must be one of euclidean, cosine"):
        parse_axis("evaluation.distances=cosine+l1", few)


@pytest.mark.parametrize(
    ("text", "name", "labels"),
    [
        ("loss.name/steps=softmax/3,loose/1", "loss.name", "softmax loose"),
        ("loss.name/steps=tight/5,tight/9,loose/5", "loss.name/steps", "tight/5 tight/9 loose/5"),
        ("optimizer.decay_steps=30+60", "optimizer.decay_steps", "30+60"),
        ("data.samples_per_class=5,10,0", "data.samples_per_class", "5 10 all"),
    ],
)
def test_an_axis_is_named_after_the_options_that_distinguish_its_positions(text, name, labels):
    assert parse_axis(text, CONFIG)[:2] == (name, tuple(labels.split()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss.name=", "must be OPTION=VALUE"),
        ("loss.nam=softmax", r"no option loss.nam; did you mean loss.name"),
        ("model=4", "no option model; did you mean model.dim or "),
        ("protocol=few-shot", "no option protocol; .* --help lists them"),
        ("model.widths=4+x", "'x' must be of type int"),
        ("loss.name=soft", "'soft' must be one of softmax, tight, loose; did you mean softmax"),
        ("data.flip=yes", "'Yes' must be one of True, False"),
        ("loss.name/data.classes=loose/5,loose/5", "the value 'loose/5' is repeated"),
        ("loss.name/data.classes=softmax", "1 values for 2 options"),
        ("seed=1,2", "use --seeds"),
    ],
)
def test_impossible_axes_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_axis(text, CONFIG)


def axes_of(*texts):
    return [parse_axis(text, CONFIG) for text in texts]


def test_cells_are_all_combinations(tmp_path):
    axes = axes_of("loss.name=softmax,loose", "data.classes=5,9")
    found = make_cells(CONFIG, axes, [3, 1, 3], tmp_path)
    assert len(found) == len({cell.directory for cell in found}) == 8
    assert [cell.config.seed for cell in found] == [3] * 4 + [1] * 4
    last = found[-1]
    assert last.place == ("loose", "9")
    assert isinstance(last.config, GroupSoftmaxConfig)
    assert (last.config.loss.name, last.config.data.classes) == ("loose", 9)
    assert last.directory == tmp_path / "loss.name=loose" / "data.classes=9" / "seed-1"
    axes = axes_of("model.widths=4+8+8+8,4+4+4+4")
    first = make_cells(CONFIG, axes, [0], tmp_path)[0]
    assert first.config.model.widths == (4, 8, 8, 8)
    assert first.directory == tmp_path / "model.widths=4+8+8+8" / "seed-0"
    with pytest.raises(ConfigError, match="two axes have the same option"):
        make_cells(CONFIG, axes * 2, [0], tmp_path)
    (cell,) = make_cells(CONFIG, axes_of("model.weights=runs/a"), [0], tmp_path)
    assert cell.directory.parent == tmp_path / "model.weights=runs-a"
    with pytest.raises(ConfigError, match=r"2 values have the same directory, .*=runs-a-b/seed-0"):
        make_cells(CONFIG, axes_of("model.weights=runs/a/b,runs/a-b"), [0, 1], tmp_path)


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
    assert parse_comparison(axes, CONFIG) == (None, "", "")
    labels = ("random", "8x4")
    batches = Axis("training batches", labels, tuple({"sampling.strategy": s} for s in labels))
    for choose in ("sampling.strategy", "training batches"):
        assert parse_comparison([*axes, batches], CONFIG, choose=choose).choose == batches.name
    pairs = axes_of("loss.name/optimizer.weight_decay=softmax/0,softmax/0.1,loose/0")
    baseline = "loss.name/optimizer.weight-decay=softmax/0"
    found = parse_comparison(pairs, CONFIG, baseline=baseline)
    assert found.baseline == ("loss.name/optimizer.weight_decay", "softmax/0.0")
    with pytest.raises(ConfigError, match="2 labels have this value"):
        parse_comparison(pairs, CONFIG, baseline="loss.name=softmax")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"baseline": "loss.name=tight"}, "0 labels have this value"),
        ({"baseline": "loss.name=loose,softmax"}, "must be one label"),
        ({"baseline": "model.dim=8"}, "of an axis of several"),
        ({"pairs_over": "seed"}, "got seed, and the axes are loss.name, model.dim"),
        ({"choose": "steps"}, "got steps, and the axes are loss.name"),
        ({"pairs_over": "model.dim", "choose": "model.dim"}, "must name different axes"),
        ({"pairs_over": "model.dim", "choose": "loss.name"}, "leave one for"),
        ({"pairs_over": "loss.name", "baseline": "loss.name=loose"}, "not in --pairs-over or --ch"),
    ],
)
def test_impossible_comparisons_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_comparison(axes_of("loss.name=softmax,loose", "model.dim=8"), CONFIG, **words)


@pytest.fixture(scope="module")
def swept(tmp_path_factory, folders):
    directory = tmp_path_factory.mktemp("sweep")
    command = ["sweep", "icons-groups", "--data-dir", str(folders.data_dir)]
    command += ["--directory", str(directory)]
    command += ["--steps", "2", "--validate-every", "2", "--sampling.batch-size", "16"]
    command += ["--model.widths", "4", "4", "4", "8", "--data.classes", "5"]
    assert main([*command, "--over", "loss.name=softmax,loose"]) == 0
    return directory, command


@pytest.mark.long
def test_a_sweep_writes_runs_table_and_figure(swept, capsys):
    directory, command = swept
    assert (directory / "figure.png").stat().st_size > 0
    heading = "### group-softmax on icons\n\n| loss.name"
    assert (directory / "table.md").read_text().startswith(heading)
    stored = json.loads((directory / "table.json").read_text())
    assert stored["axes"] == [{"name": "loss.name", "labels": ["softmax", "loose"]}]
    assert [run["place"] for run in stored["runs"]] == [["softmax"], ["loose"]]
    for run in stored["runs"]:
        report = run["report"]
        assert report["classes"] == 5
        values = {metric["name"]: metric["value"] for metric in report["metrics"]}
        assert values["error"] == pytest.approx(1 - values["accuracy"])
        assert 0 <= report["validation"]["value"] <= 1
    # The table has the values of the command.
    assert main([*command, "--over", "loss.name=loose"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"\| loose +\|", output)
    assert not re.search(r"\| softmax +\|", output)


@pytest.mark.long
def test_a_directory_of_another_run_is_found_before_training(swept, capsys):
    directory, command = swept
    assert main([*command, "--steps", "4", "--over", "loss.name=tight,loose"]) == 2
    assert re.search(r"steps: 2 -> 4", capsys.readouterr().err)
    assert not (directory / "loss.name=tight").exists()


SWEEP = "sweep icons-groups --over loss.name=softmax,tight"
# Short, in case it trains after all.
SHORT = ["--steps", "2", "--validate-every", "2", "--model.widths", "4", "4", "4", "8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{SWEEP} --seed 3", "the grid sets --seed in every run; use --seeds instead"),
        (f"{SWEEP} --loss.name=loose --loss.name tight", "sets --loss.name in every run; use its"),
        (f"{SWEEP} --metrics eror", "no metric eror; did you mean error?"),
        (f"{SWEEP} --data.classes 5 --over data.classes=5,9", "the grid sets --data.classes"),
        ("sweep icons-groups", "needs at least one axis"),
        # Of all runs, before data is prepared.
        ("sweep icons-groups --over loss.num_groups=4,9999", "num_groups = 9999 must be at most"),
        ("compare icons --seed 1", "sets --seed in every run; use --seeds instead"),
        ("compare icons --loss.name=sce", "sets --loss.name in every run; use --losses instead"),
        ("compare icons --sampling.strategy 32x4", "every run; use --sampling instead"),
        ("compare icons --losses", "--losses"),
    ],
)
def test_an_impossible_grid_is_refused_before_it_trains(tmp_path, capsys, words, message):
    places = ["--data-dir", str(tmp_path / "data"), "--directory", str(tmp_path / "grid")]
    assert main([*shlex.split(words), *SHORT, *places]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def untrained(plan, directory, *, command, **_):
    """Stands for a run: a report with numbers that depend on its folder."""
    value = zlib.crc32("/".join(directory.parts[-3:]).encode()) / 2**32
    found = fakes.run(
        (), plan.config.seed, (fakes.ERROR, value), validation=1 - value, command=command
    )
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config_to_dict(plan.config))
    write_json(directory / "report.json", found.report)
    return found.report


def test_a_grid_has_every_run_at_its_place(tmp_path, folders, monkeypatch):
    """Its settings, its seed, its directory, its report; and how they are shown."""
    config = PRESETS["icons-margin"].config
    axes = [parse_axis("loss.margin=-0.1,0", config)]

    def complete(plan: Plan, directory: Path) -> dict[str, Any]:
        config: Any = plan.config
        name = f"loss.margin={config.loss.margin}/seed-{config.seed}"
        assert directory == tmp_path / name
        assert prepare_and_count(plan, folders)
        return {"name": name}

    monkeypatch.setattr(sweeps, "write_grid", written := Mock(return_value=[tmp_path]))
    monkeypatch.setattr(sweeps, "read_episodes", lambda directory: {str(directory): [0.5]})
    how: dict[str, Any] = {"title": "Margins", "metrics": ["novel D_intra"], "command": "typed"}
    how["comparison"] = parse_comparison(axes, config, baseline="loss.margin=0")
    found = sweeps.run_grid(config, axes, [3, 1], tmp_path, folders, complete, **how)
    assert found == ([tmp_path], [])
    (root, shown, runs), given = written.call_args
    assert (root, shown) == (tmp_path, axes)
    assert [run.place for run in runs] == [("-0.1",), ("0.0",)] * 2
    names = [f"loss.margin={m}/seed-{seed}" for seed in (3, 1) for m in (-0.1, 0.0)]
    assert [run.report["name"] for run in runs] == names
    assert [run.episodes for run in runs] == [{str(tmp_path / name): [0.5]} for name in names]
    bounds = [metric.name for metric in given.pop("pair_metrics").metrics]
    assert bounds == ["novel P^s bound", "validation P^s bound"]
    assert given == {**how, "notes": ()}


def test_every_evaluation_of_a_grid_has_its_own_options(tmp_path, folders, monkeypatch):
    loaded = Mock(plan=plan_run(few_shot.FewShotConfig()), step=4, directory=tmp_path)
    evaluate = Mock(side_effect=lambda *given, **_: {"label": "SCE", "metrics": [{"name": "m"}]})
    monkeypatch.setattr(sweeps, "load_run", load := Mock(return_value=loaded))
    monkeypatch.setattr(sweeps, "evaluate", evaluate)
    monkeypatch.setattr(sweeps, "write_report", lambda folder, *_: write_json(folder / "a", {}))
    monkeypatch.setattr(sweeps, "write_grid", written := Mock())
    overrides = {"evaluation.queries": 3}
    how: dict[str, Any] = {"split": "validation", "overrides": overrides, "command": "typed"}
    sweeps.evaluate_over(
        tmp_path, folders, ["evaluation.ways=2,4"], checkpoint="latest", metrics=["m"], **how
    )
    load.assert_called_once_with(tmp_path, "latest")
    options = [overrides | {"evaluation.ways": ways} for ways in (2, 4)]
    own = {"split": "validation", "folders": folders}
    assert evaluate.mock_calls == [call(loaded, given, **own) for given in options]
    assert [run.place for run in written.call_args.args[2]] == [("2",), ("4",)]
    root = tmp_path / "evaluations" / "validation-step4,evaluation.queries=3"
    assert written.call_args.args[0] == root
    assert {path.parent.parent.name for path in root.rglob("a")} == {
        f"evaluation.ways={ways}" for ways in (2, 4)
    }


@pytest.mark.long
def test_runs_are_compared_chosen_and_pooled(tmp_path, swept, capsys, monkeypatch):
    monkeypatch.setattr("experiments.run.complete_run", untrained)

    def table(name, words, status=0):
        directory = tmp_path / name
        command = [*swept[1], "--directory", str(directory), "--over", *words.split()]
        assert main(command) == status
        shown = capsys.readouterr()
        if status:
            assert not directory.exists()
            return shown.err
        return shown.out, json.loads((directory / "table.json").read_text())

    over = "loss.name=softmax,loose --seeds 0 1 --baseline loss.name=softmax"
    output, stored = table("baseline", over)
    assert "over seeds 0, 1, n = 2." in output
    assert "![" not in output
    assert "![" in (tmp_path / "baseline" / "table.md").read_text()
    (difference, *_) = stored["differences"]
    assert (difference["metric"], difference["place"]) == ("error", ["loose"])

    over = "loss.name=loose loss.num_groups=2,4 --choose loss.num_groups"
    refused = table("choice", f"{over} --data.holdout 0", 2)
    assert "--choose needs the split validation" in refused
    output, stored = table("choice", over)
    validations = {run["place"][1]: run["report"]["validation"]["value"] for run in stored["runs"]}
    (choice,) = stored["choices"]
    assert validations[choice["label"]] == max(validations.values())
    assert f"best mean validation. loose: {choice['label']}." in output

    over = "loss.name=loose data.subset_seed=0,1 --pairs-over data.subset_seed"
    refused = table("subsets", f"{over} --data.classes 0", 2)
    assert "data.subset_seed = 1 has no effect" in refused
    output, _ = table("subsets", over)
    assert "±: standard deviation over data.subset_seed 0, 1, each" in output
    note = "- Subsets overlap and share their test images: means and intervals over"
    assert note in output
    over = "loss.name=loose data.samples_per_class/data.subset_seed=5/0,6/1"
    output, _ = table("subsets-of-images", f"{over} --pairs-over data.subset_seed")
    assert note in output


@pytest.fixture(scope="module")
def grid(tmp_path_factory, folders):
    """A comparison on the command line, with a run that diverges before the others."""
    directory = tmp_path_factory.mktemp("grid")
    command = ["compare", "icons", *TINY_OPTIONS, "--directory", str(directory)]
    command += ["--data-dir", str(folders.data_dir)]
    real = integration.build_loss

    def failing(options, problem):
        loss = real(options, problem)
        return (lambda *batch: jnp.nan * loss(*batch)) if options.name == "sce" else loss

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(integration, "build_loss", failing)
        status = main([*command, "--losses", "nca", "sce", "--sampling", "8x2"])
    return SimpleNamespace(
        directory=directory, command=command, status=status, output=output.getvalue()
    )


def cell(grid, loss: str, sampling: str) -> Path:
    return grid.directory / f"loss.name={loss}" / f"sampling.strategy={sampling}" / "seed-0"


def test_compare_writes_its_runs_and_their_table(grid):
    for name in ("config.json", "metrics.jsonl", "report.json", "report.md", "checkpoints"):
        assert (cell(grid, "nca", "8x2") / name).exists(), name
    assert "8-way 2-shot" in grid.output
    # The order of the paper's tables, not of the command.
    assert grid.output.index("| SCE") < grid.output.index("| NCA")
    assert "NCA: neighbourhood component analysis." in grid.output


def test_a_run_that_diverges_does_not_stop_the_others(grid):
    assert grid.status == 3
    assert re.search(r"\| SCE +\| +diverged +\|", grid.output)
    assert "1 run diverged (delete" in grid.output
    run = cell(grid, "sce", "8x2")
    report = json.loads((run / "report.json").read_text())
    assert report["diverged"] == "diverged: loss is nan at step 2"
    assert report["diverged"] in (run / "report.md").read_text()
    assert report["metrics"] == []
    assert metrics(run)[-1]["loss"] == "NaN"


@pytest.mark.long
def test_a_second_command_trains_only_what_is_missing(grid, caplog):
    report = cell(grid, "nca", "8x2") / "report.json"
    whole, stamp = json.loads(report.read_text()), report.stat().st_mtime_ns
    assert main([*grid.command, "--losses", "nca", "--sampling", "random", "8x2"]) == 0
    assert report.stat().st_mtime_ns == stamp
    assert cell(grid, "nca", "random").exists()
    # A torn report is written again, from the checkpoint of the run.
    report.write_text('{"loss": "nca", "sam')
    assert main([*grid.command, "--losses", "nca", "--sampling", "8x2"]) == 0
    assert "sampling.strategy=8x2/seed-0/report.json cannot be read" in caplog.text
    again = json.loads(report.read_text())
    assert again["metrics"] == whole["metrics"]
    assert again["seconds"] == pytest.approx(whole["seconds"], abs=2)
    assert whole["command"].endswith("--losses nca sce --sampling 8x2")
    assert again["command"].endswith("--losses nca --sampling 8x2")
