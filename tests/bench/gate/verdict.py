"""The verdict: one status a cell, one exit code a run. Everything printed or written comes from it."""

import dataclasses
from typing import Any

WORST_FIRST = (
    "wrong",
    "missing",
    "regressed",
    "inconclusive",
    "new",
    "improved",
    "skipped",
    "unchanged",
)
FAILING = ("missing", "regressed")
REGRESSED, INTEGRITY, INCONCLUSIVE, NO_BASELINE = 10, 11, 12, 13
"""Exit codes beside pytest's own 0-5."""
DRIFTS = {
    "code": "the source lowers to another program by the same JAX",
    "jax": "this JAX lowers the source to another program than the stored one's JAX",
    "compiler": "the same program gets other bytes or flops from this compiler or its flags",
    "environment": "the run took place elsewhere, or with other settings",
}
"""What can change without, or with, the code; only `code` is blamed on the change."""


@dataclasses.dataclass(frozen=True)
class Drift:
    """One kind of DRIFTS and what it says: of one cell, or (id None) of the run."""

    kind: str
    text: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
    """Two programs side by side: today's time over the stored one's, its one-sided 95 % bounds, pairs, seconds.

    `confirmed` is the ratio in a fresh process, where one was asked.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    seconds: float
    confirmed: float | None = None


@dataclasses.dataclass(frozen=True)
class CellVerdict:
    """The judgement of one cell: a status of WORST_FIRST, the reasons, and both records where there are.

    `accepted` says of a regressed cell that it was meant: only bytes, flops or time got worse, and the run has a
    reason for that (`Verdict.accepted`). The status stays, since the cell did regress.
    """

    id: str
    status: str
    reasons: tuple[str, ...] = ()
    stored: dict[str, Any] | None = None
    today: dict[str, Any] | None = None
    timing: Timing | None = None
    accepted: bool = False

    @property
    def failing(self) -> bool:
        """Whether the gate fails its test."""
        return self.status in FAILING and not self.accepted


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of a run.

    Attributes:
      cells: in the order in which they were judged.
      baseline: the file that the run was compared with.
      partial: the run was narrowed (by -k, -x, --lf or grid options) and so compares only what it ran.
      faults: integrity faults that no single cell carries.
      drift: what else differs from the baseline's run than the code.
      notes: what else a reader should know: noise, limits in force.
      environment: of this run.
      accepted: why cells may be slower or larger than their baseline; None where no reason was given.
    """

    cells: tuple[CellVerdict, ...]
    baseline: str
    partial: bool
    faults: tuple[str, ...] = ()
    drift: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = ()
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    accepted: str | None = None

    def count(self, status: str) -> int:
        return sum(cell.status == status for cell in self.cells)

    @property
    def accepted_cells(self) -> int:
        """Regressed cells that were meant to."""
        return sum(cell.accepted for cell in self.cells)

    @property
    def compared(self) -> int:
        """Cells that were held against a stored record."""
        return sum(self.count(status) for status in ("regressed", "inconclusive", "improved", "unchanged"))

    def exit_code(self, strict: bool) -> int:
        """0, or 10 to 12; a run in which nothing was compared never passes. Strict: a partial one neither."""
        if self.faults or self.count("missing") or not self.compared or (strict and self.partial):
            return INTEGRITY
        if self.count("regressed") > self.accepted_cells:
            return REGRESSED
        return INCONCLUSIVE if self.count("inconclusive") else 0
