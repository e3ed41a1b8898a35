"""Four virtual CPU devices before JAX starts, and no compiled programs left behind."""

import gc
import os

_DEVICES = "--xla_force_host_platform_device_count"

if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=4".strip()
os.environ["JAX_PLATFORMS"] = "cpu"


def pytest_runtest_teardown(item, nextitem):
    """Frees compiled programs after the last test of a file.

    Each holds memory maps, of which Linux grants a process 65,530; beyond that the compiler dies.
    """
    if nextitem is None or nextitem.path != item.path:
        import jax

        jax.clear_caches()
        gc.collect()
