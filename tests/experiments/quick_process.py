"""`python quick_process.py -m MODULE …` is `python -m MODULE …` that starts in half the time.

JAX lets only the first process of a run write into the compilation cache; here all of them do. And
tensorboardX imports PyTorch where it is installed, which nothing here needs.
"""

import gc
import os
import runpy
import sys
from importlib.abc import MetaPathFinder
from unittest.mock import patch

from jax._src import compiler, distributed

_write = compiler._cache_write


class _NoTorch(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == "torch":
            raise ModuleNotFoundError("PyTorch is left out here", name=fullname)
        return None


def _write_as_first(*args):
    with patch.object(distributed.global_state, "process_id", 0):
        _write(*args)


if __name__ == "__main__":
    gc.set_threshold(100_000, 20, 100)
    compiler._cache_write = _write_as_first
    sys.meta_path.insert(0, _NoTorch())
    sys.path[0] = os.getcwd()
    if sys.argv[1] == "-m":
        sys.argv[:2] = []
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:1] = []
        runpy.run_path(sys.argv[0], run_name="__main__")
