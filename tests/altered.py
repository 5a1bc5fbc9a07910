"""What tests change in a run, as a pytest plugin (`-p tests.altered --alter NAME[=VALUE]`), undone at its end.

Many runs share one process, so a change must not outlive its run. Unless `--real-clock` is given, programs are
raced by a clock that ticks at each look, and stored times trip nothing: verdicts do not depend on other load.
"""

import dataclasses
import functools
import itertools
import subprocess
import sys
from typing import Any

import pytest

from tests.bench.session import KEY, Cells

CHUNKED = "dropless:chunked:sorted"
PATCH = pytest.StashKey[pytest.MonkeyPatch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alter", action="append", default=[], help="a change of this plugin")
    parser.addoption("--real-clock", action="store_true", help="race by the real clock")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """The suite's own plugin has imported jax and built the grid by now."""
    cells = config.stash.get(KEY, None)
    if cells is None:
        return
    patch = config.stash[PATCH] = pytest.MonkeyPatch()
    from tests.bench.gate import examine, stored_time

    patch.setattr(examine, "Vetter", _vetter)
    patch.setattr(examine.Examiner, "close", lambda self: None)
    if not config.getoption("--real-clock"):
        patch.setattr(stored_time, "tripped", lambda *_: False)
        ticks = itertools.count()
        patch.setattr(examine, "race", functools.partial(examine.race, clock=lambda: next(ticks) / 1000))
    for words in config.getoption("--alter"):
        name, _, value = words.partition("=")
        ALTERATIONS[name](patch, cells, *([value] if value else []))


@functools.cache
def _vetter() -> Any:
    """One reader of stored programs for all runs of this process: to start it takes most of a short run."""
    from tests.bench.gate.vet import Vetter

    return Vetter()


def pytest_unconfigure(config: pytest.Config) -> None:
    if PATCH in config.stash:
        config.stash[PATCH].undo()


# The grid


def removed(_, cells: Cells, word: str) -> None:
    cells.entries = [entry for entry in cells.entries if word not in entry.cell.id]


def renamed(_, cells: Cells, word: str) -> None:
    cells.entries = [
        dataclasses.replace(entry, cell=dataclasses.replace(entry.cell, skew=0.5))
        if word in entry.cell.id
        else entry
        for entry in cells.entries
    ]


def duplicated(_, cells: Cells, word: str) -> None:
    cells.entries += [entry for entry in cells.entries if word in entry.cell.id]


def in_front(_, cells: Cells) -> None:
    """A cell of another dtype before all others."""
    first = cells.entries[0]
    cells.entries.insert(
        0, dataclasses.replace(first, cell=dataclasses.replace(first.cell, dtype="bfloat16"))
    )


def skipped(_, cells: Cells, word: str) -> None:
    cells.entries = [
        dataclasses.replace(entry, skip="over a limit") if word in entry.cell.id else entry
        for entry in cells.entries
    ]


def in_ci(patch: pytest.MonkeyPatch, cells: Cells) -> None:
    patch.setenv("CI", "true")


def elsewhere(_, cells: Cells) -> None:
    """Other flags of the compiler are said to hold."""
    cells.environment["xla_flags"] = "--xla_other"


# What is measured


def hungry(patch: pytest.MonkeyPatch, cells: Cells, size: str) -> None:
    """Chunked's forward program of suite layer holds twice so many bytes, and some, for as long as it runs."""
    from tests.bench import program

    def layer(apply, params, x, config, **tuning):
        import jax
        import jax.numpy as jnp

        held = jax.lax.sort(
            jnp.resize(x.ravel(), (int(size) // 4,))
        )  # What is only broadcast takes no bytes.
        y, aux = apply(params, x + 0 * held[0], config, **tuning)
        return y + 0 * jax.lax.sort(held + y[0, 0])[-1] + 0 * jax.lax.sort(held)[0], aux

    _in_forward_programs(patch, program, layer, ("layer",))


def other(patch: pytest.MonkeyPatch, cells: Cells) -> None:
    """Chunked's forward programs are others of the same size."""
    from tests.bench import program

    def layer(apply, params, x, config, **tuning):
        y, aux = apply(params, x, config, **tuning)
        return y + 0 * x[0, 0], aux

    _in_forward_programs(patch, program, layer)


def callback(patch: pytest.MonkeyPatch, cells: Cells) -> None:
    """Chunked's forward programs call back into Python."""
    from tests.bench import program

    def layer(apply, params, x, config, **tuning):
        import jax

        jax.debug.callback(lambda value: None, x[0, 0])
        return apply(params, x, config, **tuning)

    _in_forward_programs(patch, program, layer)


def _in_forward_programs(
    patch: pytest.MonkeyPatch, program: Any, layer: Any, suites: tuple[str, ...] = ("layer", "chunk")
) -> None:
    whole, implementation = program.flat, program.implementation

    def changed(impl):
        right = implementation(impl)
        return dataclasses.replace(right, apply=functools.partial(layer, right.apply))

    def flat(cell, impl=None):
        with pytest.MonkeyPatch.context() as inner:
            if cell.impl == CHUNKED and cell.op == "forward" and cell.suite in suites:
                inner.setattr(program, "implementation", changed)
            return whole(cell, impl)

    patch.setattr(program, "flat", flat)


def wrong(patch: pytest.MonkeyPatch, cells: Cells) -> None:
    """Chunked is wrong by a thousandth."""
    import collections

    from tests.bench import numerics

    whole = numerics.implementation

    def implementation(impl):
        right = whole(impl)

        def apply(params, x, config, **tuning):
            y, aux = right.apply(params, x, config, **tuning)
            return y * 1.001, aux

        return dataclasses.replace(right, apply=apply) if impl == CHUNKED else right

    patch.setattr(numerics, "implementation", implementation)
    patch.setattr(numerics, "_MEASURED", collections.OrderedDict())


def uncalled(patch: pytest.MonkeyPatch, cells: Cells, word: str) -> None:
    """The test of these cells passes without a run."""
    whole = Cells.run

    def run(self, entry, benchmark):
        if word in entry.cell.id:
            benchmark.skipped = True
        else:
            whole(self, entry, benchmark)

    patch.setattr(Cells, "run", run)


def lost_figure(patch: pytest.MonkeyPatch, cells: Cells, name: str) -> None:
    """A figure of each record is not a number."""
    from tests.bench import measure

    whole = measure.record
    patch.setattr(measure, "record", lambda *args, **kw: whole(*args, **kw) | {name: float("nan")})


def slept(patch: pytest.MonkeyPatch, cells: Cells, seconds: str) -> None:
    """Each cell waits at its start: time to end the process in."""
    import time

    whole = Cells.run

    def run(self, entry, benchmark):
        time.sleep(float(seconds))
        whole(self, entry, benchmark)

    patch.setattr(Cells, "run", run)


# Clocks, and what is timed


def clock(patch: pytest.MonkeyPatch, cells: Cells, how: str) -> None:
    """The clock stands still or goes backwards; give pytest-benchmark's too."""
    import time

    from tests.bench.gate import examine

    read = CLOCKS[how]
    patch.setattr(time, "perf_counter", read)
    patch.setattr(examine, "race", functools.partial(examine.race, clock=read))


_TICKS = itertools.count()


def stopped():
    return 1e6


def backwards():
    return 1e6 - 0.001 * next(_TICKS)


CLOCKS = {"stopped": stopped, "backwards": backwards}  # Also for --benchmark-timer, which takes a name.


def noisy(patch: pytest.MonkeyPatch, cells: Cells) -> None:
    """A program against itself takes a fifth longer."""
    from tests.bench.gate import examine
    from tests.bench.gate.paired import Pairs

    whole = examine.race

    def race(today, stored, **how):
        return Pairs((0.18,) * 24, "slower", 1.0) if today is stored else whole(today, stored, **how)

    patch.setattr(examine, "race", race)


def first_slower(patch: pytest.MonkeyPatch, cells: Cells) -> None:
    """Whichever side of a pair goes first takes 23.5 % longer."""
    from tests.bench.gate import paired

    whole, turns = paired._timed, itertools.cycle((1.235, 1.0))
    patch.setattr(paired, "_timed", lambda *args: whole(*args) * next(turns))


# The reader of stored programs

READERS = {"crash": "import os; input(); os.abort()", "hang": "import time; time.sleep(600)"}


def reader(patch: pytest.MonkeyPatch, cells: Cells, how: str) -> None:
    """The process that reads stored programs crashes, or never answers."""
    from tests.bench.gate import examine, vet

    def start():
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-c", READERS[how]], stdin=pipe, stdout=pipe, stderr=null, text=True
        )

    patch.setattr(vet.Vetter, "_start", staticmethod(start))
    patch.setattr(examine, "Vetter", functools.partial(vet.Vetter, limit_s=1.0))


ALTERATIONS = {
    "removed": removed,
    "renamed": renamed,
    "duplicated": duplicated,
    "in-front": in_front,
    "skipped": skipped,
    "ci": in_ci,
    "elsewhere": elsewhere,
    "hungry": hungry,
    "other": other,
    "callback": callback,
    "wrong": wrong,
    "uncalled": uncalled,
    "lost": lost_figure,
    "slept": slept,
    "clock": clock,
    "noisy": noisy,
    "first-slower": first_slower,
    "reader": reader,
}
