"""The verb `ci-options`: the pytest options of a run in CI, as one line for PYTEST_ADDOPTS.

A change may be slower or larger where somebody said so: in a trailer `Accept-slower: REASON` of one of its
commits, or by the label `accept-slower` on its pull request. Who may push commits or set labels decides that,
so a stranger's pull request is accepted by its reviewer's label, or by merging what it says in the open.

The action runs this before anything is installed, so only the standard library is imported.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import github
from .errors import BenchError

LABEL = "accept-slower"
TRAILER = "Accept-slower"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--grid", default="", help="smoke, default or published (default: the suite's own)")
    parser.add_argument("--baselines", default="", help="folder of the baselines (default: the suite's own)")
    parser.add_argument("--reports", default="reports", help="folder of reports (default: reports)")
    parser.add_argument(
        "--number",
        default="",
        help="of the pull request; its events, as `gh api --paginate repos/OWNER/NAME/issues/NUMBER/events` "
        f"prints them, are read from standard input: who set the label {LABEL}",
    )
    parser.add_argument("--no-accept", action="store_true", help="look for neither label nor trailer")


def run(args: argparse.Namespace) -> int:
    """Prints the options. Returns 0, or 2 for events that cannot be read."""
    try:
        events = github.read(sys.stdin) if args.number and not args.no_accept else []
        reason = None if args.no_accept else accepted(Path.cwd(), os.environ, args.number, events)
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    given = {
        "--grid": args.grid,
        "--baselines": args.baselines,
        "--reports": args.reports,
        "--junitxml": f"{args.reports}/junit.xml",
        "--benchmark-json": f"{args.reports}/benchmark.json",
        "--accept-slower": reason,
    }
    print(shlex.join(f"{name}={value}" for name, value in given.items() if value))
    return 0


def accepted(
    root: Path, environ: Mapping[str, str], number: str, events: Sequence[dict[str, Any]]
) -> str | None:
    """Why the change may be slower, on one line, or None: what its trailers say, else who set the label."""
    base = first(root, environ)
    if base is None:
        print(
            "::warning title=moe bench::the commits of this change are not known, so no trailer "
            f"{TRAILER} is read: check out with fetch-depth: 0",
            file=sys.stderr,
        )
    said = [] if base is None else trailers(root, base)
    return "; ".join(said) or labelled(number, events)


def first(root: Path, environ: Mapping[str, str]) -> str | None:
    """The commit that the change starts from: a merge base, or what was there before a push to a branch."""
    target = environ.get("GITHUB_BASE_REF")
    if target:
        return _git(root, "merge-base", "HEAD", f"origin/{target}")
    try:
        event = json.loads(Path(environ["GITHUB_EVENT_PATH"]).read_text("utf-8"))
        return _git(root, "merge-base", "HEAD", event["before"])
    except (KeyError, OSError, ValueError):  # Started by hand or by a clock: no change is at hand.
        return _git(root, "rev-parse", "HEAD")


def trailers(root: Path, base: str) -> list[str]:
    """The reasons of the commits after `base`, oldest first; git itself decides what a trailer is."""
    form = f"--format=%(trailers:key={TRAILER},valueonly,unfold)"
    said = _git(root, "log", "--reverse", form, f"{base}..HEAD") or ""
    reasons = [" ".join(line.split()) for line in said.splitlines()]
    return list(dict.fromkeys(reason for reason in reasons if reason))


def labelled(number: str, events: Sequence[dict[str, Any]]) -> str | None:
    """Who set the label last, where nobody took it away since."""
    last = None
    for event in events:
        if (event.get("label") or {}).get("name") == LABEL:
            last = event if event.get("event") == "labeled" else None
    if last is None:
        return None
    who = (last.get("actor") or {}).get("login") or "unknown"
    return f"label {LABEL} on pull request #{number} by {who}"


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
