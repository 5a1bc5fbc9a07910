"""The verb `growth`: what a token costs chunked as tokens grow, in time and in temp bytes, in turns in one run."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from . import figures, turns
from .cell import DTYPES, Cell

TOKENS = (4096, 8192, 16384, 32768, 65536)
EXPERTS, TOP_K = 8, 2


@dataclasses.dataclass(frozen=True)
class Point:
    """One number of tokens of a series.

    Attributes:
      cell: its id.
      tokens: in the batch.
      ms, least_ms: of a call, the median and the minimum.
      over, least_over: a token's time over that of the series' first point, of the medians and of the minima.
      temp_bytes: that the program needs beyond arguments and output.
      turns: how many.
    """

    cell: str
    tokens: int
    ms: float
    least_ms: float
    over: float
    least_over: float
    temp_bytes: int
    turns: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    turns.add_arguments(parser)


def cells() -> list[Cell]:
    """All points of the four series: both dtypes, forward and train step, in the form that keeps nothing."""
    from .grid import CHUNKED, DONATED

    return [
        Cell(
            *("layer", CHUNKED, dtype, tokens, EXPERTS, TOP_K, op),
            keep_elems=None if op == "forward" else 0,
        )
        for dtype in DTYPES
        for op in DONATED
        for tokens in TOKENS
    ]


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 for a fault."""
    return turns.run(args, "growth", _steps(args), figures.growth)


def _steps(args: argparse.Namespace) -> Iterator[tuple[list[Point], list[str]]]:
    series: dict[tuple[str, str], list[Cell]] = {}
    for cell in turns.wanted(args, cells()):
        series.setdefault((cell.dtype, cell.op), []).append(cell)
    for its in series.values():
        points = measure(its, args.rounds, np.random.default_rng())
        yield points, table(points)


def measure(series: Sequence[Cell], rounds: int, rng: np.random.Generator) -> list[Point]:
    """Time the cells of one series in turns, in random order; the first is what others are over."""
    from .program import program

    ready = {cell: program(cell) for cell in series}
    for its in ready.values():
        its.call()
    seconds = turns.take({cell: turns.timed(its.call) for cell, its in ready.items()}, rounds, rng)
    middle = {cell: float(np.median(values)) for cell, values in seconds.items()}
    least = {cell: min(values) for cell, values in seconds.items()}
    first = series[0]
    return [
        Point(
            cell.id,
            cell.tokens,
            middle[cell] * 1e3,
            least[cell] * 1e3,
            middle[cell] / middle[first] * first.tokens / cell.tokens,
            least[cell] / least[first] * first.tokens / cell.tokens,
            ready[cell].compiled.bytes.temp,
            rounds,
        )
        for cell in series
    ]


def table(points: Sequence[Point]) -> list[str]:
    """One series: time a token against the first point's, and temp bytes with what each further token adds."""
    out = [points[0].cell, "  tokens        ms   a token (min)   temp MiB   bytes a token more"]
    before = points[0]
    for point in points:
        more = (point.temp_bytes - before.temp_bytes) / max(point.tokens - before.tokens, 1)
        out.append(
            f"{point.tokens:8} {point.ms:9.1f}  x{point.over:.3f} ({point.least_over:.3f}) "
            f"{point.temp_bytes / 2**20:10.2f} {more:10.1f}"
        )
        before = point
    return out
