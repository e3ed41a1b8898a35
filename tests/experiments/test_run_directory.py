"""The directory of a run: one configuration, one command at a time, nothing overwritten."""

import json
from pathlib import Path

import pytest

from experiments.errors import ConfigError
from experiments.training.run_directory import (
    ConfigMismatchError,
    check_run_directory,
    claim_run_directory,
    exclusive_run,
    read_config,
)


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


CONFIG = {"data": {"name": "icons", "mean": (0.5,)}, "steps": 500, "seed": 0}


def test_a_run_directory_is_claimed_once(tmp_path):
    run = tmp_path / "deep" / "run"
    assert check_run_directory(run, CONFIG) is False
    assert not run.exists()
    claim_run_directory(run, CONFIG)
    (run / "metrics.jsonl").write_text("x")
    assert check_run_directory(run, CONFIG) is True
    claim_run_directory(run, CONFIG)
    assert read_config(run) == {**CONFIG, "data": {"name": "icons", "mean": [0.5]}}
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "metrics.jsonl"]


def test_another_configuration_is_refused_with_its_differences(tmp_path):
    claim_run_directory(tmp_path, CONFIG)
    before = files_below(tmp_path)
    other = {"data": {"name": "cub", "mean": [0.5, 0.4]}, "steps": 500, "loss": {"name": "sce"}}
    with pytest.raises(ConfigMismatchError) as caught:
        claim_run_directory(tmp_path, other)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert "data.name: 'icons' -> 'cub'" in lines
    assert "data.mean: [0.5] -> [0.5, 0.4]" in lines
    assert "seed: 0 -> (absent)" in lines
    assert "loss.name: (absent) -> 'sce'" in lines
    assert not [line for line in lines if line.startswith("steps")]
    assert "Choose another directory, or remove this one" in lines[-1]
    assert files_below(tmp_path) == before


def test_somebody_elses_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigMismatchError, match=r"it holds thesis\.tex but no config\.json"):
        claim_run_directory(tmp_path, CONFIG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.tex"]
    with pytest.raises(ConfigMismatchError, match="is a file"):
        claim_run_directory(tmp_path / "thesis.tex", CONFIG)
    with pytest.raises(ConfigMismatchError, match="not a run directory"):
        read_config(tmp_path)


def test_hidden_files_do_not_count(tmp_path):
    (tmp_path / ".gitkeep").touch()
    (tmp_path / ".config.json.123").write_text('{"da')
    claim_run_directory(tmp_path, CONFIG)
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 500


@pytest.mark.parametrize("content", [b"", b'{"data": {"na', b"[1]", b"\xff\xfe"])
def test_a_damaged_configuration_is_not_overwritten(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigMismatchError, match=r"config\.json is damaged"):
        claim_run_directory(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_bytes() == content


def test_one_command_at_a_time(tmp_path):
    """A second one would remove unfinished checkpoints of the first, and replace its metrics."""
    with (
        exclusive_run(tmp_path),
        pytest.raises(ConfigError, match="another process is training"),
        exclusive_run(tmp_path),
    ):
        pass
    # An error in the context is not taken for a lock that is held.
    with pytest.raises(BlockingIOError), exclusive_run(tmp_path):
        raise BlockingIOError
