"""A contest: two workers, one for each side, whose arms take turns on one cell."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import turns
from ..cell import Cell
from ..child import Child, ChildFailed
from ..inputs import make_inputs
from ..numerics import RAGGED_TOLERANCE, reference, rel_err, tolerance
from .shapes import OURS, Arm, arms

SHORTEST_S = 0.005
"""One turn takes at least this long: shorter calls are repeated within it."""
SLOW = 1.5
"""An arm that takes so many times as long as ours has fewer turns, as many times fewer as it takes longer."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one arm did in a cell.

    Attributes:
      arm: its name.
      seconds: of a call, one value a turn; none where it was wrong, or could not run.
      rel_err_out: of y against dense in float32; None where it could not run.
      kept: share of the assignments that it computed: capacity drops some.
      peak_bytes: resident bytes beyond the loaded inputs, the most of a process of its own; None if not asked.
      fault: why it took no part.
    """

    arm: str
    seconds: tuple[float, ...] = ()
    rel_err_out: float | None = None
    kept: float = 1.0
    peak_bytes: int | None = None
    fault: str | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def least(self) -> float:
        return min(self.seconds)


class Worker(Child):
    """The process of one side; use it with `with`."""

    def __init__(self, side: str, cores: list[int] | None) -> None:
        # Threads that wait for work must not spin while the other side runs.
        threads = {"OMP_NUM_THREADS": str(len(cores))} if cores else {}
        environment = os.environ | threads | {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
        super().__init__(side, f"{__package__}.worker", [side, json.dumps(cores)], environment=environment)


def hold(
    cell: Cell,
    workers: dict[str, Worker],
    *,
    rounds: int,
    cores: list[int] | None,
    memory: bool,
    rng: np.random.Generator,
) -> list[Result]:
    """Let all arms of a cell take turns, in random order within each round, after their outputs were compared.

    Args:
      cell: what to run; `impl` does not matter.
      workers: side -> its worker.
      rounds: turns of each arm; slow ones have fewer, at least one.
      cores: of the processes whose memory is measured.
      memory: also run each arm in a process of its own, for its peak.
      rng: the order.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = write_inputs(cell, folder / "inputs.npz")
        for worker in workers.values():
            worker.ask("load", dataclasses.asdict(cell), str(inputs))
        found = {}
        for arm in arms(cell):
            found[arm.name] = _admitted(cell, arm, workers[arm.side], folder / "y.npy")
        racing = [arm for arm in arms(cell) if found[arm.name].fault is None]
        seconds = _turns(racing, workers, rounds, rng)
        if memory:
            for arm in racing:
                peak = _peak(cell, arm, inputs, cores)
                found[arm.name] = dataclasses.replace(found[arm.name], peak_bytes=peak)
    return [dataclasses.replace(result, seconds=tuple(seconds.get(n, ()))) for n, result in found.items()]


def write_inputs(cell: Cell, path: Path) -> Path:
    """The cell's parameters and x as float32, which holds what each dtype holds."""
    params, x, _ = make_inputs(cell)
    arrays = {**params._asdict(), "x": x}
    as_float32: dict[str, Any] = {name: np.asarray(array.astype("float32")) for name, array in arrays.items()}
    np.savez(path, **as_float32)
    return path


def _admitted(cell: Cell, arm: Arm, worker: Worker, path: Path) -> Result:
    """An arm whose output is right and that is ready to run, or why it is not."""
    its = cell if arm.impl is None else dataclasses.replace(cell, impl=arm.impl)
    try:
        worker.ask("output", arm.name, str(path))
        right = reference(its)
        error = rel_err(np.load(path), right.y)
        # Other people's products sum in another order, as XLA's ragged_dot does: torch is at 8.3e-7 in float32.
        limit = tolerance(its).out if arm.impl else max(tolerance(its).out, RAGGED_TOLERANCE.out)
        if not error <= limit:
            return Result(arm.name, rel_err_out=error, fault=f"rel_err_out={error:.1e} is over {limit:.1e}")
        worker.ask("prepare", arm.name)
        worker.ask("time", arm.name, 1)  # The first run is a warm-up, and may fail.
    except ChildFailed as fault:
        return Result(arm.name, fault=str(fault))
    return Result(arm.name, rel_err_out=error, kept=1 - right.dropped / max(cell.tokens * cell.top_k, 1))


def _turns(
    racing: list[Arm], workers: dict[str, Worker], rounds: int, rng: np.random.Generator
) -> dict[str, list[float]]:
    timed, first = {}, {}
    for arm in racing:
        ask = functools.partial(workers[arm.side].ask, "time", arm.name)
        first[arm.name] = min(ask(1), ask(1))  # One stray value would cost an arm its turns.
        timed[arm.name] = functools.partial(ask, max(1, math.ceil(SHORTEST_S / first[arm.name])))
    ours = first.get(OURS, math.inf)
    every = {name: min(max(1, int(its / (SLOW * ours))), rounds) for name, its in first.items()}
    return turns.take(timed, rounds, rng, every)


def _peak(cell: Cell, arm: Arm, inputs: Path, cores: list[int] | None) -> int | None:
    """Bytes by which two runs in a fresh process raise its resident memory at most, compiling left out."""
    with Worker(arm.side, cores) as worker:
        worker.ask("load", dataclasses.asdict(cell), str(inputs))
        worker.ask("prepare", arm.name)
        before = worker.ask("peak")
        worker.ask("time", arm.name, 2)
        after = worker.ask("peak")
    return after["peak"] - before["now"] if before and after else None


@contextlib.contextmanager
def sides(cores: list[int] | None) -> Iterator[dict[str, Worker]]:
    """One worker a side."""
    with Worker("jax", cores) as ours, Worker("torch", cores) as theirs:
        yield {"jax": ours, "torch": theirs}
