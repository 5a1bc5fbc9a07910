"""The verb `power`: faults put into the measured code, one a run; what the gate makes of each is counted."""

import argparse
import sys
from typing import Any

from . import proof
from .errors import BenchError
from .faults import FAULTS, Fault


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    proof.add_arguments(parser)
    parser.add_argument("--faults", help=f"of: {', '.join(FAULTS)} (default: all)".replace("%", "%%"))


def run(args: argparse.Namespace) -> int:
    """Returns 0, 1 where a fault that has to be caught in every cell was not, 2 for a fault of the run."""
    try:
        names = args.faults.split(",") if args.faults else list(FAULTS)
        unknown = [name for name in names if name not in FAULTS]
        if unknown:
            raise BenchError(f"--faults={unknown[0]!r} is unknown; there are: {', '.join(FAULTS)}")
        log = proof.Log(args.work / "power.jsonl")
        root = proof.record(args.work, "aa")
        with proof.load(args.load):
            for number in range(args.runs):
                for name in names:
                    found = _one(args, root, name)
                    log.append(fault=name, load=args.load, **found)
                    print(
                        f"[{number + 1}/{args.runs}] {name}: exit {found['code']}, {found['counts']}",
                        flush=True,
                    )
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    lines = log.read()
    print("\n".join(table(lines, log.machine)))
    return 1 if _missed(lines) else 0


def _one(args: argparse.Namespace, root: Any, name: str) -> dict[str, Any]:
    fault = FAULTS[name]
    options = ["-p", f"{__package__}.faults", f"--fault={name}", *fault.options]
    options += ["--bench-seconds=0.1", "--gate-seconds=10"]
    code, verdict = proof.gate(args.work, root, "aa", *options)
    hit = [cell["status"] for cell in verdict.get("cells", ()) if fault.concerns(cell["id"])]
    counts = {status: hit.count(status) for status in sorted(set(hit))}
    counts |= {"fault of the run": len(verdict["faults"])} if verdict.get("faults") else {}
    return {"code": code, "counts": counts}


def table(lines: list[dict[str, Any]], machine: str) -> list[str]:
    """For each fault: cells, how many were caught, with the 95 % interval, and what the rest was called."""
    out = [
        f"injected faults, {machine}",
        "fault                    load   cells  caught   share (95 %)        the rest",
    ]
    for load in (False, True):
        for name, fault in FAULTS.items():
            counts = _sum(lines, name, load)
            if not counts:
                continue
            caught, cells = _caught(fault, counts), sum(counts.values())
            low, high = proof.interval(caught, cells)
            rest = {status: n for status, n in counts.items() if status not in fault.caught_as}
            said = ", ".join(f"{n} {status}" for status, n in rest.items())
            out.append(
                f"{name:24} {'busy' if load else 'quiet':6} {cells:5} {caught:7} "
                f"{caught / cells:6.1%} ({low:.1%} to {high:.1%})  {said}"
            )
    return out


def _sum(lines: list[dict[str, Any]], name: str, load: bool) -> dict[str, int]:
    total: dict[str, int] = {}
    for line in lines:
        if (line["fault"], line["load"]) == (name, load):
            for status, n in (line["counts"] or {"no verdict": 1}).items():
                total[status] = total.get(status, 0) + n
    return total


def _caught(fault: Fault, counts: dict[str, int]) -> int:
    return sum(n for status, n in counts.items() if status in fault.caught_as)


def _missed(lines: list[dict[str, Any]]) -> list[str]:
    """Faults that have to be caught in every cell and were not (time under 20 % is counted, not demanded)."""
    found = []
    for name, fault in FAULTS.items():
        for load in (False, True):
            counts = _sum(lines, name, load)
            if fault.always and counts and _caught(fault, counts) < sum(counts.values()):
                found.append(name)
    return found
