"""Files of a run that are damaged or edited: the same answer, or one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.core.config import Folders
from experiments.core.errors import ExperimentError
from experiments.core.storage import component, storage_path, write_json
from experiments.papers import config_to_dict
from experiments.papers.integration import IntegratedLoss
from experiments.reporting.run import read_episodes, read_report, report_text
from experiments.run import RestoredRun, complete_run, load_run, plan_run, seen_in_training
from experiments.training.run_directory import check_run_directory, read_metrics
from experiments.training.step import TrainState
from experiments.training.weights import WeightsError, load_weights
from tests.experiments.tiny_runs import TINY, light_backbones


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders) -> Iterator[RestoredRun]:
    directory = tmp_path_factory.mktemp("hostile") / "run"
    config = dataclasses.replace(TINY, loss=IntegratedLoss(name="sce"))
    with light_backbones():
        complete_run(plan_run(config), directory, folders, command="train it")
        yield load_run(directory)


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy in which a test damages a file."""
    return shutil.copytree(trained.directory, tmp_path / "copy")


def damages(content: bytes, number: int) -> Iterator[bytes]:
    """Content that is cut, changed, doubled or replaced."""
    draw = random.Random(0)
    yield from (b"", b"\x00" * 64, b"\xff\xfe", content * 2, b"{}")
    for _ in range(number):
        place, more = draw.randrange(len(content) + 1), draw.randbytes(draw.randrange(1, 9))
        yield content[:place]
        yield content[:place] + more + content[place + len(more) :]


def check(trained: RestoredRun, directory: Path) -> None:
    """Reads configuration, report and metrics: what was written, or an error with a message."""
    config, protocol = trained.plan.config, trained.plan.protocol
    values, fixed = config_to_dict(config), config.fixed_steps()
    with contextlib.suppress(ExperimentError):
        there = check_run_directory(directory, values, fixed_steps=fixed)
        assert there in (None, json.loads(json.dumps(values)))
    model = dataclasses.replace(config.model, weights=str(directory))
    seen_in_training(dataclasses.replace(config, model=model), "cub")
    report = read_report(directory / "report.json", lambda report: report_text(protocol, report))
    assert report is None or report_text(protocol, report)
    assert all(type(row["step"]) is int for row in read_metrics(directory / "metrics.jsonl"))


@pytest.mark.parametrize("name", ["config.json", "report.json", "metrics.jsonl"])
def test_damaged_files(trained, run, name):
    for content in damages((run / name).read_bytes(), 20):
        (run / name).write_bytes(content)
        check(trained, run)


@pytest.mark.parametrize(
    "name", ["value", "interval", "higher_is_better", "seconds", "command", "metrics"]
)
def test_a_report_with_an_entry_of_another_type_is_damaged(run, name):
    report = read_report(run / "report.json", str) or {}
    entries = report if name in report else report["metrics"][0]
    entries[name] = 1 if name == "command" else "1"
    write_json(run / "report.json", report)
    assert read_report(run / "report.json", str) is None


def test_runs_that_name_each_other_as_their_weights(trained, run):
    model = dataclasses.replace(trained.plan.config.model, weights=str(run))
    config = dataclasses.replace(trained.plan.config, model=model)
    write_json(run / "config.json", config_to_dict(config))
    assert seen_in_training(config, "cub") == ""


def test_episodes_that_are_damaged_are_left_out(tmp_path):
    path, one = tmp_path / "episodes.npz", np.ones(3, np.float32)
    np.savez(path, a=one)
    assert list(read_episodes(tmp_path)) == ["a"]
    for content in damages(path.read_bytes(), 20):
        path.write_bytes(content)
        read_episodes(tmp_path)
    np.savez(path, a=one.astype(object))  # No program of others is run.
    assert read_episodes(tmp_path) == {}


def _weights(header: bytes, length: int | None = None, data: bytes = bytes(8)) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        _weights(b"{}", 2**62),
        _weights(b"[" * 10_000),
        _weights(b'{"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}'),
        _weights(b'{"a": {"dtype": "F9", "shape": [8], "data_offsets": [0, 8]}}'),
        _weights(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 99]}}'),
        _weights(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
    ],
)
def test_files_of_weights(tmp_path, content):
    path, leaf = tmp_path / "w.safetensors", np.zeros((3, 3, 3, 64), np.float32)
    path.write_bytes(content)
    state = TrainState(
        jnp.zeros(()), {"backbone": {"stem": {"conv": {"kernel": leaf}}}}, {}, (), {}
    )
    with pytest.raises(WeightsError, match=re.escape(str(path))):
        load_weights(path, state)


def test_a_path_means_the_same_before_and_after_its_folders_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert storage_path("runs/typo/../o") == tmp_path / "runs" / "o"
    assert storage_path("~/o") == tmp_path / "home" / "o"
    assert str(storage_path("runs/o")) == "runs/o"  # As typed.
    assert Folders(data_dir=Path("~/data")).data_dir == tmp_path / "home" / "data"


@pytest.mark.parametrize("text", ["", "..", "../../x", "a\\b", "a\nb\0", "é" * 300, "name=a:b"])
def test_a_component_stays_in_its_folder(tmp_path, text):
    name = component(text)
    path = tmp_path / f"{name}.json"
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    write_json(path, 1)
    assert [*tmp_path.iterdir()] == [path]
    assert len(name.encode()) <= 200
    assert component(text + "x" * 300) != component(text + "x" * 301)
