"""The worker of one side: holds a cell's arms, and runs one when it is asked. `python -m ...worker SIDE CORES`.

It is pinned before anything is imported, and sleeps while the other side runs.
"""

import contextlib
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from .. import child, pin

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Side(Protocol):
    """What a side makes of the requests."""

    def load(self, cell: dict[str, Any], inputs: str) -> None:
        """Take this cell's inputs, and forget the last one's arms."""

    def prepare(self, arm: str) -> None:
        """Make an arm ready to run, without a run: memory is measured from here."""

    def output(self, arm: str, path: str) -> None:
        """Write y of a forward pass of this arm, before any train step, as float32 to `path` (.npy)."""

    def run(self, arm: str) -> None:
        """One call, to its end."""


def serve(side: Side) -> None:
    """Answer each request on standard input: a method of the side, `time` or `peak`."""
    child.serve(functools.partial(_answer, side))


def _answer(side: Side, verb: str, *arguments: Any) -> Any:
    if verb == "time":
        return _timed(side, *arguments)
    return _peak() if verb == "peak" else getattr(side, verb)(*arguments)


def _timed(side: Side, arm: str, times: int) -> float:
    """Seconds of one of `times` calls in a row."""
    start = time.perf_counter()
    for _ in range(times):
        side.run(arm)
    return (time.perf_counter() - start) / times


def _peak() -> dict[str, int]:
    """Resident bytes: the most since the last question, and now; empty where the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    except OSError:
        return {}
    kib = {name: int(lines[field].split()[0]) for name, field in (("peak", "VmHWM"), ("now", "VmRSS"))}
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")  # The next question is about what comes after this one.
    return {name: size * 1024 for name, size in kib.items()}


def main() -> None:
    """Serve one side."""
    side, cores = sys.argv[1], json.loads(sys.argv[2])
    if cores is not None:
        pin.restrict(cores)
    if side == "torch":
        from .torch_side import Torch

        serve(Torch(len(cores or ()) or None))
    else:
        from .jax_side import Jax

        serve(Jax())


if __name__ == "__main__":
    main()
