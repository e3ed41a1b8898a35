"""Protocol E from its loss to its report, on a run of a few steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from experiments.assembly import check_data, plan_run
from experiments.cli.main import main
from experiments.config import Folders, ModelConfig, OptimizerConfig, SamplingConfig
from experiments.contracts import Outputs, Problem
from experiments.data.pipeline import class_counts, load_split
from experiments.data.sampling import episodes_hash, evaluation_episodes
from experiments.errors import ConfigError
from experiments.evaluation.fine_tuning import FineTuning, evaluate_fine_tuning
from experiments.protocols import margin_data, negative_margin
from experiments.protocols.margin_data import MarginData
from experiments.protocols.negative_margin import (
    MarginEvaluation,
    MarginLoss,
    NegativeMarginConfig,
)
from experiments.reporting.results import interval
from experiments.reporting.run import read_episodes, report_lines, run_report
from experiments.restored import evaluate_run, restore_run
from experiments.training.outputs import build_outputs
from tests.experiments import fake_archives
from tests.jaxloss import references

EVALUATION = MarginEvaluation(
    ways=3,
    shots=(2,),
    queries=4,
    episodes=8,
    selection="fine-tuned",
    validation_shots=3,
    validation_episodes=6,
)
TINY = NegativeMarginConfig(
    data=MarginData(holdout=0.35),
    sampling=SamplingConfig(batch_size=16),
    model=ModelConfig(widths=(4, 4, 4, 4)),
    loss=MarginLoss(name="cosine", margin=-0.1),
    optimizer=OptimizerConfig(kind="adam", learning_rate=3e-3, warmup_steps=1, warmup_from=1 / 16),
    evaluation=EVALUATION,
    fine_tuning=FineTuning(passes=3),
    steps=4,
    validate_every=2,
    log_every=1,
    report_last=True,
)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"name": "cosine", "margin": -0.1}, 30),
        ({"name": "softmax", "margin": -0.3}, 5),
        ({"name": "softmax", "margin": 0.2, "scale": 2.0}, 2),
        ({"name": "cosine", "margin": 0.0, "label_smoothing": 0.05}, 30),
    ],
)
def test_the_objective_is_the_papers(changes, scale):
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(7, 6)).astype(np.float32), np.array([0, 3, 1, 1, 2, 0, 3])
    config = NegativeMarginConfig(loss=MarginLoss(**changes))
    objective = negative_margin.build(config).objective(Problem(6, np.full(4, 10)))
    head = objective.init_head(jax.random.key(0))
    assert head["kernel"].shape == (6, 4)
    found = objective.loss(jax.numpy.asarray(features), jax.numpy.asarray(labels), head, ())

    kernel, x = np.asarray(head["kernel"], np.float64), features.astype(np.float64)
    if config.loss.name == "cosine":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        kernel = kernel / np.linalg.norm(kernel, axis=0)
    logits = x @ kernel
    loss = config.loss
    options = {"margin": loss.margin, "label_smoothing": loss.label_smoothing, "scale": scale}
    expected = references.classifier_loss(x, labels, kernel, **options)
    assert float(found.value) == pytest.approx(expected, rel=1e-5)
    assert float(found.means["train_accuracy"]) == pytest.approx(
        np.mean(logits.argmax(1) == labels)
    )
    found = objective.logits(jax.numpy.asarray(features), head, ())
    np.testing.assert_allclose(found, scale * logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cosine", "softmax"])
def test_the_classifier_starts_with_the_spread_of_the_authors(name):
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.init.kaiming_uniform_(torch.empty(64, 512), a=5**0.5, generator=generator)
    objective = negative_margin.build(NegativeMarginConfig(loss=MarginLoss(name=name))).objective(
        Problem(512, np.full(64, 10))
    )
    head = objective.init_head(jax.random.key(0))
    assert head.keys() == {"kernel"}
    assert np.std(head["kernel"]) == pytest.approx(float(weight.std()), rel=0.03)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders) -> Path:
    """A run directory, made by the command line."""
    directory = tmp_path_factory.mktemp("run")
    options = [
        *("--data.holdout", "0.35", "--sampling.batch-size", "16", "--steps", "4"),
        *("--model.widths", "4", "4", "4", "4", "--optimizer.warmup-steps", "1"),
        *("--evaluation.ways", "3", "--evaluation.shots", "2", "--evaluation.queries", "4"),
        *("--evaluation.episodes", "8", "--fine-tuning.passes", "3", "--validate-every", "2"),
        *("--evaluation.validation-episodes", "6", "--log-every", "1", "--loss.margin", "-0.1"),
        *("--evaluation.selection", "fine-tuned", "--evaluation.validation-shots", "3"),
        "--report-last",
        *("--directory", str(directory), "--data-dir", str(folders.data_dir)),
    ]
    assert main(["train", "icons-margin", *options]) == 0
    return directory


def test_a_run_is_evaluated_on_all_classes(trained, folders):
    report = json.loads((trained / "report.json").read_text())
    kinds = ("2-shot", "discriminability", "D_intra", "D_inter")
    splits = ("novel", "validation", "base")
    best, last = report["metrics"][:14], report["metrics"][14:]
    names = [f"{split} {kind}" for kind in kinds for split in splits]
    names += ["novel P^s", "validation P^s"]
    assert [metric["name"] for metric in best] == names
    assert [metric["name"] for metric in last] == [f"{name} (last)" for name in names]
    declared = [metric.name for metric in plan_run(TINY).protocol.metrics]
    assert declared == [*names, *(f"{name} (last)" for name in names)]
    assert [metric["unit"] for metric in best] == ["%"] * 3 + [""] * 11
    lower = [metric["name"] for metric in best if not metric["higher_is_better"]]
    assert lower == [f"{split} D_intra" for split in splits]
    assert [r["split"] for r in report["results"]] == ["novel", "validation", "base"]
    run = restore_run(trained)
    config = run.plan.config
    assert isinstance(config, NegativeMarginConfig)
    assert (config.evaluation, config.data) == (EVALUATION, TINY.data)
    outputs = build_outputs(
        run.network.graphdef, run.network.objective, config.data, run.class_counts
    )
    images = margin_data.load(config.data, folders, "held-out")
    features = outputs(run.state, images).features
    ((expected, accuracies),) = evaluate_fine_tuning(
        features, images.labels, config=EVALUATION, settings=FineTuning(passes=3)
    )
    assert [{"split": "base"} | expected._asdict()] == report["results"][2:]
    values = {metric["name"]: metric["value"] for metric in report["metrics"]}
    assert values["base 2-shot"] == expected.accuracy
    assert report["metrics"][2]["interval"] == expected.interval
    # Accuracies of single episodes are beside the report.
    episodes = read_episodes(trained)
    assert list(episodes) == [*names[:3], *(f"{name} (last)" for name in names[:3])]
    np.testing.assert_array_equal(episodes["base 2-shot"], accuracies)
    assert "episodes" not in report

    length = np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    unit = features / np.where(length > 0, length, 1)
    square = (unit**2).sum(1)
    apart = (square[:, None] + square) / 2 - unit @ unit.T
    same = images.labels[:, None] == images.labels
    intra = apart[same & ~np.eye(len(same), dtype=bool)].mean()
    inter = apart[~same].mean()
    assert report["discriminability"].keys() == {"novel", "validation", "base"}
    assert report["discriminability"]["base"] == pytest.approx(
        {"intra": intra, "inter": inter, "ratio": inter / intra}, rel=1e-3
    )
    scatter = report["discriminability"]["base"]
    for title, name in (("discriminability", "ratio"), ("D_intra", "intra"), ("D_inter", "inter")):
        assert values[f"base {title}"] == scatter[name]
    # Eq. (10): its right-hand side, with the share that was found, is D_intra of the split.
    for part in ("novel", "validation"):
        share = values[f"{part} P^s"]
        assert report["same_class_share"][part] == share
        mixture = share * scatter["intra"] + (1 - share) * scatter["inter"]
        assert mixture == pytest.approx(report["discriminability"][part]["intra"])
    assert report["validation"]["name"] == "3-shot accuracy"
    assert report["validation"]["value"] == run.validation


def test_the_last_checkpoint_is_reported_too(trained, folders):
    report = json.loads((trained / "report.json").read_text())
    _, expected = evaluate_run(trained, folders, which="latest")
    last = [metric["value"] for metric in report["metrics"][14:]]
    assert last == [metric["value"] for metric in expected["metrics"]]
    assert report["last"]["step"] == expected["step"] == 4
    is_best, same = "The best checkpoint is the last one.", report["step"] == 4
    expected = is_best if same else "Of the last checkpoint, that of step 4:"
    assert expected in (trained / "report.md").read_text()
    same = report | {"last": report["last"] | {"step": report["step"]}}
    assert report_lines(negative_margin.build(TINY), same)[-1] == is_best


def test_the_report_names_its_episodes(trained, folders):
    report = json.loads((trained / "report.json").read_text())
    novel = load_split("icons", "novel", data_dir=folders.data_dir).labels
    episodes = evaluation_episodes(novel, num_episodes=8, ways=3, shots=2, queries=4, seed=0)
    assert report["results"][0]["hash"] == episodes_hash(episodes)
    text = (trained / "report.md").read_text()
    lines = report_lines(negative_margin.build(TINY), report)
    assert text.startswith(run_report(report, lines))
    result = report["results"][0]
    accuracy, interval = f"{100 * result['accuracy']:.2f}", f"± {100 * result['interval']:.2f}"
    hashed = episodes_hash(episodes)
    assert ["novel", "2", accuracy, interval, "8", hashed] in rows(text)
    assert "3 passes of fine-tuning a cosine classifier" in text
    compact = f"{report['same_class_share']['novel']:.3f}"
    for split, share in (("novel", compact), ("base", "–")):
        scatter = report["discriminability"][split]
        numbers = [f"{scatter[name]:.4f}" for name in ("intra", "inter", "ratio")]
        assert [split, *numbers, share] in rows(text)
    assert "Images of the base classes (icons): held out from training." in lines
    told = run_report(report | {"weights": "resnet18.safetensors"}, lines)
    assert "The backbone started from resnet18.safetensors." in told


def test_a_share_of_pairs_needs_base_classes_that_are_apart():
    novel = {"intra": 0.2, "inter": 0.4, "ratio": 2.0}
    shares = negative_margin.same_class_shares
    assert shares({"novel": novel}) == {}
    apart = {"intra": 0.25, "inter": 0.5, "ratio": 2.0}
    assert shares({"novel": novel, "base": apart}) == {"novel": pytest.approx(1.2)}
    for inter in (0.25, 0.25 + 1e-8, 0.2):
        assert shares({"novel": novel, "base": apart | {"inter": inter}}) == {"novel": None}


def random_scatters(rng: np.random.Generator, *, apart: float) -> dict[str, dict[str, float]]:
    """Of base and novel classes; D_intra of base classes is `apart` of their D_inter."""
    inter, novel_inter = rng.uniform(0.4, 0.6, 2)
    return {
        "novel": {"intra": 0.3, "inter": novel_inter},
        "base": {"intra": apart * inter, "inter": inter},
    }


def discriminability_by_eq_11(scatters: dict[str, dict[str, float]], share: float) -> float:
    novel, base = scatters["novel"], scatters["base"]
    return novel["inter"] / (share * base["intra"] + (1 - share) * base["inter"])


def test_below_the_bound_on_the_share_a_margin_is_more_discriminable_than_the_baseline():
    rng = np.random.default_rng(0)
    defined = 0
    for _ in range(50):
        # The smaller margin has the base classes closer together.
        pair = [random_scatters(rng, apart=rng.uniform(low, low + 0.2)) for low in (0.6, 0.4)]
        bound = negative_margin.share_bounds(*pair)["novel"]
        if bound is None:
            continue
        defined += 1
        for share in (bound - 0.01, bound, bound + 0.01):
            first, second = (discriminability_by_eq_11(scatters, share) for scatters in pair)
            assert (
                first - second == pytest.approx(0, abs=1e-9)
                if share == bound
                else ((first > second) == (share < bound))
            )
    assert defined > 25


def test_a_bound_on_the_share_is_undefined_where_the_share_is():
    rng = np.random.default_rng(1)
    apart, together = random_scatters(rng, apart=0.5), random_scatters(rng, apart=1 - 1e-8)
    for pair in ((apart, together), (together, apart)):
        assert negative_margin.share_bounds(*pair) == {"novel": None}
    # Of two equal runs, no share decides.
    assert negative_margin.share_bounds(apart, apart) == {"novel": None}
    without_base = {"novel": apart["novel"]}
    assert negative_margin.share_bounds(without_base, without_base) == {}


def test_bounds_can_be_shown_in_a_grid_with_a_baseline():
    plan = plan_run(TINY)
    pair_metrics = plan.protocol.pair_metrics
    assert pair_metrics is not None
    rng = np.random.default_rng(3)
    pair = [{"discriminability": random_scatters(rng, apart=a)} for a in (0.7, 0.5)]
    (bound,) = pair_metrics.measure(*pair)
    assert pair_metrics.metrics[0].measured(bound["value"]) == bound
    assert bound["name"] == "novel P^s bound"


@pytest.mark.parametrize(("classifier", "forms"), [("cosine", 1), ("linear", 2)])
def test_inner_products_are_evaluated_on_normalised_features_too(classifier, forms):
    rng = np.random.default_rng(2)
    labels = np.arange(80) % 4
    features = rng.normal(size=(4, 5))[labels] + rng.normal(size=(80, 5))
    features = (features * rng.lognormal(sigma=1.5, size=(80, 1))).astype(np.float32)
    outputs = Outputs(features, labels, lambda: features, np.ones(4, int))
    evaluation, settings = dataclasses.replace(EVALUATION, shots=(1, 3)), FineTuning(passes=3)
    found = negative_margin.evaluate(
        MarginData(), evaluation, classifier, settings, "validation", lambda split: outputs
    )
    lengths = np.sqrt((features.astype(np.float64) ** 2).sum(1, keepdims=True))
    expected = {}
    for suffix, given in {"": features, " (normalised features)": features / lengths}.items():
        for result, _ in evaluate_fine_tuning(
            given, labels, config=evaluation, classifier=classifier, settings=settings
        ):
            expected[f"validation {result.shots}-shot{suffix}"] = result.accuracy
    assert len(set(expected.values())) == (4 if forms == 2 else 2)
    accuracies = {m["name"]: m["value"] for m in found["metrics"] if m["unit"] == "%"}
    assert accuracies == dict(list(expected.items())[: 2 * forms])
    assert found["episodes"].keys() == accuracies.keys()
    declared = negative_margin.metrics(["validation", "base"], evaluation, classifier)
    assert {m.name for m in declared if m.name.startswith("validation") and m.unit} == set(
        accuracies
    )
    protocol = negative_margin.build(TINY)
    described = protocol.description | {"seed": 0, "data": "icons"}
    text = "\n".join(protocol.report(described | found))
    assert ("linear (normalised features)" in text) == (forms == 2)


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of Markdown tables."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


@pytest.mark.parametrize(
    ("loss", "given", "used"),
    [("cosine", "same", "cosine"), ("softmax", "same", "linear"), ("softmax", "cosine", "cosine")],
)
def test_episodes_take_the_classifier_of_the_training(loss, given, used):
    assert NegativeMarginConfig().evaluation.classifier == "same"
    config = NegativeMarginConfig(
        loss=MarginLoss(name=loss), evaluation=MarginEvaluation(classifier=given)
    )
    assert negative_margin.build(config).description["evaluation"]["classifier"] == used


def test_validations_take_the_nearest_prototype_by_their_own_distance(monkeypatch):
    calls = []
    monkeypatch.setattr(
        negative_margin,
        "prototype_predictions",
        lambda x, e, *, distance: (
            calls.append((len(e.support), e.support.shape[2], distance))
            or np.zeros((1, 2, 1), np.int32)
        ),
    )
    nearest = MarginEvaluation(ways=3, queries=4)
    euclidean = dataclasses.replace(
        nearest, validation_distance="euclidean", validation_shots=2, validation_episodes=20
    )
    for evaluation in (nearest, euclidean):
        config = dataclasses.replace(TINY, evaluation=evaluation)
        protocol = negative_margin.build(config)
        labels = np.arange(60) % 4
        outputs = Outputs(
            np.ones((60, 2), np.float32), labels, lambda: np.ones((60, 4)), np.ones(4, int)
        )
        assert protocol.validate(outputs) == 0.5
    assert calls == [(500, 1, "cosine"), (20, 2, "euclidean")]


def test_validations_can_fine_tune_as_the_evaluation_does():
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 4
    features = (rng.normal(size=(4, 5))[labels] + rng.normal(size=(60, 5))).astype(np.float32)
    outputs = Outputs(features, labels, lambda: features, np.ones(4, int))
    evaluation = dataclasses.replace(EVALUATION, shots=(3,), episodes=6)
    ((expected, _),) = evaluate_fine_tuning(
        features, labels, config=evaluation, settings=FineTuning(passes=3)
    )
    assert negative_margin.build(TINY).validate(outputs) == pytest.approx(expected.accuracy)


def test_evaluate_takes_other_episodes(trained, folders):
    protocol, report = evaluate_run(
        trained, folders, split="validation", overrides={"evaluation.shots": (3, 2)}
    )
    assert [metric["name"] for metric in report["metrics"]] == [
        "validation 3-shot",
        "validation 2-shot",
        "validation discriminability",
        "validation D_intra",
        "validation D_inter",
    ]
    assert list(report["discriminability"]) == ["validation"]
    assert [metric.name for metric in protocol.metrics][:2] == ["novel 3-shot", "novel 2-shot"]


def test_evaluate_refuses_an_option_that_the_protocol_does_not_have(trained, folders, capsys):
    given = ["evaluate", str(trained), "--data-dir", str(folders.data_dir)]
    with pytest.raises(SystemExit):
        main([*given, "--evaluation.distance", "euclidean"])
    assert "Unrecognized options" in capsys.readouterr().err
    assert main([*given, "--over", "loss.margin=-0.1,0"]) == 2
    message = "the evaluation of protocol negative-margin has no loss.margin; it has evaluation.wa"
    assert message in capsys.readouterr().err
    assert not list(trained.glob("evaluation*"))


def test_evaluate_takes_every_option_of_the_evaluation(trained, folders, capsys):
    given = ["evaluate", str(trained), "--data-dir", str(folders.data_dir), "--split", "validation"]
    assert main([*given, "--fine-tuning.margin", "0.4", "--evaluation.episodes", "9"]) == 0
    (step,) = {path.name.partition("step")[2].split(",")[0] for path in trained.glob("*margin*md")}
    name = f"evaluation-validation-step{step},evaluation.episodes=9,fine_tuning.margin=0.4.json"
    report = json.loads((trained / name).read_text())
    assert (report["fine_tuning"]["margin"], report["fine_tuning"]["passes"]) == (0.4, 3)
    run = restore_run(trained)
    outputs = build_outputs(
        run.network.graphdef, run.network.objective, TINY.data, run.class_counts
    )(run.state, margin_data.load(TINY.data, folders, "validation"))
    ((expected, _),) = evaluate_fine_tuning(
        outputs.features,
        outputs.labels,
        config=dataclasses.replace(EVALUATION, episodes=9),
        settings=FineTuning(passes=3, margin=0.4),
    )
    assert report["results"] == [{"split": "validation"} | expected._asdict()]
    (trained / name).unlink()
    (trained / name).with_suffix(".md").unlink()


def test_evaluate_sweeps_an_option_of_the_evaluation_and_keeps_its_results(
    trained, folders, capsys, monkeypatch
):
    given = ["evaluate", str(trained), "--data-dir", str(folders.data_dir), "--split", "validation"]
    over = ["--over", "fine_tuning.margin=-0.4,0", "--metrics", "validation 2-shot"]
    assert main([*given, *over]) == 0
    printed = capsys.readouterr().out
    (root,) = (trained / "evaluations").iterdir()
    assert root.name.startswith("validation-step")
    assert {"table.md", "table.json", "figure.png"} <= {path.name for path in root.iterdir()}
    (_, report) = evaluate_run(trained, folders, split="validation")
    cell = json.loads((root / "fine_tuning.margin=0.0" / "seed-0" / "report.json").read_text())
    assert cell["results"] == report["results"]
    accuracy = f"{100 * report['results'][0]['accuracy']:.1f}"
    assert accuracy in {row[1].strip("*").split(" ")[0] for row in rows(printed) if row[0] == "0.0"}

    monkeypatch.setattr(negative_margin, "evaluate_fine_tuning", None)
    assert main([*given, *over]) == 0
    assert main([*given, *over[:2], "--metrics", "novel 2-shot"]) == 2
    assert "no metric 'novel 2-shot'; available: validation 2-shot" in capsys.readouterr().err
    assert main([*given, *over[:2], "--fine-tuning.margin", "0.2"]) == 2
    assert main([*given, "--metrics", "validation 2-shot"]) == 2
    assert "--over" in capsys.readouterr().err
    assert main([*given, "--baseline", "fine_tuning.margin=0"]) == 2
    assert "it needs --over" in capsys.readouterr().err
    assert main([*given, *over, "--baseline", "fine_tuning.margin=0.3"]) == 2
    assert "fine_tuning.margin has -0.4, 0.0" in capsys.readouterr().err

    assert main([*given, *over, "--baseline", "fine_tuning.margin=0"]) == 0
    assert "**Difference from fine_tuning.margin = 0.0**" in capsys.readouterr().out
    assert (root / "differences.png").exists()
    (difference,) = json.loads((root / "table.json").read_text())["differences"]
    of_margin = [
        read_episodes(root / f"fine_tuning.margin={margin}" / "seed-0")["validation 2-shot"]
        for margin in (-0.4, 0.0)
    ]
    by_episode = of_margin[0] - of_margin[1]
    assert difference["mean"] == pytest.approx(np.mean(by_episode), abs=1e-6)
    assert difference["own"] == pytest.approx(interval(by_episode))


def test_evaluations_with_metrics_of_their_own_are_in_one_table(trained, folders, capsys):
    given = ["evaluate", str(trained), "--data-dir", str(folders.data_dir), "--split", "validation"]
    over = ["--over", "evaluation.shots=2,3+1", "--evaluation.episodes", "8"]
    assert main([*given, *over]) == 0
    header, _, two, three = rows(capsys.readouterr().out)[:4]
    shots = [header.index(f"validation {n}-shot (%)") for n in (2, 3, 1)]
    assert [two[n] == "–" for n in shots] == [False, True, True]
    assert [three[n] == "–" for n in shots] == [True, False, False]
    assert main([*given, *over, "--metrics", "validation 3-shot"]) == 0
    assert main([*given, *over, "--metrics", "novel 3-shot"]) == 2
    assert "validation 2-shot" in capsys.readouterr().err


def test_held_out_images_are_no_training_images(folders):
    whole = load_split("icons", "base", data_dir=folders.data_dir)
    base, held_out = (margin_data.load(TINY.data, folders, s) for s in ("base", "held-out"))
    counts = margin_data.class_counts(TINY.data, folders)
    for images, split in ((base, "base"), (held_out, "held-out")):
        np.testing.assert_array_equal(np.bincount(images.labels), counts[split])
    np.testing.assert_array_equal(counts["base"] + counts["held-out"], np.bincount(whole.labels))
    both = np.concatenate([base.images[:], held_out.images[:]])
    labels = np.concatenate([base.labels, held_out.labels])
    order = np.argsort(labels, kind="stable")
    assert labels[order].tolist() == whole.labels.tolist()
    by_content = [sorted(map(bytes, part)) for part in (both, whole.images[:])]
    assert by_content[0] == by_content[1]
    plain = MarginData()
    assert margin_data.class_counts(plain, folders).keys() == {"base", "validation", "novel"}
    np.testing.assert_array_equal(margin_data.load(plain, folders, "base").labels, whole.labels)


OTHER = {"n01532829": 4, "n01930112": 1, "n02108551": 2, "n02950826": 3}
"""Test images of a fake ImageNet by class; the first and the third are the base classes of a
fake mini-ImageNet."""


@pytest.fixture
def imagenets(folders, tmp_path):
    """Where fakes of mini-ImageNet and ImageNet are."""
    fake_archives.mini_imagenet_folder(tmp_path)
    for name, count in OTHER.items():
        fake_archives.write_image(tmp_path / f"imagenet/train/{name}/0.JPEG", "train", 0)
        for i in range(count):
            fake_archives.write_image(tmp_path / f"imagenet/val/{name}/{i}.JPEG", f"val {name}", i)
    return Folders(data_dir=tmp_path / "data", manual_dir=tmp_path)


def test_base_classes_are_evaluated_on_other_images_of_the_same_classes(imagenets):
    plain = MarginData(name="mini_imagenet@16")
    data = dataclasses.replace(plain, base_test="imagenet@16")
    counts = margin_data.class_counts(data, imagenets)
    assert counts["held-out"].tolist() == [4, 2]
    assert counts["base"].tolist() == [2, 3]
    found = margin_data.load(data, imagenets, "held-out")
    base = margin_data.load(data, imagenets, "base")
    assert found.class_names == base.class_names == ("n01532829", "n02108551")
    colours = {}
    for pixels, label in zip(found.images[:].pixels, found.labels, strict=True):
        colours.setdefault(found.class_names[label], []).append(pixels[0, 0].tolist())
    for name, own in colours.items():
        expected = [fake_archives.colour(f"val {name}", i) for i in range(OTHER[name])]
        np.testing.assert_allclose(own, expected, atol=3)
    # The training does not change.
    trained = margin_data.load(plain, imagenets, "base")
    np.testing.assert_array_equal(trained.images[:].pixels, base.images[:].pixels)
    np.testing.assert_array_equal(trained.labels, base.labels)
    assert "held-out" not in margin_data.class_counts(plain, imagenets)


def test_evaluation_takes_the_other_images():
    taken = []

    def outputs_of(split):
        taken.append(split)
        labels = np.arange(40) % 4
        features = np.random.default_rng(len(taken)).normal(size=(40, 3)).astype(np.float32)
        return Outputs(features, labels, lambda: features, np.ones(4, int))

    for data in (MarginData(base_test="imagenet"), MarginData(holdout=0.3), MarginData()):
        found = negative_margin.evaluate(
            data, EVALUATION, "cosine", FineTuning(passes=1), "base", outputs_of
        )
        config = dataclasses.replace(TINY, data=data)
        protocol = negative_margin.build(config)
        described = protocol.description | {"data": "icons"} | found
        taken.append(protocol.report(described)[-1].rpartition(": ")[2])
    assert taken == [
        *("held-out", "test images of imagenet."),
        *("held-out", "held out from training."),
        *("base", "training images."),
    ]


def test_other_images_must_have_all_base_classes(imagenets):
    (imagenets.manual_dir / "imagenet/train/n01532829").rename(imagenets.manual_dir / "elsewhere")
    (imagenets.manual_dir / "imagenet/val/n01532829").rename(imagenets.manual_dir / "away")
    data = MarginData(name="mini_imagenet@16", base_test="imagenet@16")
    with pytest.raises(
        ConfigError,
        match=r"imagenet@16 lacks 1 of the 2 base classes of mini_.*, such as n01532829",
    ):
        margin_data.class_counts(data, imagenets)


def test_a_subset_of_the_base_classes_has_all_their_images(folders):
    whole = load_split("icons", "base", data_dir=folders.data_dir)
    names = np.array(whole.class_names)
    for holdout in (0.0, 0.35):
        data = MarginData(holdout=holdout, base_classes=7, subset_seed=3)
        counts = margin_data.class_counts(data, folders)
        base = margin_data.load(data, folders, "base")
        assert len(base.class_names) == 7
        np.testing.assert_array_equal(np.bincount(base.labels), counts["base"])
        own = np.isin(names[whole.labels], base.class_names)
        number = counts["base"] + (counts["held-out"] if holdout else 0)
        assert number.sum() == own.sum()
        names_of = np.array(base.class_names)[base.labels]
        expected = whole.images[:][own], names[whole.labels][own]
        found = {bytes(i) + n.encode() for i, n in zip(base.images[:], names_of, strict=True)}
        assert found <= {bytes(i) + n.encode() for i, n in zip(*expected, strict=True)}
    other = margin_data.load(MarginData(base_classes=7), folders, "base")
    assert other.class_names != base.class_names
    novel, every = (margin_data.load(d, folders, "novel") for d in (data, MarginData()))
    np.testing.assert_array_equal(novel.labels, every.labels)


def test_novel_classes_of_another_set_leave_all_own_ones_to_the_training(folders, tmp_path):
    fake_archives.cifar_fs_folder(tmp_path)
    folders = dataclasses.replace(folders, manual_dir=tmp_path)
    data = MarginData(novel="cifar_fs")
    stored = class_counts("icons", data_dir=folders.data_dir)
    counts = margin_data.class_counts(data, folders)
    every = np.concatenate([stored["base"], stored["validation"], stored["novel"]])
    np.testing.assert_array_equal(counts["base"], every)
    assert counts["novel"].tolist() == [2, 1]
    images = margin_data.load(data, folders, "base")
    np.testing.assert_array_equal(np.bincount(images.labels), every)
    assert margin_data.load(data, folders, "novel").labels.tolist() == [0, 0, 1]


NOVEL = "cub_fewshot"


@pytest.mark.parametrize("options", [("", 1), ("", 101), (NOVEL, 180)])
def test_a_number_of_base_classes_that_cannot_be_is_refused_before_data_is_read(options):
    data = MarginData(novel=options[0], base_classes=options[1])
    message = rf"data\.base_classes = {options[1]} must be from 2 to (100|179), or 0 for all"
    with pytest.raises(ConfigError, match=message):
        plan_run(dataclasses.replace(TINY, data=data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": MarginLoss(margin=-0.1, label_smoothing=0.05)}, "set one of them to 0"),
        (
            {"evaluation": MarginEvaluation(shots=(5,), queries=90)},
            "classes of icons do not give the evaluation",
        ),
        (
            {"evaluation": MarginEvaluation(shots=(5,), queries=25)},
            "held-out classes of icons do not give the evaluation",
        ),
        ({"data": MarginData(novel="cifar10")}, "cifar10 has the splits train, test, and few-shot"),
        (
            {"data": MarginData(name="mini_imagenet", holdout=0.1, base_test="imagenet")},
            "data.holdout = 0.1 and data.base_test = imagenet exclude each other",
        ),
        (
            {"data": MarginData(name="mini_imagenet@64", base_test="imagenet200")},
            "not in it; set it to imagenet, or empty and use data.holdout",
        ),
        (
            {"data": MarginData(name="cifar_fs", base_test="cifar100")},
            "data.base_test = cifar100 is not known to have images of the classes of cifar_fs that "
            "are not in it; set it to empty",
        ),
        (
            {"data": MarginData(novel="icons")},
            "data.novel = icons shares images with data.name = i",
        ),
        (
            {"data": MarginData(name="mini_imagenet@64", novel="tiered_imagenet")},
            "data.novel = tiered_imagenet shares images with data.name = mini_imagenet@64",
        ),
    ],
)
def test_what_cannot_end_well_is_refused(folders, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_data(plan_run(dataclasses.replace(TINY, **changes)), folders)


def test_sets_of_two_sizes_need_one(monkeypatch):
    shapes = {"icons": (32, 32, 1), "cub_fewshot": (84, 84, 3)}
    monkeypatch.setattr(margin_data, "image_shape", shapes.__getitem__)
    counts = {split: np.full(30, 90) for split in ("base", "held-out", "validation", "novel")}
    data = dataclasses.replace(TINY.data, novel="cub_fewshot")
    check = negative_margin.build(dataclasses.replace(TINY, data=data)).check_data
    message = r"images of icons are 32×32×1, those of data\.novel = cub_fewshot are 84×84×3; set"
    with pytest.raises(ConfigError, match=message):
        check(16, counts)
    shapes["cub_fewshot"] = (84, 84, 1)
    resized = dataclasses.replace(TINY, data=dataclasses.replace(data, image_size=32))
    negative_margin.build(resized).check_data(16, counts)
