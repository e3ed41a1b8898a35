"""Runs and data on gs://, against an emulator of Google Cloud Storage."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import chex
import numpy as np
import pytest

from experiments.assembly import plan_run
from experiments.cli.main import main
from experiments.config import Folders
from experiments.data.archives import MissingArchiveError
from experiments.data.builders import describe
from experiments.data.pipeline import load_split
from experiments.errors import ConfigError
from experiments.protocols.integration import IntegratedLoss
from experiments.runs import complete_run, train_run
from experiments.storage import storage_path
from experiments.training.checkpoints import Checkpoints
from experiments.training.recorder import MetricsLog
from experiments.training.weights import load_weights
from tests.experiments.object_store_server import FSSPEC, Server
from tests.experiments.several_processes import QUICK_PYTHON, finish, start
from tests.experiments.tiny_runs import (
    TINY,
    TINY_OPTIONS,
    config_of,
    final_state,
    metrics,
    metrics_without_clock,
)

# One process of the tests runs them all: it starts the server, and trains.
pytestmark = pytest.mark.xdist_group("object stores")

ROOT = Path(__file__).parents[2]
CONFIG = dataclasses.replace(TINY, loss=IntegratedLoss("nca"))


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """An emulator on a free port."""
    server = Server(tmp_path_factory.mktemp("store"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def bucket(server) -> Iterator[Path]:
    """A bucket of an emulator, which this process and those that it starts use."""
    with pytest.MonkeyPatch.context() as patch:
        import fsspec.config

        patch.setitem(fsspec.config.conf, "gcs", FSSPEC)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.create_bucket("bucket")
        yield storage_path("gs://bucket")


@pytest.fixture
def remote(bucket, request) -> Path:
    """A folder of a test in the bucket."""
    return bucket / request.node.name


@pytest.fixture(scope="module")
def trained(bucket, folders, tmp_path_factory) -> tuple[Path, Path]:
    """The same run in the bucket and in a local folder."""
    remote, local = bucket / "trained", tmp_path_factory.mktemp("trained") / "run"
    for directory in (remote, local):
        complete_run(plan_run(CONFIG), directory, folders, command="train it")
    return remote, local


def files_of(directory: Path) -> set[str]:
    names = {path.name for path in directory.iterdir() if not path.is_dir()}
    return {name.partition(".out.")[0] for name in names}


def test_a_run_equals_the_same_run_in_a_local_folder(trained):
    remote, local = trained
    chex.assert_trees_all_equal(final_state(remote), final_state(local))
    assert metrics_without_clock(remote) == metrics_without_clock(local)
    assert files_of(remote) == files_of(local) - {".lock"}
    assert "events" in files_of(remote)
    with Checkpoints(remote / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 4]
    reports = [json.loads((path / "report.json").read_text()) for path in trained]
    assert reports[0]["metrics"] == reports[1]["metrics"]
    assert not list(ROOT.glob("gs:*"))


def test_evaluate_reads_and_writes_the_bucket(trained, folders, capsys):
    remote, local = trained
    options = ["--data-dir", str(folders.data_dir), "--evaluation.episodes", "30"]
    for directory in (remote, local):
        assert main(["evaluate", str(directory), *options]) == 0
    assert f"wrote {remote}/evaluation-novel" in capsys.readouterr().out
    assert files_of(remote) == files_of(local) - {".lock"}


def test_a_backbone_starts_from_a_run_in_the_bucket(trained):
    target = final_state(trained[1])
    remote, local = (
        load_weights(path, target.params["backbone"], target.statistics) for path in trained
    )
    chex.assert_trees_all_equal(remote, local)
    for weights, message in (
        (f"{trained[0]}-absent", r"model\.weights = gs://bucket/trained-absent does not"),
        (f"{trained[0]}/report.json", r"model\.weights, a file, must be a local path"),
    ):
        model = dataclasses.replace(CONFIG.model, weights=weights)
        with pytest.raises(ConfigError, match=message):
            plan_run(dataclasses.replace(CONFIG, model=model))


def test_a_run_resumes_bit_for_bit_after_sigkill(remote, folders, compilation_cache, tmp_path):
    options = [*TINY_OPTIONS, "--steps", "20", "--validate-every", "2", "--log-every", "1"]
    process = subprocess.Popen(
        [
            *(*QUICK_PYTHON, "-m", "experiments", "train", "icons", "--loss.name", "nca"),
            *options,
            *("--directory", str(remote), "--data-dir", str(folders.data_dir)),
        ],
        cwd=ROOT,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(compilation_cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not (remote / "checkpoints" / "4" / "commit_success.txt").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
    assert not (remote / "checkpoints" / "20").exists(), output

    config = config_of(remote)
    train_run(plan_run(config), remote, folders)
    train_run(plan_run(config), tmp_path / "whole", folders)
    chex.assert_trees_all_equal(final_state(remote), final_state(tmp_path / "whole"))
    assert metrics_without_clock(remote) == metrics_without_clock(tmp_path / "whole")
    assert len(list(remote.glob("events.out.tfevents.*"))) == 2


@pytest.mark.slow
def test_processes_resume_bit_for_bit_with_the_classes_on_both(
    remote, folders, compilation_cache, tmp_path
):
    command = [
        *("-m", "experiments", "train", "icons-instances", "--distributed", "--parallel", "jit"),
        *("--sampling.batch-size", "16", "--model.widths", "4", "4", "4", "8", "--steps", "16"),
        *("--evaluation.validation-episodes", "20", "--evaluation.episodes", "20"),
        *("--validate-every", "2", "--data-dir", str(folders.data_dir), "--directory"),
    ]
    whole, cut = ([*command, str(path), "--mesh", "1x4"] for path in (tmp_path / "whole", remote))
    with start([whole, whole], compilation_cache) as processes:
        finish(processes, 0)
    with start([cut, cut], compilation_cache) as processes:
        deadline = time.monotonic() + 240
        while not (remote / "checkpoints" / "4" / "commit_success.txt").exists():
            assert time.monotonic() < deadline
            assert processes[0].poll() is None, processes[0].communicate()[0]
            time.sleep(0.05)
        processes[1].kill()
        processes[0].communicate(timeout=60)
        assert processes[0].returncode not in (0, 2)
    assert not (remote / "checkpoints" / "16").exists()
    with start([cut, cut], compilation_cache) as processes:
        finish(processes, 0)
    chex.assert_trees_all_equal(final_state(remote), final_state(tmp_path / "whole"))
    assert metrics_without_clock(remote) == metrics_without_clock(tmp_path / "whole")


def test_half_and_damaged_checkpoints(remote):
    def state(step: int) -> dict[str, np.ndarray]:
        return {"w": np.full(3, step, np.float32)}

    def newest(checkpoints: Checkpoints) -> float:
        return checkpoints.read_intact(lambda s: checkpoints.restore(state(0), s))[0].state["w"][0]

    with Checkpoints(remote) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state(step), meta={}, accuracy=1 / step)
    assert {path.name for path in remote.iterdir()} == {"1", "3", "4"}
    # A kill while one is written, or removed, leaves no mark that it is complete.
    (remote / "5" / "state" / "manifest.ocdbt").write_bytes(b"half")
    (remote / "4" / "header" / "metadata").write_bytes(b"{")
    with Checkpoints(remote, read_only=True) as checkpoints:
        assert newest(checkpoints) == 3
    with Checkpoints(remote) as checkpoints:
        assert newest(checkpoints) == 3
        assert (remote / "damaged-4" / "header" / "metadata").read_bytes() == b"{"
        checkpoints.save(4, state(4), meta={})
        checkpoints.wait()
        assert newest(checkpoints) == 4


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
    assert not list(ROOT.glob("gs:*"))

    here = load_split("icons", "novel", data_dir=folders.data_dir)
    for path in (folders.data_dir / "icons").rglob("*"):
        if path.is_file():
            target = remote / str(path.relative_to(folders.data_dir))
            target.write_bytes(path.read_bytes())
    assert describe("icons", remote).ready
    there = load_split("icons", "novel", data_dir=remote)
    np.testing.assert_array_equal(there.images, here.images)
    np.testing.assert_array_equal(there.labels, here.labels)
    assert there.class_names == here.class_names


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            ["--directory", "s3://bucket/run"],
            "--directory: .*s3:// is not supported, as Orbax cannot write checkpoints there; use gs://",
        ),
        (["--directory", "file:///run"], "--directory: .*file:// is not supported"),
        (["--directory", "gs:/bucket/run"], "lacks a slash; write gs://bucket/run"),
        (["--directory", "gs:///run"], "does not start with the name of a bucket"),
        (["--data-dir", "az://bucket/data"], "--data-dir: .*az:// is not supported"),
        (["--manual-dir", "gs://bucket/data"], "--manual-dir must be a local path"),
        (["--model.weights", "s3://b/run"], "model.weights s3://b/run: s3:// is not supported"),
    ],
)
def test_other_schemes_are_refused(argument, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("gcsfs")
    with contextlib.suppress(SystemExit):  # Raised for options that cannot be parsed.
        assert main(["train", "icons", *argument]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir())


def test_without_gcsfs_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r'needs the extra gcs .*: pip install -e "\.\[gcs\]"'):
        storage_path("gs://bucket/run")
