"""What names and files of others can do to a terminal, to Markdown, and to the standard streams."""

from __future__ import annotations

import io
import os
import socket
import subprocess

import aiohttp
import pytest

from experiments.cli.datasets import Datasets
from experiments.cli.main import main
from experiments.core.errors import ConfigError, ExperimentError
from experiments.core.processes import initialize
from experiments.core.terminal import Terminal
from experiments.reporting.markdown import bullets, heading, plain, table
from experiments.reporting.run import report_text
from tests.experiments.several_processes import QUICK_PYTHON, ROOT
from tests.experiments.test_runs import PROTOCOL, REPORT

# Colour, a title of the window, 8-bit control, a delete, a line separator, a change of direction.
_HOSTILE = "\x1b[31mred \x1b]0;title\x07 \x9b1m \x7f \u2028 \u202egnp\u2066"
_SHOWN = r"\x1b[31mred \x1b]0;title\x07 \x9b1m \x7f \u2028 \u202egnp\u2066"


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        (_HOSTILE, "utf-8", _SHOWN),
        ("a\tb\nÄ ⊕̃ 漢字 👩‍👩‍👧", "utf-8", "a\tb\nÄ ⊕̃ 漢字 👩‍👩‍👧"),
        ("\r 10 %\rerror", "utf-8", "\r 10 %\\rerror"),  # A progress bar begins with it.
        ("compiling … Ä", "latin-1", "compiling \\u2026 Ä"),
        ("ä \udce9", "ascii", "\\xe4 \\udce9"),
        ("a file \udce9", "utf-8", "a file \\udce9"),
    ],
)
def test_a_terminal_shows_what_it_would_obey_and_what_it_cannot_encode(text, encoding, shown):
    content = io.BytesIO()
    with io.TextIOWrapper(content, encoding, newline="") as stream:
        print(text, end="", file=Terminal(stream))
        stream.flush()
        assert content.getvalue().decode(encoding) == shown


@pytest.mark.parametrize("error", [None, ExperimentError(_HOSTILE)])
def test_output_and_errors_of_a_command_are_printable(monkeypatch, capsys, error):
    def run(self, command):
        print(_HOSTILE)
        if error:
            raise error
        return 0

    monkeypatch.setattr(Datasets, "run", run)
    assert main(["datasets"]) == (2 if error else 0)
    printed = capsys.readouterr()
    assert printed.out == f"{_SHOWN}\n"
    assert printed.err == (f"error: {_SHOWN}\n" if error else "")


def test_a_mistyped_option_is_a_line_without_the_colours_of_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["train", "icons", "--steps", "abc"]) == 2
    assert capsys.readouterr().err.startswith("error: --steps: 'abc' is no whole number")


def test_a_current_directory_that_is_gone_and_a_narrow_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1")
    with pytest.raises(SystemExit) as stop:
        main(["train", "folder", "--help"])
    assert stop.value.code == 0
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["datasets", "folder:pets"]) == 2
    line = "error: the current directory is gone; change to another one\n"
    assert capsys.readouterr().err == line


def test_text_of_others_is_text_in_markdown():
    hostile = "a\n\n# b <img src=x onerror=y> [c](javascript:d) ![e](f) \\<g> | \x1b[0m"
    safe = r"a # b \<img src=x onerror=y> \[c](javascript:d) !\[e](f) \\\<g> | \\x1b\[0m"
    assert plain(hostile) == safe
    assert bullets([hostile]) == [f"- {safe}"]
    assert heading(hostile) == f"### {safe}"
    cell = safe.replace("|", r"\|")
    names, _, row = table([hostile, "x"], [[hostile, 1]])
    assert (names.count(cell), row.count(cell)) == (1, 1)


def test_nothing_that_a_report_holds_is_a_template():
    names = {"name": "{step:>99}{split}", "value": 0.5, "unit": "%"}
    lines = report_text(PROTOCOL, REPORT | {"validation": names, "label": "{seed}"}).splitlines()
    assert "- Validation: {step:>99}{split} 50.0 %" in lines
    assert "- Loss: {seed}" in lines


@pytest.mark.parametrize(
    ("closed", "environment", "words"),
    [
        ("2>&-", {}, ""),
        (">&- 2>&-", {}, ""),
        ("", {"PYTHONIOENCODING": "latin-1"}, "error: no data set \\u2026;"),
        ("--help", {"PYTHONIOENCODING": "latin-1"}, ""),
        ("", {"LC_ALL": "C", "PYTHONUTF8": "0"}, "error: no data set \\udce2\\udc80\\udca6;"),
    ],
)
def test_streams_that_are_closed_or_lack_characters_are_no_traceback(closed, environment, words):
    command = f'"$@" -m experiments datasets … {closed}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *QUICK_PYTHON],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
    )
    assert done.returncode == (0 if closed == "--help" else 2)
    assert done.stderr.decode("ascii", "backslashreplace").startswith(words)
    assert b"Traceback" not in done.stderr


def test_what_network_memory_and_backend_cause_is_a_line(monkeypatch, capsys):
    def unreachable(self, command):
        raise RuntimeError("while reading") from aiohttp.ClientError("no\nnetwork")

    monkeypatch.setattr(Datasets, "run", unreachable)
    assert main(["datasets"]) == 2
    line = "error: cannot reach Google Cloud Storage: no network\n"
    assert capsys.readouterr().err == line

    def large(self, command):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating\n8 bytes")

    monkeypatch.setattr(Datasets, "run", large)
    assert main(["datasets"]) == 2
    assert "choose a smaller batch, network or image size: RESOURCE" in capsys.readouterr().err

    def absent(*_):
        raise AssertionError

    monkeypatch.setattr(Datasets, "run", absent)
    monkeypatch.setattr("jax.devices", absent)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert main(["datasets"]) == 2
    line = "error: JAX finds no device of JAX_PLATFORMS=cuda; unset it, or set cpu\n"
    assert capsys.readouterr().err == line


def test_a_port_that_is_in_use_is_refused(monkeypatch):
    """JAX would crash of it, in C++."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
        monkeypatch.setenv("JAX_PROCESS_ID", "0")
        with pytest.raises(
            ConfigError, match=f"cannot listen at {address} .* in use.*another port"
        ):
            initialize()
