"""Two sides of an upgrade: a worker process each, on the same cores, of which one runs while the other sleeps."""

import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import comparison, home
from .child import Child, ChildFailed
from .comparison import Seen
from .errors import BenchError
from .gate import limits
from .gate.confirm import LOOKS, NotConfirmed
from .gate.evidence import Evidence
from .gate.examine import CONTROL_EVERY, CONTROL_SHARE
from .gate.paired import ClockFault, Pairs, race_timed
from .gate.verdict import Verdict

FLAGS = "XLA_FLAGS"


@dataclasses.dataclass(frozen=True)
class Under:
    """What one side runs under.

    Attributes:
      side: from or to.
      python: its interpreter.
      flags: added to XLA_FLAGS.
      made: whether the environment was made for it; nothing of this process's path is meant for it then.
    """

    side: str
    python: str
    flags: str = ""
    made: bool = False


class SideFailed(BenchError):
    """A side answers with an error, or is gone."""

    def __init__(self, side: str, why: str) -> None:
        super().__init__(f"--{side}: {why}")
        self.side, self.why = side, why


class Worker:
    """The worker of a side: started when it is first asked, and again where it is gone; use it with `with`."""

    def __init__(self, under: Under, cores: list[int] | None) -> None:
        self.side = under.side
        # Seconds to compile are a figure: nothing may be found compiled.
        dropped = ("PYTHONHOME", "JAX_COMPILATION_CACHE_DIR", *(("PYTHONPATH",) if under.made else ()))
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        for name, separator, words in (
            ("PYTHONPATH", os.pathsep, (str(home.ROOT), environment.get("PYTHONPATH"))),
            (FLAGS, " ", (environment.get(FLAGS), under.flags)),
        ):
            if any(words):
                environment[name] = separator.join(filter(None, words))
        self._start = functools.partial(
            Child,
            f"{under.side} side's",
            f"{__package__}.upgrade_side",
            [json.dumps(cores)],
            python=under.python,
            environment=environment,
        )
        self._child: Child | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.__exit__(None, None, None)
            self._child = None

    def ask(self, *request: Any) -> Any:
        """The answer to one request. Raises SideFailed."""
        if self._child is None or not self._child.alive:
            self.__exit__()
            self._child = self._start()
        try:
            return self._child.ask(*request)
        except ChildFailed as fault:
            raise SideFailed(self.side, str(fault)) from fault

    def time(self, times: int) -> float:
        """Seconds of so many calls of its cell in a row."""
        return float(self.ask("time", times))


Start = Callable[[], contextlib.AbstractContextManager[tuple[Worker, Worker]]]


@contextlib.contextmanager
def workers(sides: tuple[Under, Under], cores: list[int] | None) -> Iterator[tuple[Worker, Worker]]:
    """A worker for each side."""
    with Worker(sides[0], cores) as old, Worker(sides[1], cores) as new:
        yield old, new


def compare(
    pair: tuple[Worker, Worker],
    start: Start,
    *,
    grid: str,
    only: str | None,
    budget_s: float,
    settings: tuple[limits.Limit, ...],
    folder: Path,
) -> Verdict:
    """The verdict on the cells that both sides have and can run.

    Args:
      pair: the workers.
      start: starts further ones, for what is suspect.
      grid, only: which cells.
      budget_s: for the pairs of a cell.
      settings: the limits in force.
      folder: for programs.

    Raises:
      BenchError: a side does not start, or no cell is left.
    """
    found = [worker.ask("begin", grid, only) for worker in pair]
    cells = found[0]["cells"]
    runnable = [i for i in cells if i in found[1]["cells"] and not any(i in its["skipped"] for its in found)]
    if not any(its["cells"] for its in found):
        raise BenchError(f"--only={only} is in no cell of grid {grid}; pytest --collect-only lists it")
    seen: dict[str, Seen] = {}
    faults: dict[str, dict[str, str]] = {worker.side: {} for worker in pair}
    unread: dict[str, str] = {}
    for number, identity in enumerate(runnable):
        print(f"[{number + 1}/{len(runnable)}] {identity}", file=sys.stderr, flush=True)
        try:
            seen[identity], why = examine(
                pair,
                cells[identity],
                folder,
                budget_s=budget_s,
                cells=len(runnable),
                limit=limits.slowest(settings, identity),
                controlled=number % CONTROL_EVERY == 0,
            )
        except SideFailed as fault:
            faults[fault.side][identity] = fault.why
            continue
        if why is not None:
            unread[identity] = why

    def again(identity: str) -> Pairs:
        return confirm(start, cells[identity], budget_s, limits.slowest(settings, identity))

    old, new = (
        comparison.Side(
            described(worker.side, its["environment"]),
            its["environment"],
            frozenset(its["cells"]),
            faults[worker.side],
            its["skipped"],
        )
        for worker, its in zip(pair, found, strict=True)
    )
    verdict = comparison.conclude(old, new, seen, again, settings, same_source=True)
    if not unread:
        return verdict
    first = next(iter(unread.values()))
    note = f"compiler drift cannot be told from lowering drift in {len(unread)} cells: {first}"
    return dataclasses.replace(verdict, notes=(*verdict.notes, note))


def described(side: str, environment: dict[str, Any]) -> str:
    """A side in words."""
    flags = f", {FLAGS} {environment['xla_flags']}" if environment["xla_flags"] else ""
    versions = ", ".join(
        f"{name} {environment[field]}"
        for name, field in (("JAX", "jax"), ("jaxlib", "jaxlib"), ("Python", "python"))
    )
    return f"{side}: {versions}{flags}"


def examine(
    pair: tuple[Worker, Worker],
    cell: dict[str, Any],
    folder: Path,
    *,
    budget_s: float,
    cells: int,
    limit: float,
    controlled: bool,
) -> tuple[Seen, str | None]:
    """What is seen of a cell on both sides, and why the one cannot read the other's program, if so.

    Raises SideFailed: the first side that cannot run it.
    """
    old, new = pair
    programs = [folder / f"{worker.side}.bin" for worker in pair]
    before, today = (worker.ask("load", cell, str(path)) for worker, path in zip(pair, programs, strict=True))
    evidence = Evidence(
        today["program"], before["program"], asked_by="all programs", unstorable=today.pop("unstorable")
    )
    before.pop("unstorable")
    why = None
    if None not in (evidence.digest, evidence.against) and not evidence.same:
        # The same program under the other compiler: what differs from `before` is the compiler's doing.
        figures = new.ask("compiled", str(programs[0]))
        why = figures.get("unreadable")
        evidence = evidence if why else dataclasses.replace(evidence, figures=figures)
    race = functools.partial(race_timed, cells=cells, limit=limit, rng=np.random.default_rng())
    try:
        if controlled:
            control = race(new.time, new.time, budget_s=CONTROL_SHARE * budget_s)
            evidence = dataclasses.replace(evidence, control=control)
        evidence = dataclasses.replace(evidence, pairs=race(new.time, old.time, budget_s=budget_s))
    except ClockFault as fault:
        evidence = dataclasses.replace(evidence, not_paired=str(fault))
    return Seen(evidence, before, today), why


def confirm(start: Start, cell: dict[str, Any], budget_s: float, limit: float) -> Pairs:
    """Race a suspect in fresh processes, with the sides swapped. Raises NotConfirmed."""
    with start() as (old, new):
        try:
            for worker in (new, old):
                worker.ask("ready", cell)
            pairs = race_timed(
                old.time, new.time, budget_s=budget_s, cells=LOOKS, limit=limit, rng=np.random.default_rng()
            )
        except (SideFailed, ClockFault) as fault:
            raise NotConfirmed(f"the fresh processes gave no answer ({fault})") from fault
    return pairs.swapped
