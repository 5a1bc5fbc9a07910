"""Tier 3, judged: which cells are suspect over the whole run, and what becomes of one after its confirmation."""

import math
from collections.abc import Mapping

from . import limits, stored_time
from .evidence import Evidence
from .paired import Pairs, holm
from .verdict import Timing

MOVED = 1.03
"""A null control (a program against itself) that moves by more, significantly, widens the limits by as much."""
MOVED_P = 0.005
"""For each of the two directions."""


def suspects(evidence: Mapping[str, Evidence], settings: tuple[limits.Limit, ...]) -> dict[str, str]:
    """Cells whose pairs say slower or faster beyond their limit after Holm's correction over all raced cells."""
    raced = {identity: seen.pairs for identity, seen in evidence.items() if seen.pairs and seen.pairs.logs}
    found: dict[str, str] = {}
    for end, sign in (("slower", 1), ("faster", -1)):
        p_values = [getattr(pairs, f"p_{end}") for pairs in raced.values()]
        for (identity, pairs), rejected in zip(raced.items(), holm(p_values), strict=True):
            limit = limits.slowest(settings, identity)
            if rejected and sign * math.log(pairs.ratio) > math.log(limit):
                found[identity] = end
    return found


def noisy(controls: list[Pairs]) -> list[Pairs]:
    """The null controls that moved, the one that moved most first."""
    moved = [
        pairs
        for pairs in controls
        if factor(pairs.ratio) > MOVED and min(pairs.p_slower, pairs.p_faster) < MOVED_P
    ]
    return sorted(moved, key=lambda pairs: -factor(pairs.ratio))


def factor(ratio: float) -> float:
    """How far a ratio of times is from 1, in either direction."""
    return max(ratio, 1 / ratio)


def judge(
    seen: Evidence, suspect: str | None, confirmed: Pairs | str | None, limit: float, noise: float
) -> tuple[str, list[str], Timing | None]:
    """Status (regressed, improved, inconclusive or unchanged), reasons and figures of one cell's time.

    Args:
      seen: its evidence.
      suspect: slower, faster or None.
      confirmed: the pairs of the fresh process, why there are none, or None where none were asked.
      limit: ratio that is too slow.
      noise: by what factor a null control of this run moved at most; 1 where none did.
    """
    pairs = seen.pairs
    if pairs is None:
        return (
            ("unchanged", [], None) if seen.not_paired is None else ("inconclusive", [seen.not_paired], None)
        )
    low, high = pairs.bounds
    again = confirmed.ratio if isinstance(confirmed, Pairs) else None
    timing = Timing(pairs.ratio, low, high, len(pairs.logs), pairs.seconds, again)
    noisily = f"a null control of this run moved by x{noise:.3f}: too noisy to tell"
    said = f"time {pairs} of the stored program's (limit x{limit:g})"
    if seen.same and seen.asked_by == "stored time":
        # Nothing changed, so only two witnesses that agree say otherwise: the trip-wire and the pairs. A fresh
        # process would run the program alone, without what is around it.
        said += ", with the same program"
        if suspect != "slower" or pairs.ratio <= stored_time.OUTSIDE:
            return "unchanged", [], timing
        if pairs.ratio <= stored_time.OUTSIDE * noise:
            return "inconclusive", [f"{said}, but {noisily}"], timing
        return "regressed", [f"{said}: the cause is outside it"], timing
    if suspect is None:
        if high < limit:
            return "unchanged", [], timing
        return "inconclusive", [f"{said}: neither slower nor equal within its time budget"], timing
    if factor(pairs.ratio) <= limit * noise:
        return "inconclusive", [f"{said}, but {noisily}"], timing
    status = "regressed" if suspect == "slower" else "improved"
    if not isinstance(confirmed, Pairs):
        return "inconclusive", [f"{said}; not confirmed: {confirmed}"], timing
    if confirmed.end == suspect:
        return status, [f"{said}; confirmed in a fresh process: {confirmed}"], timing
    if confirmed.end == "equal":
        return "unchanged", [f"{said}; not confirmed in a fresh process: {confirmed}"], timing
    return "inconclusive", [f"{said}; a fresh process does not decide: {confirmed}"], timing
