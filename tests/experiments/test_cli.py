"""The command line: options, messages, file names."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import json
import os
import pkgutil
import re
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

import jax
import pytest

from experiments.cli.datasets import Datasets
from experiments.cli.main import main
from experiments.core.config import Folders, SamplingConfig
from experiments.core.errors import ExperimentError
from experiments.core.storage import write_json
from experiments.datasets import describe, preparation
from experiments.papers.classification import ClassificationData
from experiments.papers.few_shot import IntegrationEvaluation
from experiments.papers.presets import PRESETS
from experiments.reporting.grid import Comparison
from experiments.training.run_directory import MetricsLog
from tests.experiments.several_processes import ROOT
from tests.experiments.tiny_runs import TINY, TINY_OPTIONS

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


class Reached(ExperimentError):
    """Raised in place of what a command would do."""


PLACES = "--data-dir data --manual-dir manual"
FOLDERS: dict[str, Any] = {"folders": Folders(Path("data"), Path("manual"))}


@pytest.mark.parametrize(
    ("typed", "function", "expected"),
    [
        (
            f"train icons --seed 3 --steps 7 --parallel jit --stuck-after 5 {PLACES}",
            "experiments.run.complete_run",
            {"plan.config.seed": 3, "plan.config.steps": 7, "mode": "jit"}
            | {"stuck_after": 5, **FOLDERS}
            | {"directory": Path("runs/icons-direct-sce+nca-random-seed3")},
        ),
        (
            f"evaluate RUN --checkpoint 4 {PLACES}",
            "experiments.run.load_run",
            {"folder": Path("RUN"), "checkpoint": "4"},
        ),
        (
            f"evaluate RUN --split validation --evaluation.ways 3 {PLACES}",
            "experiments.run.evaluate",
            {"split": "validation", "options": {"evaluation.ways": 3}, **FOLDERS},
        ),
        (
            "evaluate RUN --over evaluation.ways=2,3 --split base --checkpoint latest "
            f"--metrics MAP@R --evaluation.shots 2 --baseline evaluation.ways=2 {PLACES}",
            "experiments.sweeps.grid.evaluate_over",
            {"path": Path("RUN"), "over": ("evaluation.ways=2,3",), "split": "base", **FOLDERS}
            | {"checkpoint": "latest", "overrides": {"evaluation.shots": (2,)}}
            | {"metrics": ("MAP@R",), "baseline": "evaluation.ways=2"},
        ),
        (
            "linear RUN --data cub --split novel --holdout 0.3 --checkpoint 4 --directory table "
            f"--baseline SCE {PLACES}",
            "experiments.sweeps.linear.evaluate_runs_linear",
            {"paths": (Path("RUN"),), "checkpoint": "4", "directory": Path("table"), **FOLDERS}
            | {"data": ClassificationData(name="cub", class_split="novel", holdout=0.3)}
            | {"baseline": "SCE"},
        ),
        (
            f"look RUN --split base --checkpoint 4 {PLACES}",
            "experiments.look.look_at_run",
            {"path": Path("RUN"), "split": "base", "checkpoint": "4", **FOLDERS},
        ),
        (
            "sweep icons-groups --steps 7 --over loss.name=loose,tight data.classes=5,6 "
            "--seeds 2 3 --metrics accuracy --title Groups --baseline loss.name=loose "
            f"--choose data.classes --directory grid {PLACES}",
            "experiments.sweeps.grid.run_grid",
            {"config.steps": 7, "seeds": (2, 3), "root": Path("grid"), **FOLDERS}
            | {"settings": ["loose", "tight", 5, 6], "metrics": ("accuracy",), "title": "Groups"}
            | {"comparison": Comparison(("loss.name", "loose"), "", "data.classes")},
        ),
        (
            "compare icons --steps 7 --losses nca sce --sampling 8x2 random --seeds 2 3 "
            f"--pairs-over sampling.strategy {PLACES}",
            "experiments.sweeps.grid.run_grid",
            {"config.steps": 7, "seeds": (2, 3), "root": Path("runs/compare-icons"), **FOLDERS}
            | {"settings": ["sce", "nca", "8x2", "random"]}
            | {"comparison": Comparison(None, "training batches", "")},
        ),
        (
            "compile icons --topology v5e:2x4",
            "experiments.benchmark.topologies.tpu_devices",
            {"topology": "v5e:2x4"},
        ),
        (
            "compile icons --steps 7 --parallel jit --classes 9",
            "experiments.benchmark.compilation.compile_step",
            {"config.steps": 7, "mode": "jit", "classes": 9},
        ),
    ],
)
def test_what_is_typed_reaches_the_code(monkeypatch, tmp_path, typed, function, expected):
    monkeypatch.chdir(tmp_path)
    Path("RUN").mkdir()
    signature = inspect.signature(pkgutil.resolve_name(function))
    config = dataclasses.replace(TINY, loss=dataclasses.replace(TINY.loss, name="sce"))
    monkeypatch.setattr("experiments.run.config_of_run", lambda path: config)
    monkeypatch.setattr("experiments.run.load_run", Mock(return_value=Mock()))
    monkeypatch.setattr("experiments.benchmark.topologies.tpu_devices", Mock())
    monkeypatch.setattr(function, reached := Mock(side_effect=Reached))
    assert main(typed.split()) == 2
    call = signature.bind(*reached.call_args.args, **reached.call_args.kwargs)
    given = SimpleNamespace(**call.arguments | call.arguments.pop("report", {}))
    if hasattr(given, "axes"):
        given.settings = [x for axis in given.axes for at in axis.settings for x in at.values()]
    assert {name: attrgetter(name)(given) for name in expected} == expected


@pytest.mark.long
def test_evaluate_has_the_options_and_values_of_the_run(run, capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(IntegrationEvaluation):
        assert f"--evaluation.{field.name.replace('_', '-')}" in printed
    assert "Episodes of each evaluation. (default: 20)" in printed
    assert "--fine-tuning" not in printed


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write standard output"),
        (OSError(errno.ENOSPC, "No space left on device", "/a/b.png"), "cannot write /a/b.png"),
        # As TensorStore raises it.
        (
            ValueError(
                'Error writing local file "/a/r/d/0": [OS error 28: No space left on device]'
            ),
            "cannot write /a/r/d/0",
        ),
    ],
)
def test_a_full_disk_is_a_message_and_a_mistake_of_ours_is_not(monkeypatch, capsys, error, line):
    monkeypatch.setattr("experiments.cli.main._drop_output", Mock())

    def broken(self, command):
        raise error

    monkeypatch.setattr(Datasets, "run", broken)
    assert main(["datasets"]) == 2
    assert capsys.readouterr().err == f"error: {line}: No space left on device\n"
    error = ValueError("a mistake of ours")
    with pytest.raises(ValueError, match="a mistake of ours"):
        main(["datasets"])


@pytest.mark.parametrize("devices", [[], ["/dev/accel0"]])
def test_jax_chooses_the_devices_and_without_a_tpu_libtpu_is_silent(monkeypatch, devices):
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr("experiments.cli.main.glob", Mock(glob=lambda pattern: devices))
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.setenv(name, "")  # Or it would stay after the test.
        monkeypatch.delenv(name)
    monkeypatch.setattr(Datasets, "run", lambda self, command: 0)
    try:
        jax.config.update("jax_platforms", None)
        assert main(["datasets"]) == 0
        assert jax.config.jax_platforms is None  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        jax.config.update("jax_platforms", platforms)
    assert ("TPU_ACCELERATOR_TYPE" in os.environ) is (not devices)
    assert ("TPU_WORKER_HOSTNAMES" in os.environ) is (not devices)


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
@pytest.mark.parametrize(("size", "place"), [(100, "config.json"), (2_100, "checkpoints/2")])
def test_a_disk_that_gets_full_in_training_is_a_line_with_the_path(
    size, place, folders, tmp_path, capsys
):
    train = ["train", "icons", *TINY_OPTIONS, "--loss.name", "sce", "--directory"]
    train += [str(tmp_path / "run"), "--data-dir", str(folders.data_dir)]
    assert main(["prepare", "icons", "--data-dir", str(folders.data_dir)]) == 0
    with _files_up_to(size):
        assert main(train) == 2
    line = f"error: cannot write {tmp_path}/run/{place}: File too large\n"
    assert capsys.readouterr().err == line
    assert main(train) == 0  # Once there is space.


@pytest.mark.long
def test_a_disk_that_gets_full_in_preparation_is_a_line_with_the_path(tmp_path, capsys):
    prepare = ["prepare", "icons", "--data-dir", str(tmp_path)]
    with _files_up_to(100_000):
        assert main(prepare) == 2
    assert capsys.readouterr().err == f"error: cannot write {tmp_path}/icons: File too large\n"
    assert main(prepare) == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        # As array_record raises it, and `zipfile` where it extracts a file.
        (RuntimeError("write() failed: No space left on device; writing ..."), 2),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (RuntimeError("a mistake"), None),
    ],
)
def test_preparation_names_the_folder_that_has_no_space(
    tmp_path, monkeypatch, capsys, error, status
):
    monkeypatch.setattr(preparation, "_write", Mock(side_effect=error))
    prepare = ["prepare", "icons", "--data-dir", str(tmp_path)]
    if status is None:
        with pytest.raises(RuntimeError, match="a mistake"):
            main(prepare)
        return
    assert main(prepare) == status
    line = f"error: cannot write {tmp_path}/icons: No space left on device\n"
    assert capsys.readouterr().err == line


def test_metrics_and_reports_name_the_file_that_has_no_space(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    log = MetricsLog(tmp_path, resume_step=0)
    log.log(1, loss=1.0)
    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr("experiments.training.run_directory._SECONDS_BETWEEN_FLUSHES", 0)
    path = re.escape(str(tmp_path))
    for call, name in (
        (lambda: write_json(tmp_path / "report.json", {}), "/report.json"),
        (lambda: log.log(2, loss=1.0), "/metrics.jsonl"),
        (log.store, ""),
        (lambda: log.__exit__(None, None, None), ""),
    ):
        with pytest.raises(ExperimentError, match=f"^cannot write {path}{name}: No space left on"):
            call()
    assert not [*tmp_path.glob(".report.json*")]


def test_datasets_lists_the_set_of_every_preset(folders, capsys):
    assert main(["datasets", "--data-dir", str(folders.data_dir)]) == 0
    listed = capsys.readouterr().out
    for preset in PRESETS.values():
        assert preset.config.data.name.partition("@")[0] in listed
    assert str(folders.data_dir) in listed
    assert listed.count("\n") < 50
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


def test_settings_lists_values_and_sources_and_epochs_of_prepared_data(
    folders, tmp_path, monkeypatch, capsys
):
    assert main(["prepare", "icons", "--data-dir", str(folders.data_dir)]) == 0
    capsys.readouterr()
    preset, sampling = PRESETS["icons"], SamplingConfig(batch_size=64)
    model = dataclasses.replace(preset.config.model, drop_block_steps=290, widths=(4, 8, 8, 8))
    changed = preset._replace(
        config=dataclasses.replace(preset.config, model=model, sampling=sampling),
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
    steps_per_epoch = 4650 // 64  # As in training, which leaves out the rest of an epoch.
    assert f"| steps | 800 ({800 / steps_per_epoch:.4g} epochs) | – |" in text
    assert "| model.drop_block_steps | 290 (4.028 epochs) | – |" in text
    assert main(["settings", "food10-groups"]) == 2
    assert "no preset food10-groups; did you mean food101-groups" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("trian icons", "no command trian; did you mean train?"),
        ("train icon", "no preset icon; did you mean icons?"),
        ("train icons --step 20", "no option --step; did you mean --steps"),
        ("train icons-names", "no preset icons-names; train two towers with the library, as in"),
        ("sweep icons-instances", "no preset icons-instances; spread a million classes over"),
        ("train icons --mesh 2x2", "no option --mesh; the batch is spread over all devices; to"),
        ("train icons --data.cutmix 1", "no option --data.cutmix; use --data.mixup"),
        ("train icons --learning-rate 1", "did you mean --optimizer.learning-rate"),
        (
            "train icons --qqqq=1",
            "no option --qqqq; python -m experiments train icons --help",
        ),
        ("train icons --steps 1e3", "error: --steps: '1e3' is no whole number; "),
        ("train icons --loss.temperature x", "error: --loss.temperature: 'x' is no number; "),
        ("train icons --loss.name sec", "--loss.name: no value sec; did you mean sce"),
        ("look", "python -m experiments look --help"),
        (
            "train icons --stuck-after nan",
            "--stuck-after must be at least 0 and at most 1000000, got nan",
        ),
        (
            "train icons --evaluation.shots 1 1",
            "evaluation.shots must be different values, got (1, 1)",
        ),
        ("power --deviation 1 more", "'more' is one word too many"),
        ("prepare icon", "no data set icon; did you mean icons?"),
    ],
)
def test_a_mistyped_command_is_a_line_with_the_nearest_names(capsys, typed, line):
    assert main(typed.split()) == 2
    printed = capsys.readouterr()
    assert line in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.parametrize(("name", "words"), [("datasets", "start it again"), ("train", "continue")])
def test_an_interrupt_says_what_the_same_command_does(monkeypatch, capsys, name, words):
    monkeypatch.setattr("experiments.cli.main._status", Mock(side_effect=KeyboardInterrupt))
    assert main([name, "icons"]) == 130
    assert f"stopped; run the same command to {words}" in capsys.readouterr().err


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


@pytest.mark.parametrize("command", ["look", "evaluate"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("runs/icons-scee", "there is no directory runs/icons-scee; did you mean runs/icons-sce?"),
        ("run/zzz", "there is no directory run/zzz; name that of a run"),
        ("notes", "there is no directory notes; name that of a run"),
        ("note", "there is no directory note; name that of a run"),
        ("empty", "empty is no run: it holds nothing; name a directory that `train` has written"),
        ("photos", "photos is no run: it holds cat, dog; name a directory that `train`"),
        ("runs", "runs is no run; name a run in it: it holds 1, such as runs/icons-sce"),
        (
            "sweep",
            "sweep is no run; name a run in it: it holds 2, such as sweep/loss.name=nca/",
        ),
        ("runs/icons-sce", "runs/icons-sce holds a run without a checkpoint; run the same `train`"),
        ("runs/icons-sce/checkpoints", "runs/icons-sce holds a run without a checkpoint; run the"),
    ],
)
def test_what_is_no_run_is_named_with_a_hint(tmp_path, monkeypatch, capsys, command, name, line):
    monkeypatch.chdir(tmp_path)
    for run in ("runs/icons-sce", "sweep/loss.name=nca/seed-0", "sweep/loss.name=sce/seed-0"):
        (tmp_path / run / "checkpoints").mkdir(parents=True)
        write_json(tmp_path / run / "config.json", {})
    for folder in ("empty", "photos/cat", "photos/dog"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "notes").touch()
    assert main([command, name]) == 2
    output = capsys.readouterr()
    (printed,) = output.err.splitlines()
    assert printed.startswith(f"error: {line}")
    assert not output.out


def test_an_interrupt_during_the_imports_ends_them():
    command = [sys.executable, "-X", "importtime", "-m", "experiments", "datasets"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may ignore it.
    try:
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stderr is not None
        next(line for line in process.stderr if "jax.version" in line)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().endswith("\nstopped before the command began\n")
    assert process.returncode == 130


_DROPPED = """
import gc, runpy, signal, sys, time
import experiments.cli.main as cli

signal.signal(signal.SIGINT, signal.default_int_handler)

class Collected:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def in_callback(*_):
    gc.callbacks.remove(in_callback)
    signal.raise_signal(signal.SIGINT)

def evaluate(*_):
    if number % 2:
        Collected()
    else:
        gc.callbacks.append(in_callback)
        gc.collect()
    time.sleep(20)

cli._status = evaluate
for number in range(10):
    try:
        runpy.run_module("experiments", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code == 130, end.code
"""


def test_an_interrupt_that_python_drops_comes_again():
    """As one that meets JAX's callback on freed memory, or a `__del__` of Orbax."""
    command = [sys.executable, "-c", _DROPPED, "datasets"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stderr == 10 * "\nstopped; run the same command to start it again\n"
