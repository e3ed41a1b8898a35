"""How far a run is, on a terminal and elsewhere."""

import sys

from experiments.training import progress as progress_module
from experiments.training.progress import progress


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
            bar.update(step, 0.5, 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "slow: 4/10000 steps (0 %), loss 0.5, 2 images/s, 00:32 elapsed, 22:12:48 left",
        "slow: 8/10000 steps (0 %), loss 0.5, 2 images/s, 01:04 elapsed, 22:12:16 left",
    ]


def test_time_left_of_a_run_that_goes_on_is_that_of_its_own_steps(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    with progress(100, 50, "again") as bar:
        now[0] += 20.0
        bar.update(60, 0.5, 2.0)
    assert capsys.readouterr().out.endswith("00:20 elapsed, 01:20 left\n")


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress(20, 0, "direct:sce+nca [2]") as bar:
        for step in range(1, 21):
            bar.update(step, 0.5, 900.0)
    output = capsys.readouterr().out
    assert "\r" in output
    for part in ("direct:sce+nca [2]", "20/20", "loss 0.5", "900 images/s"):
        assert part in output
