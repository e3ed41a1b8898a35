"""What README shows is true: its example runs, its presets and data sets are there."""

import re
from pathlib import Path

import numpy as np
import pytest

from experiments.data.builders import BUILDERS
from experiments.presets import PRESETS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    loss = float(capsys.readouterr().out)
    assert np.isfinite(loss)


def table(heading: str) -> str:
    """The rows under a heading of a table."""
    return README.partition(heading)[2].partition("\n\n")[0]


@pytest.mark.parametrize(
    ("heading", "column", "known"),
    [("| protocol | presets |", 2, PRESETS), ("| for | sets |", 2, BUILDERS)],
    ids=["presets", "sets"],
)
def test_every_name_is_in_its_table(heading, column, known):
    cells = [row.split("|")[column] for row in table(heading).splitlines() if row.count("|") > 2]
    named = {name for cell in cells for name in re.findall(r"`([a-z0-9_-]+)`", cell)}
    assert named - {"linear"} == set(known)
