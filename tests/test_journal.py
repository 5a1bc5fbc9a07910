"""The journal: what it keeps of a run that was killed, and what a replay makes of it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.bench import journal, session
from tests.bench.gate.evidence import Evidence
from tests.bench.gate.paired import Pairs
from tests.bench.journal import KEPT, Journal, Line
from tests.running import ROOT
from tests.timing import Clock, fixture

ENVIRONMENT = {"jax": "0.10.2", "devices": ["cpu:0"], "gpu": None, "bench_seconds": 2.0}
PAIRS = Pairs((0.1, -0.25, 1e-17), "undecided", 3.5)
SEEN = Evidence("today", "stored", {"temp_bytes": 7, "flops": None}, PAIRS, "code")


def line(identity="a", **changes):
    values: dict[str, Any] = {
        "id": identity,
        "digest": "today",
        "against": "stored",
        "environment": ENVIRONMENT,
        "iterations": 3,
        "durations": [0.25, 0.5, 0.1 + 0.2, 1e-9],
        "extra_info": {
            "id": identity,
            "temp_bytes": 2**40,
            "rel_err_out": 1.0000000000000002e-7,
            "note": "ü\u2028",
        },
        "evidence": json.loads(json.dumps(SEEN.to_json())),
    }
    return Line(**values | changes)


def written(folder, *lines):
    """The path of a journal of these lines, closed."""
    opened = Journal(folder)
    for each in lines:
        opened.append(each)
    opened.close()
    return opened.path


def test_lines_are_read_as_they_were_appended(tmp_path):
    lines = [line(), line("b", digest=None, against=None), line("ü", evidence=None, durations=[])]
    assert list(journal.read(written(tmp_path, *lines)).values()) == lines


def test_evidence_is_replayed_whole(tmp_path):
    (found,) = journal.read(written(tmp_path, line())).values()
    assert found.evidence is not None
    assert Evidence.from_json(found.evidence, None) == SEEN


def test_a_line_is_on_disk_before_the_next_cell_runs(tmp_path, monkeypatch):
    forced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append(os.fstat(descriptor).st_size))
    opened = Journal(tmp_path)
    forced.clear()
    for number in range(3):
        opened.append(line(str(number)))
        assert len(journal.read(opened.path)) == number + 1
        assert forced[-1] == opened.path.stat().st_size
    opened.close()
    assert len(forced) == 3


KILLED = """
import os, pathlib, signal, sys
from tests.bench.journal import Journal, Line
journal = Journal(pathlib.Path(sys.argv[1]))
for number in range(3):
    journal.append(Line(str(number), "d", None, {}, 1, [0.5], {}, None))
journal._file.write('{"id": "3", "digest": "d"')
journal._file.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_run_leaves_its_cells(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    following = Journal(tmp_path, resume=True)
    following.close()
    assert [found.id for found in following.earlier.values()] == ["0", "1", "2"]
    assert journal.read(following.path) == following.earlier


@pytest.mark.parametrize(
    ("left", "expected"),
    [(1, ["a"]), (20, ["a"]), (-2, ["a"]), (-1, ["a", "b"])],
    ids=["a byte", "20 bytes", "all but its brace", "all but its end of line"],
)
def test_torn_last_line_is_ignored(tmp_path, left, expected):
    path = written(tmp_path, line("a"), line("b"))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:left])
    assert [found.id for found in journal.read(path).values()] == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"id"', '"name"'),
        lambda text: text.replace(f'"schema": {journal.SCHEMA}', '"schema": 99'),
        lambda text: text.replace(f', "schema": {journal.SCHEMA}', ""),
        lambda text: text[:-1] + ', "more": 1}',
        lambda text: "[]",
        lambda text: "null",
        lambda text: "",
        lambda text: "\0" * 100,
        lambda text: text.replace("cpu:0", "\udcff"),
        lambda text: "[" * 100_000,
    ],
    ids=[
        "a field of another name",
        "another schema",
        "no schema",
        "a field more",
        "a list",
        "null",
        "empty",
        "zeros",
        "not UTF-8",
        "nested without end",
    ],
)
def test_what_follows_a_damaged_line_is_not_trusted(tmp_path, damage):
    path = written(tmp_path, line("a"), line("b"), line("c"))
    first, second, third = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join([first, damage(second), third]) + "\n"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    found = [each.id for each in journal.read(path).values()]
    assert found in (["a"], ["a", "b", "c"])
    # A byte that is no text changes the line's key, so that it replays nothing.
    keys = journal.read(path).keys()
    assert line("b").key not in keys
    assert (line("c").key in keys) == (len(found) == 3)


def test_a_cell_that_was_measured_twice_is_its_last_line(tmp_path):
    path = written(tmp_path, line("a", durations=[1.0]), line("b"), line("a", durations=[2.0]))
    found = journal.read(path)
    assert len(found) == 2
    assert found[line("a").key].durations == [2.0]


# Keys


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({"id": "b"}, False),
        ({"digest": "other"}, False),
        ({"digest": None}, False),
        ({"against": "other"}, False),
        ({"against": None}, False),
        ({"environment": ENVIRONMENT | {"jax": "0.12.0"}}, False),
        ({"environment": ENVIRONMENT | {"xla_flags": "--one"}}, False),
        ({"environment": dict(reversed(ENVIRONMENT.items()))}, True),
        ({"iterations": 9, "durations": [], "extra_info": {}, "evidence": None}, True),
    ],
    ids=str,
)
def test_only_what_decides_a_replay_is_in_the_key(change, equal):
    assert (line(**change).key == line().key) == equal


def test_a_key_survives_the_file(tmp_path):
    """A tuple in the environment comes back as a list: that is no other environment."""
    (key,) = journal.read(written(tmp_path, line(environment=ENVIRONMENT | {"devices": ("cpu:0",)})))
    assert key == line().key


RUN = {"seconds": 2.0, "check": True, "against": "program", "all_programs": False, "gate_seconds": 20.0}


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 1.0},
        {"check": False},
        {"against": "accepted"},
        {"all_programs": True},
        {"gate_seconds": 1.0},
    ],
    ids=str,
)
def test_options_that_change_what_is_measured_or_raced_are_in_the_key(change):
    def key_of(options):
        cells = session.Cells(cast(Any, None), cast(Any, SimpleNamespace(**options)), comparing=True)
        cells.environment = ENVIRONMENT
        return cells._environment_key()

    assert key_of(RUN) == key_of(dict(RUN))
    assert key_of(RUN | change) != key_of(RUN)


# Folders


def test_older_journals_go_when_a_run_starts(tmp_path):
    paths = [written(tmp_path / "new" / "folder", line(str(number))) for number in range(KEPT + 3)]
    left = sorted((tmp_path / "new" / "folder").iterdir())
    assert left == paths[-KEPT:]


def test_the_newest_journal_is_the_one_to_resume(tmp_path):
    first = Journal(tmp_path, resume=True)
    first.close()
    second = Journal(tmp_path)
    second.close()
    third = Journal(tmp_path, resume=True)
    third.close()
    assert [each.resumed for each in (first, second, third)] == [None, None, second.path]
    assert len({first.path, second.path, third.path}) == 3


def test_other_files_in_the_folder_stay(tmp_path):
    for number in range(2 * KEPT):
        (tmp_path / f"{number}.txt").touch()
    for _ in range(2 * KEPT):
        written(tmp_path, line())
    assert len(list(tmp_path.glob("*.txt"))) == 2 * KEPT


# Replays


def measured(durations, iterations, clock):
    """pytest-benchmark's own row of a cell whose rounds took these seconds a call."""
    stats: list[Any] = []
    lengths = iter(durations)
    length = next(lengths)

    def call():
        clock.now += length

    def teardown():
        nonlocal length
        length = next(lengths, 0.0)  # It runs once more at the end.

    benchmark = fixture(clock, stats)
    benchmark.group = "a group"
    benchmark.extra_info.update(line().extra_info)
    benchmark.pedantic(call, teardown=teardown, rounds=len(durations), iterations=iterations)
    return stats[0]


def row_of(benchmark_stats):
    """Every field of a row as pytest-benchmark stores it, without the data."""
    return benchmark_stats.as_dict(include_data=False, flat=True)


@pytest.mark.parametrize("iterations", [1, 3, 100])
def test_a_replayed_row_is_the_measured_one(tmp_path, iterations):
    durations = [0.5, 0.25, 0.375, 0.5, 2.0, 0.75, 0.5]
    clock = Clock()  # It stands in the row, too.
    expected = measured(durations, iterations, clock)
    path = written(tmp_path, line(iterations=expected.iterations, durations=list(expected.stats.data)))
    (found,) = journal.read(path).values()
    stats: list[Any] = []
    benchmark = fixture(clock, stats)
    benchmark.group = "a group"
    journal.replay(found, benchmark)
    (row,) = stats
    assert benchmark.stats is row
    assert row.stats.data == pytest.approx(durations)
    assert (row.iterations, row.stats.rounds) == (iterations, len(durations))
    assert row.extra_info == line().extra_info
    was, now = row_of(expected), row_of(row)
    assert was.keys() == now.keys()
    for name, value in was.items():
        near = isinstance(value, float)
        assert now[name] == (pytest.approx(value, rel=1e-12) if near else value), name


def test_a_replayed_fixture_was_used():
    """Or pytest-benchmark warns of it, and would let it run again."""
    benchmark = fixture(Clock(), [])
    journal.replay(line(), benchmark)
    benchmark._cleanup()
    with pytest.raises(Exception, match="only be used once"):
        benchmark.pedantic(lambda: None)


def test_replaying_changes_no_line():
    given = line()
    copy = dataclasses.replace(given, extra_info=dict(given.extra_info), durations=list(given.durations))
    benchmark = fixture(Clock(), [])
    journal.replay(given, benchmark)
    benchmark.extra_info["later"] = 1
    assert given == copy
