"""From arguments to a command and an exit status."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import jax
import tyro

from experiments.cli.commands import COMMANDS
from experiments.core.errors import reason_of, unknown
from experiments.core.processes import Interrupted, is_first, run_together
from experiments.core.storage import cache_folder, storage_path
from experiments.core.terminal import Terminal

_HELP = ("-h", "--help")


def parse(words: Sequence[str]) -> Any:
    """The command that the words of a command line name.

    Raises a `ConfigError` for an unknown command or preset; tyro prints what is wrong with an
    option, and ends the program with status 2.
    """
    name, *options = words or _HELP
    if name in _HELP:
        _print_help("COMMAND", {name: kind.__doc__ for name, kind in COMMANDS.items()})
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    kind, start = COMMANDS[name], {}
    if name == "evaluate" and len(options) == 2 and options[1] in _HELP:
        from experiments.run import evaluation_of_run

        if own := evaluation_of_run(storage_path(options[0])):  # Else the help of the command.
            _print_help(f"evaluate {options[0]} --set OPTION=VALUE", own)
    if "config" in {field.name for field in fields(kind)}:
        from experiments.papers.presets import PRESETS, find_preset

        preset, *options = options or _HELP
        if preset in _HELP:
            _print_help(f"{name} PRESET", {name: of.description for name, of in PRESETS.items()})
        start, name = {"default": kind(find_preset(preset).config)}, f"{name} {preset}"
    return tyro.cli(kind, prog=f"python -m experiments {name}", args=options, **start)


def _print_help(usage: str, lines: Mapping[str, str]) -> NoReturn:
    """Lists what the last word of `usage` can be, and ends the program."""
    print(f"usage: python -m experiments {usage} [OPTIONS]\n")
    for name, text in lines.items():
        print(f"  {name:{max(map(len, lines))}}  {text.partition(chr(10))[0]}")
    sys.exit()


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command; an error that the user can fix is a message without a traceback.

    Returns 0; 2 for what the user can fix; 3 where a run diverged; 128 and the number of the signal
    that stopped it, after a saved step (`Interrupted`) or at once; 141 where the reader of a pipe
    has ended; 1 for any other error. With `--distributed`, errors are those of `run_together`
    (PODS.md, "How a run ends").
    """
    words = sys.argv[1:] if words is None else words
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # It was closed.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    output: Any = Terminal(sys.stdout)
    errors: Any = Terminal(sys.stderr)
    try:
        command = parse(words)  # Prints help with colours, which `Terminal` would not.
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            logging.basicConfig(format="%(message)s")  # Before a library does, with prefixes.
            _configure_jax()
            status = _run(command, shlex.join(["python", "-m", "experiments", *words]))
            output.flush()  # A full disk is noticed here.
            return status
    except KeyboardInterrupt:
        print("\nstopped; run the same command to continue or to start again", file=errors)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has ended.
        status = 128 + signal.SIGPIPE
    except Exception as error:
        reason = reason_of(error)
        print(f"error: {reason}" if reason else traceback.format_exc(), file=errors)
        status = 2 if reason else 1
    try:
        sys.stdout.flush()
    except OSError:  # Else Python would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _run(command: Any, typed: str) -> int:
    """The exit status of a command; of several processes, only the first prints to stdout."""

    def run(shown: Any) -> int:
        try:
            with contextlib.redirect_stdout(shown):
                return command.run(typed)
        except Interrupted as stop:
            print(stop, file=sys.stderr)
            return 128 + stop.signal_number

    execution = vars(command).get("execution")  # Of the commands that train.
    if execution is not None and execution.distributed:
        return run_together(lambda: run(sys.stdout if is_first() else None))
    return run(sys.stdout)


def _configure_jax() -> None:
    """Where JAX keeps compiled programs, and no errors of libtpu where there is no TPU."""
    options: Any = jax.config
    if options.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("programs")))
        # With a limit, JAX locks the folder: no command reads what another one is writing.
        jax.config.update("jax_compilation_cache_max_size", 2**32)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        # JAX has a warning of two lines for each program that does not fit on a full disk.
        warnings.filterwarnings("ignore", message="Error writing persistent compilation cache")
    if "TPU_SKIP_MDS_QUERY" in os.environ:  # JAX sets it where it finds no TPU.
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
