"""Presets on the papers' data sets have the settings of the papers, and name their sources."""

import pytest

from experiments.config import get_option, option_types
from experiments.presets import PRESETS
from experiments.presets.preset import DIFFERS, OURS
from tests.experiments.published import PUBLISHED

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
    assert sources.keys() <= options.keys()
    assert not changed - {*NEVER_SOURCED} - sources.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_with_a_published_source_are_the_published_settings(name):
    sources = PRESETS[name].sources
    published = {option for option in sources if sources[option] not in (OURS, DIFFERS)}
    assert published == PUBLISHED[name].keys() - {*NEVER_SOURCED}


def test_only_presets_on_embedded_data_are_without_published_settings():
    unpublished = PRESETS.keys() - PUBLISHED.keys()
    names = {PRESETS[name].config.data.name for name in unpublished}
    assert names == {"icons", "kanji", "kanji_radicals@32"}
