"""The verdict as Markdown, for a pull request or a job's summary."""

from . import wording
from .gate.verdict import CellVerdict, Verdict

MOST = 100
"""Rows of a table, and notes: GitHub takes a comment of 65,536 characters."""
QUIET = ("skipped", "unchanged")


def text(verdict: Verdict, exit_code: int) -> str:
    """The whole text. What is unchanged, or skipped with a reason, is folded away with the environment."""
    told = [cell for cell in wording.worst_first(verdict.cells) if cell.status not in QUIET]
    quiet = [cell for cell in wording.worst_first(verdict.cells) if cell.status in QUIET]
    blocks = [
        f"## {wording.headline(verdict)}",
        f"{wording.compared(verdict)} with {_code(verdict.baseline)}; exit code {exit_code}",
        f"**PARTIAL**: {wording.PARTIAL}" if verdict.partial else "",
        _bullets([f"**integrity**: {_escaped(fault)}" for fault in verdict.faults]),
        _table(told),
        _bullets([f"**{line}**" for line in wording.accepted(verdict, _escaped)]),
        _bullets(wording.drift(verdict, as_id=_code, as_text=_escaped)),
        _bullets([f"note: {_escaped(note)}" for note in verdict.notes]),
        _bullets([f"{what}: `{command}`" for what, command in wording.accept(verdict)]),
        _details("The other cells", _table(quiet)),
        _details("Environment of this run", _environment(verdict)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(cells: list[CellVerdict]) -> str:
    if not cells:
        return ""
    rows = [
        (
            wording.status(cell),
            _code(cell.id),
            *wording.figures(cell),
            "<br>".join(map(_escaped, cell.reasons)),
        )
        for cell in cells
    ]
    return table(wording.filled((*wording.HEADINGS, "why"), rows))


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows, the headings first; at most MOST of them."""
    headings, *body = rows
    lines = [_row(headings), _row(("---",) * len(headings)), *map(_row, body[:MOST])]
    return "\n".join(lines) + (f"\n\nand {len(body) - MOST} more" if len(body) > MOST else "")


def _environment(verdict: Verdict) -> str:
    known = {name: value for name, value in verdict.environment.items() if value is not None}
    return _bullets([f"{_escaped(name)}: {_escaped(str(value))}" for name, value in known.items()])


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>" if body else ""


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _bullets(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in wording.some(items, MOST))


def _code(identity: str) -> str:
    """Between backticks, where only a pipe still splits a table's cell."""
    return f"`{identity.replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _escaped(words: str) -> str:
    """One line of plain words: no pipe, tag, emphasis or code of theirs is taken for ours."""
    for sign in ("\\", "`", "*", "|"):
        words = words.replace(sign, f"\\{sign}")
    return " ".join(words.replace("&", "&amp;").replace("<", "&lt;").split())
