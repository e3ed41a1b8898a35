"""`python -m experiments`."""

import sys

from experiments.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
