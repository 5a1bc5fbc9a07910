"""The verb `comment`: the one comment that a pull request gets, and the request that posts or updates it.

The comment is found again by a marker that Markdown hides, and by its author: anybody may write the marker. Only
the standard library is imported: where this runs, nothing is installed.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import github
from .errors import BenchError

MARKER = "<!-- moe-bench: the verdict -->"
AUTHOR = "github-actions[bot]"
MOST = 65_000
"""GitHub takes 65,536 characters."""
ARTIFACT = "moe-bench-"
"""What the action puts before the name of a run."""
VERDICT, EXIT_CODE = "verdict.md", "exit-code.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--reports",
        type=Path,
        default=Path("reports"),
        help="folder with a folder of reports for each run, or the reports of one run (default: reports)",
    )
    parser.add_argument("--number", required=True, help="of the pull request")
    parser.add_argument("--body", type=Path, required=True, help="file to write: what the request sends")
    parser.add_argument("--author", default=AUTHOR, help=f"who wrote the comment before (default: {AUTHOR})")


def run(args: argparse.Namespace) -> int:
    """Prints the method and the path for `gh api`. Standard input: `gh api` of the comments. Returns 0, or 2."""
    try:
        repository = os.environ.get("GITHUB_REPOSITORY")
        if not repository:
            raise BenchError("GITHUB_REPOSITORY is not set; set it to OWNER/NAME")
        old = find(github.read(sys.stdin), args.author)
        args.body.write_text(json.dumps({"body": body(args.reports, os.environ)}), encoding="utf-8")
    except (BenchError, OSError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    issue = f"repos/{repository}/issues"
    print(f"POST {issue}/{args.number}/comments" if old is None else f"PATCH {issue}/comments/{old}")
    return 0


def find(comments: Sequence[dict[str, Any]], author: str) -> int | None:
    """The id of the comment that was posted before, or None."""
    for comment in comments:
        login = (comment.get("user") or {}).get("login")
        if login == author and str(comment.get("body") or "").startswith(MARKER):
            return int(comment["id"])
    return None


def body(reports: Path, environ: Mapping[str, str]) -> str:
    """The marker, the verdict of each run under its name, and where the whole reports are."""
    runs = sorted({path.parent for name in (VERDICT, EXIT_CODE) for path in reports.glob(f"**/{name}")})
    if not runs:
        runs = [reports]
    tail = _whence(environ)
    share = (MOST - len(MARKER) - len(tail)) // len(runs)
    texts = [
        cut(_of_run(run, run.name.removeprefix(ARTIFACT) if len(runs) > 1 else ""), share - 2) for run in runs
    ]
    return "\n\n".join((MARKER, *texts, tail)) + "\n"


def cut(text: str, most: int) -> str:
    """The text, or as many of its lines as fit, with what it had opened closed again."""
    if len(text) <= most:
        return text
    more = "\n\n*and more, in the job's summary*"
    kept = text[: most - len(more) - len("\n\n</details>")].rpartition("\n")[0]
    closed = "\n\n</details>" if kept.count("<details>") > kept.count("</details>") else ""
    return kept + closed + more


def _of_run(run: Path, name: str) -> str:
    named = f"{name}: " if name else ""
    try:
        text = (run / VERDICT).read_text("utf-8").strip()
    except OSError:
        try:
            code = f"exit code {(run / EXIT_CODE).read_text('utf-8').strip()}"
        except OSError:
            code = "it left no report"
        return f"## {named}No verdict\n\nThe run ended before it could judge ({code}); its log says why."
    return f"## {named}{text.removeprefix('## ')}"


def _whence(environ: Mapping[str, str]) -> str:
    server, repository = environ.get("GITHUB_SERVER_URL"), environ.get("GITHUB_REPOSITORY")
    run, commit = environ.get("GITHUB_RUN_ID"), environ.get("MOE_BENCH_COMMIT", "")[:12]
    where = (
        f"[This run]({server}/{repository}/actions/runs/{run}) has the reports as artifacts" if run else ""
    )
    return "; ".join(text for text in (f"Commit {commit}" if commit else "", where) if text)
