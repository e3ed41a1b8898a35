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

from experiments.config import Folders, differences
from experiments.errors import ConfigError
from experiments.liveness import AGAIN
from experiments.processes import initialize, on_first
from experiments.assembly import plan_run
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
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--steps", "200"]
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
            outputs = finish(processes, 128 + number)
        (stopped,) = re.findall(r"stopped at step (\d+) of 200, which is saved", outputs[0])
        assert newest < int(stopped) < 200
        newest = int(stopped)
        assert saved_steps(cut)[-1] == newest

    # The other one notices the death of either, and ends.
    for rank in (0, 1):
        with two_processes([*command, "--directory", str(cut)], compilation_cache) as processes:
            wait_for_step(cut, newest + 11, processes[0])
            processes[rank].kill()
            killed = time.monotonic()
            statuses = [AGAIN, AGAIN]
            statuses[rank] = -signal.SIGKILL
            outputs = finish(processes, *statuses)
        assert time.monotonic() - killed < 30
        assert "error: the connection to another process of the run broke" in outputs[1 - rank]
        newest = saved_steps(cut)[-1]
    with two_processes([*command, "--directory", str(cut)], compilation_cache) as processes:
        finish(processes, 0)

    assert not list((cut / "checkpoints").glob("damaged-*"))
    chex.assert_trees_all_equal(final_state(cut), final_state(whole))
    assert metrics_without_clock(cut) == metrics_without_clock(whole)


@pytest.mark.slow
def test_two_processes_without_a_common_disk_train_and_evaluate_as_one(
    tmp_path, folders: Folders, compilation_cache
):
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--steps", "2", "--directory"]
    two, other, one = tmp_path / "two", tmp_path / "other", tmp_path / "one"
    commands = [[*command, str(two)], [*command, str(other)]]
    with start(commands, compilation_cache) as processes:
        outputs = finish(processes, 0)
    # Only the first one prints and writes.
    assert re.search(r"\| +1 +\|", outputs[0])
    assert not re.search(r"\| +1 +\|", outputs[1])
    assert len(list(two.glob("events.out.tfevents.*"))) == 1
    assert not other.exists()

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
    """4×1 → 1×4 → 2×2 → 2×1 → 1×1."""
    directory, whole = tmp_path / "run", tmp_path / "whole"
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--directory", str(directory)]
    command += ["--steps", "120", "--validate-every", "120", "--sampling.batch-size", "64"]
    # A small rate: differences of rounding grow with every step, and where a ReLU flips.
    command += ["--optimizer.learning-rate", "1e-5", "--loss.name", "sce"]
    newest = 0
    for count, devices in ((4, 1), (1, 4), (2, 2), (2, 1)):
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
def test_processes_with_different_options_are_refused_before_training(
    tmp_path, folders, compilation_cache
):
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--directory", str(tmp_path / "run")]
    other = [*command, "--steps", "7", "--seed", "3"]
    with start([command, other], compilation_cache) as processes:
        outputs = finish(processes, 2)
    for output in outputs:
        assert "process 1 differs from process 0 in options or versions:\n" in output
        assert "  steps: 800 -> 7\n  seed: 0 -> 3\n" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_error_in_one_process_ends_all(tmp_path, folders, compilation_cache):
    command = [*TRAIN, "--data-dir", str(folders.data_dir), "--directory", str(tmp_path / "run")]
    failing = [*command, "--sampling.batch-size", "33"]
    sentence = "error: a batch of 33 does not spread evenly over 4 devices"
    with start([failing, command], compilation_cache) as processes:
        outputs = finish(processes, 2)
    assert sentence in outputs[0]
    assert f"process 0 has ended: {sentence}" in outputs[1]
    assert "Traceback" not in outputs[0] + outputs[1]


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
    assert "connection to another process of the run broke" in outputs[0]
    assert re.search(r"\| +1 +\|", outputs[0])


@pytest.mark.slow
def test_a_run_without_steps_prints_its_stacks_and_ends(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import time
        from experiments.liveness import watchdog

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
    assert done.returncode == AGAIN
    assert "in wait_for_data" in done.stderr
    assert "error: no step for 0.00833333 minutes (--stuck-after)" in done.stderr


@pytest.mark.slow
def test_a_process_whose_python_is_frozen_ends(tmp_path, compilation_cache):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import ctypes, time
        import jax
        from experiments import liveness

        liveness._FROZEN_SECONDS = 3

        def wait_with_the_lock_of_python():
            ctypes.PyDLL(None).sleep(100)

        def action():
            if jax.process_index() == 1:
                wait_with_the_lock_of_python()
            time.sleep(100)

        liveness.run_together(action)
        """)
    )
    with two_processes([str(program)], compilation_cache) as processes:
        outputs = finish(processes, AGAIN, signal.SIGALRM)
    assert "error: the connection to another process of the run broke" in outputs[0]
    assert "in wait_with_the_lock_of_python" in outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("aborts", [True, False])
def test_the_death_of_the_first_process_reaches_one_that_has_finished(
    tmp_path, compilation_cache, aborts
):
    """Also where the thread of JAX that would abort the process is stuck."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import ctypes, os, signal, time
        import jax
        from experiments import liveness

        def action():
            if jax.process_index() == 1:
                if not {aborts}:
                    liveness._SILENT_SECONDS = 3
                    liveness._set_handler(signal.SIGABRT, ctypes.CDLL(None).pause)
                return liveness.Outcome(0)
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)

        liveness.run_together(action)
        """)
    )
    with two_processes([str(program)], compilation_cache) as processes:
        outputs = finish(processes, -signal.SIGKILL, AGAIN)
    assert "error: the connection to another process of the run broke" in outputs[1]


@pytest.mark.slow
def test_a_stop_between_two_runs_stops_the_next(tmp_path, compilation_cache):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import os, signal, time
        import jax
        from experiments import processes
        from experiments.training.interrupts import stop_requests
        processes.initialize()
        with stop_requests() as stop:
            assert [stop() for _ in range(20)] == [None] * 20
        processes.exchange(b"")
        if jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        with stop_requests() as stop:
            for step in range(100):
                if (number := stop()) is not None:
                    break
                time.sleep(0.1)
                processes.exchange(b"")
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


def test_processes_agree_on_the_same_values_only():
    first = {"seed": 0, "steps": 3, "name": "a"}
    assert differences(first, dict(first)) == []
    second = {"seed": 0, "steps": 4, "rate": None}
    assert differences(first, second) == [
        "  steps: 3 -> 4",
        "  name: 'a' -> (absent)",
        "  rate: (absent) -> None",
    ]


def test_processes_of_a_machine_divide_its_cpus(tmp_path, compilation_cache):
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("needs two CPUs")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import os
        from experiments import processes
        processes.initialize()
        processes.divide_cpus()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        print("usable", *os.sched_getaffinity(0))
        """)
    )
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("the tests have a scheduler of their own")
    with two_processes([str(program)], compilation_cache) as processes:
        lines = [line for output in finish(processes, 0) for line in output.splitlines()]
    found = [line.split()[1:] for line in lines if line.startswith("usable")]
    first, second = ({int(cpu) for cpu in cpus} for cpus in found)
    assert first | second == usable
    assert not first & second
    assert abs(len(first) - len(second)) <= 1


def test_a_broadcast_keeps_every_bit_and_errors_reach_all(tmp_path, compilation_cache):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import ml_dtypes, numpy as np
        from experiments import processes
        from experiments.training.checkpoints import DamagedCheckpointError
        processes.initialize()
        processes._CHUNK = 1000
        rng = np.random.default_rng(0)
        tree = {
            "uint32": rng.integers(0, 2**32, 7, np.uint32),
            "int32": np.int32([[-(2**31), 2**31 - 1]]),
            "int64": np.int64(2**40 + 1),
            "bool": np.array([True, False]),
            "float32": np.float32([np.nan, -0.0, 1e-45, np.inf]),
            "bfloat16": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
            "float64": (rng.normal(size=1001), None, 0.1),
            "empty": np.zeros((0, 3), np.float16),
            "step": 7,
        }
        sent = processes.on_first(lambda: tree)
        assert sent.keys() == tree.keys()
        for name in tree.keys() - {"float64", "step"}:
            assert type(sent[name]) is type(tree[name])
            assert sent[name].dtype == tree[name].dtype and sent[name].shape == tree[name].shape
            assert sent[name].tobytes() == tree[name].tobytes(), name
        assert (sent["float64"][0] == tree["float64"][0]).all()
        assert sent["float64"][1:] == (None, 0.1) and sent["step"] == 7

        def fail():
            raise DamagedCheckpointError(3, "torn")

        try:
            processes.on_first(fail)
        except DamagedCheckpointError as error:
            print("raised", error.step)
        """)
    )
    with two_processes([str(program)], compilation_cache) as processes:
        for output in finish(processes, 0):
            assert "raised 3" in output
    tree = {"a": np.arange(3)}
    assert on_first(lambda: tree) is tree
