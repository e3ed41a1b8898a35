"""How far a run is: a live bar on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 30.0
_LINE = (
    "{desc}: {n_fmt}/{total_fmt} steps ({percentage:.0f} %){postfix}, "
    "{elapsed} elapsed, {remaining} left"
)


class Progress:
    """What `progress` yields."""

    def __init__(self, bar: tqdm, initial: int, description: str):
        self._bar = bar
        self._initial = initial
        self._description = description
        self._started = self._printed = time.monotonic()
        self._tenth = 10 * initial // bar.total

    def update(self, step: int, loss: float, images_per_second: float) -> None:
        """Reports the number of steps done, the loss there, and the speed."""
        figures = f"loss {loss:.4g}, {images_per_second:,.0f} images/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now, tenth = time.monotonic(), 10 * step // self._bar.total
        if tenth > self._tenth or now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._tenth, self._printed = tenth, now
            line = tqdm.format_meter(
                step,
                self._bar.total,
                now - self._started,
                prefix=self._description,
                postfix=figures,
                initial=self._initial,
                bar_format=_LINE,
            )
            print(line, flush=True)


@contextmanager
def progress(total: int, initial: int, description: str) -> Iterator[Progress]:
    """Shows the steps done of `total`; a resumed run has done `initial` of them before.

    On a terminal this is a bar with loss, images per second and time left. Otherwise it is a line
    for every tenth of the run, or every 30 seconds, without control characters.
    """
    with tqdm(
        total=total, initial=initial, desc=description, unit=" steps", file=sys.stdout, disable=None
    ) as bar:
        yield Progress(bar, initial, description)
