"""One run: what is refused before anything is written, and which checkpoint is evaluated."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from experiments.assembly import plan_run, prepare_and_count
from experiments.config import DataConfig, Folders, ModelConfig, SamplingConfig
from experiments.errors import ConfigError
from experiments.presets import PRESETS
from experiments.protocols.few_shot import IntegrationEvaluation
from experiments.protocols.integration import IntegratedLoss
from experiments.reporting.run import read_episodes
from experiments.runs import complete_run, evaluate_run, restore_run, train_run
from experiments.training.checkpoints import CheckpointError, DamagedCheckpointError
from experiments.training.run_directory import ConfigMismatchError
from tests.experiments.tiny_runs import TINY, config_of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingConfig(strategy="64x64")}, "64x64"),
        ({"sampling": SamplingConfig(batch_size=6)}, "does not spread evenly"),
        ({"data": DataConfig(name="cifar10")}, "cifar10 has the splits train, test"),
        ({"model": ModelConfig(weights="nowhere")}, "model.weights = nowhere does not exist"),
        ({"evaluation": IntegrationEvaluation(shots=(1, 5000))}, "novel classes of icons do not"),
        ({"evaluation": IntegrationEvaluation(ways=30, shots=(1,))}, "validation classes of icons"),
        ({"loss": IntegratedLoss(name="direct:sce+nca")}, r"spectral:sce\+nca"),
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
        ("kanji", "sampling", {"strategy": "4x4"}, "needs one class per image"),
        ("mini-imagenet", "data", {"mixup": 1.0}, "compares samples with each other"),
    ],
)
def test_options_are_checked_before_data_is_prepared(tmp_path, preset, section, changes, message):
    config = PRESETS[preset].config
    if section:
        changed = dataclasses.replace(vars(config)[section], **changes)
        config = dataclasses.replace(config, **{section: changed})
    # There is no data: preparing it would fail with another error.
    with pytest.raises(ConfigError, match=message):
        prepare_and_count(plan_run(config), Folders(data_dir=tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_report_states_run_version_and_metrics(few_shot_run):
    report = json.loads((few_shot_run / "report.json").read_text())
    assert (report["preset"], report["loss"], report["label"]) == ("", "sce", "SCE")
    assert report["version"] in (few_shot_run / "report.md").read_text()
    assert [metric["name"] for metric in report["metrics"]] == [
        "1-shot accuracy",
        "5-shot accuracy",
        "1-shot accuracy (cosine)",
        "5-shot accuracy (cosine)",
        "recall@1",
        "MAP@R",
    ]
    of_episodes, episodes = report["metrics"][:4], read_episodes(few_shot_run)
    assert list(episodes) == [metric["name"] for metric in of_episodes]
    for metric, result in zip(of_episodes, report["results"], strict=True):
        assert episodes[metric["name"]].mean() == pytest.approx(metric["value"], rel=1e-5)
        assert (metric["value"], metric["interval"]) == (result["accuracy"], result["interval"])
        assert (metric["unit"], metric["higher_is_better"]) == ("%", True)
    assert report["validation"]["name"] == "1-shot accuracy"
    assert report["notes"] == []


def test_a_finished_run_is_read_not_repeated(few_shot_run, folders):
    config, log = config_of(few_shot_run), few_shot_run / "metrics.jsonl"
    before = log.stat().st_mtime_ns
    report = complete_run(plan_run(config), few_shot_run, folders, command="another")
    assert json.loads((few_shot_run / "report.json").read_text()) == report
    assert log.stat().st_mtime_ns == before
    other = plan_run(dataclasses.replace(config, seed=1))
    with pytest.raises(ConfigMismatchError, match="seed"):
        complete_run(other, few_shot_run, folders, command="another")


def flip_a_bit_of_the_arrays(directory, step):
    """In the largest file of the checkpoint."""
    files = [path for path in (directory / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_where_the_best_checkpoint_is_damaged_the_report_states_which_one_is_used(
    few_shot_run, folders, tmp_path
):
    run = shutil.copytree(few_shot_run, tmp_path / "run")
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


def test_checkpoints_are_named_by_rank_or_step(few_shot_run):
    assert restore_run(few_shot_run, "latest").step == 6
    assert restore_run(few_shot_run / "checkpoints", "6").step == 6
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
        restore_run(few_shot_run, "5")
    with pytest.raises(ConfigError, match="best, latest or the number of a step, got 'worst'"):
        restore_run(few_shot_run, "worst")


def test_evaluation_options_can_be_replaced(few_shot_run, folders):
    options = {"ways": 3, "shots": (2,), "distances": ("cosine",)}
    overrides = {f"evaluation.{name}": value for name, value in options.items()}
    _, report = evaluate_run(few_shot_run, folders, overrides=overrides)
    assert [result["ways"] for result in report["results"]] == [3]
    names = [metric["name"] for metric in report["metrics"]]
    assert names == ["2-shot accuracy (cosine)", "recall@1", "MAP@R"]
    for refused, message in (
        ({"loss.name": "nca"}, r"few-shot has no loss\.name; it has evaluation\.ways, e"),
        ({"evaluation.episodes": 1}, r"evaluation\.episodes must be at least 2, got 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate_run(few_shot_run, folders, overrides=refused)
    with pytest.raises(ConfigError, match="no split 'test'; it has base, validation, novel"):
        evaluate_run(few_shot_run, folders, split="test")
