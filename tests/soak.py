"""Many random faults in runs, which must end as if nothing had happened.

    make soak FAULTS=30 SEED=0                                      # two processes of two devices
    python -m tests.soak --processes 1 --only SIGKILL --faults 30   # one process

A fault hits a random process at a random moment of its start, its training or its end: SIGKILL,
SIGTERM, Ctrl-C, SIGSTOP for up to 25 seconds, or a full disk. After each, the processes are started
again if they have ended. A run that has ended must equal the undisturbed one bit for bit. Then a
new one begins, until all faults are spent; every second one has its directory on an emulated object
store. Prints a line for every fault.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from experiments.core.storage import storage_path
from tests.experiments.several_processes import object_store, start
from tests.experiments.tiny_runs import assert_equal_runs

COMMAND = [
    *("-m", "experiments", "train", "icons", "--loss.name", "nca"),
    *("--sampling.batch-size", "16", "--model.widths", "4", "4", "4", "32", "--log-every", "50"),
    *("--evaluation.validation-episodes", "20", "--evaluation.episodes", "20"),
    *("--steps", "800", "--validate-every", "20"),
]
DISK = 64 * 2**20
"""Bytes of the disk that the runs are on."""
LIMIT_SECONDS = 60
"""Within so long after a fault that ends them, all processes must have ended."""
FAULTS = ("SIGKILL", "SIGKILL of all", "SIGTERM", "SIGINT", "SIGSTOP")

Processes = list[subprocess.Popen[str]]


def wait(processes: Processes, seconds: float) -> bool:
    """Waits until all processes have ended; returns whether they have."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    return all(process.poll() is not None for process in processes)


def inflict(fault: str, processes: Processes, disk: Path, rng: np.random.Generator) -> str:
    """Lets a fault happen to one of the processes, or to all; returns what it was."""
    rank = int(rng.integers(len(processes)))
    if fault == "full disk":
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * (1 << 16))
        wait(processes, LIMIT_SECONDS)
        (disk / "ballast").unlink()
        return fault
    for process in processes if fault == "SIGKILL of all" else [processes[rank]]:
        process.send_signal(signal.Signals[fault.split()[0]])
    if fault == "SIGSTOP":
        seconds = float(rng.uniform(1, 25))
        wait(processes, seconds)
        processes[rank].send_signal(signal.SIGCONT)
        return f"SIGSTOP to process {rank} for {seconds:.0f} s"
    return fault if fault == "SIGKILL of all" else f"{fault} to process {rank}"


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of `DISK` bytes in memory, which needs the rights to mount it."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=False)


def main() -> int:
    """Runs the faults; the exit status is 1 if a run differs or a process does not end."""
    parser = argparse.ArgumentParser(description="Random faults in runs of one or two processes.")
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2))
    parser.add_argument("--only", choices=FAULTS, help="a fault; by default any")
    arguments = parser.parse_args()
    number_of_processes = arguments.processes
    rng = np.random.default_rng(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    command = [*COMMAND, "--data-dir", str(folder / "data")]
    command += ["--distributed", "--directory"] if number_of_processes > 1 else ["--directory"]
    done, failures, number = collections.Counter(), [], 0
    with small_disk(folder / "disk") as disk, object_store(folder / "store") as variables:
        os.environ.update(variables)
        bucket = storage_path("gs://bucket")
        whole, started = folder / "whole", time.monotonic()
        with start([[*command, str(whole)]] * number_of_processes, folder / "xla") as processes:
            outputs = [process.communicate()[0] for process in processes]
            if any(process.returncode for process in processes):
                print(*outputs, sep="\n")
                return 1
        of_whole = time.monotonic() - started
        print(f"undisturbed: {of_whole:.0f} s for a run", flush=True)
        for number in itertools.count(1):
            if done.total() >= arguments.faults:
                break
            place = disk if number % 2 else bucket
            directory, statuses = place / f"run{number}", [None]
            commands = [[*command, str(directory)]] * number_of_processes
            while any(status != 0 for status in statuses):
                with start(commands, folder / "xla") as processes:
                    what, fault = "no fault", ""
                    # Most moments of a run are equally likely, its start and its end among them.
                    spent = done.total() >= arguments.faults
                    if not spent and not wait(processes, rng.uniform(0, 0.7 * of_whole)):
                        faults = [*FAULTS, *["full disk"] * (place is disk)]
                        fault = arguments.only or str(rng.choice(faults))
                        what = inflict(fault, processes, disk, rng)
                        done[fault] += 1
                    moment = time.monotonic()
                    survives = fault in ("", "SIGSTOP")
                    ended = wait(processes, 10 * of_whole if survives else LIMIT_SECONDS)
                    seconds = time.monotonic() - moment
                    statuses = [process.poll() for process in processes]
                    for process in processes:
                        process.kill()
                    outputs = [process.communicate()[0] for process in processes]
                line = f"{done.total()}. {directory.name}, {what}"
                print(f"{line}: ended with {statuses} after {seconds:.0f} s", flush=True)
                # A process that waits for one that was hit before it had joined waits rightly.
                joined = all("steps" in output for output in outputs[:1])
                if (not ended and joined) or (fault == "" and any(statuses)):
                    failures.append(f"{line}: ended with {statuses}")
                    print(*(output[-3000:] for output in outputs), sep="\n", flush=True)
                    if fault == "":
                        break
            if not any(statuses):
                try:
                    assert_equal_runs(directory, whole)
                except AssertionError as error:
                    failures.append(f"{directory.name}: {error}")
            if place is disk:
                shutil.rmtree(directory)
    print(f"{number - 1} runs, {done.total()} faults: {dict(done)}")
    print(*(failures or ["every run ended as the undisturbed one, bit for bit"]), sep="\n")
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(main())
