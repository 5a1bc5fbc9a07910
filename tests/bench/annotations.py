"""The verdict for GitHub: annotations at the suites' files, and the Markdown in the job's summary."""

from collections.abc import Mapping
from pathlib import Path

from . import home, markdown, wording
from .gate.verdict import CellVerdict, Verdict

LEVELS = {
    "wrong": "error",
    "missing": "error",
    "regressed": "error",
    "inconclusive": "warning",
    "improved": "notice",
    "new": "notice",
}
"""The statuses that are annotated, in the order in which they are shown."""
MOST = 10
"""GitHub shows this many annotations of a level in a step, and drops the rest without a word."""


def to_github(verdict: Verdict, exit_code: int, environ: Mapping[str, str]) -> list[str]:
    """Appends to the job's summary, and returns the lines to print; does nothing outside GitHub Actions."""
    if environ.get("GITHUB_ACTIONS") != "true":
        return []
    out = lines(verdict, exit_code)
    summary = environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8", newline="\n") as file:
                file.write("\n" + markdown.text(verdict, exit_code))
        except OSError as error:  # The verdict stands without it.
            out.append(command("warning", f"{summary} cannot be written to: {error.strerror or error}"))
    return out


def lines(verdict: Verdict, exit_code: int) -> list[str]:
    """An annotation for each fault and each cell of LEVELS; where none says why the run failed, one does."""
    found: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    found["error"] += [command("error", fault, title="integrity") for fault in verdict.faults]
    for status, level in LEVELS.items():
        for cell in verdict.cells:
            if cell.status == status:
                its = "notice" if cell.accepted else level
                found[its].append(_of_cell(its, cell, verdict.accepted))
    if exit_code and not found["error"] and not found["warning"]:
        partial = f" (PARTIAL: {wording.PARTIAL})" if verdict.partial else ""
        found["error"].append(
            command("error", f"exit code {exit_code}: {wording.headline(verdict)}{partial}")
        )
    for level, those in found.items():
        if len(those) > MOST:
            more = f"and {len(those) - MOST + 1} more; the job's summary has them"
            those[MOST - 1 :] = [command(level, more)]
    return [line for those in found.values() for line in those]


def command(level: str, message: str, **properties: str) -> str:
    """One workflow command: `level` is error, warning or notice; properties are title, file and the like."""
    named = {"title": "moe bench"} | properties
    fields = ",".join(f"{name}={_property(value)}" for name, value in named.items())
    return f"::{level} {fields}::{_data(message)}"


def _of_cell(level: str, cell: CellVerdict, accepted: str | None) -> str:
    suite = cell.id.partition("/")[0] if "/" in cell.id else "layer"
    lines = [*cell.reasons, *([f"accepted: {accepted}"] if cell.accepted else [])]
    title = f"{wording.status(cell)}: {cell.id}"
    file = {} if home.INSTALLED else {"file": f"{home.SHOWN}/test_{suite}.py"}
    return command(level, "\n".join(lines) or title, **file, title=title)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
