"""The papers' protocols, one file each; all are trained and evaluated by the same code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from experiments.core.config import TrainConfig, check_config, from_dict, to_dict
from experiments.core.errors import ConfigError
from experiments.core.protocol import Protocol
from experiments.papers import (
    few_shot,
    group_softmax,
    hyperspherical,
    multi_label,
    negative_margin,
    two_way,
)


class Registered(NamedTuple):
    """A protocol: the options of its runs, and what builds it from them."""

    config: type[TrainConfig]
    build: Callable[[Any], Protocol]


PROTOCOLS = {
    "few-shot": Registered(few_shot.FewShotConfig, few_shot.build),
    "group-softmax": Registered(group_softmax.GroupSoftmaxConfig, group_softmax.build),
    "hyperspherical": Registered(hyperspherical.HypersphericalConfig, hyperspherical.build),
    "multi-label": Registered(multi_label.MultiLabelConfig, multi_label.build),
    "two-way": Registered(two_way.TwoWayConfig, two_way.build),
    "negative-margin": Registered(negative_margin.NegativeMarginConfig, negative_margin.build),
}


def build_protocol(config: TrainConfig) -> Protocol:
    """The protocol of a run."""
    return PROTOCOLS[config.protocol].build(config)


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration of a run as JSON types, with the name of its protocol."""
    return {"protocol": config.protocol} | to_dict(config)


def config_from_dict(values: Any) -> TrainConfig:
    """The configuration that `config_to_dict` made `values` from; a `ConfigError` for any other."""
    values = dict(values) if isinstance(values, dict) else {}
    name = values.pop("protocol", None)
    if not isinstance(name, str) or name not in PROTOCOLS:
        shown = f"{str(name)[:60]!r}" if name is not None else None
        raise ConfigError(f"no protocol {shown}; this version has {', '.join(PROTOCOLS)}")
    config = from_dict(PROTOCOLS[name].config, values)
    check_config(config)
    return config
