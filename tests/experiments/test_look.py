"""`look`: the files of every protocol, the page, and the numbers that the pictures show."""

from __future__ import annotations

import base64
import dataclasses
import json
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import Mock
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from sklearn.preprocessing import normalize

import experiments
from experiments import look
from experiments.cli.main import main
from experiments.core.config import Folders, ModelConfig, TrainConfig
from experiments.core.errors import ConfigError
from experiments.core.protocol import Outputs
from experiments.data.selection import some_rows
from experiments.evaluation.few_shot import evaluate_prototypes
from experiments.evaluation.fine_tuning import FineTuning, evaluate_fine_tuning
from experiments.look.charts import by_class, spectrum, training
from experiments.look.images import QUERIES, draw_map, hard_episodes, neighbours, overview
from experiments.look.page import Picture, draw_image, short, wrapped, write_page
from experiments.look.view import View, view_run
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
UNTRAINED: dict[str, tuple[TrainConfig, list[str]]] = {
    "hyperspherical": (
        HypersphericalConfig(
            model=ModelConfig(widths=(4, 4, 4, 4), dim=5),
            data=ClassificationData(classes=6, imbalance=0.05, holdout=0.0),
            loss=HypersphericalLoss(criterion="dot-regression"),
            evaluation=HypersphericalEvaluation(calibration="cosines"),
        ),
        [*EVERYWHERE, "accuracy", "confusion", "mistakes", "reliability"],
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
    def outputs(self) -> Outputs:
        return self.view.shown.outputs


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders) -> Looked:
    """A few-shot run, of which the command has drawn the page."""
    directory = tmp_path_factory.mktemp("run")
    config = dataclasses.replace(TINY, loss=IntegratedLoss(name="sce"), steps=2)
    train_run(plan_run(config), directory, folders)
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
        drawn = [by_class, hard_episodes, spectrum] if seen.holds_classes_out else look.DRAWN
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
    for name, image in zip(expected, page.iter("img"), strict=True):
        kind, _, content = image.attrib["src"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content) == (folder / f"{name}.png").read_bytes()


@pytest.mark.long
def test_the_numbers_of_a_few_shot_run_are_those_of_its_features(trained):
    numbers, novel = trained.numbers, trained.outputs
    sides = {side.split: side.outputs for side in trained.view.sides}
    units = [np.asarray(normalize(outputs.features)) for outputs in sides.values()]
    shares = PCA(2).fit(np.concatenate(units)).explained_variance_ratio_
    np.testing.assert_allclose(numbers["map"]["variance_shares"], shares, rtol=16 * FLOAT32)
    assert numbers["map"]["images_drawn"] <= 12

    queries, nearest, wrong = map(np.array, map(numbers["neighbours"].get, FOUND))
    cosines = units[1] @ units[1].T
    np.fill_diagonal(cosines, -2)
    largest = -np.sort(-cosines, axis=1)[:, :8]
    found = np.take_along_axis(cosines[queries], nearest, axis=1)
    np.testing.assert_allclose(found, largest[queries], rtol=4 * FLOAT32, atol=FLOAT32)
    np.testing.assert_array_equal(wrong, novel.labels[nearest] != novel.labels[queries, None])
    assert len(set(novel.labels[queries])) == QUERIES
    right = novel.labels[np.argsort(-cosines, axis=1)[:, :8]] == novel.labels[:, None]
    assert numbers["neighbours"]["precision"] == pytest.approx(right.mean(), abs=1e-3)

    kernel, shown = trained.view.run.state.params["classifier"]["kernel"], numbers["spectrum"]
    basis, values = np.linalg.qr(kernel)[0], np.linalg.svd(kernel)[1]
    for split, outputs in sides.items():
        inside = (outputs.features @ basis).var(0).sum() / outputs.features.var(0).sum()
        assert shown["inside"][split] == pytest.approx(inside, rel=1e-3)
    np.testing.assert_allclose(shown["singular_values"], values, rtol=16 * FLOAT32)


def mean_accuracy(run: Looked, outputs: Outputs, evaluate: Any) -> Any:
    """Over the 1-shot episodes of the evaluation."""
    config = dataclasses.replace(vars(run.view.run.plan.config)["evaluation"], shots=(1,))
    ((result, _),) = evaluate(outputs.features, outputs.labels, config=config)
    return pytest.approx(result.accuracy, abs=FLOAT32)


PROTOTYPES = partial(evaluate_prototypes, distance="euclidean")


@pytest.mark.long
def test_the_hardest_episodes_are_those_of_the_evaluation(trained, untrained):
    fine_tuned = partial(evaluate_fine_tuning, settings=FineTuning(passes=2))
    for run, evaluate in ((trained, PROTOTYPES), (untrained("negative-margin"), fine_tuned)):
        novel, shown = run.outputs, run.numbers["episodes"]
        assert shown["mean_accuracy"] == mean_accuracy(run, novel, evaluate)
        assert len(shown["episodes"]) == 4
        for episode in shown["episodes"]:
            right = (np.array(episode["predictions"]) == np.arange(5)[:, None]).mean()
            assert right == pytest.approx(episode["accuracy"])
            queries = novel.labels[np.array(episode["query"])]
            assert (queries == novel.labels[np.array(episode["support"])[:, :1]]).all()
            assert [novel.class_names[c] for c in queries[:, 0]] == episode["classes"]
        accuracies = [episode["accuracy"] for episode in shown["episodes"]]
        assert accuracies == sorted(accuracies)
        assert accuracies[0] <= shown["mean_accuracy"]


def test_accuracy_and_calibration_are_those_of_the_report(untrained):
    run = untrained("hyperspherical")
    result = experiments.evaluate(run.view.run, folders=run.folders)["result"]
    shown, reliability = run.numbers["accuracy"]["test"], run.numbers["reliability"]
    assert shown["mean"] == pytest.approx(result["accuracy"])
    accuracies = dict(zip(run.outputs.class_names, result["class_accuracies"], strict=True))
    assert shown["classes"] == pytest.approx(accuracies)
    assert reliability["calibration_error"] == pytest.approx(result["calibration_error"])
    assert sum(reliability["counts"]) == result["samples"]
    table, mistakes = np.array(run.numbers["confusion"]["counts"]), run.numbers["mistakes"]
    np.testing.assert_array_equal(table.sum(1), np.bincount(run.outputs.labels))
    np.testing.assert_allclose(table.diagonal() / table.sum(1), result["class_accuracies"])
    assert len(mistakes["rows"]) == table.sum() - table.trace()
    found = run.outputs.logits()[mistakes["rows"]].argmax(1)
    assert mistakes["predicted"] == [run.outputs.class_names[c] for c in found]


@pytest.mark.long
def test_a_multi_label_run_shows_average_precision_and_shared_labels(untrained):
    run = untrained("multi-label")
    result = experiments.evaluate(run.view.run, folders=run.folders)["result"]
    shown = run.numbers["precision"]["test"]
    assert shown["mean"] == pytest.approx(result["map_class"])
    known = zip(run.outputs.class_names, result["class_precisions"], strict=True)
    assert shown["classes"] == pytest.approx({name: ap for name, ap in known if ap is not None})
    queries, nearest, wrong = map(np.array, map(run.numbers["neighbours"].get, FOUND))
    labels = run.outputs.labels > 0
    np.testing.assert_array_equal(wrong, ~(labels[queries, None] & labels[nearest]).any(2))


@pytest.mark.long
def test_another_split_and_checkpoint_have_a_folder_of_their_own(trained, capsys, monkeypatch):
    def impossible(view):
        raise ConfigError("there is nothing to draw")

    monkeypatch.setattr("experiments.look.view.MOST_IMAGES", 40)
    monkeypatch.setattr(look, "DRAWN", [overview, neighbours, hard_episodes, impossible])
    given = ["look", str(trained.view.run.directory), "--data-dir", str(trained.folders.data_dir)]
    assert main([*given, "--split", "base", "--checkpoint", "2"]) == 0
    assert "look-base-step2/index.html" in capsys.readouterr().out
    folder = trained.view.run.directory / "look-base-step2"
    text = (folder / "index.html").read_text()
    assert "The base split has 4,650 images; map and neighbours show a random part of 40." in text
    assert "A picture is missing: there is nothing to draw." in text
    numbers = json.loads((folder / "look.json").read_text())
    found, part = numbers["neighbours"], set(some_rows(4650, 40).tolist())
    assert part.issuperset(np.ravel(found["neighbours"]).tolist() + found["queries"])
    # Episodes are those of the evaluation, of all images.
    base = trained.view.sides[0].outputs
    assert numbers["episodes"]["mean_accuracy"] == mean_accuracy(trained, base, PROTOTYPES)
    assert main([*given, "--split", "test"]) == 2
    assert "no split 'test'; it has base, validation, novel" in capsys.readouterr().err


def test_curves_of_one_kind_share_a_panel_and_validation_has_its_unit(untrained, tmp_path):
    rows = [
        {"step": 1, "loss": 3.0, "softmax_loss": 2.0, "tight_loss": 4.0, "images_per_second": 9},
        {"step": 2, "loss": 2.0, "softmax_loss": 1.0, "tight_loss": "NaN", "train_accuracy": 0.5},
        {"step": 2, "validation": 0.25},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen = untrained("hyperspherical").view
    picture: Any = training(seen._replace(run=dataclasses.replace(seen.run, directory=tmp_path)))
    titles = [axes.get_title() for axes in picture.figure.axes]
    assert titles == ["loss", "validation: accuracy (%)", "train accuracy"]
    last = {"loss": 2.0, "softmax_loss": 1.0, "tight_loss": None, "train_accuracy": 0.5}
    assert picture.numbers["last"] == last | {"validation": 0.25}


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_drawn_upright_in_its_square(channels):
    image = np.random.default_rng(0).integers(0, 256, (4, 4, channels), np.uint8)
    axes = Figure(dpi=100).subplots()
    draw_image(axes, image, 2, 5, 1, "red")
    drawn = axes.images[0]
    np.testing.assert_array_equal(drawn.get_array(), image.squeeze())
    assert (drawn.origin, drawn.get_clim()[0] if channels == 1 else 0) == ("upper", 0)
    assert drawn.get_extent() == pytest.approx([1.56, 2.44, 4.56, 5.44])


def test_a_map_has_at_most_so_many_tiles_and_none_hides_another():
    side = Mock()
    side.outputs.images.return_value = np.zeros((1, 8, 8, 1), np.uint8)
    side.outputs.features = np.random.default_rng(0).normal(size=(200, 5))
    clouds = [(side, "a", np.arange(150)), (side, "b", np.arange(150, 200))]
    assert draw_map(Figure().subplots(), clouds, size=4, tiles=30)["images_drawn"] == 30
    rows = np.ravel([call.args for call in side.outputs.images.call_args_list])
    # Turn by turn: a quarter of the images has about half of the tiles.
    assert 10 < np.sum(rows >= 150) < 20
    assert len(np.unique(rows)) == len(rows) == 30
    side.outputs.features = np.ones((5, 5))
    shown = draw_map(Figure().subplots(), [(side, "a", np.arange(5))], size=4, tiles=30)
    assert shown["images_drawn"] == 1


def test_text_of_the_page_is_escaped(tmp_path):
    picture = Picture("a", "<b>\n\x1b", 'say "x" & y', (1, 1))
    words = {"title": "A<B\u202e", "summary": "<i>", "command": "<c>"}
    (file, *_) = write_page(tmp_path, [picture], ["<u>"], **words)
    page = ElementTree.fromstring(file.read_text())
    texts = {".//h1": "A<B\\u202e", ".//h2": "<b>\\n\\x1b", ".//p": "<i>", ".//li": "<u>"}
    texts |= {".//code": "<c>", ".//figcaption": 'say "x" & y'}
    assert {path: page.findtext(path) for path in texts} == texts
    # Names in pictures: cut, and without characters that the font lacks.
    shown = [short("été", 9), short("木, 1", 9), short("a_longer", 5)]
    assert shown == ["été", "U+6728, 1", "a_lo…"]
    assert wrapped("a copper beech with leaves", 8, 2) == "a copper\nbeech w…"
    assert wrapped("木 beech", 9, 3) == "U+6728\nbeech"
