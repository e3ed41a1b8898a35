"""The papers' protocols, one file each; all are trained and evaluated by the same code."""

from __future__ import annotations

from typing import Any

from experiments.core.config import TrainConfig, check_config, from_dict, to_dict
from experiments.core.errors import ConfigError
from experiments.core.protocol import Protocol
from experiments.papers.few_shot import FewShot, FewShotConfig
from experiments.papers.group_softmax import GroupSoftmax, GroupSoftmaxConfig
from experiments.papers.hyperspherical import Hyperspherical, HypersphericalConfig
from experiments.papers.multi_label import MultiLabel, MultiLabelConfig, TwoWay, TwoWayConfig
from experiments.papers.negative_margin import NegativeMargin, NegativeMarginConfig

PROTOCOLS: dict[str, tuple[type[TrainConfig], Any]] = {
    options.protocol: (options, protocol)
    for options, protocol in (
        (FewShotConfig, FewShot),
        (GroupSoftmaxConfig, GroupSoftmax),
        (HypersphericalConfig, Hyperspherical),
        (MultiLabelConfig, MultiLabel),
        (TwoWayConfig, TwoWay),
        (NegativeMarginConfig, NegativeMargin),
    )
}
"""By name: the options of the runs of a protocol, and its class."""


def build_protocol(config: TrainConfig) -> Protocol:
    """The protocol of a run."""
    return PROTOCOLS[config.protocol][1](config)


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
    config = from_dict(PROTOCOLS[name][0], values)
    check_config(config)
    return config
