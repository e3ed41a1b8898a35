"""The training frame: the step on one device and on many, resuming, refusing, the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from experiments.__main__ import main
from experiments.config import (
    DataConfig,
    EvaluationConfig,
    Folders,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
    from_dict,
    to_dict,
)
from experiments.presets import PRESETS
from experiments.training import parallel
from experiments.training.checkpoints import Checkpoints, ConfigMismatchError
from experiments.training.loop import ParallelMode, train
from experiments.training.objective import build_objective, parse_loss
from experiments.training.state import build_optimizer, initial_setup, learning_rate
from experiments.training.step import Batch, build_step

TINY = TrainConfig(
    sampling=SamplingConfig(batch_size=16),
    model=ModelConfig(widths=(4, 4, 4, 32)),
    evaluation=EvaluationConfig(episodes=50),
    steps=6,
    validate_every=2,
    validation_episodes=20,
    log_every=1,
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Folders:
    return Folders(data_dir=tmp_path_factory.mktemp("data"))


def run_steps(config: TrainConfig, mode: ParallelMode, num_steps: int = 3):
    axis_name = parallel.axis_name(mode)
    setup = initial_setup(config, image_shape=(16, 16, 1), num_classes=5, axis_name=axis_name)
    objective = build_objective(
        config.loss, num_features=setup.num_features, num_classes=5, axis_name=axis_name
    )
    step = build_step(
        setup.graphdef,
        objective,
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


@pytest.mark.parametrize("loss", ["direct:sce+nca", "spectral:bce+proto"])
def test_pmap_and_sharded_jit_give_the_same_numbers(loss):
    config = dataclasses.replace(
        TINY,
        model=ModelConfig(backbone="resnet12", widths=(4, 4, 8, 8), pooling="mean", drop_block=0.2),
        loss=LossConfig(name=loss),
    )
    assert jax.device_count() == 4
    chex.assert_trees_all_close(
        run_steps(config, "pmap"), run_steps(config, "jit"), rtol=2e-4, atol=2e-5
    )


def test_a_batch_that_does_not_spread_evenly_is_refused():
    with pytest.raises(ValueError, match="batch of 6 does not spread evenly over 4 devices"):
        parallel.check_batch_size(6)


def final_state(config: TrainConfig, directory: Path):
    setup = initial_setup(config, image_shape=(32, 32, 1), num_classes=100)
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(setup.state, checkpoints.latest_step())
    return jax.device_get(restored.state)


def metrics_without_clock(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


@pytest.mark.parametrize("strategy", ["random", "4x4"])
def test_a_resumed_run_ends_bit_identical(tmp_path, folders, strategy, monkeypatch):
    config = dataclasses.replace(TINY, sampling=SamplingConfig(batch_size=16, strategy=strategy))
    train(config, tmp_path / "whole", folders)

    class Killed(Exception):
        pass

    # Dies after step 3, in the middle between two checkpoints.
    import experiments.training.loop as loop

    real, calls = loop.draw_batch, iter(range(10**6))

    def dying(*args, **kwargs):
        if next(calls) == 4:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "draw_batch", dying)
    with pytest.raises(Killed):
        train(config, tmp_path / "cut", folders)
    monkeypatch.setattr(loop, "draw_batch", real)
    train(config, tmp_path / "cut", folders)

    chex.assert_trees_all_equal(
        final_state(config, tmp_path / "cut"), final_state(config, tmp_path / "whole")
    )
    assert metrics_without_clock(tmp_path / "cut") == metrics_without_clock(tmp_path / "whole")


COMMAND = [
    *(sys.executable, "-m", "experiments", "train", "icons", "--loss.name", "direct:sce+nca"),
    *("--steps", "40", "--validate-every", "2", "--validation-episodes", "20"),
    *("--sampling.batch-size", "16", "--model.widths", "4", "4", "4", "32"),
    *("--evaluation.episodes", "20", "--log-every", "1"),
]


def start(directory: Path, folders: Folders, *extra: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, "--directory", str(directory), "--data-dir", str(folders.data_dir), *extra],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
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
def test_sigkill_and_sigterm_at_any_moment_change_nothing(tmp_path, folders):
    whole = start(tmp_path / "whole", folders)
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, output

    for step, sign in ((5, signal.SIGKILL), (12, signal.SIGTERM), (20, signal.SIGKILL)):
        process = start(tmp_path / "cut", folders)
        wait_for_step(tmp_path / "cut", step, process)
        process.send_signal(sign)
        output, _ = process.communicate(timeout=120)
        if sign == signal.SIGTERM:
            assert process.returncode == 143, output
            assert "the same command goes on from there" in output
    last = start(tmp_path / "cut", folders)
    output, _ = last.communicate(timeout=300)
    assert last.returncode == 0, output

    config = from_dict(TrainConfig, json.loads((tmp_path / "whole" / "config.json").read_text()))
    chex.assert_trees_all_equal(
        final_state(config, tmp_path / "cut"), final_state(config, tmp_path / "whole")
    )
    assert metrics_without_clock(tmp_path / "cut") == metrics_without_clock(tmp_path / "whole")

    other = start(tmp_path / "cut", folders, "--optimizer.learning-rate", "0.05")
    output, _ = other.communicate(timeout=120)
    assert other.returncode == 2
    assert "optimizer.learning_rate" in output
    assert "0.05" in output


def test_another_configuration_is_refused_and_nothing_is_overwritten(tmp_path, folders):
    train(dataclasses.replace(TINY, steps=2), tmp_path / "run", folders)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigMismatchError, match="seed"):
        train(dataclasses.replace(TINY, steps=2, seed=1), tmp_path / "run", folders)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert before == after


def test_a_sampling_that_the_data_cannot_give_leaves_no_directory(tmp_path, folders):
    config = dataclasses.replace(TINY, sampling=SamplingConfig(strategy="64x64"))
    with pytest.raises(ValueError, match="64"):
        train(config, tmp_path / "run", folders)
    assert not (tmp_path / "run").exists()


def test_train_evaluate_and_compare_from_the_command_line(tmp_path, folders, capsys):
    common = ["--data-dir", str(folders.data_dir), "--steps", "2", "--validation-episodes", "20"]
    common += ["--model.widths", "4", "4", "4", "32", "--sampling.batch-size", "16"]
    common += ["--evaluation.episodes", "20"]
    grid = ["compare", "icons", "--losses", "sce", "direct:sce+nca", "--sampling", "random", "8x2"]
    assert main([*grid, "--directory", str(tmp_path / "grid"), *common]) == 0
    first = capsys.readouterr().out
    assert "SCE⊕NCA" in first
    assert "8x2" in first
    for name in ("table.md", "table.json", "figure.png"):
        assert (tmp_path / "grid" / name).stat().st_size > 0
    cell = tmp_path / "grid" / "direct-sce+nca" / "8x2" / "seed-0"
    for name in ("config.json", "metrics.jsonl", "report.json", "report.md", "checkpoints"):
        assert (cell / name).exists(), name

    # A second time nothing is trained: the checkpoints stay as they are.
    stamp = (cell / "report.json").stat().st_mtime_ns
    assert main([*grid, "--directory", str(tmp_path / "grid"), *common]) == 0
    assert (cell / "report.json").stat().st_mtime_ns == stamp

    capsys.readouterr()
    evaluate = ["evaluate", str(cell), "--data-dir", str(folders.data_dir), "--episodes", "20"]
    assert main(evaluate) == 0
    again = json.loads((cell / "evaluation-novel-step2.json").read_text())
    assert again["results"] == json.loads((cell / "report.json").read_text())["results"]
    assert main([*evaluate, "--ways", "3", "--shots", "2", "--distance", "cosine"]) == 0
    assert "3-way" in capsys.readouterr().out
    assert main([*evaluate, "--ways", "500"]) == 2
    assert "500" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "nothing")]) == 2


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
        as_json = json.loads(json.dumps(to_dict(preset.config)))
        assert from_dict(TrainConfig, as_json) == preset.config
    broken = to_dict(TINY) | {"stepz": 3}
    with pytest.raises(ValueError, match="stepz"):
        from_dict(TrainConfig, broken)


def test_weight_decay_spares_biases_and_normalisation():
    config = OptimizerConfig(learning_rate=1.0, momentum=0.0, nesterov=False, weight_decay=0.1)
    optimizer = build_optimizer(config, 10)
    params = {"kernel": np.ones((2, 3), np.float32), "scale": np.ones(3, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    chex.assert_trees_all_close(
        updates, {"kernel": np.full((2, 3), -0.1, np.float32), "scale": np.zeros(3, np.float32)}
    )


def test_schedules():
    cosine = learning_rate(OptimizerConfig(learning_rate=0.4, warmup_steps=4), 12)
    rates = np.array([float(cosine(step)) for step in (0, 2, 4, 8, 12)])  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(rates, [0, 0.2, 0.4, 0.2, 0], atol=1e-7)
    config = OptimizerConfig(learning_rate=1.0, schedule="step", decay_steps=(3, 6), warmup_steps=2)
    by_steps = learning_rate(config, 9)
    rates = np.array([float(by_steps(step)) for step in (1, 2, 3, 5, 6)])  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(rates, [0.5, 1, 0.1, 0.1, 0.01], rtol=1e-5)
    with pytest.raises(ValueError, match="warmup_steps"):
        learning_rate(OptimizerConfig(warmup_steps=9), 9)


def test_bfloat16_trains(tmp_path, folders):
    config = dataclasses.replace(
        TINY, steps=2, model=dataclasses.replace(TINY.model, dtype="bfloat16")
    )
    train(config, tmp_path, folders)
    assert all(np.isfinite(line.get("loss", 0)) for line in metrics_without_clock(tmp_path))


def test_data_config_reaches_the_step():
    plain = dataclasses.replace(TINY, data=DataConfig(pad=0, flip=False))
    assert run_steps(plain, "jit", 1)[1]["loss"] != run_steps(TINY, "jit", 1)[1]["loss"]
