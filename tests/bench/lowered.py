"""Lowers the cells of this source and writes their programs: what `ab` starts in each of its trees.

Run as a module it is that process: `python -m tests.bench.lowered --folder F` writes `F/<digest>.bin` for each
program and `F/cells.json`, which says what was found. Nothing is timed.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from . import atomic, environment, grid, stored_program
from .errors import BenchError
from .numerics import WrongNumerics, check
from .program import flat

FILE = "cells.json"


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The cells of one source.

    Attributes:
      moe: file of the package that was lowered.
      environment: `environment.describe`.
      cells: id -> the cell's fields.
      programs: id -> digest of its program.
      faults: id -> why it has no program, or gives wrong numbers.
      skipped: id -> the limit that leaves it out.
    """

    moe: str
    environment: dict[str, Any]
    cells: dict[str, dict[str, Any]]
    programs: dict[str, str]
    faults: dict[str, str]
    skipped: dict[str, str]


def read(folder: Path) -> Lowered:
    """What `write` wrote."""
    return Lowered(**json.loads((folder / FILE).read_text("utf-8")))


def chosen(
    grid_name: str, backend: str, only: str | None = None, cell: str | None = None
) -> list[grid.Entry]:
    """The cells of a grid that `only` (words that an id has to hold) and `cell` (a whole id) leave."""
    return [
        entry
        for entry in grid.build(grid_name, {}, backend)
        if (cell is None or entry.cell.id == cell) and (only is None or entry.cell.matches(only))
    ]


def write(folder: Path, grid_name: str, only: str | None, cell: str | None, unlike: Path | None) -> None:
    """Lower the cells of a grid that `only` and `cell` leave.

    Args:
      folder: where to.
      grid_name: of GRIDS.
      only: words that an id has to hold; `cell` a whole id.
      unlike: folder of another source's: cells with another program than there are asserted against dense too.
    """
    import moe

    described = environment.describe()
    others = read(unlike).programs if unlike else {}
    found = Lowered(str(moe.__file__), described, {}, {}, {}, {})
    for entry in chosen(grid_name, described["backend"], only, cell):
        its = entry.cell
        found.cells[its.id] = dataclasses.asdict(its)
        if entry.skip:
            found.skipped[its.id] = entry.skip
            continue
        try:
            program = stored_program.export(flat(its))
            if unlike is not None and its.id in others and others[its.id] != program.digest:
                check(its)
        except (BenchError, WrongNumerics) as fault:
            found.faults[its.id] = str(fault)
            continue
        except Exception as error:  # Of the source under test: its cell fails, the others go on.
            found.faults[its.id] = f"{its.id} cannot be lowered: {type(error).__name__}: {error}"
            continue
        found.programs[its.id] = program.digest
        (folder / f"{program.digest}.bin").write_bytes(program.pack())
    atomic.write(folder / FILE, json.dumps(dataclasses.asdict(found), indent=1).encode())


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--grid", default="default")
    parser.add_argument("--only")
    parser.add_argument("--cell")
    parser.add_argument("--unlike", type=Path)
    args = parser.parse_args()
    write(args.folder, args.grid, args.only, args.cell, args.unlike)


if __name__ == "__main__":
    main()
