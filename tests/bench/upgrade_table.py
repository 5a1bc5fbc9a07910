"""The table of an upgrade: a line a cell, what it was -> what it is, and the word on it all."""

from . import markdown as markdowns
from . import report, wording
from .gate import drift
from .gate.verdict import CellVerdict, Verdict

HEADINGS = ("verdict", "cell", "temp MiB", "flops", "time", "compile s", "rel_err", "drift")
UNSAFE = ("wrong", "missing", "regressed", "inconclusive")


def lines(verdict: Verdict) -> list[str]:
    """For a terminal, reasons under their cells."""
    cells = wording.worst_first(verdict.cells)
    if not cells:
        return [verdict.baseline]
    headings, *rows = report.aligned([HEADINGS, *(_row(cell, verdict) for cell in cells)])
    out = [verdict.baseline, headings]
    for row, cell in zip(rows, cells, strict=True):
        out += [row, *(f"      {reason}" for reason in cell.reasons)]
    return out


def markdown(verdict: Verdict) -> str:
    """For people who read it elsewhere; the reasons stand in the verdict's own table."""
    return markdowns.table([HEADINGS, *(_row(cell, verdict) for cell in wording.worst_first(verdict.cells))])


def word(verdict: Verdict, code: int) -> str:
    """`safe`, or which cells say otherwise."""
    found = [cell for cell in wording.worst_first(verdict.cells) if cell.status in UNSAFE]
    if found:
        return f"not safe: these cells: {', '.join(f'{cell.id} ({cell.status})' for cell in found)}"
    if code:
        return "not safe: nothing was compared"
    return "safe, as far as it was compared" if verdict.partial else "safe"


def _row(cell: CellVerdict, verdict: Verdict) -> tuple[str, ...]:
    return (
        cell.status,
        cell.id,
        wording.pair(cell, "xla_temp_mb", "{:.2f}"),
        wording.pair(cell, "flops", "{:.4g}"),
        wording.side_by_side(cell.timing),
        wording.pair(cell, "compile_s", "{:.2f}"),
        wording.pair(cell, "rel_err_out", "{:.1e}"),
        _drift(cell, verdict),
    )


def _drift(cell: CellVerdict, verdict: Verdict) -> str:
    """Which of the two moved the cell: how it is lowered, or how that is compiled."""
    if cell.today is None:
        return ""
    names = {"jax": "lowering", "compiler": "compiler"}
    found = [
        f"{names[its.kind]}{' (text)' if its.text.endswith(drift.SAME_FIGURES) else ''}"
        for its in verdict.drift
        if its.id == cell.id
    ]
    return ", ".join(found) or "none"
