"""Several processes that train one run: they agree, survive kills, and end as one process does."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import chex
import jax
import numpy as np
import psutil
import pytest

from experiments.assembly import plan_run
from experiments.config import Folders, differences
from experiments.errors import ConfigError
from experiments.processes import agree, check_shared, from_first, initialize, on_first
from experiments.runs import complete_run, train_run
from experiments.training.checkpoints import Checkpoints
from tests.experiments.several_processes import QUICK_PYTHON, ROOT, finish, start, wait_for_step
from tests.experiments.tiny_runs import config_of, final_state, metrics, metrics_without_clock

PODS = (ROOT / "experiments" / "PODS.md").read_text(encoding="utf-8")

TRAIN = [
    *("-m", "experiments", "train", "icons", "--distributed", "--loss.name", "nca"),
    *("--sampling.batch-size", "16", "--model.widths", "4", "4", "4", "32", "--log-every", "1"),
    *("--evaluation.validation-episodes", "20", "--evaluation.episodes", "20"),
]


def two_processes(command: Sequence[str], cache: Path):
    """Two processes with two devices each, and the same command."""
    return start([command, command], cache)


def saved_steps(directory: Path) -> list[int]:
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.steps()


@pytest.mark.slow
def test_killed_and_stopped_processes_resume_and_end_as_if_undisturbed(
    tmp_path, folders, compilation_cache
):
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--steps", "120"]
    command += ["--validate-every", "10"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with two_processes([*command, "--directory", str(whole)], compilation_cache) as processes:
        finish(processes, 0)

    # A signal to one of them stops both, which save. They agree on a step, some steps later.
    newest = 0
    for rank, number in ((1, signal.SIGTERM), (0, signal.SIGINT)):
        with two_processes([*command, "--directory", str(cut)], compilation_cache) as processes:
            wait_for_step(cut, newest + 2, processes[0])
            processes[rank].send_signal(number)
            outputs = finish(processes, 128 + signal.SIGTERM)
        (stopped,) = re.findall(r"stopped at step (\d+) of 120, which is saved", outputs[0])
        assert newest < int(stopped) < 120
        newest = int(stopped)
        assert saved_steps(cut)[-1] == newest

    # The other one notices the death of either, and ends.
    for rank in (0, 1):
        with two_processes([*command, "--directory", str(cut)], compilation_cache) as processes:
            wait_for_step(cut, newest + 11, processes[0])
            processes[rank].kill()
            killed = time.monotonic()
            output, _ = processes[1 - rank].communicate(timeout=60)
        assert time.monotonic() - killed < 30
        assert processes[1 - rank].returncode not in (0, 2), output
        newest = saved_steps(cut)[-1]
    with two_processes([*command, "--directory", str(cut)], compilation_cache) as processes:
        finish(processes, 0)

    assert not list((cut / "checkpoints").glob("damaged-*"))
    chex.assert_trees_all_equal(final_state(cut), final_state(whole))
    assert metrics_without_clock(cut) == metrics_without_clock(whole)


@pytest.mark.slow
def test_two_processes_train_and_evaluate_as_one(tmp_path, folders: Folders, compilation_cache):
    two, one = tmp_path / "two", tmp_path / "one"
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--steps", "2", "--directory", str(two)]
    with two_processes(command, compilation_cache) as processes:
        outputs = finish(processes, 0)
    # Only the first one prints and writes.
    assert re.search(r"\| +1 +\|", outputs[0])
    assert not re.search(r"\| +1 +\|", outputs[1])
    assert len(list(two.glob("events.out.tfevents.*"))) == 1

    assert jax.device_count() == 4
    report = complete_run(plan_run(config_of(two)), one, folders, command="")
    chex.assert_trees_all_close(metrics_without_clock(two), metrics_without_clock(one), rtol=1e-4)
    chex.assert_trees_all_close(final_state(two), final_state(one), atol=1e-4)
    of_two = json.loads((two / "report.json").read_text())
    assert [m["name"] for m in of_two["metrics"]] == [m["name"] for m in report["metrics"]]
    for found, expected in zip(of_two["metrics"], report["metrics"], strict=True):
        # 20 episodes with 75 queries: one may flip.
        assert abs(found["value"] - expected["value"]) <= 1 / 1500


@pytest.mark.slow
def test_a_run_continues_on_any_number_of_processes_and_devices(
    tmp_path, folders, compilation_cache
):
    """4×1 → 1×4 → 2×2 → 1×1."""
    directory, whole = tmp_path / "run", tmp_path / "whole"
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--directory", str(directory)]
    command += ["--steps", "100", "--validate-every", "100", "--sampling.batch-size", "64"]
    # A small rate: differences of rounding grow with every step, and where a ReLU flips.
    command += ["--optimizer.learning-rate", "1e-5", "--loss.name", "sce"]
    newest = 0
    for count, devices in ((4, 1), (1, 4), (2, 2)):
        with start([command] * count, compilation_cache, devices=devices) as processes:
            wait_for_step(directory, newest + 2, processes[0])
            processes[0].send_signal(signal.SIGTERM)
            finish(processes, 128 + signal.SIGTERM)
        assert saved_steps(directory)[-1] > newest
        newest = saved_steps(directory)[-1]
    with start([command], compilation_cache, devices=1) as processes:
        finish(processes, 0)
    train_run(plan_run(config_of(directory)), whole, folders)
    losses, expected = (
        [line["loss"] for line in metrics(folder) if "loss" in line]
        for folder in (directory, whole)
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    chex.assert_trees_all_close(final_state(directory), final_state(whole), rtol=1e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["options", "directory"])
def test_processes_that_differ_are_refused_before_training(
    tmp_path, folders, compilation_cache, other
):
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--directory"]
    first = [*command, str(tmp_path / "run")]
    second = {"directory": [*command, str(tmp_path / "other")], "options": [*first, "--seed", "3"]}
    with start([first, second[other]], compilation_cache) as processes:
        outputs = finish(processes, 2)
    if other == "directory":
        assert (
            "is not the same directory in all processes (process 1 sees another one)" in outputs[1]
        )
    else:
        for output, seed in zip(outputs, (0, 3), strict=True):
            assert "error: the processes differ in options or versions; start the same" in output
            assert f"  seed: {seed}\n" in output
    assert not (tmp_path / "other").exists()
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.slow
def test_an_error_in_one_process_ends_all(tmp_path, folders, compilation_cache):
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--directory", str(tmp_path / "run")]
    failing = [*command, "--sampling.batch-size", "33"]
    with start([failing, command], compilation_cache) as processes:
        (output, _), started = processes[0].communicate(timeout=120), time.monotonic()
        processes[1].communicate(timeout=60)
    assert time.monotonic() - started < 30
    assert processes[0].returncode == 2
    assert "error: a batch of 33 does not spread evenly over 4 devices" in output
    assert "Traceback" not in output
    assert processes[1].returncode not in (0, None)


@pytest.mark.slow
def test_the_recipes_start_processes_and_survive_a_kill(tmp_path, folders, compilation_cache):
    (loop,) = re.findall(r"### Plain shell.*?```bash\n(.*?)```", PODS, re.DOTALL)
    loop = re.sub(r"^export .*\n", "", loop).replace("sleep 5", "sleep 0.1")
    command = shlex.join([*TRAIN, "--data-dir", str(folders.data_dir), "--steps", "40"])
    command += f" --validate-every 5 --directory {tmp_path / 'run'}"
    loop = loop.replace("-m experiments train icons --distributed --directory runs/pod", command)
    assert command in loop
    slurm = """
        export SLURM_JOB_ID=$$ SLURM_STEP_NODELIST=localhost SLURM_NTASKS=$JAX_NUM_PROCESSES
        export SLURM_PROCID=$JAX_PROCESS_ID SLURM_LOCALID=$JAX_PROCESS_ID
        unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID
    """.replace("$$", str(os.getpid()))
    python = f'python() {{ {shlex.join(QUICK_PYTHON)} "$@"; }}\n'
    scripts = [[slurm + python + loop]] * 2
    with start(scripts, compilation_cache, program=("bash", "-c")) as processes:
        wait_for_step(tmp_path / "run", 8, processes[0])
        (killed,) = psutil.Process(processes[1].pid).children()
        killed.kill()
        outputs = finish(processes, 0)
    assert re.search(r"\| +1 +\|", outputs[0])


@pytest.mark.slow
def test_a_run_without_steps_prints_its_stacks_and_ends(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import time
        from experiments.processes import watchdog

        def wait_for_data():
            time.sleep(60)

        with watchdog(0.5 / 60) as step_done:
            for _ in range(10):
                step_done()
                time.sleep(0.1)
            wait_for_data()
        """)
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1
    assert "Timeout (0:00:00.500000)!" in done.stderr
    assert "in wait_for_data" in done.stderr


@pytest.mark.slow
def test_a_stop_between_two_runs_stops_the_next_and_arrays_of_the_first_reach_all(
    tmp_path, compilation_cache
):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import os, signal, time
        import jax
        import numpy as np
        from experiments import processes
        processes.initialize()
        rank = jax.process_index()
        assert processes.from_first(np.float32([rank, 7])).tolist() == [0, 7]
        assert not processes.all_true(rank == 0) and processes.all_true(True)
        with processes.stop_requests() as stop:
            assert [stop() for _ in range(20)] == [None] * 20
        processes.on_first(lambda: None)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        with processes.stop_requests() as stop:
            for step in range(100):
                if (number := stop()) is not None:
                    break
                time.sleep(0.1)
                processes.on_first(lambda: None)
        print("stopped by", number, "at", step)
        """)
    )
    with two_processes([str(program)], compilation_cache) as processes:
        outputs = finish(processes, 0)
    (first, second) = (re.search(r"stopped by (\d+) at (\d+)", output) for output in outputs)
    assert first is not None
    assert second is not None
    assert first.groups() == second.groups()
    assert first[1] == str(signal.SIGTERM.value)


@pytest.mark.parametrize("name", ["JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"])
def test_an_address_without_a_port_is_refused(monkeypatch, name):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "machine0:8476")
    monkeypatch.setenv(name, "machine0")
    with pytest.raises(ConfigError, match=f"{name} machine0 has no port; write machine0:8476"):
        initialize()


def test_one_process_needs_no_others(tmp_path):
    agree("options", {"seed": 0})
    check_shared(tmp_path / "absent")
    tree = {"a": np.arange(3)}
    assert on_first(lambda: tree) is tree
    assert from_first(tree["a"]) is tree["a"]


def test_differences_between_configurations():
    first = {"seed": 0, "steps": 3, "name": "a"}
    assert differences(first, dict(first)) == []
    second = {"seed": 0, "steps": 4, "rate": None}
    assert differences(first, second) == [
        "  steps: 3 -> 4",
        "  name: 'a' -> (absent)",
        "  rate: (absent) -> None",
    ]
