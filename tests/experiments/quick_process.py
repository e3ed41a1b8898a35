"""`python quick_process.py -m MODULE …` is `python -m MODULE …` that starts in half the time.

tensorboardX imports PyTorch where it is installed, which nothing here needs.
"""

import gc
import os
import runpy
import sys
from importlib.abc import MetaPathFinder


class _NoTorch(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == "torch":
            raise ModuleNotFoundError("PyTorch is left out here", name=fullname)
        return None


if __name__ == "__main__":
    gc.set_threshold(100_000, 20, 100)
    sys.meta_path.insert(0, _NoTorch())
    sys.path[0] = os.getcwd()
    if sys.argv[1] == "-m":
        sys.argv[:2] = []
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:1] = []
        runpy.run_path(sys.argv[0], run_name="__main__")
