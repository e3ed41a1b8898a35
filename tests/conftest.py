"""Four virtual CPU devices, fast compilation, run-time checks of shapes, and freed programs.

All of it must happen before JAX or jaxloss is imported.
"""

import gc
import os

from jaxtyping import install_import_hook

_DEVICES = "--xla_force_host_platform_device_count"

if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=4".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the time of the tests goes into compiling tiny programs. This keeps XLA's own passes and
# turns off the expensive ones of LLVM. Set it to 0 to turn them on.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Checks the shapes and dtypes in the annotations of jaxloss, public and private, on every call. The
# hook is here and not in tests/jaxloss, because the tests of the experiments are collected first
# and import jaxloss. The annotations would reject wrong arguments before the library does, and
# `TypeCheckError` is a `TypeError`. Tests of the library's own errors therefore turn the checks off:
# see `raises` in tests/jaxloss/harness.py.
install_import_hook("jaxloss", "beartype.beartype")


def pytest_runtest_teardown(item, nextitem):
    """Frees compiled programs after the last test of a file.

    Each holds memory maps, of which Linux grants a process 65,530; beyond that the compiler dies.
    """
    if nextitem is None or nextitem.path != item.path:
        import jax

        jax.clear_caches()
        gc.collect()
