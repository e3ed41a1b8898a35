"""The directory of a run: one configuration owns it, and one command at a time trains in it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.config import by_name, differences
from experiments.errors import ConfigError, ExperimentError
from experiments.storage import exclusive, write_json

CONFIG_FILE = "config.json"


class ConfigMismatchError(ExperimentError):
    """A directory of another run, or one whose configuration cannot be read."""


def claim_run_directory(directory: Path, config: Mapping[str, Any]) -> None:
    """Makes a directory the home of a run, unless it is that already.

    Args:
      directory: The run's directory; made if it is missing.
      config: The run's configuration, as JSON types.

    Raises:
      ConfigMismatchError: As in `check_run_directory`. Changes no file.
    """
    if not check_run_directory(directory, config):
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / CONFIG_FILE, config)


def check_run_directory(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether a directory belongs to a configuration, so that the run resumes.

    Returns:
      True if it does; False if it is new.

    Raises:
      ConfigMismatchError: The directory belongs to another configuration (the message lists all
        differences), its configuration is damaged, or it holds other files.
    """
    if (directory / CONFIG_FILE).exists():
        there, here = read_config(directory), json.loads(json.dumps(config))
        if lines := differences(by_name(there), by_name(here)):
            raise ConfigMismatchError(
                "\n".join([f"{directory} holds a run of another configuration:", *lines])
                + "\n(left: the run there, right: this one). "
                "Choose another directory, or remove this one."
            )
        return True
    if directory.exists() and not directory.is_dir():
        raise ConfigMismatchError(f"{directory} is a file; choose another directory")
    files = sorted(directory.iterdir()) if directory.exists() else []
    others = [path.name for path in files if not path.name.startswith(".")]
    if others:
        shown = ", ".join(others[:5]) + (", …" if len(others) > 5 else "")
        raise ConfigMismatchError(
            f"{directory} is not a run directory: it holds {shown} but no {CONFIG_FILE}. "
            "Choose another directory."
        )
    return False


def read_config(directory: Path) -> dict[str, Any]:
    """The configuration of the run in a directory.

    Raises:
      ConfigMismatchError: There is none, or it cannot be read.
    """
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it must hold a JSON object, got {type(config).__name__}")
    except FileNotFoundError as error:
        raise ConfigMismatchError(
            f"{directory} is not a run directory: it has no {CONFIG_FILE}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigMismatchError(
            f"{path} is damaged ({error}). Repair it, or choose another directory."
        ) from error
    return config


@contextlib.contextmanager
def exclusive_run(directory: Path) -> Iterator[None]:
    """Keeps other commands from training in a directory while the context lasts.

    With several processes, the first one alone enters it. On an object store, it does nothing.

    Raises:
      ConfigError: Another process is training in the directory.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive(directory / ".lock", wait=False))
        except BlockingIOError:
            raise ConfigError(
                f"another process is training in {directory}; wait for it, or stop it first"
            ) from None
        yield
