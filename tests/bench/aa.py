"""The verb `aa`: identical code against itself through all tiers, in fresh processes; every alarm counts."""

import argparse
import sys
from typing import Any

from . import proof
from .errors import BenchError

COMPARED = ("unchanged", "improved", "inconclusive", "regressed", "missing", "wrong")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    proof.add_arguments(parser)
    parser.add_argument("--grid", default="aa", help="aa (cells of 1 to 30 ms) or default (default: aa)")


def run(args: argparse.Namespace) -> int:
    """Returns 0, 1 where a run found a regression, 2 for a fault."""
    try:
        log = proof.Log(args.work / "aa.jsonl")
        root = proof.record(args.work, args.grid)
        with proof.load(args.load):
            for number in range(args.runs):
                code, verdict = proof.gate(args.work, root, args.grid, *OPTIONS)
                cells = {cell["id"]: _seen(cell) for cell in verdict.get("cells", ())}
                log.append(grid=args.grid, load=args.load, code=code, cells=cells)
                counts = {name: _count([cells], name) for name in COMPARED}
                said = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "no verdict"
                print(f"[{number + 1}/{args.runs}] exit {code}: {said}", flush=True)
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    lines = log.read()
    print("\n".join(table(lines, log.machine)))
    alarms = sum(_count([line["cells"]], "regressed") for line in lines)
    return 1 if alarms or any(not line["cells"] for line in lines) else 0


OPTIONS = ("--all-programs", "--bench-seconds=0.1", "--gate-seconds=10")


def table(lines: list[dict[str, Any]], machine: str) -> list[str]:
    """Counts of all runs so far, quiet and under load, with the 95 % bound of the alarm rate."""
    out = [
        f"identical code, {machine}",
        "grid     load   runs  compared  regressed  improved  inconclusive  alarms at most (95 %)",
    ]
    for grid, load in sorted({(line["grid"], line["load"]) for line in lines}):
        of_row = [line["cells"] for line in lines if (line["grid"], line["load"]) == (grid, load)]
        compared = sum(_count(of_row, name) for name in COMPARED)
        alarms = _count(of_row, "regressed")
        _, most = proof.interval(alarms, compared)
        out.append(
            f"{grid:8} {'busy' if load else 'quiet':6} {len(of_row):4} {compared:9} {alarms:10} "
            f"{_count(of_row, 'improved'):9} {_count(of_row, 'inconclusive'):13}  {most:.2%}"
        )
    return out


def _seen(cell: dict[str, Any]) -> list[Any]:
    timing = cell.get("timing") or {}
    return [cell["status"], timing.get("ratio"), timing.get("pairs"), timing.get("confirmed")]


def _count(runs: list[dict[str, list[Any]]], status: str) -> int:
    return sum(seen[0] == status for cells in runs for seen in cells.values())
