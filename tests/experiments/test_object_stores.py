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
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import chex
import numpy as np
import pytest

from experiments.cli.main import main
from experiments.config import Folders
from experiments.data.archives import MissingArchiveError
from experiments.data.builders import describe
from experiments.data.pipeline import load_split
from experiments.errors import ConfigError
from experiments.storage import write_atomically
from experiments.liveness import AGAIN
from experiments.protocols.integration import IntegratedLoss
from experiments.assembly import plan_run
from experiments.runs import complete_run, train_run
from experiments.storage import storage_path
from experiments.training.checkpoints import CheckpointError, Checkpoints
from experiments.training.metrics_log import MetricsLog
from experiments.training.run_directory import exclusive_run
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
        from experiments.object_store import _client

        _client().create_bucket("bucket")
        yield storage_path("gs://bucket")
        _client.cache_clear()


@pytest.fixture
def remote(bucket, request) -> Path:
    """A folder of a test in the bucket."""
    return bucket / request.node.name


@pytest.fixture
def quick(monkeypatch):
    """Leases that expire soon."""
    monkeypatch.setattr("experiments.object_store._LEASE", 1.0)
    monkeypatch.setattr("experiments.object_store._HEARTBEAT", 0.2)


@pytest.fixture(scope="module")
def trained(bucket, folders, tmp_path_factory) -> tuple[Path, Path]:
    """The same run in the bucket and in a local folder."""
    remote, local = bucket / "trained", tmp_path_factory.mktemp("trained") / "run"
    for directory in (remote, local):
        complete_run(plan_run(CONFIG), directory, folders, command="train it")
    return remote, local


def files_of(directory: Path) -> set[str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    names = {str(path).removeprefix(f"{directory}/") for path in files}
    return {name.partition(".out.")[0] for name in names if not name.startswith("checkpoints/")}


def test_a_run_equals_the_same_run_in_a_local_folder(trained):
    remote, local = trained
    chex.assert_trees_all_equal(final_state(remote), final_state(local))
    assert metrics_without_clock(remote) == metrics_without_clock(local)
    assert files_of(remote) == files_of(local) - {".lock"}  # A lease ends.
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
    model = dataclasses.replace(CONFIG.model, weights=f"{trained[0]}-absent")
    with pytest.raises(ConfigError, match=r"model\.weights = gs://bucket/trained-absent does not"):
        plan_run(dataclasses.replace(CONFIG, model=model))
    with pytest.raises(ConfigError, match=r"model\.weights, a file, must be a local path"):
        load_weights(trained[0] / "report.json", {}, {})


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

    config, started = config_of(remote), time.monotonic()
    train_run(plan_run(config), remote, folders)
    assert time.monotonic() - started < 60  # Its lease was not waited for.
    train_run(plan_run(config), tmp_path / "whole", folders)
    chex.assert_trees_all_equal(final_state(remote), final_state(tmp_path / "whole"))
    assert metrics_without_clock(remote) == metrics_without_clock(tmp_path / "whole")
    assert len(list(remote.glob("events.out.tfevents.*"))) == 2


@pytest.mark.slow
def test_several_processes_resume_bit_for_bit(remote, folders, compilation_cache, tmp_path):
    command = [
        *("-m", "experiments", "train", "icons", "--loss.name", "nca", "--distributed"),
        *(*TINY_OPTIONS, "--steps", "16", "--validate-every", "2"),
        *("--data-dir", str(folders.data_dir), "--directory"),
    ]
    with start([[*command, str(tmp_path / "whole")]] * 2, compilation_cache) as processes:
        finish(processes, 0)
    with start([[*command, str(remote)]] * 2, compilation_cache) as processes:
        deadline = time.monotonic() + 240
        while not (remote / "checkpoints" / "4" / "commit_success.txt").exists():
            assert time.monotonic() < deadline
            assert processes[0].poll() is None, processes[0].communicate()[0]
            time.sleep(0.05)
        processes[1].kill()
        finish(processes, AGAIN, -signal.SIGKILL)
    assert not (remote / "checkpoints" / "16").exists()
    with start([[*command, str(remote)]] * 2, compilation_cache) as processes:
        finish(processes, 0)
    chex.assert_trees_all_equal(final_state(remote), final_state(tmp_path / "whole"))
    assert metrics_without_clock(remote) == metrics_without_clock(tmp_path / "whole")


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        state = {"w": np.full(3, step, np.float32)}
        checkpoints.save(step, state, meta={"step": step}, accuracy=1 / step)
    checkpoints.wait()


def value(directory: Path, step: int | None = None) -> float:
    with Checkpoints(directory, read_only=True) as checkpoints:
        return checkpoints.restore({"w": np.zeros(3, np.float32)}, step).state["w"][0]


def test_half_a_checkpoint_is_ignored_and_removed(remote):
    with Checkpoints(remote) as checkpoints:
        save(checkpoints, 1, 2)
    # A kill while it is written, and one while it is removed, which ends at any object.
    (remote / "3" / "state" / "manifest.ocdbt").write_bytes(b"half")
    (remote / "2" / "commit_success.txt").unlink()
    assert value(remote) == 1
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; it holds: 1"):
        value(remote, 3)
    with Checkpoints(remote) as checkpoints:
        assert {path.name for path in remote.iterdir()} == {"1"}
        save(checkpoints, 2, 3)
    assert value(remote) == 3


def test_old_checkpoints_disappear_whole(remote, monkeypatch):
    with Checkpoints(remote) as checkpoints:
        save(checkpoints, 1, 2, 3)
        with monkeypatch.context() as patch:
            # The process is killed after the first object.
            patch.setattr(type(remote), "rmtree", _killed)
            with pytest.raises(KeyboardInterrupt):
                save(checkpoints, 4)
        assert checkpoints.steps() == [1, 3, 4]  # The best one, and the newest two.
        assert (remote / "2").is_dir()
    with Checkpoints(remote) as checkpoints:
        assert {path.name for path in remote.iterdir()} == {"1", "3", "4"}


def _killed(*_, **__):
    raise KeyboardInterrupt


def test_a_damaged_checkpoint_is_set_aside(remote):
    with Checkpoints(remote) as checkpoints:
        save(checkpoints, 1, 2)
        (remote / "2" / "meta" / "metadata").write_bytes(b"{")
        assert checkpoints.restore({"w": np.zeros(3, np.float32)}).step == 1
        assert {path.name for path in remote.iterdir()} == {"1", "damaged-2"}
        assert (remote / "damaged-2" / "meta" / "metadata").read_bytes() == b"{"
        save(checkpoints, 2)
    assert value(remote) == 2


def test_metrics_are_there_before_the_checkpoint_of_their_step(remote):
    with MetricsLog(remote / "metrics.jsonl", resume_step=0) as log:
        log.log(1, loss=0.5)
        assert not (remote / "metrics.jsonl").exists()
        log.store()
        assert metrics(remote) == [{"step": 1, "loss": 0.5}]
        log.log(2, loss=0.25)
    assert len(metrics(remote)) == 2
    with MetricsLog(remote / "metrics.jsonl", resume_step=1) as log:
        log.log(2, loss=0.75)
    assert [row["loss"] for row in metrics(remote)] == [0.5, 0.75]

    def check():
        raise ConfigError("taken over")

    with (
        pytest.raises(ConfigError, match="taken over"),
        MetricsLog(remote / "metrics.jsonl", resume_step=0, check=check) as log,
    ):
        log.log(1, loss=0.1)
    assert [row["loss"] for row in metrics(remote)] == [0.5, 0.75]


def test_a_second_command_is_refused_and_names_the_first(remote, quick):
    with exclusive_run(remote) as check:
        with (
            pytest.raises(ConfigError, match=f"another process .process {os.getpid()} on .* is tr"),
            exclusive_run(remote),
        ):
            pass
        check()
    assert not (remote / ".lock").exists()
    with exclusive_run(remote):
        pass


def test_an_expired_lease_is_taken_over_and_its_owner_finds_out(remote, quick, monkeypatch):
    from experiments.object_store import Lease

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "_keep", lambda self: None)  # A process that is stopped.
        stopped = exclusive_run(remote)
        check = stopped.__enter__()
    started = time.monotonic()
    with exclusive_run(remote) as check_other:
        assert time.monotonic() - started > 0.9
        with pytest.raises(ConfigError, match=f"another process has taken {remote} over"):
            check()
        stopped.__exit__(None, None, None)
        check_other()
        assert (remote / ".lock").exists()


def test_an_old_lease_is_taken_over_at_once_and_an_alive_one_is_renewed(remote, quick, monkeypatch):
    write_atomically(
        remote / ".lock", json.dumps({"owner": "x", "token": "", "seconds": 60, "process": None})
    )
    monkeypatch.setattr("experiments.object_store._SKEW", -61.0)
    with exclusive_run(remote) as check:
        before = json.loads((remote / ".lock").read_text())
        assert before["owner"].startswith(f"process {os.getpid()} on ")
        time.sleep(1.5)
        check()
        after = json.loads((remote / ".lock").read_text())
        assert after["token"] == before["token"]
        assert after["time"] > before["time"] + 1


def test_an_outage_is_waited_for_within_bounds(remote, monkeypatch):
    import requests

    from experiments import object_store

    monkeypatch.setattr("time.sleep", lambda _: None)
    failures = iter([requests.ConnectionError("gone")] * 3)

    def action():
        if (error := next(failures, None)) is not None:
            raise error
        return 7

    assert object_store.retried(remote, action) == 7
    monkeypatch.setattr(object_store, "_PATIENCE", 0.0)
    failures = iter([requests.ConnectionError("gone")] * 3)
    with pytest.raises(object_store.StorageError, match=r"has not answered for 0 seconds \(gone\)"):
        object_store.retried(remote, action)


def test_an_outage_costs_neither_the_run_nor_a_checkpoint(remote, server):
    with Checkpoints(remote / "checkpoints") as checkpoints, exclusive_run(remote) as check:
        save(checkpoints, 1)
        server.stop()
        back = threading.Timer(2, server.start)
        back.start()
        save(checkpoints, 2)
        back.join()
        check()
        assert checkpoints.steps() == [1, 2]
    assert value(remote / "checkpoints") == 2


def test_what_pathlib_does(remote):
    path = remote / "a=b,c+d e" / "ü#?%.txt"
    assert (path.exists(), remote.is_dir(), list(remote.glob("*"))) == (False, False, [])
    for read in (path.read_bytes, partial(next, remote.iterdir())):
        with pytest.raises(FileNotFoundError):
            read()
    with contextlib.suppress(RuntimeError), path.open("w") as file:
        file.write("half")
        raise RuntimeError
    assert not path.exists()
    path.write_text("é", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "é"
    assert (path.is_file(), path.is_dir(), path.parent.is_dir()) == (True, False, True)
    assert list(remote.rglob("*.txt")) == list(remote.glob("a=*/*")) == [path]
    assert path.absolute() == path.resolve() == path.expanduser() == path
    assert str(path.parent.parent) == str(remote) == f"gs://bucket/{remote.name}"
    with pytest.raises(Exception, match="there is no bucket absent"):
        storage_path("gs://absent/run").exists()


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
    monkeypatch.delitem(sys.modules, "experiments.object_store", raising=False)
    with pytest.raises(ConfigError, match=r'needs the extra gcs .*: pip install -e "\.\[gcs\]"'):
        storage_path("gs://bucket/run")
