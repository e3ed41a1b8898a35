"""The metrics of a run: nothing twice, nothing lost."""

import json

import jax.numpy as jnp
import numpy as np

from experiments.training.metrics_log import MetricsLog
from tests.experiments.tiny_runs import metrics


def test_metrics_of_a_run_that_was_killed_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, resume_step=0) as log:
        for step in (10, 20, 30):
            log.log(step, loss=1 / step)
    with path.open("a") as file:
        file.write('{"step": 40, "lo')
    with MetricsLog(path, resume_step=20) as log:
        assert metrics(tmp_path) == [{"step": 10, "loss": 0.1}, {"step": 20, "loss": 0.05}]
        log.log(30, loss=0.5)
    assert [row["step"] for row in metrics(tmp_path)] == [10, 20, 30]
    assert metrics(tmp_path)[-1] == {"step": 30, "loss": 0.5}
    assert not list(tmp_path.glob(".metrics*"))


def test_only_the_half_line_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for torn in ('{"step": 3, "loss": 0.', '{"step"', "{"):
        whole = '{"step": 2, "loss": "NaN"}\n{"step": 2, "validation": 0.5}\n'
        path.write_text(whole + torn)
        with MetricsLog(path, resume_step=5):
            assert path.read_text() == whole


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, resume_step=0) as log:
        log.log(1, loss=jnp.float32(0.25), count=np.int64(3), left_out=None, whole=2)
        assert json.loads(path.read_text()) == {"step": 1, "loss": 0.25, "count": 3, "whole": 2}
    assert len(path.read_text().splitlines()) == 1


def test_not_a_number_is_valid_json_and_comes_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = {"a": np.nan, "b": np.inf, "c": jnp.bfloat16(-np.inf)}
    with MetricsLog(path, resume_step=0) as log:
        log.log(1, **values)

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert [row["a"], row["b"], row["c"]] == ["NaN", "Infinity", "-Infinity"]
    found = [float(row[name]) for name in "abc"]
    np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf])


def test_tensorboard_gets_the_same_scalars(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl", resume_step=7) as log:
        log.log(8, loss=0.5)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()


def test_tensorboard_ignores_what_was_written_after_the_checkpoint(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(
        "tensorboardX.SummaryWriter.__init__", lambda _, folder, **more: given.update(more)
    )
    MetricsLog(tmp_path / "metrics.jsonl", resume_step=7)
    assert given == {"purge_step": 8}
