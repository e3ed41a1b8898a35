"""What a run writes for people: nothing twice, nothing lost, nothing unexplained."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from experiments.loss_names import parse_loss
from experiments.reporting.metrics import MetricsLog, read_metrics
from experiments.reporting.progress import progress

from experiments.reporting import progress as progress_module


def lines_of(path):
    return path.read_text().splitlines()


def test_metrics_of_a_run_that_was_killed_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, resume_step=0) as log:
        for step in (10, 20, 30):
            log.log(step, loss=1 / step)
    with path.open("a") as file:
        file.write('{"step": 40, "lo')
    assert [row["step"] for row in read_metrics(path)] == [10, 20, 30]
    with MetricsLog(path, resume_step=20) as log:
        assert [row["step"] for row in read_metrics(path)] == [10, 20]
        log.log(30, loss=0.5)
    assert read_metrics(path)[-1] == {"step": 30, "loss": 0.5}
    assert len(lines_of(path)) == 3
    assert not list(tmp_path.glob(".metrics*"))


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, resume_step=0) as log:
        log.log(1, loss=jnp.float32(0.25), count=np.int64(3), left_out=None, whole=2)
        assert json.loads(path.read_text()) == {"step": 1, "loss": 0.25, "count": 3, "whole": 2}
        with pytest.raises(TypeError, match="one number"):
            log.log(2, loss=np.ones(2))  # pyright: ignore[reportArgumentType]
    assert len(lines_of(path)) == 1


def test_not_a_number_is_valid_json_and_comes_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = {"a": np.nan, "b": np.inf, "c": jnp.bfloat16(-np.inf)}
    with MetricsLog(path, resume_step=0) as log:
        log.log(1, **values)

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(path.read_text(), parse_constant=refuse)
    (row,) = read_metrics(path)
    np.testing.assert_array_equal([row["a"], row["b"], row["c"]], [np.nan, np.inf, -np.inf])


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_tensorboard_gets_the_same_scalars(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl", resume_step=7) as log:
        log.log(8, loss=0.5)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()


def test_plain_progress_is_a_line_a_tenth(capsys):
    with progress(200, 100, "sce") as bar:
        for step in range(101, 201):
            bar.update(step, 1 / step, 1234.5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("sce: 120/200 steps (60 %), loss 0.008333, 1,234 images/s, ")
    assert lines[0].endswith(" left")
    assert lines[-1].startswith("sce: 200/200 steps (100 %)")
    assert all(line.isprintable() for line in lines)


def test_plain_progress_is_a_line_every_half_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    with progress(10_000, 0, "slow") as bar:
        for step in range(1, 11):
            now[0] += 8.0
            bar.update(step, None, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "slow: 4/10000 steps (0 %), 22 h 12 min left",
        "slow: 8/10000 steps (0 %), 22 h 12 min left",
    ]


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress(20, 0, "direct:sce+nca [2]") as bar:
        for step in range(1, 21):
            bar.update(step, 0.5, 900.0)
    output = capsys.readouterr().out
    assert "\x1b[" in output
    for part in ("direct:sce+nca [2]", "20/20", "loss 0.5", "900 images/s"):
        assert part in output


def test_names():
    families = ["Classification", "Metric", "Sum", "Direct-sum", "Spectral-sum"]
    losses = ["bce", "proto", "bce+proto", "direct:sce+nca", "spectral:sce+nca"]
    assert [parse_loss(loss).heading for loss in losses] == families
