"""From arguments to a command and an exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from errno import EDQUOT, EIO, ENOSPC
from typing import Annotated, Any

import jax
import tyro

from experiments.cli.benchmark import Benchmark
from experiments.cli.compile import Compile
from experiments.cli.datasets import Datasets, Prepare
from experiments.cli.evaluate import Linear, Look, config_of_arguments, evaluate_command
from experiments.cli.options import storage_paths
from experiments.cli.power import Power
from experiments.cli.settings import Settings
from experiments.cli.sweep import Compare, Sweep
from experiments.cli.train import Train
from experiments.config import TrainConfig
from experiments.errors import ExperimentError
from experiments.processes import Interrupted, is_first, run_together
from experiments.storage import cache_folder


def command_type(evaluated: TrainConfig | None = None) -> Any:
    """The type of a command; `evaluate` has the options of the run that it evaluates, if known."""
    evaluate: Any = Annotated[evaluate_command(evaluated), tyro.conf.subcommand("evaluate")]
    return (
        Annotated[Train, tyro.conf.subcommand("train"), tyro.conf.CascadeSubcommandArgs]
        | evaluate
        | Annotated[Linear, tyro.conf.subcommand("linear")]
        | Annotated[Look, tyro.conf.subcommand("look")]
        | Annotated[Compare, tyro.conf.subcommand("compare"), tyro.conf.CascadeSubcommandArgs]
        | Annotated[Sweep, tyro.conf.subcommand("sweep"), tyro.conf.CascadeSubcommandArgs]
        | Annotated[Power, tyro.conf.subcommand("power")]
        | Annotated[Settings, tyro.conf.subcommand("settings")]
        | Annotated[Datasets, tyro.conf.subcommand("datasets")]
        | Annotated[Prepare, tyro.conf.subcommand("prepare")]
        | Annotated[Benchmark, tyro.conf.subcommand("benchmark")]
        | Annotated[Compile, tyro.conf.subcommand("compile"), tyro.conf.CascadeSubcommandArgs]
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; an error that the user can fix is a message without a traceback.

    Returns 0; 2 for what the user can fix; 3 where a run diverged; 128 and the number of the signal
    that stopped it, after a saved step (`Interrupted`) or at once; 141 where the reader of a pipe
    has ended. With `--distributed`, errors are those of `run_together` (PODS.md, "How a run ends").
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("programs")))
        # With a limit, JAX locks the folder: no command reads what another one is writing.
        jax.config.update("jax_compilation_cache_max_size", 2**32)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        evaluated = config_of_arguments(arguments[1:]) if arguments[:1] == ["evaluate"] else None
        with storage_paths():
            command: Any = tyro.cli(
                command_type(evaluated),
                prog="python -m experiments",
                description="The papers' experiments on losses that shape a feature space.",
                args=arguments,
            )
        typed = ["python", "-m", "experiments", *arguments]
        execution = vars(command).get("execution")  # Of the commands that train.
        if execution is not None and execution.distributed:
            return run_together(lambda: _status(command, typed, distributed=True))
        return _status(command, typed)
    except KeyboardInterrupt:
        message = "stopped; run the same command to continue from the last checkpoint"
        print(message, file=sys.stderr)
        return 128 + signal.SIGINT
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _status(command: Any, typed: list[str], *, distributed: bool = False) -> int:
    """The exit status of a command; of several processes, the first one alone prints to stdout."""
    try:
        with contextlib.redirect_stdout(sys.stdout if not distributed or is_first() else None):
            return command.run(typed)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 128 + stop.signal_number
    except OSError as error:  # Such as a full disk, or a folder that is a file.
        if error.filename is None and error.errno not in (ENOSPC, EDQUOT, EIO):
            raise
        place = "" if error.filename is None else f"{error.filename}: "
        raise ExperimentError(f"{place}{error.strerror}") from error
