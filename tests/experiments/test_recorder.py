"""The metrics of a run: nothing twice, nothing lost. Its progress, on a terminal and elsewhere."""

import json

import jax.numpy as jnp
import numpy as np

from experiments.training import run_directory
from experiments.training.run_directory import MetricsLog, Progress
from tests.experiments.tiny_runs import metrics


def test_metrics_of_a_run_that_was_killed_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, resume_step=0) as log:
        for step in (10, 20, 30):
            log.log(step, loss=1 / step)
    with path.open("a") as file:
        file.write('{"step": 40, "lo')
    with MetricsLog(tmp_path, resume_step=20) as log:
        assert metrics(tmp_path) == [{"step": 10, "loss": 0.1}, {"step": 20, "loss": 0.05}]
        log.log(30, loss=0.5)
    assert [row["step"] for row in metrics(tmp_path)] == [10, 20, 30]
    assert metrics(tmp_path)[-1] == {"step": 30, "loss": 0.5}
    assert not list(tmp_path.glob(".metrics*"))


def test_a_line_is_on_disk_as_soon_as_it_is_logged_and_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, resume_step=7) as log:
        log.log(8, loss=jnp.float32(0.25), count=np.int64(3), left_out=None, whole=2)
        assert json.loads(path.read_text()) == {"step": 8, "loss": 0.25, "count": 3, "whole": 2}
        log.log(9, a=np.nan, b=np.inf, c=jnp.bfloat16(-np.inf))

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads(path.read_text().splitlines()[1], parse_constant=refuse)
    found = [float(row[name]) for name in "abc"]
    np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf])
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()


def test_tensorboard_ignores_what_was_written_after_the_checkpoint(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(
        "tensorboardX.SummaryWriter.__init__", lambda _, folder, **more: given.update(more)
    )
    MetricsLog(tmp_path, resume_step=7)
    assert given == {"purge_step": 8}


def test_plain_progress_is_a_line_every_half_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_directory.time, "monotonic", lambda: now[0])
    with Progress(10_000, 0, "slow") as bar:
        for step in range(1, 11):
            now[0] += 8.0
            bar.update(step, 0.5, 2.0)
    assert capsys.readouterr().out.splitlines() == [
        "slow: 4/10000 steps (0 %), loss 0.5, 2 images/s, 00:32 elapsed, 22:12:48 left",
        "slow: 8/10000 steps (0 %), loss 0.5, 2 images/s, 01:04 elapsed, 22:12:16 left",
    ]
    now[0] = 0.0
    with Progress(100, 50, "again") as bar:  # The time left is that of its own steps.
        now[0] += 20.0
        bar.update(60, 0.5, 2.0)
    assert capsys.readouterr().out.endswith("00:20 elapsed, 01:20 left\n")
