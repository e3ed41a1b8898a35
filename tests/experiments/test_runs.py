"""One run: what is refused before anything is written, and which checkpoint is evaluated."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from experiments.assembly import check_data, plan_run
from experiments.config import DataConfig, Folders, ModelConfig, OptimizerConfig, SamplingConfig
from experiments.errors import ConfigError
from experiments.presets import PRESETS
from experiments.protocols.few_shot import IntegrationEvaluation
from experiments.protocols.integration import IntegratedLoss
from experiments.reporting.run import read_episodes
from experiments.runs import complete_run, evaluate_run, restore_run, train_run
from experiments.training.checkpoints import CheckpointError, DamagedCheckpointError
from experiments.training.run_directory import ConfigMismatchError
from tests.experiments.tiny_runs import TINY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingConfig(strategy="64x64")}, "64x64"),
        ({"sampling": SamplingConfig(strategy="32by4")}, "sampling.strategy"),
        ({"sampling": SamplingConfig(batch_size=6)}, "does not spread evenly"),
        ({"data": DataConfig(mean=(0.1, 0.2, 0.3))}, "data.mean"),
        ({"data": DataConfig(name="faces")}, "'faces'"),
        ({"data": DataConfig(name="cifar10")}, "cifar10 has the splits train, test"),
        ({"model": ModelConfig(widths=(4, 4, 4))}, "model.widths"),
        ({"model": ModelConfig(weights="nowhere")}, "model.weights = nowhere does not exist"),
        ({"optimizer": OptimizerConfig(warmup_steps=4)}, "warmup_steps"),
        ({"evaluation": IntegrationEvaluation(shots=(1, 5000))}, "novel classes of icons do not"),
        ({"evaluation": IntegrationEvaluation(ways=30, shots=(1,))}, "validation classes of icons"),
        ({"loss": IntegratedLoss(name="direct:sce+nca")}, r"spectral:sce\+nca"),
        ({"log_every": 0}, "log_every must be at least 1, got 0"),
    ],
)
def test_a_run_that_cannot_end_well_leaves_no_directory(tmp_path, folders, changes, message):
    config = dataclasses.replace(
        TINY, loss=IntegratedLoss(name="sce"), model=ModelConfig(widths=(4, 4, 4, 16))
    )
    with pytest.raises(ConfigError, match=message):
        train_run(plan_run(dataclasses.replace(config, **changes)), tmp_path / "run", folders)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("preset", "section", "changes", "message"),
    [
        ("coco", "", {}, "set model.weights"),
        ("kanji", "sampling", {"strategy": "4x4"}, "needs one class per image"),
        ("mini-imagenet", "data", {"mixup": 1.0}, "compares samples with each other"),
        ("caltech256-groups", "loss", {"num_groups": 4096}, "must be at most 2048"),
        ("caltech256-groups", "data", {"imbalance": 2.0}, "imbalance must be above 0 and at most"),
    ],
)
def test_options_are_checked_before_data_is_prepared(tmp_path, preset, section, changes, message):
    config = PRESETS[preset].config
    if section:
        changed = dataclasses.replace(vars(config)[section], **changes)
        config = dataclasses.replace(config, **{section: changed})
    # There is no data: preparing it would fail with another error.
    with pytest.raises(ConfigError, match=message):
        check_data(plan_run(config), Folders(data_dir=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders):
    """A run with a checkpoint after steps 2 and 4 (and 6)."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    plan = plan_run(dataclasses.replace(TINY, loss=IntegratedLoss(name="sce"), steps=6))
    report = complete_run(plan, directory, folders, command="train it")
    return directory, plan, report


def test_the_report_states_run_version_and_metrics(trained):
    directory, _, report = trained
    assert json.loads((directory / "report.json").read_text()) == report
    assert (report["preset"], report["loss"], report["label"]) == ("", "sce", "SCE")
    assert report["version"] in (directory / "report.md").read_text()
    assert [metric["name"] for metric in report["metrics"]] == [
        "1-shot accuracy",
        "5-shot accuracy",
        "1-shot accuracy (cosine)",
        "5-shot accuracy (cosine)",
        "recall@1",
        "MAP@R",
    ]
    of_episodes, episodes = report["metrics"][:4], read_episodes(directory)
    assert list(episodes) == [metric["name"] for metric in of_episodes]
    for metric, result in zip(of_episodes, report["results"], strict=True):
        assert episodes[metric["name"]].mean() == pytest.approx(metric["value"], rel=1e-5)
        assert (metric["value"], metric["interval"]) == (result["accuracy"], result["interval"])
        assert (metric["unit"], metric["higher_is_better"]) == ("%", True)
    assert report["validation"]["name"] == "1-shot accuracy"
    assert report["notes"] == []


def test_a_finished_run_is_read_not_repeated(trained, folders, monkeypatch):
    directory, plan, report = trained
    before = (directory / "metrics.jsonl").stat().st_mtime_ns
    assert complete_run(plan, directory, folders, command="another") == report
    assert (directory / "metrics.jsonl").stat().st_mtime_ns == before
    other = plan_run(dataclasses.replace(plan.config, seed=1))
    with pytest.raises(ConfigMismatchError, match="seed"):
        complete_run(other, directory, folders, command="another")


def flip_a_bit_of_the_arrays(directory, step):
    """In the largest file of the checkpoint."""
    files = [path for path in (directory / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_where_the_best_checkpoint_is_damaged_the_report_states_which_one_is_used(
    trained, folders, tmp_path
):
    run = shutil.copytree(trained[0], tmp_path / "run")
    best = restore_run(run)
    assert best.notes == []
    flip_a_bit_of_the_arrays(run, best.step)
    with pytest.raises(DamagedCheckpointError, match=f"{best.step} is damaged"):
        restore_run(run, str(best.step))
    _, report = evaluate_run(run, folders)
    assert report["step"] != best.step
    (note,) = report["notes"]
    assert f"{best.step} is damaged" in note
    assert f"checkpoint of step {report['step']} is used instead" in note
    for step in (2, 4, 6):
        if (run / "checkpoints" / str(step)).is_dir() and step != best.step:
            flip_a_bit_of_the_arrays(run, step)
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        restore_run(run)


def test_checkpoints_are_named_by_rank_or_step(trained):
    directory, *_ = trained
    assert restore_run(directory, "latest").step == 6
    assert restore_run(directory / "checkpoints", "6").step == 6
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
        restore_run(directory, "5")
    with pytest.raises(ConfigError, match="best, latest or the number of a step, got 'worst'"):
        restore_run(directory, "worst")


def test_evaluation_options_can_be_replaced(trained, folders):
    directory, *_ = trained
    _, report = evaluate_run(
        directory,
        folders,
        overrides={
            "evaluation.ways": 3,
            "evaluation.shots": (2,),
            "evaluation.distances": ("cosine",),
        },
    )
    assert [result["ways"] for result in report["results"]] == [3]
    names = [metric["name"] for metric in report["metrics"]]
    assert names == ["2-shot accuracy (cosine)", "recall@1", "MAP@R"]
    with pytest.raises(
        ConfigError, match=r"few-shot has no loss\.name; it has evaluation\.ways, e"
    ):
        evaluate_run(directory, folders, overrides={"loss.name": "nca"})
    with pytest.raises(ConfigError, match=r"evaluation\.episodes must be at least 2, got 1"):
        evaluate_run(directory, folders, overrides={"evaluation.episodes": 1})
    with pytest.raises(ConfigError, match="no split 'test'; it has base, validation, novel"):
        evaluate_run(directory, folders, split="test")
