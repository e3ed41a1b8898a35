"""Options: the bounds of their numbers, and their way through JSON."""

import json
import math

import pytest

from experiments.core.config import check_config, replace_option
from experiments.core.errors import ConfigError
from experiments.papers import PROTOCOLS, build_protocol, config_from_dict, config_to_dict
from experiments.papers.group_softmax import GroupSoftmaxConfig
from experiments.papers.presets import PRESETS

CONFIG = GroupSoftmaxConfig()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("sampling.batch_size", 0, "must be at least 1 and at most 1000000, got 0"),
        ("seed", 2**32, f"must be at least 0 and below {2**32}, got {2**32}"),
        ("data.imbalance", 0.0, "must be above 0 and at most 1, got 0.0"),
        ("model.widths", (), "needs at least one value"),
        ("data.pad", 10**399, f"must be at least 0 and at most 10000, got 1{'0' * 29}… (400 char"),
        # Bounded or not, numbers are finite.
        ("data.mean", (0.0, math.nan), "must be finite, got nan"),
        ("optimizer.learning_rate", math.inf, "must be finite, got inf"),
    ],
)
def test_numbers_out_of_bounds_are_refused_with_option_and_value(option, value, message):
    with pytest.raises(ConfigError) as error:
        check_config(replace_option(CONFIG, option, value))
    assert str(error.value).startswith(f"{option} {message}")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_survives_a_file(name):
    config = PRESETS[name].config
    check_config(config)
    written = json.loads(json.dumps(config_to_dict(config)))
    assert written == config_to_dict(config)
    assert (written["protocol"], written["preset"]) == (config.protocol, name)
    assert config_from_dict(written) == config


RUN = config_to_dict(CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": "fewshot"}, "no protocol 'fewshot'; this version has few-shot, group-s"),
        # A run of one protocol is none of another.
        ({"protocol": "few-shot"}, r"FewShotConfig\): unknown keys \[\], missing keys \['evaluati"),
        # Also within a section.
        ({"loss": {"names": "tight"}}, r"GroupLoss\): unknown keys \['names'\], missing keys \['g"),
    ],
)
def test_a_run_of_another_version_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(RUN | changes)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("steps", value) for value in ("20", 20.0, True, None, [20], {}, -1, 10**300, 1e999)),
        *(("seed", value) for value in ("", False, 2**32)),
        *(("data.mean", value) for value in (0.5, "0.5", ["0.5"], [None], [[0.5]], {"0.5": 1})),
        *(("data.flip", value) for value in (1, "true", "True", None)),
        *(("optimizer.learning_rate", value) for value in ("0.1", True, math.nan, -1, 10**400)),
        *(("model.backbone", value) for value in ("vgg", ["conv4"], None, "x" * 10**6)),
        *(("data", value) for value in (None, [], "x", 1)),
    ],
)
def test_values_of_a_file_have_the_types_of_their_options(option, value):
    """What is edited by hand, or damaged, is not converted in silence; the message is short."""
    section, _, name = option.rpartition(".")
    changed = {name: value}
    with pytest.raises(ConfigError) as error:
        config_from_dict(RUN | ({section: RUN[section] | changed} if section else changed))
    assert str(error.value).startswith(option)
    assert len(str(error.value)) < 300


def test_whole_numbers_of_a_file_are_floats_too():
    values = RUN | {"optimizer": RUN["optimizer"] | {"learning_rate": 1}}
    assert config_from_dict(values).optimizer.learning_rate == 1


@pytest.mark.parametrize(
    ("protocol", "options", "label"),
    [
        ("group-softmax", {"grouping": "contiguous"}, "Loose, G = 4, contiguous"),
        ("group-softmax", {"name": "softmax", "grouping": "contiguous"}, "Softmax"),
        ("group-softmax", {"name": "tight", "grouping": "random"}, "Tight, G = 4, random"),
        (
            "hyperspherical",
            {"name": "static", "criterion": "dot-regression"},
            "Static assignment, dot regression",
        ),
        ("hyperspherical", {"name": "cosine-softmax"}, "Cosine softmax, no scale"),
        ("multi-label", {"positive_temperature": 2.0, "clip": 0.1}, "Two-way, T_P = 2"),
        (
            "multi-label",
            {"name": "class-wise", "class_wise_over": "device"},
            "Class-wise, by device",
        ),
        ("multi-label", {"name": "bce", "class_wise_over": "device", "margin": 1}, "BCE"),
    ],
)
def test_labels_tell_what_is_minimised(protocol, options, label):
    config = PROTOCOLS[protocol][0]()
    for option, value in options.items():
        config = replace_option(config, f"loss.{option}", value)
    assert build_protocol(config).description["label"] == label
