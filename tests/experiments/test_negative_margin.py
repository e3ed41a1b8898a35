"""Protocol E from its loss to its report, on a run of a few steps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.preprocessing import normalize

import experiments
import jaxloss
from experiments.cli.main import main
from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig, set_options
from experiments.core.protocol import Outputs, Problem, mean_and_interval
from experiments.evaluation.classification import shared_predictions
from experiments.evaluation.fine_tuning import FineTuning, evaluate_fine_tuning
from experiments.papers import negative_margin
from experiments.papers.few_shot_data import MarginData
from experiments.papers.negative_margin import (
    MarginEvaluation,
    MarginLoss,
    NegativeMargin,
    NegativeMarginConfig,
)
from experiments.reporting.run import read_episodes
from experiments.run import complete_run, load_run, plan_run
from experiments.training.step import build_outputs
from tests.jaxloss import references
from tests.tolerances import FLOAT32

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
    loss = MarginLoss(**changes)
    config = NegativeMarginConfig(loss=loss)
    objective = NegativeMargin(config).objective(Problem(6, np.full(4, 10)))
    head = objective.init_head(jax.random.key(0))
    found = objective.loss(jnp.asarray(features), jnp.asarray(labels), head, ())

    is_cosine = loss.name == "cosine"
    logits_of = references.cosine_logits if is_cosine else references.linear_logits
    logits = logits_of(features, np.asarray(head["kernel"]))
    options = {"margin": loss.margin, "label_smoothing": loss.label_smoothing, "scale": scale}
    expected = references.margin_softmax_loss(logits, labels, **options)
    assert float(found.value) == pytest.approx(expected, rel=4 * FLOAT32)
    right = np.mean(logits.argmax(1) == labels)
    assert float(found.means["train_accuracy"]) == pytest.approx(right)
    found = objective.logits(jnp.asarray(features), head, ())
    np.testing.assert_allclose(found, scale * logits, rtol=16 * FLOAT32, atol=4 * FLOAT32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders) -> Path:
    directory = tmp_path_factory.mktemp("run")
    complete_run(plan_run(TINY), directory, folders, command="typed")
    return directory


@pytest.mark.long
def test_a_run_is_evaluated_on_all_classes(trained, folders):
    report, run = json.loads((trained / "report.json").read_text()), load_run(trained)
    values = {metric["name"]: metric["value"] for metric in report["metrics"]}
    assert list(values) == [metric.name for metric in plan_run(TINY).metrics]
    outputs_of = build_outputs(run.graphdef, run.objective, TINY.data, run.class_counts)
    parts = run.plan.protocol.parts(folders)
    features, labels = outputs_of(run.state, parts["held-out"].load())[:2]
    ((expected, accuracies),) = evaluate_fine_tuning(
        features, labels, config=EVALUATION, settings=TINY.fine_tuning
    )
    assert [{"split": "base"} | expected._asdict()] == report["results"][2:]
    assert values["base 2-shot"] == expected.accuracy
    names, episodes = [f"{part} 2-shot" for part in PARTS], read_episodes(trained)
    assert list(episodes) == [*names, *(f"{name} (last)" for name in names)]
    np.testing.assert_array_equal(episodes["base 2-shot"], accuracies)


def advantage(pair: Sequence[dict[str, dict[str, float]]], share: float) -> float:
    """Of the first run over the second, in the discriminability of novel classes by eq. (11)."""
    first, second = (
        run["novel"]["inter"] / (share * run["base"]["intra"] + (1 - share) * run["base"]["inter"])
        for run in pair
    )
    return first - second


def bounds(*runs: dict[str, dict[str, float]]) -> list[float | None]:
    reports = ({"discriminability": run} for run in runs)
    return [found["value"] for found in negative_margin.share_bounds(*reports)]


def test_below_the_bound_on_the_share_a_margin_is_more_discriminable_than_the_baseline():
    rng, defined = np.random.default_rng(0), 0
    for _ in range(50):
        # With the smaller margin, the first, D_intra of base classes is closer to their D_inter.
        pair = [
            {
                "novel": {"intra": 0.3, "inter": rng.uniform(0.4, 0.6)},
                "base": {"intra": rng.uniform(low, low + 0.2) * inter, "inter": inter},
            }
            for low, inter in zip((0.6, 0.4), rng.uniform(0.4, 0.6, 2), strict=True)
        ]
        (bound,) = bounds(*pair)
        if bound is not None:
            defined += 1
            assert advantage(pair, bound - 0.01) > 0 > advantage(pair, bound + 0.01)
            assert advantage(pair, bound) == pytest.approx(0, abs=1e-9)
    assert defined > 25


def test_a_share_and_its_bound_need_base_classes_that_are_apart():
    novel, base = {"intra": 0.2, "inter": 0.4}, {"intra": 0.25, "inter": 0.5}
    apart = {"novel": novel, "base": base}
    shares = negative_margin.shares_of_eq_10

    assert shares(apart) == {"novel": pytest.approx(1.2)}
    assert (shares({"novel": novel}), bounds({"novel": novel}, {"novel": novel})) == ({}, [])
    for intra, inter in ((0.25, 0.25), (0.25, 0.25 + 1e-8), (0.25, 0.2), (0.0, 0.0)):
        together = {"novel": novel, "base": {"intra": intra, "inter": inter}}
        assert shares(together) == {"novel": None}
        assert bounds(apart, together) == bounds(together, apart) == [None]
    # Of two equal runs, no share decides.
    assert bounds(apart, apart) == [None]


def random_outputs(seed: int) -> Outputs:
    """Of 80 images of 4 classes, with features of all lengths."""
    rng = np.random.default_rng(seed)
    labels = np.arange(80) % 4
    features = rng.normal(size=(4, 5))[labels] + rng.normal(size=(80, 5))
    features = (features * rng.lognormal(sigma=1.5, size=(80, 1))).astype(np.float32)
    return Outputs(features, labels, lambda: features, np.ones(4, int))


PARTS = ("novel", "validation", "base")
KINDS = ("D_intra", "D_inter", "discriminability", "P^s", "P^s by chance")


@pytest.mark.parametrize(
    ("options", "classifier", "requested", "splits"),
    [
        ({}, "cosine", "novel", {"novel": "novel", "validation": "validation", "base": "held-out"}),
        ({"data.holdout": 0.0}, "cosine", "base", {"base": "base"}),
        ({"loss.name": "softmax"}, "linear", "validation", {"validation": "validation"}),
        ({"evaluation.classifier": "linear"}, "linear", "base", {"base": "held-out"}),
    ],
)
def test_every_part_is_evaluated_on_its_own_images(options, classifier, requested, splits):
    """Base classes on held-out images; inner products on normalised features, too."""
    names = ("base", "held-out", "validation", "novel")
    outputs = {split: random_outputs(seed) for seed, split in enumerate(names)}
    config = set_options(TINY, {"evaluation.shots": (1, 3), **options})
    protocol = NegativeMargin(config)
    found = protocol.evaluate(requested, outputs.__getitem__)
    values = {metric["name"]: metric["value"] for metric in found["metrics"]}
    how: Any = {"config": config.evaluation, "settings": config.fine_tuning}
    expected, scatters = {}, {}
    for part, split in splits.items():
        features, labels = outputs[split][:2]
        forms: dict[str, Any] = {"": features}
        if classifier == "linear":
            forms[" (normalised features)"] = normalize(features.astype(np.float64))
        expected |= {
            f"{part} {result.shots}-shot{suffix}": (result.accuracy, accuracies.tolist())
            for suffix, given in forms.items()
            for result, accuracies in evaluate_fine_tuning(
                given, labels, classifier=classifier, **how
            )
        }
        scatter = jaxloss.discriminability(jnp.asarray(features), jnp.asarray(labels))
        scatters[part] = scatter = {k: float(v) for k, v in scatter._asdict().items()}
        counted = shared_predictions(outputs[split].logits().argmax(1), labels)
        for kind, value in zip(KINDS, (*scatter.values(), *counted.values()), strict=True):
            assert values[f"{part} {kind}"] == pytest.approx(value, rel=1e-3), kind
    accuracies = {m["name"]: m["value"] for m in found["metrics"] if m["unit"] == "%"}
    assert accuracies == {name: accuracy for name, (accuracy, _) in expected.items()}
    assert found["episodes"] == {name: episodes for name, (_, episodes) in expected.items()}
    lower = {m["name"] for m in found["metrics"] if m["higher_is_better"] is False}
    assert lower == {f"{part} D_intra" for part in splits}
    # Eq. (10): its right-hand side, with the share that was found, is D_intra of the split.
    others = {*splits} - {"base"} if "base" in splits else {}
    assert found["shares_of_eq_10"].keys() == {*others}
    for part in others:
        share = values[f"{part} share of eq. (10)"]
        assert found["shares_of_eq_10"][part] == share
        mixture = share * scatters["base"]["intra"] + (1 - share) * scatters["base"]["inter"]
        assert mixture == pytest.approx(scatters[part]["intra"], rel=1e-3)
    declared = [metric.name for metric in protocol.metrics]
    assert [name for name in declared if name in values] == list(values)
    assert requested != "novel" or declared == list(values)
    text = "\n".join(protocol.report(protocol.description | {"data": "icons"} | found))
    assert ("linear (normalised features)" in text) == (classifier == "linear")


@pytest.mark.long
def test_evaluate_sweeps_an_option_of_the_evaluation_and_keeps_its_results(
    trained, folders, capsys, monkeypatch
):
    def run(*options: str, status: int = 0) -> str:
        places = [str(trained), "--data-dir", str(folders.data_dir), "--split", "validation"]
        assert main(["evaluate", *places, *options]) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    over = ["--over", "fine_tuning.margin=-0.4,0"]
    shown = [*over, "--metrics", "validation 2-shot"]
    printed = run(*shown)
    (root,) = (trained / "evaluations").iterdir()
    report = experiments.evaluate(load_run(trained), split="validation", folders=folders)
    cells = [root / f"fine_tuning.margin={margin}" / "seed-0" for margin in (-0.4, 0.0)]
    assert json.loads((cells[1] / "report.json").read_text())["results"] == report["results"]
    accuracy = f"{100 * report['results'][0]['accuracy']:.1f}"
    assert re.search(rf"\| 0\.0 +\| +\**{accuracy} ", printed)

    monkeypatch.setattr(negative_margin, "evaluate_fine_tuning", None)
    for refused, message in (
        ([*over, "--metrics", "novel 2-shot"], "no metric novel 2-shot; did you mean validation "),
        ([*over, "--set", "fine_tuning.margin=0.2"], "the grid sets --fine-tuning.margin"),
        (shown[2:], "--over"),
        ([*shown, "--baseline", "fine_tuning.margin=0.3"], "fine_tuning.margin has -0.4, 0.0"),
        (["--over", "loss.margin=-0.1,0"], "the evaluation of negative-margin has no loss"),
    ):
        assert message in run(*refused, status=2)

    run(*shown, "--baseline", "fine_tuning.margin=0")
    (difference,) = json.loads((root / "table.json").read_text())["differences"]
    first, second = (read_episodes(cell)["validation 2-shot"] for cell in cells)
    assert difference["mean"] == pytest.approx(np.mean(first - second), abs=FLOAT32)
    assert difference["own"] == pytest.approx(mean_and_interval(first - second)[1])
