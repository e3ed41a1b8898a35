"""The command line: options, messages, exit status, file names."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import pkgutil
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aiohttp
import jax
import pytest

from experiments.cli.commands import Datasets
from experiments.cli.main import main, parse
from experiments.core.config import Folders
from experiments.core.errors import ConfigError, ExperimentError, reason_of
from experiments.papers.classification import ClassificationData
from experiments.papers.presets import PRESETS
from experiments.reporting.grid import Comparison
from tests.experiments.several_processes import ROOT
from tests.experiments.tiny_runs import TINY_OPTIONS

pytestmark = pytest.mark.usefixtures("light_backbone")


PLACES = "--data-dir data --manual-dir manual"
FOLDERS: dict[str, Any] = {"folders": Folders(Path("data"), Path("manual"))}


@pytest.mark.parametrize(
    ("typed", "function", "expected"),
    [
        (
            f"train icons --seed 3 --steps 7 --parallel jit --stuck-after 5 {PLACES}",
            "run.complete_run",
            {"plan.config.seed": 3, "plan.config.steps": 7, "mode": "jit", "stuck_after": 5}
            | {"directory": Path("runs/icons-direct-sce+nca-random-seed3"), **FOLDERS},
        ),
        ("evaluate RUN --checkpoint 4", "run.load_run", {"folder": Path("RUN"), "checkpoint": "4"}),
        (
            f"evaluate RUN --split validation --set evaluation.ways=3 {PLACES}",
            "run.evaluate",
            {"split": "validation", "options": {"evaluation.ways": "3"}, **FOLDERS},
        ),
        (
            "linear RUN --data cub --split novel --holdout 0.3 --checkpoint 4 --directory table "
            f"--baseline SCE {PLACES}",
            "sweeps.linear.evaluate_runs_linear",
            {"paths": [Path("RUN")], "checkpoint": "4", "directory": Path("table"), **FOLDERS}
            | {"data": ClassificationData(name="cub", class_split="novel", holdout=0.3)}
            | {"baseline": "SCE"},
        ),
        (
            "sweep icons-groups --steps 7 --over loss.name=loose,tight data.classes=5,6 "
            "--seeds 2 3 --metrics accuracy --title Groups --baseline loss.name=loose "
            f"--choose data.classes --directory grid {PLACES}",
            "sweeps.grid.run_grid",
            {"config.steps": 7, "seeds": (2, 3), "root": Path("grid"), **FOLDERS}
            | {"settings": ["loose", "tight", 5, 6], "metrics": ("accuracy",), "title": "Groups"}
            | {"comparison": Comparison(("loss.name", "loose"), "", "data.classes")},
        ),
        (
            "compile icons --steps 7 --parallel jit --classes 9",
            "benchmark.compilation.compile_step",
            {"config.steps": 7, "mode": "jit", "classes": 9},
        ),
    ],
)
def test_what_is_typed_reaches_the_code(monkeypatch, tmp_path, typed, function, expected):
    monkeypatch.chdir(tmp_path)
    signature = inspect.signature(pkgutil.resolve_name(f"experiments.{function}"))
    monkeypatch.setattr("experiments.run.load_run", Mock(return_value=Mock()))
    monkeypatch.setattr("experiments.benchmark.topologies.tpu_devices", Mock())
    reached = Mock(side_effect=ConfigError("reached"))
    monkeypatch.setattr(f"experiments.{function}", reached)
    with pytest.raises(ConfigError, match="reached"):
        parse(typed.split()).run(typed)
    call = signature.bind(*reached.call_args.args, **reached.call_args.kwargs)
    given = SimpleNamespace(**call.arguments)
    if hasattr(given, "axes"):
        given.settings = [x for axis in given.axes for at in axis.settings for x in at.values()]
    assert {name: attrgetter(name)(given) for name in expected} == expected


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("trian icons", "error: no command trian; did you mean train?"),
        ("train icon", "error: no preset icon; did you mean icons?"),
        ("train folder --data.name folder", "for images of your own, set folder:PATH"),
        ("predict RUN a.jpg", "error: there is no checkpoint in RUN"),
        ("sweep zzz", "error: no preset zzz; available: icons, fashion"),
        ("train icons --step 20", "Unrecognized options: --step, 20 Perhaps you meant: --"),
        ("train icons --steps 1e3", "Error parsing --steps: invalid literal for int()"),
        ("train icons --loss.name sec", "invalid choice 'sec' for argument '--loss.name'"),
        ("look", "Missing from python -m experiments look: RUN"),
        ("power --deviation 1 more", "Unrecognized options: more"),
        ("power --deviation 1 --pairs 1", "error: pairs must be at least 2 and at most"),
        ("compile icons --classes -1", "error: --classes must be at least 0"),
        ("compile icons --topology v99:1x1", "error: TPU topology 'v99:1x1' cannot be described"),
        ("benchmark nca --cycles v99:1x1", 'it needs pip install -e ".[tpu]", and a name'),
        ("benchmark nca lifted", "error: unknown loss 'lifted'"),
        ("train icons --stuck-after nan", "error: stuck_after must be finite, got nan"),
        ("train icons --evaluation.shots 1 1", "error: evaluation.shots must be different values"),
        ("train icons --distributed", "error: the processes cannot be joined"),
        ("train icons --directory file/run", "error: file/run"),
        ("sweep icons", "error: sweep needs at least one axis (--over) and one seed"),
        ("evaluate RUN --metrics recall@1", "error: --metrics and --baseline are for a table"),
        ("evaluate RUN", "error: there is no checkpoint in RUN"),
        ("evaluate ~nosuchuser/x", "error: ~nosuchuser/x: Could not determine home"),
        ("prepare icons no-such-set", "error: no data set no-such-set;"),
        ("prepare", "error: prepare needs the name of a data set"),
        ("train icons --directory s3://b/run", "must be gs://BUCKET/PATH or a local folder, got"),
        ("train icons --data-dir az://b/data", "error: data_dir must be gs://BUCKET/PATH or a"),
        ("train icons --manual-dir gs://b/data", "error: --manual-dir must be a local path"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    monkeypatch, tmp_path, folders, capsys, typed, words
):
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    Path("file").touch()
    if "file" in typed:  # Found after the data is prepared.
        typed += f" --data-dir {folders.data_dir}"
    try:
        status = main(typed.split())
    except SystemExit as stop:  # Of tyro.
        status = stop.code
    assert status == 2
    printed = capsys.readouterr()
    said = " ".join(word for word in printed.err.split() if word.strip("│─╭╮╰╯-|+"))
    assert words in said
    assert not said.startswith("error") or printed.err.count("\n") == 1
    assert not printed.out or "file" in typed
    assert [*tmp_path.rglob("*")] == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("words", "listed"),
    [([], COMMANDS := ["train", "compile"]), (["--help"], COMMANDS), (["sweep"], [*PRESETS])],
)
def test_help_lists_what_the_next_word_can_be(capsys, words, listed):
    with pytest.raises(SystemExit):
        main(words)
    assert {*listed} <= {*capsys.readouterr().out.split()}


class _Unreachable(aiohttp.ClientError):
    __module__ = "aiohttp"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ExperimentError("a line"), "a line"),
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), "cannot write /a/b: No space"),
        # As TensorStore and array_record raise it, and TFDS before it writes.
        (
            ValueError('writing "/a/r/d/0": [OS error 28: No space left on device]'),
            "cannot write /a/r/d/0: No space left on device",
        ),
        (RuntimeError("write() failed: No space left on device"), "cannot write standard output"),
        (RuntimeError("Not enough disk space"), "cannot write standard output: No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), "/a: Permission denied"),
        (_Unreachable("no\nnetwork"), "cannot reach Google Cloud Storage: no network"),
        (RuntimeError("RESOURCE_EXHAUSTED:\n8 bytes"), "there is not enough memory; choose a"),
        (MemoryError(), "there is not enough memory; choose a smaller batch"),
        (RuntimeError("Unable to initialize backend 'tpu':\n…"), "JAX finds no device; unset"),
        (OSError("a mistake of ours"), ""),
    ],
)
def test_errors_that_the_user_can_fix_have_a_reason(monkeypatch, capsys, error, reason):
    assert reason_of(error).startswith(reason)
    monkeypatch.setattr(Datasets, "run", Mock(side_effect=error))
    assert main(["datasets"]) == (2 if reason else 1)
    said = capsys.readouterr().err
    assert said.startswith(f"error: {reason}" if reason else "Traceback")
    assert said.count("\n") == 1 or not reason


@contextlib.contextmanager
def _files_up_to(size: int) -> Iterator[None]:
    """Files cannot grow beyond so many bytes, which stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    shortest = "jax_persistent_cache_min_compile_time_secs"
    kept = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore
    jax.config.update(shortest, 1e9)  # Or the cache of all tests would get broken files.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        jax.config.update(shortest, kept)


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "place"),
    [(100, "run/config.json"), (2_100, "run/checkpoints/2"), (100_000, "data/icons")],
)
def test_a_disk_that_gets_full_is_a_line_with_the_path(size, place, folders, tmp_path, capsys):
    train = ["train", "icons", *TINY_OPTIONS, "--loss.name", "sce"]
    train += ["--directory", str(tmp_path / "run"), "--data-dir", str(folders.data_dir)]
    if place.startswith("data"):
        train = ["prepare", "icons", "--data-dir", str(tmp_path / "data")]
    else:
        assert main(["prepare", "icons", "--data-dir", str(folders.data_dir)]) == 0
    with _files_up_to(size):
        assert main(train) == 2
    # TensorStore may report an error that follows from the first.
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot write {tmp_path}/{place}: ")
    assert main(train) == 0  # Once there is space.


def test_datasets_lists_the_set_of_every_preset(folders, capsys):
    assert main(["datasets", "--data-dir", str(folders.data_dir)]) == 0
    listed = capsys.readouterr().out
    for preset in PRESETS.values():
        assert preset.config.data.name.partition("@")[0] in listed
    assert str(folders.data_dir) in listed
    assert main(["datasets", "cub_fewshot", "--data-dir", str(folders.data_dir)]) == 0
    assert "CUB_200_2011.tgz" in capsys.readouterr().out


def test_help_does_not_import_what_only_runs_need():
    code = "import sys, experiments.cli.main, experiments.papers.presets; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    slow = {"scipy.stats", "pandas", "matplotlib", "tensorboardX", "orbax", "torch", "sklearn"}
    assert slow.isdisjoint(done.stdout.split()), done.stderr
    assert "experiments.cli.commands" in done.stdout.split()


@pytest.mark.long
def test_an_output_that_cannot_be_written_is_no_traceback():
    read, closed = os.pipe()
    os.close(read)  # What `| head` does to a process that has more to write.
    with open(closed, "w") as pipe, open("/dev/full", "w") as full:
        runs = [
            subprocess.run(
                [sys.executable, "-m", "experiments", "datasets"],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
            )
            for output in (pipe, full)
        ]
    message = "error: cannot write standard output: No space left on device\n"
    assert [(done.returncode, done.stderr) for done in runs] == [(141, ""), (2, message)]


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(Datasets, "run", Mock(side_effect=KeyboardInterrupt))
    assert main(["datasets"]) == 130
    assert "stopped; run the same command to continue" in capsys.readouterr().err
    # During the imports, it ends the process.
    command = [sys.executable, "-X", "importtime", "-m", "experiments", "datasets"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may ignore it.
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stderr is not None
        next(line for line in process.stderr if "jax.version" in line)
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == -signal.SIGINT


_DROPPED = """
import runpy, signal, time
import experiments.cli.main as cli

class Collected:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def evaluate(*_):
    Collected()
    time.sleep(20)

signal.signal(signal.SIGINT, signal.default_int_handler)
cli._run = evaluate
runpy.run_module("experiments", run_name="__main__", alter_sys=True)
"""


def test_an_interrupt_that_python_drops_comes_again():
    """As one that meets JAX's callback on freed memory, or a `__del__` of Orbax."""
    command = [sys.executable, "-c", _DROPPED, "datasets"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 130
    assert done.stderr == "\nstopped; run the same command to continue or to start again\n"
