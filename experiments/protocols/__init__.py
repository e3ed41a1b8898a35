"""The papers' protocols: one file each, all trained and evaluated by one frame."""

from __future__ import annotations

from typing import Any

from experiments.config import TrainConfig, from_dict, to_dict
from experiments.errors import ConfigError
from experiments.protocols import (
    few_shot,
    group_softmax,
    hyperspherical,
    multi_label,
    negative_margin,
)
from experiments.protocols.protocol import Outputs, Protocol

__all__ = [
    "PROTOCOLS",
    "Outputs",
    "Protocol",
    "protocol_named",
    "protocol_of",
    "run_from_dict",
    "run_to_dict",
]

PROTOCOLS: dict[str, Protocol] = {
    module.PROTOCOL.config.protocol: module.PROTOCOL
    for module in (few_shot, group_softmax, hyperspherical, multi_label, negative_margin)
}
"""Every protocol by its name."""

_FIRST = "few-shot"
"""The protocol of runs that name none: they are older than the others."""


def protocol_of(config: TrainConfig) -> Protocol:
    """The protocol of a run."""
    return PROTOCOLS[config.protocol]


def protocol_named(name: str | None) -> Protocol:
    """The protocol of that name; without one, that of the first runs.

    Raises:
      ConfigError: there is none.
    """
    name = name or _FIRST
    if name not in PROTOCOLS:
        raise ConfigError(f"no protocol {name!r}; this version has {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


def run_to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration of a run as JSON types, with the name of its protocol."""
    named = {} if config.protocol == _FIRST else {"protocol": config.protocol}
    return named | to_dict(config)


def run_from_dict(values: dict[str, Any]) -> TrainConfig:
    """The configuration that `run_to_dict` made `values` from.

    Raises:
      ConfigError: it is none of this version.
    """
    values = dict(values)
    return from_dict(protocol_named(values.pop("protocol", None)).config, values)
