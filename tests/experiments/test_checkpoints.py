"""Checkpoints: nothing is lost, nothing is restored wrong, whatever happens to the files."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from experiments.training.checkpoints import (
    CheckpointError,
    Checkpoints,
    ConfigMismatchError,
    claim_run_directory,
    read_config,
)

ROOT = Path(__file__).parents[2]

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
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        want = np.asarray(want)
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert np.asarray(got).tobytes() == want.tobytes()


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def fill(directory: Path, accuracies: Mapping[int, float | None], keep_latest: int = 9) -> None:
    with Checkpoints(directory, keep_latest=keep_latest) as checkpoints:
        for step, accuracy in accuracies.items():
            checkpoints.save(step, small_state(step), meta={"step": step}, accuracy=accuracy)


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
        checkpoints.save(3, state, meta={}, accuracy=None)
        restored = checkpoints.restore(jax.tree.map(np.zeros_like, state))
        assert restored.step == 3
        assert_same(restored.state, state)
        assert restored.state["half"].dtype == ml_dtypes.bfloat16
        assert isinstance(restored.state["params"]["dense"], Pair)
        # Containers may change between two versions of a program; the names are what counts.
        state["params"] = {"dense": params["dense"]._asdict()}
        assert_same(checkpoints.restore(state).state, state)


def test_prng_keys_and_shardings_of_the_target(tmp_path):
    state = {"key": jax.random.split(jax.random.key(7), 3), "w": jnp.arange(6.0).reshape(2, 3)}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, meta={})
        target = jax.eval_shape(lambda: state)
        target["w"] = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)
        restored = checkpoints.restore(target).state
    assert restored["w"].sharding == sharding
    np.testing.assert_array_equal(restored["w"], state["w"])
    assert restored["key"].dtype == state["key"].dtype
    expected = jax.vmap(jax.random.normal)(state["key"])
    np.testing.assert_array_equal(jax.vmap(jax.random.normal)(restored["key"]), expected)


def test_the_state_is_copied_before_save_returns(tmp_path):
    state = {"w": np.ones((512, 512), np.float32)}
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    on_device = jnp.ones((512, 512))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {**state, "d": on_device}, meta={})
        state["w"][:] = 7
        jax.block_until_ready(donated(on_device))
        restored = checkpoints.restore({**state, "d": np.zeros((512, 512), np.float32)}).state
    np.testing.assert_array_equal(restored["w"], 1)
    np.testing.assert_array_equal(restored["d"], 1)


def test_metadata_takes_numpy_scalars_and_gives_back_json(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        meta = {"accuracy": np.float32(0.5), "seen": np.int64(3), "shape": (1, 2), "on": np.True_}
        checkpoints.save(1, small_state(1), meta=meta, accuracy=np.float32(0.25))
        expected = {"accuracy": 0.5, "seen": 3, "shape": [1, 2], "on": True}
        assert checkpoints.meta(1) == expected
        assert checkpoints.restore(small_state(1)).meta == expected
        with pytest.raises(TypeError, match="ndarray"):
            checkpoints.save(2, small_state(2), meta={"x": np.ones(2)})
        assert checkpoints.steps() == [1]


@pytest.mark.parametrize(
    ("accuracies", "kept", "best"),
    [
        ({1: 0.3, 2: 0.9, 3: 0.5, 4: 0.4}, [2, 4], 2),
        ({1: 0.3, 2: 0.4}, [2], 2),
        ({1: 0.5, 2: 0.5, 3: 0.1}, [2, 3], 2),
        ({1: 0.2, 2: float("nan"), 3: None, 4: float("inf")}, [1, 4], 1),
        ({1: None, 2: None, 3: float("nan")}, [3], None),
        ({1: -5.0, 2: None, 3: None}, [1, 3], 1),
    ],
)
@pytest.mark.parametrize("reopen", [False, True])
def test_newest_and_best_are_kept(tmp_path, accuracies, kept, best, reopen):
    if reopen:
        for step, accuracy in accuracies.items():
            fill(tmp_path, {step: accuracy}, keep_latest=1)
    else:
        fill(tmp_path, accuracies, keep_latest=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [str(step) for step in kept]
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == kept
        assert checkpoints.latest_step() == kept[-1]
        assert checkpoints.best_step() == best
        for step in kept:
            assert_same(checkpoints.restore(small_state(0), step).state, small_state(step))


def test_keep_latest_keeps_several(tmp_path):
    fill(tmp_path, dict.fromkeys(range(1, 6), 0.5) | {2: 0.7}, keep_latest=2)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 4, 5]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"w": np.zeros((7, 3), np.float32)}, "step: in the checkpoint only"),
        ({**small_state(0), "b": np.zeros(2)}, "b: not in the checkpoint"),
        ({**small_state(0), "w": np.zeros((3, 7), np.float32)}, r"w: float32\[7, 3\] .*\[3, 7\]"),
        ({**small_state(0), "w": np.zeros((7, 3), np.float64)}, "w: float32.*float64"),
        ({**small_state(0), "w": jnp.zeros((7, 3), jnp.bfloat16)}, "w: float32.*bfloat16"),
        ({**small_state(0), "step": np.zeros(1, np.int32)}, r"step: int32\[\] .*int32\[1\]"),
    ],
)
def test_another_structure_is_refused_and_not_called_damage(tmp_path, target, message):
    fill(tmp_path, {1: 0.1, 2: 0.2})
    with Checkpoints(tmp_path) as checkpoints:
        for step in (None, 2):
            with pytest.raises(CheckpointError, match=message):
                checkpoints.restore(target, step)
        assert checkpoints.steps() == [1, 2]


def test_what_cannot_be_saved_says_so(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, small_state(5), meta={})
        for step in (5, 4):
            with pytest.raises(CheckpointError, match="holds step 5 already"):
                checkpoints.save(step, small_state(step), meta={})
        with pytest.raises(CheckpointError, match="leaf name of the state"):
            checkpoints.save(6, {"name": "conv4"}, meta={})
        with pytest.raises(CheckpointError, match="named a/b"):
            checkpoints.save(6, {"a/b": np.ones(1), "a": {"b": np.ones(1)}}, meta={})
        with pytest.raises(CheckpointError, match="no values"):
            checkpoints.save(6, {"a": np.ones((0, 2))}, meta={})
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 \(there are: 5\)"):
            checkpoints.restore(small_state(5), 7)
        assert checkpoints.steps() == [5]


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif how == "zeroed":
        path.write_bytes(bytes(len(content)))
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])


@pytest.mark.parametrize("how", ["missing", "torn", "zeroed", "flipped"])
def test_any_damaged_file_is_noticed(tmp_path, how, caplog):
    fill(tmp_path / "original", {1: 0.1, 2: 0.2})
    original = tmp_path / "original"
    files = [p for p in sorted((original / "2").rglob("*")) if p.is_file() and p.stat().st_size]
    assert any("ocdbt" in str(p) for p in files)
    fell_back = 0
    for path in files:
        content = path.read_bytes()
        damage(path, how)
        with Checkpoints(original, read_only=True) as checkpoints:
            caplog.clear()
            restored = checkpoints.restore(small_state(0))
            # A damaged file that holds nothing of ours may go unnoticed; wrong values may not.
            assert_same(restored.state, small_state(restored.step))
            assert restored.meta == {"step": restored.step}
            if restored.step == 1:
                fell_back += 1
                assert "checkpoint 2 is damaged" in caplog.text
                with pytest.raises(CheckpointError, match="is damaged"):
                    checkpoints.restore(small_state(0), 2)
        path.write_bytes(content)
    assert fell_back >= 3


@pytest.mark.parametrize("part", ["state", "meta", "metrics"])
def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path, part, caplog):
    fill(tmp_path, {1: 0.1, 2: 0.9})
    for path in (tmp_path / "2" / part).rglob("*"):
        if path.is_file() and path.stat().st_size:
            damage(path, "torn")
    caplog.set_level(logging.WARNING)
    with Checkpoints(tmp_path, keep_latest=9) as checkpoints:
        assert checkpoints.restore(small_state(0)).step == 1
        assert "checkpoint 2 of" in caplog.text
        assert "moved to damaged-2" in caplog.text
        assert checkpoints.steps() == [1]
        assert checkpoints.best_step() == 1
        checkpoints.save(2, small_state(2), meta={}, accuracy=0.2)
        assert_same(checkpoints.restore(small_state(0)).state, small_state(2))
        assert checkpoints.best_step() == 2
    assert (tmp_path / "damaged-2").is_dir()
    for path in (tmp_path / "2" / "meta").rglob("*"):
        if path.is_file() and path.stat().st_size:
            damage(path, "torn")
    fill(tmp_path, {})
    assert (tmp_path / "damaged-2-2").is_dir()


def test_nothing_intact(tmp_path):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.steps() == []
        assert checkpoints.latest_step() is None
        assert checkpoints.best_step() is None
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            checkpoints.restore(small_state(0))
    fill(tmp_path, {1: 0.1})
    with Checkpoints(tmp_path) as checkpoints:
        damage(next((tmp_path / "1" / "state").rglob("ocdbt*/d/*")), "missing")
        damage(tmp_path / "1" / "state" / "manifest.ocdbt", "zeroed")
        with pytest.raises(CheckpointError, match="no intact checkpoint; damaged: 1"):
            checkpoints.restore(small_state(0))


def test_reading_only_changes_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="there is no directory"):
        Checkpoints(tmp_path / "nowhere", read_only=True)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Checkpoints(tmp_path / "empty", read_only=True)
    run = tmp_path / "run"
    fill(run, {1: 0.1, 2: 0.2})
    (run / "3.orbax-checkpoint-tmp").mkdir()
    (run / "3.orbax-checkpoint-tmp" / "part").write_text("x")
    damage(run / "2" / "meta" / "metadata", "torn")
    before = files_below(run)
    with Checkpoints(run, read_only=True) as checkpoints:
        assert checkpoints.restore(small_state(0)).step == 1
        assert checkpoints.best_step() == 1
        with pytest.raises(CheckpointError, match="reading only"):
            checkpoints.save(3, small_state(3), meta={})
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoints.meta(2)
    assert files_below(run) == before


def test_opening_for_writing_removes_what_a_kill_left(tmp_path):
    fill(tmp_path, {1: 0.1})
    for left in ("2.orbax-checkpoint-tmp", ".trash/0"):
        (tmp_path / left).mkdir(parents=True)
        (tmp_path / left / "part").write_text("x")
    fill(tmp_path, {2: 0.2})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_killed_at_any_moment(tmp_path):
    """A program that does nothing but save is killed again and again, and always goes on."""
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        import numpy as np
        from experiments.training.checkpoints import Checkpoints

        def state(step):
            return {"w": np.full((300, 300), step, np.float32), "step": np.int32(step)}

        with Checkpoints(Path(sys.argv[1])) as checkpoints:
            step = 0
            if checkpoints.latest_step() is not None:
                restored = checkpoints.restore(state(0))
                step = restored.step
                assert restored.meta["twice"] == 2 * step
                assert (restored.state["w"] == step).all() and restored.state["step"] == step
            print("resumed", step, flush=True)
            while True:
                step += 1
                accuracy = step % 3 / 10
                checkpoints.save(step, state(step), meta={"twice": 2 * step}, accuracy=accuracy)
                print("began", step, flush=True)
    """)
    rng = np.random.default_rng(0)
    began = 0
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "run")],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline().split()
        # Counted in saves, not in seconds: a busy machine kills in the middle of one all the same.
        lines = [process.stdout.readline() for _ in range(rng.integers(1, 6))]
        time.sleep(float(rng.uniform(0.0, 0.05)))
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        errors = process.stderr.read()
        process.wait()
        assert first[:1] == ["resumed"], errors
        # All but the last save begun had finished, for a save waits for the one before it.
        assert began - 1 <= int(first[1]) <= began + 1, errors
        assert "damaged" not in errors
        began = max([int(first[1]), *(int(line.split()[1]) for line in lines)])
        assert process.returncode == -signal.SIGKILL, errors
    with Checkpoints(tmp_path / "run") as checkpoints:
        target = {"w": np.zeros((300, 300), np.float32), "step": np.int32(0)}
        for step in checkpoints.steps():
            restored = checkpoints.restore(target, step)
            np.testing.assert_array_equal(restored.state["w"], step)
        # What the kills left is removed in the background, at the latest by the next save.
        checkpoints.save(began + 2, target, meta={})
    assert began >= 5
    assert not [p.name for p in (tmp_path / "run").iterdir() if not p.name.isdecimal()]


CONFIG = {"data": {"name": "icons", "mean": (0.5,)}, "steps": 500, "seed": 0}


def test_a_run_directory_is_claimed_once(tmp_path):
    run = tmp_path / "deep" / "run"
    assert claim_run_directory(run, CONFIG) is False
    (run / "metrics.jsonl").write_text("x")
    assert claim_run_directory(run, CONFIG) is True
    assert read_config(run) == {**CONFIG, "data": {"name": "icons", "mean": [0.5]}}
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "metrics.jsonl"]


def test_another_configuration_is_refused_with_its_differences(tmp_path):
    claim_run_directory(tmp_path, CONFIG)
    before = files_below(tmp_path)
    other = {"data": {"name": "cub", "mean": [0.5, 0.4]}, "steps": 500, "loss": {"name": "sce"}}
    with pytest.raises(ConfigMismatchError) as caught:
        claim_run_directory(tmp_path, other)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert "data.name: 'icons' -> 'cub'" in lines
    assert "data.mean: [0.5] -> [0.5, 0.4]" in lines
    assert "seed: 0 -> (absent)" in lines
    assert "loss: (absent) -> {'name': 'sce'}" in lines
    assert not [line for line in lines if line.startswith("steps")]
    assert "Choose another directory, or remove this one" in lines[-1]
    assert files_below(tmp_path) == before


def test_somebody_elses_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigMismatchError, match=r"it holds thesis\.tex but no config\.json"):
        claim_run_directory(tmp_path, CONFIG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.tex"]
    with pytest.raises(ConfigMismatchError, match="is a file"):
        claim_run_directory(tmp_path / "thesis.tex", CONFIG)
    with pytest.raises(ConfigMismatchError, match="not a run directory"):
        read_config(tmp_path)


def test_hidden_files_do_not_count(tmp_path):
    (tmp_path / ".gitkeep").touch()
    (tmp_path / ".config.json.123").write_text('{"da')
    assert claim_run_directory(tmp_path, CONFIG) is False
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 500


@pytest.mark.parametrize("content", [b"", b'{"data": {"na', b"[1]", b"\xff\xfe"])
def test_a_damaged_configuration_is_not_overwritten(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigMismatchError, match=r"config\.json is damaged"):
        claim_run_directory(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_bytes() == content
