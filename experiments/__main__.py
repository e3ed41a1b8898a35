"""`python -m experiments`."""

import signal
import sys

if __name__ == "__main__":
    # The imports take seconds: until they are done, Ctrl-C ends the process without a traceback.
    if interrupts := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from experiments.cli.main import main

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
