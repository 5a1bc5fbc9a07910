"""Limits from pyproject.toml: what is read, what is refused, which holds, and what the second tier makes of it."""

from pathlib import Path

import pytest

from tests.bench.errors import BenchError
from tests.bench.gate import deterministic, limits
from tests.bench.gate.limits import DEFAULTS, Limit
from tests.verdicts import record

RAGGED = "dropless:ragged_dot:sorted-float32-t1024"
CHUNKED = "dropless:chunked:sorted-float32-t1024"
ENTRY = {
    "cells": '"*ragged_dot*"',
    "metric": '"temp_bytes"',
    "share": "0.10",
    "reason": '"XLA pads"',
}


def entry(**changes):
    """One table as TOML; a value of None leaves the key out."""
    lines = [f"{name} = {value}" for name, value in (ENTRY | changes).items() if value is not None]
    return "\n".join(["[[tool.moe-bench.limits]]", *lines, ""])


def read(tmp_path, text):
    path = tmp_path / "pyproject.toml"
    path.write_text(text, encoding="utf-8")
    return limits.read(path)


def refusal(tmp_path, text):
    with pytest.raises(BenchError) as caught:
        read(tmp_path, text)
    return str(caught.value)


# Reading


def test_entries_are_read_in_their_order(tmp_path):
    text = entry() + entry(cells='"*"', metric='"time"', share="0.5") + entry(least="0", reason='" b "')
    assert read(tmp_path, text) == (
        Limit("*ragged_dot*", "temp_bytes", 0.1, 4096, "XLA pads"),
        Limit("*", "time", 0.5, 0, "XLA pads"),
        Limit("*ragged_dot*", "temp_bytes", 0.1, 0, "b"),
    )


@pytest.mark.parametrize("text", ["", "[project]\nname = 'a'\n", "[tool.moe-bench]\n", "[tool.other]\n"])
def test_file_without_limits_has_none(tmp_path, text):
    assert read(tmp_path, text) == ()


def test_limits_of_this_repository_are_sound():
    limits.read(Path(__file__).parents[1] / "pyproject.toml")


@pytest.mark.parametrize("metric", DEFAULTS)
def test_every_metric_can_be_limited(tmp_path, metric):
    (limit,) = read(tmp_path, entry(metric=f'"{metric}"'))
    assert (limit.share, limit.least) == (0.1, DEFAULTS[metric].least)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shares": "0.1"}, "has the key 'shares'; there are: cells, metric, share, least, reason"),
        ({"cells": None}, "cells=None must be text"),
        ({"cells": "3"}, "cells=3 must be text"),
        ({"metric": None}, "metric=None must be text"),
        ({"metric": '"speed"'}, "metric='speed' is unknown; there are: time, temp_bytes"),
        ({"reason": None}, "reason=None must be text"),
        ({"reason": '"  "'}, "reason='  ' must be text that is not empty"),
        ({"share": None}, "share=None must be a number over 0 and at most 0.5"),
        ({"share": "0"}, "share=0 must"),
        ({"share": "-0.1"}, "share=-0.1 must"),
        ({"share": "0.51"}, "share=0.51 must"),
        ({"share": "4"}, "share=4 must"),
        ({"share": "nan"}, "share=nan must"),
        ({"share": "true"}, "share=True must"),
        ({"share": '"10 %"'}, "share='10 %' must"),
        ({"least": "-1"}, "least=-1 must be a whole number of bytes"),
        ({"least": "0.5"}, "least=0.5 must"),
        ({"least": "true"}, "least=True must"),
        ({"least": "4096", "metric": '"flops"'}, "least=4096 holds for bytes; leave it out for flops"),
        ({"least": "0", "metric": '"time"'}, "least=0 holds for bytes; leave it out for time"),
    ],
)
def test_refusal_names_the_entry_the_value_and_what_is_accepted(tmp_path, changes, said):
    message = refusal(tmp_path, entry() + entry(**changes))
    assert "pyproject.toml: [[tool.moe-bench.limits]] number 2" in message
    assert said in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool", "is not TOML"),
        ("[tool.moe-bench]\nlimit = 1\n", "[tool.moe-bench] has the key 'limit'; there are: grids, limits"),
        ("[tool.moe-bench.limits]\nshare = 0.1\n", "is no list of tables; write [[tool.moe-bench.limits]]"),
        ("[tool.moe-bench]\nlimits = [3]\n", "is no list of tables"),
        ("[[tool.moe-bench]]\n", "is no list of tables"),
    ],
)
def test_file_of_another_form_is_refused(tmp_path, text, said):
    assert said in refusal(tmp_path, text)


def test_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(BenchError, match="cannot be read"):
        limits.read(tmp_path / "pyproject.toml")
    (tmp_path / "pyproject.toml").write_bytes(b"\xff")
    with pytest.raises(BenchError, match="is not TOML"):
        limits.read(tmp_path / "pyproject.toml")


# Which holds


def test_last_match_wins_and_defaults_hold_for_the_rest():
    first = Limit("*", "temp_bytes", 0.2, 4096, "a")
    last = Limit("*ragged_dot*", "temp_bytes", 0.1, 4096, "b")
    assert limits.of((first, last), RAGGED, "temp_bytes") is last
    assert limits.of((last, first), RAGGED, "temp_bytes") is first
    assert limits.of((first, last), CHUNKED, "temp_bytes") is first
    assert limits.of((last,), CHUNKED, "temp_bytes") is DEFAULTS["temp_bytes"]
    assert limits.of((first, last), RAGGED, "flops") is DEFAULTS["flops"]


def test_pattern_is_of_the_whole_id_and_its_case():
    for pattern in ("ragged_dot", "*RAGGED_DOT*"):
        limit = Limit(pattern, "time", 0.2, reason="a")
        assert limits.of((limit,), RAGGED, "time") is DEFAULTS["time"]


def test_defaults():
    assert {metric: (limit.share, limit.least) for metric, limit in DEFAULTS.items()} == {
        "time": (0.05, 0),
        "temp_bytes": (0.01, 4096),
        "argument_bytes": (0.01, 4096),
        "output_bytes": (0.01, 4096),
        "alias_bytes": (0.01, 4096),
        "flops": (0.01, 0),
    }


# In the second tier


def outcome(limit, now, name="temp_bytes", was=10_000_000, identity=RAGGED):
    """Worse, better, let through."""
    today, before = record(id=identity, **{name: now}), record(**{name: was})
    found = () if limit is None else (limit,)
    return (
        *deterministic.compare(today, before, found),
        deterministic.let_through(today, before, found),
    )


WIDE = Limit("*ragged_dot*", "temp_bytes", 0.1, 4096, "XLA pads")
TIGHT = Limit("*ragged_dot*", "temp_bytes", 0.005, 1024, "was hard to win")


def test_growth_that_only_a_wide_limit_lets_through_is_told():
    line = (
        "temp_bytes 10,000,000 -> 10,500,000 (+5.0%) let through "
        "(limit 10% and 4096 of pyproject.toml instead of 1% and 4096: XLA pads)"
    )
    assert outcome(WIDE, 10_500_000) == ([], [], [line])
    worse, better, through = outcome(WIDE, 10_500_000, identity=CHUNKED)
    assert worse == ["temp_bytes 10,000,000 -> 10,500,000 (+5.0%) (limit 1% and 4096)"]
    assert (better, through) == ([], [])


def test_growth_over_a_wide_limit_is_worse():
    assert outcome(WIDE, 11_000_001) == (
        ["temp_bytes 10,000,000 -> 11,000,001 (+10.0%) (limit 10% and 4096)"],
        [],
        [],
    )


def test_growth_that_only_a_tight_limit_names_has_its_reason():
    line = (
        "temp_bytes 10,000,000 -> 10,050,001 (+0.5%) "
        "(limit 0.5% and 1024 of pyproject.toml instead of 1% and 4096: was hard to win)"
    )
    assert outcome(TIGHT, 10_050_001) == ([line], [], [])
    assert outcome(TIGHT, 10_050_000) == ([], [], [])
    assert outcome(None, 10_050_001) == ([], [], [])


def test_gain_within_a_wide_limit_is_told_too():
    worse, better, through = outcome(WIDE, 9_500_000)
    assert (worse, better) == ([], [])
    assert "temp_bytes 10,000,000 -> 9,500,000 (-5.0%) let through" in through[0]
    assert len(outcome(TIGHT, 9_940_000)[1]) == 1


def test_lost_donation_is_worse_under_a_limit_of_its_own():
    limit = Limit("*", "alias_bytes", 0.2, 0, "a")
    assert outcome(limit, 900_000, "alias_bytes", 1_000_000)[2] != []
    assert len(outcome(limit, 700_000, "alias_bytes", 1_000_000)[0]) == 1


def test_metric_that_a_record_lacks_is_passed_over():
    assert outcome(WIDE, None) == outcome(WIDE, 10_500_000, was=None) == ([], [], [])
