"""The verb `verify`: is every stored file what its manifest says?"""

import argparse
from pathlib import Path

from . import baseline, store
from .gate.verdict import INTEGRITY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--baselines", type=Path, default=baseline.ROOT, help="folder of the baselines")


def run(args: argparse.Namespace) -> int:
    """Prints each fault, each note, and their counts. Returns 0, or 11 where there is a fault."""
    faults, notes = store.verify(args.baselines)
    for kind, lines in (("fault", faults), ("note", notes)):
        for line in lines:
            print(f"{kind}: {line}")
    print(f"{args.baselines}: faults {len(faults)}, notes {len(notes)}")
    return INTEGRITY if faults else 0
