"""The verb `peers`: ours beside capacity, dense, ragged_dot, tokamax and torch, in turns on the same inputs."""

import argparse
import dataclasses
import fnmatch
import importlib.util
import json
import sys
from pathlib import Path

from .. import atomic, environment, pin
from ..errors import BenchError
from .shapes import cells

REPORTS = Path(__file__).resolve().parents[3] / "reports"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--only", default="", help="cells whose id holds this, * and ? as in a shell")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each arm (default: 15)")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory of each arm")
    parser.add_argument("--cores", type=int, help="physical cores to pin to (default: all)")
    parser.add_argument(
        "--reports", type=Path, default=REPORTS, help="folder for peers.json (default: reports)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 for a fault. An arm that fails is told, and the others go on."""
    try:
        missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if missing:
            raise BenchError(f"{' and '.join(missing)} cannot be imported; run it by: tox run -e peers")
        if args.rounds < 1:
            raise BenchError(f"--rounds={args.rounds} must be a positive integer")
        cores = pin.choose(args.cores)
        wanted = [cell for cell in cells() if fnmatch.fnmatchcase(cell.id, f"*{args.only}*")]
        if not wanted:
            raise BenchError(f"--only={args.only!r} holds no cell; the first is {cells()[0].id}")
        import numpy as np

        from . import table
        from .contest import hold, sides

        found = []
        with sides(cores) as workers:
            for number, cell in enumerate(wanted, 1):
                results = hold(
                    cell,
                    workers,
                    rounds=args.rounds,
                    cores=cores,
                    memory=not args.no_memory,
                    rng=np.random.default_rng(),
                )
                found.append((cell, results))
                print(f"[{number}/{len(wanted)}]", *table.lines(cell, results), sep="\n", flush=True)
                document = {
                    "schema": 1,
                    "environment": environment.describe() | {"pinned": cores},
                    "rounds": args.rounds,
                    "cells": [
                        {"id": c.id, "arms": [dataclasses.asdict(result) for result in r]} for c, r in found
                    ],
                }
                atomic.write(args.reports / "peers.json", json.dumps(document, indent=1).encode())
        print("\n".join(table.summary(found)))
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0
