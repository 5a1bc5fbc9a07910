"""Tier 2: bytes and flops. They do not change between runs of one program, so any real growth is the program's."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Limit:
    """A metric that got worse by more than both `share` and `least` fails. `more_is_worse` is its direction."""

    share: float
    least: float
    more_is_worse: bool = True


LIMITS = {
    "temp_bytes": Limit(0.01, 4096),
    "argument_bytes": Limit(0.01, 4096),
    "output_bytes": Limit(0.01, 4096),
    "alias_bytes": Limit(0.01, 4096, more_is_worse=False),
    "flops": Limit(0.01, 0),
}


def compare(today: dict[str, Any], stored: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What got worse and what got better by more than its limit, each as a line for people."""
    worse: list[str] = []
    better: list[str] = []
    for name, limit in LIMITS.items():
        was, now = stored.get(name), today.get(name)
        if was is None or now is None:
            continue
        growth = (now - was) if limit.more_is_worse else (was - now)
        if abs(growth) <= limit.least or abs(growth) <= limit.share * was:
            continue
        line = f"{name} {change(was, now)} (limit {limit.share:.0%} and {limit.least:g})"
        (worse if growth > 0 else better).append(line)
    return worse, better


def change(was: float, now: float) -> str:
    """Old and new figure and the relative change."""
    relative = f" ({now / was - 1:+.1%})" if was else ""
    return f"{was:,.0f} -> {now:,.0f}{relative}"


def jumps(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """Cells of two sets of records (say, of two JAX versions) whose temp bytes grew over the limit, worst first."""
    limit = LIMITS["temp_bytes"]
    grown = []
    for identity in before.keys() & after.keys():
        was, now = before[identity]["temp_bytes"], after[identity]["temp_bytes"]
        if now - was > max(limit.least, limit.share * was):
            grown.append((now - was, f"{identity}: temp_bytes {change(was, now)}"))
    return [line for _, line in sorted(grown, reverse=True)]
