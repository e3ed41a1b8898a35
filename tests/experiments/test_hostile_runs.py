"""Files of a run that are damaged or edited: the same answer, or one sentence."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.core.config import Folders
from experiments.core.errors import ConfigError, ExperimentError
from experiments.core.storage import component, storage_path, write_json
from experiments.look.charts import training
from experiments.look.view import View
from experiments.papers import config_to_dict
from experiments.papers.integration import IntegratedLoss
from experiments.reporting.grid import Axis, GridRun, make_grid
from experiments.reporting.grid_report import grid_table
from experiments.reporting.run import read_episodes, read_report, report_text
from experiments.run import Plan, RestoredRun, complete_run, load_run, plan_run, seen_in_training
from experiments.training.checkpoints import _json_digest
from experiments.training.run_directory import (
    METRICS_FILE,
    MetricsLog,
    check_run_directory,
    read_metrics,
)
from experiments.training.step import TrainState
from experiments.training.weights import WeightsError, load_weights
from tests.experiments.tiny_runs import TINY, light_backbones

# Orbax closes its event loop while other reads are under way when one meets a torn file.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NASTY = (
    *(None, True, "", "x", "\x1b[31m{step:>9}\n", "\ud800", -1, 0, 1.5, 10**300, 1e999),
    *([], {}, [[]], {"": []}, json.loads("[" * 300 + "]" * 300)),
)


class Home:
    """A finished run, and copies of it in which a test damages a file."""

    def __init__(self, folder: Path, plan: Plan, run: RestoredRun):
        self.folder, self.plan, self.run = folder, plan, run
        self.values = config_to_dict(plan.config)
        self.states = {
            step: jax.device_get(load_run(folder / "run", step).state) for step in (2, 4)
        }

    def copy(self) -> Path:
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        return shutil.copytree(self.folder / "run", self.folder / "copy")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("hostile")
    config = dataclasses.replace(TINY, loss=IntegratedLoss(name="sce"))
    with light_backbones():
        plan = plan_run(config)
        complete_run(plan, folder / "run", folders, command="train it")
        yield Home(folder, plan, load_run(folder / "run"))


def edits(value: Any) -> Iterator[Any]:
    """A value with each of its entries in turn removed, or replaced by something nasty."""
    yield from NASTY
    if not isinstance(value, dict | list):
        return
    for key in value if isinstance(value, dict) else range(min(len(value), 1)):
        for edited in edits(value[key]):
            changed = copy.copy(value)
            changed[key] = edited
            yield changed
        yield {k: v for k, v in value.items() if k != key} if isinstance(value, dict) else value[1:]
    if isinstance(value, dict):
        yield value | {"\x1b[2J": 1}


def damages(content: bytes, number: int, seed: int) -> Iterator[bytes]:
    """Content that is cut, changed, doubled or replaced."""
    draw = random.Random(seed)
    yield from (b"", b"\x00" * 64, b"\xff\xfe", content * 2)
    for _ in range(number):
        place, more = draw.randrange(len(content) + 1), draw.randbytes(draw.randrange(1, 9))
        yield content[:place]
        yield content[:place] + more + content[place + len(more) :]


def answer(question: Callable[[], Any]) -> Any:
    """What is answered; None for an error with a message."""
    with contextlib.suppress(ExperimentError):
        return question()


def check_config(home: Home, directory: Path) -> None:
    fixed = home.plan.config.fixed_steps()
    found = answer(lambda: check_run_directory(directory, home.values, fixed_steps=fixed))
    assert found in (None, json.loads(json.dumps(home.values)))
    model = dataclasses.replace(home.plan.config.model, weights=str(directory))
    seen_in_training(dataclasses.replace(home.plan.config, model=model), "cub")


def check_report(home: Home, directory: Path) -> None:
    path, protocol = directory / "report.json", home.plan.protocol
    report = read_report(path, lambda report: report_text(protocol, report))
    if report is not None:
        runs = [GridRun(("a",), report, read_episodes(directory))]
        assert report_text(protocol, report)
        assert grid_table(make_grid([Axis("loss", ("a",))], runs), runs, title="T")


def check_metrics(home: Home, directory: Path) -> None:
    rows = read_metrics(directory / METRICS_FILE)
    assert all(type(row["step"]) is int for row in rows)
    training(View(dataclasses.replace(home.run, directory=directory), [], []))
    with MetricsLog(directory, resume_step=3):
        assert read_metrics(directory / METRICS_FILE) == [r for r in rows if r["step"] <= 3]


def check_checkpoint(home: Home, directory: Path) -> None:
    run = answer(lambda: load_run(directory, "latest"))
    if run is not None:
        leaves = zip(*map(jax.tree.leaves, (run.state, home.states[run.step])), strict=True)
        assert all(np.array_equal(one, other) for one, other in leaves)


CHECKS = {"config.json": check_config, "report.json": check_report, METRICS_FILE: check_metrics}


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))  # In ASCII, as a text has half characters.


@pytest.mark.parametrize(("name", "part"), [("config.json", 2), ("report.json", 10)])
def test_edited_json(trained, name, part):
    directory = trained.copy()
    for value in [*edits(json.loads((directory / name).read_text()))][::part]:
        write(directory / name, value)
        CHECKS[name](trained, directory)


def test_edited_metrics(trained):
    directory = trained.copy()
    first, *others = (directory / METRICS_FILE).read_text().splitlines()
    for value in [*edits(json.loads(first))][::2]:
        (directory / METRICS_FILE).write_text("\n".join([json.dumps(value), *others]))
        check_metrics(trained, directory)


@pytest.mark.parametrize("name", CHECKS)
def test_damaged_files(trained, name):
    directory = trained.copy()
    for content in damages((directory / name).read_bytes(), 20, seed=0):
        (directory / name).write_bytes(content)
        CHECKS[name](trained, directory)


@pytest.mark.parametrize("name", [*CHECKS, "episodes.npz"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file(trained, name, make):
    """A pipe would keep its reader waiting."""
    directory = trained.copy()
    (directory / name).unlink()
    make(directory / name)
    with contextlib.suppress(OSError):  # The command line makes it a sentence.
        CHECKS.get(name, check_report)(trained, directory)


def test_edited_headers_of_checkpoints(trained):
    """Their digests are those of what they hold."""
    directory = trained.copy()
    path = directory / "checkpoints" / "4" / "header" / "metadata"
    header = json.loads(path.read_text())
    del header["sha256"]
    for value in [*edits(header)][::60]:
        value = value | {"sha256": _json_digest(value)} if isinstance(value, dict) else value
        write(path, value)
        check_checkpoint(trained, directory)


def test_damaged_checkpoints(trained):
    directory = trained.copy()
    for number, path in enumerate(sorted((directory / "checkpoints" / "4").rglob("*"))):
        if path.is_file():
            before = path.read_bytes()
            for content in [*damages(before, 1, seed=0)][number % 6 :: 6]:
                path.write_bytes(content)
                check_checkpoint(trained, directory)
            path.write_bytes(before)


def test_runs_that_name_each_other_as_their_weights(trained):
    directory = trained.copy()
    config = dataclasses.replace(trained.plan.config.model, weights=str(directory))
    config = dataclasses.replace(trained.plan.config, model=config)
    write(directory / "config.json", config_to_dict(config))
    assert seen_in_training(config, "cub") == ""


def test_episodes_that_are_damaged_are_left_out(tmp_path):
    path, one = tmp_path / "episodes.npz", np.ones(3, np.float32)
    np.savez(path, a=one)
    assert list(read_episodes(tmp_path)) == ["a"]
    for content in damages(path.read_bytes(), 20, seed=0):
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
        bytes(8),
        _weights(b"{}", 2**62),
        _weights(b"[" * 10_000),
        _weights(b'{"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}'),
        _weights(b'{"a": {"dtype": "F9", "shape": [8], "data_offsets": [0, 8]}}'),
        _weights(b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}'),
        _weights(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 99]}}'),
        _weights(b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', data=b""),
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
    Path("circle").symlink_to("circle")
    Path("nowhere").symlink_to("absent")
    for text in ("", "a\0b", "circle", "nowhere", "x" * 300, "~nobody-here/x"):
        with pytest.raises(ConfigError, match=r"^--directory "):
            storage_path(text, "--directory")


@pytest.mark.parametrize(
    "text", ["", ".", "..", "...", "../../x", "a\\b", "a\nb\0", "é" * 300, "loss.name=a:b"]
)
def test_a_component_stays_in_its_folder(tmp_path, text):
    name = component(text)
    path = tmp_path / f"{name}.json"
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    write_json(path, 1)
    assert [*tmp_path.iterdir()] == [path]
    assert len(name.encode()) <= 200
    assert component(text + "x" * 300) != component(text + "x" * 301)
