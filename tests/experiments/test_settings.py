"""Presets on the papers' data sets have the settings of the papers, and name their sources."""

import pytest

from experiments.config import get_option, option_types
from experiments.presets import PRESETS
from experiments.presets.preset import DIFFERS, OURS
from tests.experiments.published import (
    few_shot,
    group_softmax,
    hyperspherical,
    multi_label,
    negative_margin,
)

PUBLISHED = (
    few_shot.PUBLISHED
    | group_softmax.PUBLISHED
    | hyperspherical.PUBLISHED
    | multi_label.PUBLISHED
    | negative_margin.PUBLISHED
)
_OF_SGD = ("optimizer.momentum", "optimizer.nesterov")
_OF_EPISODES = ("ways", "shots", "queries", "episodes")
_OF_VALIDATIONS = ("validation_episodes", "validation_distance")
_OF_TWO_WAY = ("loss.positive_temperature", "loss.negative_temperature", "loss.class_wise_over")
ALWAYS_SOURCED = (
    "data.flip",
    "sampling.batch_size",
    "model.backbone",
    "optimizer.kind",
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "optimizer.decay_all",
    "optimizer.schedule",
    "steps",
)
"""Whatever their values."""
SOURCED_BY_PROTOCOL = {
    "few-shot": (
        *(f"loss.{o}" for o in ("temperature", "metric_weight", "epsilon", "stop_gradient")),
        *(f"evaluation.{o}" for o in (*_OF_EPISODES, "distances", *_OF_VALIDATIONS)),
    ),
    "group-softmax": ("loss.num_groups", "loss.grouping"),
    "hyperspherical": (
        *(f"loss.{option}" for option in ("criterion", "reduction", "decay")),
        "evaluation.calibration",
    ),
    "multi-label": _OF_TWO_WAY,
    "two-way": _OF_TWO_WAY,
    "negative-margin": (
        *(f"loss.{option}" for option in ("name", "margin", "scale", "label_smoothing")),
        *(f"evaluation.{o}" for o in (*_OF_EPISODES, "classifier", "selection")),
        *(f"evaluation.{o}" for o in ("validation_shots", *_OF_VALIDATIONS)),
        *(f"fine_tuning.{o}" for o in ("scale", "margin", "passes", "batch_size")),
        *(f"fine_tuning.{o}" for o in ("learning_rate", "momentum", "dampening")),
        "fine_tuning.weight_decay",
    ),
}
NEVER_SOURCED = ("data.name", "log_every", "seed")


def settings_of(name, options):
    return {option: get_option(PRESETS[name].config, option) for option in options}


def approximately(settings):
    return {option: pytest.approx(value) for option, value in settings.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_the_published_ones(name):
    assert settings_of(name, PUBLISHED[name]) == approximately(PUBLISHED[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_setting_has_a_source(name):
    config, sources = PRESETS[name].config, PRESETS[name].sources
    default = type(config)()
    options = option_types(config)
    changed = {o for o in options if get_option(config, o) != get_option(default, o)}
    always = {*ALWAYS_SOURCED, *SOURCED_BY_PROTOCOL[config.protocol]}
    if config.optimizer.kind == "sgd":
        always |= {*_OF_SGD}
    assert sources.keys() <= options.keys()
    assert not (changed | always) - {*NEVER_SOURCED} - sources.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_with_a_published_source_are_the_published_settings(name):
    sources = PRESETS[name].sources
    published = {option for option in sources if sources[option] not in (OURS, DIFFERS)}
    assert published == PUBLISHED[name].keys() - {*NEVER_SOURCED}


def test_only_presets_on_embedded_data_are_without_published_settings():
    unpublished = PRESETS.keys() - PUBLISHED.keys()
    names = {PRESETS[name].config.data.name for name in unpublished}
    assert names == {"icons", "kanji", "kanji_radicals@32"}
