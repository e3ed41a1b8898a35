"""The training frame: the step on one device and on many, resuming, refusing, the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.__main__ import Datasets, Evaluate, main
from experiments.config import (
    DataConfig,
    EvaluationConfig,
    FewShotConfig,
    Folders,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
    check_config,
    from_dict,
    to_dict,
)
from experiments.data.pipeline import RecordImages, load_split
from experiments.errors import ConfigError
from experiments.loss_names import parse_loss
from experiments.presets import PRESETS
from experiments.protocols import few_shot, protocol_of, run_from_dict, run_to_dict
from experiments.reporting.metrics import MetricsLog, read_metrics
from experiments.training import loop, parallel
from experiments.training.checkpoints import Checkpoints, ConfigMismatchError, read_config
from experiments.training.loop import Interrupted, ParallelMode, train
from experiments.training.preflight import check_run
from experiments.training.state import Setup, initial_setup
from experiments.training.step import Batch, build_step

TINY = FewShotConfig(
    sampling=SamplingConfig(batch_size=16),
    model=ModelConfig(widths=(4, 4, 4, 32)),
    evaluation=EvaluationConfig(episodes=50),
    steps=4,
    validate_every=2,
    validation_episodes=20,
    log_every=1,
)
ROOT = Path(__file__).parents[2]


def small_setup(config: TrainConfig, axis_name: str | None = None) -> Setup:
    return initial_setup(
        config,
        protocol_of(config).objective,
        image_shape=(16, 16, 1),
        counts=np.full(5, 100),
        axis_name=axis_name,
    )


def run_steps(config: FewShotConfig, mode: ParallelMode, num_steps: int = 3):
    axis_name = parallel.axis_name(mode)
    setup = small_setup(config, axis_name)
    step = build_step(
        setup.graphdef,
        setup.objective,
        setup.optimizer,
        config.data,
        key=jax.random.key(3),
        axis_name=axis_name,
    )
    run = parallel.data_parallel(mode, step)
    rng = np.random.default_rng(0)
    state, metrics = run.replicate(setup.state), None
    for _ in range(num_steps):
        batch = Batch(
            rng.integers(0, 256, (16, 16, 16, 1), np.uint8), rng.integers(0, 5, 16).astype(np.int32)
        )
        state, metrics = run.step(state, run.split(batch))
    return jax.device_get((run.single(state), run.single(metrics)))


RESNET = ModelConfig(backbone="resnet12", widths=(2, 4, 6, 8), pooling="mean", drop_block=0.2)


@pytest.mark.parametrize(("loss", "model"), [("sce", RESNET), ("direct:sce+nca", TINY.model)])
def test_pmap_and_sharded_jit_give_the_same_numbers(loss, model):
    config = dataclasses.replace(TINY, model=model, loss=LossConfig(name=loss))
    assert jax.device_count() == 4
    chex.assert_trees_all_close(
        run_steps(config, "pmap"), run_steps(config, "jit"), rtol=2e-4, atol=2e-5
    )


def test_a_batch_that_does_not_spread_evenly_is_refused():
    with pytest.raises(ValueError, match="batch of 6 does not spread evenly over 4 devices"):
        parallel.check_batch_size(6)


@pytest.mark.parametrize(
    "preset",
    ["icons", "icons-groups", "icons-sphere", "icons-longtail", "kanji", "icons-margin"],
)
def test_a_step_gives_back_what_it_takes(preset):
    """Also in weak types, or a run compiles its step twice."""
    config = PRESETS[preset].config
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, widths=TINY.model.widths)
    )
    setup = small_setup(config)
    step = build_step(
        setup.graphdef,
        setup.objective,
        setup.optimizer,
        config.data,
        key=jax.random.key(3),
        axis_name=None,
    )
    labels = np.eye(5, dtype=np.int8) if preset == "kanji" else np.arange(5, dtype=np.int32)
    after, _ = jax.eval_shape(step, setup.state, Batch(np.zeros((5, 16, 16, 1), np.uint8), labels))

    def kind(leaf):
        aval = jax.typeof(leaf)
        return aval.shape, aval.dtype, aval.weak_type

    chex.assert_trees_all_equal_structs(after, setup.state)
    assert jax.tree.map(kind, after) == jax.tree.map(kind, setup.state)


@pytest.mark.parametrize(("loss", "shown"), [("nca", False), ("sce+nca", True)])
def test_accuracy_is_logged_where_the_classifier_is_trained(loss, shown):
    config = dataclasses.replace(TINY, loss=LossConfig(name=loss))
    setup = small_setup(config)
    step = build_step(
        setup.graphdef,
        setup.objective,
        setup.optimizer,
        config.data,
        key=jax.random.key(3),
        axis_name=None,
    )
    batch = Batch(np.zeros((4, 16, 16, 1), np.uint8), np.array([0, 0, 1, 1], np.int32))
    _, metrics = jax.eval_shape(step, setup.state, batch)
    assert ("train_accuracy" in metrics) == shown
    assert {"loss", "gradient_norm"} <= metrics.keys()


def final_state(config: FewShotConfig, directory: Path):
    setup = initial_setup(
        config, protocol_of(config).objective, image_shape=(32, 32, 1), counts=np.full(100, 40)
    )
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(setup.state, checkpoints.latest_step())
    return jax.device_get(restored.state)


def metrics_without_clock(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


@pytest.mark.parametrize("strategy", ["random", "4x4"])
def test_a_resumed_run_ends_bit_identical(tmp_path, folders, strategy, killed_after):
    config = dataclasses.replace(TINY, sampling=SamplingConfig(batch_size=16, strategy=strategy))
    train(config, tmp_path / "whole", folders)

    killed_after(3, lambda: train(config, tmp_path / "cut", folders))
    with Checkpoints(tmp_path / "cut" / "checkpoints", read_only=True) as checkpoints:
        before = checkpoints.meta(2)["seconds"]
    started = time.monotonic()
    trained = train(config, tmp_path / "cut", folders)
    assert 0 < before < trained.seconds <= before + time.monotonic() - started
    # A run that is finished needs no more time, however often it is asked for.
    again = train(config, tmp_path / "cut", folders)
    assert trained.seconds - 2 < again.seconds <= trained.seconds

    chex.assert_trees_all_equal(
        final_state(config, tmp_path / "cut"), final_state(config, tmp_path / "whole")
    )
    assert metrics_without_clock(tmp_path / "cut") == metrics_without_clock(tmp_path / "whole")


def test_a_set_beyond_memory_trains_to_the_same_bits(tmp_path, folders, monkeypatch):
    train(TINY, tmp_path / "memory", folders)
    monkeypatch.setattr(few_shot, "load_split", partial(load_split, memory_limit=0))
    assert isinstance(few_shot.load(TINY, folders, "base").images, RecordImages)
    train(TINY, tmp_path / "records", folders)
    chex.assert_trees_all_equal(
        final_state(TINY, tmp_path / "records"), final_state(TINY, tmp_path / "memory")
    )


@pytest.fixture
def signalled(monkeypatch):
    """Has the metrics file raise signals in this process, once it has the loss of a step."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may have it ignored.
    write = MetricsLog.log

    def begin(at: int, *numbers: int) -> None:
        def log(self, step, **scalars):
            write(self, step, **scalars)
            for number in numbers if step == at and "loss" in scalars else ():
                signal.raise_signal(number)

        monkeypatch.setattr(MetricsLog, "log", log)

    yield begin
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_late_in_a_step_is_met_by_the_next(
    tmp_path, folders, signalled, number
):
    config, before = dataclasses.replace(TINY, steps=8, validate_every=8), signal.getsignal(number)
    signalled(3, number)
    with pytest.raises(Interrupted, match="stopped at step 4 of 8, which is saved") as stopped:
        train(config, tmp_path / "run", folders)
    assert stopped.value.signal_number == number
    assert signal.getsignal(number) is before
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [4]


def test_a_second_interrupt_stops_at_once(tmp_path, folders, signalled, capfd):
    signalled(3, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, tmp_path / "run", folders)
    assert "Ctrl-C again stops at once" in capfd.readouterr().err


def test_checkpoints_are_written_between_validations_and_steps_are_waited_for(
    tmp_path, folders, monkeypatch
):
    saved, waited = [], []
    save, wait = Checkpoints.save, jax.block_until_ready

    def spy_on_save(self, step, *args, **options):
        saved.append((step, options["accuracy"] is not None))
        return save(self, step, *args, **options)

    monkeypatch.setattr(Checkpoints, "save", spy_on_save)
    monkeypatch.setattr(loop, "_CHECKPOINT_STEPS", 3)
    monkeypatch.setattr(loop, "_AHEAD", 2)
    monkeypatch.setattr(loop.jax, "block_until_ready", lambda x: (waited.append(x), wait(x))[1])
    config = dataclasses.replace(TINY, steps=8, validate_every=8, log_every=100)
    train(config, tmp_path / "run", folders)
    assert saved == [(3, False), (6, False), (8, True)]
    assert len(waited) == 8 - 2


COMMAND = [
    *(sys.executable, "-m", "experiments", "train", "icons", "--loss.name", "direct:sce+nca"),
    *("--steps", "20", "--validate-every", "2", "--validation-episodes", "20"),
    *("--sampling.batch-size", "16", "--model.widths", "4", "4", "4", "32"),
    *("--evaluation.episodes", "20", "--log-every", "1"),
]


def start(directory: Path, folders: Folders, cache: Path, *extra: str, **variables: str):
    return subprocess.Popen(
        [*COMMAND, "--directory", str(directory), "--data-dir", str(folders.data_dir), *extra],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": str(cache), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(directory: Path, step: int, process: subprocess.Popen) -> None:
    log, deadline = directory / "metrics.jsonl", time.monotonic() + 240
    while time.monotonic() < deadline:
        if log.exists() and log.read_text().count('"loss"') >= step:
            return
        if process.poll() is not None:
            break
        time.sleep(0.02)
    pytest.fail(f"no step {step}: {process.communicate()[0]}")


@pytest.mark.slow
def test_sigkill_and_sigterm_change_nothing(tmp_path, folders, compilation_cache):
    whole = start(tmp_path / "whole", folders, compilation_cache)
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, output

    for step, sign in ((5, signal.SIGKILL), (12, signal.SIGTERM)):
        process = start(tmp_path / "cut", folders, compilation_cache)
        wait_for_step(tmp_path / "cut", step, process)
        process.send_signal(sign)
        output, _ = process.communicate(timeout=120)
        if sign == signal.SIGTERM:
            assert process.returncode == 143, output
            assert "the same command goes on from there" in output
    last = start(tmp_path / "cut", folders, compilation_cache)
    output, _ = last.communicate(timeout=300)
    assert last.returncode == 0, output

    config = from_dict(FewShotConfig, json.loads((tmp_path / "whole" / "config.json").read_text()))
    chex.assert_trees_all_equal(
        final_state(config, tmp_path / "cut"), final_state(config, tmp_path / "whole")
    )
    assert metrics_without_clock(tmp_path / "cut") == metrics_without_clock(tmp_path / "whole")


def start_two(directory: Path, folders: Folders, cache: Path, *extra: str):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [
        start(
            *(directory, folders, cache, "--distributed", "--loss.name", "nca", *extra),
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(rank),
        )
        for rank in (0, 1)
    ]


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_stops_and_saves_both(tmp_path, folders, compilation_cache):
    options = ("--steps", "100000", "--validate-every", "100000")
    processes = start_two(tmp_path / "two", folders, compilation_cache, *options)
    try:
        wait_for_step(tmp_path / "two", 5, processes[0])
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [143, 143], outputs
    (step,) = re.findall(r"stopped at step (\d+) of 100000, which is saved", outputs[0])
    with Checkpoints(tmp_path / "two" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [int(step)]


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, folders, compilation_cache):
    processes = start_two(tmp_path / "two", folders, compilation_cache, "--steps", "2")
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    # Only the first one talks and writes.
    assert "| 1 |" in outputs[0]
    assert "| 1 |" not in outputs[1]
    assert len(list((tmp_path / "two").glob("events.out.tfevents.*"))) == 1

    config = from_dict(FewShotConfig, json.loads((tmp_path / "two" / "config.json").read_text()))
    assert jax.device_count() == 4
    train(config, tmp_path / "one", folders)
    one, two = (metrics_without_clock(tmp_path / name) for name in ("one", "two"))
    chex.assert_trees_all_close(two, one, rtol=1e-4)
    chex.assert_trees_all_close(
        final_state(config, tmp_path / "two"), final_state(config, tmp_path / "one"), atol=1e-4
    )


def test_processes_that_cannot_be_joined_are_told_what_they_need(monkeypatch, capsys):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "icons", "--distributed"]) == 2
    assert "JAX_COORDINATOR_ADDRESS" in capsys.readouterr().err


def test_another_configuration_is_refused_and_nothing_is_overwritten(grid, folders, capsys):
    cell = grid.directory / "sce" / "random" / "seed-0"
    before = {path: path.read_bytes() for path in cell.rglob("*") if path.is_file()}
    common = ["train", "icons", *SMALL, *grid.command[-2:], "--directory", str(cell)]
    assert main([*common, "--loss.name", "sce", "--optimizer.learning-rate", "0.05"]) == 2
    assert "optimizer.learning_rate: 0.1 -> 0.05" in capsys.readouterr().err
    config = dataclasses.replace(from_dict(FewShotConfig, read_config(cell)), seed=1)
    with pytest.raises(ConfigMismatchError, match="seed"):
        train(config, cell, folders)
    assert before == {path: path.read_bytes() for path in cell.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingConfig(strategy="64x64")}, "64x64"),
        ({"sampling": SamplingConfig(strategy="32by4")}, "sampling.strategy"),
        ({"sampling": SamplingConfig(batch_size=6)}, "does not spread evenly"),
        ({"data": DataConfig(mean=(0.1, 0.2, 0.3))}, "data.mean"),
        ({"data": DataConfig(name="faces")}, "no data set 'faces'"),
        ({"model": ModelConfig(widths=(4, 4, 4))}, "model.widths"),
        ({"optimizer": OptimizerConfig(warmup_steps=4)}, "warmup_steps"),
        ({"evaluation": EvaluationConfig(shots=(1, 5000))}, "novel classes of icons cannot"),
        ({"evaluation": EvaluationConfig(ways=30, shots=(1,))}, "validation classes of icons"),
        ({"loss": LossConfig(name="direct:sce+nca")}, r"spectral:sce\+nca"),
        ({"log_every": 0}, "log_every must be at least 1, got 0"),
    ],
)
def test_what_cannot_end_well_leaves_no_directory(tmp_path, folders, changes, message):
    config = dataclasses.replace(
        TINY, loss=LossConfig(name="sce"), model=ModelConfig(widths=(4, 4, 4, 16))
    )
    with pytest.raises(ConfigError, match=message):
        train(dataclasses.replace(config, **changes), tmp_path / "run", folders)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("preset", "section", "changes", "message"),
    [
        ("coco", "", {}, "give its model.weights"),
        ("coco", "data", {"classes": 5}, r"has no data\.classes"),
        ("coco", "sampling", {"strategy": "4x4"}, "needs one class an image"),
        ("mini-imagenet", "data", {"mixup": 1.0}, "compares samples with each other"),
        ("mini-imagenet", "data", {"samples_per_class": 5}, r"has no data\.samples_per_class"),
        ("mini-imagenet", "data", {"imbalance": 0.1}, r"has no data\.imbalance"),
        ("caltech256-groups", "loss", {"num_groups": 4096}, "at most the 2048 features"),
        ("caltech256-groups", "data", {"imbalance": 2.0}, "imbalance must be above 0 and at most"),
    ],
)
def test_options_are_checked_before_data_is_prepared(tmp_path, preset, section, changes, message):
    config = PRESETS[preset].config
    if section:
        changed = dataclasses.replace(getattr(config, section), **changes)
        config = dataclasses.replace(config, **{section: changed})
    # There is no data: to prepare it would fail with another error.
    with pytest.raises(ConfigError, match=message):
        check_run(config, Folders(data_dir=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("steps", 0), ("steps", -3), ("log_every", 0), ("validate_every", 0), ("seed", -1)],
        *[("seed", 2**32), ("validation_episodes", 0), ("sampling.batch_size", 0)],
        *[("model.widths", (4, 0, 4, 4)), ("model.drop_block", 1.0), ("data.pad", -1)],
        *[("data.std", (0.0,)), ("data.mean", (float("nan"),)), ("evaluation.ways", 1)],
        *[("evaluation.queries", 0), ("evaluation.episodes", 1), ("evaluation.shots", (1, 0))],
        *[("optimizer.learning_rate", 0.0), ("optimizer.learning_rate", float("inf"))],
        *[("optimizer.warmup_steps", -1), ("loss.temperature", 0.0), ("loss.power", -0.1)],
    ],
)
def test_numbers_out_of_bounds_are_named(option, value):
    section, _, name = option.rpartition(".")
    changed = {name: value}
    if section:
        changed = {section: dataclasses.replace(getattr(TINY, section), **changed)}
    check_config(TINY)
    number = next((x for x in value if x not in (1, 4)), None) if type(value) is tuple else value
    with pytest.raises(ConfigError, match=rf"^{option} must be .*, got {number}$"):
        check_config(dataclasses.replace(TINY, **changed))


def test_an_empty_list_is_refused_where_one_value_is_needed():
    with pytest.raises(ConfigError, match=r"evaluation.shots needs at least one value"):
        check_config(dataclasses.replace(TINY, evaluation=EvaluationConfig(shots=())))


SMALL = [
    *("--steps", "2", "--validation-episodes", "20", "--evaluation.episodes", "20"),
    *("--model.widths", "4", "4", "4", "32", "--sampling.batch-size", "16"),
]


class Grid(NamedTuple):
    directory: Path
    command: list[str]
    status: int
    output: str


@pytest.fixture(scope="module")
def grid(tmp_path_factory, folders) -> Grid:
    """A grid of the command line, with a cell that diverges before the others."""
    directory = tmp_path_factory.mktemp("grid")
    command = ["compare", "icons", *SMALL, "--directory", str(directory)]
    command += ["--data-dir", str(folders.data_dir)]
    real = few_shot.build_loss

    def failing(config, **more):
        loss = real(config, **more)
        return (lambda *batch: jnp.nan * loss(*batch)) if config.name == "nca" else loss

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(few_shot, "build_loss", failing)
        status = main([*command, "--losses", "nca", "sce", "--sampling", "random", "8x2"])
    return Grid(directory, command, status, output.getvalue())


def test_compare_writes_its_cells_and_their_table(grid):
    for name in ("table.md", "table.json", "figure.png"):
        assert (grid.directory / name).stat().st_size > 0
    for name in ("config.json", "metrics.jsonl", "report.json", "report.md", "checkpoints"):
        assert (grid.directory / "sce" / "8x2" / "seed-0" / name).exists(), name
    assert "8-way 2-shot" in grid.output
    assert "| SCE |" in grid.output


def test_a_cell_that_diverges_does_not_stop_the_others(grid):
    assert grid.status == 1
    assert "| NCA | diverged | diverged |" in grid.output
    assert "2 of 4 cells diverged (delete" in grid.output
    cell = grid.directory / "nca" / "random" / "seed-0"
    report = json.loads((cell / "report.json").read_text())
    assert report["diverged"] == "diverged: loss is nan at step 2"
    assert report["diverged"] in (cell / "report.md").read_text()
    assert report["results"] == []
    assert np.isnan(read_metrics(cell / "metrics.jsonl")[-1]["loss"])


def test_a_second_command_trains_only_what_is_missing(grid, capsys, caplog):
    (grid.directory / "bce" / "8x2" / "seed-0").mkdir(parents=True)
    (grid.directory / "bce" / "8x2" / "seed-0" / "report.json").write_text("{}")
    torn = grid.directory / "sce" / "8x2" / "seed-0" / "report.json"
    whole = json.loads(torn.read_text())
    torn.write_text('{"loss": "sce", "sam')
    kept = grid.directory / "sce" / "random" / "seed-0" / "report.json"
    stamp = kept.stat().st_mtime_ns
    assert main([*grid.command, "--losses", "sce"]) == 0
    assert "| SCE | – |" in capsys.readouterr().out
    assert "sce/8x2/seed-0/report.json cannot be read" in caplog.text
    assert "bce/8x2/seed-0 is left out" in caplog.text
    assert kept.stat().st_mtime_ns == stamp
    # What is torn is evaluated anew, from the checkpoint that is there.
    assert main([*grid.command, "--losses", "sce", "--sampling", "8x2"]) == 0
    again = json.loads(torn.read_text())
    assert again["results"] == whole["results"]
    assert again["seconds"] == pytest.approx(whole["seconds"], abs=2)
    # The table tells the commands that gave its cells, not the last one alone.
    told = json.loads((grid.directory / "table.json").read_text())["commands"]
    assert sorted(told) == sorted([whole["command"], again["command"]])
    assert whole["command"].endswith("--losses nca sce --sampling random 8x2")
    assert again["command"].endswith("--losses sce --sampling 8x2")


def test_evaluate_takes_its_settings_from_the_checkpoint(grid, folders, tmp_path, capsys):
    cell = grid.directory / "sce" / "random" / "seed-0"
    run = tmp_path / "run"
    shutil.copytree(cell / "checkpoints", run / "checkpoints")
    expected = json.loads((cell / "report.json").read_text())["results"]
    data = ["--data-dir", str(folders.data_dir)]
    name = "evaluation-novel-step2-5way-1+5shot-15queries-20episodes-seed0-euclidean.json"
    for directory in (run, run / "checkpoints"):
        assert main(["evaluate", str(directory), *data]) == 0
        assert json.loads((run / name).read_text())["results"] == expected
        (run / name).unlink()
    assert "5-way, 15 queries" in capsys.readouterr().out

    other = ["--ways", "3", "--shots", "2", "--distance", "cosine", "--seed", "1"]
    assert main(["evaluate", str(run), *data, *other]) == 0
    assert "3-way, 15 queries" in capsys.readouterr().out
    assert main(["evaluate", str(run), *data]) == 0
    assert sorted(path.name for path in run.glob("*.json")) == [
        "evaluation-novel-step2-3way-2shot-15queries-20episodes-seed1-cosine.json",
        name,
    ]
    for wrong, message in ((("--ways", "500"), "500"), (("--episodes", "1"), "episodes must be")):
        assert main(["evaluate", str(run), *data, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "nothing")]) == 2
    assert main(["evaluate", str(run), "--checkpoint", "worst"]) == 2


def test_evaluate_can_override_every_evaluation_setting():
    options = {field.name for field in dataclasses.fields(Evaluate)}
    assert {field.name for field in dataclasses.fields(EvaluationConfig)} <= options


def test_a_grid_is_checked_before_its_first_cell(tmp_path, folders, capsys):
    command = ["compare", "icons", "--data-dir", str(folders.data_dir), *SMALL]
    command += ["--directory", str(tmp_path / "grid"), "--model.widths", "4", "4", "4", "16"]
    assert main([*command, "--losses", "sce", "direct:bce+proto"]) == 2
    assert "spectral:bce+proto" in capsys.readouterr().err
    assert main([*command, "--losses", "sce", "--sampling", "random", "64x64"]) == 2
    assert main([*command, "--losses", "sce", "--evaluation.ways", "60"]) == 2
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (["--seed", "0"], "--seeds"),
        (["--loss.name=sce"], "--losses"),
        (["--sampling.strategy", "32x4"], "--sampling"),
    ],
)
def test_options_that_the_grid_sets_are_refused(tmp_path, capsys, given, instead):
    assert main(["compare", "icons", "--directory", str(tmp_path / "grid"), *given]) == 2
    assert re.search(rf"{given[0].partition('=')[0]} .*give {instead}$", capsys.readouterr().err)
    assert not (tmp_path / "grid").exists()


def test_only_the_projects_own_errors_become_messages(monkeypatch):
    def broken(self, command):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(Datasets, "run", broken)
    with pytest.raises(ValueError, match="a mistake of ours"):
        main(["datasets"])


def test_datasets_lists_every_preset(folders, capsys):
    assert main(["datasets", "--data-dir", str(folders.data_dir)]) == 0
    listed = capsys.readouterr().out
    for preset in PRESETS.values():
        assert preset.config.data.name in listed


@pytest.mark.parametrize("name", ["sce+", "nca+sce", "direct:sce", "sum", "direct:sce+nca+proto"])
def test_an_unknown_loss_is_named(name):
    with pytest.raises(ValueError, match="is not known"):
        parse_loss(name)


def test_configuration_survives_json():
    for preset in PRESETS.values():
        as_json = json.loads(json.dumps(run_to_dict(preset.config)))
        assert run_from_dict(as_json) == preset.config
    broken = to_dict(TINY) | {"stepz": 3}
    with pytest.raises(ValueError, match="stepz"):
        from_dict(FewShotConfig, broken)


def test_bfloat16_trains():
    config = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, dtype="bfloat16"))
    state, metrics = run_steps(config, "jit", 2)
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state.params))
    exact = run_steps(TINY, "jit", 2)[1]
    assert metrics["loss"] != exact["loss"]
    assert metrics["loss"] == pytest.approx(exact["loss"], rel=0.05)


def test_data_config_reaches_the_step():
    plain = dataclasses.replace(TINY, data=DataConfig(pad=0, flip=False))
    assert run_steps(plain, "jit", 1)[1]["loss"] != run_steps(TINY, "jit", 1)[1]["loss"]


def test_a_second_process_in_a_runs_directory_is_refused(folders, tmp_path):
    """It would take unfinished checkpoints for leftovers, and replace the first one's metrics."""
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); "
        "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process is training"):
            train(TINY, tmp_path, folders)
        other.kill()
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("option", ["--losses", "--sampling", "--seeds"])
def test_an_empty_grid_is_refused(option, capsys):
    assert main(["compare", "icons", option]) == 2
    assert option in capsys.readouterr().err


def test_a_directory_that_is_a_file_is_told_in_a_sentence(folders, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    given = ["--directory", str(tmp_path / "file" / "run"), "--data-dir", str(folders.data_dir)]
    assert main(["train", "icons", *given]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'file'}")


def test_a_set_without_held_out_classes_is_refused_in_a_sentence(folders, tmp_path, capsys):
    given = ["--data.name", "cifar10", "--directory", str(tmp_path / "run")]
    assert main(["train", "icons", *given]) == 2
    assert "cifar10 holds no classes out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
