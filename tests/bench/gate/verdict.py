"""The verdict: one status a cell, one exit code a run. Everything printed comes from it."""

import dataclasses
from typing import Any

WORST_FIRST = ("wrong", "missing", "regressed", "new", "improved", "skipped", "unchanged")
FAILING = ("missing", "regressed")
REGRESSED, INTEGRITY, NO_BASELINE = 10, 11, 13
"""Exit codes beside pytest's own 0-5; 12 (inconclusive) belongs to the tiers on time."""


@dataclasses.dataclass(frozen=True)
class CellVerdict:
    """The judgement of one cell: a status of WORST_FIRST, the reasons, and both records where there are."""

    id: str
    status: str
    reasons: tuple[str, ...] = ()
    stored: dict[str, Any] | None = None
    today: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of a run.

    `partial` says that the run was narrowed (by -k, -x, --lf or grid options) and so compares only what it
    ran; `faults` are integrity faults that no single cell carries.
    """

    cells: tuple[CellVerdict, ...]
    baseline: str
    partial: bool
    faults: tuple[str, ...] = ()

    def count(self, status: str) -> int:
        return sum(cell.status == status for cell in self.cells)

    @property
    def compared(self) -> int:
        """Cells that were held against a stored record."""
        return sum(cell.status in ("regressed", "improved", "unchanged") for cell in self.cells)

    def exit_code(self, strict: bool) -> int:
        """0, 10 or 11; a run in which nothing was compared never passes."""
        if self.faults or self.count("missing") or not self.compared or (strict and self.partial):
            return INTEGRITY
        return REGRESSED if self.count("regressed") else 0
