"""Four virtual CPU devices, fast compilation, run-time checks of shapes, and freed programs.

All of it must happen before JAX or jaxloss is imported.
"""

import gc
import os
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from jaxtyping import config, install_import_hook


def _add_xla_flag(name: str, value: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if f"--{name}=" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


_add_xla_flag("xla_force_host_platform_device_count", "4")
os.environ["JAX_PLATFORMS"] = "cpu"
# Tiny tensors: PyTorch's threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Most of the time of the tests goes into compiling tiny programs. The first line keeps XLA's own
# passes and turns off the expensive ones of LLVM. The flags generate code without MLIR, in one
# module per program, four times as fast. To test the usual code, set the first to 0, and the flags
# to true and 32 in XLA_FLAGS. XLA ends the process at a flag that it does not know, so the flags
# are set for the versions in which they were tried.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if version("jaxlib").startswith("0.10."):
    _add_xla_flag("xla_cpu_use_fusion_emitters", "false")
    _add_xla_flag("xla_cpu_parallel_codegen_split_count", "1")

# To shorten the tracebacks of errors that tests expect takes longer than the tests.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

# gcsfs reads it when it is imported, and would ask Google itself about the emulator's buckets.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# Lets jaxtyping check the annotations of jaxloss, public and private, on every call. The hook must
# be here, because the tests of the experiments are collected first and import jaxloss. The checks
# are on in the tests of the library only: experiments may pass NumPy arrays, as all users may, and
# the annotations say JAX arrays.
import_module("tests.annotations")  # The string is evaluated after `import tests`.
install_import_hook("jaxloss", "tests.annotations.checked")
config.update("jaxtyping_disable", True)


# Compiling allocates much that lives on, which the default would search for garbage every time.
gc.set_threshold(100_000, 20, 100)

_MAPS = Path("/proc/self/maps")
_MANY_MAPS = 4_000


def pytest_collection_finish():
    """Modules and tests live on: they are not searched for garbage."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Frees compiled programs after the last test of a file, when they are many.

    Each holds memory maps, of which Linux grants a process 65,530; beyond that the compiler dies.
    Programs with 4,000 of them take about 1.5 GB. A process with groups of tests changes its file
    often, and freeing takes a third of a second.
    """
    if nextitem is None or nextitem.path == item.path or not _MAPS.exists():
        return
    if _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()
