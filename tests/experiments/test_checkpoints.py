"""Checkpoints: nothing is lost, nothing is restored wrong, whatever happens to the files."""

import errno
import resource
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.core.errors import ExperimentError
from experiments.training.checkpoints import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    DamagedCheckpointError,
)
from tests.experiments.tiny_runs import files_below


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


def newest(checkpoints: Checkpoints) -> Checkpoint:
    return checkpoints.read_intact()[0]


def best_step(checkpoints: Checkpoints) -> int:
    return checkpoints.read_intact(best=True)[0].step


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
        checkpoints.save(3, state, meta={"a": [1, "é"]}, validation=None)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        found = newest(checkpoints)
    assert (found.step, found.meta, found.validation) == (3, {"a": [1, "é"]}, None)
    restored = found.fill(jax.tree.map(np.zeros_like, state))
    assert_same(restored, state)
    assert isinstance(restored["params"]["dense"], Pair)
    # Containers may change between two versions of a program; the names are what counts.
    state["params"] = {"dense": params["dense"]._asdict()}
    assert_same(found.fill(state), state)
    assert_same(found.fill({"params": params}, ("params/",)), {"params": params})


@pytest.mark.parametrize(
    ("validations", "kept", "best"),
    [
        ({1: 0.9, 2: 0.3, 3: 0.5, 4: 0.4}, [1, 3, 4], 1),
        ({1: 0.3, 2: 0.5, 3: 0.5, 4: 0.1, 5: 0.1}, [3, 4, 5], 3),
        ({1: 0.2, 2: float("nan"), 3: None, 4: float("inf")}, [1, 3, 4], 1),
        ({1: None, 2: None, 3: float("nan")}, [2, 3], 3),
        ({1: -5.0, 2: None, 3: None, 4: None}, [1, 3, 4], 1),
    ],
)
def test_newest_and_best_are_kept(tmp_path, validations, kept, best):
    """Of equal validations, the latest is the best. The folder is opened twice."""
    items = [*validations.items()]
    for part in (items[:2], items[2:]):
        fill(tmp_path, dict(part))
    assert sorted(p.name for p in tmp_path.iterdir()) == [str(step) for step in kept]
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == kept
        assert best_step(checkpoints) == best
        for step in kept:
            found, value = checkpoints.read(step), validations[step]
            assert_same(found.fill(small_state(0)), small_state(step))
            assert found.validation == (value if value is not None and np.isfinite(value) else None)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"w": np.zeros((7, 3), np.float32)}, r"step: 'int32\[\]' -> \(absent\)"),
        ({**small_state(0), "b": np.zeros(2)}, r"b: \(absent\) -> 'float64\[2\]'"),
        ({**small_state(0), "w": np.zeros((3, 7), np.float32)}, r"\[7, 3\]' -> .*\[3, 7\]"),
        ({**small_state(0), "w": jnp.zeros((7, 3), jnp.bfloat16)}, "float32.* -> 'bfloat16"),
    ],
)
def test_another_structure_is_refused_and_not_called_damage(tmp_path, target, message):
    fill(tmp_path, {1: 0.1, 2: 0.2})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.read(2).fill(target)
        assert checkpoints.steps() == [1, 2]
        with pytest.raises(CheckpointError, match="no checkpoint of step 7; it holds: 1, 2"):
            checkpoints.read(7)


def damage(path: Path, how: str) -> None:
    """Damages a file; a number flips a bit, 0 of the first byte."""
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif how == "zeroed":
        path.write_bytes(bytes(len(content)))
    elif content:
        place = int(float(how) * (len(content) - 1))
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])


@pytest.mark.parametrize("how", ["missing", "torn", "zeroed", "0", "0.4", "0.8"])
def test_any_damaged_file_is_noticed_or_harmless(tmp_path, how, caplog, capfd):
    fill(tmp_path, {1: 0.1, 2: 0.2}, large_state)
    contents = files_below(tmp_path / "2")
    assert max(map(len, contents.values())) > 20_000
    fell_back = 0
    for path, content in contents.items():
        damage(path, how)
        caplog.clear()
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            found, damaged = checkpoints.read_intact()
            # A damaged file that holds nothing of ours may go unnoticed; wrong values may not.
            assert_same(found.fill(large_state(0)), large_state(found.step))
            assert found.meta == {"step": found.step}
            if found.step == 1:
                fell_back += 1
                assert f"checkpoint {tmp_path / '2'} is damaged" in str(damaged[0])
                assert "using step 1 in place of step 2" in caplog.text
                with pytest.raises(DamagedCheckpointError, match="is damaged"):
                    checkpoints.read(2)
        path.write_bytes(content)
    assert fell_back >= 4
    assert "Traceback" not in capfd.readouterr().err
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert newest(checkpoints).step == 2


@pytest.mark.parametrize("part", ["header", "state"])
def test_the_best_falls_back_to_the_next_and_damaged_ones_are_set_aside(tmp_path, caplog, part):
    fill(tmp_path, {1: 0.1, 2: 0.9, 3: 0.8, 4: 0.2})
    path = {"header": "header/metadata", "state": "state/manifest.ocdbt"}[part]
    damage(tmp_path / "2" / path, "torn")
    with Checkpoints(tmp_path) as checkpoints:
        found, damaged = checkpoints.read_intact(best=True)
        assert (found.step, len(damaged)) == (3, 1)
    assert (tmp_path / "damaged-2").is_dir()
    assert "using step 3 in place of step 2" in caplog.text
    # Training goes on from the newest one, and saves the step again.
    for name in ("damaged-4", "damaged-4-again"):
        damage(tmp_path / "4" / path, "torn")
        with Checkpoints(tmp_path) as checkpoints:
            assert newest(checkpoints).step == 3
            assert checkpoints.steps() == [3]
            checkpoints.save(4, small_state(4), meta={}, validation=0.4)
            assert_same(newest(checkpoints).fill(small_state(0)), small_state(4))
        assert (tmp_path / name).is_dir()


def test_a_damaged_header_does_not_take_the_place_of_the_best(tmp_path):
    fill(tmp_path, {1: 0.9, 2: 0.1, 3: 0.2})
    damage(tmp_path / "1" / "header" / "metadata", "torn")
    fill(tmp_path, {4: 0.8, 5: 0.3, 6: 0.4})
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [1, 4, 5, 6]
        assert best_step(checkpoints) == 4


class RefreshError(Exception):
    """As of a library below gcsfs."""

    __module__ = "google.auth.exceptions"


def refused(path):
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("error", "read"),
    [
        (OSError(errno.EIO, "Input/output error"), Path.read_bytes),
        (ValueError("PERMISSION_DENIED: as TensorStore says it"), refused),
        (RefreshError("token"), Path.read_bytes),
    ],
    ids=["disk", "permission", "network"],
)
def test_what_another_process_removes_or_a_disk_cannot_read_is_no_damage(
    tmp_path, caplog, monkeypatch, error, read
):
    fill(tmp_path, {1: 0.1, 2: 0.2})
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        shutil.move(tmp_path / "2", tmp_path / "moved")
        found, damaged = checkpoints.read_intact()
    assert (found.step, damaged) == (1, [])
    assert "damaged" not in caplog.text
    shutil.move(tmp_path / "moved", tmp_path / "2")
    with Checkpoints(tmp_path) as checkpoints:

        def failing(*args, **how):
            raise error

        monkeypatch.setattr(checkpoints._manager, "restore", failing)
        monkeypatch.setattr(Path, "read_bytes", read)
        with pytest.raises(CheckpointError, match=r"cannot read checkpoint 2") as caught:
            newest(checkpoints)
        assert not isinstance(caught.value, DamagedCheckpointError)
        assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("size", [100, 2_100, 20_000])
def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path, size, capfd):
    fill(tmp_path, {1: 0.1, 2: 0.2}, large_state)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(ExperimentError, match=r"^cannot write .*/3: (File too|is the disk)"):
            fill(tmp_path, {3: 0.3}, large_state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capfd.readouterr().err == ""
    for left in reversed(range(20)):  # Threads of the save that failed may still write.
        try:
            fill(tmp_path, {3: 0.3}, large_state)
            break
        except ExperimentError:
            if not left:
                raise
            time.sleep(0.1)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 3]
        assert_same(newest(checkpoints).fill(large_state(0)), large_state(3))


def test_a_checkpoint_of_another_version_is_not_called_damaged(tmp_path):
    fill(tmp_path, {1: 0.1})
    (tmp_path / "1" / "header" / "metadata").write_text('{"format": 4, "sha256": "x"}')
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="is of another version of jaxloss"):
            newest(checkpoints)
        assert checkpoints.steps() == [1]


def test_reading_only_changes_nothing_and_writing_removes_what_a_kill_left(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            Checkpoints(folder, read_only=True)
    assert not (tmp_path / "nowhere").exists()
    run = tmp_path / "run"
    fill(run, {1: 0.1, 2: 0.2})
    for left in ("3.orbax-checkpoint-tmp", ".trash/0"):
        (run / left).mkdir(parents=True)
        (run / left / "part").write_text("x")
    damage(run / "2" / "header" / "metadata", "torn")
    before = files_below(run)
    with Checkpoints(run, read_only=True) as checkpoints:
        assert newest(checkpoints).step == 1
        assert best_step(checkpoints) == 1
    assert files_below(run) == before
    # Opening for writing removes what a kill left.
    fill(run, {3: 0.3})
    assert sorted(p.name for p in run.iterdir()) == ["2", "3"]
