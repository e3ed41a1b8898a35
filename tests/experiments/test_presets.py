"""Presets on embedded data keep their settings; the commands that presets state can start."""

import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tyro

from experiments import grid
from experiments.assembly import plan_run
from experiments.cli.main import command_type
from experiments.config import get_option
from experiments.presets import (
    MODULES,
    PRESETS,
    few_shot,
    group_softmax,
    multi_label,
    negative_margin,
    two_way,
)
from experiments.protocols import build_protocol
from tests.experiments.published import PUBLISHED


@pytest.mark.parametrize("name", [n for n in negative_margin.PRESETS if n != "icons-margin"])
def test_the_scale_of_negative_margins_is_the_papers(name):
    softmax = 10 if "resnet12" in name else 5
    scale = build_protocol(PRESETS[name].config).description["scale"]
    assert scale == (softmax if "softmax" in name else 30)


def stated_commands(module: ModuleType) -> list[str]:
    """The commands in the docstring and the comments of a file, of its last preset.

    A command goes on after a backslash, or in lines that are indented deeper.
    """
    text = Path(module.__file__ or "").read_text(encoding="utf-8")
    found: list[str] = []
    indent = None
    for line in re.sub(r"^ *#", "", text, flags=re.MULTILINE).splitlines():
        words, own = line.strip().removesuffix("\\"), len(line) - len(line.lstrip())
        if words.startswith("python -m experiments "):
            found.append(words.removeprefix("python -m experiments "))
            indent = own
        elif indent is not None and words and own > indent:
            # An axis may be broken after a comma.
            found[-1] += words if found[-1].endswith(",") else f" {words}"
        else:
            indent = None
    preset = [*module.PRESETS][-1]
    remark = re.compile(r"   \(.*\)$")
    return list(dict.fromkeys(remark.sub("", line).replace("PRESET", preset) for line in found))


COMMANDS = [(module, command) for module in MODULES for command in stated_commands(module)]


def test_all_kinds_of_commands_are_found():
    found = {(module, command.split()[0]) for module, command in COMMANDS}
    assert {(few_shot, "compare"), (few_shot, "sweep"), (group_softmax, "train")} <= found
    assert {(multi_label, "sweep"), (two_way, "linear"), (negative_margin, "evaluate")} <= found


@pytest.mark.parametrize(("module", "command"), COMMANDS)
def test_a_stated_command_can_start(module, command, tmp_path, monkeypatch):
    weights = tmp_path / "resnet50.safetensors"
    weights.touch()
    words = [str(weights) if word == weights.name else word for word in shlex.split(command)]
    evaluated: Any = [*module.PRESETS.values()][-1].config if words[0] == "evaluate" else None
    parsed: Any = tyro.cli(command_type(evaluated), args=words)
    if words[0] == "train":
        plan_run(parsed.config)
    if words[0] == "evaluate" and parsed.over:
        plan_ends(evaluated, [grid.parse_axis(text, evaluated) for text in parsed.over])
    if words[0] in ("sweep", "compare"):

        def run_grid(config, over, seeds, directory, *rest, **options):
            plan_ends(config, over)
            raise Planned

        monkeypatch.setattr(grid, "run_grid", run_grid)
        with pytest.raises(Planned):
            parsed.run(words)


class Planned(Exception):
    """The grid could start."""


def plan_ends(config, over):
    """Plans the first and the last run of a grid."""
    cells = grid.make_cells(config, over, [0], Path("root"))
    for cell in (cells[0], cells[-1]):
        plan_run(cell.config)


OPTIONS = (
    *("data.name", "steps", "sampling.batch_size"),
    *("optimizer.learning_rate", "optimizer.weight_decay", "optimizer.warmup_steps"),
)
FROZEN = {
    "icons": ("icons", 800, 128, 0.1, 0.0005, 0),
    "icons-groups": ("icons", 800, 128, 0.1, 0.0001, 0),
    "icons-sphere": ("icons", 3200, 128, 1.0, 0.0001, 0),
    "icons-longtail": ("icons", 3200, 128, 1.0, 0.0002, 0),
    "kanji": ("kanji", 1200, 64, 0.03, 0.0001, 0),
    "icons-two-way": ("icons", 800, 128, 0.1, 0.0001, 0),
    "icons-instances": ("icons", 800, 128, 0.003, 1e-05, 0),
    "icons-names": ("icons", 1200, 128, 0.003, 1e-05, 0),
    "icons-margin": ("icons", 800, 128, 0.003, 1e-05, 200),
    "kanji-margin": ("kanji_radicals@32", 1600, 128, 0.003, 0.0005, 400),
}
"""What the recorded results of a preset depend on most; a change here is a new experiment."""


def test_presets_keep_the_values_of_their_recorded_results():
    assert PRESETS.keys() == FROZEN.keys() | PUBLISHED.keys()
    for name, values in FROZEN.items():
        assert tuple(get_option(PRESETS[name].config, o) for o in OPTIONS) == values, name
