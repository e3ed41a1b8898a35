"""The papers' experiments: data, models, training, evaluation and reports around `jaxloss`.

From Python: `train` a preset, `load_run` from its folder, `features_of` its splits, `evaluate` it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# XLA's factorisations on the CPU (the spectral sum's singular values) run on OpenBLAS, whose
# threads wait actively for one another: on two busy cores a 256×100 matrix took 24 ms instead of 2.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if TYPE_CHECKING:
    from experiments.core.config import Folders
    from experiments.run import evaluate, features_of, load_run, train

__all__ = ["Folders", "evaluate", "features_of", "load_run", "train"]


def __getattr__(name: str) -> Any:
    """Imports what is public when it is first used: `--help` need not wait for Orbax and TFDS."""
    if name not in __all__:
        raise AttributeError(f"module 'experiments' has no attribute {name!r}")
    return getattr(import_module("experiments.run"), name)
