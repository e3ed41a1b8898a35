"""Devices to compile for that this machine need not have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

from experiments.core.errors import ConfigError


def tpu_devices(topology: str) -> Sequence[Any]:
    """The devices of a TPU topology such as v5e:16x16, which this machine need not have."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # No TPU is used, so several commands may compile at once.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # Several, from JAX and from libtpu.
        raise ConfigError(
            f"TPU topology {topology!r} cannot be described ({str(error).partition(chr(10))[0]}); "
            'it needs pip install -e ".[tpu]", and a name such as v5e:2x2 or v5e:16x16'
        ) from error
