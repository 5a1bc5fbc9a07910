"""What the verbs that time side by side share: arguments, the choice of cells, turns in random order, the file.

Nothing here imports jax: a process pins itself first.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from . import atomic, environment, figures, home, pin
from .cell import Cell
from .errors import BenchError

REPORTS = home.ROOT / "reports"
Name = TypeVar("Name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of such a verb."""
    parser.add_argument("--only", default="", help="cells whose id holds this, * and ? as in a shell")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default: 15)")
    parser.add_argument("--cores", type=int, help="physical cores to pin to (default: all)")
    parser.add_argument(
        "--reports", type=Path, default=REPORTS, help="folder for the figures (default: reports)"
    )
    parser.add_argument("--no-draw", action="store_true", help="write the figures' numbers alone, no drawing")


def run(
    args: argparse.Namespace,
    name: str,
    steps: Iterable[tuple[Sequence[Any], list[str]]],
    draw: Callable[[Sequence[Any]], Any],
) -> int:
    """Pin this process, then take the steps one by one: print what each says, and write all that was found so far.

    Args:
      args: of the verb.
      name: of the file with the numbers (NAME.json), and of the drawing (NAME.svg).
      steps: dataclasses that were found, and the lines that say it. A generator begins after the pinning, so it
        may import jax.
      draw: from all that was found to a figure; one of `figures`.

    Returns 0, or 2 for a fault.
    """
    found: list[Any] = []
    try:
        if not args.no_draw:
            figures.require()
        cores = pin.pin(args.cores)
        for values, said in steps:
            print("\n".join(said), flush=True)
            found += values
            write(args.reports / f"{name}.json", cores, args.rounds, [*map(dataclasses.asdict, found)])
        if not args.no_draw:
            atomic.write(args.reports / f"{name}.svg", figures.svg(draw(found)))
            print(f"drawn: {args.reports / name}.svg")
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0


def wanted(args: argparse.Namespace, cells: Sequence[Cell]) -> list[Cell]:
    """The cells that the arguments leave. Raises BenchError where there is none, or no round."""
    if args.rounds < 1:
        raise BenchError(f"--rounds={args.rounds} must be a positive integer")
    found = [cell for cell in cells if cell.matches(args.only)]
    if not found:
        raise BenchError(f"--only={args.only!r} holds no cell; the first is {cells[0].id}")
    return found


def take(
    timed: Mapping[Name, Callable[[], float]],
    rounds: int,
    rng: np.random.Generator,
    every: Mapping[Name, int] | None = None,
) -> dict[Name, list[float]]:
    """What each of `timed` says (seconds), one value a round, in random order within each round.

    `every` names those that take one turn in so many rounds.
    """
    names, every = list(timed), every or {}
    found: dict[Name, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for index in rng.permutation(len(names)):
            name = names[index]
            if number % every.get(name, 1) == 0:
                found[name].append(timed[name]())
    return found


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    """The call, telling its seconds."""

    def seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return seconds


def write(path: Path, cores: list[int] | None, rounds: int, cells: list[dict[str, Any]]) -> None:
    """Write what was found so far, and where."""
    where = environment.describe() | {"pinned": cores}
    document = {"schema": 1, "environment": where, "rounds": rounds, "cells": cells}
    atomic.write(path, json.dumps(document, indent=1).encode())
