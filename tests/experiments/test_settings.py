"""Presets on the papers' data sets have the settings of the papers, and name their sources."""

import pytest

from experiments.config import get_option, option_types
from experiments.presets import PRESETS
from experiments.presets.preset import DIFFERS, OURS
from tests.experiments.published import PUBLISHED

NEVER_SOURCED = ("data.name", "log_every", "seed")


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_the_published_ones_and_have_a_source(name):
    config, sources = PRESETS[name].config, PRESETS[name].sources
    for option, value in PUBLISHED[name].items():
        assert get_option(config, option) == pytest.approx(value), option
    published = {option for option in sources if sources[option] not in (OURS, DIFFERS)}
    assert published == PUBLISHED[name].keys() - {*NEVER_SOURCED}
    default, options = type(config)(), option_types(config)
    changed = {o for o in options if get_option(config, o) != get_option(default, o)}
    assert changed - {*NEVER_SOURCED} <= sources.keys() <= options.keys()


def test_only_presets_on_embedded_data_are_without_published_settings():
    unpublished = PRESETS.keys() - PUBLISHED.keys()
    names = {PRESETS[name].config.data.name for name in unpublished}
    assert names == {"icons", "kanji", "kanji_radicals@32"}
