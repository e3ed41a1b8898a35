"""Several processes that train one run: they agree, survive kills, and end as one process does."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import psutil
import pytest

from experiments.run import complete_run, plan_run
from tests.experiments.several_processes import (
    ROOT,
    finish,
    logged,
    start,
    wait_for_step,
)
from tests.experiments.tiny_runs import (
    TINY_OPTIONS,
    assert_equal_runs,
    config_of,
    final_state,
    metrics,
    saved_steps,
)
from tests.tolerances import FLOAT32

PODS = (ROOT / "experiments" / "PODS.md").read_text(encoding="utf-8")


SPREAD = [
    *("-m", "experiments", "train", "icons", "--distributed", *TINY_OPTIONS),
    *("--loss.name", "sce", "--parallel", "jit", "--steps", "20", "--validate-every", "4"),
    *("--log-every", "1"),
]
"""A run by a sharded jit over both processes, with five checkpoints."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, folders, compilation_cache) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [*SPREAD, "--data-dir", str(folders.data_dir), "--directory", str(directory)]
    with start([command] * 2, compilation_cache) as processes:
        finish(processes, 0)
    return directory


@pytest.mark.long
def test_the_recipe_survives_faults_and_ends_as_if_undisturbed(
    tmp_path, folders, compilation_cache, undisturbed
):
    """The loop of the plain shell, under Slurm's variables."""
    directory = tmp_path / "run"
    (loop,) = re.findall(r"### Plain shell.*?```bash\n(.*?)```", PODS, re.DOTALL)
    loop = re.sub(r"^export .*\n", "", loop).replace("sleep 5", "sleep 0.1")
    command = shlex.join([*SPREAD, "--data-dir", str(folders.data_dir)])
    command += f" --directory {directory}"
    loop = loop.replace("-m experiments train icons --distributed --directory runs/pod", command)
    assert command in loop
    script = f"""
        export SLURM_JOB_ID={os.getpid()} SLURM_STEP_NODELIST=localhost
        export SLURM_NTASKS=$JAX_NUM_PROCESSES SLURM_PROCID=$JAX_PROCESS_ID
        export SLURM_LOCALID=$JAX_PROCESS_ID
        unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID
        python() {{
          {sys.executable} "$@"; set -- $?; echo "ended with $1"; return $1
        }}
        {loop}"""
    faults = [(1, signal.SIGTERM), (0, signal.SIGKILL)]
    with start([[script]] * 2, compilation_cache, program=("bash", "-c")) as shells:
        for rank, number in faults:
            wait_for_step(directory, logged(directory) + 5, shells[0])
            pythons = [psutil.Process(shell.pid).children()[0] for shell in shells]
            pythons[rank].send_signal(number)
            # The other one notices its death, and ends.
            assert not psutil.wait_procs(pythons, timeout=30)[1]
        outputs = finish(shells, 0)
    for rank, output in enumerate(outputs):
        ended = [int(status) for status in re.findall(r"ended with (\d+)", output)]
        # A signal to one of them stops both, which save.
        assert ended[0] == 128 + signal.SIGTERM
        assert ended.count(128 + signal.SIGKILL) == (rank == 0)
        assert not {0, 2, 3}.intersection(ended[:-1])
        assert ended[-1] == 0
    stops = [re.findall(r"stopped at step (\d+) of 20, which is saved", text) for text in outputs]
    assert stops[0] == stops[1]
    assert len(stops[0]) == 1
    assert re.search(r"\| +1 +\|", outputs[0])
    assert_equal_runs(directory, undisturbed)


@pytest.mark.long
def test_other_processes_and_devices_continue_a_run_which_ends_as_that_of_one_process(
    tmp_path, folders, compilation_cache
):
    """2×1 → 2×2; 1×4."""
    directory, whole = tmp_path / "run", tmp_path / "whole"
    command = ["-m", "experiments", "train", "icons", "--distributed", *TINY_OPTIONS]
    command += ["--data-dir", str(folders.data_dir), "--directory", str(directory)]
    command += ["--loss.name", "sce+nca", "--steps", "40", "--validate-every", "40"]
    command += ["--log-every", "1", "--sampling.batch-size", "48"]
    # A small rate: differences of rounding grow with every step, and where a ReLU flips.
    command += ["--optimizer.learning-rate", "1e-4"]
    with start([command] * 2, compilation_cache, devices=1) as processes:
        wait_for_step(directory, 2, processes[0])
        processes[0].send_signal(signal.SIGINT)
        outputs = finish(processes, 128 + signal.SIGTERM)
    stops = [re.findall(r"stopped at step (\d+) of 40, which is saved", text) for text in outputs]
    assert stops == [[str(saved_steps(directory)[-1])]] * 2
    with start([command] * 2, compilation_cache) as processes:
        outputs = finish(processes, 0)
    # Only the first one prints and writes.
    assert re.search(r"\| +1 +\|", outputs[0])
    assert not re.search(r"\| +1 +\|", outputs[1])
    assert len(list(directory.glob("events.out.tfevents.*"))) == 2

    assert jax.device_count() == 4
    expected = complete_run(plan_run(config_of(directory)), whole, folders, command="")
    losses, expected_losses = (
        [line["loss"] for line in metrics(folder) if "loss" in line]
        for folder in (directory, whole)
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=4 * FLOAT32)
    chex.assert_trees_all_close(
        final_state(directory), final_state(whole), rtol=256 * FLOAT32, atol=128 * FLOAT32
    )
    report = json.loads((directory / "report.json").read_text())
    values, of_one = ({m["name"]: m["value"] for m in r["metrics"]} for r in (report, expected))
    # 20 episodes with 75 queries: one may flip.
    assert values == pytest.approx(of_one, rel=0, abs=1 / 1500)


STUCK = """
import time
from experiments.core.processes import watchdog

with watchdog(0.5 / 60) as step_done:
    for _ in range(10):
        step_done()
        time.sleep(0.1)
    print("no more steps", flush=True)
    time.sleep(60)
"""


@pytest.mark.long
def test_a_run_without_steps_prints_its_stacks_and_ends():
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (1, "no more steps\n")
    assert "Timeout (0:00:00.500000)!" in done.stderr


TOGETHER = """\
import os, signal, sys, time
from dataclasses import replace
from pathlib import Path
import jax
import numpy as np
from experiments.core import processes
from experiments.run import plan_run
from experiments.core.config import Folders
from experiments.core.errors import ConfigError
from experiments.papers.presets import PRESETS
from experiments.run import complete_run

def refused(directory, **changes):
    plan = plan_run(replace(PRESETS["icons"].config, **changes))
    try:
        complete_run(plan, Path(directory), Folders(data_dir=Path(sys.argv[2])), command="")
    except ConfigError as error:
        print(error)

def main():
    rank, folder = jax.process_index(), sys.argv[1]
    assert processes.from_first(np.float32([rank, 7])).tolist() == [0, 7]
    assert not processes.all_true(rank == 0) and processes.all_true(True)
    refused(f"{folder}/run", seed=3 * rank)
    refused(f"{folder}/{['run', 'other'][rank]}")
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
    print("stopped by", number, "at", step, flush=True)
    if rank == 0:
        raise ConfigError("a mistake of the user")
    processes.all_true(True)

processes.run_together(main)
"""


@pytest.mark.long
def test_what_processes_agree_on_and_an_error_in_one_ends_all(tmp_path, folders, compilation_cache):
    program = tmp_path / "program.py"
    program.write_text(TOGETHER)
    command = [str(program), str(tmp_path), str(folders.data_dir)]
    with start([command] * 2, compilation_cache) as processes:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    for output, seed in zip(outputs, (0, 3), strict=True):
        assert "the processes differ in options or versions; start the same" in output
        assert f"  seed: {seed}\n" in output
    assert all("must be one directory that all processes see" in output for output in outputs)
    assert not (tmp_path / "other").exists()
    assert not list(tmp_path.glob("run/*"))
    stops = [re.findall(r"stopped by (\d+) at (\d+)", output) for output in outputs]
    assert stops[0] == stops[1]
    assert stops[0][0][0] == str(signal.SIGTERM.value)
    assert processes[0].returncode == 2
    assert "error: a mistake of the user" in outputs[0]
    assert "Traceback" not in outputs[0]
    assert processes[1].returncode not in (0, 2, None)
