"""The verb `roofline`: how near chunked comes to its bound, and to a plain matmul, in turns within one run."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import figures, turns
from .cell import DTYPES, Cell

SHAPES = ((1024, 8), (4096, 8), (16384, 8), (4096, 64))
OURS, MATMUL, COPY = "ours", "matmul", "copy"
IN_BOUND = ("activation", "Adam")


@dataclasses.dataclass(frozen=True)
class Reached:
    """What one cell reached; all values are medians (or, with `least`, minima) of the same turns.

    Attributes:
      cell: its id.
      ours_ms, bound_ms: of a call; the bound holds Adam's bytes for a train step.
      over_bound: ours over the bound, of the medians; `least_over_bound` of the minima.
      piece: rows of the piece size that made the best bound.
      of_matmul: useful flops a second over those of the best plain matmul of that dtype.
      parts_ms: what the parts of ours take alone: routing, gather and scatter, activation, Adam.
      turns: how many.
    """

    cell: str
    ours_ms: float
    bound_ms: float
    over_bound: float
    least_over_bound: float
    piece: int
    of_matmul: float
    parts_ms: dict[str, float]
    turns: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    turns.add_arguments(parser)


def cells() -> list[Cell]:
    """SHAPES in both dtypes, forward and train step."""
    from .grid import CHUNKED, DONATED

    return [
        Cell("layer", CHUNKED, dtype, tokens, experts, 2, op)
        for tokens, experts in SHAPES
        for dtype in DTYPES
        for op in DONATED
    ]


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 for a fault."""
    return turns.run(args, "roofline", _steps(args), figures.roofline)


def _steps(args: argparse.Namespace) -> Iterator[tuple[list[Reached], list[str]]]:
    for cell in turns.wanted(args, cells()):
        reached = reach(cell, args.rounds, np.random.default_rng())
        yield [reached], lines(reached)


def reach(cell: Cell, rounds: int, rng: np.random.Generator) -> Reached:
    """Time a cell, its bounds, a plain matmul and a plain copy in turns, in random order within each round."""
    from . import bound
    from .anchor import FLOPS, compiled
    from .parts import parts
    from .program import program

    bounds = bound.bounds(cell)
    copy, copied = bound.copying()
    calls: dict[Any, Callable[[], Any]] = {OURS: program(cell).call, MATMUL: compiled(cell.dtype), COPY: copy}
    calls |= {its.piece: its.call for its in bounds}
    beside = parts(cell)
    calls |= beside
    for call in calls.values():
        call()
    seconds = turns.take({name: turns.timed(call) for name, call in calls.items()}, rounds, rng)
    middle = {name: float(np.median(values)) for name, values in seconds.items()}
    least = {name: min(values) for name, values in seconds.items()}
    best = min((its.piece for its in bounds), key=middle.__getitem__)
    adam = bound.adam_bytes(cell) / copied
    limit = {
        kind: values[best] + adam * values[COPY] for kind, values in (("middle", middle), ("least", least))
    }
    return Reached(
        cell.id,
        middle[OURS] * 1e3,
        limit["middle"] * 1e3,
        middle[OURS] / limit["middle"],
        least[OURS] / limit["least"],
        best,
        (cell.useful_flops / middle[OURS]) / (FLOPS / least[MATMUL]),
        {name: middle[name] * 1e3 for name in beside},
        rounds,
    )


def lines(reached: Reached) -> list[str]:
    """One cell in words, with a bar of where its time goes."""
    out = [
        f"{reached.cell}: {reached.ours_ms:.1f} ms, bound {reached.bound_ms:.1f} ms (pieces of {reached.piece}), "
        f"x{reached.over_bound:.3f} of it ({reached.least_over_bound:.3f} of the minima, {reached.turns} turns), "
        f"{reached.of_matmul:.0%} of a plain matmul"
    ]
    for name, value in where(reached).items():
        bar = "#" * round(40 * max(value, 0) / reached.ours_ms)
        out.append(f"  {name:32} {value:9.2f} ms  {bar}")
    return out


def where(reached: Reached) -> dict[str, float]:
    """Where the time of a cell goes, in ms. Activation and Adam's bytes are in the bound already."""
    within = [name for name in reached.parts_ms if name in IN_BOUND]
    beside = {name: value for name, value in reached.parts_ms.items() if name not in IN_BOUND}
    found = {"bound": reached.bound_ms}
    found |= {f"  of it {name}": reached.parts_ms[name] for name in within}
    found |= beside
    found["rest: ragged tails, stores"] = reached.ours_ms - reached.bound_ms - sum(beside.values())
    return found
