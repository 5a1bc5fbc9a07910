"""The worker of one side of an upgrade: its JAX compiles and runs a cell. `python -m ...upgrade_side CORES`.

It is pinned before anything is imported, and sleeps while the other side runs.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from . import child, home, pin


class Side:
    """Holds one cell at a time. Each public method is a request; use it with `with`."""

    def __init__(self) -> None:
        from .gate.vet import Vetter

        self._ready: Any = None
        self._vetter = Vetter()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self._vetter.__exit__()

    def begin(self, grid: str, only: str | None) -> dict[str, Any]:
        """The environment, and the grid's cells that `only` leaves, id -> fields; those that a limit skips too."""
        from . import environment, lowered

        environment.check_sources(home.ROOT)
        described = environment.describe()
        entries = lowered.chosen(grid, described["backend"], only)
        return {
            "environment": described,
            "cells": {entry.cell.id: dataclasses.asdict(entry.cell) for entry in entries},
            "skipped": {entry.cell.id: entry.skip for entry in entries if entry.skip},
        }

    def load(self, cell: dict[str, Any], path: str) -> dict[str, Any]:
        """Assert a cell and compile it; its record, and its program in `path` unless that cannot be stored."""
        from .cell import Cell
        from .gate.examine import exported, figures
        from .numerics import check
        from .program import MIB, program

        its = Cell(**cell)
        numerics = check(its)
        self._ready = None  # The last cell's arrays make room.
        self._ready = program(its)
        compiled, seen = self._ready.compiled, exported(self._ready.flat)
        if seen.program is not None:
            Path(path).write_bytes(seen.program.pack())
        return {
            **its.fields(),
            **dataclasses.asdict(numerics),
            **figures(compiled),
            "xla_temp_mb": compiled.bytes.temp / MIB,
            "compile_s": compiled.seconds,
            "program": seen.digest,
            "unstorable": seen.unstorable,
        }

    def ready(self, cell: dict[str, Any]) -> None:
        """Compile a cell that is known to be right."""
        from .cell import Cell
        from .program import program

        self._ready = program(Cell(**cell))

    def compiled(self, path: str) -> dict[str, Any]:
        """Bytes and flops of a program that the other side lowered; {"unreadable": why} where it is not read."""
        from . import stored_program
        from .errors import BaselineError
        from .gate.examine import figures

        try:
            # Another JAX's program may crash the process that reads it.
            self._vetter.check(Path(path))
            program = stored_program.unpack(Path(path).read_bytes(), "the other side's program")
            return figures(stored_program.compile_stored(program, "the other side's program"))
        except BaselineError as fault:
            return {"unreadable": str(fault)}

    def time(self, times: int) -> float:
        """Seconds of so many calls in a row."""
        start = time.perf_counter()
        for _ in range(times):
            self._ready.call()
        return time.perf_counter() - start


def main() -> None:
    """Serve one side."""
    cores = json.loads(sys.argv[1])
    if cores is not None:
        pin.restrict(cores)
    with Side() as side:
        child.serve(lambda verb, *arguments: getattr(side, verb)(*arguments))


if __name__ == "__main__":
    main()
