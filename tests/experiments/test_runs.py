"""One run: what is refused, which checkpoint is evaluated, and its report."""

from __future__ import annotations

import dataclasses
import json
import shutil
from unittest.mock import Mock

import chex
import jax
import numpy as np
import pytest

from experiments.core.config import ModelConfig, OptimizerConfig, SamplingConfig
from experiments.core.errors import ConfigError
from experiments.papers.classification import ClassificationData
from experiments.papers.few_shot import IntegrationEvaluation
from experiments.papers.few_shot_data import FewShotData
from experiments.papers.group_softmax import GroupLoss, GroupSoftmaxConfig
from experiments.papers.hyperspherical import HypersphericalConfig, HypersphericalLoss
from experiments.papers.integration import IntegratedLoss
from experiments.papers.negative_margin import NegativeMarginConfig
from experiments.papers.presets import find_preset
from experiments.reporting.run import read_episodes
from experiments.run import (
    assemble,
    evaluate,
    features_of,
    load_run,
    plan_run,
    train_run,
    with_evaluation,
)
from experiments.training.checkpoints import (
    CheckpointError,
    Checkpoints,
    DamagedCheckpointError,
)
from experiments.training.run_directory import claim_run_directory
from experiments.training.step import build_step
from tests.experiments.tiny_runs import TINY, flip_bits, metrics, saved_steps
from tests.tolerances import FLOAT32

SCE = dataclasses.replace(TINY, loss=IntegratedLoss(name="sce"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingConfig(strategy="64x64")}, "64x64"),
        ({"sampling": SamplingConfig(batch_size=6)}, "does not spread evenly"),
        ({"data": FewShotData(name="cifar10")}, "cifar10 has the splits train, test"),
        ({"model": ModelConfig(weights="no/run")}, "model.weights = no/run does not exist"),
        ({"evaluation": IntegrationEvaluation(shots=(1, 5000))}, "novel classes of icons do not"),
        ({"evaluation": IntegrationEvaluation(ways=30, shots=(1,))}, "validation classes of icons"),
        ({"loss": IntegratedLoss(name="direct:sce+nca")}, r"spectral:sce\+nca"),
        ({"optimizer": OptimizerConfig(warmup_steps=4)}, "warmup_steps = 4 must be below steps"),
        ({"optimizer": OptimizerConfig(decay_steps=(3,))}, "= cosine does not fit .*decay_steps"),
        (
            {"optimizer": OptimizerConfig(schedule="step", decay_steps=(3,), warmup_steps=3)},
            r"decay_steps = \(3,\) must lie between .*warmup_steps = 3 and steps = 4",
        ),
    ],
)
def test_a_run_that_cannot_end_well_leaves_no_directory(tmp_path, folders, changes, message):
    config = dataclasses.replace(SCE, model=ModelConfig(widths=(4, 4, 4, 16)))
    with pytest.raises(ConfigError, match=message):
        train_run(plan_run(dataclasses.replace(config, **changes)), tmp_path / "run", folders)
    assert not (tmp_path / "run").exists()


def begin(directory, config, folders, **how):
    """A state of a run, which its directory has as a checkpoint."""
    parts = assemble(plan_run(config), folders, **how)
    moved = {
        name: jax.tree.map(lambda leaf: leaf + 1, getattr(parts.initial, name))
        for name in ("step", "opt_state")
    }
    state = parts.initial._replace(**moved)
    with (
        claim_run_directory(directory, parts.meta["config"]),
        Checkpoints(directory / "checkpoints") as checkpoints,
    ):
        checkpoints.save(1, state, meta=parts.meta)
    return state


def of_weights(config, directory):
    """The model of a configuration, to start from a run."""
    return dataclasses.replace(config.model, weights=str(directory))


def from_run(directory, config, folders, **how):
    """The first state of a run with another seed that starts from that of a directory."""
    model = of_weights(config, directory)
    config = dataclasses.replace(config, model=model, seed=config.seed + 1)
    return assemble(plan_run(config), folders, **how).initial


HYPERSPHERICAL = HypersphericalConfig(model=ModelConfig(widths=(4, 4, 4, 32), dim=256))
NCA = dataclasses.replace(SCE, loss=IntegratedLoss(name="nca"))
BOTH = "Weights: backbone and classifier of RUN, which has the same classes."
NEW = "Weights: backbone of RUN, without its classifier: "
OTHERS = f"{NEW}it has other classes of these images: held-out ones may be among them."
UNLIKE = f"{NEW}the two runs do not both train a classifier of the same classes."


@pytest.mark.usefixtures("small_network")
@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (SCE, {"loss": IntegratedLoss(name="direct:sce+nca")}, BOTH),
        (SCE, {"data": FewShotData(pad=0)}, BOTH),
        (SCE, {"data": FewShotData(base_classes=50)}, OTHERS),
        (SCE, {"loss": IntegratedLoss(name="nca")}, UNLIKE),
        (NCA, {"loss": SCE.loss}, UNLIKE),
        (NCA, {"data": FewShotData(base_classes=50)}, OTHERS),
        (
            NegativeMarginConfig(model=TINY.model, sampling=TINY.sampling),
            SCE,
            f"{NEW}its parameters have other names or shapes.",
        ),
    ],
)
def test_a_run_goes_on_with_the_classifier_where_it_fits(
    tmp_path, folders, caplog, before, after, line
):
    start = begin(tmp_path, before, folders)
    after = dataclasses.replace(before, **after) if isinstance(after, dict) else after
    state = from_run(tmp_path, after, folders)
    new = assemble(plan_run(dataclasses.replace(after, seed=1)), folders).initial
    chex.assert_trees_all_equal(state.params["backbone"], start.params["backbone"])
    chex.assert_trees_all_equal((state.step, state.opt_state), (new.step, new.opt_state))
    expected = start.params["classifier"] if line == BOTH else new.params["classifier"]
    chex.assert_trees_all_equal(state.params["classifier"], expected)
    assert caplog.messages[-1] == line.replace("RUN", str(tmp_path))


@pytest.mark.usefixtures("small_network")
def test_a_run_says_that_its_weights_have_seen_test_images(tmp_path, folders, caplog):
    """A few-shot run trains on all images of the base classes, a classification on some of them."""
    few, some, more = (tmp_path / name for name in ("few", "some", "more"))
    begin(few, SCE, folders)
    data = ClassificationData(class_split="base")
    config = GroupSoftmaxConfig(data=data, loss=GroupLoss(name="softmax"), model=TINY.model)
    begin(some, dataclasses.replace(config, model=of_weights(config, few)), folders)
    begin(more, dataclasses.replace(config, model=of_weights(config, some)), folders)
    line = (
        "Weights: trained on base classes of icons, which include test images; accuracy on test "
        "images may be too high."
    )
    assert caplog.messages.count(line) == 2
    with Checkpoints(more / "checkpoints", read_only=True) as checkpoints:
        first, second, third = checkpoints.read(1).meta["origins"]
    assert (second, third) == (line, BOTH.replace("RUN", str(some)))
    assert f"of {few}, " in first
    novel, weights = ClassificationData(class_split="novel"), of_weights(config, few)
    novel = dataclasses.replace(config, data=novel, model=weights)
    assert line not in assemble(plan_run(novel), folders).meta["origins"]


@pytest.mark.usefixtures("small_network")
def test_equal_names_of_another_data_set_are_other_classes(tmp_path, folders, caplog, monkeypatch):
    begin(tmp_path, SCE, folders)
    monkeypatch.setattr("experiments.training.weights.share_images", lambda name, other: False)
    from_run(tmp_path, SCE, folders)
    assert caplog.messages[-1] == UNLIKE.replace("RUN", str(tmp_path))


@pytest.mark.usefixtures("small_network")
@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_prototypes_keep_their_classes(tmp_path, folders, name):
    config = dataclasses.replace(HYPERSPHERICAL, loss=HypersphericalLoss(name="dynamic"))
    before = begin(tmp_path, config, folders).objective_state
    config = dataclasses.replace(HYPERSPHERICAL, loss=HypersphericalLoss(name=name), seed=1)
    parts = assemble(plan_run(config), folders)
    new = parts.initial.objective_state
    images = sum(parts.meta["class_counts"])
    assert parts.steps_per_epoch == images // config.sampling.batch_size > 20
    if name == "dynamic":  # A number for every epoch.
        assert len(new["reassigned"]) == config.steps // parts.steps_per_epoch > 1
    after = from_run(tmp_path, config, folders).objective_state
    np.testing.assert_array_equal(after["assignment"], before["assignment"])
    assert (new["assignment"] != before["assignment"]).any()
    assert after.keys() == new.keys()


@pytest.mark.usefixtures("small_network")
def test_what_is_random_follows_the_seed_and_every_process_reads_its_rows(folders, monkeypatch):
    build = Mock(wraps=build_step)
    monkeypatch.setattr("experiments.run.build_step", build)
    config = dataclasses.replace(SCE, sampling=SamplingConfig(strategy="8x2"))
    runs = [
        assemble(plan_run(dataclasses.replace(config, seed=seed)), folders) for seed in (0, 0, 1)
    ]
    keys = [jax.random.key_data(call.kwargs["key"]) for call in build.mock_calls]
    found = [
        [key, *run.read(3), *(x for x in jax.tree.leaves(run.initial.params) if x.ndim > 1)]
        for key, run in zip(keys, runs, strict=True)
    ]
    for first, same, other in zip(*found, strict=True):
        np.testing.assert_array_equal(first, same)
        assert (first != other).any()
    whole = runs[0].read(3)
    assert sorted(np.unique_counts(whole.labels).counts) == [2] * 8
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    shares = []
    for rank in range(4):
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        shares.append(runs[0].read(3))
    chex.assert_trees_all_equal(jax.tree.map(lambda *x: np.concatenate(x), *shares), whole)


def test_the_report_has_the_metrics_of_the_best_and_of_the_last_checkpoint(few_shot_run, folders):
    report = json.loads((few_shot_run / "report.json").read_text())
    assert (report["preset"], report["loss"], report["label"]) == ("", "sce", "SCE")
    assert (report["step"], report["last"]["step"], report["notes"]) == (2, 6, [])
    names = [f"{shot} accuracy{of}" for of in ("", " (cosine)") for shot in ("1-shot", "5-shot")]
    names += ["recall@1", "MAP@R"]
    every = [*names, *(f"{name} (last)" for name in names)]
    assert [metric["name"] for metric in report["metrics"]] == every
    assert every == [metric.name for metric in load_run(few_shot_run).plan.metrics]
    episodes, text = read_episodes(few_shot_run), (few_shot_run / "report.md").read_text()
    assert list(episodes) == [name for name in every if "accuracy" in name]
    for metric, result in zip(report["metrics"], report["results"], strict=False):
        assert metric["value"] == result["accuracy"]
        own = episodes[metric["name"]].mean()
        assert own == pytest.approx(metric["value"], rel=4 * FLOAT32)
    assert report["version"] in text

    last = dataclasses.replace(load_run(few_shot_run, "latest"), notes=["Of old."])
    expected, protocol = evaluate(last, folders=folders), last.plan.protocol
    assert expected["notes"] == ["Of old."]
    assert "- Validation: 1-shot accuracy" in text
    found = [metric["value"] for metric in report["metrics"]]
    assert found[6:] == [metric["value"] for metric in expected["metrics"]] != found[:6]
    for name, values in expected["episodes"].items():
        np.testing.assert_array_equal(episodes[f"{name} (last)"], np.float32(values))
    tables = protocol.report(report) + protocol.report(expected)
    assert all(line in text for line in tables if "|" in line)
    # Validations are those of the validation classes, by the state of their own step.
    logged = {x["step"]: x for x in metrics(few_shot_run) if "validation" in x}
    outputs = features_of(last, "validation", folders=folders)
    validation = pytest.approx(protocol.validate(outputs) - 2)
    assert logged[6] == {"step": 6, "validation": validation, **protocol.diagnose(outputs)}
    assert last.validation == logged[6]["validation"]
    assert load_run(few_shot_run).validation == logged[2]["validation"]
    assert report["validation"]["value"] == logged[2]["validation"]


def test_where_the_best_checkpoint_is_damaged_the_second_best_is_used(few_shot_run, tmp_path):
    run = shutil.copytree(few_shot_run, tmp_path / "run")
    flip_bits(run / "checkpoints" / "2")
    with pytest.raises(DamagedCheckpointError, match="2 is damaged"):
        load_run(run, "2")
    second = load_run(run)
    (note,) = second.notes
    assert second.step == 4
    assert "2 is damaged" in note
    assert "checkpoint of step 4 is used instead" in note
    for step in set(saved_steps(run)) - {2}:
        flip_bits(run / "checkpoints" / str(step))
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        load_run(run)


def test_checkpoints_are_named_by_rank_or_step(few_shot_run, folders):
    best = load_run(few_shot_run).state
    start = from_run(few_shot_run, SCE, folders)
    chex.assert_trees_all_equal((start.params, start.statistics), (best.params, best.statistics))
    assert [load_run(few_shot_run, which).step for which in ("best", "latest", 4)] == [2, 6, 4]
    assert load_run(few_shot_run / "checkpoints", "6").step == 6
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
        load_run(few_shot_run, "5")


@pytest.mark.parametrize(
    ("preset", "words"),
    [("icons", "it has the options of evaluation"), ("icons-groups", "it has no options$")],
)
def test_options_that_are_not_of_the_evaluation(preset, words):
    with pytest.raises(ConfigError, match=f"has no loss.name; {words}"):
        with_evaluation(find_preset(preset).config, {"loss.name": "nca"})
