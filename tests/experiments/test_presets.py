"""Presets: published settings, commands that can start, a step of each."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from experiments import run as run_module
from experiments.benchmark.compilation import num_classes
from experiments.cli.main import parse
from experiments.core.config import replace_option, set_options
from experiments.core.protocol import Photographs, Problem
from experiments.datasets import lookup
from experiments.papers import build_protocol, hyperspherical
from experiments.papers.presets import MODULES, PRESETS, negative_margin
from experiments.run import build_learner, plan_run
from experiments.sweeps import grid as sweeps
from experiments.training.step import Batch, build_step
from tests.experiments.fake_archives import write_image
from tests.experiments.published import PUBLISHED
from tests.experiments.tiny_runs import Pooled
from tests.tolerances import FLOAT32


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_the_published_ones(name):
    config = PRESETS[name].config
    published = dict(word.split("=", 1) for word in PUBLISHED[name].split())
    assert set_options(config, published) == config
    if name in negative_margin.PRESETS:  # The paper's, by loss and network.
        softmax = 10 if "resnet12" in name else 5
        scale = build_protocol(config).description["scale"]
        assert scale == (softmax if "softmax" in name else 30)


@pytest.mark.parametrize(
    ("preset", "deviation"),
    [
        ("icons", 1),
        ("icons-groups", 0.1),  # At 1, `tight` hardly learns.
        ("kanji", 1),
        # Cosines, whose gradients depend on it: that of `torch.nn.Linear`.
        ("icons-margin", 3**-0.5),
        ("icons-sphere", 3**-0.5),
    ],
)
def test_classifiers_start_with_their_deviation_and_the_prior_of_a_class(preset, deviation):
    """With zeros for a bias, the negatives alone would make the first loss of bce C log 2."""
    config = PRESETS[preset].config
    if preset == "icons-sphere":
        config = replace_option(config, "loss.name", "cosine-softmax")
    objective = build_protocol(config).objective(Problem(512, np.full(64, 10)))
    head = objective.init_head(jax.random.key(0))
    assert np.std(head["kernel"]) == pytest.approx(deviation * 512**-0.5, rel=0.03)
    assert ("bias" in head) == (deviation in (1, 0.1))
    np.testing.assert_allclose(head.get("bias", -np.log(63)), -np.log(63), rtol=FLOAT32)


def stated_commands(module: ModuleType) -> list[str]:
    """The commands in the docstring and the comments of a file, of its last preset.

    A command goes on after a backslash, or in lines that are indented deeper.
    """
    text = Path(module.__file__ or "").read_text(encoding="utf-8")
    text = re.sub(r"^ *#", "", text, flags=re.MULTILINE)
    pattern = r"^( *)python -m experiments (.+(?:\n\1 +\S.*)*)"
    found = []
    for _, command in re.findall(pattern, text, re.MULTILINE):
        command = re.sub(r"   \(.*\)$", "", command)  # A remark.
        command = re.sub(r",\n +", ",", command)  # An axis may be broken after a comma.
        command = " ".join(command.replace("\\\n", " ").split())
        found.append(command.replace("PRESET", [*module.PRESETS][-1]))
    return list(dict.fromkeys(found))


COMMANDS = [(module, command) for module in MODULES for command in stated_commands(module)]
assert {"train", "sweep", "evaluate", "linear"} == {c.split()[0] for _, c in COMMANDS}


@pytest.mark.parametrize(
    ("module", "command"),
    [
        # The last command of every protocol; `make long` has all of them.
        pytest.param(*pair, marks=[] if pair[0] != following[0] else pytest.mark.long)
        for pair, following in zip(COMMANDS, [*COMMANDS[1:], (None, "")], strict=True)
    ],
)
def test_a_stated_command_can_start(module, command, tmp_path, monkeypatch):
    weights = tmp_path / "resnet50.safetensors"
    weights.touch()
    words = [str(weights) if word == weights.name else word for word in shlex.split(command)]
    if "folder:PATH" in words:
        own = own_folder(tmp_path, words[1])
        words = [word.replace("folder:PATH", f"folder:{own}") for word in words]
    evaluated, parsed = [*module.PRESETS.values()][-1].config, parse(words)
    if words[0] == "train":
        plan_run(parsed.config)
    if words[0] == "evaluate" and parsed.over:
        plan_ends(evaluated, [sweeps.parse_axis(text, evaluated) for text in parsed.over])
    if words[0] == "sweep":

        def run_grid(config, over, seeds, directory, *rest, **options):
            plan_ends(config, over)
            if "--directory" not in words:
                assert directory == Path("runs", f"sweep-{config.preset}")
            return [], []

        monkeypatch.setattr(sweeps, "run_grid", run_grid)
        assert parsed.run(command) == 0


def plan_ends(config, over):
    cells = sweeps.make_cells(config, over, [0], Path("root"))
    for cell in (cells[0], cells[-1]):
        plan_run(cell.config)


BLOCKS = {"resnet32": (1, 1, 1), "resnet18": (1,) * 4, "resnet50": (1,) * 4, "swin": (2,) * 4}
"""The fewest that have all that is in a network. More of them take seconds, and say no more."""
REPRESENTATIVES = {PRESETS[name].config.model.backbone: name for name in PRESETS}.values()
"""A preset for every backbone. The others are traced with `Pooled`."""


def own_folder(path: Path, preset: str) -> Path:
    """Two images of each of four classes, or of four labels."""
    for number in range(8):
        write_image(path / f"own/{number % 4}/{number}.png", "own", number)
    if preset == "folder-labels":
        rows = "".join(f"{i % 4}/{i}.png,{i % 4}\n" for i in range(8))
        (path / "own/labels.csv").write_text(f"file,labels\n{rows}")
    return path / "own"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in PUBLISHED)) for name in PRESETS],
)
def test_a_second_step_can_follow_the_first(name, tmp_path, monkeypatch):
    """Weak types are equal, too: otherwise a run compiles its step twice.

    The network has the fewest blocks, or is `Pooled`, and starts from a file where it is
    pretrained. Prototypes have any directions: those of 1,000 classes take half a minute.
    """

    def directions(num_prototypes: int, dim: int) -> np.ndarray:
        return np.full((dim, num_prototypes), dim**-0.5, np.float32)

    monkeypatch.setattr(hyperspherical, "spread_prototypes", directions)
    config: Any = PRESETS[name].config
    changes: dict[str, Any] = {"blocks": BLOCKS.get(config.model.backbone, ())}
    if config.data.name == "folder:":
        config = replace_option(config, "data.name", f"folder:{own_folder(tmp_path, name)}")
    if config.optimizer.backbone_rate != 1:
        (tmp_path / "weights.safetensors").touch()
        changes["weights"] = str(tmp_path / "weights.safetensors")
    model = dataclasses.replace(config.model, **changes)
    plan = plan_run(dataclasses.replace(config, model=model))
    if name not in REPRESENTATIVES:

        def build_backbone(config, *, image_shape, axis_name, rngs):
            return Pooled(plan.num_features, image_shape[-1], rngs)

        monkeypatch.setattr(run_module, "build_backbone", build_backbone)
    counts = np.maximum(500 - 4 * np.arange(num_classes(plan)), 20)

    def first_step(images, labels):
        steps_per_epoch = max(plan.config.steps // 50, 1)
        graphdef, objective, optimizer, before = build_learner(plan, counts, steps_per_epoch)
        key, data = jax.random.key(0), plan.config.data
        step = build_step(graphdef, objective, optimizer, data, key=key, axis_name=None)
        after, metrics = step(before, Batch(images, labels))
        if objective.after_epoch is not None:
            objective_state, _ = objective.after_epoch(after.objective_state)
            after = after._replace(objective_state=objective_state)
        return before, after, metrics["loss"]

    spec = lookup(plan.config.data.name)
    images = np.random.default_rng(0).integers(0, 256, (2, *spec.array_shape), np.uint8)
    if spec.whole:
        images = Photographs(images, np.array([spec.array_shape[:2]] * 2, np.int32))
    labels = np.array([1, 0], np.int32)
    if spec.multi_label:
        labels = np.eye(num_classes(plan), dtype=np.int8)[labels]
    if name == "icons-two-way":  # Of this protocol no test trains a run.
        assert np.isfinite(jax.jit(first_step)(images, labels)[2])
    before, after, loss = jax.eval_shape(first_step, images, labels)
    kinds = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state)
        for state in (before, after)
    ]
    assert kinds[0] == kinds[1]
    assert (loss.shape, loss.dtype) == ((), np.float32)
