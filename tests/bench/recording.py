"""The verb `baseline`: run the grid against the accepted programs, and store it only if all of it may stand."""

import argparse
import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import atomic, baseline, environment, home, revision, store
from .errors import BaselineError, BenchError, NoGrid
from .gate.drift import COMPILED_BY, TIMED_BY
from .gate.verdict import REGRESSED

REPORTS = home.ROOT / "reports"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--reason", required=True, help="why the numbers change; kept in the history")
    parser.add_argument("--grid", default="default", help="default or published (default: default)")
    parser.add_argument("--baselines", type=Path, default=baseline.ROOT, help="folder of the baselines")
    parser.add_argument("--only", help="update the cells whose id holds this, keep the others' records")
    parser.add_argument(
        "--accept-slower",
        metavar="REASON",
        help="why cells may be slower or larger than their accepted programs; without it they are refused",
    )
    parser.add_argument("--allow-dirty", action="store_true", help="record a tree with uncommitted changes")
    parser.add_argument("--resume", action="store_true", help="go on from the newest journal")
    parser.add_argument(
        "--reports", type=Path, default=REPORTS, help="folder of reports and journals (default: reports)"
    )
    parser.add_argument("options", nargs="*", help="further options for pytest, after --")


def run(args: argparse.Namespace) -> int:
    """Returns pytest's exit code where the run failed, 10 where cells are refused, 2 for other faults, else 0."""
    try:
        for name in ("reason", "accept_slower"):
            if getattr(args, name) is not None and not getattr(args, name).strip():
                raise BaselineError(f"--{name.replace('_', '-')} is empty; say why the numbers change")
        source = revision.describe(home.ROOT)
        if source.changed and not args.allow_dirty:
            raise BaselineError(
                f"{', '.join(source.changed[:3])} {'is' if len(source.changed) == 1 else 'are'} not committed; "
                "commit first, so that the history names what was measured, or give --allow-dirty"
            )
        described = environment.describe()
        folder = store.check_writable(args.baselines, described)
        with atomic.lock(folder):
            return _update(args, source, described)
    except BenchError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2


def _update(args: argparse.Namespace, source: revision.Revision, described: dict[str, Any]) -> int:
    try:
        before = baseline.find(args.baselines, described, args.grid)
    except NoGrid:
        before = None
    if args.only:
        _check_keeps(args.only, before, described)
    with tempfile.TemporaryDirectory() as name:
        reports = Path(name)
        code, document, verdict = _run(args, reports, before.path if before else None)
        if code:
            print(f"not recorded: the run ended with {code}", file=sys.stderr)
            return code
        programs = {path.stem: path.read_bytes() for path in (reports / "programs").glob("*.bin")}
    block = document["moe_bench"]
    _check_whole(block, document)
    statuses = {cell["id"]: cell for cell in verdict.get("cells", ())}
    refused = [cell for cell in statuses.values() if cell["status"] in ("regressed", "inconclusive")]
    if refused and args.accept_slower is None:
        for cell in refused:
            print(f"{cell['status']}: {cell['id']}: {'; '.join(cell['reasons'])}", file=sys.stderr)
        print(
            f"not recorded: {len(refused)} cells are worse than their accepted programs, or cannot be told "
            'to be as good; if that is meant, say why: --accept-slower "..."',
            file=sys.stderr,
        )
        return REGRESSED
    entries = {entry["extra_info"]["id"]: entry for entry in document["benchmarks"]}
    for identity, entry in entries.items():
        entry["extra_info"]["revision"] = source.id
        entry["extra_info"]["accepted"] = _accepted(identity, entry, statuses, before)
    if args.only and before is not None:
        _keep(document, before)
    block["reason"] = args.reason
    entry_of_history = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "by": source.author,
        "revision": source.id,
        "uncommitted": list(source.changed),
        "reason": args.reason,
        "accept_slower": args.accept_slower,
        "grid": args.grid,
        "only": args.only,
        "environment": described,
        "changes": _changes(entries, statuses, before),
    }
    print(f"recorded {store.save(args.baselines, document, args.grid, programs, entry_of_history)}")
    return 0


def _run(
    args: argparse.Namespace, reports: Path, compared_with: Path | None
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Run the grid; returns the exit code (0 where the gate alone objects), the run's document, its verdict."""
    report, verdict = reports / "run.json", args.reports / "verdict.json"
    command = [sys.executable, "-m", "pytest", *home.ARGUMENTS, "--grid", args.grid]
    command += [f"--benchmark-json={report}", f"--save-programs={reports / 'programs'}"]
    command += [f"--only={args.only}"] if args.only else []
    command += ["--resume"] if args.resume else []
    command += [f"--baselines={args.baselines}", f"--reports={args.reports}", *args.options]
    if compared_with:
        verdict.unlink(missing_ok=True)
        command += ["--against=accepted", "--benchmark-compare"]
    code = subprocess.run(command, check=False).returncode
    if not compared_with:
        return code, baseline.read(report) if not code else {}, {}
    with contextlib.suppress(OSError):
        found: dict[str, Any] = json.loads(verdict.read_text("utf-8"))
        # A cell that left the grid leaves the baseline too: that is what an update is for.
        judged = code == found["exit_code"] and code in (0, 10, 11, 12)
        judged = judged and found["baseline"] == str(compared_with)  # Else it is another run's.
        return 0 if judged else code, baseline.read(report), found
    return code or 1, {}, {}


def _check_whole(block: dict[str, Any], document: dict[str, Any]) -> None:
    """Raise BaselineError unless every declared cell was measured or skipped, and the machine was quiet."""
    there = {entry["extra_info"].get("id") for entry in document["benchmarks"]}
    there |= {entry["id"] for entry in block["skipped"]}
    lost = [identity for identity in block["declared"] if identity not in there]
    if lost:
        raise BaselineError(f"the run was partial, {lost[0]} did not run; a baseline holds the whole grid")
    if block["noise"]:
        raise BaselineError(
            f"the machine is too noisy: a program against itself took {block['noise'][0]}; close what else "
            "runs and record again, without --resume"
        )


def _accepted(
    identity: str,
    entry: dict[str, Any],
    statuses: Mapping[str, dict[str, Any]],
    before: baseline.Baseline | None,
) -> str | None:
    """The program that later updates are timed against: it moves only on an improvement or when told to."""
    its = entry["extra_info"].get("program")
    old = before.records.get(identity, {}).get("extra_info", {}).get("accepted") if before else None
    kept = statuses.get(identity, {}).get("status") == "unchanged" and old is not None
    return old if kept else its


def _check_keeps(only: str, before: baseline.Baseline | None, described: dict[str, Any]) -> None:
    """Raise BaselineError unless there are records that may stand beside today's."""
    if before is None:
        raise BaselineError(f"--only={only!r} keeps records, and there are none yet; record the whole grid")
    differing = environment.differing(described, before.environment, (*COMPILED_BY, *TIMED_BY))
    if differing:
        raise BaselineError(
            f"--only={only!r} keeps records of another {', '.join(differing)} beside today's; record the whole "
            "grid"
        )


def _keep(document: dict[str, Any], before: baseline.Baseline) -> None:
    """Put the records that this update does not touch back in, as they were."""
    today = {entry["extra_info"]["id"] for entry in document["benchmarks"]}
    skipped = {entry["id"] for entry in document["moe_bench"]["skipped"]}
    document["benchmarks"] += [
        entry for identity, entry in before.records.items() if identity not in today | skipped
    ]
    document["moe_bench"]["skipped"] += [
        {"id": identity, "reason": reason}
        for identity, reason in before.skipped.items()
        if identity not in today | skipped
    ]
    document["moe_bench"]["partial"] = False


def _changes(
    entries: Mapping[str, dict[str, Any]],
    statuses: Mapping[str, dict[str, Any]],
    before: baseline.Baseline | None,
) -> list[dict[str, Any]]:
    """Old and new figures of each cell that is not unchanged."""
    found = []
    for identity, cell in statuses.items():
        if cell["status"] == "unchanged":
            continue
        old = before.records.get(identity, {}).get("extra_info", {}) if before else {}
        new = entries.get(identity, {}).get("extra_info", {})
        figures = {name: [old.get(name), new.get(name)] for name in ("temp_bytes", "flops", "median_ms")}
        found.append({"id": identity, "status": cell["status"], "reasons": cell["reasons"], **figures})
    return found
