"""The documents are true: the README's example runs, and all commands, presets and sets exist."""

import importlib
import importlib.util
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro

import jaxloss
from experiments.cli.main import command_type
from experiments.data.builders import BUILDERS
from experiments.presets import PRESETS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MANUAL = (ROOT / "experiments/README.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    loss = float(capsys.readouterr().out)
    assert np.isfinite(loss)


def test_the_training_steps_on_several_devices_run(capsys):
    text = (ROOT / "docs/devices.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "devices"}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "docs/devices.md", "exec"), names)
    on_mesh, pairs, in_shard_map, in_pmap = map(float, capsys.readouterr().out.split())
    assert on_mesh == pytest.approx(in_shard_map, rel=1e-5)
    assert np.isfinite([pairs, in_pmap]).all()


def test_the_comparisons_with_other_packages_run():
    """All blocks share their names; a line in a traceback is that of the document."""
    text = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    installed = importlib.util.find_spec("pytorch_metric_learning") is not None
    names: dict[str, Any] = {"__name__": "coming_from"}
    for block in re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL):
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        if installed or "pytorch_metric_learning" not in source:
            exec(compile(source, "docs/coming_from.md", "exec"), names)


def test_every_code_block_of_the_site_runs():
    """In the build of the site, which runs the pages with this head, or in a test of this file."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    assert len(pages) > 20
    for path in pages:
        text = path.read_text(encoding="utf-8")
        if path.name not in ("devices.md", "coming_from.md"):
            assert "```python" not in text, path
        if "```{code-cell}" in text:
            assert text.startswith("---\nfile_format: mystnb\n"), path


def table(heading: str) -> str:
    """The rows under a heading of a table."""
    return MANUAL.partition(heading)[2].partition("\n\n")[0]


@pytest.mark.parametrize(
    ("heading", "column", "known"),
    [("| protocol | presets |", 2, PRESETS), ("| task | data sets |", 2, BUILDERS)],
    ids=["presets", "sets"],
)
def test_every_name_is_in_its_table(heading, column, known):
    cells = [row.split("|")[column] for row in table(heading).splitlines() if row.count("|") > 2]
    named = {name for cell in cells for name in re.findall(r"`([a-z0-9_-]+)`", cell)}
    assert named - {"linear"} == set(known)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "experiments/README.md",
        "experiments/RESULTS.md",
        "experiments/EARLIER_RESULTS.md",
    ],
)
def test_every_command_parses(document):
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"python -m experiments ([^`\n#]*)", text)
    assert len(commands) > (0 if document == "README.md" else 5)
    # The runs that `evaluate` evaluates there are of this preset, and need not exist.
    known: Any = command_type(PRESETS["icons"].config)
    for command in commands:
        tyro.cli(known, args=[word for word in shlex.split(command) if word != "--help"])


def test_the_code_of_contributing_runs(monkeypatch):
    """Each block in the file that is named above it; then the new loss equals its references."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"\*\*`([\w/]+)\.py`\*\*[^`]*?\n\n   ```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python") == 4
    row: Any = None
    for path, block in blocks:
        module, source = importlib.import_module(path.replace("/", ".")), textwrap.dedent(block)
        names = dict(vars(module))
        if source.startswith("loss_row"):
            row = eval(source, names)
            continue
        exec(compile(source, path, "exec"), names)
        monkeypatch.setattr(module, "focal_loss", names["focal_loss"], raising=False)
        if path.startswith("jaxloss"):
            monkeypatch.setattr(jaxloss, "focal_loss", names["focal_loss"], raising=False)
    arguments = row.make_inputs(np.random.default_rng(0), 6, np.float32)
    found = float(row.function(*arguments))
    assert found == pytest.approx(float(row.reference(*arguments)), rel=1e-5)
    logits, labels = map(torch.tensor, arguments)
    assert found == pytest.approx(float(row.torch_reference(logits, labels.long())), rel=1e-5)
