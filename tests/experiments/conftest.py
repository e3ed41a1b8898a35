"""Tests share tiny runs: those of one run stay in one process, and compiled programs are kept."""

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from experiments import run as run_module
from experiments.core.config import Folders
from experiments.core.storage import storage_path
from experiments.data.pipeline import RecordImages
from experiments.papers.integration import IntegratedLoss
from experiments.run import complete_run, plan_run
from tests.experiments.several_processes import FSSPEC, object_store
from tests.experiments.tiny_runs import TINY, light_backbones

_RUNS = {"grid", "run", "swept", "trained", "undisturbed", "whole"}
"""Fixtures of a module that train."""


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist reads the groups.
def pytest_collection_modifyitems(items):
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "few_shot_run" in names:
            item.add_marker(pytest.mark.xdist_group("few_shot_run"))
        for name in _RUNS.intersection(names):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.name}: {name}"))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, worker_id) -> Path:
    """A folder of all processes of these tests."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def compilation_cache(shared_folder) -> Path:
    """Where processes that tests start keep compiled programs."""
    folder = shared_folder / "xla"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    """What commands keep in the user's cache stays out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folders(shared_folder) -> Iterator[Folders]:
    """Where the data sets of a session's tests are prepared, and whole splits are read, once."""
    data_dir, read, known = shared_folder / "data", RecordImages.__getitem__, {}

    def read_once(images: RecordImages, index):
        if not isinstance(index, slice) or data_dir not in images._folder.parents:
            return read(images, index)
        key = (images._folder, images._source.split, images._rows[index].tobytes())
        if key not in known:
            known[key] = read(images, index)
        return deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordImages, "__getitem__", read_once)
        yield Folders(data_dir=data_dir)


@pytest.fixture
def dirs(tmp_path) -> dict[str, Path]:
    """Where a test prepares data sets of its own, as `load_split` takes them."""
    return {"data_dir": tmp_path / "data", "manual_dir": tmp_path / "manual"}


@pytest.fixture(scope="module")
def light_backbone() -> Iterator[None]:
    """For tests of what is around a network: all runs of a file train `Pooled` in its place."""
    with light_backbones():
        yield


@pytest.fixture
def small_network() -> Iterator[None]:
    """The same for a single test."""
    with light_backbones():
        yield


@pytest.fixture(scope="session")
def few_shot_run(tmp_path_factory, folders) -> Path:
    """A run with checkpoints after steps 2, 4 and 6, beside which tests may write.

    Its validations fall, by 1 each time: the best checkpoint is the first, and not the last.
    """
    directory, before = tmp_path_factory.mktemp("few-shot") / "run", itertools.count()
    data = replace(TINY.data, mean=(0.6,), std=(0.4,))
    config = replace(TINY, data=data, loss=IntegratedLoss(name="sce"), steps=6, report_last=True)
    plan = plan_run(config)
    validate = plan.protocol.validate
    plan.protocol.validate = lambda outputs: validate(outputs) - next(before)
    complete_run(plan, directory, folders, command="train it")
    return directory


@pytest.fixture(scope="session")
def voc(tmp_path_factory) -> Folders:
    """A small VOC 2007."""
    from tests.experiments.fake_image_sets import random_voc2007

    return random_voc2007(tmp_path_factory.mktemp("voc"))


@pytest.fixture(scope="session")
def bucket(tmp_path_factory) -> Iterator[Path]:
    """A bucket of an emulator, which this process and those that it starts use."""
    import fsspec.config

    with (
        object_store(tmp_path_factory.mktemp("store")) as variables,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(fsspec.config.conf, "gcs", FSSPEC)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield storage_path("gs://bucket")


@pytest.fixture
def killed_after(monkeypatch) -> Callable[[int, Callable[[], object]], None]:
    """Calls what trains, which dies when so many batches are drawn: between two checkpoints."""

    class Killed(BaseException):  # `main` ends with any other error.
        pass

    def run(steps: int, training: Callable[[], object]) -> None:
        draws = Mock(wraps=run_module.draw_batch, side_effect=[*[DEFAULT] * steps, Killed])
        with monkeypatch.context() as patch:
            patch.setattr(run_module, "draw_batch", draws)
            with pytest.raises(Killed):
                training()

    return run
