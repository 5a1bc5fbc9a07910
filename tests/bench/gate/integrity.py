"""Tier 1: every declared cell ran and was compared. Closed on failure."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from .deterministic import METRICS
from .verdict import CellVerdict

TIMES = ("q1_ms", "median_ms", "q3_ms", "anchor_ms", "gemm_fraction")


def missing(
    declared: Collection[str], seen: Collection[str], stored: Mapping[str, dict[str, Any]]
) -> list[CellVerdict]:
    """Cells that the grid or the baseline declares and the run does not hold."""
    return [
        CellVerdict(identity, "missing", (_why(identity, declared),), stored.get(identity))
        for identity in [*declared, *(known for known in stored if known not in declared)]
        if identity not in seen
    ]


def _why(identity: str, declared: Collection[str]) -> str:
    if identity in declared:
        return "declared by the grid, but it did not run"
    return "in the baseline, but no longer in the grid; if that is meant, record a new baseline"


def vanished(today: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """Metrics that the baseline has and today's record lacks, or that are not finite or turned zero."""
    faults = []
    for name in METRICS:
        was, now = stored.get(name), today.get(name)
        if was is None:
            continue
        finite = isinstance(now, int | float) and math.isfinite(now)
        # Donation that was lost (alias_bytes) is a regression, named as such by the next tier.
        if not finite or (now == 0 and was != 0 and name != "alias_bytes"):
            faults.append(f"{name} was {was:g} and is {now}: the metric vanished")
    for name in TIMES:
        now = today.get(name)
        if name in stored and not (isinstance(now, int | float) and math.isfinite(now) and now > 0):
            faults.append(f"{name} is {now}: no time at all, or the clock went backwards")
    return faults
