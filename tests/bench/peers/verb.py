"""The verb `peers`: ours beside capacity, dense, ragged_dot, tokamax and torch, in turns on the same inputs."""

import argparse
import dataclasses
import importlib.util
import sys

import numpy as np

from .. import pin, turns
from ..errors import BenchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    turns.add_arguments(parser)
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory of each arm")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 2 for a fault. An arm that fails is told, and the others go on."""
    try:
        missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if missing:
            raise BenchError(f"{' and '.join(missing)} cannot be imported; run it by: tox run -e peers")
        cores = pin.choose(args.cores)
        from . import table
        from .contest import hold, sides
        from .shapes import cells

        wanted, found = turns.wanted(args, cells()), []
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
                document = [{"id": c.id, "arms": [dataclasses.asdict(r) for r in rs]} for c, rs in found]
                turns.write(args.reports / "peers.json", cores, args.rounds, document)
        print("\n".join(table.summary(found)))
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0
