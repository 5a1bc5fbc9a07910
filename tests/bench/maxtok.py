"""Suite maxtok: the most tokens that fit, found from compile-time bytes and proven by a run in a child process.

An out-of-memory kill of the child is a result: the next smaller size is tried, and the record says so.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import home
from .baseline import SCHEMA
from .cell import Cell
from .errors import BenchError, EnvironmentFault
from .grid import Entry
from .program import MIB, Bytes, flat

RUNS = 3
"""Timed runs of the largest size: each takes seconds to minutes."""
LAST_LINES = 12
"""Of what a failed child said, in the error."""
CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class Nothing(BenchError):
    """Not even the smallest size fits."""


class Killed(Exception):
    """The child is gone for want of memory."""


def budget() -> int:
    """Bytes of memory: the container's limit where it has one, else the machine's.

    Raises EnvironmentFault where the system does not tell (Windows).
    """
    if not hasattr(os, "sysconf"):
        raise EnvironmentFault("this system does not tell its memory; give --maxtok-memory, in MiB")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP:
        try:
            return min(machine, int(path.read_text()))
        except (OSError, ValueError):
            continue
    return machine


def sizes(entry: Entry) -> list[int]:
    """Tokens from maxtok_start, doubled up to maxtok_stop (the cell's tokens)."""
    found = [entry.maxtok_start]
    while found[-1] * 2 <= entry.cell.tokens:
        found.append(found[-1] * 2)
    return found


def needed(cell: Cell) -> Bytes:
    """Bytes of a cell's program, from the compiler: nothing is allocated."""
    return flat(cell).compile().bytes


def fitting(entry: Entry, memory: int) -> list[tuple[int, int]]:
    """(tokens, bytes) of each size whose program needs at most `memory` bytes, smallest first."""
    found = []
    for tokens in sizes(entry):
        cell = dataclasses.replace(entry.cell, tokens=tokens)
        need = needed(cell)
        if need.total > memory:
            break
        found.append((tokens, need.total))
    return found


def measure_largest(entry: Entry, benchmark: Any, memory: int | None, checked: bool) -> dict[str, Any] | None:
    """Run the largest size that fits in a child process and time it there; returns the record.

    Raises:
      Nothing: no size fits by its bytes, or none survives.
    """
    memory = memory or budget()
    candidates = fitting(entry, memory)
    killed: list[int] = []
    for tokens, need in reversed(candidates):
        cell = dataclasses.replace(entry.cell, tokens=tokens)
        with Child(cell, checked) as child:
            if child.start() and _timed(child, benchmark, entry):
                values = {
                    "schema": SCHEMA,
                    "status": "measured",
                    **entry.cell.fields(),
                    **child.facts,
                    "max_tokens": tokens,
                    "needed_mb": need / MIB,
                    "memory_mb": memory / MIB,
                    "out_of_memory_at": killed,
                }
                if benchmark.disabled:
                    return None
                stats = benchmark.stats.stats
                values |= {
                    "inner": 1,
                    "median_ms": stats.median * 1000,
                    "q1_ms": stats.q1 * 1000,
                    "q3_ms": stats.q3 * 1000,
                    "gemm_fraction": None,
                }
                benchmark.extra_info.update(values)
                return values
        killed.append(tokens)
    raise Nothing(
        f"{entry.cell.id}: no size from {entry.maxtok_start} tokens on fits in {memory / MIB:.0f} MiB"
        f"{f' (out of memory at {killed})' if killed else ''}; lower --maxtok-start or raise --maxtok-memory"
    )


def _timed(child: "Child", benchmark: Any, entry: Entry) -> bool:
    """Time the child's runs; False when it was killed during one."""
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return True
    benchmark.group = entry.cell.group
    try:
        child.run()
        benchmark.pedantic(child.run, rounds=RUNS)
    except Killed:
        _reset(benchmark)
        return False
    return True


def _reset(benchmark: Any) -> None:
    """Let the fixture time once more: the rounds of a killed child are not the cell's.

    Private to pytest-benchmark, which is why pyproject caps its version.
    """
    if benchmark.stats is not None:
        benchmark._add_stats.__self__.remove(benchmark.stats)
    benchmark._mode, benchmark.stats, benchmark.has_error = None, None, False


class Child:
    """A process that holds one cell; it says `ready` with its facts, then runs once for each line it reads."""

    def __init__(self, cell: Cell, checked: bool) -> None:
        pipe = subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the child)
        self._process = subprocess.Popen(
            self._command(cell, checked),
            stdin=pipe,
            stdout=pipe,
            stderr=self._errors,
            text=True,
            cwd=home.ROOT,
            env=home.for_child(),
            bufsize=1,
        )
        self.facts: dict[str, Any] = {}

    @staticmethod
    def _command(cell: Cell, checked: bool) -> list[str]:
        words = json.dumps({"cell": dataclasses.asdict(cell), "check": checked})
        return [sys.executable, "-m", f"{__package__}.maxtok_child", words]

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe:
                pipe.close()

    def start(self) -> bool:
        """Wait until it is ready; False when it is gone for want of memory.

        Raises:
          AssertionError: its numerics are wrong.
          ChildProcessError: it failed in another way.
        """
        try:
            answer = self._answer()
        except Killed:
            return False
        if "error" in answer:
            raise AssertionError(answer["error"])
        self.facts = answer
        return True

    def run(self) -> None:
        """One run to the end. Raises Killed, or ChildProcessError where it failed in another way."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        except OSError:
            pass  # It is gone; the end of its output says how.
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {}
        if line and "out_of_memory" not in answer:
            return answer
        code = self._process.wait()
        # A signal: the system's killer, or the abort of a library whose allocation failed.
        if line or code < 0:
            raise Killed
        self._errors.seek(0)
        said = "".join(self._errors.readlines()[-LAST_LINES:])
        raise ChildProcessError(f"the process of the cell ended with {code}; it said last:\n{said}")
