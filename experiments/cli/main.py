"""From arguments to a command and an exit status."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from errno import EIO
from typing import Annotated, Any, TextIO, Union

import jax
import tyro

from experiments.cli.benchmark import Benchmark
from experiments.cli.compile import Compile
from experiments.cli.datasets import Datasets, Prepare
from experiments.cli.evaluate import (
    Evaluate,
    Linear,
    Look,
    config_of_arguments,
    evaluate_command,
)
from experiments.cli.parsing import parse
from experiments.cli.power import Power
from experiments.cli.sweep import Compare, Sweep
from experiments.cli.train import Train
from experiments.core.config import TrainConfig
from experiments.core.errors import (
    STANDARD_OUTPUT,
    ExperimentError,
    full_disk,
    unreachable,
    unwritten,
)
from experiments.core.processes import Interrupted, is_first, run_together
from experiments.core.storage import cache_folder
from experiments.core.terminal import Terminal
from experiments.papers.presets import PRESETS, few_shot

_COMMANDS: dict[str, tuple[Any, Iterable[str]]] = {
    "train": (Train, PRESETS),
    "evaluate": (Evaluate, ()),
    "linear": (Linear, ()),
    "look": (Look, ()),
    "compare": (Compare, few_shot.PRESETS),
    "sweep": (Sweep, PRESETS),
    "power": (Power, ()),
    "datasets": (Datasets, ()),
    "prepare": (Prepare, ()),
    "benchmark": (Benchmark, ()),
    "compile": (Compile, PRESETS),
}
"""The type of every command, and the presets whose options it has."""


def command_type(evaluated: TrainConfig | None = None) -> Any:
    """The type of a command; `evaluate` has the options of the run that it evaluates, if known."""
    types: list[Any] = []
    for name, (kind, presets) in _COMMANDS.items():
        kind = evaluate_command(evaluated) if kind is Evaluate else kind
        marks = (tyro.conf.CascadeSubcommandArgs,) * bool(presets)
        types.append(Annotated[(kind, tyro.conf.subcommand(name), *marks)])
    return Union[tuple(types)]  # noqa: UP007


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; an error that the user can fix is a message without a traceback.

    Returns 0; 2 for what the user can fix; 3 where a run diverged; 128 and the number of the signal
    that stopped it, after a saved step (`Interrupted`) or at once; 141 where the reader of a pipe
    has ended. With `--distributed`, errors are those of `run_together` (PODS.md, "How a run ends").
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    unchanged = sys.stdout
    output: Any = unchanged and Terminal(unchanged)
    errors: Any = Terminal(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        return _main(arguments, unchanged)


def _main(arguments: list[str], unchanged: TextIO) -> int:
    logging.basicConfig(format="%(message)s")  # Before a library does, with prefixes.
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]) < 40:
        os.environ["COLUMNS"] = "40"  # The layout of help has no end below that.
    try:
        _check_current_directory()
        _configure_jax()
        evaluates = arguments[:1] == ["evaluate"]
        with _explained():
            evaluated = config_of_arguments(arguments[1:]) if evaluates else None
        presets = {name: known for name, (_, known) in _COMMANDS.items()}
        with contextlib.redirect_stdout(unchanged):  # Help has colours.
            command = parse(command_type(evaluated), arguments, presets)
        typed = ["python", "-m", "experiments", *arguments]
        execution = vars(command).get("execution")  # Of the commands that train.
        if execution is not None and execution.distributed:
            return run_together(lambda: _status(command, typed, distributed=True))
        return _status(command, typed)
    except KeyboardInterrupt:
        again = "continue from the last checkpoint, if there is one"
        trains = arguments[:1] in (["train"], ["compare"], ["sweep"])
        print(
            f"\nstopped; run the same command to {again if trains else 'start it again'}",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has ended.
        _drop_output()
        return 128 + signal.SIGPIPE


def _check_current_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ExperimentError("the current directory is gone; change to another one") from error


def _drop_output() -> None:
    """Keeps Python from writing at its end what standard output has not taken."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _configure_jax() -> None:
    """Where JAX keeps compiled programs, and no errors of libtpu where there is no TPU."""
    options: Any = jax.config
    if options.jax_compilation_cache_dir is None:
        folder = cache_folder("programs")
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # With a limit, JAX locks the folder: no command reads what another one is writing.
        jax.config.update("jax_compilation_cache_max_size", 2**32)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        # JAX has a warning of two lines for each program that does not fit on a full disk.
        warnings.filterwarnings("ignore", message="Error writing persistent compilation cache")
        if folder.exists() and shutil.disk_usage(folder).free < 2**22:
            print(f"{folder}: no space left; programs are compiled again", file=sys.stderr)
    # JAX has set the first variable where it found no TPU. There, libtpu, if installed, would print
    # errors that it knows neither of the others.
    devices = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    if "TPU_SKIP_MDS_QUERY" in os.environ and not devices:
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def _status(command: Any, typed: list[str], *, distributed: bool = False) -> int:
    """The exit status of a command; of several processes, the first one alone prints to stdout."""
    try:
        shown = sys.stdout if not distributed or is_first() else None
        with _explained(), contextlib.redirect_stdout(shown):
            status = command.run(typed)
            print(end="", flush=True)  # A full disk is noticed here.
            return status
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 128 + stop.signal_number


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises an `ExperimentError` for what a disk, memory, the network or JAX_PLATFORMS causes."""
    try:
        yield
    except (ExperimentError, BrokenPipeError, Interrupted):
        raise
    except Exception as error:
        if reason := full_disk(error):
            if (place := unwritten(error)) == STANDARD_OUTPUT:
                _drop_output()
            raise ExperimentError(f"cannot write {place}: {reason}") from error
        if isinstance(error, OSError) and (error.filename or error.errno == EIO):
            place = f"{error.filename}: " if error.filename else ""  # Such as one that is a file.
            raise ExperimentError(f"{place}{error.strerror}") from error
        if reason := unreachable(error):
            raise ExperimentError(f"cannot reach Google Cloud Storage: {reason}") from error
        words = ("RESOURCE_EXHAUSTED", "Out of memory")  # Of XLA, in a JaxRuntimeError.
        if isinstance(error, MemoryError) or any(word in str(error) for word in words):
            raise ExperimentError(
                "there is not enough memory; choose a smaller batch, network or image size: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error
        if platforms := os.environ.get("JAX_PLATFORMS"):
            try:
                jax.devices()
            except Exception:  # An AssertionError without a word, or a RuntimeError.
                raise ExperimentError(
                    f"JAX finds no device of JAX_PLATFORMS={platforms}; unset it, or set cpu"
                ) from error
        raise
