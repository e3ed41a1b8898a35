"""The command line: options, messages, file names."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cli.datasets import Datasets
from experiments.cli.main import main
from experiments.data.builders import describe
from experiments.presets import PRESETS
from experiments.protocols.few_shot import IntegrationEvaluation
from tests.experiments.several_processes import ROOT
from tests.experiments.tiny_runs import TINY_OPTIONS

pytestmark = pytest.mark.usefixtures("light_backbone")


@pytest.fixture(scope="module")
def run(tmp_path_factory, folders) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "run"
    command = ["train", "icons", *TINY_OPTIONS, "--loss.name", "sce"]
    command += ["--data-dir", str(folders.data_dir), "--directory", str(directory)]
    assert main(command) == 0
    return directory


@pytest.mark.long
def test_evaluate_takes_its_settings_from_the_checkpoint(run, folders, tmp_path, capsys):
    expected = json.loads((run / "report.json").read_text())["results"]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "checkpoints").symlink_to(run / "checkpoints")
    data = ["--data-dir", str(folders.data_dir)]
    written = tmp_path / "copy" / "evaluation-novel-step2.json"
    assert main(["evaluate", str(tmp_path / "copy"), *data]) == 0
    assert json.loads(written.read_text())["results"] == expected
    assert "5-way, 15 queries" in capsys.readouterr().out
    assert main(["evaluate", str(run / "checkpoints"), *data]) == 0
    assert json.loads((run / written.name).read_text())["results"] == expected

    other = ["--evaluation.ways", "3", "--evaluation.shots", "2"]
    other += ["--evaluation.distances", "cosine"]
    assert main(["evaluate", *data, str(run), *other]) == 0
    assert "3-way, 15 queries" in capsys.readouterr().out
    settings = ("ways=3", "shots=2", "distances=cosine")
    name = ",evaluation.".join(["evaluation-novel-step2", *settings]) + ".json"
    assert {path.name for path in run.glob("evaluation-*.json")} == {name, written.name}
    metrics = json.loads((run / name).read_text())["metrics"]
    found = [metric["name"] for metric in metrics]
    assert found == ["2-shot accuracy (cosine)", "recall@1", "MAP@R"]
    assert main(["evaluate", str(run), *data, "--evaluation.ways", "500"]) == 2
    assert "500" in capsys.readouterr().err
    nothing = str(tmp_path / "nothing")
    assert main(["evaluate", nothing]) == 2
    assert f"there is no directory {nothing}" in capsys.readouterr().err
    assert main(["evaluate", nothing, "--evaluation.ways", "3"]) == 2
    assert "need the directory of a trained run" in capsys.readouterr().err


@pytest.mark.long
def test_evaluate_has_the_options_and_values_of_the_run(run, capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(IntegrationEvaluation):
        assert f"--evaluation.{field.name.replace('_', '-')}" in printed
    assert "Episodes of each evaluation. (default: 20)" in printed
    assert "--fine-tuning" not in printed


def test_a_full_disk_is_a_message_and_a_mistake_of_ours_is_not(monkeypatch, capsys):
    error: Exception = OSError(errno.ENOSPC, "No space left on device")

    def broken(self, command):
        raise error

    monkeypatch.setattr(Datasets, "run", broken)
    assert main(["datasets"]) == 2
    assert capsys.readouterr().err == "error: No space left on device\n"
    error = ValueError("a mistake of ours")
    with pytest.raises(ValueError, match="a mistake of ours"):
        main(["datasets"])


def test_datasets_lists_the_set_of_every_preset(folders, capsys):
    assert main(["datasets", "--data-dir", str(folders.data_dir)]) == 0
    listed = capsys.readouterr().out
    for preset in PRESETS.values():
        assert preset.config.data.name.partition("@")[0] in listed
    assert str(folders.data_dir) in listed
    assert listed.count("\n") < 40
    assert main(["datasets", "cub_fewshot", "--data-dir", str(folders.data_dir)]) == 0
    assert "CUB_200_2011.tgz" in capsys.readouterr().out


def test_data_sets_are_prepared_ahead_of_a_run(tmp_path, capsys):
    data = ["--data-dir", str(tmp_path)]
    assert main(["prepare", "icons", "no-such-set", *data]) == 2
    assert "no-such-set" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["prepare", "icons", *data]) == 0
    (folder,) = capsys.readouterr().out.splitlines()
    assert Path(folder).parent == tmp_path / "icons"
    assert describe("icons", tmp_path).ready
    assert main(["prepare", *data]) == 2
    assert "needs the name of a data set" in capsys.readouterr().err
    assert main(["prepare", "cifar10", *data]) == 2
    assert "cifar" in capsys.readouterr().err


@pytest.mark.long
def test_settings_lists_values_and_sources_and_epochs_of_prepared_data(
    run, folders, tmp_path, monkeypatch, capsys
):
    preset = PRESETS["icons"]
    model = dataclasses.replace(preset.config.model, drop_block_steps=290, widths=(4, 8, 8, 8))
    changed = preset._replace(
        config=dataclasses.replace(preset.config, model=model),
        sources={"optimizer.learning_rate": "section 9"},
        differences=("Here all is well.",),
    )

    def settings(data_dir):
        assert main(["settings", "icons", "--data-dir", str(data_dir)]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "has no option" not in settings(tmp_path)
    monkeypatch.setitem(PRESETS, "icons", changed)
    text = settings(tmp_path)
    assert text.startswith(f"icons: {preset.description}")
    assert "| model.drop_block_steps | 290 | – |" in text
    assert "| model.widths | 4 8 8 8 | – |" in text
    # A source is listed also where the value is the default, which all others are left out with.
    assert "| optimizer.learning_rate | 0.1 | section 9 |" in text
    assert "optimizer.momentum" not in text
    assert text.endswith("has no option: - Here all is well.")
    text = settings(folders.data_dir)
    steps_per_epoch = 4650 // 128  # As in training, which leaves out the rest of an epoch.
    assert f"| steps | 800 ({800 / steps_per_epoch:.4g} epochs) | – |" in text
    assert "| model.drop_block_steps | 290 (8.056 epochs) | – |" in text
    assert main(["settings", "food10-groups"]) == 2
    assert "no preset 'food10-groups'; available: icons, mini" in capsys.readouterr().err


def test_help_does_not_import_what_only_runs_need():
    code = "import sys, experiments.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    slow = {"scipy.stats", "pandas", "matplotlib", "tensorboardX", "orbax", "torch", "sklearn"}
    assert slow.isdisjoint(done.stdout.split()), done.stderr
    assert "experiments.cli.train" in done.stdout.split()


@pytest.mark.long
def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m experiments --help | head -n 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "usage: python -m experiments" in done.stdout
    assert done.stderr == ""


def test_a_directory_that_is_a_file_is_reported_in_a_sentence(folders, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    given = ["--directory", str(tmp_path / "file" / "run"), "--data-dir", str(folders.data_dir)]
    assert main(["train", "icons", *given]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'file'}")


def test_processes_that_cannot_be_joined_state_what_they_need(monkeypatch, capsys):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "icons", "--distributed"]) == 2
    assert "JAX_COORDINATOR_ADDRESS" in capsys.readouterr().err
