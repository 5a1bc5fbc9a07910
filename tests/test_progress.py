"""The live line: what it says, that it stays on one line, and when there is none."""

import io
from types import SimpleNamespace

import pytest

from tests.bench import progress


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setenv("COLUMNS", "200")
    return clock


def cells(line, clock, seconds, *found):
    for name, status in found:
        line.begin(name)
        clock.now += seconds
        line.end(status)


def test_line_has_cells_time_left_the_verdict_so_far_and_the_cell(clock):
    stream = Stream(terminal=True)
    line = progress.Progress(stream, 4)
    cells(line, clock, 10, ("first" * 40, "unchanged"), ("second", "wrong"), ("third", "unchanged"))
    line.begin("fourth")
    said = stream.getvalue().split("\r")[1:]
    assert said[0].startswith("[0/4] 0 s: firstfirst")
    assert [text.rstrip() for text in said[1:]] == [
        "[1/4] 10 s, about 30 s left: 1 unchanged: second",
        "[2/4] 20 s, about 20 s left: 1 wrong, 1 unchanged: third",
        "[3/4] 30 s, about 10 s left: 1 wrong, 2 unchanged: fourth",
    ]


def test_line_never_wraps_and_covers_the_one_before(clock, monkeypatch):
    stream = Stream(terminal=True)
    line = progress.Progress(stream, 3)
    cells(line, clock, 1, ("long" * 60, "new"), ("b", "new"))
    monkeypatch.setenv("COLUMNS", "31")
    line.begin("c" * 60)
    said = stream.getvalue().split("\r")[1:]
    assert len(said[0]) == len(said[1]) == progress.WIDEST
    assert len(said[2].rstrip()) == 30
    assert "\n" not in stream.getvalue()
    line.clear()
    line.clear()
    assert stream.getvalue().endswith("\r" + " " * 30 + "\r")
    assert stream.getvalue().count("\r") == 5


@pytest.mark.parametrize(
    ("found", "code"),
    [(["unchanged"], None), (["suspect", "new"], 33), (["inconclusive", "wrong"], 31), (["regressed"], 31)],
)
@pytest.mark.parametrize("colour", [True, False], ids=["colour", "plain"])
def test_colour_says_the_worst_so_far(clock, found, code, colour):
    stream = Stream(terminal=True)
    line = progress.Progress(stream, 9, colour)
    cells(line, clock, 1, *((status, status) for status in found))
    before = len(stream.getvalue())
    line.begin("next")
    said = stream.getvalue()[before:]
    assert (f"\x1b[{code}m[" in said) == (colour and code is not None)
    assert ("\x1b" in said) == (colour and code is not None)


@pytest.mark.parametrize("stream", [None, Stream(terminal=False)], ids=["none", "file"])
def test_nothing_is_said_without_a_terminal(clock, stream):
    line = progress.Progress(stream, 2, colour=True)
    cells(line, clock, 100, ("one", "wrong"), ("two", "new"))
    line.clear()
    assert stream is None or stream.getvalue() == ""


@pytest.mark.parametrize(
    ("option", "environ", "wanted"),
    [
        ("auto", {}, True),
        ("auto", {"NO_COLOR": ""}, True),
        ("auto", {"NO_COLOR": "1"}, False),
        ("no", {}, False),
        ("yes", {"NO_COLOR": "1"}, True),
    ],
)
def test_when_there_is_colour(option, environ, wanted):
    assert progress.coloured(option, environ) is wanted


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3725, "62 min 05 s")]
)
def test_duration(seconds, text):
    assert progress.duration(seconds) == text
