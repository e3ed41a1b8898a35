"""`python -m experiments`."""

import signal
import sys
import threading
from typing import Any


def _interrupt_again(unraisable: Any) -> None:
    """Python drops a KeyboardInterrupt in a `__del__`, and in JAX's callback on freed memory."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        # Again when that has returned; to this thread, whose waiting it ends.
        threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    # The imports take seconds: until they are done, Ctrl-C ends the process without a traceback.
    if interrupts := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from experiments.cli.main import main

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _interrupt_again
    sys.exit(main())
