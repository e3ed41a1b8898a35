"""The experiments from Python: `train`, `load_run`, `features_of` and `evaluate`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import experiments
from experiments.cli.main import main
from experiments.core.config import set_options
from experiments.core.errors import ConfigError
from experiments.data.pipeline import load_labels
from experiments.datasets import icons
from experiments.papers.presets import PRESETS
from experiments.training.checkpoints import CheckpointError
from experiments.training.run_directory import ConfigMismatchError
from tests.experiments.several_processes import ROOT
from tests.experiments.tiny_runs import TINY_OPTIONS, assert_equal_runs, config_of
from tests.tolerances import FLOAT32

pytestmark = pytest.mark.usefixtures("light_backbone")

OPTIONS = {
    "steps": 2,
    "evaluation.validation_episodes": 20,
    "evaluation.episodes": 20,
    "model.widths": [4, 4, 4, 32],
    "sampling.batch-size": 16,
    "loss.name": "sce",
}
"""The options of `TINY_OPTIONS`."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("python") / "run"
    report = experiments.train("icons", OPTIONS, directory=str(directory), folders=folders)
    return directory, report


def expected_features(run: Any, images: np.ndarray, mean: Any = 0.5, std: Any = 0.5) -> Any:
    """By the backbone `Pooled`: a linear layer of the mean pixel."""
    layer = run.state.params["backbone"]["linear"]
    pixels = (images.astype(np.float64) / 255 - mean) / std
    return pixels.mean((1, 2)) @ np.asarray(layer["kernel"][...]) + np.asarray(layer["bias"][...])


def labelled(found: Any) -> Any:
    """Every image with its label."""
    return zip(found.images(np.arange(len(found.labels))), found.labels.tolist(), strict=True)


def test_train_is_the_command(trained, folders, tmp_path):
    directory, report = trained
    given = ["--data-dir", str(folders.data_dir), "--directory", str(tmp_path / "run")]
    assert main(["train", "icons", *TINY_OPTIONS, "--loss.name", "sce", *given]) == 0
    assert config_of(directory) == config_of(tmp_path / "run")
    assert_equal_runs(directory, tmp_path / "run")
    stored = json.loads((directory / "report.json").read_text())
    assert stored == report
    assert stored["command"] == (
        f"experiments.train('icons', {OPTIONS}, directory={str(directory)!r})"
    )
    # Of a finished run, the report is read.
    assert experiments.train("icons", OPTIONS, directory=directory, folders=folders) == report


def test_features_labels_and_names_are_those_of_the_images(trained, folders):
    run = experiments.load_run(str(trained[0]))
    found = experiments.features_of(run, "novel", folders=folders)
    index = json.loads((icons.FOLDER / "icons.json").read_text())
    novel = np.flatnonzero(np.array(index["split"]) == "novel")
    assert found.class_names == tuple(np.array(index["classes"])[novel])
    with np.load(icons.FOLDER / "icons.npz") as stored:
        images, labels = stored["images"], stored["labels"]
    assert found.features.shape == (np.isin(labels, novel).sum(), 128)
    assert found.features.dtype == np.float32
    read = found.images(np.arange(len(found.labels)))
    for label in (0, 17, 49):
        own, there = read[found.labels == label, ..., 0], images[labels == novel[label]]
        assert sorted(map(bytes, own)) == sorted(map(bytes, there))
    expected = expected_features(run, read)
    np.testing.assert_allclose(found.features, expected, rtol=1e-4, atol=16 * FLOAT32)
    # By default the split for evaluation, computed once; nobody can change it by accident.
    assert experiments.features_of(run, folders=folders) is found
    with pytest.raises(ValueError, match="read-only"):
        found.features[0] = 0


def test_of_a_large_split_a_part_suffices(trained, folders):
    run = experiments.load_run(trained[0])
    assert experiments.load_run(trained[0], run.step).step == run.step
    whole = experiments.features_of(run, "validation", folders=folders)
    assert whole.class_names == load_labels("icons", "validation", **vars(folders))[1]
    part = experiments.features_of(run, "validation", folders=folders, most=60)
    assert len(part.features) == len(part.labels) == 60
    assert (np.diff(part.labels) >= 0).all()
    rows = np.array([5, 59, 0])
    expected = expected_features(run, part.images(rows))
    np.testing.assert_allclose(part.features[rows], expected, rtol=1e-4, atol=16 * FLOAT32)
    known = {(bytes(image), label) for image, label in labelled(whole)}
    assert known.issuperset((bytes(image), label) for image, label in labelled(part))
    assert part.class_names == whole.class_names


def test_photographs_are_cropped_as_the_run_saw_them(voc, tmp_path):
    options = {"data.name": "voc2007@16", "steps": 1, "sampling.batch_size": 8}
    options |= {"model.weights": "", "model.backbone": "conv4", "model.widths": (4, 4, 4, 4)}
    options |= {"optimizer.backbone_rate": 1, "optimizer.warmup_steps": 0}
    experiments.train("voc2007", options, directory=tmp_path / "run", folders=voc)
    run = experiments.load_run(tmp_path / "run")
    found = experiments.features_of(run, folders=voc)
    assert found.labels.shape == (len(found.features), len(found.class_names))
    assert "aeroplane" in found.class_names
    rows, size = np.array([3, 0]), run.plan.image_shape
    assert found.images(rows).shape == (2, *size)
    data: Any = run.plan.config.data
    expected = expected_features(run, found.images(rows), np.array(data.mean), np.array(data.std))
    # The images are rounded to whole numbers.
    np.testing.assert_allclose(found.features[rows], expected, atol=0.02)


def test_evaluate_is_the_command(trained, folders):
    directory, report = trained
    run = experiments.load_run(directory)
    again = experiments.evaluate(run, folders=folders)
    episodes = again.pop("episodes")
    assert again == {key: report[key] for key in again}
    assert [*episodes] == [metric["name"] for metric in report["metrics"][:4]]

    given = [str(directory), "--set", "evaluation.ways=3", "evaluation.shots=2"]
    assert main(["evaluate", *given, "--data-dir", str(folders.data_dir)]) == 0
    # Names have the options, and do not replace the files of the run.
    name = directory / "evaluation-novel-step2,evaluation.ways=3,evaluation.shots=2"
    stored = json.loads(Path(f"{name}.json").read_text())
    assert Path(f"{name}-episodes.npz").exists()
    other = {"evaluation.ways": 3, "evaluation.shots": 2}
    found = experiments.evaluate(run, other, folders=folders)
    assert found["metrics"] == stored["metrics"] != report["metrics"]
    found = experiments.evaluate(run, split="validation", folders=folders)
    assert (found["split"], found["step"]) == ("validation", 2)
    outputs = experiments.features_of(run, "validation", folders=folders)
    expected = run.plan.protocol.evaluate("validation", {"validation": outputs}.__getitem__)
    assert found["metrics"] == expected["metrics"] != report["metrics"]


def test_options_are_those_of_the_command_line():
    start = PRESETS["icons"].config
    given = {
        "model.widths": np.array([4, 5, 6]),
        "evaluation.shots": 3,
        "evaluation.validation-episodes": "40",
        "data.std": "0.25+1e-1",
        "data.flip": False,
        "optimizer.learning_rate": np.float32(0.5),
        "data.name": "folder:a+b",
    }
    found: Any = set_options(start, given)
    assert (found.model.widths, found.evaluation.shots) == ((4, 5, 6), (3,))
    assert (found.data.std, found.data.flip, found.data.name) == ((0.25, 0.1), False, "folder:a+b")
    assert (found.evaluation.validation_episodes, found.optimizer.learning_rate) == (40, 0.5)
    assert all(type(width) is int for width in found.model.widths)
    assert found.loss == start.loss


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("icon", {}, "no preset icon; did you mean icons"),
        ("icons", {"step": 5}, "no option step; did you mean steps"),
        ("icons", {"preset": "icons-sphere"}, "no option preset; "),
        ("icons", {"loss.name": "direct:sce+ncaa"}, r"did you mean direct:sce\+nca "),
        ("icons", {"steps": 2.5}, "steps: '2.5' must be of type int"),
        ("icons", {"data.flip": 1}, "data.flip: '1' must be one of True, False"),
        ("icons", {"data.name": "icon"}, "icon"),
        (5, {}, "preset must be a name"),
    ],
)
def test_what_cannot_be_trained_is_an_error_before_anything_is_written(
    preset, options, message, tmp_path, folders
):
    with pytest.raises(ConfigError, match=message):
        experiments.train(preset, options, directory=tmp_path / "run", folders=folders)
    assert not [*tmp_path.iterdir()]


def test_errors_on_runs(trained, folders, tmp_path):
    directory, _ = trained
    run = experiments.load_run(directory)
    with pytest.raises(ConfigError, match="no split 'test'; it has base, validation, novel"):
        experiments.features_of(run, "test", folders=folders)
    with pytest.raises(ConfigError, match=r"most must be a whole number from 1, .*, got -5"):
        experiments.features_of(run, folders=folders, most=-5)
    for options, message in (
        ({"loss.name": "nca"}, "icons has no loss"),
        ({"evaluation.way": 1}, "no option evaluation.way; did you mean evaluation.ways"),
        ({"evaluation.shots": (1, 1)}, r"shots must be different values, got \(1, 1\)"),
        ({"evaluation.validation-episodes": 0}, "validation_episodes must be at least"),
    ):
        with pytest.raises(ConfigError, match=message):
            experiments.evaluate(run, options, folders=folders)
    with pytest.raises(ConfigMismatchError, match="another configuration"):
        experiments.train("icons-sphere", directory=directory, folders=folders)
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match=str(folder)):
            experiments.load_run(folder)
    with pytest.raises(ConfigError, match="best, latest or the number of a step, got 'first'"):
        experiments.load_run(directory, "first")


def test_an_unfinished_run_is_loaded_and_goes_on(trained, folders, tmp_path, killed_after):
    directory = tmp_path / "run"
    longer = OPTIONS | {"steps": 6, "validate_every": 2}

    def train() -> Any:
        return experiments.train("icons", longer, directory=directory, folders=folders)

    killed_after(5, train)
    run = experiments.load_run(directory, "latest")
    assert run.step == 4
    assert len(experiments.features_of(run, folders=folders).labels)
    report = train()
    assert experiments.load_run(directory, "latest").step == 6
    moved = directory.rename(tmp_path / "moved")
    again = experiments.evaluate(experiments.load_run(moved / "checkpoints"), folders=folders)
    assert again["metrics"] == report["metrics"]


def test_the_example_of_the_documents_runs(folders, tmp_path, monkeypatch, capsys):
    """On a smaller preset, and with the data of these tests."""
    text = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    small = set_options(PRESETS["icons"].config, OPTIONS)
    monkeypatch.setitem(PRESETS, "icons", PRESETS["icons"]._replace(config=small))
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(folders.data_dir))
    monkeypatch.chdir(tmp_path)
    block = block.replace('"steps": 400', '"steps": 2')
    block = block.replace("direct:sce+nca", "sce+nca")  # It needs more features than classes.
    exec(block, {})
    printed = capsys.readouterr().out
    assert "(2499, 128) (2499,) ('airplane', " in printed
    assert "5-shot accuracy (cosine) 0." in printed
    assert (tmp_path / "runs/icons/report.md").exists()


def test_importing_the_experiments_imports_nothing_else():
    code = "import sys, experiments; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert [name for name in done.stdout.split() if "experiments" in name] == ["experiments"]
    assert all(callable(getattr(experiments, name)) for name in experiments.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trains'"):
        _ = experiments.trains  # pyright: ignore[reportAttributeAccessIssue]
