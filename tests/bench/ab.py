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

from . import atomic, pin, turns
from .errors import BenchError

ROOT = Path(__file__).resolve().parents[2]
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
        yield ROOT
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
    if not (tree / Path(lowered.__file__).relative_to(ROOT)).exists():
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
    from .baseline import Baseline
    from .gate import limits, timing
    from .gate.confirm import NotConfirmed, confirm
    from .gate.judge import Run, judge

    settings = limits.read(ROOT / "pyproject.toml")
    ours, theirs = head.lowered, base.lowered
    known = [identity for identity in ours.cells if identity in theirs.programs]
    common = [identity for identity in known if identity in ours.programs]
    changed = [i for i in common if ours.programs[i] != theirs.programs[i]]
    stored: dict[str, Any] = {i: {"extra_info": _record(theirs, i)} for i in known}
    records = {i: _record(ours, i) for i in common}
    evidence: dict[str, Any] = {}
    for number, identity in enumerate(common):
        evidence[identity], figures, before = _evidence(
            base, head, identity, args.gate_seconds, len(changed), limits.slowest(settings, identity),
            identity in changed and changed.index(identity) % CONTROL_EVERY == 0,
        )  # fmt: skip
        records[identity] |= figures
        stored[identity]["extra_info"] |= before
        if identity in changed:
            print(f"[{number + 1}/{len(common)}] {identity}", file=sys.stderr, flush=True)
    suspects = timing.suspects(evidence, settings)
    confirmed: dict[str, Any] = {}
    for identity in suspects:
        try:
            confirmed[identity] = confirm(
                ours.cells[identity],
                head.program(identity),
                base.path(identity),
                cores=cores,
                budget_s=args.gate_seconds,
                limit=limits.slowest(settings, identity),
            )
        except NotConfirmed as fault:
            confirmed[identity] = str(fault)
    faults = {identity: why for identity, why in ours.faults.items() if identity in theirs.programs}
    found = judge(
        Baseline(Path(base.name), theirs.environment, stored, theirs.skipped),
        Run(
            declared=common,
            records=records,
            skipped={i: why for i, why in ours.skipped.items() if i in theirs.skipped},
            wrong=faults,
            environment=ours.environment,
            evidence=evidence,
            suspects=suspects,
            confirmed=confirmed,
            controls=tuple(seen.control for seen in evidence.values() if seen.control),
            subset=True,
        ),
        settings,
    )
    cells = tuple(
        dataclasses.replace(c, reasons=(faults[c.id],)) if c.id in faults else c for c in found.cells
    )
    alone = [
        f"only {arm.name} has {', '.join(rest)}"
        for arm, other in ((base, head), (head, base))
        if (rest := sorted(arm.lowered.cells.keys() - other.lowered.cells.keys()))
    ]
    return dataclasses.replace(found, cells=cells, partial=bool(alone), notes=(*found.notes, *alone))


def _evidence(
    base: Arm, head: Arm, identity: str, budget_s: float, cells: int, limit: float, controlled: bool
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """What is seen of one cell, and the bytes and flops of both programs where they differ."""
    from . import stored_program
    from .cell import Cell
    from .gate.evidence import Evidence
    from .gate.examine import CONTROL_SHARE, figures
    from .gate.paired import ClockFault, race
    from .program import MIB, arguments_of

    new = head.program(identity)
    seen = Evidence(new.digest, base.lowered.programs[identity], program=new)
    if seen.same:
        return seen, {}, {}
    old = base.program(identity)
    compiled = [stored_program.compile_stored(its, identity) for its in (new, old)]
    today, before = (
        figures(its) | {"xla_temp_mb": its.bytes.temp / MIB, "compile_s": its.seconds} for its in compiled
    )
    seen = dataclasses.replace(seen, figures=figures(compiled[1]), asked_by="code")
    if (old.inputs, old.donated) != (new.inputs, new.donated):
        return dataclasses.replace(seen, not_paired="the two programs take other arguments"), today, before
    arguments = arguments_of(Cell(**head.lowered.cells[identity]))
    calls = [functools.partial(arguments.run, its.run) for its in compiled]
    rng = np.random.default_rng()
    try:
        if controlled:
            control = race(
                calls[0], calls[0], budget_s=CONTROL_SHARE * budget_s, cells=cells, limit=limit, rng=rng
            )
            seen = dataclasses.replace(seen, control=control)
        pairs = race(*calls, budget_s=budget_s, cells=cells, limit=limit, rng=rng)
    except ClockFault as fault:
        return dataclasses.replace(seen, not_paired=str(fault)), today, before
    return dataclasses.replace(seen, pairs=pairs), today, before


def _record(lowered: Any, identity: str) -> dict[str, Any]:
    from .cell import Cell

    return Cell(**lowered.cells[identity]).fields() | {"program": lowered.programs.get(identity)}


def exit_code(verdict: Any, bisecting: bool) -> int:
    """The gate's, after 1 for wrong numbers; what cannot be told is no answer for a bisection."""
    from .gate.verdict import INCONCLUSIVE

    if verdict.count("wrong"):
        return 1
    code: int = verdict.exit_code(strict=False)
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
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
