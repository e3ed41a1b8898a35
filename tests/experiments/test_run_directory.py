"""The directory of a run: one configuration, one command at a time, nothing lost."""

import json
import struct
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from experiments.core.errors import ConfigError, ExperimentError
from experiments.training.run_directory import (
    ConfigMismatchError,
    MetricsLog,
    check_run_directory,
    claim_run_directory,
    read_config,
    read_metrics,
)
from tests.experiments.tiny_runs import files_below, metrics

CONFIG = {"data": {"name": "icons", "mean": (0.5,)}, "steps": 500, "seed": 0}


def claim(directory, config, **how):
    with claim_run_directory(directory, config, **how):
        pass


def test_another_configuration_is_refused_with_its_differences(tmp_path):
    assert check_run_directory(tmp_path / "run", CONFIG) is None
    assert not (tmp_path / "run").exists()
    for _ in range(2):
        claim(tmp_path, CONFIG)
    assert check_run_directory(tmp_path, CONFIG) == {
        **CONFIG,
        "data": {"name": "icons", "mean": [0.5]},
    }
    before = files_below(tmp_path)
    other = {"data": {"name": "cub", "mean": [0.5, 0.4]}, "steps": 500, "loss": {"name": "sce"}}
    with pytest.raises(ConfigMismatchError) as caught:
        claim(tmp_path, other)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert {
        "data.name: 'icons' -> 'cub'",
        "data.mean: [0.5] -> [0.5, 0.4]",
        "seed: 0 -> (absent)",
        "loss.name: (absent) -> 'sce'",
    } == {*lines[1:-1]}
    assert files_below(tmp_path) == before


def test_somebody_elses_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    for directory, message in (
        (tmp_path, r"it holds thesis\.tex but no config\.json"),
        (tmp_path / "thesis.tex", "is a file"),
    ):
        with pytest.raises(ConfigMismatchError, match=message):
            check_run_directory(directory, CONFIG)
    (tmp_path / "thesis.tex").rename(tmp_path / ".thesis.tex")  # Hidden files do not count.
    claim(tmp_path, CONFIG)
    assert read_config(tmp_path)["steps"] == 500


@pytest.mark.parametrize("content", [b"", b'{"data": {"na', b"[1]", b"\xff\xfe"])
def test_a_damaged_configuration_is_not_overwritten(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigMismatchError, match=r"config\.json is damaged"):
        claim(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_bytes() == content


def test_more_steps_go_on_unless_the_schedule_depends_on_them(tmp_path):
    claim(tmp_path, CONFIG)
    (tmp_path / "report.json").write_text("500")
    more = {**CONFIG, "steps": 600}
    reason = "It cannot go on with more steps: they are few.*--model.weights"
    with pytest.raises(ConfigMismatchError, match=reason):
        claim(tmp_path, more, fixed_steps="they are few")
    claim(tmp_path, more)
    assert read_config(tmp_path)["steps"] == 600
    assert (tmp_path / "report-500-steps.json").read_text() == "500"
    assert not (tmp_path / "report.json").exists()
    for other in ({**more, "steps": 500}, {**more, "steps": 700, "seed": 1}):
        with pytest.raises(ConfigMismatchError, match="another configuration"):
            claim(tmp_path, other)
    assert read_config(tmp_path)["steps"] == 600


def test_one_command_at_a_time(tmp_path):
    """A second one would remove unfinished checkpoints of the first, and replace its metrics."""
    for number in range(20):
        configs = [CONFIG, {**CONFIG, "seed": number % 2}]
        barrier, errors, directory = threading.Barrier(2), [], tmp_path / str(number)

        def train(config, directory=directory, barrier=barrier, errors=errors):
            barrier.wait()
            try:
                with claim_run_directory(directory, config):
                    barrier.wait(timeout=60)  # The other one fails meanwhile.
            except ExperimentError as failure:
                errors.append(failure)
                barrier.wait(timeout=60)

        threads = [threading.Thread(target=train, args=[config]) for config in configs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (error,) = errors
        assert isinstance(error, ConfigError)
        assert "another process is training" in str(error)
        assert read_config(directory)["seed"] in (0, 1)


def test_metrics_of_a_run_that_was_killed_and_goes_on(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, resume_step=0) as log:
        for step in (10, 20, 30):
            log.log(step, loss=1 / step)
    with path.open("a") as file:
        file.write('[1]\n{"step": "3"}\n{"step": 40, "lo')
    assert [row["step"] for row in read_metrics(path)] == [10, 20, 30]
    assert "3 of 6 lines are cut and left out" in caplog.text
    with MetricsLog(tmp_path, resume_step=20) as log:
        assert metrics(tmp_path) == [{"step": 10, "loss": 0.1}, {"step": 20, "loss": 0.05}]
        log.log(30, loss=0.5)
    assert metrics(tmp_path)[2:] == [{"step": 30, "loss": 0.5}]


def test_a_line_and_its_events_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, resume_step=7) as log:
        log.log(8, loss=jnp.float32(0.25), left_out=None)
        assert json.loads(path.read_text()) == {"step": 8, "loss": 0.25}
        (written,) = tmp_path.glob("events.out.tfevents.*")
        content, events = written.read_bytes(), []
        log.log(9, a=np.nan, b=np.inf, c=jnp.bfloat16(-np.inf), count=np.int64(3))
    row = json.loads(path.read_text().splitlines()[1])
    assert row == {"step": 9, "a": "NaN", "b": "Infinity", "c": "-Infinity", "count": 3}
    # TensorBoard hides what was written after the checkpoint.
    while content:  # The length, its checksum, the event, its checksum.
        (length,) = struct.unpack("<Q", content[:8])
        events.append(event_pb2.Event.FromString(content[12 : 12 + length]))  # pyright: ignore
        content = content[16 + length :]
    _, start, logged = events
    assert (start.step, start.session_log.status) == (8, 1)
    (value,) = logged.summary.value
    assert (logged.step, value.tag, value.simple_value) == (8, "loss", 0.25)
    assert abs(logged.wall_time - time.time()) < 600
