"""Presets on the papers' data sets have the settings of the papers, and name their sources."""

import pytest

from experiments.config import get_option, option_types
from experiments.presets import PRESETS
from experiments.presets.preset import OURS
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
ROWS = [(name, option) for name, settings in PUBLISHED.items() for option in settings]
ALWAYS_SOURCED = (
    "sampling.batch_size",
    "model.backbone",
    "optimizer.kind",
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "optimizer.decay_all",
    "optimizer.schedule",
    "steps",
)
NEVER_SOURCED = ("data.name", "log_every", "seed")


@pytest.mark.parametrize(("name", "option"), ROWS)
def test_a_setting_is_the_published_one(name, option):
    assert get_option(PRESETS[name].config, option) == pytest.approx(PUBLISHED[name][option])


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_setting_has_a_source(name):
    config, sources = PRESETS[name].config, PRESETS[name].sources
    default = type(config)()
    options = option_types(config)
    changed = {o for o in options if get_option(config, o) != get_option(default, o)}
    assert sources.keys() <= options.keys()
    missing = (changed | {*ALWAYS_SOURCED}) - {*NEVER_SOURCED} - sources.keys()
    assert not missing
    assert not {option for option in PUBLISHED[name] if sources.get(option) == OURS}


def test_only_presets_on_embedded_data_are_without_published_settings():
    unpublished = PRESETS.keys() - PUBLISHED.keys()
    assert {PRESETS[name].config.data.name for name in unpublished} == {"icons", "kanji"}
