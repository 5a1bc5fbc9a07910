"""The verb `ab`: two revisions of the source, both lowered by this JAX, their programs compared side by side.

Each revision is checked out into a git worktree and lowered there by its own suite; this process compiles both
programs of every cell that differs and races them, as the gate does with a stored program.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import atomic, home, pin, turns
from .errors import BenchError

HERE = "."
UNTESTED = 125
"""Exit code of a revision that cannot be tested: `git bisect run` skips it."""
MAIN = ("origin/main", "origin/master", "main", "master")
CONTROL_EVERY = 8


class Untested(BenchError):
    """A revision does not exist, has no suite or does not build."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One revision, lowered: its name as given, its short id, and the folder of its programs."""

    name: str
    lowered: Any
    folder: Path

    def program(self, identity: str) -> Any:
        """The program of a cell."""
        from . import stored_program

        path = self.folder / f"{self.lowered.programs[identity]}.bin"
        return stored_program.unpack(path.read_bytes(), f"{self.name}: {identity}")

    def path(self, identity: str) -> Path:
        return self.folder / f"{self.lowered.programs[identity]}.bin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "revisions",
        nargs="*",
        metavar="REV",
        help="the base, and what is held against it: a commit, branch or tag; '.' is the working tree with its "
        "uncommitted changes (default: the merge base with the main branch, and '.')",
    )
    parser.add_argument("--grid", default="default", help="smoke, default or published (default: default)")
    parser.add_argument("--only", help="cells whose id holds this, * and ? as in a shell")
    parser.add_argument(
        "--cell", help="the one cell with this id; inconclusive ends with 125, for git bisect"
    )
    parser.add_argument(
        "--gate-seconds", type=float, default=20.0, help="most seconds for the pairs of a cell"
    )
    parser.add_argument("--cores", type=int, help="physical cores to pin to (default: all)")
    parser.add_argument(
        "--reports", type=Path, default=turns.REPORTS, help="folder of reports (default: reports)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0, 1 (wrong numbers), 10 to 12 as the gate, 125 for a revision that cannot be tested, else 2."""
    try:
        names = list(args.revisions)
        if len(names) > 2:
            raise BenchError(f"{len(names)} revisions are given; give a base, and one to hold against it")
        names = [base_of(), HERE] if not names else [*names, HERE][:2]
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            arms: list[Arm] = []
            for number, name in enumerate(names):
                tree = stack.enter_context(worktree(name, folder / f"tree{number}"))
                unlike = arms[0].folder if arms else None
                arms.append(lower(name, tree, folder / f"programs{number}", args, unlike))
            if not any(arm.lowered.cells for arm in arms):
                words = f"--cell={args.cell}" if args.cell else f"--only={args.only}"
                raise BenchError(
                    f"{words} is in neither revision's grid {args.grid}; pytest --collect-only lists it"
                )
            verdict = compare(arms[0], arms[1], args, pin.pin(args.cores))
        code = exit_code(verdict, args.cell is not None)
        publish(args.reports, verdict, code)
        return code
    except Untested as fault:
        print(f"error: {fault}", file=sys.stderr)
        return UNTESTED
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2


def base_of() -> str:
    """The merge base of HEAD with the branch that a pull request goes to, or with the main branch.

    Raises Untested where there is none.
    """
    target = os.environ.get("GITHUB_BASE_REF")
    wanted = (f"origin/{target}",) if target else MAIN
    for branch in wanted:
        found = _git("merge-base", "HEAD", branch)
        if found:
            return found
    raise Untested(
        f"there is no merge base of HEAD with {' or '.join(wanted)}; name the base (python -m {__package__} ab "
        "REV), and in CI fetch the history (fetch-depth: 0)"
    )


@contextlib.contextmanager
def worktree(name: str, path: Path) -> Iterator[Path]:
    """The revision's files; the working tree itself for '.'."""
    if name == HERE:
        yield home.ROOT
        return
    commit = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if not commit:
        raise Untested(
            f"git knows no revision {name!r}; give a commit, branch or tag (git fetch brings others')"
        )
    if _git("worktree", "add", "--detach", "--force", str(path), commit) is None:
        raise Untested(f"git cannot check out {name} ({commit}) into a worktree; see git worktree list")
    try:
        yield path
    finally:
        _git("worktree", "remove", "--force", str(path))


def lower(name: str, tree: Path, folder: Path, args: argparse.Namespace, unlike: Path | None) -> Arm:
    """Lower a revision's cells by its own suite, in a process of its own.

    Raises Untested where it has none, does not build, or another `moe` than its own is imported.
    """
    from . import lowered

    folder.mkdir()
    if not (tree / Path(lowered.__file__).relative_to(home.ROOT)).exists():
        raise Untested(f"{name} has no tests/bench that lowers its cells; take a later revision")
    command = [sys.executable, "-m", lowered.__name__, "--folder", str(folder), "--grid", args.grid]
    command += [f"--only={args.only}"] if args.only else []
    command += [f"--cell={args.cell}"] if args.cell else []
    command += [f"--unlike={unlike}"] if unlike else []
    done = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise Untested(f"{name} does not build: its cells cannot be lowered: {last[0]}")
    found = lowered.read(folder)
    if not Path(found.moe).resolve().is_relative_to(tree.resolve()):
        raise Untested(
            f"{name} was lowered with moe from {found.moe}, not from its own tree; uninstall that moe"
        )
    return Arm(name, found, folder)


def compare(base: Arm, head: Arm, args: argparse.Namespace, cores: list[int] | None) -> Any:
    """The verdict on what both have in common; the rest is listed, and the verdict partial."""
    from . import comparison
    from .gate import limits
    from .gate.confirm import confirm

    settings = limits.read(home.settings(home.ROOT))
    ours, theirs = head.lowered.programs, base.lowered.programs
    common = [identity for identity in head.lowered.cells if identity in ours and identity in theirs]
    changed = [identity for identity in common if ours[identity] != theirs[identity]]
    seen = {}
    for number, identity in enumerate(common, 1):
        seen[identity] = _seen(
            base, head, identity, args.gate_seconds, len(changed), limits.slowest(settings, identity),
            identity in changed and changed.index(identity) % CONTROL_EVERY == 0,
        )  # fmt: skip
        if identity in changed:
            print(f"[{number}/{len(common)}] {identity}", file=sys.stderr, flush=True)

    def again(identity: str) -> Any:
        return confirm(
            head.lowered.cells[identity],
            head.program(identity),
            base.path(identity),
            cores=cores,
            budget_s=args.gate_seconds,
            limit=limits.slowest(settings, identity),
        )

    return comparison.conclude(_side(base), _side(head), seen, again, settings)


def _side(arm: Arm) -> Any:
    from .comparison import Side

    its = arm.lowered
    return Side(arm.name, its.environment, frozenset(its.cells), its.faults, its.skipped)


def _seen(
    base: Arm, head: Arm, identity: str, budget_s: float, cells: int, limit: float, controlled: bool
) -> Any:
    """What is seen of one cell; bytes and flops of both programs where they differ."""
    from . import stored_program
    from .cell import Cell
    from .comparison import Seen
    from .gate.evidence import Evidence
    from .gate.examine import CONTROL_SHARE, figures
    from .gate.paired import ClockFault, race
    from .program import MIB, arguments_of

    new = head.program(identity)
    before, today = (_record(arm.lowered, identity) for arm in (base, head))
    evidence = Evidence(new.digest, base.lowered.programs[identity], program=new)
    if evidence.same:
        return Seen(evidence, before, today)
    old = base.program(identity)
    compiled = [stored_program.compile_stored(its, identity) for its in (old, new)]
    for record, its in zip((before, today), compiled, strict=True):
        record |= figures(its) | {"xla_temp_mb": its.bytes.temp / MIB, "compile_s": its.seconds}
    evidence = dataclasses.replace(evidence, figures=figures(compiled[0]), asked_by="code")
    if (old.inputs, old.donated) != (new.inputs, new.donated):
        unlike = dataclasses.replace(evidence, not_paired="the two programs take other arguments")
        return Seen(unlike, before, today)
    arguments = arguments_of(Cell(**head.lowered.cells[identity]))
    before_call, today_call = (functools.partial(arguments.run, its.run) for its in compiled)
    race_here = functools.partial(race, cells=cells, limit=limit, rng=np.random.default_rng())
    try:
        if controlled:
            control = race_here(today_call, today_call, budget_s=CONTROL_SHARE * budget_s)
            evidence = dataclasses.replace(evidence, control=control)
        pairs = race_here(today_call, before_call, budget_s=budget_s)
    except ClockFault as fault:
        return Seen(dataclasses.replace(evidence, not_paired=str(fault)), before, today)
    return Seen(dataclasses.replace(evidence, pairs=pairs), before, today)


def _record(lowered: Any, identity: str) -> dict[str, Any]:
    from .cell import Cell

    return Cell(**lowered.cells[identity]).fields() | {"program": lowered.programs.get(identity)}


def exit_code(verdict: Any, bisecting: bool) -> int:
    """The comparison's; what cannot be told is no answer for a bisection."""
    from . import comparison
    from .gate.verdict import INCONCLUSIVE

    code = comparison.exit_code(verdict)
    return UNTESTED if bisecting and code == INCONCLUSIVE else code


def publish(reports: Path, verdict: Any, code: int) -> None:
    """Print the comparison, and write `ab.json` and `ab.md`."""
    from . import markdown, report, verdict_json

    print("\n".join(report.lines(verdict)))
    verdict_json.write(reports / "ab.json", verdict, code)
    atomic.write(reports / "ab.md", markdown.text(verdict, code).encode())


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=home.ROOT, capture_output=True, text=True, check=True, timeout=300
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
