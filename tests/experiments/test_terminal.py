"""What names and files of others can do to a terminal, and to Markdown."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.cli.commands import Datasets
from experiments.cli.main import main
from experiments.core.errors import ExperimentError
from experiments.core.terminal import Terminal
from experiments.reporting.markdown import bullets, heading, plain, table

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
        ("a file \udce9", "utf-8", "a file \\udce9"),
    ],
)
def test_a_terminal_shows_what_it_would_obey_and_what_it_cannot_encode(text, encoding, shown):
    content = io.BytesIO()
    with io.TextIOWrapper(content, encoding, newline="") as stream:
        terminal: Any = Terminal(stream)
        print(text, end="", file=terminal, flush=True)
        assert content.getvalue().decode(encoding) == shown
        assert terminal.encoding == encoding
        del terminal  # It leaves the stream open.
        stream.write("more")


@pytest.mark.parametrize(
    ("error", "status"), [(ExperimentError(_HOSTILE), 2), (ValueError(_HOSTILE), 1)]
)
def test_output_and_errors_of_a_command_are_printable(monkeypatch, capsys, error, status):
    def run(self, typed):
        print(_HOSTILE)
        raise error

    monkeypatch.setattr(Datasets, "run", run)
    assert main(["datasets"]) == status
    printed = capsys.readouterr()
    assert printed.out == f"{_SHOWN}\n"
    assert _SHOWN in printed.err
    assert "\x1b" not in printed.err


def test_a_stream_may_be_that_of_a_notebook_or_closed(monkeypatch):
    assert Terminal(SimpleNamespace(isatty=lambda: True)).isatty()  # It cannot `reconfigure`.
    monkeypatch.setattr("sys.stderr", None)
    assert main(["power", "--deviation", "1", "--effect", "0"]) == 2


def test_text_of_others_is_text_in_markdown():
    hostile = "a\n\n# b <img src=x onerror=y> [c](javascript:d) ![e](f) \\<g> | \x1b[0m"
    safe = r"a # b \<img src=x onerror=y> \[c](javascript:d) !\[e](f) \\\<g> | \\x1b\[0m"
    assert plain(hostile) == safe
    assert bullets([hostile]) == [f"- {safe}"]
    assert heading(hostile) == f"### {safe}"
    cell = safe.replace("|", r"\|")
    names, _, row = table([hostile, "x"], [[hostile, 1]])
    assert (names.count(cell), row.count(cell)) == (1, 1)
