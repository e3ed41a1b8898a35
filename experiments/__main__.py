"""`python -m experiments`."""

import os
import signal
import sys
import threading
from traceback import format_exception
from typing import Any


def _stop(*_: Any) -> None:
    os.write(2, b"\nstopped before the command began\n")
    os._exit(128 + signal.SIGINT)


def _interrupt_again(unraisable: Any) -> None:
    """Python drops a KeyboardInterrupt in a `__del__`, and in JAX's callback on freed memory."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        # Again when that has returned; to this thread, whose waiting it ends.
        threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _open_standard_streams() -> None:
    """With one of them closed, the next file would get its number, and what is printed there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest free number.
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _print_printable(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Python prints the message of an uncaught error as it is."""
    from experiments.core.terminal import Terminal

    Terminal(sys.stderr).writelines(format_exception(kind, error, traceback))


if __name__ == "__main__":
    _open_standard_streams()
    # The imports take seconds, and some of them would swallow a KeyboardInterrupt.
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # Not where a shell has it ignored.
        signal.signal(signal.SIGINT, _stop)
    from experiments.cli.main import main

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = _interrupt_again
    sys.excepthook = _print_printable
    sys.exit(main())
