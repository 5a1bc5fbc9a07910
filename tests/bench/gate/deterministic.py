"""Tier 2: bytes and flops. They do not change between runs of one program, so any real growth is the program's."""

from collections.abc import Iterator, Sequence
from typing import Any

from . import limits as table
from .limits import DEFAULTS, Limit

METRICS = tuple(metric for metric in DEFAULTS if metric != "time")
LESS_IS_WORSE = ("alias_bytes",)  # A donation that no longer holds.


def compare(
    today: dict[str, Any], stored: dict[str, Any], limits: Sequence[Limit] = ()
) -> tuple[list[str], list[str]]:
    """What got worse and what got better by more than its limit, each as a line for people.

    `limits` are pyproject.toml's, on the `id` of today's record; the defaults hold for the rest.
    """
    worse: list[str] = []
    better: list[str] = []
    for name, growth, line in _changes(today, stored):
        limit, default = _limit(today, name, limits), DEFAULTS[name]
        if limit.exceeded(growth, stored[name]):
            alone = not default.exceeded(growth, stored[name])
            why = f"limit {limit}{_instead(limit, default) if alone else ''}"
            (worse if growth > 0 else better).append(f"{line} ({why})")
    return worse, better


def let_through(today: dict[str, Any], stored: dict[str, Any], limits: Sequence[Limit]) -> list[str]:
    """What a default would have named, worse or better, and a limit of pyproject.toml does not: with its reason."""
    out = []
    for name, growth, line in _changes(today, stored):
        limit, default = _limit(today, name, limits), DEFAULTS[name]
        if default.exceeded(growth, stored[name]) and not limit.exceeded(growth, stored[name]):
            out.append(f"{line} let through (limit {limit}{_instead(limit, default)})")
    return out


def change(was: float, now: float) -> str:
    """Old and new figure and the relative change."""
    relative = f" ({now / was - 1:+.1%})" if was else ""
    return f"{was:,.0f} -> {now:,.0f}{relative}"


def jumps(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """Cells of two sets of records (say, of two JAX versions) whose temp bytes grew over the limit, worst first."""
    limit = DEFAULTS["temp_bytes"]
    grown = []
    for identity in before.keys() & after.keys():
        was, now = before[identity]["temp_bytes"], after[identity]["temp_bytes"]
        if now > was and limit.exceeded(now - was, was):
            grown.append((now - was, f"{identity}: temp_bytes {change(was, now)}"))
    return [line for _, line in sorted(grown, reverse=True)]


def _changes(today: dict[str, Any], stored: dict[str, Any]) -> Iterator[tuple[str, float, str]]:
    """(metric, by how much it got worse, both figures in words) of each metric that both records have."""
    for name in METRICS:
        was, now = stored.get(name), today.get(name)
        if was is not None and now is not None:
            growth = was - now if name in LESS_IS_WORSE else now - was
            yield name, growth, f"{name} {change(was, now)}"


def _limit(today: dict[str, Any], name: str, limits: Sequence[Limit]) -> Limit:
    return table.of(limits, today["id"], name) if limits else DEFAULTS[name]


def _instead(limit: Limit, default: Limit) -> str:
    return f" of pyproject.toml instead of {default}: {limit.reason}"
