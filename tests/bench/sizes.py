"""The verb `sizes`: chunked's automatic sizes against fixed ones, in time and temp bytes, in turns in one run."""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from . import figures, turns
from .cell import DTYPES, Cell
from .gate import signed_rank

SHAPES = (
    *((1024, 8, 2, 1024), (4096, 8, 2, 1024), (16384, 8, 2, 1024), (4096, 64, 2, 1024)),
    *((4096, 128, 8, 256), (4096, 60, 4, 704)),
)
"""(tokens, experts, top_k, d_hidden); the last two are fine-grained."""
CHUNKS = (64, 128, 256, 512, 1024)
SLABS = (2**16, 2**18)
WITHIN = 1.05
"""The automatic choice may take so much of the best fixed chunk's time."""


@dataclasses.dataclass(frozen=True)
class Size:
    """One choice of sizes in one cell.

    Attributes:
      cell: its id, with the values that were set.
      auto: the id of the cell whose automatic choice it is beside.
      chunk, slab_elems: what was set; both None is the automatic choice.
      ms, least_ms: of a call, the median and the minimum.
      cost: of the automatic choice over this one, the median of the rounds' ratios; `low` and `high` are its 95 %
        bounds (one-sided each).
      temp_bytes: that the program needs beyond arguments and output.
      frontier: whether no other choice is both faster (median) and smaller.
      turns: how many.
    """

    cell: str
    auto: str
    chunk: int | None
    slab_elems: int | None
    ms: float
    least_ms: float
    cost: float
    low: float
    high: float
    temp_bytes: int
    frontier: bool
    turns: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    turns.add_arguments(parser)


def cells() -> list[Cell]:
    """SHAPES in both dtypes, forward and train step."""
    from .grid import CHUNKED, DONATED

    return [
        Cell("layer", CHUNKED, dtype, tokens, experts, top_k, op, d_hidden=d_hidden)
        for (tokens, experts, top_k, d_hidden), dtype, op in itertools.product(SHAPES, DTYPES, DONATED)
    ]


def choices(cell: Cell) -> list[Cell]:
    """The cell as it is, then with each chunk and each slab that differ in it."""
    rows = cell.tokens * cell.top_k
    slabs = [slab for slab in SLABS if CHUNKS[0] <= slab // cell.d_hidden <= rows]
    return [
        cell,
        *(dataclasses.replace(cell, chunk=chunk) for chunk in CHUNKS if chunk <= rows),
        *(dataclasses.replace(cell, slab_elems=slab) for slab in slabs),
    ]


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 for a fault."""
    return turns.run(args, "sizes", _steps(args), figures.sizes)


def _steps(args: argparse.Namespace) -> Iterator[tuple[list[Size], list[str]]]:
    for cell in turns.wanted(args, cells()):
        found = measure(cell, args.rounds, np.random.default_rng())
        yield found, table(found)


def measure(cell: Cell, rounds: int, rng: np.random.Generator) -> list[Size]:
    """Time the choices of one cell in turns, in random order within each round."""
    from .program import program

    ready = {choice: program(choice) for choice in choices(cell)}
    for its in ready.values():
        its.call()
    seconds = turns.take({choice: turns.timed(its.call) for choice, its in ready.items()}, rounds, rng)
    middle = {choice: float(np.median(values)) for choice, values in seconds.items()}
    temp = {choice: its.compiled.bytes.temp for choice, its in ready.items()}
    # Turns of one round lie side by side: their ratio is steadier than that of two medians.
    logs = {choice: np.log(np.divide(seconds[cell], values)) for choice, values in seconds.items()}
    return [
        Size(
            choice.id,
            cell.id,
            choice.chunk,
            choice.slab_elems,
            middle[choice] * 1e3,
            min(seconds[choice]) * 1e3,
            math.exp(np.median(logs[choice])),
            math.exp(signed_rank.lower_bound(logs[choice])),
            math.exp(signed_rank.upper_bound(logs[choice])),
            temp[choice],
            not any(middle[o] < middle[choice] and temp[o] < temp[choice] for o in ready),
            rounds,
        )
        for choice in ready
    ]


def best(found: Sequence[Size]) -> Size:
    """The fixed chunk that the automatic choice costs most over."""
    return max((size for size in found if size.chunk), key=lambda size: size.cost)


def table(found: Sequence[Size]) -> list[str]:
    """The choices of one cell; a star marks the frontier of time against temp bytes."""
    out = [found[0].auto, "  choice                    ms (min)            auto over it            temp MiB"]
    for size in found:
        name = "auto"
        if size.chunk:
            name = f"chunk {size.chunk}"
        elif size.slab_elems:
            name = f"slab_elems {size.slab_elems}"
        out.append(
            f"{'*' if size.frontier else ' '} {name:18} {size.ms:10.2f} ({size.least_ms:8.2f})"
            f"   x{size.cost:.3f} ({size.low:.3f}..{size.high:.3f})  {size.temp_bytes / 2**20:10.2f}"
        )
    fixed = best(found)
    how = "within" if fixed.high <= WITHIN else "over" if fixed.low > WITHIN else "perhaps over"
    out.append(
        f"  auto is {how} {WITHIN - 1:.0%} of chunk {fixed.chunk}, the best fixed one: x{fixed.cost:.3f}"
    )
    return out
