"""The training loop: resuming, signals, checkpoints between validations."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, create_autospec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.cli.main import main
from experiments.core.config import Folders, TrainConfig
from experiments.core.processes import Interrupted
from experiments.data import pipeline
from experiments.data.pipeline import RecordImages, load_split
from experiments.datasets.archives import DamagedArchiveError
from experiments.papers import config_to_dict
from experiments.run import plan_run, train_run
from experiments.training import loop
from experiments.training.checkpoints import CheckpointError, Checkpoints
from experiments.training.loop import read_batches
from experiments.training.parallel import data_parallel
from experiments.training.run_directory import MetricsLog
from experiments.training.step import Batch, TrainState
from tests.experiments.several_processes import finish, start, wait_for_step
from tests.experiments.tiny_runs import (
    TINY,
    TINY_OPTIONS,
    assert_equal_runs,
    metrics_without_clock,
    saved_steps,
)


def train(config: TrainConfig, directory: Path, folders: Folders) -> float:
    return train_run(plan_run(config), directory, folders)


SCE = replace(TINY, loss=replace(TINY.loss, name="sce"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, folders) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run"
    train(SCE, directory, folders)
    return directory


def test_a_resumed_run_ends_bit_identical(tmp_path, folders, whole, killed_after):
    killed_after(3, lambda: train(SCE, tmp_path, folders))
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        before = checkpoints.read(2).meta["seconds"]
    started = time.monotonic()
    seconds = train(SCE, tmp_path, folders)
    assert 0 < before < seconds <= before + time.monotonic() - started
    # A finished run takes no more time, however often its command is repeated.
    assert train(SCE, tmp_path, folders) == seconds
    assert_equal_runs(tmp_path, whole)


@pytest.mark.usefixtures("small_network")
def test_a_run_that_goes_on_with_more_steps_equals_one_of_all_steps(tmp_path, folders):
    config = replace(SCE, optimizer=replace(SCE.optimizer, schedule="constant"))
    for run, steps in (("longer", 4), ("longer", 6), ("whole", 6)):
        train(replace(config, steps=steps), tmp_path / run, folders)
    assert_equal_runs(tmp_path / "longer", tmp_path / "whole")


def test_a_run_without_an_intact_checkpoint_does_not_start_over_in_silence(
    tmp_path, folders, whole
):
    run = shutil.copytree(whole, tmp_path / "run")
    for step in ("2", "4"):
        (run / "checkpoints" / step / "header" / "metadata").write_text("{")
    for message in ("no intact checkpoint", r"damaged checkpoints only \(damaged-2, damaged-4\)"):
        with pytest.raises(CheckpointError, match=message):
            train(SCE, run, folders)


def test_everything_happens_at_its_step_and_every_part_of_the_state_is_resumed(tmp_path):
    """Steps count in all parts; the objective state adds up the batches, and 1000 an epoch."""

    def step(state, batch):
        total = jnp.sum(batch.labels)
        params, statistics, opt_state = jax.tree.map(lambda leaf: leaf + 1, state[1:4])
        state = TrainState(
            state.step + 1, params, statistics, opt_state, state.objective_state + total
        )
        return state, {"loss": total}

    def read(step):
        if step == last:
            raise InterruptedError
        return Batch(np.zeros(4, np.int32), np.full(4, step))

    zero, last = jnp.zeros((), jnp.int32), 5
    initial = TrainState(zero, {"backbone": zero}, zero, zero, zero)
    config = replace(SCE, steps=7, validate_every=3, log_every=2)
    parts = loop.Parts(
        initial,
        data_parallel("jit", step),
        read,
        ahead=False,
        images_per_step=4,
        steps_per_epoch=2,
        after_epoch=lambda state: (state + 1000, {"before": state}),
        validate=lambda state: (-int(state.step), {"sum": int(state.objective_state)}),
        meta={"config": config_to_dict(config)},
    )
    with pytest.raises(InterruptedError):
        loop.train(parts, tmp_path, config, name="")
    last = -1
    loop.train(parts, tmp_path, config, name="")
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        kept = {step: checkpoints.read(step).fill(initial) for step in checkpoints.steps()}
    # The best validation is the first.
    expected = {3: 1012, 6: 3060, 7: 3084}
    assert kept == {n: (n, {"backbone": n}, n, n, total) for n, total in expected.items()}
    assert metrics_without_clock(tmp_path) == [
        {"step": 2, "before": 4},
        {"step": 2, "loss": 4},
        {"step": 3, "validation": -3, "sum": 1012},
        {"step": 4, "before": 1024},
        {"step": 4, "loss": 12},
        {"step": 6, "before": 2060},
        {"step": 6, "loss": 20},
        {"step": 6, "validation": -6, "sum": 3060},
        {"step": 7, "loss": 24},
        {"step": 7, "validation": -7, "sum": 3084},
    ]


@pytest.mark.long
def test_a_set_beyond_memory_trains_to_the_same_bits(tmp_path, folders, whole, monkeypatch):
    monkeypatch.setattr(pipeline, "_MEMORY_LIMIT", 0)
    assert isinstance(load_split("icons", "base", **vars(folders)).images, RecordImages)
    train(SCE, tmp_path, folders)
    assert_equal_runs(tmp_path, whole)


@pytest.fixture
def signalled(monkeypatch):
    """Makes the metrics file raise signals in this process when it receives the loss of a step."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may ignore it.
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


@pytest.mark.usefixtures("small_network")
@pytest.mark.parametrize(
    ("at", "stopped_at", "words"), [(2, 3, "3 of 4, which .* continue"), (4, 4, "to evaluate it")]
)
def test_a_signal_is_handled_after_the_next_step_and_before_the_evaluation(
    tmp_path, folders, signalled, at, stopped_at, words
):
    before = signal.getsignal(signal.SIGTERM)
    signalled(at, signal.SIGTERM)
    with pytest.raises(Interrupted, match=words) as stopped:
        train(SCE, tmp_path / "run", folders)
    assert stopped.value.signal_number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert saved_steps(tmp_path / "run")[-1] == stopped_at


@pytest.mark.usefixtures("small_network")
def test_a_second_interrupt_stops_at_once(tmp_path, folders, signalled, capfd):
    signalled(3, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(SCE, tmp_path / "run", folders)
    assert "press Ctrl-C again to stop at once" in capfd.readouterr().err


@pytest.mark.usefixtures("small_network")
def test_checkpoints_are_written_between_validations_and_dispatched_steps_are_limited(
    tmp_path, folders, monkeypatch
):
    save = create_autospec(Checkpoints.save, side_effect=Checkpoints.save)
    wait = Mock(wraps=jax.block_until_ready)
    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr(loop, "_CHECKPOINT_STEPS", 3)
    monkeypatch.setattr(loop, "_MAX_IN_FLIGHT", 2)
    monkeypatch.setattr(loop.jax, "block_until_ready", wait)
    train(replace(SCE, steps=8, validate_every=5, log_every=100), tmp_path / "run", folders)
    saved = [(call.args[1], call.kwargs["validation"] is not None) for call in save.mock_calls]
    # The last step is validated, too.
    assert saved == [(3, False), (5, True), (6, False), (8, True)]
    assert wait.call_count == 1 + 8 - 2  # The first step is awaited: it compiles.


@pytest.mark.long
def test_sigkill_and_sigterm_change_nothing(
    tmp_path, folders, compilation_cache, signalled, capsys
):
    command = ["train", "icons", *TINY_OPTIONS, "--loss.name", "sce", "--log-every", "1"]
    command += ["--steps", "16", "--validate-every", "4", "--data-dir", str(folders.data_dir)]
    whole, cut = ([*command, "--directory", str(tmp_path / name)] for name in ("whole", "cut"))
    assert main(whole) == 0
    with start([["-m", "experiments", *cut]], compilation_cache, devices=4) as (process,):
        wait_for_step(tmp_path / "cut", 5, process)
        process.kill()
        finish([process], -signal.SIGKILL)
    signalled(13, signal.SIGTERM)
    assert main(cut) == 128 + signal.SIGTERM
    assert "run the same command to continue" in capsys.readouterr().err
    assert main(cut) == 0
    assert_equal_runs(tmp_path / "cut", tmp_path / "whole")


def test_batches_are_read_ahead_and_tell_of_damage_in_their_turn():
    read = threading.Event()

    def damaged_from_five(step):
        if step == 5:
            read.set()
            raise DamagedArchiveError("step 5")
        return step

    found = read_batches(damaged_from_five, 3, 9, ahead=True)
    assert next(found) == 3
    assert read.wait(60)
    assert next(found) == 4
    with pytest.raises(DamagedArchiveError, match="step 5"):
        next(found)
