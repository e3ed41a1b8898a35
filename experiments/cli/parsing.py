"""From the arguments of a command line to a command; every mistake in them is a line."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tyro

from experiments.cli.options import storage_paths
from experiments.core.errors import ConfigError, unknown
from experiments.papers.presets import REMOVED

PROG = "python -m experiments"
_REMOVED = {
    "mesh": "the batch is spread over all devices; to spread classes, use the library as in "
    "docs/recipes/million_classes.md",
    "data.cutmix": "use --data.mixup",
    "data.trivial-augment": "use --data.crop-scale and --data.color-jitter",
    "data.erasing": "use --data.crop-scale and --data.color-jitter",
}
"""Options of earlier versions, and what to do in place of them."""


def parse(kind: Any, arguments: Sequence[str], presets: Mapping[str, Iterable[str]]) -> Any:
    """The command of a type that arguments name; a `ConfigError` of one line where they are wrong.

    `presets` has for every command those that its next word is one of.
    """
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments[:2]))
    if words and words[0] not in presets:
        raise unknown("command", words[0], presets)
    if words and not presets[words[0]]:
        words = words[:1]
    elif len(words) == 2 and words[1] not in presets[words[0]]:
        raise unknown("preset", words[1], presets[words[0]], removed=REMOVED)
    more = f"{' '.join([PROG, *words])} --help"

    def read(given: Sequence[str]) -> tuple[Any, list[str]]:
        description = "The papers' experiments on losses that shape a feature space."
        with storage_paths():
            return tyro.cli(
                kind, prog=PROG, description=description, args=given, return_unknown_args=True
            )

    refused = io.StringIO()
    try:
        with contextlib.redirect_stderr(refused):
            command, unread = read(arguments)
    except SystemExit as stop:
        if not stop.code:
            raise
        text = _in_a_line(_without_colours(refused.getvalue()))
        more = "" if text.endswith("?") else f"; {more} lists what there is"
        raise ConfigError(text + more) from None
    sys.stderr.write(_without_colours(refused.getvalue()))
    if not unread:
        return command
    name = next((word for word in unread if word.startswith("--")), "").partition("=")[0]
    if not name:
        raise ConfigError(f"{unread[0]!r} is one word too many; {more} lists what there is")
    shown = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
        read([*words, "--help"])
    options = dict.fromkeys(
        re.findall(r"(?<=--)[a-z][a-z0-9.-]*", _without_colours(shown.getvalue()))
    )
    others = f"{more} lists them"
    raise unknown("option", name[2:], options, others, prefix="--", removed=_REMOVED)


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _in_a_line(box: str) -> str:
    """What tyro says in the first part of its box, or why a value of the last type was refused.

    A value that is not one of the choices gets the nearest.
    """
    # The title is in the upper edge of the box or, in ASCII, over a line.
    rows = [row.strip("│╭╮╰╯ ") for row in box.splitlines()[1:]]
    parts = itertools.groupby(rows, key=lambda row: bool(row.strip("─-")))
    text = " ".join(next((part for filled, part in parts if filled), []))
    if found := re.match(
        r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", text
    ):
        value, option, choices = found.groups()
        known = re.findall("'([^']*)'", choices)
        return f"{option}: {unknown('value', value, known)}"
    text = text.removeprefix("Error parsing ").rstrip(". ")
    text = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is no whole number", text)
    text = re.sub("could not convert string to float: (.*)", r"\1 is no number", text)
    if reasons := re.findall(r"- <class '[^']*'>: (.*?)(?= - <class| [─-]{9})", " ".join(rows)):
        return f"{text.partition(': ')[0]}: {reasons[-1]}"
    return text
