"""The report of one run."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from experiments.reporting.run import read_episodes, run_report, write_report

REPORT = {
    "label": "SCE⊕NCA",
    "data": "icons",
    "sampling": "random",
    "seed": 3,
    "step": 200,
    "split": "novel",
    "num_features": 64,
    "metrics": [],
    "validation": {"name": "1-shot accuracy", "unit": "%", "value": 0.5},
    "version": "0.9.0",
    "commit": None,
}
LINES = ["5-way", "", "| shots | accuracy |"]
PROTOCOL: Any = SimpleNamespace(report=lambda _: LINES)
RUN = ["- Loss: SCE⊕NCA", "- Data: icons", "- Training batches: random, seed 3"]


def test_a_list_names_the_run_and_what_was_evaluated():
    assert run_report(PROTOCOL, REPORT).splitlines() == [
        *RUN,
        "- Checkpoint: step 200",
        "- Features: 64 dimensions",
        "- Evaluation: novel split, 5-way",
        "- Validation: 1-shot accuracy 50.0 %",
        "- Code: jaxloss 0.9.0",
        "",
        "| shots | accuracy |",
    ]
    assert "Validation" not in run_report(PROTOCOL, REPORT | {"validation": None})


def test_where_the_numbers_come_from_is_stated_if_known():
    notes = ["The best checkpoint (step 300) is damaged; that of step 200 is taken.", "Second."]
    report = REPORT | {"weights": "resnet18.safetensors", "notes": notes}
    lines = run_report(PROTOCOL, report | {"commit": "abc1234"}).splitlines()
    assert lines[7:11] == [
        "- The backbone started from resnet18.safetensors.",
        f"- {notes[0]}",
        "- Second.",
        "- Code: jaxloss 0.9.0, commit abc1234",
    ]
    unknown = {"weights": "", "notes": []}
    assert run_report(PROTOCOL, REPORT | unknown) == run_report(PROTOCOL, REPORT)


def test_accuracies_of_episodes_are_stored_beside_the_report(tmp_path, caplog):
    episodes = {"base 1-shot": [0.25, 0.5, 1.0], "novel 1-shot": [0.75, 0.1, 0.0]}
    report = REPORT | {"episodes": episodes}
    paths = write_report(tmp_path, PROTOCOL, report)
    assert [path.name for path in paths] == ["report.md", "report.json", "episodes.npz"]
    assert json.loads(paths[1].read_text()) == REPORT
    assert report["episodes"] == episodes
    found = read_episodes(tmp_path)
    assert list(found) == list(episodes)
    for name, values in episodes.items():
        np.testing.assert_array_equal(found[name], np.array(values, np.float32))
    assert write_report(tmp_path, PROTOCOL, report, "evaluation-novel")[2].name == (
        "evaluation-novel-episodes.npz"
    )
    paths[2].write_bytes(paths[2].read_bytes()[:100])
    assert read_episodes(tmp_path) == {}
    assert "episodes.npz cannot be read" in caplog.text
    assert read_episodes(tmp_path / "nowhere") == {}
