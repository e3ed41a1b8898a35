"""`look`: the files of every protocol, the page, and the numbers that the pictures show."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import Mock
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.preprocessing import normalize

import experiments
from experiments import look
from experiments.cli.main import main
from experiments.core.config import Folders, ModelConfig, TrainConfig
from experiments.core.errors import ConfigError
from experiments.core.protocol import ImageSet, Outputs
from experiments.core.storage import write_json
from experiments.data.selection import part_of, some_rows
from experiments.evaluation.few_shot import evaluate_prototypes
from experiments.evaluation.fine_tuning import FineTuning, evaluate_fine_tuning
from experiments.look.charts import by_class, draw_tail, spectrum, training
from experiments.look.images import QUERIES, Cloud, draw_map, hard_episodes, neighbours, overview
from experiments.look.page import Picture, draw_image, short, write_page
from experiments.look.view import Side, View, view_run
from experiments.papers.classification import ClassificationData
from experiments.papers.hyperspherical import (
    HypersphericalConfig,
    HypersphericalEvaluation,
    HypersphericalLoss,
)
from experiments.papers.integration import IntegratedLoss
from experiments.papers.multi_label import MultiLabelConfig, MultiLabelData
from experiments.papers.negative_margin import MarginEvaluation, NegativeMarginConfig
from experiments.run import RestoredRun, build_learner, load_run, plan_run, train_run
from tests.experiments.tiny_runs import TINY
from tests.tolerances import FLOAT32

DPI = 50
FOUND = ("queries", "neighbours", "wrong")
EVERYWHERE = ["map", "class-map", "neighbours", "similarity"]
FEW_SHOT = dataclasses.replace(TINY, loss=IntegratedLoss(name="sce"), steps=2)
UNTRAINED: dict[str, tuple[TrainConfig, list[str]]] = {
    "hyperspherical": (
        HypersphericalConfig(
            model=ModelConfig(widths=(4, 4, 4, 4), dim=5),
            data=ClassificationData(classes=6, imbalance=0.05, holdout=0.0),
            loss=HypersphericalLoss(criterion="dot-regression"),
            evaluation=HypersphericalEvaluation(calibration="cosines"),
        ),
        [*EVERYWHERE, "accuracy", "reliability"],
    ),
    "negative-margin": (
        NegativeMarginConfig(
            model=TINY.model,
            evaluation=MarginEvaluation(episodes=8),
            fine_tuning=FineTuning(passes=2),
        ),
        ["accuracy", "episodes", "spectrum"],
    ),
    "multi-label": (
        MultiLabelConfig(model=TINY.model, data=MultiLabelData(name="voc2007@16")),
        # Fewer than three of the labels have an image with none of the others, for a class map.
        ["map", "neighbours", "similarity", "precision", "spectrum"],
    ),
}
"""A first state of a protocol, and its pictures; other protocols add none."""


class Looked(NamedTuple):
    view: View
    numbers: dict[str, Any]
    folders: Folders

    @property
    def shown(self) -> tuple[Outputs, tuple[str, ...]]:
        return self.view.shown.outputs, self.view.shown.outputs.class_names

    def result(self) -> dict[str, Any]:
        return experiments.evaluate(self.view.run, folders=self.folders)["result"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders) -> Looked:
    """A few-shot run, of which the command has drawn the page."""
    directory = tmp_path_factory.mktemp("run")
    train_run(plan_run(FEW_SHOT), directory, folders)
    given = ["look", str(directory), "--data-dir", str(folders.data_dir)]
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context({"savefig.dpi": DPI}):
        patch.setattr("experiments.look.images.TILES", 12)
        assert main(given) == 0
    numbers = json.loads((directory / "look" / "look.json").read_text())
    return Looked(view_run(load_run(directory), folders, "novel"), numbers, folders)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, folders, voc):
    """The pictures of a first state by the name of its protocol, drawn once but not written."""

    @cache
    def of(name: str) -> Looked:
        plan = plan_run(UNTRAINED[name][0])
        data = voc if name == "multi-label" else folders
        labels = plan.protocol.load(data, plan.protocol.splits[0]).labels
        counts = np.bincount(labels) if labels.ndim == 1 else (labels > 0).sum(0)
        graphdef, objective, _, state = build_learner(plan, counts, steps_per_epoch=1)
        parts = graphdef, objective, state
        run = RestoredRun(tmp_path_factory.mktemp(name), plan, *parts, 0, counts, None, [])
        seen = view_run(run, data, plan.protocol.splits[-1])
        # One protocol that holds classes out has all pictures: that of `trained`.
        drawn = [by_class, hard_episodes, spectrum] if seen.holds_classes_out else look._DRAWN
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("experiments.look.images.TILES", 4)
            pictures = [picture for draw in drawn if (picture := draw(seen))]
        return Looked(seen, {p.name: p.numbers for p in pictures}, data)

    return of


@pytest.mark.long
@pytest.mark.parametrize("name", UNTRAINED)
def test_every_protocol_has_its_pictures(untrained, name):
    assert sorted(untrained(name).numbers) == sorted(UNTRAINED[name][1])


@pytest.mark.long
def test_a_page_has_all_pictures_and_needs_no_other_file(trained):
    expected = [*EVERYWHERE, "accuracy", "episodes", "spectrum", "training"]
    folder = trained.view.run.directory / "look"
    text = (folder / "index.html").read_text()
    page = ElementTree.fromstring(text)
    assert [section.get("id") for section in page.iter("section")] == expected
    assert expected == list(trained.numbers)
    assert {path.stem for path in folder.glob("*.png")} == set(expected)
    # Nothing outside of the page, and no program.
    assert all(link.attrib["href"].startswith("#") for link in page.iter("a"))
    assert not {"script", "link", "iframe"} & {element.tag for element in page.iter()}
    assert "url(" not in text
    assert page.find(".//meta[@name='viewport']") is not None
    assert page.find(".//table") is None  # This run has no report.
    for name, image in zip(expected, page.iter("img"), strict=True):
        kind, _, content = image.attrib["src"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content) == (folder / f"{name}.png").read_bytes()
        width, height = Image.open(folder / f"{name}.png").size
        assert 4.7 < width / DPI < 14
        assert 2.7 < height / DPI < 13
        assert len(image.attrib["alt"]) > 80


@pytest.mark.long
def test_the_numbers_of_a_few_shot_run_are_those_of_its_features(trained):
    numbers, (novel, _) = trained.numbers, trained.shown
    sides = {side.split: side.outputs for side in trained.view.sides}
    units = [np.asarray(normalize(outputs.features)) for outputs in sides.values()]
    shares = PCA(2).fit(np.concatenate(units)).explained_variance_ratio_
    np.testing.assert_allclose(numbers["map"]["variance_shares"], shares, rtol=16 * FLOAT32)
    assert numbers["map"]["images_drawn"] <= 12

    queries, nearest, wrong = map(np.array, map(numbers["neighbours"].get, FOUND))
    cosines = units[1] @ units[1].T
    np.fill_diagonal(cosines, -2)
    largest = -np.sort(-cosines[queries], axis=1)[:, :8]
    found = np.take_along_axis(cosines[queries], nearest, axis=1)
    np.testing.assert_allclose(found, largest, rtol=4 * FLOAT32, atol=FLOAT32)
    np.testing.assert_array_equal(wrong, novel.labels[nearest] != novel.labels[queries, None])
    assert len(set(novel.labels[queries])) == QUERIES

    kernel, shown = trained.view.run.state.params["classifier"]["kernel"], numbers["spectrum"]
    assert kernel.shape == (128, 100)
    basis, values = np.linalg.qr(kernel)[0], np.linalg.svd(kernel)[1]
    for split, outputs in sides.items():
        inside = (outputs.features @ basis).var(0).sum() / outputs.features.var(0).sum()
        assert shown["inside"][split] == pytest.approx(inside, rel=1e-3)
    np.testing.assert_allclose(shown["singular_values"], values, rtol=16 * FLOAT32)
    assert list(shown["overlaps"]) == ["0.1", "0.2", "0.3", "0.5", "1"]
    for power, overlap in shown["overlaps"].items():
        relative = values / values[0]
        expected = (relative * (1 - relative ** float(power))).max()
        assert overlap == pytest.approx(expected, rel=1e-3)


def mean_accuracy(run: Looked, outputs: Outputs, evaluate: Callable[..., Any]) -> Any:
    """Over the 1-shot episodes of the evaluation."""
    config = dataclasses.replace(vars(run.view.run.plan.config)["evaluation"], shots=(1,))
    ((result, _),) = evaluate(outputs.features, outputs.labels, config=config)
    return pytest.approx(result.accuracy, abs=FLOAT32)


PROTOTYPES = partial(evaluate_prototypes, distance="euclidean")


@pytest.mark.long
def test_the_hardest_episodes_are_those_of_the_evaluation(trained, untrained):
    fine_tuned = partial(evaluate_fine_tuning, settings=FineTuning(passes=2))
    for run, evaluate in ((trained, PROTOTYPES), (untrained("negative-margin"), fine_tuned)):
        (novel, names), shown = run.shown, run.numbers["episodes"]
        assert shown["mean_accuracy"] == mean_accuracy(run, novel, evaluate)
        assert len(shown["episodes"]) == 4
        for episode in shown["episodes"]:
            right = (np.array(episode["predictions"]) == np.arange(5)[:, None]).mean()
            assert right == pytest.approx(episode["accuracy"])
            queries = novel.labels[np.array(episode["query"])]
            assert (queries == novel.labels[np.array(episode["support"])[:, :1]]).all()
            assert [names[c] for c in queries[:, 0]] == episode["classes"]
        accuracies = [episode["accuracy"] for episode in shown["episodes"]]
        assert accuracies == sorted(accuracies)
        assert accuracies[0] <= shown["mean_accuracy"]


def test_accuracy_and_calibration_are_those_of_the_report(untrained):
    run = untrained("hyperspherical")
    result, shown, (outputs, names) = run.result(), run.numbers["accuracy"]["test"], run.shown
    assert shown["mean"] == pytest.approx(result["accuracy"])
    counts = [np.bincount(side.outputs.labels) for side in run.view.sides]
    np.testing.assert_array_equal(counts[0], outputs.class_counts)
    assert counts[1].sum() == result["samples"]
    by_name = dict(zip(names, result["class_accuracies"], strict=True))
    assert shown["classes"] == pytest.approx(by_name)
    # A long tail, from its head.
    drawn = [outputs.class_counts[names.index(c)] for c in shown["classes"]]
    assert drawn == sorted(drawn, reverse=True)
    reliability = run.numbers["reliability"]
    assert reliability["calibration_error"] == pytest.approx(result["calibration_error"])
    assert sum(reliability["counts"]) == result["samples"]


@pytest.mark.long
def test_a_multi_label_run_shows_average_precision_and_shared_labels(untrained):
    run = untrained("multi-label")
    result, shown, (outputs, names) = run.result(), run.numbers["precision"]["test"], run.shown
    assert shown["mean"] == pytest.approx(result["map_class"])
    known = zip(names, result["class_precisions"], strict=True)
    assert shown["classes"] == pytest.approx({name: ap for name, ap in known if ap is not None})
    queries, nearest, wrong = map(np.array, map(run.numbers["neighbours"].get, FOUND))
    labels = outputs.labels > 0
    np.testing.assert_array_equal(wrong, ~(labels[queries, None] & labels[nearest]).any(2))


@pytest.mark.long
def test_another_split_and_checkpoint_have_a_folder_of_their_own(trained, capsys, monkeypatch):
    def impossible(view):
        raise ConfigError("there is nothing to draw")

    monkeypatch.setattr("experiments.look.view.MOST_IMAGES", 40)
    monkeypatch.setattr(look, "_DRAWN", [overview, neighbours, hard_episodes, impossible])
    monkeypatch.setitem(matplotlib.rcParams, "savefig.dpi", DPI)
    given = ["look", str(trained.view.run.directory), "--data-dir", str(trained.folders.data_dir)]
    assert main([*given, "--split", "base", "--checkpoint", "2"]) == 0
    assert "look-base-step2/index.html" in capsys.readouterr().out
    folder = trained.view.run.directory / "look-base-step2"
    text = (folder / "index.html").read_text()
    assert "The base split has 4,650 images; map and neighbours show a random part of 40." in text
    assert "A picture is missing: there is nothing to draw." in text
    assert {path.stem for path in folder.glob("*.png")} == {"map", "neighbours", "episodes"}
    numbers = json.loads((folder / "look.json").read_text())
    found, part = numbers["neighbours"], set(some_rows(4650, 40).tolist())
    assert part.issuperset(np.ravel(found["neighbours"]).tolist() + found["queries"])
    # Episodes are those of the evaluation, of all images.
    base = trained.view.sides[0].outputs
    assert numbers["episodes"]["mean_accuracy"] == mean_accuracy(trained, base, PROTOTYPES)
    assert main([*given, "--split", "test"]) == 2
    assert "no split 'test'; it has base, validation, novel" in capsys.readouterr().err


def test_of_many_training_images_a_random_part_is_read():
    table = np.arange(50, dtype=np.uint8).reshape(50, 1, 1, 1)
    whole = ImageSet(table, np.arange(50), tuple(map(str, range(50))))
    part = part_of(whole, 8)
    assert len(part.images) == len(np.unique(part.labels)) == 8
    assert (np.diff(part.labels) > 0).all()
    assert part.labels.max() > 8
    rows = np.array([5, 0])
    np.testing.assert_array_equal(part.images[rows].ravel(), part.labels[rows])


def test_grey_images_are_ink_and_colours_stay():
    def drawn(image: np.ndarray) -> np.ndarray:
        axes = Figure().subplots()
        draw_image(axes, image, (0, 0), side=1, frame="none", ink="#0072B2")
        return np.asarray(axes.images[0].get_array())

    def read(image: np.ndarray) -> np.ndarray:
        nothing = np.zeros((1, 2), np.float32)
        outputs = Outputs(nothing, np.zeros(1, int), lambda: nothing, np.ones(1, int))
        outputs = outputs._replace(images=lambda rows: image[None][rows])
        return Side("test", outputs, "red").read([0])[0]

    grey = np.zeros((4, 6, 1), np.uint8)
    grey[1, 2] = 255
    ink = drawn(grey)
    assert ink.shape == (4, 6, 4)
    assert 255 * ink[1, 2] == pytest.approx([0, 0x72, 0xB2, 255])
    assert ink[0, 0, 3] == 0
    np.testing.assert_array_equal(read(grey), grey)
    np.testing.assert_array_equal(read(255 - grey), grey)  # Dark on light.
    photograph = np.random.default_rng(0).integers(0, 256, (5, 5, 3), np.uint8)
    np.testing.assert_array_equal(drawn(photograph), photograph)
    np.testing.assert_array_equal(read(255 + 0 * photograph), 255 + 0 * photograph)


def test_characters_that_the_font_does_not_have_are_code_points():
    assert short("été", 9) == "été"
    assert short("木, 1", 9) == "U+6728, 1"
    assert short("a_$1_longer", 8) == "a \\$1 l…".replace("\\$", r"\$")


def test_a_map_has_at_most_so_many_tiles_and_none_hides_another():
    side = Mock()  # No image has any ink.
    side.read.return_value = np.zeros((1, 8, 8, 1), np.uint8)
    side.outputs.features = np.random.default_rng(0).normal(size=(200, 5))
    clouds = [Cloud(side, "a", np.arange(150)), Cloud(side, "b", np.arange(150, 200))]
    assert draw_map(Figure().subplots(), clouds, size=4, tiles=30)["images_drawn"] == 30
    rows = np.ravel([call.args for call in side.read.call_args_list])
    # Turn by turn: a quarter of the images has about half of the tiles.
    assert 10 < np.sum(rows >= 150) < 20
    assert len(np.unique(rows)) == len(rows) == 30
    side.outputs.features = np.ones((5, 5))
    shown = draw_map(Figure().subplots(), [Cloud(side, "a", np.arange(5))], size=4, tiles=30)
    assert shown["images_drawn"] == side.read.call_count - 30 == 1


@pytest.mark.long
def test_curves_of_one_kind_share_a_panel_and_validation_has_its_unit(untrained, tmp_path):
    rows = [
        {"step": 1, "loss": 3.0, "softmax_loss": 2.0, "tight_loss": 4.0, "images_per_second": 9},
        {"step": 2, "loss": 2.0, "softmax_loss": 1.0, "tight_loss": "NaN", "train_accuracy": 0.5},
        {"step": 2, "validation": 0.25},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen = untrained("hyperspherical").view
    picture = training(seen._replace(run=dataclasses.replace(seen.run, directory=tmp_path)))
    assert picture is not None
    panels = {axes.get_title(): axes for axes in picture.figure.axes}
    assert list(panels) == ["loss", "validation: accuracy (%)", "train accuracy"]
    assert len(panels["loss"].lines) == 4  # Three losses, and the line of the checkpoint.
    tight = np.asarray(panels["loss"].lines[2].get_ydata())
    np.testing.assert_array_equal(tight, [4, np.nan])
    assert panels["validation: accuracy (%)"].lines[0].get_ydata() == pytest.approx([25])
    last = {"loss": 2.0, "softmax_loss": 1.0, "tight_loss": None, "train_accuracy": 0.5}
    assert picture.numbers["last"] == last | {"validation": 0.25}


def test_a_long_tail_has_an_axis_for_its_training_images():
    figure = Figure()
    axes, values = figure.subplots(), pd.Series(np.linspace(90, 10, 20))
    draw_tail(axes, values, pd.Series(np.geomspace(100, 2, 20).astype(int)))
    assert [panel.get_ylabel() for panel in figure.axes] == ["", "training images"]
    moving = np.asarray(axes.lines[-1].get_ydata())
    assert moving[7:13] == pytest.approx([values[n : n + 15].mean() for n in range(6)])


def test_text_of_the_page_is_escaped(tmp_path):
    picture = Picture("a", "<b>", 'say "x" & y', (1, 1))
    metric = {"name": "mAP<", "unit": "%", "value": 0.8125, "interval": 0.01}
    report = {"step": 7, "split": "<s>", "metrics": [metric]}
    words = {"title": "A<B", "summary": "<i>", "command": "<c>"}
    (file, *_) = write_page(tmp_path, [picture], ["<u>"], report, **words)
    page = ElementTree.fromstring(file.read_text())
    texts = {".//h1": "A<B", ".//h2": "<b>", ".//header/p": "<i>", ".//nav/a": "<b>"}
    texts |= {".//li": "<u>", ".//code": "<c>", ".//figcaption": 'say "x" & y'}
    texts |= {".//caption": "Report of step 7, <s> images", ".//tbody//td": "81.2 % ± 1.0"}
    texts |= {".//tbody//th": "mAP<", ".//title": "A<B"}
    assert {path: page.findtext(path) for path in texts} == texts
    assert [image.attrib["alt"] for image in page.iter("img")] == ['<b>. say "x" & y']


def test_only_pictures_of_its_own_are_removed_and_no_link_is_followed(tmp_path):
    """Text of others is text in the page."""
    picture = Picture("map", "a\n<b>\x1b", "", (1.0, 1.0))
    write_json(tmp_path / "look.json", {"old": {}, "../secret": {}})
    for name in ("old.png", "mine.png", "../secret.png"):
        (tmp_path / name).write_text("")
    texts: Any = {"title": "a\u202eb", "summary": "", "command": ""}
    write_page(tmp_path, [picture], [], **texts)
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"mine.png", "map.png"}
    assert (tmp_path / "../secret.png").exists()
    page = (tmp_path / "index.html").read_text()
    assert "<title>a\\u202eb</title>" in page
    assert r"a\n&lt;b&gt;\x1b" in page
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ConfigError, match="link is a link"):
        write_page(tmp_path / "link", [], [], **texts)
