"""Presets on photographs have the schedules that the papers' supplements tell."""

from typing import Any, NamedTuple

import pytest

from experiments.presets import PRESETS

MULTI_STEP, COSINE = "step", "cosine"


class Row(NamedTuple):
    """A schedule as the papers tell it, in epochs."""

    images: int
    batch: int
    epochs: int
    rate: float
    decay: float
    drops: tuple[int, ...] = ()
    warmup: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012
    """Beside it, of `optimizer`, `data`, `loss` and `model`."""


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


def tail(largest: int, classes: int, factor: float) -> int:
    return sum(int(largest * factor ** (k / (classes - 1)) + 1e-9) for k in range(classes))


GROUPS: dict[str, Any] = {"optimizer.nesterov": False, "model.backbone": "resnet50"}
SUMMED = {"loss.reduction": "sum", "optimizer.nesterov": False, "model.backbone": "resnet32"}
MIXED = {"data.mixup": 1.0, "optimizer.nesterov": False, "model.backbone": "resnet50"}
PRETRAINED = {"optimizer.backbone_rate": 0.1, "model.backbone": "resnet50"}
ADAM = {"optimizer.kind": "adam", "optimizer.warmup_from": 1 / 16, "loss.name": "cosine"}

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
    "cifar10-lt": long_tail(tail(5000, 10, 0.01)),
    "cifar100-lt": long_tail(tail(500, 100, 0.01)),
    # The largest of SVHN's classes, the ones, has 13,861 images; the others have enough.
    "svhn-lt": long_tail(tail(13861, 10, 0.01)),
    "stl10-lt": long_tail(tail(500, 10, 0.01)),
    # Kobayashi, CVPR 2023.
    "coco": Row(82783, 512, 40, 0.01, 1e-4, (), 0, PRETRAINED),
    "voc2007": Row(5011, 512, 40, 0.01, 1e-4, (), 0, PRETRAINED),
    "nus-wide": Row(125448, 512, 40, 0.01, 1e-4, (), 0, PRETRAINED),
    # Liu et al., ECCV 2020, supplement: 50 + 200 epochs, on CUB 100 + 400.
    "mini-imagenet-margin": Row(64 * 570, 256, 250, 3e-3, 1e-5, (), 50, ADAM),
    "mini-imagenet-cub": Row(100 * 570, 256, 250, 3e-3, 1e-5, (), 50, ADAM),
    "cub-margin": Row(5885, 256, 500, 3e-3, 1e-5, (), 100, ADAM),
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
        section, _, field = option.partition(".")
        assert getattr(getattr(config, section), field) == value, option


def test_the_evaluation_of_negative_margins_is_the_papers():
    for name in ("icons-margin", "mini-imagenet-margin", "mini-imagenet-cub", "cub-margin"):
        config: Any = PRESETS[name].config
        tuning, episodes = config.fine_tuning, config.evaluation
        assert (episodes.ways, episodes.shots, episodes.queries) == (5, (1, 5), 16)
        assert episodes.episodes == 600
        assert (tuning.passes, tuning.batch_size, tuning.learning_rate) == (100, 4, 0.01)
        assert (tuning.momentum, tuning.dampening, tuning.weight_decay) == (0.9, 0.9, 1e-3)
        assert (tuning.classifier, tuning.scale) == ("same", 5.0)


def test_two_way_temperatures_are_the_papers():
    for name in ("kanji", "coco", "voc2007", "nus-wide"):
        loss: Any = PRESETS[name].config.loss
        assert (loss.positive_temperature, loss.negative_temperature) == (4.0, 1.0)
