"""The race of two programs on a clock of the test's own, and what becomes of its pairs."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.bench.gate import paired, timing
from tests.bench.gate.evidence import Evidence
from tests.bench.gate.limits import Limit
from tests.bench.gate.paired import ALPHA, FEWEST, MOST, ClockFault, Pairs, decide, holm, race
from tests.timing import Clock


class Race:
    """Two programs that take the seconds they are told to; `events` is who ran, in order."""

    def __init__(self, today, stored, seed=0):
        self.clock, self.events = Clock(), ""
        self._seconds = {"t": today, "s": stored}
        self.rng = np.random.default_rng(seed)

    def _call(self, who):
        def call():
            seconds = self._seconds[who]
            self.clock.now += seconds() if callable(seconds) else seconds
            self.events += who

        return call

    def run(self, *, budget_s=1e9, cells=40, **more):
        more = {"rng": self.rng, "clock": self.clock} | more
        return race(self._call("t"), self._call("s"), budget_s=budget_s, cells=cells, **more)


def noisy_seconds(seed):
    """Seconds of one call after another on a busy machine: 5 % each, 15 % of slow drift, 1 in 50 a long one."""
    rng = np.random.default_rng(seed)
    level = 0.0

    def seconds():
        nonlocal level
        level = 0.9 * level + math.sqrt(1 - 0.9**2) * rng.normal(0, 0.15)
        return 0.01 * math.exp(level + rng.normal(0, 0.05) + (rng.random() < 0.02) * rng.exponential(1))

    return seconds


# Order, looks and budget


def test_each_goes_first_in_half_of_the_pairs_in_random_order():
    contest = Race(0.25, 0.25)
    contest.run(limit=1.0)  # Nothing is under it: as many pairs as there can be.
    pairs = [contest.events[place : place + 2] for place in range(4, len(contest.events), 2)]
    assert len(pairs) == MOST
    assert set(pairs) == {"ts", "st"}
    # One of each in every two pairs, so that no drift favours one, and not always the same one first.
    assert all(set(pairs[place : place + 2]) == {"ts", "st"} for place in range(0, MOST, 2))
    assert 0.3 < np.mean([pair == "ts" for pair in pairs[::2]]) < 0.7


def test_both_run_before_anything_is_timed():
    """The first runs take an hour each; no pair knows of it."""
    long = iter([3600.0, 3600.0])
    contest = Race(lambda: next(long, 0.25), lambda: next(long, 0.25))
    assert contest.run().logs == (0.0,) * FEWEST
    assert contest.events.startswith("tsts")


def test_looks_are_at_twelve_pairs_and_twice_as_many_each_time(monkeypatch):
    looks = []

    def look(logs, alpha, limit):
        looks.append((len(logs), alpha, limit))
        return "undecided"

    monkeypatch.setattr(paired, "decide", look)
    pairs = Race(0.25, 0.25).run(cells=10, limit=1.5)
    assert looks == [(n, ALPHA / 10, 1.5) for n in (12, 24, 48, 96, 192, 384, 768)]
    assert (len(pairs.logs), pairs.end) == (MOST, "undecided")


@pytest.mark.parametrize(
    ("today", "stored", "end"),
    [
        (1.0, 1.0, "equal"),
        (1.0625, 1.0, "slower"),
        (2.0, 1.0, "slower"),
        (1.0, 1.0625, "faster"),
        (1.0, 2.0, "faster"),
        (1.03125, 1.0, "equal"),
    ],
)
def test_a_race_ends_at_the_first_look_that_tells(today, stored, end):
    pairs = Race(today, stored).run()
    assert (pairs.end, len(pairs.logs)) == (end, FEWEST)
    assert pairs.ratio == pytest.approx(today / stored)
    # Two runs to warm up, two to count repetitions.
    assert pairs.seconds == pytest.approx((today + stored) * (FEWEST + 2))


def test_the_level_is_shared_by_the_cells_of_the_run():
    """Twelve of twelve have p = 2**-12, enough among 200 cells and not among 300; 24 are then."""
    assert len(Race(2.0, 1.0).run(cells=200).logs) == 12
    assert len(Race(2.0, 1.0).run(cells=300).logs) == 24


def test_a_difference_beyond_the_limit_may_be_a_limit_of_its_own():
    assert Race(1.25, 1.0).run(limit=1.3).end == "equal"
    assert Race(1.25, 1.0).run(limit=1.2).end == "slower"


@pytest.mark.parametrize(
    ("fitting", "end"), [(1, "undecided"), (5, "undecided"), (11, "undecided"), (12, "slower")]
)
def test_fewer_than_twelve_pairs_decide_nothing(fitting, end):
    # A pair takes 3 s; warming up and counting 6 s. The pair that runs into the budget is still finished.
    pairs = Race(2.0, 1.0).run(budget_s=6 + 3 * fitting - 1.5)
    assert (len(pairs.logs), pairs.end) == (fitting, end)


@pytest.mark.parametrize("fitting", [12, 18, 24, 30, 48])
def test_a_race_ends_with_the_pair_that_spends_its_budget(fitting):
    pairs = Race(1.0, 1.0).run(budget_s=4 + 2 * fitting - 0.5, limit=1.0)
    assert (len(pairs.logs), pairs.end) == (fitting, "undecided")


def test_one_pair_is_run_whatever_the_budget():
    pairs = Race(100.0, 100.0).run(budget_s=1e-3)
    assert (pairs.logs, pairs.end) == ((0.0,), "undecided")


@pytest.mark.parametrize(
    ("today", "stored", "inner"),
    [
        (2**-3, 2**-3, 1),
        (2**-9, 2**-9, 2),  # 1.95 ms, just under SHORTEST_S
        (2**-12, 2**-12, 9),
        (2**-3, 2**-12, 9),  # As the shorter one needs.
        (2**-20, 2**-20, 100),  # No more than that.
    ],
)
def test_short_calls_are_repeated_within_a_pair(today, stored, inner):
    contest = Race(today, stored)
    pairs = contest.run()
    assert len(contest.events) == 4 + 2 * inner * len(pairs.logs)
    assert set(contest.events[4:].replace("t" * inner, "T").replace("s" * inner, "S")) == {"T", "S"}
    assert pairs.ratio == pytest.approx(today / stored)


# Clocks that cannot be trusted


@pytest.mark.parametrize("seconds", [0.0, -1.0], ids=["stands still", "goes backwards"])
@pytest.mark.parametrize("good", [0, 4, 9, 40], ids=lambda good: f"after {good} calls")
def test_clock_without_time_is_a_fault(seconds, good):
    """Never a ratio: log(0) and the like decide nothing."""
    contest = Race(0.0, 0.0)

    def spent():
        return 1.0 if len(contest.events) < good else seconds

    contest._seconds = {"t": spent, "s": spent}
    with pytest.raises(ClockFault, match="the clock says"):
        contest.run(limit=1.0)


# Decisions


def pairs_of(ratio, count=FEWEST, spread=0.0, end="undecided"):
    """Pairs whose median is this ratio: their logs lie evenly on both sides of it."""
    return Pairs(tuple(math.log(ratio) + np.linspace(-spread, spread, count)), end, 1.0)


@pytest.mark.parametrize(
    ("logs", "alpha", "expected"),
    [
        (pairs_of(1.5, 11).logs, 0.05, "undecided"),
        (pairs_of(1.5, 12).logs, 2**-12, "undecided"),  # p has to be under the level, not at it
        (pairs_of(1.5, 12).logs, 2**-11, "slower"),
        (pairs_of(1 / 1.5, 12).logs, 2**-11, "faster"),
        (pairs_of(1.05 - 1e-9, 12).logs, 0.05, "equal"),
        (pairs_of(1.05 + 1e-9, 12).logs, 0.05, "slower"),
        (pairs_of(1.04, 12, 0.5).logs, 0.05, "undecided"),  # wide: neither
        (pairs_of(1.2, 12, 1.0).logs, 0.05, "undecided"),
        # One far off does not matter; a median over the limit alone neither.
        ((0.0,) * 11 + (5.0,), 0.05, "equal"),
        ((-3.0,) * 5 + (0.1,) * 7, 0.05, "undecided"),
    ],
)
def test_decide(logs, alpha, expected):
    assert decide(logs, alpha, 1.05) == expected
    mirrored = {"slower": "faster", "faster": "slower"}.get(expected, expected)
    assert decide([-log for log in logs], alpha, 1.05) == mirrored


@pytest.mark.parametrize(
    ("p_values", "rejected"),
    [
        ([], []),
        ([0.04], [True]),
        ([0.05], [False]),
        ([0.01, 0.04, 0.03], [True, False, False]),
        ([0.03, 0.01, 0.04], [False, True, False]),
        ([0.01, 0.02, 0.04], [True, True, True]),
        ([0.02, 0.001, 0.001], [True, True, True]),
        ([0.03, 0.03], [False, False]),  # each over 0.05 / 2, though the second alone would pass
        ([0.024, 0.024], [True, True]),
        ([0.017] * 3, [False] * 3),
        ([2**-12] * 200, [True] * 200),
        ([2**-12] + [1.0] * 300, [False] * 301),
    ],
    ids=lambda values: f"{len(values)}: {values[0]}.." if len(values) > 3 else str(values),
)
def test_holm(p_values, rejected):
    assert holm(p_values) == rejected


def test_holm_keeps_its_promise():
    """Among hypotheses that all hold, one is rejected in at most 5 % of the runs (standard error 0.5 %)."""
    runs = np.random.default_rng(0).random((2000, 20))
    assert np.mean([any(holm(list(p_values))) for p_values in runs]) <= 0.06


# Runs of many cells


def run_of(cells, factors=None, run=0):
    """Evidence of a run on a noisy machine; `factors` maps a cell's number to how much slower it became."""
    evidence = {}
    for number in range(cells):
        # One machine: what slows a run of one program slows the next run, whichever program that is.
        seconds, factor = noisy_seconds(1000 * run + number), (factors or {}).get(number, 1.0)
        contest = Race(lambda s=seconds, f=factor: f * s(), seconds, seed=number)
        evidence[f"cell{number}"] = Evidence("a", "b", {}, contest.run(cells=cells), "code")
    return evidence


def test_identical_code_raises_no_alarm():
    """80 cells a run, each of another program that is as fast: some are suspect, none is confirmed."""
    runs = 40
    suspect, ends = {}, []
    for run in range(runs):
        evidence = run_of(80, run=run)
        ends += [seen.pairs.end for seen in evidence.values()]
        suspect |= {(run, name): end for name, end in timing.suspects(evidence, ()).items()}
    # Holm's level is 5 % of the runs for each direction at one look, and most races have two or three.
    assert len({run for run, _ in suspect}) <= 0.25 * runs
    # It is no rule that never decides.
    assert ends.count("equal") > 0.95 * len(ends)
    again = [noisy_seconds(10**6 + number) for number in range(len(suspect))]
    confirmed = [Race(seconds, seconds).run(cells=1).end for seconds in again]
    assert not [1 for end, found in zip(confirmed, suspect.values(), strict=True) if end == found]


@pytest.mark.parametrize("factor", [1.1, 1.2, 1 / 1.1, 1 / 1.2])
def test_changes_are_found_among_cells_that_did_not_change(factor):
    changed = dict.fromkeys(range(0, 40, 4), factor)
    end = "slower" if factor > 1 else "faster"
    found = timing.suspects(run_of(40, changed), ())
    assert found == {f"cell{number}": end for number in changed}


# Suspects, controls and the judgement


@pytest.mark.parametrize(
    ("ratios", "settings", "expected"),
    [
        ({}, (), {}),
        ({"a": 1.2, "b": 1.0}, (), {"a": "slower"}),
        ({"a": 1 / 1.2, "b": 1.2}, (), {"a": "faster", "b": "slower"}),
        ({"a": 1.04, "b": 1 / 1.04}, (), {}),
        ({"a": 1.2, "b": 1.2}, (Limit("b", "time", 0.3),), {"a": "slower"}),
        ({"a": 1.04, "b": 1.04}, (Limit("b", "time", 0.03),), {"b": "slower"}),
        ({"a": 1.2}, (Limit("a", "temp_bytes", 0.3),), {"a": "slower"}),
    ],
)
def test_suspects(ratios, settings, expected):
    evidence = {name: Evidence(pairs=pairs_of(ratio)) for name, ratio in ratios.items()}
    evidence["not raced"] = Evidence()
    evidence["no pair"] = Evidence(pairs=Pairs((), "undecided", 0.0))
    assert timing.suspects(evidence, settings) == expected


def test_suspects_are_corrected_for_all_raced_cells():
    """p = 2**-5 among ten is no suspect, alone it is."""
    short = Evidence(pairs=pairs_of(1.5, 5))
    others = {str(number): Evidence(pairs=pairs_of(1.0)) for number in range(9)}
    assert timing.suspects({"short": short}, ()) == {"short": "slower"}
    assert timing.suspects({"short": short} | others, ()) == {}


@pytest.mark.parametrize(
    ("control", "moved"),
    [
        (pairs_of(1.0), False),
        (pairs_of(1.031), True),
        (pairs_of(1 / 1.031), True),
        (pairs_of(1.029), False),
        (pairs_of(1.5, 7), False),  # p = 2**-7 is over MOVED_P
        (pairs_of(1.5, 8), True),
        (pairs_of(1.04, 12, 0.5), False),
    ],
)
def test_null_control_that_moved(control, moved):
    still = pairs_of(1.0)
    assert timing.noisy([still, control]) == ([control] if moved else [])


SLOW, FAST, SAME = pairs_of(1.2), pairs_of(1 / 1.2), pairs_of(1.0)
OPEN, TWICE = pairs_of(1.04, 12, 0.5), pairs_of(2.0)


def ended(pairs, end):
    return dataclasses.replace(pairs, end=end)


@pytest.mark.parametrize(
    ("pairs", "suspect", "confirmed", "noise", "status", "said"),
    [
        (SAME, None, None, 1.0, "unchanged", None),
        (FAST, None, None, 1.0, "unchanged", None),
        (OPEN, None, None, 1.0, "inconclusive", "neither slower nor equal"),
        (pairs_of(1.0, 4), None, None, 1.0, "inconclusive", "neither slower nor equal"),
        (SLOW, "slower", ended(SLOW, "slower"), 1.0, "regressed", "confirmed in a fresh process: x1.200"),
        (FAST, "faster", ended(FAST, "faster"), 1.0, "improved", "confirmed in a fresh process: x0.833"),
        (SLOW, "slower", ended(SAME, "equal"), 1.0, "unchanged", "not confirmed in a fresh process"),
        (SLOW, "slower", ended(FAST, "faster"), 1.0, "inconclusive", "does not decide"),
        (SLOW, "slower", ended(OPEN, "undecided"), 1.0, "inconclusive", "does not decide"),
        (SLOW, "slower", "it gave no answer", 1.0, "inconclusive", "not confirmed: it gave no answer"),
        (SLOW, "slower", None, 1.0, "inconclusive", "not confirmed"),
        # A machine that moves what cannot move decides nothing by as much, and leaves the rest alone.
        (
            SLOW,
            "slower",
            ended(SLOW, "slower"),
            1.15,
            "inconclusive",
            "null control of this run moved by x1.150",
        ),
        (FAST, "faster", ended(FAST, "faster"), 1.15, "inconclusive", "null control"),
        (SLOW, "slower", ended(SLOW, "slower"), 1.14, "regressed", "confirmed"),
        (FAST, "faster", ended(FAST, "faster"), 1.14, "improved", "confirmed"),
        (SAME, None, None, 1.15, "unchanged", None),
    ],
)
def test_judgement_of_a_changed_program(pairs, suspect, confirmed, noise, status, said):
    seen = Evidence("a", "b", {}, pairs, "code")
    got, reasons, figures = timing.judge(seen, suspect, confirmed, 1.05, noise)
    assert got == status
    assert (said is None) == (reasons == [])
    assert said is None or said in reasons[0]
    assert figures is not None
    assert figures.ratio == pytest.approx(pairs.ratio)
    assert (figures.low, figures.high) == pairs.bounds
    assert figures.pairs == len(pairs.logs)
    assert figures.confirmed == (confirmed.ratio if isinstance(confirmed, Pairs) else None)


@pytest.mark.parametrize(
    ("seen", "suspect", "noise", "status", "said"),
    [
        (Evidence("a", "a"), None, 1.0, "unchanged", None),
        (Evidence("a", "b", not_paired="other arguments"), None, 1.0, "inconclusive", "other arguments"),
        # One program, raced since the stored time fell: the pairs are the second witness.
        (Evidence("a", "a", {}, TWICE, "stored time"), "slower", 1.0, "regressed", "the cause is outside it"),
        (Evidence("a", "a", {}, TWICE, "stored time"), "slower", 1.6, "regressed", "the cause is outside it"),
        (Evidence("a", "a", {}, TWICE, "stored time"), "slower", 1.7, "inconclusive", "null control"),
        # An export may be compiled to code that is some percent faster than the same program's.
        (Evidence("a", "a", {}, pairs_of(1.15), "stored time"), "slower", 1.0, "unchanged", None),
        (Evidence("a", "a", {}, SAME, "stored time"), None, 1.0, "unchanged", None),
        # One program, raced since all are: nothing but noise can make it slower, so it has to be confirmed.
        (Evidence("a", "a", {}, SLOW, "all programs"), "slower", 1.0, "inconclusive", "not confirmed"),
    ],
    ids=[
        "not raced",
        "not possible",
        "tripped",
        "tripped by more than noise",
        "tripped by noise",
        "tripped a little",
        "tripped and equal",
        "all programs",
    ],
)
def test_judgement_without_a_fresh_process(seen, suspect, noise, status, said):
    got, reasons, _ = timing.judge(seen, suspect, None, 1.05, noise)
    assert got == status
    assert (reasons == []) if said is None else (said in reasons[0])


def test_pairs_in_words():
    assert str(pairs_of(1.2, 12, 0.01)).startswith("x1.200 (1.19")
    assert str(pairs_of(1.2, 12, 0.01)).endswith(", 12 pairs)")
    assert str(pairs_of(1.2, 4)) == "x1.200 (0.000 to inf, 4 pairs)"


def test_evidence_survives_the_journal():
    pairs = pairs_of(1.2, 12, 0.01, "slower")
    program = SimpleNamespace()
    seen = Evidence("a", "b", {"flops": 1.0}, pairs, "code", program=program)
    assert Evidence.from_json(seen.to_json(), program) == seen
    assert Evidence.from_json(Evidence().to_json(), None) == Evidence()
