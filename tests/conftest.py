"""Four virtual CPU devices before JAX starts, quick compilation, and no programs left behind."""

import gc
import os

_DEVICES = "--xla_force_host_platform_device_count"

if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=4".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the tests' time goes into compiling tiny programs. XLA's own passes stay on, LLVM's costly
# ones are off; JAX_DISABLE_MOST_OPTIMIZATIONS=0 turns them on again.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def pytest_runtest_teardown(item, nextitem):
    """Frees compiled programs after the last test of a file.

    Each holds memory maps, of which Linux grants a process 65,530; beyond that the compiler dies.
    """
    if nextitem is None or nextitem.path != item.path:
        import jax

        jax.clear_caches()
        gc.collect()
