"""Measuring: numerics first, then the cell through pytest-benchmark's own fixture, an anchor around each round."""

import math
import time
from typing import Any, NamedTuple

import numpy as np

from . import anchor as anchors
from .cell import Cell
from .numerics import Numerics, check
from .program import Compiled, Program, program
from .record import record

ROUNDS = (5, 200)
"""Fewest and most rounds of a cell, whatever its time budget."""
SHORTEST_S = 0.005
"""A round takes at least this long: shorter cells are repeated within it (pytest-benchmark's iterations)."""


class Measured(NamedTuple):
    """A timed cell: its record, and its program, still at hand."""

    record: dict[str, Any]
    program: Program


def measure(cell: Cell, benchmark: Any, seconds: float, checked: bool) -> Measured | None:
    """Assert a cell, then time it; its record goes into `benchmark.extra_info`.

    Args:
      cell: what to run.
      benchmark: pytest-benchmark's fixture; where it is disabled the cell is asserted only, and None returned.
      seconds: budget for the timed rounds.
      checked: False skips the numerics (`--no-check`).

    Raises:
      WrongNumerics, Retraced: before anything is timed or stored.
    """
    numerics = check(cell) if checked else None
    if benchmark.disabled:
        # The fixture must be called, or pytest-benchmark warns of an unused one.
        benchmark.pedantic(lambda: None)
        return None
    ready = program(cell)
    anchor = anchors.Anchor(cell.dtype)
    rounds, inner = _warm_up(ready, anchor, seconds)
    anchor.seconds.clear()
    anchor()
    benchmark.group = cell.group
    benchmark.pedantic(ready.call, teardown=anchor, rounds=rounds, iterations=inner, warmup_rounds=0)
    return Measured(finish(cell, benchmark, numerics, ready.compiled, anchor, inner), ready)


def finish(
    cell: Cell, benchmark: Any, numerics: Numerics | None, compiled: Compiled, anchor: Any, inner: int
) -> dict[str, Any]:
    """Write the record of a timed cell into `extra_info`."""
    durations = np.asarray(benchmark.stats.stats.data)
    paired = anchor.paired(len(durations))
    with np.errstate(divide="ignore", invalid="ignore"):  # Of a clock that stood still; the gate names it.
        fractions = (cell.useful_flops / durations) / (anchors.FLOPS / paired)
    values = record(
        cell,
        numerics,
        compiled,
        durations_ms=durations * 1000,
        inner=inner,
        anchor_ms=float(np.median(paired)) * 1000,
        gemm_fraction=float(np.median(fractions)),
    )
    benchmark.extra_info.update(values)
    return values


def _warm_up(ready: Program, anchor: Any, seconds: float) -> tuple[int, int]:
    """Run until warm; returns the rounds that fit in the budget and the repetitions within a round."""
    timed = []
    for _ in range(2):
        start = time.perf_counter()
        ready.call()
        timed.append(time.perf_counter() - start)
    anchor()
    cell_s = min(timed) if min(timed) > 0 else SHORTEST_S  # A clock may stand still, or go back.
    inner = max(1, min(100, math.ceil(SHORTEST_S / cell_s)))
    fitting = int(seconds / (cell_s * inner + min(anchor.seconds)))
    return max(ROUNDS[0], min(ROUNDS[1], fitting)), inner
