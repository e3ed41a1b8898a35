"""Runs and data on gs://, against an emulator of Google Cloud Storage."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.main import main
from experiments.core.config import Folders
from experiments.core.errors import ConfigError
from experiments.core.storage import storage_path
from experiments.data.pipeline import load_split
from experiments.datasets import describe
from experiments.datasets.archives import MissingArchiveError
from experiments.papers.integration import IntegratedLoss
from experiments.run import complete_run, plan_run, train_run
from experiments.training.checkpoints import Checkpoints
from experiments.training.run_directory import MetricsLog
from tests.experiments.several_processes import ROOT
from tests.experiments.test_checkpoints import fill, newest, small_state
from tests.experiments.tiny_runs import TINY, assert_equal_runs, files_below, metrics, saved_steps

# One process of the tests runs them all: it starts the server, and trains.
pytestmark = [
    pytest.mark.xdist_group("object stores"),
    pytest.mark.usefixtures("light_backbone"),
]

CONFIG = dataclasses.replace(TINY, loss=IntegratedLoss("nca"))


@pytest.fixture
def remote(bucket, request) -> Path:
    return bucket / request.node.name


@pytest.fixture(scope="module")
def trained(bucket, folders, tmp_path_factory) -> tuple[Path, Path]:
    remote, local = bucket / "trained", tmp_path_factory.mktemp("trained") / "run"
    for directory in (remote, local):
        complete_run(plan_run(CONFIG), directory, folders, command="train it")
    return remote, local


def files_of(directory: Path) -> set[str]:
    names = {path.name for path in directory.iterdir() if not path.is_dir()}
    return {name.partition(".out.")[0] for name in names}


@pytest.mark.long
def test_a_run_equals_the_same_run_in_a_local_folder(trained):
    remote, local = trained
    assert_equal_runs(remote, local)
    assert files_of(remote) == files_of(local) - {".lock"}
    assert "events" in files_of(remote)
    assert saved_steps(remote) == [2, 4]
    reports = [json.loads((path / "report.json").read_text()) for path in trained]
    assert reports[0]["metrics"] == reports[1]["metrics"]
    assert not list(ROOT.glob("gs:*"))


@pytest.mark.long
def test_evaluate_reads_and_writes_the_bucket(trained, folders, capsys):
    remote, local = trained
    options = ["--data-dir", str(folders.data_dir), "--set", "evaluation.episodes=30"]
    for directory in (remote, local):
        assert main(["evaluate", str(directory), *options]) == 0
    assert f"wrote {remote}/evaluation-novel" in capsys.readouterr().out
    assert files_of(remote) == files_of(local) - {".lock"}


@pytest.mark.long
def test_a_run_resumes_bit_for_bit(trained, remote, folders, killed_after):
    killed_after(3, lambda: train_run(plan_run(CONFIG), remote, folders))
    assert saved_steps(remote) == [2]
    train_run(plan_run(CONFIG), remote, folders)
    assert_equal_runs(remote, trained[1])
    assert len(list(remote.glob("events.out.tfevents.*"))) == 2


def test_half_and_damaged_checkpoints(remote):
    fill(remote, {1: 0.9, 2: 0.3, 3: 0.4, 4: 0.2})
    assert {path.name for path in remote.iterdir()} == {"1", "3", "4"}
    # A kill while one is written, or removed, leaves no mark that it is complete.
    (remote / "5" / "state" / "manifest.ocdbt").write_bytes(b"half")
    (remote / "4" / "header" / "metadata").write_bytes(b"{")
    with Checkpoints(remote, read_only=True) as checkpoints:
        assert newest(checkpoints).step == 3
    with Checkpoints(remote) as checkpoints:
        assert newest(checkpoints).step == 3
        assert (remote / "damaged-4" / "header" / "metadata").read_bytes() == b"{"
        checkpoints.save(4, small_state(4), meta={})
        assert newest(checkpoints).step == 4


def test_metrics_are_there_before_the_checkpoint_of_their_step(remote):
    with MetricsLog(remote, resume_step=0) as log:
        log.log(1, loss=0.5)
        assert not (remote / "metrics.jsonl").exists()
        log.store()
        assert metrics(remote) == [{"step": 1, "loss": 0.5}]
        log.log(2, loss=0.25)
    assert len(metrics(remote)) == 2
    with MetricsLog(remote, resume_step=1) as log:
        log.log(2, loss=0.75)
    assert [row["loss"] for row in metrics(remote)] == [0.5, 0.75]


@pytest.mark.long
def test_data_is_read_from_the_bucket_and_not_prepared_there(bucket, remote, folders, tmp_path):
    given = Folders(data_dir=remote)
    with pytest.raises(MissingArchiveError) as caught:
        train_run(plan_run(CONFIG), tmp_path / "run", given)
    assert f"icons is not prepared in --data-dir {remote}" in str(caught.value)
    assert f"`gcloud storage cp -r FOLDER/icons {remote}/`" in str(caught.value)
    status = describe("icons", remote)
    assert not status.ready
    assert "prepared in local folders only" in status.missing
    assert not remote.exists()

    here = load_split("icons", "novel", data_dir=folders.data_dir)
    for path, content in files_below(folders.data_dir / "icons").items():
        (remote / str(path.relative_to(folders.data_dir))).write_bytes(content)
    assert describe("icons", remote).ready
    there = load_split("icons", "novel", data_dir=remote)
    np.testing.assert_array_equal(there.images, here.images)
    np.testing.assert_array_equal(there.labels, here.labels)
    assert there.class_names == here.class_names


def test_what_a_path_means_with_and_without_gcsfs(monkeypatch):
    # As a `Path` has it, with one slash.
    assert str(storage_path(str(Path("gs://bucket/run")))) == "gs://bucket/run"
    assert str(storage_path("runs/a:b")) == "runs/a:b"
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r'gs://bucket/run needs pip install -e "\.\[gcs\]"'):
        storage_path("gs://bucket/run")
