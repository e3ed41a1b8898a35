"""`python -m experiments`."""

import sys

if __name__ == "__main__":
    try:
        from experiments.cli.main import main
    except KeyboardInterrupt:  # The imports take seconds.
        print("\nstopped before the command began", file=sys.stderr)
        sys.exit(130)
    sys.exit(main())
