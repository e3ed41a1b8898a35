"""Compiled programs are kept for the whole session: many tests train the same tiny run."""

import jax
import pytest

from experiments.config import Folders


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """A folder that JAX in this process, and in those that a test starts, keeps programs in."""
    folder = tmp_path_factory.mktemp("xla")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Folders:
    """Where the data sets of a session's tests are prepared, once."""
    return Folders(data_dir=tmp_path_factory.mktemp("data"))
