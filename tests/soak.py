"""Many random faults in runs of 2×2 devices, which must end as if nothing had happened.

    make soak FAULTS=50 SEED=0

A fault hits a random process at a random moment of its start, its training or its end: SIGKILL,
SIGTERM, Ctrl-C, SIGSTOP for up to 25 seconds, a full disk, or 20 seconds without the object store.
After each, the processes are started again if they have ended. A run that has ended must equal the
undisturbed one bit for bit. Then a new one begins, until all faults are spent; every second one has
its directory on an emulated object store. Prints a line for every fault.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import chex
import numpy as np

from experiments.liveness import AGAIN
from experiments.storage import storage_path
from tests.experiments.object_store_server import Server
from tests.experiments.several_processes import start
from tests.experiments.tiny_runs import final_state, metrics_without_clock

COMMAND = [
    *("-m", "experiments", "train", "icons", "--distributed", "--loss.name", "nca"),
    *("--sampling.batch-size", "16", "--model.widths", "4", "4", "4", "32", "--log-every", "50"),
    *("--evaluation.validation-episodes", "20", "--evaluation.episodes", "20"),
    *("--steps", "800", "--validate-every", "20"),
]
DISK = 64 * 2**20
"""Bytes of the disk that the runs are on."""
LIMIT_SECONDS = 60
"""Within so long after a fault that ends them, all processes must have ended."""
SENTENCES = ("error: ", "stopped at step ", "stopped; ", "process ")
JOINING = "waiting for the other processes of the run to start"
"""Printed by a process that will wait for the others for some minutes: where one was hit before it
had joined, the other one rightly waits until it is started again."""


class Run:
    """The processes of one attempt, and what they write to."""

    def __init__(self, processes: list[subprocess.Popen[str]], disk: Path, server: Server):
        self.processes = processes
        self.disk = disk
        self.server = server

    def send(self, rank: int, number: int) -> None:
        """A signal to one process, if it lives."""
        if self.processes[rank].poll() is None:
            self.processes[rank].send_signal(number)

    def ended(self) -> bool:
        """Whether all processes have."""
        return all(process.poll() is not None for process in self.processes)

    def wait(self, seconds: float) -> bool:
        """Waits until all processes have ended; returns whether they have."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.ended():
            time.sleep(0.05)
        return self.ended()


def _signal(number: int) -> Callable[[Run, np.random.Generator], str]:
    def fault(run: Run, rng: np.random.Generator) -> str:
        rank = int(rng.integers(2))
        run.send(rank, number)
        return f"{signal.Signals(number).name} to process {rank}"

    return fault


def _all_killed(run: Run, rng: np.random.Generator) -> str:
    for rank in (0, 1):
        run.send(rank, signal.SIGKILL)
    return "SIGKILL to both processes"


def _paused(run: Run, rng: np.random.Generator) -> str:
    rank, seconds = int(rng.integers(2)), float(rng.uniform(1, 25))
    run.send(rank, signal.SIGSTOP)
    run.wait(seconds)
    run.send(rank, signal.SIGCONT)
    return f"SIGSTOP to process {rank} for {seconds:.0f} s"


def _full_disk(run: Run, rng: np.random.Generator) -> str:
    ballast, left = run.disk / "ballast", shutil.disk_usage(run.disk).free
    with ballast.open("wb") as file:
        try:
            while left > 0:
                left -= file.write(b"\0" * min(left, 1 << 16))
        except OSError:
            pass
    run.wait(LIMIT_SECONDS)
    ballast.unlink()
    return "the disk is full"


def _outage(run: Run, rng: np.random.Generator) -> str:
    run.server.stop()
    run.wait(20)
    run.server.start()
    return "no object store for 20 s"


ANYWHERE = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGKILL of all": _all_killed,
    "SIGTERM": _signal(signal.SIGTERM),
    "Ctrl-C": _signal(signal.SIGINT),
    "SIGSTOP": _paused,
}
ON_DISK = {**ANYWHERE, "full disk": _full_disk}
ON_STORE = {**ANYWHERE, "outage": _outage}
HARMLESS = ("SIGSTOP", "outage")
"""Faults that a run may survive."""


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
    parser = argparse.ArgumentParser(description="Random faults in runs of several processes.")
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    data = folder / "data"
    command = [*COMMAND, "--data-dir", str(data), "--directory"]

    server = Server(folder / "store")
    os.environ.update(server.environment)
    bucket = storage_path("gs://bucket")
    from experiments.object_store import _client

    _client().create_bucket("bucket")

    @contextmanager
    def attempt(directory: Path) -> Iterator[Run]:
        with start([[*command, str(directory)]] * 2, folder / "xla") as processes:
            yield Run(processes, folder / "disk", server)

    with small_disk(folder / "disk") as disk:
        started = time.monotonic()
        with attempt(folder / "whole") as run:
            outputs = [process.communicate()[0] for process in run.processes]
            if any(process.returncode for process in run.processes):
                print(*outputs, sep="\n")
                return 1
        of_whole = time.monotonic() - started
        print(f"undisturbed: {of_whole:.0f} s for a run", flush=True)
        done, number, failures = collections.Counter(), 0, []
        left = {on: _shuffled(faults, rng) for on, faults in ((disk, ON_DISK), (bucket, ON_STORE))}
        while done.total() < arguments.faults:
            number += 1
            place, faults = ((disk, ON_DISK), (bucket, ON_STORE))[(number + 1) % 2]
            directory = place / f"run{number}"
            while True:
                with attempt(directory) as run:
                    # Most moments of a run are equally likely, its start and its end among them.
                    kind, what = None, "no fault"
                    more = done.total() < arguments.faults
                    if more and not run.wait(rng.uniform(0, 0.7 * of_whole)):
                        kind = next(left[place])
                        what = faults[kind](run, rng)
                        done[kind] += 1
                    moment = time.monotonic()
                    free = kind is None or kind in HARMLESS
                    ended = run.wait(10 * of_whole if free else LIMIT_SECONDS)
                    seconds = time.monotonic() - moment
                    statuses = [process.poll() for process in run.processes]
                    for process in run.processes:
                        process.kill()
                    outputs = [process.communicate()[0] for process in run.processes]
                line = f"{done.total()}. {directory.name}, {what}"
                print(f"{line}: ended with {statuses} after {seconds:.0f} s", flush=True)
                ends = [*zip(statuses, outputs, strict=True)]
                waits = any(status is None and _joins(output) for status, output in ends)
                problems = [] if ended or waits else ["the processes did not end"]
                allowed = {0, AGAIN, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT}
                if waits or not any(output for _, output in ends):  # Hit before they had joined.
                    allowed |= {-signal.SIGTERM, -signal.SIGINT, None}
                if kind == "full disk":
                    allowed.add(2)
                if not {*statuses} <= allowed:
                    problems.append("an exit status that this fault cannot explain")
                for rank, (status, output) in enumerate(ends):
                    if status is None or status <= 0:
                        continue
                    sentence = _last_sentence(output)
                    print(f"     process {rank}: {sentence}", flush=True)
                    if not sentence:
                        problems.append(f"process {rank} ended without a sentence")
                if kind is None and statuses != [0, 0]:
                    problems.append("the run did not end well")
                if problems:
                    failures += [f"{line}: {problem}" for problem in problems]
                    print(*(output[-3000:] for output in outputs), sep="\n", flush=True)
                if kind is None and statuses != [0, 0]:
                    break
                if statuses == [0, 0]:
                    failures += _differences(directory, folder / "whole", number)
                    break
            if place is disk:
                shutil.rmtree(directory)
    print(f"{number} runs, {done.total()} faults: {dict(done)}")
    print(
        *(failures or ["every run ended as the undisturbed one, bit for bit; nothing was moved"]),
        sep="\n",
    )
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if failures else 0


def _shuffled(names: Iterable[str], rng: np.random.Generator) -> Iterator[str]:
    """All names in random order, again and again."""
    while True:
        yield from map(str, rng.permutation([*names]))


def _last_sentence(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(SENTENCES)]
    return lines[-1] if lines else ""


def _joins(output: str) -> bool:
    """Whether a process still waited for the others to start."""
    return output.strip().endswith(JOINING)


def _differences(directory: Path, whole: Path, number: int) -> list[str]:
    found = [
        f"run {number}: {p.name} was moved" for p in (directory / "checkpoints").glob("damaged-*")
    ]
    try:
        chex.assert_trees_all_equal(final_state(directory), final_state(whole))
    except AssertionError:
        found.append(f"run {number}: the final state differs")
    if metrics_without_clock(directory) != metrics_without_clock(whole):
        found.append(f"run {number}: the metrics differ")
    return found


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(main())
