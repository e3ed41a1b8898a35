"""Options: the bounds of their numbers, their way through JSON, and access by name."""

import dataclasses
import json
import math
import typing
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from annotated_types import BaseMetadata, Gt, Le

from experiments.config import (
    Count,
    ModelConfig,
    Positive,
    Ratio,
    Seed,
    Share,
    check_config,
    from_dict,
    replace_option,
    to_dict,
)
from experiments.errors import ConfigError
from experiments.presets import PRESETS
from experiments.protocols import PROTOCOLS, build_protocol, config_from_dict, config_to_dict
from experiments.protocols.few_shot import FewShotConfig
from experiments.protocols.group_softmax import GroupSoftmaxConfig


@dataclass(frozen=True)
class Inner:
    share: Share = 0.0
    ratios: tuple[Ratio, ...] = (1.0,)


@dataclass(frozen=True)
class Numbers:
    count: Count = 1
    positive: Positive = 1.0
    seed: Seed = 0
    free: float = 0.0
    optional: tuple[Positive, ...] = ()
    free_numbers: tuple[float, ...] = (0.0,)
    half_open: Annotated[float, Gt(-1), Le(1)] = 0.0
    text: str = ""
    inner: Inner = Inner()


def test_numbers_within_their_bounds_pass():
    check_config(Numbers(count=1, positive=1e-300, seed=0, free=-1e300, half_open=-0.999))
    check_config(Numbers(seed=2**32 - 1, half_open=1.0, inner=Inner(share=0.999)))
    check_config(Numbers(optional=(0.1, 5.0), free_numbers=(-3.0, 3.0), text="-1"))
    check_config(Numbers(inner=Inner(share=0.0, ratios=(0.001, 1.0))))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Numbers(half_open=-1.0), "half_open must be above -1 and at most 1, got -1.0"),
        (Numbers(free_numbers=()), "free_numbers needs at least one value"),
        (Numbers(inner=Inner(share=1.0)), "inner.share must be at least 0 and below 1, got 1.0"),
        # Bounded or not, numbers are finite.
        (Numbers(free=math.nan), "free must be finite, got nan"),
        (Numbers(free_numbers=(0.0, math.nan)), "free_numbers must be finite, got nan"),
    ],
)
def test_other_numbers_are_refused_with_option_and_value(config, message):
    with pytest.raises(ConfigError) as error:
        check_config(config)
    assert str(error.value) == message


_STEPS_OUTSIDE = {"ge": -1, "gt": 0, "lt": 0, "le": 1}


def _limits(config: Any, prefix: str = "") -> dict[tuple[str, str], Any]:
    """For every bounded option: a value that its bound just excludes."""
    found: dict[tuple[str, str], Any] = {}
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value, name = vars(config).get(name), prefix + name
        if dataclasses.is_dataclass(value):
            found |= _limits(value, f"{name}.")
            continue
        several = typing.get_origin(hint) is tuple
        hint = typing.get_args(hint)[0] if several else hint
        for bound in getattr(hint, "__metadata__", ()):
            if isinstance(bound, BaseMetadata):
                ((kind, limit),) = dataclasses.asdict(bound).items()  # pyright: ignore
                outside = limit + _STEPS_OUTSIDE[kind]
                found[name, repr(bound)] = (outside,) if several else outside
    return found


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_bound_of_every_protocol_is_checked(protocol):
    config = PROTOCOLS[protocol].config()
    check_config(config)
    limits = _limits(config)
    assert {"sampling.batch_size", "optimizer.learning_rate", "seed"} < {name for name, _ in limits}
    for (option, _), outside in limits.items():
        with pytest.raises(ConfigError, match=rf"{option} must be (at least|above|at most|below)"):
            check_config(replace_option(config, option, outside))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_survives_a_file(name):
    config = PRESETS[name].config
    check_config(config)
    written = json.loads(json.dumps(config_to_dict(config)))
    assert written == config_to_dict(config)
    assert (written["protocol"], written["preset"]) == (config.protocol, name)
    assert config_from_dict(written) == config
    assert written == config_to_dict(config)  # Reading leaves it as it is.


def test_keys_that_do_not_fit_are_named():
    written = to_dict(ModelConfig())
    del written["widths"]
    with pytest.raises(ConfigError, match=r"\(ModelConfig\): unknown keys \[\], missing keys \['w"):
        from_dict(ModelConfig, written)
    with pytest.raises(ConfigError, match=r"unknown keys \['depth'\], missing keys \['widths'\]"):
        from_dict(ModelConfig, written | {"depth": 3})
    # Also within a section of a run.
    run = config_to_dict(GroupSoftmaxConfig())
    run["data"] |= {"novel": ""}
    with pytest.raises(ConfigError, match=r"\(ClassificationData\): unknown keys \['novel'\]"):
        config_from_dict(run)


def test_a_run_without_a_known_protocol_is_refused():
    run = config_to_dict(FewShotConfig())
    with pytest.raises(ConfigError, match="no protocol 'fewshot'; this version has few-shot, grou"):
        config_from_dict(run | {"protocol": "fewshot"})
    del run["protocol"]
    with pytest.raises(ConfigError, match="no protocol None"):
        config_from_dict(run)
    # A run of one protocol is none of another.
    with pytest.raises(ConfigError, match=r"GroupSoftmaxConfig\): unknown keys \['evaluation'\]"):
        config_from_dict(config_to_dict(FewShotConfig()) | {"protocol": "group-softmax"})


@pytest.mark.parametrize(
    ("protocol", "options", "label"),
    [
        ("group-softmax", {"grouping": "contiguous"}, "Type II, G = 4, contiguous"),
        ("group-softmax", {"name": "softmax", "grouping": "contiguous"}, "Softmax"),
        ("group-softmax", {"name": "tight", "grouping": "random"}, "Type I, G = 4, random"),
        (
            "hyperspherical",
            {"name": "static", "criterion": "dot-regression"},
            "Static assignment, dot regression",
        ),
        ("hyperspherical", {"name": "fixed-ce", "logits": "cosine"}, "Fixed W + CE, cosine logits"),
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
    config = PROTOCOLS[protocol].config()
    for option, value in options.items():
        config = replace_option(config, f"loss.{option}", value)
    assert build_protocol(config).description["label"] == label
