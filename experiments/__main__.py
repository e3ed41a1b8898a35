"""`python -m experiments`."""

import sys

from experiments.allocation import keep_freed_memory
from experiments.cli.main import main

if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
