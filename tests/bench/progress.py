"""The live line of progress: cells' own results are held back until they are judged, so this moves.

On a terminal alone: in a log, a line that rewrites itself is noise.
"""

import shutil
import time
from collections.abc import Mapping
from typing import TextIO

from .gate.verdict import WORST_FIRST

ORDER = (*WORST_FIRST, "suspect", "measured")
"""Of the counts: the verdict's, then what is known only while a run goes on."""
COLOURS = {"wrong": 31, "missing": 31, "regressed": 31, "suspect": 33, "inconclusive": 33}
"""ANSI colour of the line where a cell has this status; the first one counts."""
WIDEST = 118


def coloured(option: str, environ: Mapping[str, str]) -> bool:
    """Whether a terminal may get colours: pytest's --color, then NO_COLOR (no-color.org)."""
    return option == "yes" or (option == "auto" and not environ.get("NO_COLOR"))


class Progress:
    """One line: done and total, time left by the cells so far, the verdict so far, the cell in work.

    It is rewritten in place on a terminal, and there is none elsewhere or without a stream.
    """

    def __init__(self, stream: TextIO | None, total: int, colour: bool = False) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._total, self._colour = total, colour
        self._counts: dict[str, int] = {}
        self._start = time.monotonic()
        self._width = 0

    def begin(self, what: str) -> None:
        """A cell starts."""
        if self._stream is None:
            return
        line = self._line(what)[: min(WIDEST, shutil.get_terminal_size((WIDEST + 1, 24)).columns - 1)]
        colour = next((COLOURS[status] for status in COLOURS if status in self._counts), None)
        shown = f"\x1b[{colour}m{line}\x1b[0m" if self._colour and colour else line
        self._stream.write("\r" + shown + " " * (self._width - len(line)))
        self._stream.flush()
        self._width = len(line)

    def end(self, status: str) -> None:
        """It ended, with a status of ORDER."""
        self._counts[status] = self._counts.get(status, 0) + 1

    def clear(self) -> None:
        """Take the line away: something else is printed, or the last cell ended."""
        if self._stream is not None and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def _line(self, what: str) -> str:
        done, spent = sum(self._counts.values()), time.monotonic() - self._start
        left = f", about {duration(spent / done * (self._total - done))} left" if done else ""
        so_far = ", ".join(f"{n} {s}" for s in ORDER if (n := self._counts.get(s)))
        return f"[{done}/{self._total}] {duration(spent)}{left}: {so_far + ': ' if so_far else ''}{what}"


def duration(seconds: float) -> str:
    """12 s, or 3 min 05 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
