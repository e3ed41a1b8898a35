"""`python -m experiments`."""

import os
import signal
import sys
from typing import Any


def _stop(*_: Any) -> None:
    os.write(2, b"\nstopped before the command began\n")
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    # The imports take seconds, and some of them would swallow a KeyboardInterrupt.
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # Not where a shell has it ignored.
        signal.signal(signal.SIGINT, _stop)
    from experiments.cli.main import main

    signal.signal(signal.SIGINT, interrupt)
    sys.exit(main())
