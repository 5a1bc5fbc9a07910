"""A comparison without a baseline: what was seen of two sides, into one verdict. `ab` and `upgrade` make such."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .baseline import Baseline
from .gate import limits, timing
from .gate.confirm import NotConfirmed
from .gate.evidence import Evidence
from .gate.judge import Run, judge
from .gate.paired import Pairs
from .gate.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class Side:
    """One side: its name, where it ran, its cells, and why some of them did not run.

    Attributes:
      name: for people.
      environment: `environment.describe`.
      cells: ids of all that its grid holds.
      faults: id -> why it cannot be run, or gives wrong numbers.
      skipped: id -> the limit that leaves it out.
    """

    name: str
    environment: dict[str, Any]
    cells: frozenset[str]
    faults: Mapping[str, str]
    skipped: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Seen:
    """A cell that ran on both sides: the evidence, and what each side's record holds."""

    evidence: Evidence
    before: dict[str, Any]
    today: dict[str, Any]


def conclude(
    base: Side,
    head: Side,
    seen: Mapping[str, Seen],
    confirm: Callable[[str], Pairs],
    settings: tuple[limits.Limit, ...],
    *,
    same_source: bool = False,
) -> Verdict:
    """The verdict on what both sides have; the rest is listed, and the verdict partial.

    Args:
      base, head: the two sides; head is judged.
      seen: id -> what was seen of it.
      confirm: races a suspect in fresh processes, or raises NotConfirmed.
      settings: the limits in force.
      same_source: the two differ in their compiler, not in their source, and whatever moved is blamed on that.
    """
    evidence = {identity: its.evidence for identity, its in seen.items()}
    suspects = timing.suspects(evidence, settings)
    confirmed: dict[str, Pairs | str] = {}
    for identity in suspects:
        try:
            confirmed[identity] = confirm(identity)
        except NotConfirmed as fault:
            confirmed[identity] = str(fault)
    sound = base.cells - base.faults.keys() - base.skipped.keys()
    faults = {identity: why for identity, why in head.faults.items() if identity in sound}
    skipped = {identity: why for identity, why in head.skipped.items() if identity in base.skipped}
    stored: dict[str, Any] = {identity: {"extra_info": its.before} for identity, its in seen.items()}
    found = judge(
        Baseline(Path(base.name), base.environment, stored, dict(base.skipped)),
        Run(
            declared=tuple(seen),
            records={identity: its.today for identity, its in seen.items()},
            skipped=skipped,
            wrong=faults,
            environment=head.environment,
            evidence=evidence,
            suspects=suspects,
            confirmed=confirmed,
            controls=tuple(its.control for its in evidence.values() if its.control),
            subset=True,
            same_source=same_source,
        ),
        settings,
    )
    cells = tuple(
        dataclasses.replace(c, reasons=(faults[c.id],)) if c.id in faults else c for c in found.cells
    )
    left = _left(base, head, {*seen, *faults, *skipped})
    return dataclasses.replace(found, cells=cells, partial=bool(left), notes=(*found.notes, *left))


def _left(base: Side, head: Side, judged: set[str]) -> list[str]:
    """What was not compared, and why."""
    said = [
        f"only {side.name} has {', '.join(rest)}"
        for side, other in ((base, head), (head, base))
        if (rest := sorted(side.cells - other.cells))
    ]
    for identity in sorted((base.cells & head.cells) - judged):
        side, kinds = next(
            (side, kinds)
            for side in (base, head)
            for kinds in (side.faults, side.skipped)
            if identity in kinds
        )
        said.append(f"not compared: {identity}, since {side.name} cannot run it: {kinds[identity]}")
    return said


def exit_code(verdict: Verdict) -> int:
    """The gate's, after 1 for wrong numbers."""
    return 1 if verdict.count("wrong") else verdict.exit_code(strict=False)
