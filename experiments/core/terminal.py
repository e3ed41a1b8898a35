"""What a terminal shows: names of classes and files may have been chosen by others."""

from __future__ import annotations

import re
from typing import Any

# Control characters, of which ESC begins a sequence that the terminal obeys, line separators, and
# marks that change the direction of what follows.
_HIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with escapes, such as `\\x1b`, for all that a terminal obeys instead of showing it.

    Tabs and the ends of lines stay.
    """
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Text that is `printable`, with escapes for tabs and the ends of lines, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def has_controls(text: str) -> bool:
    """Whether a name has control characters or ends of lines."""
    return re.search("[\0-\x1f\x7f-\x9f\u2028\u2029]", text) is not None


class Terminal:
    """A text stream that writes `printable` text, with escapes for what its encoding lacks.

    Other attributes are those of the stream, such as its encoding and whether it is a terminal.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        if hasattr(stream, "reconfigure"):  # Not of a notebook.
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text; a carriage return at its beginning, as of a progress bar, stays one."""
        start = "\r" * text.startswith("\r")
        return self._stream.write(start + printable(text[len(start) :]))
