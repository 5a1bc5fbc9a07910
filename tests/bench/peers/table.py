"""A contest in words: each arm of a cell, and a table of ours over the others in all cells."""

import math

from ..cell import Cell
from ..program import MIB
from .contest import Result
from .shapes import CAPACITY, OURS, TORCH


def lines(cell: Cell, results: list[Result]) -> list[str]:
    """The arms of one cell, fastest first, with ours over each (minimum and median).

    Where an arm dropped assignments, also ours over it in time for each assignment that was computed.
    """
    ours = ours_of(results)
    out = [cell.id.removeprefix(f"{cell.impl}-")]
    out.append(f"  {'arm':26} {'min ms':>9} {'median':>9}  ours/it min median  turns  error    peak MiB")
    for result in sorted(results, key=lambda r: r.median if r.seconds else math.inf):
        if not result.seconds:
            out.append(f"  {result.arm:26} {result.fault or 'took no turn'}")
            continue
        least, middle = ratios(ours, result) if ours else (math.nan, math.nan)
        each = f"  kept {result.kept:.1%}: {least * result.kept:.3f} {middle * result.kept:.3f} for each kept"
        peak = "" if result.peak_bytes is None else f"{result.peak_bytes / MIB:10.1f}"
        out.append(
            f"  {result.arm:26} {result.least * 1e3:9.2f} {result.median * 1e3:9.2f}  {least:11.3f} {middle:6.3f}"
            f"  {len(result.seconds):5}  {result.rel_err_out:.1e} {peak}{each if result.kept < 1 else ''}"
        )
    return out


def summary(found: list[tuple[Cell, list[Result]]]) -> list[str]:
    """A Markdown table, a line a cell: ours over the best torch variant and the others, minimum / median.

    Capacity's is of the time for each assignment that was computed.
    """
    names = (TORCH, CAPACITY, "dense", "jax.lax.ragged_dot", "tokamax.ragged_dot")
    out = ["| ours over the best of each, minimum / median | " + " | ".join(names) + " |"]
    out.append("|---" * (len(names) + 1) + "|")
    for cell, results in found:
        ours, values = ours_of(results), []
        for name in names:
            its = [r for r in results if r.seconds and r.arm.startswith(name)]
            best = min(its, key=lambda r: r.median, default=None)
            both = [ratio * best.kept for ratio in ratios(ours, best)] if ours and best else []
            values.append(" / ".join(f"{ratio:.2f}" for ratio in both))
        out.append(f"| {cell.id.removeprefix(f'{cell.impl}-')} | " + " | ".join(values) + " |")
    return out


def ours_of(results: list[Result]) -> Result | None:
    """Our arm, if it ran."""
    return next((result for result in results if result.arm == OURS and result.seconds), None)


def ratios(ours: Result, other: Result) -> tuple[float, float]:
    """Ours over the other: of the minima, and of the medians."""
    return ours.least / other.least, ours.median / other.median
