"""Examines a cell while its program is at hand: the stored program compiled now, and both side by side."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import stored_program
from ..baseline import Baseline
from ..cell import Cell
from ..errors import BaselineError, BenchError
from ..program import Compiled, Flat, Program
from ..stored_program import StoredProgram
from . import limits, stored_time
from .evidence import Evidence
from .paired import ClockFault, Pairs, race
from .vet import Vetter

CONTROL_EVERY = 8
"""Cells from one null control to the next: a program raced against itself."""
CONTROL_SHARE = 0.05
"""Of the budget of a cell's pairs."""


class Examiner:
    """Gathers the evidence of a run against one baseline.

    Args:
      baseline: what the run is compared with; without one only the programs are exported and the controls run.
      environment: of this run.
      cells: how many cells the run holds.
      budget_s: for the pairs of one cell.
      all_programs: race also the cells whose program is unchanged.
      against: which of a record's programs counts: `program`, or for an update `accepted`.
      settings: the limits in force.
    """

    def __init__(
        self,
        baseline: Baseline | None,
        environment: dict[str, Any],
        *,
        cells: int,
        budget_s: float,
        all_programs: bool = False,
        against: str = "program",
        settings: tuple[limits.Limit, ...] = (),
    ) -> None:
        self._baseline, self._environment = baseline, environment
        self._cells, self._budget_s, self._settings = cells, budget_s, settings
        self._all_programs, self._against = all_programs, against
        self._rng = np.random.default_rng()
        self._vetter = Vetter()
        self._seen = 0

    def close(self) -> None:
        """End the child process, if there is one."""
        self._vetter.__exit__()

    def examine(self, cell: Cell, program: Program, record: dict[str, Any]) -> Evidence:
        """Look at one measured cell.

        Args:
          cell: the cell.
          program: as it was measured.
          record: what was measured.
        """
        evidence = exported(program.flat)
        if self._seen % CONTROL_EVERY == 0:
            with contextlib.suppress(ClockFault):  # The cell's own figures tell of it.
                control = self._race(cell, program.call, program.call, CONTROL_SHARE * self._budget_s)
                evidence = dataclasses.replace(evidence, control=control)
        self._seen += 1
        if self._baseline is None or cell.id not in self._baseline.records:
            return evidence
        stored = self._baseline.records[cell.id]["extra_info"]
        evidence = dataclasses.replace(evidence, against=stored.get(self._against))
        if evidence.against is None or evidence.unstorable:
            return evidence
        asked_by = self._reason(self._baseline, evidence, record, stored)
        if asked_by is None:
            return evidence
        try:
            path = self._baseline.program_path(evidence.against)
            old = self._load(path, evidence.against)
            compiled = stored_program.compile_stored(old, str(path))
        except BaselineError as fault:
            return dataclasses.replace(evidence, fault=str(fault))
        seen = dataclasses.replace(evidence, asked_by=asked_by, figures=figures(compiled))
        assert evidence.program is not None
        if asked_by == "jax":  # Another JAX lowered it: only bytes and flops are shown.
            return seen
        if old.inputs != evidence.program.inputs or old.donated != evidence.program.donated:
            return dataclasses.replace(seen, not_paired="the two programs take other arguments")
        try:
            today = program.call
            # What is compiled from an export may be some percent slower than what is compiled from source: race
            # like with like. What is around a program is seen in the call alone.
            if asked_by != "stored time":
                today = _call(program, stored_program.compile_stored(evidence.program, "today's program"))
            before = _call(program, compiled)
            pairs = self._race(cell, today, before, self._budget_s)
            # Of an unchanged program no fresh process can tell what is around it: it has to be slower twice here.
            if asked_by == "stored time" and pairs.end == "slower":
                pairs = self._race(cell, today, before, self._budget_s)
            return dataclasses.replace(seen, pairs=pairs)
        except (ClockFault, BaselineError) as fault:
            return dataclasses.replace(seen, not_paired=str(fault))

    def _load(self, path: Path, digest: str) -> StoredProgram:
        """A stored program, read by a child process first. Raises BaselineError."""
        self._vetter.check(path)
        program = stored_program.unpack(path.read_bytes(), str(path))
        if program.digest != digest:
            raise BaselineError(f"{path} holds the program {program.digest}; restore it or record again")
        return program

    def _reason(
        self, baseline: Baseline, evidence: Evidence, record: dict[str, Any], stored: dict[str, Any]
    ) -> str | None:
        """Why the stored program has to be compiled and raced, or None."""
        if self._environment["jax"] != baseline.environment["jax"]:
            return "jax"
        if not evidence.same:
            return "code"
        if self._all_programs:
            return "all programs"
        tripped = stored_time.tripped(record, stored, self._environment, baseline.environment)
        return "stored time" if tripped else None

    def _race(self, cell: Cell, today: Any, stored: Any, budget_s: float) -> Pairs:
        limit = limits.slowest(self._settings, cell.id)
        return race(today, stored, budget_s=budget_s, cells=self._cells, limit=limit, rng=self._rng)


def exported(flat: Flat) -> Evidence:
    """The evidence that today's function alone gives: its program, or why there is none."""
    try:
        program = stored_program.export(flat)
    except BenchError as fault:
        return Evidence(unstorable=str(fault))
    return Evidence(digest=program.digest, program=program)


def _call(program: Program, compiled: Compiled) -> Callable[[], Any]:
    """A call of this executable on the cell's arguments."""
    return functools.partial(program.arguments.run, compiled.run)


def figures(compiled: Compiled) -> dict[str, Any]:
    """Bytes and flops, under a record's names."""
    sizes = {f"{name}_bytes": size for name, size in dataclasses.asdict(compiled.bytes).items()}
    return sizes | {"flops": compiled.flops}
