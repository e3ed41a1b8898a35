"""Presets on photographs have the schedules of the papers' supplements."""

import re
import shlex
from typing import Any, NamedTuple

import pytest
import tyro

from experiments.cli.main import verbs
from experiments.config import get_option
from experiments.presets import (
    PRESETS,
    few_shot,
    group_softmax,
    hyperspherical,
    multi_label,
    negative_margin,
    two_way,
)
from experiments.protocols import PROTOCOLS, build_protocol
from experiments.runs import plan_run
from tests.experiments.test_settings import PUBLISHED

MULTI_STEP, COSINE = "step", "cosine"


class Row(NamedTuple):
    """A schedule as the papers state it, in epochs."""

    images: int
    batch: int
    epochs: int
    rate: float
    decay: float
    drops: tuple[int, ...] = ()
    warmup: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012
    """Further options, of `optimizer`, `data`, `loss` and `model`."""


def long_tail(images: int) -> Row:
    """Saadabadi et al., CVPR 2024, supplement, section 7.2, imbalance 0.01."""
    options = {
        "data.imbalance": 0.01,
        "data.mixup": 1.0,
        "loss.criterion": "dot-regression",
        "loss.decay": 0.9,
        "model.backbone": "resnet32",
    }
    return Row(images, 128, 200, 0.1, 2e-4, (160, 180), 5, options)


def tail(largest: float, classes: int, factor: float) -> int:
    return sum(int(largest * factor ** (k / (classes - 1)) + 1e-9) for k in range(classes))


GROUPS: dict[str, Any] = {"optimizer.nesterov": False, "model.backbone": "resnet50"}
SUMMED = {"loss.reduction": "sum", "optimizer.nesterov": False, "model.backbone": "resnet32"}
MIXED = {"data.mixup": 1.0, "optimizer.nesterov": False, "model.backbone": "resnet50"}
ADAMW = {"data.mixup": 1.0, "optimizer.kind": "adamw", "model.backbone": "swin"}
PRETRAINED = {"optimizer.backbone_rate": 0.1, "model.backbone": "resnet50"}

ROWS = {
    # Kobayashi, WACV 2021, supplement, Table B.1.
    "imagenet-groups": Row(1281167, 256, 120, 0.1, 1e-4, (30, 60, 90), 0, GROUPS),
    "food101-groups": Row(75750, 256, 180, 0.1, 1e-4, (60, 120, 150), 0, GROUPS),
    "caltech256-groups": Row(256 * 60, 256, 300, 0.1, 1e-4, (120, 240, 270), 0, GROUPS),
    "sun397-groups": Row(397 * 50, 256, 300, 0.1, 1e-4, (120, 240, 270), 0, GROUPS),
    # Saadabadi et al., CVPR 2024, supplement, section 7.1.
    "cifar100-sphere": Row(50000, 128, 250, 0.01, 1e-4, (100, 200), 0, SUMMED),
    "imagenet200-sphere": Row(100000, 128, 250, 0.01, 1e-4, (100, 200), 0, SUMMED),
    "imagenet-sphere": Row(1281167, 1024, 100, 0.5, 2e-5, (), 5, MIXED),
    "imagenet-sphere-swin": Row(1281167, 1024, 100, 0.001, 2e-5, (), 5, ADAMW),
    "cifar10-lt": long_tail(tail(5000, 10, 0.01)),
    "cifar100-lt": long_tail(tail(500, 100, 0.01)),
    # SVHN with extra; n_max is a tenth of all images, and every class has enough.
    "svhn-lt": long_tail(tail((73257 + 531131) / 10, 10, 0.01)),
    "stl10-lt": long_tail(tail(500, 10, 0.01)),
    # Kobayashi, CVPR 2023.
    "coco": Row(82081, 512, 40, 0.01, 1e-4, (), 0, PRETRAINED),
    "voc2007": Row(5011, 512, 40, 0.01, 1e-4, (), 0, PRETRAINED),
    "nus-wide": Row(125448, 512, 40, 0.01, 1e-4, (), 0, PRETRAINED),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_preset_has_its_papers_schedule(name):
    config, row = PRESETS[name].config, ROWS[name]
    epoch = row.images // row.batch
    optimizer = config.optimizer
    assert config.sampling.batch_size == row.batch
    assert config.steps == row.epochs * epoch
    assert optimizer.decay_steps == tuple(drop * epoch for drop in row.drops)
    assert optimizer.schedule == (MULTI_STEP if row.drops else COSINE)
    assert optimizer.warmup_steps == row.warmup * epoch
    assert (optimizer.learning_rate, optimizer.weight_decay) == (row.rate, row.decay)
    assert optimizer.momentum == 0.9
    for option, value in row.options.items():
        assert get_option(config, option) == value, option


def test_the_evaluation_of_icons_margin_is_the_papers_but_for_its_validations():
    config: Any = PRESETS["icons-margin"].config
    tuning, episodes = config.fine_tuning, config.evaluation
    assert (episodes.ways, episodes.shots, episodes.queries) == (5, (1, 5), 16)
    assert episodes.episodes == 600
    assert (tuning.passes, tuning.batch_size, tuning.learning_rate) == (100, 4, 0.01)
    assert (tuning.momentum, tuning.dampening, tuning.weight_decay) == (0.9, 0.9, 1e-3)
    assert (episodes.classifier, tuning.scale) == ("same", 5.0)
    # Validations take the nearest prototype by the cosine.
    assert (episodes.selection, episodes.validation_shots) == ("nearest", 1)
    assert (episodes.validation_episodes, episodes.validation_distance) == (500, "cosine")


@pytest.mark.parametrize("name", [n for n in negative_margin.PRESETS if n != "icons-margin"])
def test_the_scale_of_negative_margins_is_the_papers(name):
    softmax = 10 if "resnet12" in name else 5
    scale = build_protocol(PRESETS[name].config).description["scale"]
    assert scale == (softmax if "softmax" in name else 30)


def test_the_commands_of_further_experiments_on_negative_margins_can_start():
    text = (negative_margin.__doc__ or "").replace("\\\n", " ").replace("train PRESET", "")
    commands = [shlex.split(line) for line in re.findall(r"-m experiments (train .*)", text)]
    assert [command[1] for command in commands][:2] == ["mini-imagenet-margin-softmax"] * 2
    for command in commands:
        verb = tyro.cli(verbs(), args=command)
        plan_run(verb.config)


def test_two_way_temperatures_are_the_papers():
    for name in ("kanji", "coco", "voc2007", "nus-wide"):
        loss: Any = PRESETS[name].config.loss
        assert (loss.positive_temperature, loss.negative_temperature) == (4.0, 1.0)


class Frozen(NamedTuple):
    """What the recorded results of a preset depend on most; a change here is a new experiment."""

    data: str
    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    decay_steps: tuple[int, ...]
    warmup_steps: int


FROZEN = {
    "icons": Frozen("icons", 800, 128, 0.1, 0.0005, (), 0),
    "mini-imagenet": Frozen("mini_imagenet", 7500, 512, 0.1, 0.0005, (), 0),
    "tiered-imagenet": Frozen("tiered_imagenet", 52560, 512, 0.1, 0.0005, (), 0),
    "cub": Frozen("cub_fewshot", 6750, 128, 0.1, 0.0005, (), 0),
    "cifar-fs": Frozen("cifar_fs", 7500, 512, 0.1, 0.0005, (), 0),
    "inat2017": Frozen("inat2017_fewshot", 38500, 512, 0.1, 0.0005, (), 0),
    "icons-groups": Frozen("icons", 800, 128, 0.1, 0.0001, (), 0),
    "imagenet-groups": Frozen("imagenet", 600480, 256, 0.1, 0.0001, (150120, 300240, 450360), 0),
    "food101-groups": Frozen("food101", 53100, 256, 0.1, 0.0001, (17700, 35400, 44250), 0),
    "caltech256-groups": Frozen("caltech256", 18000, 256, 0.1, 0.0001, (7200, 14400, 16200), 0),
    "sun397-groups": Frozen("sun397", 23100, 256, 0.1, 0.0001, (9240, 18480, 20790), 0),
    "icons-sphere": Frozen("icons", 3200, 128, 1.0, 0.0001, (), 0),
    "cifar100-sphere": Frozen("cifar100", 97500, 128, 0.01, 0.0001, (39000, 78000), 0),
    "imagenet200-sphere": Frozen("imagenet200", 195250, 128, 0.01, 0.0001, (78100, 156200), 0),
    "imagenet-sphere": Frozen("imagenet", 125100, 1024, 0.5, 2e-05, (), 6255),
    "imagenet-sphere-swin": Frozen("imagenet", 125100, 1024, 0.001, 2e-05, (), 6255),
    "icons-longtail": Frozen("icons", 3200, 128, 1.0, 0.0002, (), 0),
    "cifar10-lt": Frozen("cifar10", 19200, 128, 0.1, 0.0002, (15360, 17280), 480),
    "cifar100-lt": Frozen("cifar100", 16800, 128, 0.1, 0.0002, (13440, 15120), 420),
    "svhn-lt": Frozen("svhn_extra", 234200, 128, 0.1, 0.0002, (187360, 210780), 5855),
    "stl10-lt": Frozen("stl10", 1800, 128, 0.1, 0.0002, (1440, 1620), 45),
    "kanji": Frozen("kanji", 1200, 64, 0.03, 0.0001, (), 0),
    "coco": Frozen("coco", 6400, 512, 0.01, 0.0001, (), 0),
    "voc2007": Frozen("voc2007", 360, 512, 0.01, 0.0001, (), 0),
    "nus-wide": Frozen("nus_wide", 9800, 512, 0.01, 0.0001, (), 0),
    "icons-two-way": Frozen("icons", 800, 128, 0.1, 0.0001, (), 0),
    "imagenet-two-way": Frozen("imagenet", 450360, 256, 0.1, 0.0001, (), 0),
    "icons-margin": Frozen("icons", 800, 128, 0.003, 1e-05, (), 200),
}


def test_presets_keep_the_values_of_their_recorded_results():
    assert PRESETS.keys() == FROZEN.keys() | PUBLISHED.keys()
    for name in FROZEN:
        config = PRESETS[name].config
        optimizer = config.optimizer
        found = Frozen(
            config.data.name,
            config.steps,
            config.sampling.batch_size,
            optimizer.learning_rate,
            optimizer.weight_decay,
            optimizer.decay_steps,
            optimizer.warmup_steps,
        )
        assert found == FROZEN[name], name


def test_presets_are_grouped_by_protocol_and_described_in_one_line():
    modules = (few_shot, group_softmax, hyperspherical, multi_label, two_way, negative_margin)
    protocols = []
    for module in modules:
        found = {PRESETS[name].config.protocol for name in module.PRESETS}
        assert len(found) == 1
        protocols.extend(found)
    assert sorted(protocols) == sorted(PROTOCOLS)
    for name, (description, config, _) in PRESETS.items():
        assert config.preset == name
        assert description.endswith(".")
        assert "\n" not in description
