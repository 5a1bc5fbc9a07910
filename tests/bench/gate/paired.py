"""Tier 3: two programs side by side, in balanced random order, until the pairs tell.

The rule and what it was measured on: CONTRIBUTING.md, "How the gate decides".
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import signed_rank

LIMIT = 1.05
"""Ratio of times that is too slow, and its inverse an improvement, where no limit of one's own is set."""
FEWEST = 12
"""Pairs before the first look; 2**-12 survives Holm's correction over 200 cells. Looks follow at twice as many."""
MOST = 768
"""Where the time budget allows it: under a competing load pairs of a few ms need hundreds to tell 20 %."""
ALPHA = 0.05
SHORTEST_S = 0.002
"""A side of a pair takes at least this long: shorter calls are repeated within it."""


Timed = Callable[[int], float]
"""Runs so many calls in a row, each to its end, and says how many seconds they took together."""


class ClockFault(Exception):
    """The clock stood still or went backwards."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What was measured: log of (today's seconds / stored seconds) for each pair, and why it ended.

    `end` is slower, faster, equal or undecided; `seconds` is what it took.
    """

    logs: tuple[float, ...]
    end: str
    seconds: float

    @property
    def ratio(self) -> float:
        """Median of today's time over the stored program's."""
        return math.exp(float(np.median(self.logs)))

    @property
    def bounds(self) -> tuple[float, float]:
        """One-sided 95 % bounds of the ratio, each."""
        return math.exp(signed_rank.lower_bound(self.logs)), math.exp(signed_rank.upper_bound(self.logs))

    @property
    def p_slower(self) -> float:
        return signed_rank.p_greater(np.asarray(self.logs))

    @property
    def p_faster(self) -> float:
        return signed_rank.p_greater(-np.asarray(self.logs))

    @property
    def swapped(self) -> "Pairs":
        """The same pairs, of a race in which the two had each other's place."""
        end = {"slower": "faster", "faster": "slower"}.get(self.end, self.end)
        return dataclasses.replace(self, logs=tuple(-log for log in self.logs), end=end)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Pairs":
        """From the plain data that `dataclasses.asdict` makes."""
        return cls(tuple(values["logs"]), values["end"], values["seconds"])

    def __str__(self) -> str:
        low, high = self.bounds
        return f"x{self.ratio:.3f} ({low:.3f} to {high:.3f}, {len(self.logs)} pairs)"


def race(
    today: Callable[[], Any],
    stored: Callable[[], Any],
    *,
    budget_s: float,
    cells: int,
    limit: float = LIMIT,
    rng: np.random.Generator,
    clock: Callable[[], float] = time.perf_counter,
) -> Pairs:
    """Run both in turns until they differ, are equal, or the budget is spent.

    Args:
      today, stored: each runs once to the end; both are warm after one call here.
      budget_s: seconds for all pairs; fewer than FEWEST pairs are undecided.
      cells: how many are tested in this run: the level of one look is ALPHA over it.
      limit: ratio that is too slow, and its inverse an improvement.
      rng: decides who goes first, in balanced pairs of pairs.
      clock: seconds.

    Raises:
      ClockFault: a side took no time, or less.
    """

    def seconds_of(call: Callable[[], Any]) -> Timed:
        return lambda times: _timed(call, times, clock)

    return race_timed(
        seconds_of(today),
        seconds_of(stored),
        budget_s=budget_s,
        cells=cells,
        limit=limit,
        rng=rng,
        clock=clock,
    )


def race_timed(
    today: Timed,
    stored: Timed,
    *,
    budget_s: float,
    cells: int,
    limit: float = LIMIT,
    rng: np.random.Generator,
    clock: Callable[[], float] = time.perf_counter,
) -> Pairs:
    """As `race`, of two that time themselves, as a process of its own does."""
    start = clock()
    inner = _repetitions(today, stored)
    logs: list[float] = []
    look = FEWEST
    while True:
        for today_first in _order(rng, min(look, MOST) - len(logs)):
            logs.append(_pair(today, stored, inner, today_first))
            if clock() - start > budget_s:
                break
        seconds = clock() - start
        end = decide(logs, ALPHA / max(cells, 1), limit)
        if end != "undecided" or seconds > budget_s or len(logs) >= MOST:
            return Pairs(tuple(logs), end, seconds)
        look *= 2


def decide(logs: Sequence[float], alpha: float, limit: float) -> str:
    """What these pairs tell: slower, faster, equal (within `limit` on both sides) or undecided."""
    if len(logs) < FEWEST:
        return "undecided"
    values, most = np.asarray(logs), math.log(limit)
    middle = float(np.median(values))
    if middle > most and signed_rank.p_greater(values) < alpha:
        return "slower"
    if middle < -most and signed_rank.p_greater(-values) < alpha:
        return "faster"
    if signed_rank.upper_bound(values) < most and signed_rank.lower_bound(values) > -most:
        return "equal"
    return "undecided"


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Which hypotheses Holm's step-down correction rejects (Holm 1979)."""
    rejected = [False] * len(p_values)
    for place, index in enumerate(np.argsort(p_values, kind="stable")):
        if not p_values[index] < alpha / (len(p_values) - place):
            break
        rejected[index] = True
    return rejected


def _order(rng: np.random.Generator, pairs: int) -> list[bool]:
    """Whether today's program goes first: one of each in every two pairs, in random order."""
    order: list[bool] = []
    while len(order) < pairs:
        first = bool(rng.integers(2))
        order += [first, not first]
    return order[:pairs]


def _pair(today: Timed, stored: Timed, inner: int, today_first: bool) -> float:
    sides = (today, stored) if today_first else (stored, today)
    seconds = [_told(side, inner) for side in sides]
    log = math.log(seconds[0] / seconds[1])
    return log if today_first else -log


def _timed(call: Callable[[], Any], times: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(times):
        call()
    return clock() - start


def _told(side: Timed, times: int) -> float:
    seconds = side(times)
    if not seconds > 0:
        raise ClockFault(f"the clock says that a run took {seconds} s; nothing can be timed with it")
    return seconds


def _repetitions(today: Timed, stored: Timed) -> int:
    """Warm both up; calls in one side of a pair."""
    today(1)
    stored(1)
    shorter = min(_told(today, 1), _told(stored, 1))
    return max(1, min(100, math.ceil(SHORTEST_S / shorter)))
