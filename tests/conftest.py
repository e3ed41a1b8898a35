"""Four virtual CPU devices, fast compilation, run-time checks of shapes, and freed programs.

`JAX_PLATFORMS=cuda` runs the tests with the marker `accelerator` on a GPU, as users have it.

All of it must happen before JAX or jaxloss is imported.
"""

import gc
import os
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from jaxtyping import config, install_import_hook

from tests import tolerances


def _add_xla_flag(name: str, value: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if f"--{name}=" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


_add_xla_flag("xla_force_host_platform_device_count", "4")
ON_CPU = os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu"
if not ON_CPU:
    # The processes of the tests share the memory of one device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Some tests compare two runs bit by bit, and GPUs add in any order.
    _add_xla_flag("xla_gpu_deterministic_ops", "true")
# Tiny tensors: PyTorch's threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Most of the time of the tests goes into compiling tiny programs. The variable keeps XLA's own
# passes and turns off the expensive ones of LLVM. The flags generate code in one module per
# program and, where there is a choice, without MLIR. To test the code that users get, set the
# variable to 0. XLA ends the process at a flag that it does not know, so they are set for the
# versions in which they were tried.
if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1" if ON_CPU else "0") != "0":
    if version("jaxlib").startswith(("0.7.", "0.10.", "0.12.")):
        _add_xla_flag("xla_cpu_parallel_codegen_split_count", "1")
    if version("jaxlib").startswith("0.10."):
        _add_xla_flag("xla_cpu_use_fusion_emitters", "false")

# To shorten the tracebacks of errors that tests expect takes longer than the tests.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

# gcsfs reads it when it is imported, and would ask Google itself about the emulator's buckets.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# Lets jaxtyping check the annotations of jaxloss, public and private, on every call. The hook must
# be here, because the tests of the experiments are collected first and import jaxloss. The checks
# are on where a test asks for `checked_annotations`: once for each function, as they take time.
# Users may pass NumPy arrays, and the annotations say JAX arrays. A machine with a GPU may not have
# beartype.
if find_spec("beartype"):
    import_module("tests.annotations")  # The string is evaluated after `import tests`.
    install_import_hook("jaxloss", "tests.annotations.checked")
config.update("jaxtyping_disable", True)


# Compiling allocates much that lives on, which the default would search for garbage every time.
gc.set_threshold(100_000, 20, 100)

_MAPS = Path("/proc/self/maps")
_MANY_MAPS = 4_000


def pytest_addoption(parser):
    parser.addoption(
        "--tolerances",
        action="store_true",
        help="print the largest share of its tolerance that every comparison used",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not item.config.getoption("--tolerances"):
        return (yield)
    with tolerances.watched() as shares:
        try:
            return (yield)
        finally:
            item.user_properties.append(("tolerances", shares))


def pytest_terminal_summary(terminalreporter):
    """The shares of all processes of the tests."""
    largest: dict[str, tuple[float, str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for key, share in dict(report.user_properties).get("tolerances", {}).items():
                if share <= 1 or outcome == "failed":  # Others are meant to differ.
                    largest[key] = max(largest.get(key, (0.0, "")), (share, report.nodeid))
    if largest:
        terminalreporter.section("shares of tolerances")
    for key, (share, test) in sorted(largest.items(), key=lambda item: -item[1][0]):
        terminalreporter.write_line(f"{share:8.4f}  {key}, in {test}")


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
