"""The verb `upgrade`: one source under two JAX versions, Pythons or sets of XLA flags, cell by cell."""

import argparse
import functools
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from . import atomic, comparison, home, installed, markdown, pin, report, turns, upgrade_table, verdict_json
from .errors import BenchError
from .gate import limits
from .gate.verdict import Verdict
from .upgrade_contest import Under, compare, workers

SIDES = ("from", "to")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    text = {
        "from": 'requirements, as pip takes them: "jax==0.10.2" (default: the JAX at hand)',
        "to": "those that are held against it (default: the same JAX)",
    }
    for side in SIDES:
        parser.add_argument(f"--{side}", dest=f"{side}_spec", metavar="SPEC", default="", help=text[side])
    for side in SIDES:
        parser.add_argument(f"--{side}-python", metavar="EXE", help="its interpreter (default: this one)")
    parser.add_argument("--from-xla-flags", metavar="FLAGS", default="", help="added to XLA_FLAGS")
    parser.add_argument(
        "--to-xla-flags", "--xla-flags", metavar="FLAGS", default="", help="added to XLA_FLAGS"
    )
    parser.add_argument("--grid", default="default", help="smoke, default or published (default: default)")
    parser.add_argument("--only", help="cells whose id holds this, * and ? as in a shell")
    parser.add_argument(
        "--gate-seconds", type=float, default=5.0, help="most seconds for the pairs of a cell (default: 5)"
    )
    parser.add_argument("--cores", type=int, help="physical cores to pin to (default: all)")
    parser.add_argument(
        "--reports", type=Path, default=turns.REPORTS, help="folder of reports (default: reports)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0, 1 (wrong numbers), 10 to 12 as the gate, or 2 for a fault."""
    try:
        sides = asked(args)
        start = functools.partial(workers, sides, pin.choose(args.cores))
        with tempfile.TemporaryDirectory() as folder, start() as pair:
            verdict = compare(
                pair,
                start,
                grid=args.grid,
                only=args.only,
                budget_s=args.gate_seconds,
                settings=limits.read(home.settings(home.ROOT)),
                folder=Path(folder),
            )
        return publish(args.reports, verdict)
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2


def asked(args: argparse.Namespace) -> tuple[Under, Under]:
    """Both sides, their environments made. Raises BenchError where they are the same, or cannot be had."""
    specs = {side: tuple(shlex.split(getattr(args, f"{side}_spec"))) for side in SIDES}
    flags = {side: _dashed(getattr(args, f"{side}_xla_flags")) for side in SIDES}
    pythons = {side: _program(side, getattr(args, f"{side}_python")) for side in SIDES}
    specs["to"] = specs["to"] or specs["from"]
    for side, spec in specs.items():
        if any(word.startswith("-") for word in spec):
            raise BenchError(f'--{side}={" ".join(spec)!r} must be requirements such as "jax==0.12.0.1"')
    if len({(specs[side], pythons[side], flags[side]) for side in SIDES}) == 1:
        raise BenchError(
            "both sides are the same; give --to jax==VERSION, --to-python EXE or --xla-flags FLAGS"
        )
    # Another interpreter has packages of its own, so the JAX at hand is installed for it too.
    at_hand = tuple(f"{name}=={installed.version(name)}" for name in ("jax", "jaxlib"))
    made = []
    for side in SIDES:
        spec = specs[side] or (at_hand if pythons[side] != sys.executable else ())
        python = str(installed.interpreter(spec, pythons[side])) if spec else pythons[side]
        made.append(Under(side, python, flags[side], bool(spec)))
    return made[0], made[1]


def _program(side: str, given: str | None) -> str:
    """The interpreter's full path."""
    if given is None:
        return sys.executable
    found = shutil.which(given)
    if found is None:
        raise BenchError(f"--{side}-python={given!r} is no program; give the path of a Python")
    return os.path.abspath(found)  # noqa: PTH100 (a link into an environment must stay one)


def _dashed(flags: str) -> str:
    """XLA's flags, spelled with dashes as XLA_FLAGS wants them."""
    return " ".join(flag if flag.startswith("-") else f"--{flag}" for flag in shlex.split(flags))


def publish(reports: Path, verdict: Verdict) -> int:
    """Print the table and the verdict, and write `upgrade.json` and `upgrade.md`; returns the exit code."""
    code = comparison.exit_code(verdict)
    word = upgrade_table.word(verdict, code)
    print("\n".join([*upgrade_table.lines(verdict), "", *report.summary(verdict), word]))
    text = f"{upgrade_table.markdown(verdict)}\n\n**{word}**\n\n{markdown.text(verdict, code)}"
    verdict_json.write(reports / "upgrade.json", verdict, code)
    atomic.write(reports / "upgrade.md", text.encode())
    return code
