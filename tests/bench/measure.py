"""Measuring: numerics first, then the cell through pytest-benchmark's own fixture, an anchor around each round."""

import math
import time
from typing import Any

import numpy as np

from . import anchor as anchors
from .cell import Cell
from .numerics import Numerics, check
from .program import Program, program
from .record import record

ROUNDS = (5, 200)
"""Fewest and most rounds of a cell, whatever its time budget."""
SHORTEST_S = 0.005
"""A round takes at least this long: shorter cells are repeated within it (pytest-benchmark's iterations)."""


def measure(cell: Cell, benchmark: Any, seconds: float, checked: bool) -> dict[str, Any] | None:
    """Assert a cell, then time it; its record goes into `benchmark.extra_info` and is returned.

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
    compiled = program(cell)
    anchor = anchors.Anchor(cell.dtype)
    rounds, inner = _warm_up(compiled, anchor, seconds)
    anchor.seconds.clear()
    anchor()
    benchmark.group = cell.group
    benchmark.pedantic(compiled.call, teardown=anchor, rounds=rounds, iterations=inner, warmup_rounds=0)
    return finish(cell, benchmark, numerics, compiled, anchor, inner)


def finish(
    cell: Cell, benchmark: Any, numerics: Numerics | None, compiled: Program, anchor: Any, inner: int
) -> dict[str, Any]:
    """Write the record of a timed cell into `extra_info`."""
    durations = np.asarray(benchmark.stats.stats.data)
    paired = anchor.paired(len(durations))
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


def _warm_up(compiled: Program, anchor: Any, seconds: float) -> tuple[int, int]:
    """Run until warm; returns the rounds that fit in the budget and the repetitions within a round."""
    timed = []
    for _ in range(2):
        start = time.perf_counter()
        compiled.call()
        timed.append(time.perf_counter() - start)
    anchor()
    cell_s = min(timed)
    inner = max(1, min(100, math.ceil(SHORTEST_S / cell_s)))
    fitting = int(seconds / (cell_s * inner + min(anchor.seconds)))
    return max(ROUNDS[0], min(ROUNDS[1], fitting)), inner
