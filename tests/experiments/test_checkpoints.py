"""Checkpoints: nothing is lost, nothing is restored wrong, whatever happens to the files."""

import errno
import gc
import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from orbax.checkpoint import checkpoint_managers as managers

from experiments.training.checkpoints import (
    CheckpointError,
    Checkpoints,
    DamagedCheckpointError,
    Restored,
)
from tests.experiments.tiny_runs import files_below

# Orbax closes its event loop while other reads are under way when one meets a torn file.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Pair(NamedTuple):
    kernel: np.ndarray
    bias: np.ndarray


def small_state(step: int) -> dict:
    rng = np.random.default_rng(step)
    return {"w": rng.normal(size=(7, 3)).astype(np.float32), "step": np.int32(step)}


def assert_same(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = (map(np.asarray, jax.tree.leaves(tree)) for tree in (actual, expected))
    for got, want in zip(*leaves, strict=True):
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())


def large_state(step: int) -> dict:
    """With an array that Orbax writes to a file of its own."""
    kernel = np.random.default_rng(step).normal(size=(64, 50))
    return small_state(step) | {"kernel": kernel}


def newest(checkpoints: Checkpoints, target) -> Restored:
    return checkpoints.read_intact(lambda step: checkpoints.restore(target, step))[0]


def best_step(checkpoints: Checkpoints) -> int:
    return checkpoints.read_intact(lambda step: (checkpoints.meta(step), step)[1], best=True)[0]


def fill(directory: Path, validations: Mapping[int, float | None], state=small_state) -> None:
    with Checkpoints(directory) as checkpoints:
        for step, value in validations.items():
            checkpoints.save(step, state(step), meta={"step": step}, validation=value)


def test_every_kind_of_leaf_comes_back_bit_by_bit(tmp_path):
    params = {"dense": Pair(np.full((3, 4), 0.1, np.float32), np.zeros(4, np.float32))}
    optimizer = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9))
    state = {
        "params": params,
        "optimizer": optimizer.init(params),
        "half": jnp.asarray([1.5, -2.0, 3e38], jnp.bfloat16),
        "counts": np.array([2**40, -1], np.int64),
        "double": np.float64(np.pi),
        "nan": np.array([np.nan, -0.0, np.inf], np.float16),
        "mask": np.array([[True], [False]]),
        "empty": np.zeros((0, 3), np.float32),
        "odd/name.kernel %": [np.arange(3)[::-1], None],
        "seen": 12,
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, meta={}, validation=None)
        restored = newest(checkpoints, jax.tree.map(np.zeros_like, state))
        assert restored.step == 3
        assert_same(restored.state, state)
        assert restored.state["half"].dtype == ml_dtypes.bfloat16
        assert isinstance(restored.state["params"]["dense"], Pair)
        # Containers may change between two versions of a program; the names are what counts.
        state["params"] = {"dense": params["dense"]._asdict()}
        assert_same(newest(checkpoints, state).state, state)


def test_the_state_is_copied_before_save_returns(tmp_path):
    state = {"w": np.ones((512, 512), np.float32)}
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    on_device = jnp.ones((512, 512))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {**state, "d": on_device}, meta={})
        state["w"][:] = 7
        jax.block_until_ready(donated(on_device))
        restored = checkpoints.restore({**state, "d": np.zeros((512, 512), np.float32)}, 1).state
    np.testing.assert_array_equal(restored["w"], 1)
    np.testing.assert_array_equal(restored["d"], 1)


@pytest.mark.parametrize("values", [[0.5, 0.1, 0.5, 0.4, 0.4], [0.5, 0.1, 0.5, 0.5]])
def test_of_equal_validations_the_latest_is_best_as_for_orbax(tmp_path, values):
    infos = [SimpleNamespace(metrics=value, step=step) for step, value in enumerate(values)]
    policy = managers.BestN(get_metric_fn=lambda value: value, n=1)  # pyright: ignore
    best = [*policy.should_preserve(infos, context=None)].index(True)  # pyright: ignore
    fill(tmp_path, dict(enumerate(values)))
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert best_step(checkpoints) == best
        assert checkpoints.steps() == [*range(2, len(values))][-3:]


@pytest.mark.parametrize(
    ("validations", "kept", "best"),
    [
        ({1: 0.9, 2: 0.3, 3: 0.5, 4: 0.4}, [1, 3, 4], 1),
        ({1: 0.1, 2: 0.3, 3: 0.4}, [2, 3], 3),
        ({1: 0.3, 2: 0.5, 3: 0.5, 4: 0.1, 5: 0.1}, [3, 4, 5], 3),
        ({1: 0.2, 2: float("nan"), 3: None, 4: float("inf")}, [1, 3, 4], 1),
        ({1: None, 2: None, 3: float("nan")}, [2, 3], None),
        ({1: -5.0, 2: None, 3: None, 4: None}, [1, 3, 4], 1),
    ],
)
@pytest.mark.parametrize("reopen", [False, True])
def test_newest_and_best_are_kept(tmp_path, validations, kept, best, reopen):
    if reopen:
        for step, value in validations.items():
            fill(tmp_path, {step: value})
    else:
        fill(tmp_path, validations)
    assert sorted(p.name for p in tmp_path.iterdir()) == [str(step) for step in kept]
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == kept
        assert best_step(checkpoints) == (kept[-1] if best is None else best)
        for step in kept:
            assert_same(checkpoints.restore(small_state(0), step).state, small_state(step))
            value = validations[step]
            ranked = value is not None and np.isfinite(value)
            assert checkpoints.validation(step) == (value if ranked else None)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"w": np.zeros((7, 3), np.float32)}, r"step: int32\[\] in the checkpoint, not expected"),
        ({**small_state(0), "b": np.zeros(2)}, r"b: not in the checkpoint, float64\[2\] expected"),
        ({**small_state(0), "w": np.zeros((3, 7), np.float32)}, r"w: float32\[7, 3\] .*\[3, 7\]"),
        ({**small_state(0), "w": np.zeros((7, 3), np.float64)}, "w: float32.*float64"),
        ({**small_state(0), "w": jnp.zeros((7, 3), jnp.bfloat16)}, "w: float32.*bfloat16"),
        ({**small_state(0), "step": np.zeros(1, np.int32)}, r"step: int32\[\] .*int32\[1\]"),
    ],
)
def test_another_structure_is_refused_and_not_called_damage(tmp_path, target, message):
    fill(tmp_path, {1: 0.1, 2: 0.2})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(target, 2)
        assert checkpoints.steps() == [1, 2]


def test_what_cannot_be_saved_says_so(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, small_state(5), meta={})
        for step in (5, 4):
            with pytest.raises(CheckpointError, match="holds step 5"):
                checkpoints.save(step, small_state(step), meta={})
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; it holds: 5"):
            checkpoints.restore(small_state(5), 7)
        assert checkpoints.steps() == [5]


def damage(path: Path, how: str) -> None:
    """Damages a file, or every file of a folder; a number flips a bit, 0 of the first byte."""
    for file in (path, *path.rglob("*")):
        content = file.read_bytes() if file.is_file() else b""
        if not content:
            continue
        if how == "missing":
            file.unlink()
        elif how == "torn":
            file.write_bytes(content[: len(content) // 2])
        elif how == "zeroed":
            file.write_bytes(bytes(len(content)))
        else:
            place = int(float(how) * (len(content) - 1))
            file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])


@pytest.mark.parametrize("how", ["missing", "torn", "zeroed", "0", "0.4", "0.8"])
def test_any_damaged_file_is_noticed_or_harmless(tmp_path, how, caplog):
    fill(tmp_path, {1: 0.1, 2: 0.2}, large_state)
    contents = files_below(tmp_path / "2")
    assert max(map(len, contents.values())) > 20_000
    fell_back = 0
    for path, content in contents.items():
        damage(path, how)
        caplog.clear()
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            restored = newest(checkpoints, large_state(0))
            # A damaged file that holds nothing of ours may go unnoticed; wrong values may not.
            assert_same(restored.state, large_state(restored.step))
            assert restored.meta == {"step": restored.step}
            if restored.step == 1:
                fell_back += 1
                assert f"checkpoint {tmp_path / '2'} is damaged" in caplog.text
                assert "using step 1 in place of step 2" in caplog.text
                with pytest.raises(DamagedCheckpointError, match="is damaged") as caught:
                    checkpoints.restore(large_state(0), 2)
                assert caught.value.step == 2
            else:  # asyncio may still report an earlier file's error.
                assert not [r for r in caplog.records if r.name.startswith("experiments")]
                assert checkpoints.meta(2) == {"step": 2}
        path.write_bytes(content)
    assert fell_back >= 4
    gc.collect()  # asyncio logs errors that Orbax awaits nowhere: here, not within another test.


@pytest.mark.parametrize("part", ["state", "header"])
def test_intact_checkpoints_take_the_place_of_damaged_ones(tmp_path, part, caplog):
    fill(tmp_path, {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.4})
    damage(tmp_path / "2" / part, "0.5")
    with Checkpoints(tmp_path) as checkpoints:
        read, damaged = checkpoints.read_intact(
            lambda step: checkpoints.restore(small_state(0), step), best=True
        )
        assert_same(read.state, small_state(3))
        assert [error.step for error in damaged] == [2]
    assert f"checkpoint {tmp_path / '2'} is damaged" in caplog.text
    assert "renamed to damaged-2" in caplog.text
    assert "using step 3 in place of step 2" in caplog.text
    # Training goes on from the newest one, and saves the step again.
    for name in ("damaged-4", "damaged-4-2"):
        damage(tmp_path / "4" / part, "torn")
        with Checkpoints(tmp_path) as checkpoints:
            assert newest(checkpoints, small_state(0)).step == 3
            assert checkpoints.steps() == [3]
            checkpoints.save(4, small_state(4), meta={}, validation=0.4)
            assert_same(newest(checkpoints, small_state(0)).state, small_state(4))
        assert (tmp_path / name).is_dir()


def test_a_damaged_header_does_not_take_the_place_of_the_best(tmp_path):
    fill(tmp_path, {1: 0.9, 2: 0.1, 3: 0.2})
    damage(tmp_path / "1" / "header" / "metadata", "torn")
    fill(tmp_path, {4: 0.8, 5: 0.3, 6: 0.4})
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [1, 4, 5, 6]
        assert best_step(checkpoints) == 4


def test_a_checkpoint_that_another_process_removes_is_no_damage(tmp_path, caplog):
    fill(tmp_path, {1: 0.1, 2: 0.2})
    with Checkpoints(tmp_path, read_only=True) as checkpoints:

        def read(step):
            if step == 2:
                shutil.rmtree(tmp_path / "2")
            return checkpoints.restore(small_state(0), step)

        restored, damaged = checkpoints.read_intact(read)
    assert restored.step == 1
    assert damaged == []
    assert "damaged" not in caplog.text


def test_a_disk_that_cannot_be_read_is_no_damage(tmp_path, monkeypatch):
    fill(tmp_path, {1: 0.1, 2: 0.2})
    read_bytes = Path.read_bytes

    def failing(path):
        if "state" in path.parts:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path)

    with Checkpoints(tmp_path) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        patch.setattr(checkpoints._manager, "restore", Mock(side_effect=Exception("of Orbax")))
        with pytest.raises(CheckpointError, match=r"cannot read .*Input/output") as caught:
            newest(checkpoints, small_state(0))
        assert not isinstance(caught.value, DamagedCheckpointError)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        assert newest(checkpoints, small_state(0)).step == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        # As TensorStore raises it.
        (
            ValueError("RESOURCE_EXHAUSTED: [...] No space left on device"),
            "No space left on device",
        ),
        (OSError("a broken cable"), "OSError: a broken cable"),
        (ValueError("a mistake"), "ValueError: a mistake"),
    ],
)
def test_a_save_that_fails_in_the_background_is_reported_once(
    tmp_path, monkeypatch, capfd, caplog, error, reason
):
    async def fail(*args, **kwargs):
        raise error

    def report(name):
        logging.getLogger("absl").error(name, exc_info=error)

    def leaf_that_fails_later():
        closed.wait(60)
        report("late")

    closed, late = threading.Event(), threading.Thread(target=leaf_that_fails_later)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small_state(1), meta={})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr("orbax.checkpoint.JsonCheckpointHandler._save_fn", fail)
            checkpoints.save(2, small_state(2), meta={})
            late.start()
            with pytest.raises(CheckpointError, match=rf"^cannot write .*/2: {reason}$"):
                checkpoints.wait()
    closed.set()
    late.join()
    assert capfd.readouterr().err == ""
    # Errors of other checkpoints are shown, whichever thread they are from.
    report("main")
    other = threading.Thread(target=report, args=("other",))
    other.start()
    other.join()
    assert [record.message for record in caplog.records if record.exc_info] == ["main", "other"]


def test_a_checkpoint_of_another_format_is_not_called_damaged(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("experiments.training.checkpoints._FORMAT", 1)
        fill(tmp_path, {1: 0.1})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="has format 1, and this version reads format 4"):
            newest(checkpoints, small_state(0))
        assert checkpoints.steps() == [1]


def test_reading_only_changes_nothing_and_writing_removes_what_a_kill_left(tmp_path):
    with pytest.raises(CheckpointError, match="there is no directory"):
        Checkpoints(tmp_path / "nowhere", read_only=True)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is no run: it holds nothing"):
        Checkpoints(tmp_path / "empty", read_only=True)
    run = tmp_path / "run"
    fill(run, {1: 0.1, 2: 0.2})
    for left in ("3.orbax-checkpoint-tmp", ".trash/0"):
        (run / left).mkdir(parents=True)
        (run / left / "part").write_text("x")
    damage(run / "2" / "header" / "metadata", "torn")
    before = files_below(run)
    with Checkpoints(run, read_only=True) as checkpoints:
        assert newest(checkpoints, small_state(0)).step == 1
        assert best_step(checkpoints) == 1
        for read in (checkpoints.meta, checkpoints.validation):
            with pytest.raises(DamagedCheckpointError, match="is damaged") as caught:
                read(2)
            assert caught.value.step == 2
    assert files_below(run) == before
    # Opening for writing removes what a kill left.
    fill(run, {3: 0.3})
    assert sorted(p.name for p in run.iterdir()) == ["2", "3"]
