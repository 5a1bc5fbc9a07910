"""The evidence: what was seen of a cell and its stored program while both were at hand; judged after all cells."""

import dataclasses
from typing import Any

from ..stored_program import StoredProgram
from .paired import Pairs


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One cell's.

    Attributes:
      digest: of today's program; None where it cannot be stored, and `unstorable` says why.
      against: digest of the stored program; None where the baseline has none.
      figures: bytes and flops of the stored program, compiled now; None where that was not needed.
      pairs: both side by side; None where that was not needed, or not possible: then `not_paired` says why.
      asked_by: what led to compiling it: `code` (another program), `stored time` (the trip-wire),
        `all programs` (as told), `jax` (of another JAX; only its bytes and flops are of interest).
      fault: the stored program cannot be trusted.
      control: a program raced against itself beside this cell; None for most cells.
      program: today's; not kept in a journal.
    """

    digest: str | None = None
    against: str | None = None
    figures: dict[str, Any] | None = None
    pairs: Pairs | None = None
    asked_by: str | None = None
    not_paired: str | None = None
    unstorable: str | None = None
    fault: str | None = None
    control: Pairs | None = None
    program: StoredProgram | None = None

    @property
    def same(self) -> bool:
        """Whether today's program is the stored one."""
        return self.digest is not None and self.digest == self.against

    def to_json(self) -> dict[str, Any]:
        """As plain data, without the program."""
        return dataclasses.asdict(dataclasses.replace(self, program=None))

    @classmethod
    def from_json(cls, values: dict[str, Any], program: StoredProgram | None) -> "Evidence":
        raced = {
            name: Pairs.from_json(values[name]) for name in ("pairs", "control") if values[name] is not None
        }
        return cls(**values | raced | {"program": program})
