"""Suite maxtok: what fits by its bytes, and what becomes of a child that runs out of memory."""

import dataclasses
import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.bench import grid, maxtok, maxtok_child
from tests.bench.errors import EnvironmentFault
from tests.bench.program import Bytes
from tests.running import Runner
from tests.timing import fixture

resource = pytest.importorskip("resource", reason="limits on memory are Unix's")
pytestmark = pytest.mark.xdist_group("maxtok")
MIB = 2**20
SHAPE = {"experts": (4,), "d_model": 32, "d_hidden": 48, "suites": ("maxtok",), "dtypes": ("float32",)}


def entry(impl="chunked", start=64, stop=256, op="forward", **changes):
    more = {"impls": (impl,), "ops": (op,), "maxtok_start": start, "maxtok_stop": stop}
    (found,) = grid.build("smoke", SHAPE | more | changes)[:1]
    return found


# The grid's side


@pytest.mark.parametrize(
    ("start", "stop", "sizes"),
    [(64, 256, [64, 128, 256]), (64, 255, [64, 128]), (64, 64, [64]), (48, 200, [48, 96, 192])],
)
def test_sizes_double_up_to_the_last(start, stop, sizes):
    assert maxtok.sizes(entry(start=start, stop=stop)) == sizes


def test_published_sizes():
    (found,) = grid.build("smoke", {"suites": ("maxtok",), "impls": ("chunked",), "ops": ("forward",)})
    assert maxtok.sizes(found) == [32768 * 2**n for n in range(7)]
    assert found.cell.id == "maxtok/dropless:chunked:sorted-float32-t2097152-e8-k2-s0.0-d512-h1024-forward"


# By bytes


def bytes_of(total):
    return Bytes(temp=total, argument=5, output=5, alias=10)


@pytest.fixture(scope="module")
def needs():
    return dict(maxtok.fitting(entry(), 2**40))


def test_more_tokens_need_more_bytes(needs):
    assert list(needs) == [64, 128, 256]
    assert sorted(needs.values()) == list(needs.values())
    parameters = 4 * (32 * 4 + 3 * 4 * 32 * 48)
    for tokens, need in needs.items():
        assert need > parameters + 2 * 4 * tokens * 32  # x and y


def test_fitting_stops_at_the_budget(needs, monkeypatch):
    # The same programs once more: their bytes are known.
    by_size = {size: bytes_of(need) for size, need in needs.items()}
    monkeypatch.setattr(maxtok, "needed", lambda cell: by_size[cell.tokens])
    assert maxtok.fitting(entry(), needs[128]) == [(64, needs[64]), (128, needs[128])]
    assert maxtok.fitting(entry(), needs[128] - 1) == [(64, needs[64])]
    assert maxtok.fitting(entry(), needs[64] - 1) == []


def test_budget_is_the_smaller_of_machine_and_container(tmp_path, monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    none, unlimited, small, large = (tmp_path / name for name in ("none", "unlimited", "small", "large"))
    unlimited.write_text("max\n")
    small.write_text("1048576\n")
    large.write_text(f"{2**62}\n")
    for paths, expected in (
        ((none, none), machine),
        ((unlimited, none), machine),
        ((small, none), MIB),
        ((none, small), MIB),
        ((unlimited, small), MIB),
        ((large, none), machine),
    ):
        monkeypatch.setattr(maxtok, "CGROUP", paths)
        assert maxtok.budget() == expected


def test_budget_of_a_system_that_does_not_tell(monkeypatch):
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(EnvironmentFault, match="give --maxtok-memory, in MiB"):
        maxtok.budget()


# Children that follow a script: what a process may do, without jax in it

READY = """
import json, os, signal, sys
def say(**values): print(json.dumps(values), flush=True)
def serve(runs):
    for n, _ in enumerate(sys.stdin):
        if n == runs:
            os.kill(os.getpid(), signal.SIGKILL)
        say()
"""
FINE = READY + "say(rel_err_out=1e-7, temp_bytes=5, flops=7.0); serve(99)"
KILLED_AT_START = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
KILLED_WARMING_UP = READY + "say(temp_bytes=5); serve(0)"
KILLED_WHILE_TIMED = READY + "say(temp_bytes=5); serve(2)"
ABORTED = "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()"
SAID = READY + "say(out_of_memory='RESOURCE_EXHAUSTED')"
WRONG = READY + "say(error='the cell: rel_err_out=1.0 is over 5.0e-07')"
BROKEN = "import sys; print('it is broken', file=sys.stderr); sys.exit(3)"


@pytest.fixture
def script(monkeypatch):
    """Let the child of each size follow a script; returns the sizes that were started and the programs' budget."""
    started = []

    def follow(scripts):
        class Scripted(maxtok.Child):
            @staticmethod
            def _command(cell, checked):
                started.append(cell.tokens)
                return [sys.executable, "-c", scripts[cell.tokens]]

        monkeypatch.setattr(maxtok, "Child", Scripted)
        monkeypatch.setattr(
            maxtok, "fitting", lambda entry, memory: [(t, t * 1000) for t in maxtok.sizes(entry)]
        )
        return started

    return follow


def measured(found, memory=2**30, **more):
    """The record, the statistics that pytest-benchmark holds, and its fixture."""
    stats: list[Any] = []
    bench = fixture(time.perf_counter, stats, **more)
    return maxtok.measure_largest(found, bench, memory, True), stats, bench


def test_the_largest_size_runs(script):
    started = script({256: FINE})
    record, stats, bench = measured(entry())
    assert started == [256]
    assert record == bench.extra_info
    assert record["id"] == entry().cell.id
    assert (record["max_tokens"], record["out_of_memory_at"]) == (256, [])
    assert (record["needed_mb"], record["memory_mb"]) == (256000 / MIB, 1024)
    assert (record["rel_err_out"], record["temp_bytes"], record["flops"]) == (1e-7, 5, 7.0)
    assert stats[0].stats.rounds == maxtok.RUNS
    assert record["median_ms"] == pytest.approx(stats[0].stats.median * 1000)
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize("end", [KILLED_AT_START, KILLED_WARMING_UP, KILLED_WHILE_TIMED, ABORTED, SAID])
def test_a_killed_child_is_a_result(script, end):
    started = script({256: end, 128: end, 64: FINE})
    record, stats, bench = measured(entry())
    assert started == [256, 128, 64]
    assert record["max_tokens"] == 64
    assert record["out_of_memory_at"] == [256, 128]
    # The rounds of the killed ones are gone; those of the one that survived are whole.
    assert len(stats) == 1
    assert stats[0].stats.rounds == maxtok.RUNS
    assert not bench.has_error


def test_nothing_survives(script):
    started = script(dict.fromkeys((64, 128, 256), KILLED_AT_START))
    with pytest.raises(maxtok.Nothing) as caught:
        measured(entry())
    assert started == [256, 128, 64]
    assert "no size from 64 tokens on fits in 1024 MiB (out of memory at [256, 128, 64])" in str(caught.value)
    assert "lower --maxtok-start or raise --maxtok-memory" in str(caught.value)


def test_nothing_fits_by_its_bytes(monkeypatch):
    monkeypatch.setattr(maxtok, "needed", lambda cell: bytes_of(2))
    monkeypatch.setattr(maxtok, "Child", lambda *_: pytest.fail("started"))
    with pytest.raises(
        maxtok.Nothing, match=r"no size from 64 tokens on fits in 0 MiB; lower --maxtok-start"
    ):
        maxtok.measure_largest(entry(), fixture(time.perf_counter, []), 1, True)


def test_wrong_numbers_of_a_child_fail_the_cell(script):
    started = script({256: WRONG})
    with pytest.raises(AssertionError, match=r"rel_err_out=1\.0 is over"):
        measured(entry())
    assert started == [256]


def test_a_child_that_fails_in_another_way_is_no_lack_of_memory(script):
    started = script({256: BROKEN})
    with pytest.raises(ChildProcessError, match="ended with 3; it said last:\nit is broken"):
        measured(entry())
    assert started == [256]


def test_disabled_benchmark_starts_the_child_and_times_nothing(script):
    started = script({256: FINE})
    record, stats, _ = measured(entry(), disabled=True)
    assert (record, stats, started) == (None, [], [256])


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("can't start new thread"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes."), True),
        # What JAX 0.10.2 says when the failing call was dispatched and a later one waits for it.
        (
            jax.errors.JaxRuntimeError(
                "INTERNAL: Error dispatching computation: Out of memory allocating 8589934592 bytes."
            ),
            True,
        ),
        (jax.errors.JaxRuntimeError("INTERNAL: something else"), False),
    ],
)
def test_which_errors_are_a_lack_of_memory(error, full):
    assert maxtok_child.out_of_memory(error) is full


# Real children


def with_tokens(found, tokens):
    return dataclasses.replace(found.cell, tokens=tokens)


def test_real_child_says_its_facts_runs_and_is_killed():
    found = entry(op="train_step_donated", impl="dense")
    with maxtok.Child(with_tokens(found, 128), True) as child:
        assert child.start()
        assert child.facts["rel_err_out"] <= 1e-6
        assert child.facts["temp_bytes"] > 0
        assert child.facts["alias_bytes"] > 0
        assert child.facts["xla_temp_mb"] * MIB == child.facts["temp_bytes"]
        child.run()
        child.run()  # the state is handed on
        os.kill(child._process.pid, signal.SIGKILL)
        with pytest.raises(maxtok.Killed):
            child.run()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process are Linux's")
def test_real_child_under_a_memory_limit_is_a_result(monkeypatch):
    """8 GiB of x do not fit in 2 GiB more of address space than 64 tokens take."""
    start = maxtok.Child.__init__
    found = entry(start=64, stop=2**22, d_model=512, d_hidden=64)
    with maxtok.Child(with_tokens(found, 64), True) as child:
        assert child.start()
        limit = address_space(child._process.pid) + 2 * 2**30

    def limited(self, cell, checked):
        start(self, cell, checked)
        resource.prlimit(self._process.pid, resource.RLIMIT_AS, (limit, limit))

    monkeypatch.setattr(maxtok.Child, "__init__", limited)
    monkeypatch.setattr(maxtok, "sizes", lambda entry: [64, 2**22])
    record, stats, _ = measured(found, memory=2**40)
    assert record["max_tokens"] == 64
    assert record["out_of_memory_at"] == [2**22]
    assert len(stats) == 1


def address_space(pid):
    """Bytes at its peak: threads and their arenas make it a figure of the machine."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmPeak"))
    return int(peak.split()[1]) * 1024


def test_whole_suite_from_the_command_line(tmp_path):
    """The largest size that fits in 1 MiB, each cell in a child of its own; with --maxtok-memory."""
    runner = Runner(tmp_path / "run")
    shape = ("--suites", "maxtok", "--impls", "chunked", "--ops", "forward", "--experts", "4")
    sizes = ("--d-model", "32", "--d-hidden", "48", "--maxtok-start", "512", "--maxtok-stop", "4096")
    words = (*shape, *sizes, "--maxtok-memory", "1", "--benchmark-json=run.json", "--junitxml=run.xml")
    run = runner.pytest(*words, grid="smoke")
    assert run.code == 0, run.text
    assert "1 passed" in run.text
    (stored,) = json.loads((runner.folder / "run.json").read_text())["benchmarks"]
    record = stored["extra_info"]
    assert record["id"] == "maxtok/dropless:chunked:sorted-float32-t4096-e4-k2-s0.0-d32-h48-forward"
    assert record["memory_mb"] == 1
    assert record["needed_mb"] <= 1
    assert record["max_tokens"] in (512, 1024, 2048)
    assert record["out_of_memory_at"] == []
    assert record["rel_err_out"] <= 5e-7
    assert stored["stats"]["rounds"] == maxtok.RUNS
