"""What a run writes for people: nothing twice, nothing lost, nothing unexplained."""

import json
import sys

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from experiments.loss_names import parse_loss
from experiments.reporting import progress as progress_module
from experiments.reporting.figures import comparison_figure
from experiments.reporting.metrics import MetricsLog, read_metrics
from experiments.reporting.progress import progress
from experiments.reporting.summary import sampling_name
from experiments.reporting.tables import json_report, markdown_table, summarize, write_report

COMMAND = "python -m experiments compare icons --losses sce direct:sce+nca"


def cell(loss, label, sampling, seed, one, five, *, episodes="8f3a", **more):
    return {
        "loss": loss,
        "label": label,
        "sampling": sampling,
        "seed": seed,
        "seconds": 60.0,
        "results": [
            {"shots": 1, "accuracy": one, "interval": 0.004, "episodes": 2000, "hash": episodes},
            {"shots": 5, "accuracy": five, "interval": 0.003, "episodes": 2000, "hash": "77aa"},
        ],
        **more,
    }


CELLS = [
    cell("direct:sce+nca", "SCE⊕NCA", "random", 0, 0.70, 0.85),
    cell("direct:sce+nca", "SCE⊕NCA", "random", 1, 0.72, 0.84),
    cell("direct:sce+nca", "SCE⊕NCA", "4x32", 0, 0.60, 0.80),
    cell("direct:sce+nca", "SCE⊕NCA", "32x4", 0, 0.7126, 0.842),
    cell("spectral:sce+nca", "SCE⊕̃NCA", "random", 0, 0.69, 0.81, power=0.3),
    cell("sce", "SCE", "random", 0, 0.65, 0.8),
    cell("sce", "SCE", "32x4", 0, 0.66, 0.8),
]


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
    assert sampling_name("32x4") == "32-way 4-shot"
    assert sampling_name("random") == "random batch"


def test_summary_averages_over_seeds():
    rows = summarize(CELLS)
    keys = [(row["family"], row["sampling"]) for row in rows]
    assert keys == [
        ("Classification", "32x4"),
        ("Classification", "random"),
        ("Direct-sum", "32x4"),
        ("Direct-sum", "4x32"),
        ("Direct-sum", "random"),
        ("Spectral-sum", "random"),
    ]
    row = rows[4]
    assert row["seeds"] == [0, 1]
    assert row["seconds"] == 120.0
    first = row["results"][0]
    assert first["accuracy"] == pytest.approx(0.71)
    assert first["interval"] == pytest.approx(0.004)
    assert first["spread"] == pytest.approx(0.02)
    assert first["accuracies"] == [0.70, 0.72]
    assert rows[0]["results"][0]["spread"] is None
    with pytest.raises(ValueError, match="two cells for sce, sampling 32x4, seed 0"):
        summarize([*CELLS, CELLS[-1]])


def test_markdown_table_has_the_shape_of_the_papers():
    table = markdown_table(CELLS, command=COMMAND).splitlines()
    assert table[2:11] == [
        "| Method | 32-way 4-shot | 4-way 32-shot | random batch |",
        "|:--|:-:|:-:|:-:|",
        "| **Classification loss** | | | |",
        "| SCE | **66.0 ± 0.4, 80.0 ± 0.3** | – | 65.0 ± 0.4, 80.0 ± 0.3 |",
        "| **Direct-sum loss** | | | |",
        "| SCE⊕NCA | **71.3 ± 0.4, 84.2 ± 0.3** | 60.0 ± 0.4, 80.0 ± 0.3 "
        "| 71.0 ± 0.4 (seeds 2.0), 84.5 ± 0.3 (seeds 1.0) |",
        "| **Spectral-sum loss** | | | |",
        "| SCE⊕̃NCA | – | – | 69.0 ± 0.4, 81.0 ± 0.3 |",
        "",
    ]


def test_caption_explains_what_the_table_holds_and_nothing_else():
    table = markdown_table(CELLS, command=COMMAND)
    for part in (
        "95 % confidence interval",
        "(seeds c)",
        "N-way K-shot takes N classes",
        "Bold: the best sampling of a method by 1-shot accuracy",
        "The mark –: not run",
        "NCA: neighbourhood component analysis",
        "exponent p = 0.3",
        "1-shot: 2,000 episodes, the same for every run (episode list `8f3a`)",
        "7 runs, together 7.0 minutes",
        f"Command: `{COMMAND}`",
    ):
        assert part in table
    assert "Proto" not in table
    single = markdown_table(CELLS[5:6], command=COMMAND)
    for part in ("seeds", "Bold", "N-way", "not run", "⊕"):
        assert part not in single
    assert "| SCE | 65.0 ± 0.4, 80.0 ± 0.3 |" in single


def test_runs_on_different_episodes_are_not_compared_silently():
    other = cell("bce", "BCE", "random", 0, 0.5, 0.6, episodes="beef")
    table = markdown_table([*CELLS, other], command=COMMAND)
    assert "not the same for every run** (episode lists `8f3a`, `beef`)" in table


def test_every_command_that_gave_a_cell_is_told_once():
    cells = [{**c, "command": f"compare --seeds {c['seed']}"} for c in CELLS]
    table = markdown_table(cells, command=COMMAND)
    assert table.count("- Command: ") == 2
    assert "- Command: `compare --seeds 0`\n- Command: `compare --seeds 1`\n" in table
    # An older cell does not tell: the command that wrote the table stands for it.
    assert f"- Command: `{COMMAND}`" in markdown_table([*cells[1:], CELLS[0]], command=COMMAND)


def test_a_run_that_diverged_is_in_the_table_and_in_no_mean(tmp_path):
    def failed(loss, label, seed):
        cell = {"loss": loss, "label": label, "sampling": "random", "seed": seed, "results": []}
        return cell | {"diverged": "diverged: loss is nan at step 3"}

    cells = [*CELLS, failed("direct:sce+nca", "SCE⊕NCA", 2), failed("nca", "NCA", 0)]
    table = markdown_table(cells, command=COMMAND)
    assert "| NCA | – | – | diverged |" in table
    assert "71.0 ± 0.4 (seeds 2.0), 84.5 ± 0.3 (seeds 1.0) (1 of 3 seeds diverged) |" in table
    assert "- diverged: the loss" in table
    write_report(tmp_path / "some", cells, COMMAND)
    assert (tmp_path / "some" / "figure.png").exists()
    paths = write_report(tmp_path / "all", cells[-1:], COMMAND)
    assert [path.name for path in paths] == ["table.md", "table.json"]
    assert "| NCA | diverged |" in paths[0].read_text()


def test_evaluation_is_described_where_it_is_known():
    evaluation = {"ways": 5, "queries": 15, "distance": "euclidean"}
    cells = [{**c, "evaluation": evaluation, "data": "icons", "split": "novel"} for c in CELLS]
    table = markdown_table(cells, command=COMMAND)
    assert "Accuracy in % on icons, novel classes" in table
    assert "has 5 classes" in table
    assert "15 images of each to classify by the nearest class mean in Euclidean" in table


def test_report_files(tmp_path):
    paths = write_report(tmp_path / "report", CELLS, COMMAND, title="Icons")
    assert [path.name for path in paths] == ["table.md", "table.json", "figure.png"]
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == sorted(p.name for p in paths)
    assert "### Icons" in paths[0].read_text()
    assert "(figure.png)" in paths[0].read_text()
    assert json.loads(paths[1].read_text()) == json_report(CELLS, COMMAND)
    assert json_report(CELLS, COMMAND)["commands"] == [COMMAND]
    assert json_report(CELLS, COMMAND)["cells"] == CELLS
    # Nothing has finished yet: a table that says so, and no figure.
    names = [path.name for path in write_report(tmp_path / "none", [], COMMAND)]
    assert names == ["table.md", "table.json"]


@pytest.mark.filterwarnings("error")  # A glyph that the font lacks is a warning.
@pytest.mark.parametrize(("methods", "samplings"), [(1, 1), (3, 2), (16, 6)])
def test_nothing_in_the_figure_is_cut_off(tmp_path, methods, samplings):
    rng = np.random.default_rng(0)
    joined = [f"{first}+{second}" for first in ("sce", "bce") for second in ("nca", "proto")]
    losses = ["sce", "nca", *joined, "bce", "proto"]
    losses += [f"{kind}:{pair}" for kind in ("spectral", "direct") for pair in joined]
    batches = ["random", "64x8", "32x16", "16x32", "8x64", "4x128"][:samplings]
    cells = [
        cell(loss, parse_loss(loss).label, s, seed, *rng.uniform(0.5, 0.9, 2))
        for loss in losses[:methods]
        for s in batches
        for seed in (0, 1)
    ]
    path = tmp_path / "figure.png"
    command = " ".join([COMMAND] * methods)
    comparison_figure(cells, path, title="Few-shot accuracy on $5 icons", command=command)
    image = matplotlib.image.imread(path)[..., :3]
    edge = 6
    for border in (image[:edge], image[-edge:], image[:, :edge], image[:, -edge:]):
        np.testing.assert_array_equal(border, 1.0)


def test_a_figure_needs_a_cell(tmp_path):
    with pytest.raises(ValueError, match="no run"):
        comparison_figure([], tmp_path / "figure.png", title="", command="")
