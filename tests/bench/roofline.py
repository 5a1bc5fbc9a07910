"""The verb `roofline`: how near chunked comes to its bound, and to a plain matmul, in turns within one run."""

import argparse
import dataclasses
import fnmatch
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import atomic, environment, pin
from .cell import Cell
from .errors import BenchError

REPORTS = Path(__file__).parents[2] / "reports"
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
    parser.add_argument("--only", default="", help="cells whose id holds this, * and ? as in a shell")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default: 15)")
    parser.add_argument("--cores", type=int, help="physical cores to pin to (default: all)")
    parser.add_argument(
        "--reports", type=Path, default=REPORTS, help="folder for roofline.json (default: reports)"
    )


def cells() -> list[Cell]:
    """SHAPES in both dtypes, forward and train step."""
    from .grid import CHUNKED

    return [
        Cell("layer", CHUNKED, dtype, tokens, experts, 2, op)
        for tokens, experts in SHAPES
        for dtype in ("float32", "bfloat16")
        for op in ("forward", "train_step_donated")
    ]


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 for a fault."""
    try:
        if args.rounds < 1:
            raise BenchError(f"--rounds={args.rounds} must be a positive integer")
        wanted = [cell for cell in cells() if fnmatch.fnmatchcase(cell.id, f"*{args.only}*")]
        if not wanted:
            raise BenchError(f"--only={args.only!r} holds no cell; the first is {cells()[0].id}")
        cores = pin.pin(args.cores)
        found: list[Reached] = []
        for cell in wanted:
            found.append(reach(cell, args.rounds, np.random.default_rng()))
            print("\n".join(lines(found[-1])), flush=True)
            document = {
                "schema": 1,
                "environment": environment.describe() | {"pinned": cores},
                "cells": [dataclasses.asdict(reached) for reached in found],
            }
            atomic.write(args.reports / "roofline.json", json.dumps(document, indent=1).encode())
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0


def reach(cell: Cell, rounds: int, rng: np.random.Generator) -> Reached:
    """Time a cell, its bounds, a plain matmul and a plain copy in turns, in random order within each round."""
    from . import bound
    from .anchor import FLOPS, compiled
    from .program import program

    bounds = bound.bounds(cell)
    copy, copied = bound.copying()
    calls: dict[Any, Callable[[], Any]] = {OURS: program(cell).call, MATMUL: compiled(cell.dtype), COPY: copy}
    calls |= {its.piece: its.call for its in bounds}
    calls |= parts(cell)
    seconds = turns(calls, rounds, rng)
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
        {name: middle[name] * 1e3 for name in parts(cell)},
        rounds,
    )


def turns(
    calls: dict[Any, Callable[[], Any]], rounds: int, rng: np.random.Generator
) -> dict[Any, list[float]]:
    """Seconds of each call, one value a round, after one to warm up."""
    names = list(calls)
    for call in calls.values():
        call()
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for index in rng.permutation(len(names)):
            start = time.perf_counter()
            calls[names[index]]()
            seconds[names[index]].append(time.perf_counter() - start)
    return seconds


@functools.lru_cache(maxsize=1)
def parts(cell: Cell) -> dict[str, Callable[[], Any]]:
    """The parts of ours that are no product, each alone on the cell's arrays."""
    import jax
    import jax.numpy as jnp

    import moe
    from moe.chunked import automatic_chunk
    from moe.dispatch import dispatch
    from moe.experts import swiglu
    from moe.grouped import for_each_piece, gather, ladder, padded, scatter_add, take
    from moe.router import route
    from moe.train import default_optimizer

    from .inputs import make_inputs

    params, x, config = make_inputs(cell)
    sizes = ladder(automatic_chunk(cell.tokens, config))

    def routing(params: moe.Params, x: jax.Array) -> Any:
        return dispatch(route(params.router, x, config), config.experts)

    rows = jax.jit(routing)(params, x)

    def moving(x: jax.Array, rows: Any) -> jax.Array:
        rows = padded(rows, sizes[-1])

        def expert(index: jax.Array, y: jax.Array) -> jax.Array:
            def piece(size: int, first: jax.Array, left: jax.Array, y: jax.Array) -> jax.Array:
                its = take(rows, x.shape[0], size, first, left)
                return scatter_add(y, its, gather(x, its).astype(jnp.float32))

            return for_each_piece(rows, index, sizes, piece, y)

        moved: jax.Array = jax.lax.fori_loop(0, config.experts, expert, jnp.zeros(x.shape, jnp.float32))
        return moved

    hidden = jnp.ones((sizes[-1], cell.d_hidden), jnp.float32)
    pieces = -(-cell.tokens * cell.top_k // sizes[-1])

    def activating(hidden: jax.Array) -> jax.Array:
        def piece(_: int, carry: jax.Array) -> jax.Array:
            return swiglu(carry, carry + 1).astype(cell.dtype).astype(jnp.float32)

        done: jax.Array = jax.lax.fori_loop(0, pieces, piece, hidden)
        return done

    made: dict[str, Callable[[], Any]] = {
        "routing": _compiled(routing, params, x),
        "gather and scatter": _compiled(moving, x, rows),
        "activation": _compiled(activating, hidden),
    }
    if cell.op != "forward":
        import optax

        state = default_optimizer().init(params)

        def adam(params: moe.Params, grads: moe.Params, state: Any) -> Any:
            updates, state = default_optimizer().update(grads, state, params)
            return optax.apply_updates(params, updates), state

        made["Adam"] = _compiled(adam, params, params, state)
    return made


def _compiled(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    import jax

    run = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(run(*arguments))


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
