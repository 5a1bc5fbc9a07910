"""The live line of progress: cells' own results are held back until they are judged, so this moves."""

import time
from typing import TextIO


class Progress:
    """One line: done, total, time left by the cells so far, the cell in work.

    Rewritten in place on a terminal; elsewhere one plain line now and then.
    """

    def __init__(self, stream: TextIO | None, total: int, every_s: float = 30.0) -> None:
        self._stream = stream
        self._live = stream is not None and stream.isatty()
        self._total, self._done = total, 0
        self._start = self._printed = time.monotonic()
        self._every_s = every_s
        self._width = 0

    def begin(self, what: str) -> None:
        """A cell starts."""
        self._show(what)

    def end(self) -> None:
        """It ended."""
        self._done += 1

    def close(self) -> None:
        """Clear the line."""
        if self._live and self._stream and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()

    def _show(self, what: str) -> None:
        now = time.monotonic()
        if self._stream is None or not (self._live or now - self._printed >= self._every_s):
            return
        self._printed = now
        spent = now - self._start
        left = (
            f"about {duration(spent / self._done * (self._total - self._done))} left" if self._done else "..."
        )
        line = f"[{self._done}/{self._total}] {duration(spent)}, {left}: {what}"
        if self._live:
            self._stream.write("\r" + line[:118].ljust(self._width))
            self._width = min(len(line), 118)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """12 s, or 3 min 05 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
